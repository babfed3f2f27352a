"""Single records and searches: by physical offset, by key, by time.

Everything may wait for the disk and belongs in the thread pool, except `read_record` without
`wait`.
"""

from penstock.store.commitlog import CommitLog
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.index import Index
from penstock.wire import layout, octets
from penstock.wire.record import PROBLEMS, RECORD, StoredRecord, java_hash

QUERY_MAX = 64
"""Most messages of one query by key, as in RocketMQ."""
GONE = b""
"""The record was deleted, or never existed."""


def key_hash(topic: str, key: str) -> int:
    """The hash under which the index keeps a key or unique id of a topic; a tag is `T#tag`."""
    value = abs(java_hash(f"{topic}#{key}"))
    return 0 if value == 1 << 31 else value


class Lookup:
    """Reads single records and searches."""

    def __init__(
        self, log: CommitLog, index: Index | None, hot_bytes: int, check: bool = True
    ) -> None:
        self._log = log
        self._index = index
        self._hot_bytes = hot_bytes
        self._check = check

    def read_record(self, offset: int, size: int, *, wait: bool) -> bytes | None:
        """The bytes of the record at a physical offset whose size is known; GONE if there is none,
        or a damaged one.

        With `wait` false, None if that would wait for the disk.
        """
        log = self._log
        segment = log.segments.find(offset)
        if segment is None or size < layout.FIXED_BYTES or offset + size > log.written:
            return GONE
        at = offset - segment.start
        if at + size > segment.size:
            return GONE
        if wait:
            data = segment.disk.read_at(segment.fd, size, at)
            return data if len(data) == size and self._is_whole(data, offset) else GONE
        if offset >= max(log.hot_from, log.written - self._hot_bytes):
            return bytes(segment.slice(offset, size))
        buffer = bytearray(size)
        if not segment.disk.read_now(segment.fd, memoryview(buffer), at):
            return None
        return bytes(buffer) if self._is_whole(buffer, offset) else GONE

    def _is_whole(self, data: bytes | bytearray, offset: int) -> bool:
        """False for a record of this offset whose body is damaged; callers check the rest."""
        stored = StoredRecord()
        stored.durable_to = offset + len(data)
        stored.bind(memoryview(bytearray(data)))
        if stored.read(0, len(data)) != RECORD or stored.physical_offset != offset:
            return True
        if not self._check or stored.check(offset) == RECORD:
            return True
        topic = bytes(data[stored.topic_at : stored.topic_at + stored.topic_length])
        name = topic.decode("utf-8", "replace")
        self._log.note_damage(
            offset,
            f"the message of topic {name}, queue {stored.queue_id}, queue offset "
            f"{stored.queue_offset},",
            PROBLEMS[stored.problem],
        )
        return False

    def record(self, offset: int, confirm_offset: int) -> bytes | None:
        """The record at a physical offset, or None if none begins there below `confirm_offset`, or
        a damaged one."""
        segment = self._log.segments.find(offset)
        if segment is None:
            return None
        at = offset - segment.start
        head = segment.disk.read_at(segment.fd, layout.HEAD_BYTES, at)
        if len(head) < layout.HEAD_BYTES:
            return None
        size = octets.get_i32(head, layout.SIZE_AT)
        if size < layout.FIXED_BYTES or size > segment.size - at or offset + size > confirm_offset:
            return None
        data = bytearray(segment.disk.read_at(segment.fd, size, at))
        stored = StoredRecord()
        stored.bind(memoryview(data))
        if len(data) != size or stored.read(0, size) != RECORD:
            return None
        if stored.physical_offset != offset or not self._is_whole(data, offset):
            return None
        return bytes(data)

    def store_ms(self, offset: int) -> int:
        """Store time of the record at a physical offset, or -1."""
        segment = self._log.segments.find(offset)
        if segment is None or offset + layout.FIXED_BYTES > segment.start + segment.size:
            return -1
        head = segment.disk.read_at(segment.fd, layout.FIXED_BYTES, offset - segment.start)
        if len(head) < layout.FIXED_BYTES:
            return -1
        sys_flag = octets.get_i32(head, layout.SYS_FLAG_AT)
        return octets.get_i64(head, layout.store_ms_at(sys_flag))

    def by_key(
        self, topic: str, key: str, *, begin_ms: int, end_ms: int, most: int, confirm_offset: int
    ) -> list[bytes]:
        """Records of a topic with this key, oldest first; only the newest `most` of them."""
        if self._index is None:
            return []
        most = min(most, QUERY_MAX)
        found = []
        wanted = key_hash(topic, key)
        for offset in sorted(set(self._index.find(wanted, begin_ms, end_ms, most))):
            data = self.record(offset, confirm_offset)
            if data is not None:
                found.append(data)
        return found

    def offset_at(
        self, queue: ConsumeQueue, ms: int, *, confirm_offset: int, upper: bool = False
    ) -> int:
        """Queue offset by store time.

        Lower: the first message stored at `ms` or later (one past the last if there is none).
        Upper: the last one stored at `ms` or earlier (the first if there is none).
        """
        low = first = queue.min_offset
        high = queue.visible_by_file(confirm_offset)
        while low < high:
            middle = (low + high) // 2
            found = queue.next_real(middle, high)
            stored_ms = self.store_ms(found[1][0]) if found is not None else ms + 1
            if found is not None and (stored_ms < ms or (upper and stored_ms == ms)):
                low = found[0] + 1
            else:
                high = middle
        return max(low - 1, first) if upper else low

    def earliest_ms(self, queue: ConsumeQueue) -> int:
        """Store time of the queue's oldest message, or -1."""
        entry = queue.entry(queue.min_offset)
        return self.store_ms(entry[0]) if entry is not None else -1
