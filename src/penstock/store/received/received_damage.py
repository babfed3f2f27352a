"""Damage of a master's log, as its slave sees it: a part of the log, from the damage on.

The rules are those of `recovery.damage`. But a recovery knows the whole log, and a slave only what
has arrived: a range may end later than it seems, so the answer may be to wait for more.
"""

from typing import Final, NamedTuple

from penstock.store.recovery.damage import (
    HEAD_BYTES,
    LENGTHS,
    DamageJudge,
    LogPart,
    LostMessage,
    blank_places,
    is_blank,
    plausible_size,
    record_places,
)
from penstock.store.recovery.opened_files import is_queue_name
from penstock.store.recovery_report import DamagedRange
from penstock.wire.record import PROBLEMS, RECORD, StoredRecord

OTHER_BLANK: Final = 100
"""The problem of a blank record that does not reach the end of the slave's segment."""
OTHER_LENGTH: Final = 101
"""The problem of a possible record that does not fit into the slave's segment."""

PIECE_BYTES_MAX: Final = 16 * 1024 * 1024
"""A longer damaged range is taken in pieces: it is kept in memory until it is certain."""
_SMALL_BYTES = 1024 * 1024
_EVERYTHING = (1 << 63) - 1


class ReceivedDamage(NamedTuple):
    """A damaged range, and whose message was there, if that is readable."""

    range: DamagedRange
    lost: LostMessage | None


def received_problem(problem: int) -> str:
    """What is wrong with a received record."""
    if problem in (OTHER_BLANK, OTHER_LENGTH):
        return "the segments of the master have another length"
    return PROBLEMS[problem]


def next_look(length: int) -> int:
    """With how many bytes a range is judged again.

    Each time all of it is searched: a long range must have grown by more than one byte.
    """
    return length + 1 + (length // 8 if length > _SMALL_BYTES else 0)


def judge_received(
    received: memoryview, offset: int, segment_left: int, problem: int, size: int
) -> int:
    """The length of the invalid range at the begin of `received`; 0 if it is not known yet.

    `offset` is that of the first byte; its segment has `segment_left` bytes from there on.
    `problem` and `size` are those of the StoredRecord that was read there.
    """
    data = bytes(received[:segment_left])
    if LENGTHS < problem < len(PROBLEMS):  # its size is plausible
        begins = _begins_record(data, size, offset, segment_left, valid=False)
        if begins is None:
            return 0
        if begins:
            return size
    for place in record_places(data):
        if place > 0:
            begins = _begins_record(data, place, offset, segment_left, valid=True)
            if begins is None:
                return 0
            if begins:
                return place
    for place in blank_places(data):
        if place > 0 and is_blank(data[place : place + HEAD_BYTES], place, segment_left):
            return place
    return segment_left if len(data) == segment_left else 0


def _begins_record(
    data: bytes, at: int, offset: int, segment_left: int, *, valid: bool
) -> bool | None:
    """Whether a record begins at `at`; None if that is not known yet.

    Unless it must be `valid`, it may be damaged too, or be a blank record. What follows is not
    looked at before this is known: a message may contain what looks like a record.
    """
    head = data[at : at + HEAD_BYTES]
    if not valid and is_blank(head, at, segment_left):
        return True
    if len(head) < HEAD_BYTES:
        return None
    size = plausible_size(head, offset + at, segment_left - at)
    if size == 0:
        return False
    if at + size > len(data):
        return None
    stored = StoredRecord()
    stored.durable_to = _EVERYTHING
    stored.bind(memoryview(bytearray(data[at : at + size])))
    if stored.read(0, size) != RECORD:
        return False
    return not valid or stored.check(offset + at) == RECORD


def received_damage(data: memoryview, offset: int, problem: int, size: int) -> ReceivedDamage:
    """What is known about the damaged range `data`."""
    part = LogPart(offset, len(data), lambda at, n: bytes(data[at : at + n]), lambda at, end: [])
    judge = DamageJudge([part], 0, durable_to=_EVERYTHING, confirm_offset=0)
    lost = judge.lost_message(offset, offset + len(data), problem, size)
    if lost is not None and not is_queue_name(lost.topic):
        lost = None
    message = "" if lost is None else str(lost)
    return ReceivedDamage(DamagedRange(offset, len(data), received_problem(problem), message), lost)
