"""Every offset of a range is read or reported as lost, with any response of a broker."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.arrow import range_reader
from penstock.arrow.offset_ranges import QueueRange
from penstock.arrow.range_reader import RangeReader, ReadSettings
from penstock.client.client_session import Session
from penstock.client.consumer.pull_loop import PullAnswer
from penstock.clock import LoopClock
from penstock.errors import DataLost, TopicNotExist
from penstock.wire.codes import ResponseCode
from penstock.wire.layout import body_at
from tests.store_kit import Message, Stored

OK, MOVED = ResponseCode.SUCCESS, ResponseCode.PULL_OFFSET_MOVED
NOTHING, AGAIN = ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY
PART = QueueRange("orders", "b-1", 3, 10, 30)
BODY_AT = body_at(0)
SESSION = cast(Session, SimpleNamespace(clock=LoopClock()))


def record(offset: int, tag: str = "a") -> bytes:
    return Stored(Message("orders", 3, b"%d" % offset, tag), 1000 * offset, offset, 5).data()


def answer(
    code: int,
    next_offset: int,
    offsets: Sequence[int] = (),
    *,
    low: int = 0,
    high: int = 100,
    body: bytes | None = None,
) -> PullAnswer:
    data = b"".join(map(record, offsets)) if body is None else body
    return PullAnswer(code, next_offset, low, high, 0, data, None)


class ScriptedPuller:
    """Pull responses by offset; the last one of an offset is repeated."""

    address = "127.0.0.1:10911"

    def __init__(self, answers: dict[int, list[PullAnswer | Exception]]) -> None:
        self.answers = answers
        self.asked: list[int] = []

    def __call__(self, *args: object, **options: object) -> "ScriptedPuller":
        return self

    async def answer(self, offset: int) -> PullAnswer:
        self.asked.append(offset)
        answers = self.answers[offset]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def prefetch(self, offset: int) -> None: ...

    async def switch_to_master(self) -> None: ...

    def cancel(self) -> None: ...


def read(
    monkeypatch: pytest.MonkeyPatch, answers: dict[int, Any], **how: Any
) -> tuple[list[int], RangeReader, ScriptedPuller]:
    script = ScriptedPuller({k: v if isinstance(v, list) else [v] for k, v in answers.items()})
    monkeypatch.setattr(range_reader, "QueuePuller", script)
    monkeypatch.setattr(range_reader, "LAG_WAIT_MS", 150)
    settings = ReadSettings(**{"columns": ("queue_offset",), "group": "g", **how})
    work = RangeReader(SESSION, PART, settings)

    async def run() -> list[int]:
        found: list[int] = []
        while (batch := await work.batch()) is not None:
            found += batch.column("queue_offset").to_pylist()
        return found

    return asyncio.run(run()), work, script


def lost_and_found(
    monkeypatch: pytest.MonkeyPatch, answers: dict[int, Any], **how: Any
) -> tuple[str, list[int], int]:
    """The error with failOnDataLoss, and the rows and lost messages without it."""
    copied = {k: list(v) if isinstance(v, list) else v for k, v in answers.items()}
    with pytest.raises(DataLost) as caught:
        read(monkeypatch, copied, **how)
    found, work, _ = read(monkeypatch, answers, fail_on_data_loss=False, **how)
    assert all(
        text in str(caught.value) for text in ("orders", "b-1", "queue 3", ScriptedPuller.address)
    )
    return str(caught.value), found, work.lost


def test_responses_may_exceed_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    found, work, script = read(
        monkeypatch, {10: answer(OK, 20, range(8, 20)), 20: answer(OK, 40, range(20, 40))}
    )
    assert (found, work.lost, script.asked) == (list(range(10, 30)), 0, [10, 20])


def test_deleted_messages_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {10: answer(MOVED, 25, low=25), 25: answer(OK, 30, range(25, 30))}
    text, found, lost = lost_and_found(monkeypatch, answers)
    assert "offsets 10 to 24 are wanted, offsets 25 to 99 exist" in text
    assert (found, lost) == (list(range(25, 30)), 15)


@pytest.mark.parametrize("code", [OK, AGAIN, MOVED])
def test_deleted_messages_are_a_loss_with_tags(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    there = () if code != OK else (17, 19)
    last = answer(OK, 30, body=b"".join(record(offset) for offset in range(20, 30)))
    if code == MOVED:
        answers = {10: answer(code, 16, low=16), 16: answer(AGAIN, 20, low=16), 20: last}
    else:
        answers = {10: answer(code, 20, there, low=16), 20: last}
    text, found, lost = lost_and_found(monkeypatch, answers, tags="a")
    assert "offsets 10 to 15 are wanted, offsets 16 to 99 exist" in text
    assert (found, lost) == ([*there, *range(20, 30)], 6)


def test_completely_deleted_range_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    text, found, lost = lost_and_found(monkeypatch, {10: answer(MOVED, 500, low=500, high=600)})
    assert "offsets 10 to 29 are wanted, offsets 500 to 599 exist" in text
    assert (found, lost) == ([], 20)


def test_recreated_queue_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    text, found, lost = lost_and_found(monkeypatch, {10: answer(MOVED, 0, high=0)})
    assert "offsets 10 to 29 are wanted, offsets none exist" in text
    assert (found, lost) == ([], 20)


def test_messages_missing_in_a_response_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [*range(10, 14), *range(17, 30)]
    text, found, lost = lost_and_found(monkeypatch, {10: answer(OK, 30, some)})
    assert "3 messages before offset 30 are missing" in text
    assert (found, lost) == (some, 3)


def test_no_match_without_tags_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue has entries, but the messages are missing."""
    answers = {10: answer(AGAIN, 18), 18: answer(OK, 30, range(18, 30))}
    text, found, lost = lost_and_found(monkeypatch, answers)
    assert "offsets 10 to 17 are wanted" in text
    assert (found, lost) == (list(range(18, 30)), 8)


