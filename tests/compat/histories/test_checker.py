"""The checker finds each kind of violation in histories that were written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.histories.checker import check
from tests.compat.histories.history import (
    Delivery,
    Fault,
    Final,
    History,
    Outcome,
    QueueEnd,
    Read,
    Record,
    Send,
    read_history,
    write_history,
)

QUEUE = "t/0"


def send(
    body: str, offset: int = -1, outcome: Outcome = "acknowledged", *, producer: str = "p"
) -> Send:
    return Send(producer, QUEUE, body, outcome, offset)


def finals(*bodies: str, replica: str = "a", master: bool = True) -> list[Record]:
    records: list[Record] = [
        Final(replica, master, QUEUE, offset, body) for offset, body in enumerate(bodies)
    ]
    if master:
        records.append(QueueEnd(replica, master, QUEUE, 0, len(bodies)))
    return records


def kinds(history: History) -> list[str]:
    return sorted(one.kind for one in check(history).violations)


def good() -> History:
    """Two acknowledged messages, one refused, one whose outcome is unknown; two replicas."""
    return [
        Fault("nothing happens"),
        send("1", 0),
        send("2", -1, "unknown"),
        send("3", -1, "failed"),
        send("4", 2),
        Read("b", QUEUE, 0, "1"),
        Delivery("g", QUEUE, 0, "1"),
        Delivery("g", QUEUE, 1, "2"),
        Delivery("g", QUEUE, 2, "4"),
        Delivery("g", QUEUE, 2, "4"),
        *finals("1", "2", "4"),
        *finals("1", "2", "4", replica="b", master=False),
    ]


def test_a_good_history_has_no_violations() -> None:
    verdict = check(good())
    assert verdict.violations == []
    counts = verdict.counts
    assert (counts.acknowledged, counts.failed, counts.unknown) == (2, 1, 1)
    assert (counts.stored_although_unknown, counts.duplicates, counts.reads) == (1, 0, 1)
    assert counts.delivered_again == 1


def test_an_acknowledged_message_is_lost_at_the_end() -> None:
    assert kinds([send("1", 0), send("2", 1), *finals("1")]) == ["lost"]


def test_an_acknowledged_message_is_replaced_by_another_one() -> None:
    history = [send("1", 0), send("2", -1, "unknown"), *finals("2")]
    assert kinds(history) == ["lost"]
    assert "1 at t/0:0, there is 2" in check(history).violations[0].text


def test_an_acknowledged_message_is_stored_elsewhere() -> None:
    """That is a loss too: the offset of the acknowledgement is wrong."""
    assert kinds([send("1", 0), send("2", -1, "unknown"), *finals("2", "1")]) == ["lost"]


def test_two_messages_are_acknowledged_at_the_same_place() -> None:
    history = [send("1", 0, producer="p"), send("2", 0, producer="q"), *finals("2")]
    assert kinds(history) == ["lost", "same place"]


def test_messages_of_one_producer_are_stored_in_another_order() -> None:
    assert kinds([send("1", 1), send("2", 0), *finals("2", "1")]) == ["reordered"]


def test_messages_of_two_producers_have_no_order() -> None:
    assert kinds([send("1", 1), send("2", 0, producer="q"), *finals("2", "1")]) == []


def test_a_refused_message_is_stored() -> None:
    assert kinds([send("1", -1, "failed"), *finals("1")]) == ["refused but stored"]


def test_a_message_that_was_sent_once_is_stored_twice() -> None:
    assert kinds([send("1", 0), *finals("1", "1")]) == ["stored twice"]


def test_a_message_that_was_sent_again_may_be_stored_twice() -> None:
    again = Send("p", QUEUE, "1", "acknowledged", 1, attempts_max=3)
    verdict = check([again, *finals("1", "1")])
    assert verdict.violations == []
    assert verdict.counts.duplicates == 1


def test_a_message_is_stored_that_nobody_has_sent() -> None:
    assert kinds([send("1", 0), *finals("1", "x")]) == ["invented"]


@pytest.mark.parametrize(
    "seen", [Read("b", QUEUE, 0, "1"), Delivery("g", QUEUE, 0, "1")], ids=["read", "delivery"]
)
@pytest.mark.parametrize("later", [("2",), ()], ids=["another", "nothing"])
def test_a_message_that_was_seen_is_replaced(seen: Record, later: tuple[str, ...]) -> None:
    history = [send("1", -1, "unknown"), send("2", -1, "unknown"), seen, *finals(*later)]
    assert kinds(history) == ["replaced"]


def test_two_readers_saw_different_messages_at_one_place() -> None:
    history = [
        send("1", -1, "unknown"),
        send("2", 0),
        Read("a", QUEUE, 0, "1"),
        Read("b", QUEUE, 0, "2"),
        *finals("2"),
    ]
    assert kinds(history) == ["replaced"]


def test_a_queue_has_a_gap() -> None:
    history: History = [send("1", 0), send("2", 2), Final("a", True, QUEUE, 0, "1")]
    history += [Final("a", True, QUEUE, 2, "2"), QueueEnd("a", True, QUEUE, 0, 3)]
    assert kinds(history) == ["gap"]


def test_a_queue_ends_with_a_gap() -> None:
    history: History = [send("1", 0), Final("a", True, QUEUE, 0, "1")]
    assert kinds([*history, QueueEnd("a", True, QUEUE, 0, 2)]) == ["gap"]


def test_a_queue_begins_with_a_gap() -> None:
    history: History = [send("1", 1), Final("a", True, QUEUE, 1, "1")]
    assert kinds([*history, QueueEnd("a", True, QUEUE, 1, 2)]) == ["gap"]


@pytest.mark.parametrize("other", [("1",), ("1", "x"), ("1", "2", "3")])
def test_replicas_differ(other: tuple[str, ...]) -> None:
    history = [send("1", 0), send("2", 1), *finals("1", "2")]
    assert kinds(history + finals(*other, replica="b", master=False)) == ["replicas differ"]


def test_an_acknowledged_message_does_not_reach_the_group() -> None:
    history = [send("1", 0), send("2", 1), Delivery("g", QUEUE, 1, "2"), *finals("1", "2")]
    assert kinds(history) == ["not delivered"]


def test_a_history_is_kept_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    write_history(file, good())
    assert len(file.read_text().splitlines()) == len(good())
    assert read_history(file) == good()
