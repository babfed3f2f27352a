"""Topics: system topics, automatic creation, permissions, deletion."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidParameter, NoPermission, TopicNotExist
from penstock.rpc.answers import PersistSoon, RegisterSoon
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import SEND_FORBIDDEN_TOPICS
from tests.unit.broker.topic_kit import TopicKit, topic_kit
from tests.unit.store.conftest import NOW_MS, bodies


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[TopicKit]:
    with topic_kit(tmp_path / "store") as made:
        yield made


def admit(kit: TopicKit, topic: str, queue_id: int = 0, **template: Any) -> ConsumeQueue:
    asked = {"template": "TBW102", "template_queues": 4, "client": 1, **template}
    return kit.topics.writable_queue(topic, queue_id, now_ms=NOW_MS, **asked)


def test_a_broker_has_the_topics_of_apache_5_4(kit: TopicKit) -> None:
    found = {
        name: (config.read_queue_nums, config.write_queue_nums, config.perm)
        for name, config in kit.topics.table.topics.items()
    }
    assert found == {
        "SELF_TEST_TOPIC": (1, 1, 6),
        "TBW102": (8, 8, 7),
        "BenchmarkTest": (1024, 1024, 6),
        "DefaultCluster": (16, 16, 7),
        "broker-a": (1, 1, 7),
        "OFFSET_MOVED_EVENT": (1, 1, 6),
        "SCHEDULE_TOPIC_XXXX": (18, 18, 6),
        "RMQ_SYS_TRACE_TOPIC": (1, 1, 6),
        "DefaultCluster_REPLY_TOPIC": (1, 1, 6),
        "rmq_sys_REVIVE_LOG_DefaultCluster": (8, 8, 6),
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a": (1, 1, 1),
        "RMQ_SYS_TRANS_HALF_TOPIC": (1, 1, 6),
        "RMQ_SYS_TRANS_OP_HALF_TOPIC": (1, 1, 6),
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC": (1, 1, 6),
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC": (1, 1, 6),
        "rmq_sys_wheel_timer": (1, 1, 6),
    }
    assert all(kit.topics.is_system(name) for name in found)
    assert set(found) <= set(kit.topics.system_names())


def test_seeding_keeps_loaded_topics(kit: TopicKit) -> None:
    changed = TopicConfig(topic_name="TBW102", read_queue_nums=3, write_queue_nums=3, perm=6)
    kit.topics.put(changed, NOW_MS)
    kit.topics.seed()
    assert kit.topics.get("TBW102") == changed


def test_template_and_trace_topic_follow_the_settings(tmp_path: Path) -> None:
    with topic_kit(tmp_path / "s", auto_create_topics=False, trace_topic=False) as kit:
        assert kit.topics.get("TBW102") is None
        assert kit.topics.get("RMQ_SYS_TRACE_TOPIC") is None
        kit.set(auto_create_topics=True)
        kit.topics.refresh(NOW_MS)
        assert kit.topics.get("TBW102") is not None
        assert RegisterSoon() in kit.effects.take()


# --- sending


def test_a_send_creates_the_topic_from_the_template(kit: TopicKit) -> None:
    version = kit.topics.table.version
    queue = admit(kit, "Orders", 3)
    assert (queue.topic, queue.queue_id, queue.writable) == (b"Orders", 3, True)
    config = kit.topics.need("Orders")
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (4, 4, 6)
    assert kit.topics.table.version.counter == version.counter + 1
    assert kit.effects.take() == [PersistSoon(kit.topics.table), RegisterSoon()]
    admit(kit, "Orders", 1)
    assert kit.effects.take() == []


def test_a_template_limits_the_number_of_queues(kit: TopicKit) -> None:
    admit(kit, "Orders", template_queues=1000)
    assert kit.topics.need("Orders").write_queue_nums == 8
    admit(kit, "Others", template="broker-a", template_queues=7)
    assert kit.topics.need("Others").write_queue_nums == 1


@pytest.mark.parametrize("template", ["", "nothing", "BenchmarkTest"])
def test_a_template_without_inherit_permission_creates_nothing(
    kit: TopicKit, template: str
) -> None:
    with pytest.raises(TopicNotExist, match="Orders does not exist") as raised:
        admit(kit, "Orders", template=template)
    assert "penstock topic create" in raised.value.remark()
    assert kit.effects.take() == []


def test_the_number_of_topics_is_limited(kit: TopicKit) -> None:
    kit.set(topics_max=len(kit.topics.table.topics) + 1)
    admit(kit, "Orders")
    with pytest.raises(InvalidParameter, match=r"too many topics: .*\(topics_max\)"):
        admit(kit, "Others")
    assert kit.topics.get("Others") is None
    admit(kit, "Orders", 1)
    admit(kit, "%RETRY%coupons", template="")  # what the broker needs is created nevertheless
    list(kit.topics.delete("Orders", NOW_MS))
    kit.set(topics_max=len(kit.topics.table.topics) + 1)
    admit(kit, "Others")


def test_without_auto_creation_a_send_creates_only_retry_topics(kit: TopicKit) -> None:
    kit.set(auto_create_topics=False)
    with pytest.raises(TopicNotExist):
        admit(kit, "Orders")
    admit(kit, "%RETRY%coupons")
    assert kit.topics.need("%RETRY%coupons").write_queue_nums == 1


@pytest.mark.parametrize("topic", sorted(SEND_FORBIDDEN_TOPICS))
def test_sends_to_system_topics_are_refused(kit: TopicKit, topic: str) -> None:
    with pytest.raises(NoPermission):
        admit(kit, topic)


@pytest.mark.parametrize("topic", ["", " ", "a b", "../etc", "Ünicode", "t" * 128])
def test_an_invalid_name_is_refused(kit: TopicKit, topic: str) -> None:
    with pytest.raises(InvalidParameter):
        admit(kit, topic)
    assert kit.effects.take() == []


def test_a_queue_out_of_range_is_refused(kit: TopicKit) -> None:
    with pytest.raises(InvalidParameter, match="no queue 4: it has 4"):
        admit(kit, "Orders", 4)


def test_a_queue_below_the_number_of_read_queues_is_writable(kit: TopicKit) -> None:
    kit.topics.put(TopicConfig(topic_name="t", read_queue_nums=8, write_queue_nums=4), NOW_MS)
    assert admit(kit, "t", 7).queue_id == 7


def test_a_negative_queue_id_selects_writable_queues_in_round_robin(kit: TopicKit) -> None:
    kit.topics.put(TopicConfig(topic_name="t", read_queue_nums=8, write_queue_nums=4), NOW_MS)
    assert sorted(admit(kit, "t", -1).queue_id for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    kit.topics.put(TopicConfig(topic_name="t", read_queue_nums=8, write_queue_nums=0), NOW_MS)
    with pytest.raises(InvalidParameter, match="no writable queue"):
        admit(kit, "t", -1)


def test_a_topic_without_write_permission_refuses_sends(kit: TopicKit) -> None:
    kit.topics.put(TopicConfig(topic_name="t", perm=4), NOW_MS)
    with pytest.raises(NoPermission, match="permission is 4"):
        admit(kit, "t")


def test_a_broker_without_write_permission_refuses_ordered_topics(kit: TopicKit) -> None:
    kit.topics.put(TopicConfig(topic_name="ordered", order=True), NOW_MS)
    kit.topics.put(TopicConfig(topic_name="plain"), NOW_MS)
    kit.set(permission=4)
    with pytest.raises(NoPermission, match="ordered"):
        admit(kit, "ordered")
    assert admit(kit, "plain").writable


def test_cached_write_permissions_are_dropped_when_a_topic_or_the_broker_changes(
    kit: TopicKit,
) -> None:
    mine, other = admit(kit, "t", 3), admit(kit, "u")
    kit.topics.put(TopicConfig(topic_name="t", read_queue_nums=2, write_queue_nums=2), NOW_MS)
    assert (mine.writable, other.writable) == (False, True)
    kit.topics.recheck_queues()
    assert not other.writable


# --- reading


def test_an_empty_queue_is_readable(kit: TopicKit) -> None:
    admit(kit, "t")
    queue = kit.topics.readable_queue("t", 2)
    assert queue is kit.topics.readable_queue("t", 2)
    assert not queue.writable


def test_reads_without_permission_are_refused(kit: TopicKit) -> None:
    with pytest.raises(TopicNotExist):
        kit.topics.readable_queue("t", 0)
    kit.topics.put(TopicConfig(topic_name="t", read_queue_nums=2, write_queue_nums=4), NOW_MS)
    for queue_id in (-1, 2):
        with pytest.raises(InvalidParameter, match="it has 2 readable"):
            kit.topics.readable_queue("t", queue_id)
    kit.topics.put(TopicConfig(topic_name="t", perm=2), NOW_MS)
    with pytest.raises(NoPermission, match="permission is 2"):
        kit.topics.readable_queue("t", 0)
    kit.set(permission=2)
    with pytest.raises(NoPermission, match="broker-a"):
        kit.topics.readable_queue("TBW102", 0)


# --- ensuring and deleting


def test_ensure_creates_once(kit: TopicKit) -> None:
    made = kit.topics.ensure("%RETRY%g", 2, 6, NOW_MS)
    assert (made.read_queue_nums, made.perm) == (2, 6)
    assert kit.effects.take() == [PersistSoon(kit.topics.table), RegisterSoon()]
    assert kit.topics.ensure("%RETRY%g", 5, 4, NOW_MS) == made
    assert kit.effects.take() == []


def test_a_deleted_topic_can_be_created_again(kit: TopicKit) -> None:
    admit(kit, "t")
    kit.send("t", "old 1", "old 2")
    kit.effects.take()
    queues = list(kit.topics.delete("t", NOW_MS))
    assert [queue.writable for queue in queues] == [False]
    assert kit.effects.take() == [PersistSoon(kit.topics.table), RegisterSoon()]
    with pytest.raises(TopicNotExist):
        kit.topics.readable_queue("t", 0)
    assert admit(kit, "t").max_offset == 0
    kit.send("t", "new")
    kit.store.finish_removal()
    assert bodies(kit.store) == [b"new"]
    assert list(kit.topics.delete("never there", NOW_MS)) == []
