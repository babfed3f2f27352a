"""Popping: messages are lent, acknowledged, or come back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.rpc.answers import Reply, Suspend
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode
from tests.unit.broker.broker_kit import House, bodies, house
from tests.unit.broker.pop.pop_kit import REVIVE, Popper, let_pass, pop_settings, stored


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path / "store") as made:
        yield made


@pytest.fixture
def popper(home: House) -> Popper:
    return Popper(home)


def send(home: House, *texts: bytes, queue_id: int = 0, tag: str = "") -> None:
    for text in texts:
        assert home.send(body=text, queue_id=queue_id, tag=tag).code == 0
    home.store.settle()


def test_a_popped_message_is_lent(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    answer = popper.ask()
    assert isinstance(answer, Reply)
    assert answer.code == 0
    assert answer.ext == {
        "popTime": str(home.now_ms), "invisibleTime": "10000", "reviveQid": "1", "restNum": "0",
        "startOffsetInfo": "0 0 0", "msgOffsetInfo": "0 0 0,1",
    }  # fmt: skip
    assert answer.remark == "FOUND"
    assert bodies(answer) == [b"a", b"b"]
    assert popper.pop() == []
    assert Popper(home, group="Other").bodies() == [b"a", b"b"]


def test_an_acknowledged_message_never_comes_again(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    first, second = popper.pop()
    assert popper.ack(first).code == 0
    assert popper.ack(first).code == 0
    let_pass(home, 11_000)
    assert popper.bodies() == [b"b"]
    assert popper.ack(second).code == 0  # too late: it has been brought back


def test_what_is_not_acknowledged_comes_back(home: House, popper: Popper) -> None:
    send(home, b"a", queue_id=2, tag="vip")
    (popped,) = popper.pop()
    let_pass(home, 9_999)
    assert popper.pop() == []
    let_pass(home, 1)
    home.store.settle()
    (again,) = popper.pop()
    assert (again.body, again.message.topic, again.message.tags) == (b"a", "T", "vip")
    assert again.message.reconsume_times == 1
    assert again.message.properties["1ST_POP_TIME"] == str(popped.receipt.pop_ms)
    assert again.message.born_ms == popped.message.born_ms
    assert again.receipt.kind == "1"
    assert popper.ack(again).code == 0
    let_pass(home, 60_000)
    assert popper.pop() == []
    assert len(home.broker.pop.journal.loans) == 0


def test_it_comes_again_and_again(home: House, popper: Popper) -> None:
    send(home, b"a")
    for times in range(5):
        (popped,) = popper.pop()
        assert popped.message.reconsume_times == times
        assert popped.message.topic == "T"
        let_pass(home, 10_000)
        home.store.settle()
    assert len(stored(home, "%RETRY%G_T")) == 5


def test_the_journal_is_written_as_rocketmq_does(home: House, popper: Popper) -> None:
    send(home, b"a", b"b", b"c")
    popped = popper.pop()
    popper.ack(popped[0])
    popper.ack_batch(popped[1:])
    queue_id = popped[0].receipt.revive_queue_id
    texts = [(m.tags, m.body.decode()) for m in stored(home, REVIVE, queue_id)]
    ms = home.now_ms
    assert texts == [
        ("ck", f'{{"bm":0,"bn":"broker-a","c":"G","d":[0,1,2],"it":10000,"n":3,"pt":{ms},"q":0,'
         '"ro":0,"so":0,"t":"T"}'),
        ("ack", f'{{"ao":0,"bn":"broker-a","c":"G","pt":{ms},"q":0,"so":0,"t":"T"}}'),
        ("bAck", f'{{"ao":0,"aol":[1,2],"bn":"broker-a","c":"G","pt":{ms},"q":0,"so":0,"t":"T"}}'),
    ]  # fmt: skip


def test_progress_is_seen_by_tools(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    popper.pop(maxMsgNums=1)
    assert home.context.offsets.get("G", "T", 0) == 1
    reply = home.ask(
        RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": "G", "topic": "T", "queueId": "0"}
    )
    assert reply.ext == {"offset": "1"}


def test_a_group_changes_between_pull_and_pop(home: House, popper: Popper) -> None:
    send(home, *[b"%d" % n for n in range(6)])
    assert popper.bodies(maxMsgNums=2) == [b"0", b"1"]
    assert bodies(home.pull(2, maxMsgNums=2, commitOffset=4, flags=5)) == [b"2", b"3"]
    assert popper.bodies() == [b"4", b"5"]


def test_all_queues_are_popped(home: House, popper: Popper) -> None:
    for queue_id in range(4):
        send(home, b"%d" % queue_id, queue_id=queue_id)
    assert sorted(popper.bodies()) == [b"0", b"1", b"2", b"3"]
    for queue_id in range(4):
        send(home, b"%d" % queue_id, queue_id=queue_id)
    assert popper.bodies(queueId=2) == [b"2"]
    answer = popper.ask(maxMsgNums=2)
    assert isinstance(answer, Reply)
    assert len(bodies(answer)) == 2
    assert answer.ext is not None
    assert answer.ext["restNum"] == "1"


def test_pops_begin_at_different_queues(home: House, popper: Popper) -> None:
    for queue_id in range(4):
        send(home, *[b"%d" % queue_id] * 4, queue_id=queue_id)
    assert len({popper.bodies(maxMsgNums=1)[0] for _ in range(4)}) == 4


def test_a_pop_is_small(home: House, popper: Popper) -> None:
    send(home, b"a")
    assert home.handle(RequestCode.POP_MESSAGE).code == 29  # type: ignore[union-attr]
    for changes in (
        {"maxMsgNums": 33}, {"queueId": 4}, {"invisibleTime": -1}, {"invisibleTime": 1 << 40},
    ):  # fmt: skip
        answer = popper.ask(**changes)
        assert isinstance(answer, Reply)
        assert answer.code == 29, changes
    answer = Popper(home, topic="Unknown").ask()
    assert isinstance(answer, Reply)
    assert answer.code == 17
    assert len(popper.bodies()) == 1


def test_large_messages_come_in_several_pops(tmp_path: Path) -> None:
    with house(tmp_path / "store", pop_settings(pull_bytes_max=1500)) as home:
        popper = Popper(home)
        send(home, *[b"x" * 600] * 4)
        assert [len(popper.bodies()) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_a_late_pop_is_not_served(home: House, popper: Popper) -> None:
    send(home, b"a")
    answer = popper.ask(bornTime=home.now_ms - 15_501, pollTime=15_000)
    assert isinstance(answer, Reply)
    assert answer.code == 210
    assert popper.bodies() == [b"a"]


def test_rights_are_checked(home: House, popper: Popper) -> None:
    send(home, b"a")
    home.context.topics.put(
        TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4, perm=2), home.now_ms
    )
    answer = popper.ask()
    assert isinstance(answer, Reply)
    assert answer.code == 16


# --- where a group begins


@pytest.mark.parametrize(("mode", "found"), [(0, [b"0", b"1", b"2"]), (1, [b"0", b"1", b"2"])])
def test_a_young_queue_is_popped_from_its_beginning(
    home: House, popper: Popper, mode: int, found: list[bytes]
) -> None:
    send(home, b"0", b"1", b"2")
    assert popper.bodies(initMode=mode) == found


def test_else_a_group_begins_with_the_newest(tmp_path: Path) -> None:
    with house(tmp_path / "store", pop_settings(pop_first_if_young=False)) as home:
        send(home, b"0", b"1", b"2")
        assert Popper(home).bodies(initMode=1) == [b"2"]
        assert Popper(home, group="H").bodies(initMode=0) == [b"0", b"1", b"2"]


# --- filters


def test_tags_are_filtered(home: House, popper: Popper) -> None:
    send(home, b"0", b"1", tag="a")
    send(home, b"2", tag="b")
    send(home, b"3", tag="c")
    send(home, b"4", tag="b")
    popped = popper.pop(exp="b || x", expType="TAG")
    assert [one.body for one in popped] == [b"2", b"4"]
    assert [one.receipt.queue_offset for one in popped] == [2, 4]
    assert home.context.offsets.get("G", "T", 0) == 5
    let_pass(home, 10_000)
    home.store.settle()
    assert popper.bodies(exp="b || x", expType="TAG") == [b"2", b"4"]


def test_properties_are_filtered(home: House, popper: Popper) -> None:
    for number in range(6):
        home.send(body=b"%d" % number, properties={"n": str(number)})
    home.store.settle()
    assert popper.bodies(exp="n > 2 AND n <> 4", expType="SQL92") == [b"3", b"5"]


@pytest.mark.parametrize(("kind", "text"), [("SQL92", "n >"), ("TAG", "||")])
def test_a_bad_expression_is_refused(home: House, popper: Popper, kind: str, text: str) -> None:
    send(home, b"a")
    answer = popper.ask(exp=text, expType=kind)
    assert isinstance(answer, Reply)
    assert answer.code == 23
    assert popper.bodies() == [b"a"]


def test_what_nobody_wants_is_passed_over(home: House, popper: Popper) -> None:
    send(home, *[b"x"] * 1200, tag="no")
    send(home, b"yes", tag="yes")
    assert popper.bodies(exp="yes", pollTime=15_000) == [b"yes"]


# --- retry topics


def test_the_second_kind_of_retry_topics(tmp_path: Path) -> None:
    settings = pop_settings()
    with house(tmp_path / "store", settings) as home:
        popper = Popper(home)
        send(home, b"a", b"b")
        popper.pop(maxMsgNums=1)
        let_pass(home, 10_000)  # a lies in the first kind
        home.live.change({"enableRetryTopicV2": "true"})
        assert popper.bodies(maxMsgNums=1) == [b"b"]
        let_pass(home, 10_000)
        home.store.settle()
        assert home.context.topics.get("%RETRY%G+T") is not None
        found = [one for _ in range(2) for one in popper.pop()]
        assert sorted((one.body, str(one.receipt.kind)) for one in found) == [
            (b"a", "1"), (b"b", "2"),
        ]  # fmt: skip
        popper.ack_all(found)
        let_pass(home, 60_000)
        assert popper.pop() == []


def test_a_share_of_pops_looks_for_retries_first(home: House, popper: Popper) -> None:
    send(home, *[b"old"] * 10)
    popper.pop(maxMsgNums=10)
    let_pass(home, 10_000)
    send(home, *[b"new"] * 100)
    found = [popper.bodies(maxMsgNums=1)[0] for _ in range(25)]
    assert found.count(b"old") == 5


def test_the_retry_topic_is_shown_on_demand(tmp_path: Path) -> None:
    with house(tmp_path / "store", pop_settings(pop_retry_topic_shown=True)) as home:
        popper = Popper(home)
        send(home, b"a")
        popper.pop()
        let_pass(home, 10_000)
        home.store.settle()
        (again,) = popper.pop()
        assert again.message.topic == "%RETRY%G_T"
        assert popper.ack(again).code == 0
        let_pass(home, 20_000)
        assert popper.pop() == []


# --- limits


def test_too_many_open_batches_are_refused(tmp_path: Path) -> None:
    with house(tmp_path / "store", pop_settings(pop_batches_max=2)) as home:
        popper = Popper(home)
        send(home, b"a", b"b", b"c")
        first = popper.pop(maxMsgNums=1)
        popper.pop(maxMsgNums=1)
        answer = popper.ask()
        assert isinstance(answer, Reply)
        assert answer.code == 2
        assert "pop_batches_max" in (answer.remark or "")
        popper.ack_all(first)
        assert popper.bodies() == [b"c"]


def test_a_group_gets_no_more_than_it_may_have_open(tmp_path: Path) -> None:
    settings = pop_settings(pop_in_flight_limited=True, pop_in_flight_max=2)
    with house(tmp_path / "store", settings) as home:
        popper = Popper(home)
        send(home, *[b"%d" % n for n in range(8)])
        popped = popper.pop(maxMsgNums=3)
        assert popper.pop(maxMsgNums=3) == []
        popper.hold()
        popper.ack(popped[0])
        assert [one.body for one in popper.read(home.woken[0])] == [b"3", b"4", b"5", b"6", b"7"]


# --- offsets


def test_a_reset_works_for_pops(home: House, popper: Popper) -> None:
    send(home, b"0", b"1", b"2")
    popper.ack_all(popper.pop())
    ext = {
        "topic": "T", "group": "G", "queueId": "0", "offset": "1", "timestamp": "0",
        "isForce": "true",
    }  # fmt: skip
    assert home.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext).code == 0
    assert popper.bodies() == [b"1", b"2"]
    held = popper.ask(pollTime=15_000)
    assert isinstance(held, Suspend)
    assert home.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext).code == 0
    assert bodies(home.woken[0]) == [b"1", b"2"]
