"""Messages as plain values, for everything but the hot path.

`record` reads bytes in place; this module copies them out into a `StoredMessage`, and encodes the
properties and batches that clients and tools send. Invalid UTF-8 is replaced, as in Java.

    host        ip (4 or 16 bytes) · port i32         "10.0.0.1:10911", "[2001:db8::1]:10911"
    properties  name 0x01 value 0x02 …                last 0x02 optional when read
    batch       messages one after another; `wire.layout` has their layout
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from penstock.errors import RecordError
from penstock.wire import layout, octets
from penstock.wire.codes import KEY_SEPARATOR, PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY
from penstock.wire.message_ids import encode_offset_id
from penstock.wire.record import NOTHING, PROBLEMS, PROPERTIES_BYTES_MAX, RECORD, StoredRecord

_SEPARATOR: Final = b"\x02"
_ASSIGN: Final = b"\x01"
_PORT: Final = struct.Struct(">i")
_BATCH_HEAD: Final = struct.Struct(">iiiii")


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of the log; `body` stays compressed if `sys_flag` says so."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    body: bytes
    flag: int
    sys_flag: int
    born_ms: int
    born_host: str
    store_ms: int
    store_host: str
    reconsume_times: int
    prepared_offset: int
    properties: dict[str, str]
    body_crc: int
    size: int

    @property
    def tags(self) -> str | None:
        """The tag, or None."""
        return self.properties.get(PROPERTY_TAGS)

    @property
    def keys(self) -> list[str]:
        """The keys that the message is indexed by."""
        return [key for key in self.properties.get(PROPERTY_KEYS, "").split(KEY_SEPARATOR) if key]

    @property
    def unique_id(self) -> str | None:
        """The id that the client assigned, or None."""
        return self.properties.get(PROPERTY_UNIQ_KEY)

    @property
    def offset_id(self) -> str:
        """The id that the broker assigned: its address and the physical offset."""
        host = encode_host(self.store_host)
        return encode_offset_id(host[:-4], _PORT.unpack(host[-4:])[0], self.physical_offset)

    @property
    def message_id(self) -> str:
        """The id that clients show: the unique id, or else the offset id."""
        return self.unique_id or self.offset_id


def decode_message(data: octets.Bytes, at: int = 0, *, verify: bool = True) -> StoredMessage:
    """The record at `at`; RecordError if there is none, or if `verify` finds a wrong CRC."""
    assert at >= 0, at
    left = len(data) - at
    size = octets.get_i32(data, at) if left >= 4 else left
    buffer = bytearray(memoryview(data)[at : at + max(min(size, left), min(left, 8))])
    return _decode(_bound(buffer), 0, len(buffer), verify=verify)


def decode_messages(data: octets.Bytes, *, verify: bool = True) -> list[StoredMessage]:
    """Records one after another, as in the response to a pull; every byte must belong to one."""
    buffer = bytearray(data)
    record = _bound(buffer)
    messages: list[StoredMessage] = []
    at = 0
    while at < len(buffer):
        message = _decode(record, at, len(buffer), verify=verify)
        messages.append(message)
        at += message.size
    return messages


def split_records(data: bytes) -> Iterator[bytes]:
    """Split records that follow each other, up to the first with an invalid size."""
    at = 0
    while at + 4 <= len(data):
        size = octets.get_i32(data, at)
        if size <= 0:
            return
        yield data[at : at + size]
        at += size


def encode_properties(properties: Mapping[str, str | None]) -> bytes:
    """Encode properties; None is left out. An empty value is sent, but readers ignore it."""
    text = bytearray()
    for key, value in properties.items():
        if value is None:
            continue
        name, content = key.encode("utf-8", "replace"), value.encode("utf-8", "replace")
        if _ASSIGN in name or _SEPARATOR in name or _SEPARATOR in content:
            raise RecordError(f"property {key[:40]!r} contains a separator of properties")
        text += name + _ASSIGN + content + _SEPARATOR
    if len(text) > PROPERTIES_BYTES_MAX:
        raise RecordError.over("properties too long", figure=len(text), limit=PROPERTIES_BYTES_MAX)
    return bytes(text)


def decode_properties(text: octets.Bytes) -> dict[str, str]:
    """Properties by Java's rules: empty names and values are ignored, the last duplicate wins."""
    properties: dict[str, str] = {}
    for each in bytes(text).split(_SEPARATOR):
        name, _, value = each.partition(_ASSIGN)
        if name and value:
            properties[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return properties


def encode_batch(messages: Iterable[tuple[bytes, int, Mapping[str, str | None]]]) -> bytes:
    """The body of a batch of (body, flag, properties) messages."""
    batch = bytearray()
    for body, flag, properties in messages:
        text = encode_properties(properties)
        total = layout.BATCH_FIXED_BYTES + len(body) + len(text)
        batch += _BATCH_HEAD.pack(total, 0, 0, flag, len(body)) + body
        batch += len(text).to_bytes(2, "big") + text
    return bytes(batch)


def decode_host(host: octets.Bytes) -> str:
    """Address and port of a record's host as text."""
    raw = bytes(host)
    if len(raw) not in (8, 20):
        raise RecordError(f"a host has 8 or 20 bytes, not {len(raw)}")
    port = _PORT.unpack(raw[-4:])[0]
    address = ip_address(raw[:-4])
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def encode_host(text: str) -> bytes:
    """The bytes of "ip:port"; Java writes IPv6 without brackets, so they are optional."""
    address, _, port = text.rpartition(":")
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    try:
        return ip_address(address).packed + _PORT.pack(int(port))
    except (ValueError, struct.error):
        raise RecordError(f"{text[:80]!r} is not an address and a port") from None


def _bound(buffer: bytearray) -> StoredRecord:
    record = StoredRecord()
    record.bind(memoryview(buffer or bytearray(1)))
    return record


def _decode(record: StoredRecord, at: int, end: int, *, verify: bool) -> StoredMessage:
    found = record.read(at, end)
    if found != RECORD:
        problem = (
            PROBLEMS[record.problem] if found == NOTHING else "the rest of the segment is unused"
        )
        raise RecordError(f"no message at byte {at}: {problem}")
    buffer = record.buffer
    body = bytes(buffer[record.body_at : record.body_at + record.body_length])
    if verify and octets.crc31(body, 0, len(body)) != record.body_crc:
        raise RecordError(f"message at byte {at}: the body does not match its CRC")
    topic = bytes(buffer[record.topic_at : record.topic_at + record.topic_length])
    text = buffer[record.properties_at : record.properties_at + record.properties_length]
    born_at, store_at = record.at + layout.BORN_HOST_AT, record.store_host_at
    return StoredMessage(
        topic=topic.decode("utf-8", "replace"),
        queue_id=record.queue_id,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        body=body,
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_ms=record.born_ms,
        born_host=decode_host(buffer[born_at : born_at + record.born_host_length]),
        store_ms=record.store_ms,
        store_host=decode_host(buffer[store_at : store_at + record.store_host_length]),
        reconsume_times=record.reconsume_times,
        prepared_offset=record.prepared_offset,
        properties=decode_properties(text),
        body_crc=record.body_crc,
        size=record.size,
    )
