"""Messages in a store's files, found by queue, by log offset or by key, without opening the store.

Each function yields valid and damaged records: a `DumpedRecord` has either a message or the reason
why there is none, so that the output of a damaged store shows where it is damaged.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import CompressionError, RecordError
from penstock.store.index import index_file_bytes
from penstock.store.lookup import key_hash
from penstock.store.tools.file_pieces import read_piece
from penstock.store.tools.inspection import QueueEntries, StoreFiles
from penstock.wire import layout, octets
from penstock.wire.codes import SYS_COMPRESSED
from penstock.wire.compression import decompress
from penstock.wire.message import StoredMessage, decode_message
from penstock.wire.record import BLANK, NOTHING, PROBLEMS, RECORD, StoredRecord

INFLATED_BYTES_MAX = 64 * 1024 * 1024
"""A compressed body is shown up to this size."""


class DumpedRecord(NamedTuple):
    """The record at a log offset; without a `message`, `problem` says why."""

    offset: int
    message: StoredMessage | None
    problem: str | None = None


def walk_log(files: StoreFiles, offset: int, *, salvage: bool = False) -> Iterator[DumpedRecord]:
    """Messages in the log's order from `offset` on.

    Stops at the first invalid record and yields the reason; with `salvage` it continues at the next
    valid one.
    """
    offset = max(offset, files.log_begin)
    while (file := files.log_file(offset)) is not None:
        segment_end = file.start + files.sizes.segment_bytes
        head = read_piece(file.path, offset - file.start, layout.HEAD_BYTES)
        if len(head) == layout.HEAD_BYTES and _is_blank(head):
            offset = segment_end
            continue
        found = read_message(files, offset)
        if found.message is not None:
            yield found
            offset += found.message.size
            continue
        following = files.next_valid(offset + 1)
        if following is None and not any(head):
            return
        yield found
        if not salvage or following is None:
            return
        offset = following


def walk_queue(
    files: StoreFiles, topic: str, queue_id: int, offset: int | None = None
) -> Iterator[DumpedRecord]:
    """Messages of a queue from a queue offset (default: its first) on."""
    entries = QueueEntries(files, topic, queue_id)
    low = entries.min_offset(files.log_begin)
    for number in range(max(offset or 0, low), entries.end):
        entry = entries.entry(number)
        if entry is None:
            yield DumpedRecord(-1, None, f"queue offset {number}: no entry was written")
            continue
        found = read_message(files, entry[0])
        message = found.message
        if message is not None and (
            (message.topic, message.queue_id, message.queue_offset) != (topic, queue_id, number)
        ):
            problem = f"queue offset {number} points at a record of another queue offset"
            found = DumpedRecord(entry[0], None, problem)
        yield found


def walk_topic(files: StoreFiles, topic: str, offset: int | None = None) -> Iterator[DumpedRecord]:
    """Messages of all queues of a topic, queue by queue."""
    for name, queue_id in files.queues():
        if name == topic:
            yield from walk_queue(files, topic, queue_id, offset)


def find_key(files: StoreFiles, topic: str, key: str) -> Iterator[DumpedRecord]:
    """Messages of a topic with this key or unique id, newest first, found in the index files."""
    wanted = key_hash(topic, key)
    seen = set()
    for path in reversed(files.index_files()):
        head = files.index_head(path)
        if head is None or path.stat().st_size != files.index_bytes():
            continue
        slots = files.sizes.index_slots
        slot_at = index_file_bytes(wanted % slots, 0)
        number = octets.get_i32(read_piece(path, slot_at, layout.INDEX_SLOT_BYTES), 0)
        while 0 < number < head.next_number:
            entry = read_piece(path, index_file_bytes(slots, number), layout.INDEX_ENTRY_BYTES)
            offset = octets.get_i64(entry, layout.INDEX_OFFSET_AT)
            if octets.get_i32(entry, layout.INDEX_KEY_HASH_AT) == wanted and offset not in seen:
                seen.add(offset)
                found = read_message(files, offset)
                if found.message is None or _has_key(found.message, topic, key):
                    yield found
            previous = octets.get_i32(entry, layout.INDEX_PREVIOUS_AT)
            if previous >= number:  # damaged: a chain only goes back
                break
            number = previous


def read_message(files: StoreFiles, offset: int) -> DumpedRecord:
    """The message at a log offset, checked."""
    if offset < files.log_begin or files.log_file(offset) is None:
        return DumpedRecord(offset, None, "the log does not contain this offset")
    found = files.record(offset)
    if found is None:
        return DumpedRecord(offset, None, _reason(files, offset))
    stored, data = found
    if stored.check(offset) == NOTHING:
        return DumpedRecord(offset, None, PROBLEMS[stored.problem])
    try:
        return DumpedRecord(offset, decode_message(data))
    except RecordError as error:
        return DumpedRecord(offset, None, error.message)


def plain_body(message: StoredMessage) -> tuple[bytes, str | None]:
    """The decompressed body; or the stored one, and why it can't be decompressed."""
    if not message.sys_flag & SYS_COMPRESSED:
        return message.body, None
    try:
        return decompress(message.body, message.sys_flag, limit=INFLATED_BYTES_MAX), None
    except CompressionError as error:
        return message.body, error.message


def _is_blank(head: bytearray) -> bool:
    return octets.get_i32(head, layout.MAGIC_AT) == layout.MAGIC_BLANK


def _has_key(message: StoredMessage, topic: str, key: str) -> bool:
    """Whether the message has the key: the index has only hashes, so another key may match."""
    return message.topic == topic and (key in message.keys or key == message.unique_id)


def _reason(files: StoreFiles, offset: int) -> str:
    file = files.log_file(offset)
    if file is None:
        return "the log does not contain this offset"
    at = offset - file.start
    head = read_piece(file.path, at, min(4096, files.sizes.segment_bytes - at))
    stored = StoredRecord()
    stored.bind(memoryview(head if head else bytearray(1)))
    kind = stored.read(0, len(head))
    if kind == BLANK:
        return "this is the padding at the segment's end"
    return "the record is truncated" if kind == RECORD else PROBLEMS[stored.problem]
