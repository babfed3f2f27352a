"""Records in the log: every field is checked before it is used."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.layout import FIXED_BYTES, MAGIC_BLANK, MAGIC_V1, MAGIC_V2
from penstock.wire.record import BLANK, NOTHING, PROBLEMS, RECORD, StoredRecord

from .guarded import Outcome, outcome_within_guards
from .records import PLAIN, Message, encoded, messages

SHORT, UNWRITTEN, MAGIC, BEYOND, LENGTHS, CRC, ELSEWHERE, TORN = range(1, len(PROBLEMS))
SECTOR = 512
LONG_TOPIC = {**PLAIN, "topic": b"t" * 200, "born_host": b"b" * 20, "store_host": b"s" * 20}
VARIANTS = pytest.mark.parametrize(
    "message",
    [PLAIN, LONG_TOPIC, {**PLAIN, "properties": b""}, {**PLAIN, "body": b""}],
    ids=["plain", "long topic, v6", "no properties", "no body"],
)


def stored_outcome(buffer: memoryview, at: int, end: int) -> Outcome:
    """All values of the record at `at`, with positions relative to it."""
    stored = StoredRecord()
    stored.bind(buffer)
    found = stored.read(at, end)
    if found == NOTHING:
        return (NOTHING, stored.problem)
    if found == BLANK:
        return (BLANK, stored.size)
    spans = (
        (stored.body_at, stored.body_length),
        (stored.topic_at, stored.topic_length),
        (stored.properties_at, stored.properties_length),
        (stored.store_host_at, stored.store_host_length),
    )
    for place, length in spans:
        assert at <= place <= place + length <= at + stored.size <= end
    stored.scan()
    marks = stored.marks
    result = (
        found, stored.size, stored.magic, stored.body_crc, stored.queue_id, stored.flag,
        stored.queue_offset, stored.physical_offset, stored.sys_flag, stored.born_ms,
        stored.store_ms, stored.reconsume_times, stored.prepared_offset,
        marks.tags_length, marks.keys_length, marks.unique_length, marks.tags_code(),
        [(place - at, length) for place, length in spans],
    )  # fmt: skip
    return (*result, stored.check(stored.physical_offset), stored.problem)


def look(data: bytes, physical_offset: int) -> tuple[int, int]:
    """The results of `read` and, for a record, of `check`."""
    stored = StoredRecord()
    stored.bind(memoryview(bytearray(data)))
    if stored.read(0, len(data)) != RECORD:
        return (NOTHING, stored.problem)
    return (stored.check(physical_offset), stored.problem)


def head(size: int, magic: int, rest: int = 0) -> bytes:
    return (
        size.to_bytes(4, "big", signed=True) + magic.to_bytes(4, "big", signed=True) + bytes(rest)
    )


@given(message=messages, behind=st.binary(max_size=20))
def test_the_result_does_not_depend_on_surrounding_bytes(message: Message, behind: bytes) -> None:
    data = encoded(message)
    found = outcome_within_guards(data + behind, stored_outcome)
    assert found == stored_outcome(memoryview(bytearray(data)), 0, len(data))
    assert found[0] == RECORD
    assert found[-2:] == (RECORD, 0)


@VARIANTS
def test_a_truncated_record_is_not_found(message: Message) -> None:
    data = encoded(message)
    for length in range(len(data)):
        problem = SHORT if length < 8 else BEYOND
        assert outcome_within_guards(data[:length], stored_outcome) == (NOTHING, problem)


@VARIANTS
def test_a_truncated_record_with_a_corrected_length_is_refused(message: Message) -> None:
    data = encoded(message)
    for length in range(8, len(data)):
        cut = length.to_bytes(4, "big") + data[4:length]
        problem = BEYOND if length < FIXED_BYTES else LENGTHS
        assert outcome_within_guards(cut, stored_outcome) == (NOTHING, problem)


@VARIANTS
def test_bit_flips_in_checked_fields_are_detected(message: Message) -> None:
    data = encoded(message)
    good = outcome_within_guards(data, stored_outcome)
    body_at, body_length = good[-3][0]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        outcome_within_guards(bytes(flipped), stored_outcome)
        seen = look(bytes(flipped), message["physical_offset"])
        place = bit // 8
        if body_at <= place < body_at + body_length or 8 <= place < 12:
            assert seen == (NOTHING, CRC)
        elif place < 4:
            assert seen in ((NOTHING, BEYOND), (NOTHING, LENGTHS))
        elif place < 8:
            assert seen in ((NOTHING, MAGIC), (NOTHING, LENGTHS))  # V1 and V2 differ by two bits
        elif 28 <= place < 36:
            assert seen == (NOTHING, ELSEWHERE)
        elif body_at - 4 <= place < body_at:
            assert seen == (NOTHING, LENGTHS)


@given(data=st.binary(max_size=160), version=st.sampled_from((MAGIC_V1, MAGIC_V2)))
def test_random_bytes_after_a_valid_magic_are_handled(data: bytes, version: int) -> None:
    outcome_within_guards(head(8 + len(data), version) + data, stored_outcome)
    outcome_within_guards(data, stored_outcome)
    blank = head(8 + len(data), MAGIC_BLANK) + data
    assert outcome_within_guards(blank, stored_outcome) == (BLANK, len(blank))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", (NOTHING, SHORT)),
        (head(0, 0)[:7], (NOTHING, SHORT)),
        (head(0, 0), (NOTHING, UNWRITTEN)),
        (head(8, 0), (NOTHING, MAGIC)),
        (head(0, 1), (NOTHING, MAGIC)),
        (head(8, MAGIC_BLANK), (BLANK, 8)),
        (head(40, MAGIC_BLANK, 32), (BLANK, 40)),
        (head(39, MAGIC_BLANK, 32), (BLANK, 39)),
        (head(41, MAGIC_BLANK, 32), (NOTHING, BEYOND)),
        (head(7, MAGIC_BLANK, 32), (NOTHING, BEYOND)),
        (head(-40, MAGIC_BLANK, 32), (NOTHING, BEYOND)),
        (head(90, MAGIC_V1, 83), (NOTHING, BEYOND)),
        (head(92, MAGIC_V1, 83), (NOTHING, BEYOND)),
        (head(-1, MAGIC_V1, 83), (NOTHING, BEYOND)),
        (head(91, MAGIC_V2, 83), (NOTHING, LENGTHS)),
        (head(91, MAGIC_V1 + 1, 83), (NOTHING, MAGIC)),
    ],
)
def test_records_blanks_and_invalid_bytes_are_distinguished(
    data: bytes, expected: tuple[int, int]
) -> None:
    assert outcome_within_guards(data, stored_outcome) == expected


def test_a_blank_or_a_record_clears_the_previous_problem() -> None:
    record, blank = encoded(PLAIN), head(8, MAGIC_BLANK)
    stored = StoredRecord()
    stored.bind(memoryview(bytearray(record + blank + head(0, 0))))
    end = len(record) + 16
    for place, found in ((0, RECORD), (len(record), BLANK)):
        assert stored.read(end - 8, end) == NOTHING
        assert stored.problem == UNWRITTEN
        assert stored.read(place, end) == found
        assert stored.problem == 0


@given(message=messages, step=st.sampled_from((-512, -1, 1, 1 << 30)))
def test_a_record_with_another_offset_is_reported(message: Message, step: int) -> None:
    offset = message["physical_offset"] % (1 << 62)
    data = encoded({**message, "physical_offset": offset})
    assert look(data, offset) == (RECORD, 0)
    assert look(data, offset + step) == (NOTHING, ELSEWHERE)


@VARIANTS
def test_a_complete_record_is_complete_at_every_alignment(message: Message) -> None:
    data = bytearray(encoded(message))
    for offset in range(3 * SECTOR, 4 * SECTOR):
        data[28:36] = offset.to_bytes(8, "big")
        assert look(bytes(data), offset) == (RECORD, 0)


@pytest.mark.parametrize("body", [b"", b"body" * 300], ids=["no body", "body"])
@pytest.mark.parametrize("properties", [b"", b"KEYS\x01" + b"k" * 1500], ids=["none", "long"])
def test_an_unwritten_sector_is_detected(body: bytes, properties: bytes) -> None:
    message = {**PLAIN, "body": body, "properties": properties, "topic": b"t" * 100}
    data = bytearray(encoded(message))
    torn = 0
    for offset in range(3 * SECTOR, 4 * SECTOR):
        data[28:36] = offset.to_bytes(8, "big")
        edges = [0, *range(SECTOR - offset % SECTOR, len(data), SECTOR), len(data)]
        for start, stop in pairwise(edges):
            lost = data[:start] + bytes(stop - start) + data[stop:]
            found, problem = look(bytes(lost), offset)
            if lost != data:
                assert found == NOTHING
            torn += problem == TORN
    assert torn > (SECTOR if properties else 0)
