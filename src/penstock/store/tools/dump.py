"""Finding messages in a store's files without opening it: by queue, by place, by key.

Each function yields what lies there, good or bad: a `Found` has either a message or the reason why
there is none, so that a reader of a damaged store sees where it is damaged.
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


class Found(NamedTuple):
    """What lies at a log offset; `message` is None where `problem` says why."""

    offset: int
    message: StoredMessage | None
    problem: str | None = None


def walk_log(files: StoreFiles, offset: int, *, salvage: bool = False) -> Iterator[Found]:
    """Messages in the log's order from `offset` on.

    Stops at the first place without a good record, after saying why; with `salvage` it goes on at
    the next good one.
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
        following = files.next_good(offset + 1)
        if following is None and not any(head):
            return
        yield found
        if not salvage or following is None:
            return
        offset = following


def walk_queue(
    files: StoreFiles, topic: str, queue_id: int, offset: int | None = None
) -> Iterator[Found]:
    """Messages of a queue from a queue offset (default: its first) on."""
    entries = QueueEntries(files, topic, queue_id)
    low = entries.min_offset(files.log_begin)
    for number in range(max(offset or 0, low), entries.end):
        entry = entries.entry(number)
        if entry is None:
            yield Found(-1, None, f"queue offset {number}: no entry was written")
            continue
        found = read_message(files, entry[0])
        message = found.message
        if message is not None and (
            (message.topic, message.queue_id, message.queue_offset) != (topic, queue_id, number)
        ):
            problem = f"queue offset {number} points at a record of another place"
            found = Found(entry[0], None, problem)
        yield found


def walk_topic(files: StoreFiles, topic: str, offset: int | None = None) -> Iterator[Found]:
    """Messages of all queues of a topic, queue by queue."""
    for name, queue_id in files.queues():
        if name == topic:
            yield from walk_queue(files, topic, queue_id, offset)


def find_key(files: StoreFiles, topic: str, key: str) -> Iterator[Found]:
    """Messages of a topic with this key or unique id, newest first, by the index files."""
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
            if previous >= number:  # a chain only goes back
                break
            number = previous


def read_message(files: StoreFiles, offset: int) -> Found:
    """The message at a log offset, checked."""
    if offset < files.log_begin or files.log_file(offset) is None:
        return Found(offset, None, "the log has no such offset")
    found = files.record(offset)
    if found is None:
        return Found(offset, None, _why(files, offset))
    stored, data = found
    if stored.check(offset) == NOTHING:
        return Found(offset, None, PROBLEMS[stored.problem])
    try:
        return Found(offset, decode_message(data))
    except RecordError as error:
        return Found(offset, None, error.message)


def plain_body(message: StoredMessage) -> tuple[bytes, str | None]:
    """The body as the application sent it, and why it is as stored if it can't be inflated."""
    if not message.sys_flag & SYS_COMPRESSED:
        return message.body, None
    try:
        return decompress(message.body, message.sys_flag, limit=INFLATED_BYTES_MAX), None
    except CompressionError as error:
        return message.body, error.message


def _is_blank(head: bytearray) -> bool:
    return octets.get_i32(head, layout.MAGIC_AT) == layout.MAGIC_BLANK


def _has_key(message: StoredMessage, topic: str, key: str) -> bool:
    """The index knows hashes only, so another key may have met this one's."""
    return message.topic == topic and (key in message.keys or key == message.unique_id)


def _why(files: StoreFiles, offset: int) -> str:
    file = files.log_file(offset)
    if file is None:
        return "the log has no such offset"
    at = offset - file.start
    head = read_piece(file.path, at, min(4096, files.sizes.segment_bytes - at))
    stored = StoredRecord()
    stored.bind(memoryview(head if head else bytearray(1)))
    kind = stored.read(0, len(head))
    if kind == BLANK:
        return "the segment's end padding lies here"
    return "the record is cut off" if kind == RECORD else PROBLEMS[stored.problem]