def test_gaps_are_normal_with_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    body = record(12) + record(14, "b") + record(20)  # a tag whose hash is the same as that of `a`
    answers = {10: answer(AGAIN, 12), 12: answer(OK, 25, body=body), 25: answer(AGAIN, 800)}
    found, work, _ = read(monkeypatch, answers, tags="a")
    assert (found, work.lost) == ([12, 20], 0)


def test_missing_queue_entries_are_a_loss_with_tags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brokers answer "not found", and not "no match", at a gap in a queue."""
    answers = {10: answer(NOTHING, 20), 20: answer(OK, 30, range(20, 30))}
    text, found, lost = lost_and_found(monkeypatch, answers, tags="a")
    assert "offsets 10 to 19 are wanted" in text
    assert (found, lost) == (list(range(20, 30)), 10)


def test_unreadable_record_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = bytearray(record(15))
    bad[4] ^= 1  # its magic
    body = b"".join(map(record, range(10, 15))) + bad + b"".join(map(record, range(16, 30)))
    text, found, lost = lost_and_found(monkeypatch, {10: answer(OK, 30, body=body)})
    assert "offset 15: " in text
    assert (found, lost) == ([n for n in range(10, 30) if n != 15], 1)


@pytest.mark.parametrize("columns", [("queue_offset",), ("queue_offset", "body", "properties")])
@pytest.mark.parametrize("offset", [10, 15, 29])
def test_damaged_body_is_a_loss(
    monkeypatch: pytest.MonkeyPatch, offset: int, columns: tuple[str, ...]
) -> None:
    records = [bytearray(record(n)) for n in range(10, 30)]
    records[offset - 10][BODY_AT] ^= 1
    answers = {10: answer(OK, 30, body=b"".join(records))}
    text, found, lost = lost_and_found(monkeypatch, answers, columns=columns)
    assert f"offset {offset}: the body does not match its CRC" in text
    assert (found, lost) == ([n for n in range(10, 30) if n != offset], 1)
    found, work, _ = read(monkeypatch, answers, columns=columns, check_crc=False)
    assert (found, work.lost) == (list(range(10, 30)), 0)


def test_damaged_body_after_a_gap_is_reported_with_its_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = bytearray(record(15))
    bad[BODY_AT] ^= 1
    answers = {10: answer(OK, 30, body=record(12) + bad + record(20))}
    text, found, lost = lost_and_found(monkeypatch, answers, tags="a")
    assert "offset 15: the body does not match its CRC" in text
    assert (found, lost) == ([12, 20], 1)


def test_record_of_unknown_length_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a size is not plausible the rest of the response is pulled again."""
    bad = b"\x7f\xff\xff\xff" + record(15)[4:]
    answers = {
        10: answer(OK, 30, body=b"".join(map(record, range(10, 15))) + bad),
        15: answer(OK, 30, body=bad),
        16: answer(OK, 30, range(16, 30)),
    }
    text, found, lost = lost_and_found(monkeypatch, answers)
    assert "offset 15: " in text
    assert (found, lost) == ([n for n in range(10, 30) if n != 15], 1)


def test_queue_that_lags_briefly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        10: answer(OK, 20, range(10, 20), high=20),
        20: [answer(NOTHING, 20, high=20), answer(MOVED, 15, high=15),
             answer(OK, 30, range(20, 30))],
    }  # fmt: skip
    monkeypatch.setattr(range_reader, "BACKOFF_MS", 1)
    found, work, script = read(monkeypatch, answers)
    assert (found, work.lost, script.asked) == (list(range(10, 30)), 0, [10, 20, 20, 20])


def test_deleted_topic_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {10: answer(OK, 20, range(10, 20)), 20: TopicNotExist("no such topic")}
    text, found, lost = lost_and_found(monkeypatch, answers)
    assert "offsets 20 to 29 are wanted" in text
    assert "no such topic" in text
    assert (found, lost) == (list(range(10, 20)), 10)
