"""Reads the records of one queue for a pop.

Messages of a retry topic are delivered under the topic that the client requested: their record is
rewritten, with the receipt handle in the property POP_CK.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.broker.pull.pull_subscription import Wanted, reader_for
from penstock.errors import RecordError
from penstock.store import get
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import Reader
from penstock.wire import layout, octets
from penstock.wire.codes import PROPERTY_FIRST_POP_TIME, PROPERTY_POP_CK
from penstock.wire.message import decode_properties, encode_properties
from penstock.wire.output import Output
from penstock.wire.record import RECORD, StoredRecord

_OFFSET_MOVED: Final = (get.OFFSET_TOO_SMALL, get.OFFSET_OVERFLOW_BADLY, get.OFFSET_FOUND_NULL)
_TOPIC_V1_MAX: Final = 127
_DROPPABLE: Final = ("CLUSTER", "MSG_REGION", "TRACE_ON", PROPERTY_FIRST_POP_TIME)
"""Properties that are dropped if the receipt handle does not fit into the record."""


@dataclass(slots=True)
class ReadBatch:
    """Messages of a queue; `start_offset` is where they were read from, after any correction."""

    topic: str
    queue: ConsumeQueue
    start_offset: int
    next_offset: int = 0
    max_offset: int = 0
    data: bytes = b""
    offsets: list[int] = field(default_factory=list)
    log_offset: int = 0  # lowest log offset of the messages
    stored_ms: int = 0  # store time of the first message

    def rest(self) -> int:
        """The number of messages that follow in the queue."""
        return max(self.max_offset - self.next_offset, 0)


def read_messages(
    topic: str,
    group: str,
    queue: ConsumeQueue,
    offset: int,
    *,
    reader: Reader,
    count_max: int,
    bytes_max: int,
    wanted: Wanted,
    confirm_offset: int,
    wait: bool,
) -> ReadBatch | None:
    """Messages from an offset on that belong to the group; None if it needs the disk and may not
    wait."""
    filtered = reader_for(reader, wanted.for_group(topic, group))
    status = filtered.find(queue, offset, count_max, bytes_max, confirm_offset, wait)
    if status in _OFFSET_MOVED:  # the group's offset is outside of the queue
        offset = filtered.next_offset
        status = filtered.find(queue, offset, count_max, bytes_max, confirm_offset, wait)
    if status == get.COLD:
        return None
    batch = ReadBatch(topic, queue, offset, max(filtered.next_offset, offset), filtered.max_offset)
    if status == get.FOUND:
        output = Output(filtered.total + 1)
        if filtered.copy_to(output, wait):
            batch.data = output.take()
            _find_offsets(batch)
        elif not wait:
            return None
        else:
            batch.next_offset = offset  # deleted by retention
    return batch


def _find_offsets(batch: ReadBatch) -> None:
    data, at, log_offsets = batch.data, 0, []
    while at + layout.FIXED_BYTES <= len(data):
        size = octets.get_i32(data, at + layout.SIZE_AT)
        if size <= 0:
            break  # a damaged record: the start of the next one is unknown
        batch.offsets.append(octets.get_i64(data, at + layout.QUEUE_OFFSET_AT))
        log_offsets.append(octets.get_i64(data, at + layout.PHYSICAL_OFFSET_AT))
        at += size
    if log_offsets:
        batch.log_offset = min(log_offsets)
        sys_flag = octets.get_i32(data, layout.SYS_FLAG_AT)
        batch.stored_ms = octets.get_i64(data, layout.store_ms_at(sys_flag))


def _with_receipt(text: bytes, receipt: str) -> bytes:
    """Properties with a receipt handle; droppable ones are removed if it does not fit."""
    properties = decode_properties(text)
    properties.setdefault(PROPERTY_POP_CK, receipt)
    for droppable in ("", *_DROPPABLE):
        properties.pop(droppable, None)
        try:
            return encode_properties(properties)
        except RecordError:
            continue
    return text


def restore_topic(data: bytes, topic: str, receipts: list[str]) -> bytes:
    """The records as messages of this topic, each with its receipt handle."""
    stored, records, at = StoredRecord(), [], 0
    stored.bind(memoryview(bytearray(data)))
    name = topic.encode()
    for receipt in receipts:
        if stored.read(at, len(data)) != RECORD:
            break
        text = data[stored.properties_at : stored.properties_at + stored.properties_length]
        text = _with_receipt(text, receipt)
        v2 = len(name) > _TOPIC_V1_MAX
        tail = len(name).to_bytes(2 if v2 else 1, "big") + name + len(text).to_bytes(2, "big")
        head = data[at + layout.HEAD_BYTES : stored.body_at + stored.body_length]
        magic = (layout.MAGIC_V2 if v2 else layout.MAGIC_V1).to_bytes(4, "big", signed=True)
        size = layout.HEAD_BYTES + len(head) + len(tail) + len(text)
        records.append(size.to_bytes(4, "big") + magic + head + tail + text)
        at += stored.size
    return b"".join(records)
