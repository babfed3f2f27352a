"""Reading messages for pops: records of one queue from an offset on, with their offsets.

Messages of a retry topic are handed out under the topic that was asked for: their record is written
anew, with their receipt as the property POP_CK.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.broker.pull import Wanted, through
from penstock.errors import RecordError
from penstock.store import get
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import Reader
from penstock.wire import layout, octets
from penstock.wire.codes import PROPERTY_FIRST_POP_TIME, PROPERTY_POP_CK
from penstock.wire.message import decode_properties, encode_properties
from penstock.wire.output import Output
from penstock.wire.record import RECORD, StoredRecord

_MOVED: Final = (get.OFFSET_TOO_SMALL, get.OFFSET_OVERFLOW_BADLY, get.OFFSET_FOUND_NULL)
_TOPIC_V1_MAX: Final = 127
_SPARE: Final = ("CLUSTER", "MSG_REGION", "TRACE_ON", PROPERTY_FIRST_POP_TIME)
"""What a message with very long properties is handed out without."""


@dataclass(slots=True)
class Taken:
    """What a queue gave: `start` is where it was read from, perhaps not where that was asked."""

    topic: str
    queue: ConsumeQueue
    start: int
    next_offset: int = 0
    max_offset: int = 0
    data: bytes = b""
    offsets: list[int] = field(default_factory=list)
    place: int = 0  # log offset of the first in the log
    stored_ms: int = 0  # when the first was stored

    def rest(self) -> int:
        """Messages behind these."""
        return max(self.max_offset - self.next_offset, 0)


def read(
    topic: str,
    queue: ConsumeQueue,
    offset: int,
    *,
    reader: Reader,
    count_max: int,
    bytes_max: int,
    wanted: Wanted,
    confirmed: int,
    wait: bool,
) -> Taken | None:
    """Messages from an offset on; None if that would wait for the disk and may not."""
    sieve = through(reader, wanted)
    status = sieve.find(queue, offset, count_max, bytes_max, confirmed, wait)
    if status in _MOVED:  # the group's offset is none of this queue: it goes on where there is one
        offset = sieve.next_offset
        status = sieve.find(queue, offset, count_max, bytes_max, confirmed, wait)
    if status == get.COLD:
        return None
    taken = Taken(topic, queue, offset, max(sieve.next_offset, offset), sieve.max_offset)
    if status == get.FOUND:
        output = Output(sieve.total + 1)
        if sieve.copy_to(output, wait):
            taken.data = output.take()
            _find_offsets(taken)
        elif not wait:
            return None
        else:
            taken.next_offset = offset  # retention was quicker
    return taken


def _find_offsets(taken: Taken) -> None:
    data, at, places = taken.data, 0, []
    while at + layout.FIXED_BYTES <= len(data):
        size = octets.get_i32(data, at + layout.SIZE_AT)
        if size <= 0:
            break  # a damaged record: where the next begins is not known
        taken.offsets.append(octets.get_i64(data, at + layout.QUEUE_OFFSET_AT))
        places.append(octets.get_i64(data, at + layout.PHYSICAL_OFFSET_AT))
        at += size
    if places:
        taken.place = min(places)
        sys_flag = octets.get_i32(data, layout.SYS_FLAG_AT)
        taken.stored_ms = octets.get_i64(data, layout.store_ms_at(sys_flag))


def _with_receipt(text: bytes, receipt: str) -> bytes:
    """Properties with a receipt; very long ones without what is in their way."""
    properties = decode_properties(text)
    properties.setdefault(PROPERTY_POP_CK, receipt)
    for spare in ("", *_SPARE):
        properties.pop(spare, None)
        try:
            return encode_properties(properties)
        except RecordError:
            continue
    return text


def restore_topic(data: bytes, topic: str, receipts: list[str]) -> bytes:
    """The records as messages of this topic, each with its receipt."""
    stored, pieces, at = StoredRecord(), [], 0
    stored.bind(memoryview(bytearray(data)))
    name = topic.encode()
    for receipt in receipts:
        if stored.read(at, len(data)) != RECORD:
            break
        text = data[stored.properties_at : stored.properties_at + stored.properties_length]
        text = _with_receipt(text, receipt)
        long = len(name) > _TOPIC_V1_MAX
        tail = len(name).to_bytes(2 if long else 1, "big") + name + len(text).to_bytes(2, "big")
        head = data[at + layout.HEAD_BYTES : stored.body_at + stored.body_length]
        magic = (layout.MAGIC_V2 if long else layout.MAGIC_V1).to_bytes(4, "big", signed=True)
        size = layout.HEAD_BYTES + len(head) + len(tail) + len(text)
        pieces.append(size.to_bytes(4, "big") + magic + head + tail + text)
        at += stored.size
    return b"".join(pieces)
