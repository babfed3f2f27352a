"""Administration of topics by mqadmin."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.long_polling import SuspendedRequest
from penstock.errors import BodyError, StoreError, SystemBusy
from penstock.rpc.answers import (
    Answer,
    InThread,
    NextIteration,
    PersistSoon,
    RegisterSoon,
    RegisterTopics,
    Reply,
    Suspend,
)
from penstock.rpc.command import Command
from penstock.rpc.steps import STEP_ITEMS
from penstock.store.tables.config_tables import TopicTable
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import CreateTopicListRequestBody
from penstock.wire.bodies.client_bodies import DataVersion, TopicConfig, TopicList
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import ResponseCode
from tests.unit.broker.topic_kit import TopicKit, topic_kit
from tests.unit.store.conftest import NOW_MS, bodies

CREATE, CREATE_LIST, STATIC, DELETE, GET, GET_ALL, SYSTEM = 17, 18, 513, 215, 351, 21, 305
INVALID = ResponseCode.INVALID_PARAMETER


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[TopicKit]:
    with topic_kit(tmp_path / "store") as made:
        yield made


def saved(kit: TopicKit) -> TopicTable:
    """The topics that a restarted broker loads."""
    table = TopicTable()
    assert table.load(kit.persistence.file(table.FILE))
    return table


def table_of(reply: Reply) -> TopicConfigAndMappingSerializeWrapper:
    assert reply.code == 0
    return fastjson.decode(reply.body, TopicConfigAndMappingSerializeWrapper)


# --- create and change


def test_a_created_topic_is_saved_before_the_response(kit: TopicKit) -> None:
    assert kit.create("Orders", readQueueNums=4, writeQueueNums=3, order="true") == Reply()
    config = TopicConfig(
        topic_name="Orders", read_queue_nums=4, write_queue_nums=3, perm=6, order=True
    )
    assert kit.topics.get("Orders") == config
    assert saved(kit).get("Orders") == config
    assert kit.effects.take() == [PersistSoon(kit.topics.table), RegisterSoon()]


def test_a_created_topic_is_registered_before_the_response(kit: TopicKit) -> None:
    fields = {"topic": "Orders", "readQueueNums": "4", "writeQueueNums": "4", "perm": "6"}
    answer = kit.router.handle(Command(17, fields, now_ms=NOW_MS))
    assert isinstance(answer, InThread), "first it is written"
    known = answer.then(answer.work())
    assert isinstance(known, RegisterTopics)
    assert (known.topics, known.deadline_ms) == (("Orders",), NOW_MS + 3_000)
    assert known.then() == Reply()
    again = kit.router.handle(Command(17, fields, now_ms=NOW_MS))
    assert isinstance(again, RegisterTopics), "the one who was first may still wait"


def test_a_deleted_topic_is_registered_before_the_response(kit: TopicKit) -> None:
    kit.create("Orders")
    answer = kit.router.handle(Command(215, {"topic": "Orders"}, now_ms=NOW_MS))
    assert isinstance(answer, InThread)
    known = answer.then(answer.work())
    assert isinstance(known, RegisterTopics)
    assert (known.topics, known.deadline_ms) == ((), NOW_MS + 3_000)


def test_a_long_list_is_processed_in_steps(kit: TopicKit, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    put, done = kit.topics.put, 0

    def count(config: TopicConfig, now_ms: int) -> None:
        nonlocal done
        done += 1
        put(config, now_ms)

    monkeypatch.setattr(kit.topics, "put", count)
    names = [f"t{n}" for n in range(2 * STEP_ITEMS + 1)]
    body = CreateTopicListRequestBody(
        topic_config_list=[TopicConfig(topic_name=name) for name in names]
    )
    answer = kit.router.handle(Command(18, {}, fastjson.encode(body), now_ms=NOW_MS))
    while isinstance(answer, InThread | NextIteration):
        before = done
        answer = answer.then(answer.work()) if isinstance(answer, InThread) else answer.then()
        steps.append(done - before)
    assert isinstance(answer, RegisterTopics)
    assert answer.topics == tuple(names)
    assert max(steps) == STEP_ITEMS
    assert sum(steps) == len(names)
    assert saved(kit).get(names[-1]) is not None


def test_creating_the_same_topic_again_changes_nothing(kit: TopicKit) -> None:
    kit.create("Orders")
    version = kit.topics.table.version
    kit.effects.take()
    assert kit.create("Orders") == Reply()
    assert kit.topics.table.version == version
    assert kit.effects.take() == []


def test_a_change_takes_effect_on_the_next_send(kit: TopicKit) -> None:
    kit.create("Orders")
    queue = kit.topics.writable_queue(
        "Orders", 0, template="", template_queues=0, client=1, now_ms=NOW_MS
    )
    kit.create("Orders", perm=4)
    assert not queue.writable


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"topic": "a b"}, "contains ' '"),
        ({"topic": "TBW102"}, "system topic"),
        ({"topic": "rmq_sys_anything"}, "system topic"),
        ({"topic": "DefaultCluster"}, "system topic"),
        ({"readQueueNums": -1}, "read queues must not be negative"),
        ({"writeQueueNums": 1 << 21}, "2097152 queues, the limit is 1048576"),
        ({"perm": 64}, "permission 64"),
        ({"perm": "six"}, "perm is not a number"),
        ({"topicFilterType": "SOME"}, "filter type"),
        ({"attributes": "+colour=red"}, "unknown attribute 'colour'"),
        ({"attributes": "+message.type=LOUD"}, "one of UNSPECIFIED, NORMAL"),
        ({"attributes": "+message.type=MIXED"}, "does not support"),
        ({"attributes": "+queue.type=BatchCQ"}, "does not support"),
        ({"attributes": "+cleanup.policy=COMPACTION"}, "does not support"),
        ({"attributes": "+reserve.time=-2"}, "a number from -1 to"),
        ({"attributes": "-message.type"}, "it is not set"),
        ({"attributes": "message.type=FIFO"}, "not a valid change"),
        ({"attributes": "+message.type"}, "not a valid change"),
        ({"attributes": "+message.type=FIFO,+message.type=FIFO"}, "twice"),
    ],
)
def test_an_invalid_topic_is_refused(kit: TopicKit, change: dict[str, Any], says: str) -> None:
    reply = kit.create(change.pop("topic", "Orders"), **change)
    assert reply.code == INVALID
    assert says in (reply.remark or "")
    assert kit.topics.get("Orders") is None
    assert kit.effects.take() == []


def test_attributes_are_set_changed_and_removed(kit: TopicKit) -> None:
    kit.create("Orders", attributes="+message.type=FIFO,+queue.type=SimpleCQ")
    assert kit.topics.need("Orders").attributes == {
        "message.type": "FIFO",
        "queue.type": "SimpleCQ",
    }
    assert kit.create("Orders", attributes="+message.type=DELAY").code == 0
    assert kit.create("Orders", perm=4).code == 0
    assert kit.topics.need("Orders").attributes["message.type"] == "DELAY"
    assert kit.create("Orders", attributes="-message.type").code == 0
    assert saved(kit).topics["Orders"].attributes == {"queue.type": "SimpleCQ"}
    for change in ("+queue.type=SimpleCQ", "-queue.type"):
        reply = kit.create("Orders", attributes=change)
        assert reply.code == INVALID
        assert "can't be changed" in (reply.remark or "")


def test_tools_do_not_create_more_topics_than_the_limit(kit: TopicKit) -> None:
    kit.set(topics_max=len(kit.topics.table.topics) + 1)
    assert kit.create("Orders") == Reply()
    refused = kit.create("Others")
    assert refused.code == INVALID
    assert "(topics_max)" in (refused.remark or "")
    assert kit.topics.get("Others") is None
    assert kit.create("Orders", readQueueNums=9) == Reply()  # a change creates nothing


def test_tools_do_not_create_more_queues_than_the_limit(kit: TopicKit) -> None:
    kit.set(queues_max=kit.topics.table.queues + 20)
    assert kit.create("Orders", readQueueNums=8, writeQueueNums=12) == Reply()
    refused = kit.create("Others", readQueueNums=9, writeQueueNums=8)
    assert refused.code == INVALID
    assert "(queues_max)" in (refused.remark or "")
    assert kit.create("Others", readQueueNums=8, writeQueueNums=8) == Reply()
    assert kit.create("Orders", readQueueNums=13, writeQueueNums=12).code == INVALID
    assert kit.create("Orders", readQueueNums=4, writeQueueNums=4) == Reply()  # fewer
    assert kit.create("Others", readQueueNums=16, writeQueueNums=16) == Reply()


def test_the_number_of_queues_follows_the_topics(kit: TopicKit) -> None:
    before = kit.topics.table.queues
    assert before == sum(config.queues for config in kit.topics.table.topics.values())
    assert kit.create("Orders", readQueueNums=8, writeQueueNums=12) == Reply()
    assert saved(kit).queues == kit.topics.table.queues == before + 12
    kit.topics.table.remove("Orders", 0)
    assert kit.topics.table.queues == before


def test_a_list_is_created_completely_or_not_at_all(kit: TopicKit) -> None:
    a = TopicConfig(topic_name="a", attributes={"+message.type": "FIFO"})
    b = TopicConfig(topic_name="b", read_queue_nums=2, write_queue_nums=2)
    bad = TopicConfig(topic_name="b d")
    reply = kit.ask(CREATE_LIST, body=encoded(a, b, bad))
    assert reply.code == INVALID
    assert kit.topics.get("a") is None
    assert kit.ask(CREATE_LIST, body=encoded(a, b)) == Reply()
    assert saved(kit).topics["a"].attributes == {"message.type": "FIFO"}
    assert saved(kit).topics["b"] == b
    assert kit.ask(CREATE_LIST, body=b"{").code == BodyError.code


def encoded(*configs: TopicConfig) -> bytes:
    return fastjson.encode(CreateTopicListRequestBody(topic_config_list=list(configs)))


def test_static_topics_are_refused(kit: TopicKit) -> None:
    reply = kit.ask(STATIC, {"topic": "Orders"})
    assert reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert "updateTopic" in (reply.remark or "")


# --- delete


def test_deleting_a_topic_deletes_config_offsets_queues_and_retry_topics(kit: TopicKit) -> None:
    for topic in ("Orders", "Others", "%RETRY%g_Orders", "%RETRY%g_Others"):
        kit.create(topic)
        kit.send(topic, "message")
        kit.offsets.commit("g", topic, 0, 1, NOW_MS)
    kit.effects.take()
    assert kit.ask(DELETE, {"topic": "Orders"}) == Reply()
    assert RegisterSoon() in kit.effects.take()
    progress = ConsumerOffsetTable()
    progress.load(kit.persistence.file(progress.FILE))
    for topic in ("Orders", "%RETRY%g_Orders"):
        assert kit.topics.get(topic) is None
        assert saved(kit).get(topic) is None
        assert kit.store.queue(topic, 0) is None
        assert not (kit.store.paths.queues / topic).exists()
        assert progress.get(topic, "g", 0) is None
    for topic in ("Others", "%RETRY%g_Others"):
        assert kit.topics.get(topic) is not None
        assert bodies(kit.store, topic) == [b"message"]
        assert progress.get(topic, "g", 0) == 1


def begin_deletion(kit: TopicKit, queues: int) -> NextIteration:
    """Delete a topic with many queues; the answer after the first step."""
    kit.create("Orders", readQueueNums=queues, writeQueueNums=queues)
    for queue_id in range(queues):
        assert kit.store.make_queue(b"Orders", queue_id) is not None
    kit.send("Orders", "old")
    kit.offsets.commit("g", "Orders", 0, 1, NOW_MS)
    answer = kit.router.handle(Command(DELETE, {"topic": "Orders"}, now_ms=NOW_MS))
    assert isinstance(answer, NextIteration)
    return answer


def finished(answer: Answer) -> Answer:
    while isinstance(answer, InThread | NextIteration | RegisterTopics):
        if isinstance(answer, InThread):
            assert answer.work is not None
            answer = answer.then(answer.work())
        else:
            answer = answer.then()
    return answer


def test_a_topic_with_many_queues_is_deleted_in_steps(kit: TopicKit) -> None:
    answer: Answer = begin_deletion(kit, 3 * STEP_ITEMS)
    left = [len(kit.store.queues.of(b"Orders"))]
    assert kit.topics.get("Orders") is None
    while isinstance(answer, NextIteration):
        answer = answer.then()
        left.append(len(kit.store.queues.of(b"Orders")))
    assert left[-1] == 0
    assert all(before - after <= STEP_ITEMS for before, after in pairwise(left))
    assert finished(answer) == Reply()
    assert kit.offsets.get("g", "Orders", 0) is None
    assert not (kit.store.paths.queues / "Orders").exists()


def test_a_topic_can_not_be_created_while_its_queues_are_deleted(kit: TopicKit) -> None:
    answer = begin_deletion(kit, STEP_ITEMS + 1)
    assert kit.create("Orders").code == ResponseCode.SYSTEM_BUSY
    with pytest.raises(SystemBusy, match="being deleted"):
        kit.topics.writable_queue(
            "Orders", 0, template="TBW102", template_queues=4, client=1, now_ms=NOW_MS
        )
    with pytest.raises(SystemBusy, match="being deleted"):
        kit.topics.ensure("Orders", 1, 6, NOW_MS)
    assert kit.store.make_queue(b"Orders", 0) is None
    assert kit.ask(DELETE, {"topic": "Orders"}) == Reply()
    assert finished(answer) == Reply()
    assert kit.create("Orders") == Reply()
    kit.send("Orders", "new")
    assert bodies(kit.store, "Orders") == [b"new"]


def test_a_message_that_is_stored_while_a_topic_is_deleted_does_not_come_back(
    kit: TopicKit,
) -> None:
    answer = begin_deletion(kit, STEP_ITEMS + 101)
    last = kit.store.queues.of(b"Orders")[-1]
    assert not last.deleted
    with pytest.raises(StoreError, match="was deleted"):
        last.ready()
    assert finished(answer) == Reply()
    assert last.deleted
    assert kit.store.deleted_below(b"Orders") == kit.store.log.end


def test_deleting_a_topic_wakes_suspended_pulls(kit: TopicKit) -> None:
    kit.create("Orders")
    woken: list[SuspendedRequest] = []
    kit.long_polling.on_wake(lambda suspended, last: woken.append(suspended))
    queue = kit.topics.readable_queue("Orders", 0)
    kit.long_polling.add(1, "response", Suspend(queue, NOW_MS + 1000, lambda last: Reply()))
    kit.ask(DELETE, {"topic": "Orders"})
    assert [suspended.pending_response for suspended in woken] == ["response"]


def test_deleting_a_missing_topic_succeeds(kit: TopicKit) -> None:
    assert kit.ask(DELETE, {"topic": "Orders"}) == Reply()


@pytest.mark.parametrize("topic", ["", " ", "TBW102", "broker-a", "SCHEDULE_TOPIC_XXXX"])
def test_system_topics_are_not_deleted(kit: TopicKit, topic: str) -> None:
    before = dict(kit.topics.table.topics)
    assert kit.ask(DELETE, {"topic": topic}).code == INVALID
    assert dict(kit.topics.table.topics) == before


# --- read


def test_one_topic_is_returned(kit: TopicKit) -> None:
    kit.create("Orders", attributes="+message.type=FIFO")
    reply = kit.ask(GET, {"topic": "Orders", "lo": "true"})
    assert fastjson.decode(reply.body, TopicConfig) == kit.topics.get("Orders")
    assert b"mappingDetail" not in reply.body
    reply = kit.ask(GET, {"topic": "Nothing"})
    assert reply.code == ResponseCode.TOPIC_NOT_EXIST
    assert "Nothing" in (reply.remark or "")


def test_old_tools_get_the_whole_table(kit: TopicKit) -> None:
    reply = kit.ask(GET_ALL)
    table = table_of(reply)
    assert table.topic_config_table == dict(kit.topics.table.topics)
    assert table.data_version == kit.topics.table.version
    assert reply.ext == {"totalTopicNum": str(len(kit.topics.table.topics))}


def test_new_tools_get_pages(kit: TopicKit) -> None:
    kit.create("Orders")
    names = sorted(kit.topics.table.topics)
    reply = kit.ask(GET_ALL, {"topicSeq": 0, "maxTopicNum": 5})
    assert sorted(table_of(reply).topic_config_table) == names[:5]
    version = fastjson.encode(table_of(reply).data_version).decode()
    got = names[:5]
    while len(got) < len(names):
        ext = {"topicSeq": len(got), "maxTopicNum": 5, "dataVersion": version}
        reply = kit.ask(GET_ALL, ext)
        assert reply.ext == {"totalTopicNum": str(len(names))}
        got += sorted(table_of(reply).topic_config_table)
    assert got == names
    beyond = {"topicSeq": 1000, "maxTopicNum": 5, "dataVersion": version}
    assert table_of(kit.ask(GET_ALL, beyond)).topic_config_table == {}


def test_a_changed_table_starts_again_with_the_first_page(kit: TopicKit) -> None:
    old = fastjson.encode(DataVersion(counter=77)).decode()
    names = sorted(kit.topics.table.topics)
    for version in (old, "", " "):
        reply = kit.ask(GET_ALL, {"topicSeq": 5, "maxTopicNum": 3, "dataVersion": version})
        assert sorted(table_of(reply).topic_config_table) == names[:3]
    assert kit.ask(GET_ALL, {"topicSeq": 0, "dataVersion": "{"}).code == BodyError.code


def test_system_topics_are_listed(kit: TopicKit) -> None:
    listed = fastjson.decode(kit.ask(SYSTEM).body, TopicList).topic_list
    assert {"TBW102", "DefaultCluster", "broker-a", "CHECKPOINT_TOPIC"} <= set(listed)
