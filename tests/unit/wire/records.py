"""Records for tests: a strategy of messages, and their bytes as `Record` writes them."""

from typing import Any

from hypothesis import strategies as st

from penstock.wire.record import OK, Record

Message = dict[str, Any]

i32 = st.sampled_from((-0x80000000, -1, 0, 0x7FFFFFFF)) | st.integers(-0x80000000, 0x7FFFFFFF)
i64 = st.sampled_from((-(1 << 63), -1, 0, (1 << 63) - 1)) | st.integers(-(1 << 63), (1 << 63) - 1)
hosts = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
# No zero bytes: a sector of them is what a power cut leaves.
texts = st.text("ab中é\U0001f680\x01\x02", max_size=40).map(str.encode)
topics = texts.filter(len) | st.integers(100, 255).map(lambda length: b"t" * length)
messages = st.fixed_dictionaries(
    {
        "topic": topics,
        "body": st.binary(max_size=200),
        "properties": texts,
        "extra": st.just(b"") | texts,
        "queue_id": i32,
        "flag": i32,
        "sys_flag": i32,
        "born_ms": i64,
        "born_host": hosts,
        "store_host": hosts,
        "reconsume_times": i32,
        "prepared_offset": i64,
        "queue_offset": i64,
        "physical_offset": i64,
        "store_ms": i64,
    }
)
PLAIN: Message = {
    "topic": b"TopicTest", "body": b"hello penstock", "properties": b"KEYS\x01k1\x02TAGS\x01a\x02",
    "extra": b"", "queue_id": 3, "flag": -5, "sys_flag": 0, "born_ms": 1700000000123,
    "born_host": bytes([10, 1, 2, 3, 0, 0, 212, 49]),
    "store_host": bytes([127, 0, 0, 1, 0, 0, 42, 159]), "reconsume_times": 2,
    "prepared_offset": 99, "queue_offset": 12, "physical_offset": 123456,
    "store_ms": 1700000000456,
}  # fmt: skip


def filled(message: Message, **limits: int) -> Record:
    """A record of this message, not prepared yet."""
    record = Record(**limits)
    record.fill(message["topic"], message["body"], message["properties"])
    for name in (
        "extra", "queue_id", "flag", "sys_flag", "born_ms", "born_host", "store_host",
        "reconsume_times", "prepared_offset",
    ):  # fmt: skip
        setattr(record, name, message[name])
    return record


def encoded(message: Message) -> bytes:
    """The bytes of this message, in a buffer of exactly their size."""
    record = filled(message)
    assert record.prepare() == OK
    target = bytearray(record.size)
    record.put(
        memoryview(target), 0, message["queue_offset"], message["physical_offset"],
        message["store_ms"],
    )  # fmt: skip
    return bytes(target)


def joined(properties: bytes, extra: bytes) -> bytes:
    """The stored properties: the text, closed if something follows, and what follows."""
    if properties and extra and not properties.endswith(b"\x02"):
        return properties + b"\x02" + extra
    return properties + extra
