"""Pops in order: the next of a queue comes when the last is done."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.rpc.answers import Reply, Suspend
from tests.unit.broker.broker_kit import House, bodies, house
from tests.unit.broker.pop.pop_kit import Popped, Popper, let_pass, persist, reopen


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path / "store") as made:
        for number in range(6):
            made.send(body=b"%d" % number)
        made.store.settle()
        yield made


@pytest.fixture
def popper(home: House) -> Popper:
    return Popper(home)


def pop(popper: Popper, count: int = 2, **ext: object) -> list[Popped]:
    return popper.pop(order="true", maxMsgNums=count, **ext)


def texts(popped: list[Popped]) -> list[bytes]:
    return [one.body for one in popped]


def test_the_next_comes_when_all_are_acknowledged(home: House, popper: Popper) -> None:
    first = pop(popper)
    assert texts(first) == [b"0", b"1"]
    assert {one.receipt.revive_queue_id for one in first} == {999}
    assert pop(popper) == []
    assert home.context.offsets.get("G", "T", 0) == 0
    assert popper.ack(first[1]).code == 0
    assert home.context.offsets.get("G", "T", 0) == 0
    assert pop(popper) == []
    assert popper.ack(first[0]).code == 0
    assert home.context.offsets.get("G", "T", 0) == 2
    assert texts(pop(popper)) == [b"2", b"3"]


def test_they_come_again_in_order(home: House, popper: Popper) -> None:
    first = pop(popper, 3)
    popper.ack(first[0])
    let_pass(home, 9_999)
    assert pop(popper) == []
    let_pass(home, 1)
    answer = popper.ask(order="true", maxMsgNums=3)
    assert isinstance(answer, Reply)
    assert bodies(answer) == [b"1", b"2", b"3"]
    assert answer.ext is not None
    assert answer.ext["orderCountInfo"] == "0 qo0%1 1;0 qo0%2 1;0 0 0"
    assert popper.ack(first[1]).code == 0  # outdated: ignored
    assert home.context.offsets.get("G", "T", 0) == 1


def test_a_batch_is_acknowledged_in_order(home: House, popper: Popper) -> None:
    first = pop(popper, 3)
    assert popper.ack_batch(first).code == 0
    assert home.context.offsets.get("G", "T", 0) == 3
    assert texts(pop(popper)) == [b"3", b"4"]


def test_the_same_attempt_pops_again(home: House, popper: Popper) -> None:
    pop(popper, attemptId="x")
    assert pop(popper, attemptId="y") == []
    assert texts(pop(popper, attemptId="x")) == [b"0", b"1"]


def test_another_time_of_one_message(home: House, popper: Popper) -> None:
    first = pop(popper)
    let_pass(home, 1_000)
    changed = popper.change(first[0], 30_000)
    assert changed.receipt.pop_ms == first[0].receipt.pop_ms
    assert changed.receipt.invisible_ms == 31_000
    popper.ack(first[1])
    let_pass(home, 29_999)
    assert pop(popper) == []
    let_pass(home, 1)
    assert texts(pop(popper)) == [b"0", b"1"]


def test_who_waits_is_told(home: House, popper: Popper) -> None:
    first = pop(popper)
    popper.hold(order="true", maxMsgNums=1)
    assert isinstance(popper.notify(15_000, order="true"), Suspend)
    popper.ack(first[0])
    assert home.woken == []
    popper.ack(first[1])
    assert bodies(home.woken[0]) == [b"2"]
    let_pass(home, 9_999)
    popper.hold(order="true", maxMsgNums=1)
    assert len([reply for reply in home.woken if reply.body]) == 1
    let_pass(home, 1)
    assert [bodies(reply) for reply in home.woken if reply.body][1:] == [[b"2"]]


def test_an_acknowledgement_in_the_turn_of_the_pop_is_not_missed(
    home: House, popper: Popper
) -> None:
    """Both come in one read: the pop is held only when the acknowledgement was served."""
    (first,) = pop(popper, 1)
    hold = popper.hold(order="true", maxMsgNums=1)
    home.context.long_polling.drop(1)
    popper.ack(first)
    assert home.woken == []
    home.context.long_polling.add(1, 9, hold)
    assert [bodies(reply) for reply in home.woken] == [[b"1"]]
    assert len(home.context.long_polling) == 0


def test_a_notification_knows_blocked_queues(home: House, popper: Popper) -> None:
    first = pop(popper)
    assert popper.notify(order="true") == Reply(ext={"hasMsg": "false", "pollingFull": "false"})
    assert isinstance(popper.notify(60_000, order="true"), Suspend)
    let_pass(home, 10_000)
    assert home.woken == [Reply(ext={"hasMsg": "true", "pollingFull": "false"})]
    assert len(first) == 2


def test_a_message_that_was_not_popped_is_refused(home: House, popper: Popper) -> None:
    first = pop(popper)
    wrong = first[0]._replace(receipt=first[0].receipt._replace(queue_offset=4))
    assert popper.ack(wrong).code == 13


def test_a_reset_frees_the_queue(home: House, popper: Popper) -> None:
    pop(popper)
    home.context.offsets.reset("G", "T", {0: 1}, home.now_ms)
    assert texts(pop(popper)) == [b"1", b"2"]


@pytest.mark.parametrize("crash", [False, True])
def test_order_survives_a_restart(tmp_path: Path, crash: bool) -> None:
    root = tmp_path / "store"
    home = House(root)
    for number in range(6):
        home.send(body=b"%d" % number)
    home.store.settle()
    first = pop(Popper(home))
    Popper(home).ack(first[0])
    let_pass(home, 6_000)
    persist(home)
    home = reopen(home, root, crash=crash)
    try:
        popper = Popper(home)
        assert pop(popper) == []
        let_pass(home, 4_000)
        again = pop(popper)
        assert texts(again) == [b"1", b"2"]
        popper.ack_all(again)
        assert texts(pop(popper, 32)) == [b"3", b"4", b"5"]
    finally:
        home.close()
