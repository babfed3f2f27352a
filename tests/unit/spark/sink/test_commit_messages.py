"""Chunks of half messages, control records, and the batch status."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DecisionLost
from penstock.spark.sink.batch_status import (
    INLINE_OFFSET,
    PART_BYTES_MAX,
    ControlRecord,
    ControlRecordBody,
    ControlRecordKind,
    Part,
    decode_control_record,
    encode_control_record,
    group_chunks,
    status_of,
)
from penstock.spark.sink.commit_messages import (
    CHUNK_ROWS_MAX,
    HalfMessageOffsets,
    HalfMessages,
    HalfMessageTopic,
    decode,
    digest,
    read_header,
)

offsets = st.integers(0, 2**62)
topics = st.builds(HalfMessageTopic, st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
half_offsets = st.lists(st.builds(HalfMessageOffsets, offsets, offsets), min_size=1, max_size=5)
half_messages = st.builds(
    HalfMessages,
    st.text(max_size=5),
    st.integers(0, 2**40),
    st.dictionaries(topics, half_offsets, max_size=3),
)


@given(half_messages)
def test_chunk_round_trip(messages: HalfMessages) -> None:
    data = messages.encode()
    found = decode(data)
    assert found == messages._replace(
        offsets={topic: sorted(halves) for topic, halves in messages.offsets.items()}
    )
    assert read_header(data).rows == messages.rows == len(list(found.interleaved()))
    assert read_header(data).expires_ms == messages.expires_ms


@given(half_messages, st.data())
def test_damaged_chunk_is_refused_or_decoded(messages: HalfMessages, data: st.DataObject) -> None:
    whole = messages.encode()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(damaged))
        decode(bytes(damaged)[: data.draw(st.integers(0, len(whole)))])
    except DecisionLost:
        pass


def test_million_rows_are_a_few_megabytes() -> None:
    line = [HalfMessageOffsets(7 * n, 1000 + 937 * n + n * n % 61) for n in range(CHUNK_ROWS_MAX)]
    data = HalfMessages(
        "g", 0, {HalfMessageTopic("broker-a", "127.0.0.1:10911", "orders"): line}
    ).encode()
    assert len(data) * (1_000_000 / CHUNK_ROWS_MAX) < 4_000_000


def test_brokers_are_interleaved() -> None:
    a, b = HalfMessageTopic("a", "", "t"), HalfMessageTopic("b", "", "t")
    messages = HalfMessages(
        "g", 0, {a: [HalfMessageOffsets(n, n) for n in range(3)], b: [HalfMessageOffsets(9, 9)]}
    )
    assert [topic.broker for topic, _ in messages.interleaved()] == ["a", "b", "a", "a"]


# --- control records


def _record(
    kind: ControlRecordKind, *chunks: bytes, id: str = "", offset: int = 0
) -> ControlRecord:
    return ControlRecord(
        kind,
        offset,
        ControlRecordBody("s", 1, "q", id, parts=[Part.of(INLINE_OFFSET, chunks)]),
        b"".join(chunks),
    )


@given(half_messages)
def test_control_record_round_trip(messages: HalfMessages) -> None:
    record = _record(ControlRecordKind.DECIDED, messages.encode(), id="x")
    found = decode_control_record(
        ControlRecordKind.DECIDED, 0, encode_control_record(record.body, record.inline)
    )
    assert found == record
    assert found is not None
    assert list(found.body.parts[0].split(found.inline)) == [record.inline]
    assert list(found.body.parts[0].split(found.inline[:-1])) == [None]
    assert found.digests == {digest(record.inline)}


def test_other_messages_are_not_control_records() -> None:
    for data in (b"", b"{", b"[]", b'{"sink": 3, "batch": 1}\n', b"\xff\n"):
        assert decode_control_record(ControlRecordKind.DONE, 0, data) is None


def test_the_first_decision_counts() -> None:
    first, second = (
        _record(ControlRecordKind.DECIDED, b"1", id="a"),
        _record(ControlRecordKind.DECIDED, b"2", id="b"),
    )
    assert status_of([]) == (False, None)
    assert status_of([first, second]) == (False, first)
    assert status_of([first, second, _record(ControlRecordKind.DONE, id="b")]) == (True, None)
    assert status_of([first, second, _record(ControlRecordKind.DONE, id="a")]) == (True, first)
    assert status_of([_record(ControlRecordKind.DONE, id="a"), first]) == (True, first)


def test_abort_makes_later_decisions_void_but_not_earlier_ones() -> None:
    decision, other = (
        _record(ControlRecordKind.DECIDED, b"1", b"2", id="a"),
        _record(ControlRecordKind.DECIDED, b"3", id="b"),
    )
    abort = _record(ControlRecordKind.ABORTED, b"2", b"9")
    assert status_of([abort, decision]) == (False, None)
    assert status_of([abort, decision, other]) == (False, other)
    assert status_of([decision, abort]) == (False, decision)
    assert status_of([decision, abort, _record(ControlRecordKind.DONE, id="a")]) == (True, decision)


def test_groups_of_chunks_fit_into_messages() -> None:
    given = [bytes(size) for size in (10, PART_BYTES_MAX, PART_BYTES_MAX + 5, 3, 4)]
    found = group_chunks(given)
    assert [data for group in found for data in group] == given
    assert [len(group) for group in found] == [1, 1, 1, 2]
    assert group_chunks([]) == []


def test_offsets_out_of_range_are_refused() -> None:
    data = HalfMessages(
        "g", 0, {HalfMessageTopic("b", "", "t"): [HalfMessageOffsets(-1, 5)]}
    ).encode()
    with pytest.raises(DecisionLost, match="out of range"):
        decode(data)
