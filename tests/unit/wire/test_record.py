"""Encoding records: `Record`, marks of properties, messages of a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.layout import FIXED_BYTES, MAGIC_V1, MAGIC_V2
from penstock.wire.record import (
    BODY_TOO_LONG,
    OK,
    PROPERTIES_TOO_LONG,
    RECORD,
    TOPIC_EMPTY,
    TOPIC_TOO_LONG,
    BatchWalk,
    PropertyMarks,
    Record,
    StoredRecord,
    continue_hash,
    java_hash,
)

from .guarded import Outcome, outcome_within_guards
from .records import PLAIN, Message, encoded, filled, hosts, i32, joined, messages

COPIED = (
    "queue_id", "flag", "born_ms", "reconsume_times", "prepared_offset", "queue_offset",
    "physical_offset", "store_ms",
)  # fmt: skip


def stored_at(data: bytes) -> StoredRecord:
    stored = StoredRecord()
    stored.bind(memoryview(bytearray(data)))
    assert stored.read(0, len(data)) == RECORD
    return stored


def piece(stored: StoredRecord, at: int, length: int) -> bytes:
    return bytes(stored.buffer[at : at + length])


@given(message=messages)
def test_records_round_trip(message: Message) -> None:
    data = encoded(message)
    stored = stored_at(data)
    assert stored.size == len(data)
    assert {name: getattr(stored, name) for name in COPIED} == {
        name: message[name] for name in COPIED
    }
    assert piece(stored, stored.body_at, stored.body_length) == message["body"]
    assert piece(stored, stored.topic_at, stored.topic_length) == message["topic"]
    assert piece(stored, stored.properties_at, stored.properties_length) == joined(
        message["properties"], message["extra"]
    )
    assert piece(stored, 48, stored.born_host_length) == message["born_host"]
    assert piece(stored, stored.store_host_at, stored.store_host_length) == message["store_host"]
    v6 = (0x10 if len(message["born_host"]) == 20 else 0) | (
        0x20 if len(message["store_host"]) == 20 else 0
    )
    assert stored.sys_flag == message["sys_flag"] & ~0x30 | v6
    assert stored.magic == (MAGIC_V2 if len(message["topic"]) > 127 else MAGIC_V1)
    assert stored.check(message["physical_offset"]) == RECORD


@given(message=messages)
def test_put_writes_exactly_its_size(message: Message) -> None:
    record = filled(message)
    assert record.prepare() == OK
    target = bytearray(b"\xa5" * (record.size + 20))
    record.put(memoryview(target), 10, 1, 2, 3)
    assert target[:10] == target[10 + record.size :] == b"\xa5" * 10
    other = bytearray(b"\x5a" * (record.size + 20))
    record.put(memoryview(other), 10, 1, 2, 3)
    assert other[10:-10] == target[10:-10]


@given(born=hosts, store=hosts)
def test_the_fixed_part_grows_with_hosts_of_ipv6(born: bytes, store: bytes) -> None:
    record = filled({**PLAIN, "born_host": born, "store_host": store, "body": b"", "extra": b""})
    assert record.prepare() == OK
    texts = len(PLAIN["topic"]) + len(PLAIN["properties"])
    assert record.size == FIXED_BYTES + texts + len(born) + len(store) - 16


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"body": bytes(101)}, BODY_TOO_LONG),
        ({"body": bytes(100)}, OK),
        ({"properties": b"p" * 32768}, PROPERTIES_TOO_LONG),
        ({"properties": b"p" * 32767}, OK),
        ({"properties": b"p" * 32765, "extra": b"e"}, OK),
        ({"properties": b"p" * 32766, "extra": b"e"}, PROPERTIES_TOO_LONG),
        ({"properties": b"p" * 32765 + b"\x02", "extra": b"e"}, OK),
        ({"extra": b"e" * 32767, "properties": b""}, OK),
        ({"extra": b"e" * 32768, "properties": b""}, PROPERTIES_TOO_LONG),
        ({"topic": b"t" * 255}, OK),
        ({"topic": b"t" * 256}, TOPIC_TOO_LONG),
        ({"topic": b""}, TOPIC_EMPTY),
        ({"topic": b"", "body": bytes(101)}, BODY_TOO_LONG),
    ],
)
def test_limits_are_checked_before_anything_is_written(changed: Message, problem: int) -> None:
    message = {**PLAIN, **changed}
    assert filled(message, body_bytes_max=100).prepare() == problem
    if problem == OK:
        stored = stored_at(encoded(message))
        expected = joined(message["properties"], message["extra"])
        assert piece(stored, stored.properties_at, stored.properties_length) == expected


def test_a_released_record_keeps_no_reference_to_its_source() -> None:
    source = bytearray(b"topic")
    record = Record()
    record.bind(memoryview(source))
    record.release()
    source.extend(b"more")  # BufferError while anyone holds a view
    stored = StoredRecord()
    stored.bind(memoryview(source))
    stored.release()
    source.extend(b"more")
    assert source == b"topicmoremore"


# --- properties ----------------------------------------------------------------------------------


def properties_as_java_reads_them(text: str) -> dict[str, str]:
    """MessageDecoder.string2messageProperties, line by line."""
    found: dict[str, str] = {}
    index = 0
    while index < len(text):
        end = text.find("\x02", index)
        if end < 0:
            end = len(text)
        if end - index >= 3:
            assign = text.find("\x01", index)
            if index < assign < end - 1:
                found[text[index:assign]] = text[assign + 1 : end]
        index = end + 1
    return found


names = st.sampled_from(("TAGS", "KEYS", "UNIQ_KEY", "TAG", "TAGSS", "keys", "x", "", "中"))
contents = st.sampled_from(("", "a", "tag b", "x\x01y", "中\U0001f680", "true"))
entries = st.one_of(
    st.builds("{}\x01{}".format, names, contents),
    st.sampled_from(("WAIT\x01true", "WAIT\x01false", "WAIT\x01", "TAGS", "", "\x01", "junk")),
)
properties_texts = st.one_of(
    st.builds(lambda found, last: "\x02".join(found) + last, st.lists(entries, max_size=8),
              st.sampled_from(("", "\x02", "\x02\x02"))),
    st.text("TAGS\x01\x02a", max_size=30),
)  # fmt: skip


def marked(buffer: memoryview, at: int, end: int) -> Outcome:
    marks = PropertyMarks()
    marks.bind(buffer)
    return marks_of(marks, buffer, at, end)


def marks_of(marks: PropertyMarks, buffer: memoryview, at: int, end: int) -> Outcome:
    marks.scan(at, end)
    spans = (
        (marks.tags_at, marks.tags_length),
        (marks.keys_at, marks.keys_length),
        (marks.unique_at, marks.unique_length),
    )
    found = [bytes(buffer[at : at + length]).decode() if length else None for at, length in spans]
    return (*found, marks.wait, marks.tags_code())


@given(text=properties_texts)
def test_marked_properties_equal_those_of_java(text: str) -> None:
    found = properties_as_java_reads_them(text)
    assert outcome_within_guards(text.encode(), marked) == (
        found.get("TAGS"), found.get("KEYS"), found.get("UNIQ_KEY"), found.get("WAIT") != "false",
        java_hash(found.get("TAGS", "")),
    )  # fmt: skip


@given(texts=st.lists(properties_texts, min_size=2, max_size=3))
def test_marks_keep_nothing_of_the_previous_message(texts: list[str]) -> None:
    buffer = memoryview(bytearray(b"".join(text.encode() for text in texts) or b"\0"))
    reused = PropertyMarks()
    reused.bind(buffer)
    at = 0
    for text in texts:
        end = at + len(text.encode())
        assert marks_of(reused, buffer, at, end) == marked(buffer, at, end)
        at = end


@given(noise=st.binary(max_size=40), seed=i32)
def test_any_bytes_can_be_marked_and_hashed(noise: bytes, seed: int) -> None:
    def read(buffer: memoryview, at: int, end: int) -> Outcome:
        marks = PropertyMarks()
        marks.bind(buffer)
        marks.scan(at, end)
        return (marks.wait, marks.tags_length, marks.hash(at, end - at, seed))

    text = noise.decode("utf-8", "replace")
    assert outcome_within_guards(noise, read)[2] == continue_hash(seed, text)


def test_tags_code_of_the_reference() -> None:
    for tag, code in (("TagA", 2598919), ("TagB", 2598920), ("order-created", -392709271)):
        record = filled({**PLAIN, "properties": f"TAGS\x01{tag}\x02".encode()})
        assert record.prepare() == OK
        assert record.tags_code == code == java_hash(tag)
    record = filled({**PLAIN, "properties": b"KEYS\x01k"})
    assert record.prepare() == OK
    assert record.tags_code == 0


@given(first=st.text(max_size=20), second=st.text(max_size=20))
def test_a_hash_can_be_continued(first: str, second: str) -> None:
    assert continue_hash(java_hash(first), second) == java_hash(first + second)
    assert -(1 << 31) <= java_hash(first) < 1 << 31


# --- batches -------------------------------------------------------------------------------------


def batch_of(*found: tuple[int, bytes, bytes]) -> bytes:
    data = b""
    for flag, body, properties in found:
        inside = (
            bytes(8) + flag.to_bytes(4, "big", signed=True) + len(body).to_bytes(4, "big") + body
        )
        inside += len(properties).to_bytes(2, "big") + properties
        data += (4 + len(inside)).to_bytes(4, "big") + inside
    return data


def walked(buffer: memoryview, at: int, end: int) -> Outcome:
    record = Record()
    record.bind(buffer)
    walk = BatchWalk()
    walk.start(at, end - at)
    found: list[tuple[int, bytes, bytes]] = []
    while (step := walk.next(record)) == 1:
        for place, length in (
            (record.body_at, record.body_length),
            (record.properties_at, record.properties_length),
        ):
            assert at <= place <= place + length <= end
        body = bytes(buffer[record.body_at : record.body_at + record.body_length])
        text = buffer[record.properties_at : record.properties_at + record.properties_length]
        found.append((record.flag, body, bytes(text)))
    assert walk.next(record) == step
    return (step, found)


inner = st.lists(st.tuples(i32, st.binary(max_size=30), st.binary(max_size=30)), max_size=4)


@given(found=inner)
def test_a_batch_is_read_message_by_message(found: list[tuple[int, bytes, bytes]]) -> None:
    assert outcome_within_guards(batch_of(*found), walked) == (0, found)


@given(found=inner.filter(len))
def test_a_batch_truncated_inside_a_message_is_refused(
    found: list[tuple[int, bytes, bytes]],
) -> None:
    data = batch_of(*found)
    ends = [len(batch_of(*found[:count])) for count in range(len(found) + 1)]
    for length in range(len(data)):
        whole = sum(end <= length for end in ends) - 1
        step = 0 if length in ends else -1
        assert outcome_within_guards(data[:length], walked) == (step, found[:whole])


def test_a_batch_with_a_bit_flip_is_not_read_out_of_bounds() -> None:
    found = [(1, b"first", b"TAGS\x01a\x02"), (-2, b"", b""), (3, b"third", b"k\x01v")]
    data = batch_of(*found)
    lengths = {0, 1, 2, 3, 16, 17, 18, 19}
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        step, seen = outcome_within_guards(bytes(flipped), walked)
        if bit // 8 in lengths:
            assert (step, seen) == (-1, [])
        elif 4 <= bit // 8 < 12:
            assert (step, seen) == (0, found)  # magic and CRC do not count


@pytest.mark.parametrize("total", [-1, 0, 21, 23, 0x7FFFFFFF])
def test_a_batch_with_a_wrong_total_is_refused(total: int) -> None:
    data = total.to_bytes(4, "big", signed=True) + batch_of((0, b"", b""))[4:]
    assert outcome_within_guards(data, walked) == (-1, [])
