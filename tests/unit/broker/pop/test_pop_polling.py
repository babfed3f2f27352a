"""Pops and notifications that wait for messages, and pops whose messages are on the disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.pop import pop_message as pop_module
from penstock.broker.pop import pop_polling
from penstock.broker.pop.pop_reader import Taken, read
from penstock.rpc.answers import Answer, InThread, Reply, Suspend
from penstock.wire.codes import RequestCode
from tests.unit.broker.broker_kit import House, bodies, house
from tests.unit.broker.pop.pop_kit import Popper, let_pass, pop_settings


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path / "store") as made:
        made.send(body=b"make the topic")
        made.store.settle()
        Popper(made).ack_all(Popper(made).pop())
        yield made


@pytest.fixture
def popper(home: House) -> Popper:
    return Popper(home)


def send(home: House, *texts: bytes, queue_id: int = 0) -> None:
    """In one turn of the server."""
    home.many(b"".join(home.send_frame(body=text, queue_id=queue_id) for text in texts))


def waiting(popper: Popper, queue_id: int = -1) -> int:
    ext = {"consumerGroup": popper.group, "topic": popper.topic, "queueId": str(queue_id)}
    reply = popper.home.ask(RequestCode.POLLING_INFO, ext)
    assert reply.ext is not None
    return int(reply.ext["pollingNum"])


@pytest.mark.parametrize("queue_id", [0, 3])
def test_a_pop_waits_for_any_queue(home: House, popper: Popper, queue_id: int) -> None:
    popper.hold()
    assert waiting(popper) == 1
    send(home, b"a", queue_id=queue_id)
    assert bodies(home.woken[0]) == [b"a"]
    assert waiting(popper) == 0


def test_a_pop_of_one_queue_waits_for_it_only(home: House, popper: Popper) -> None:
    popper.hold(queueId=2)
    send(home, b"a", queue_id=1)
    assert home.woken == []
    assert waiting(popper, 2) == 1
    send(home, b"b", queue_id=2)
    assert bodies(home.woken[0]) == [b"b"]


def test_it_waits_as_long_as_its_client(home: House, popper: Popper) -> None:
    hold = popper.hold(1000)
    assert hold.deadline_ms == home.now_ms + 950
    home.tick(949)
    assert home.woken == []
    home.tick(1)
    (reply,) = home.woken
    assert (reply.code, reply.remark) == (210, "NO_MESSAGE_IN_QUEUE")
    assert reply.ext == {
        "popTime": str(home.now_ms), "invisibleTime": "10000", "reviveQid": "0", "restNum": "0",
        "startOffsetInfo": "", "msgOffsetInfo": "",
    }  # fmt: skip


def test_a_client_with_another_clock_does_not_wait_longer(home: House, popper: Popper) -> None:
    ahead = popper.hold(1000, bornTime=home.now_ms + 60_000)
    assert ahead.deadline_ms == home.now_ms + 950
    behind = popper.hold(1000, bornTime=home.now_ms - 500)
    assert behind.deadline_ms == home.now_ms + 450


def test_one_message_wakes_one_of_many(home: House, popper: Popper) -> None:
    tried = []
    attempt = home.broker.pop._attempt

    def note(*arguments: Any, **named: Any) -> Answer:
        tried.append(1)
        return attempt(*arguments, **named)

    for _ in range(50):
        popper.hold()
    home.broker.pop._attempt = note  # type: ignore[method-assign]
    send(home, b"a", queue_id=1)
    assert [bodies(reply) for reply in home.woken] == [[b"a"]]
    assert (len(tried), waiting(popper)) == (1, 49)
    send(home, b"b", queue_id=1)
    send(home, b"c", queue_id=2)
    assert [bodies(reply) for reply in home.woken[1:]] == [[b"b"], [b"c"]]
    assert len(tried) == 3


def test_many_messages_wake_as_many_as_they_are_enough_for(home: House, popper: Popper) -> None:
    for _ in range(500):
        popper.hold(maxMsgNums=2)
    send(home, *[b"%d" % n for n in range(600)])
    assert 300 <= len(home.woken) < 320  # an answer ends where a queue's file does
    assert sorted(int(body) for reply in home.woken for body in bodies(reply)) == list(range(600))
    assert waiting(popper) == 500 - len(home.woken)


def test_groups_do_not_wait_for_each_other(home: House, popper: Popper) -> None:
    other = Popper(home, group="H")
    other.ack_all(other.pop())
    popper.hold()
    other.hold()
    send(home, b"a")
    assert [bodies(reply) for reply in home.woken] == [[b"a"], [b"a"]]


def test_what_comes_back_wakes(home: House, popper: Popper) -> None:
    send(home, b"a")
    popper.pop(invisibleTime=5000)
    assert home.context.topics.get("%RETRY%G_T") is None
    popper.hold(queueId=3)
    let_pass(home, 5000)
    assert bodies(home.woken[0]) == [b"a"]
    popper.hold(60_000)
    let_pass(home, 10_000)
    assert [popper.read(reply)[0].message.reconsume_times for reply in home.woken] == [1, 2]


def test_too_many_do_not_wait(tmp_path: Path) -> None:
    settings = pop_settings(pop_waiting_max=5, pop_waiting_per_queue_max=2)
    with house(tmp_path / "store", settings) as home:
        home.send(body=b"a")
        home.store.settle()
        for queue_id in (1, 2):
            popper = Popper(home)
            for _ in range(3):
                answer = popper.ask(queueId=queue_id, pollTime=1000)
                if home.context.long_polling.in_wait_queues < 5:
                    assert isinstance(answer, Suspend)
        for queue_id in (1, 3):
            answer = popper.ask(queueId=queue_id, pollTime=1000)
            assert isinstance(answer, Reply)
            assert answer.code == 209
            notified = popper.notify(1000, queueId=queue_id)
            assert notified == Reply(ext={"hasMsg": "false", "pollingFull": "true"})


def test_who_is_gone_is_not_waited_for(home: House, popper: Popper) -> None:
    popper.hold()
    home.context.long_polling.drop(1)
    assert (
        waiting(popper),
        home.context.long_polling.in_wait_queues,
        len(home.context.long_polling),
    ) == (0, 0, 0)
    popper.hold()
    send(home, b"a")
    assert len(home.woken) == 1


def test_idle_lines_are_forgotten(home: House, popper: Popper) -> None:
    popper.hold(1000)
    let_pass(home, pop_polling.TIDY_MS + 2000)
    assert home.broker.pop._waiting._wait_queues == {}
    assert home.context.long_polling._by_queue == {}
    popper.hold()
    send(home, b"a")
    assert bodies(home.woken[-1]) == [b"a"]


def test_a_deleted_topic_ends_the_waiting(home: House, popper: Popper) -> None:
    for _ in range(3):
        popper.hold()
    woken: list[Any] = []

    def wake(held: Any, last: bool) -> None:
        try:
            held.suspend.retry(last)
        except Exception as error:
            woken.append(error)

    home.context.long_polling.on_wake(wake)
    assert home.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    assert [type(error).__name__ for error in woken] == ["TopicNotExist"] * 3


def test_a_topic_made_anew_is_waited_for(home: House, popper: Popper) -> None:
    popper.hold(1000)
    home.tick(2000)
    config = home.context.topics.need("T")
    assert home.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    home.context.topics.put(config, home.now_ms)
    popper.hold()
    send(home, b"new")
    assert bodies(home.woken[-1]) == [b"new"]


# --- notifications


def test_notifications_tell_of_messages(home: House, popper: Popper) -> None:
    no = Reply(ext={"hasMsg": "false", "pollingFull": "false"})
    yes = Reply(ext={"hasMsg": "true", "pollingFull": "false"})
    assert popper.notify() == no
    assert isinstance(popper.notify(15_000), Suspend)
    send(home, b"a", queue_id=2)
    assert home.woken == [yes]
    assert popper.notify() == yes
    assert popper.notify(queueId=2) == yes
    assert popper.notify(queueId=1) == no
    popper.pop(invisibleTime=5000)
    assert popper.notify() == no
    assert isinstance(popper.notify(15_000), Suspend)
    let_pass(home, 5000)
    assert home.woken[1:] == [yes]
    assert popper.notify() == yes
    popper.pop()
    assert isinstance(popper.notify(1000), Suspend)
    let_pass(home, 1000)
    assert home.woken[2:] == [no]


def test_each_message_tells_one(home: House, popper: Popper) -> None:
    for _ in range(10):
        assert isinstance(popper.notify(15_000), Suspend)
    send(home, b"a", b"b", b"c", queue_id=2)
    assert len(home.woken) == 3
    send(home, b"d", queue_id=1)
    assert len(home.woken) >= 4


# --- peeks


def test_peeking_lends_nothing(home: House, popper: Popper) -> None:
    send(home, b"a", b"b", queue_id=1)
    ext = {"consumerGroup": "G", "topic": "T", "queueId": "-1", "maxMsgNums": "32"}
    for _ in range(6):
        reply = home.ask(RequestCode.PEEK_MESSAGE, ext)
        assert bodies(reply) == [b"a", b"b"]
        assert reply.ext is not None
        assert reply.ext["restNum"] == "2"
    popper.pop(invisibleTime=5000)
    assert home.ask(RequestCode.PEEK_MESSAGE, ext).code == 19
    let_pass(home, 5000)
    home.store.settle()
    assert bodies(home.ask(RequestCode.PEEK_MESSAGE, ext)) == [b"a", b"b"]


# --- messages that are not in memory


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_disk(*arguments: Any, wait: bool, **named: Any) -> Taken | None:
        return read(*arguments, wait=True, **named) if wait else None

    monkeypatch.setattr(pop_module, "read", from_disk)


def begin(popper: Popper, **ext: Any) -> InThread:
    """A pop up to where the pool is asked."""
    home = popper.home
    taken: list[Answer] = []
    finish = home.finish
    home.finish = taken.append  # type: ignore[method-assign, assignment]
    try:
        popper.ask(**ext)
    finally:
        home.finish = finish  # type: ignore[method-assign]
    (job,) = taken
    assert isinstance(job, InThread)
    return job


@pytest.mark.usefixtures("cold")
def test_messages_are_read_by_the_pool(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    assert popper.bodies() == [b"a", b"b"]
    assert popper.pop() == []


@pytest.mark.usefixtures("cold")
def test_nobody_else_gets_what_is_being_read(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    job = begin(popper)
    found = job.work()
    assert popper.pop() == []
    popper.hold(maxMsgNums=1)
    send(home, b"c")
    assert home.woken == []
    answer = job.then(found)
    assert bodies(answer) == [b"a", b"b"]
    assert [bodies(reply) for reply in home.woken] == [[b"c"]]


@pytest.mark.usefixtures("cold")
def test_a_read_that_fails_sets_the_queue_free(
    home: House, popper: Popper, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(home, b"a")
    job = begin(popper)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(pop_module, "read", fail)
        found = job.work()
    with pytest.raises(OSError, match="no"):
        job.then(found)
    assert popper.bodies() == [b"a"]


@pytest.mark.usefixtures("cold")
def test_a_reset_while_reading_counts(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    job = begin(popper)
    found = job.work()
    home.context.offsets.reset("G", "T", {0: 2}, home.now_ms)
    assert bodies(home.finish(job.then(found))) == [b"b"]
