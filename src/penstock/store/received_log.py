"""The log of a slave: records of the master's log are checked, appended as they are and dispatched.

What arrives ends anywhere, mostly inside a record. The log gets whole records only, because half of
one could be taken for a whole one after a crash: a record's text has no checksum. The rest waits in
memory. Every record is checked as in a recovery, before it is written: its magic number, its
lengths, its own log offset and the CRC of its body.

The blank record at the end of a segment is written when its head has arrived, and the bytes that
fill the segment up are skipped: they are zero.
"""

from collections.abc import Callable

from penstock.errors import ReplicationError, StoreError
from penstock.store.commitlog import CommitLog
from penstock.store.put import NO_QUEUE, REFUSED, StoreWriter
from penstock.wire import layout, octets
from penstock.wire.record import NOTHING, PROBLEMS, StoredRecord

_NOTHING, _NO_QUEUE, _REFUSED = NOTHING, NO_QUEUE, REFUSED

_VALID, _INCOMPLETE, _BLANK, _INVALID = range(4)
_EVERYTHING = (1 << 63) - 1


class ReceivedLog:
    """Appends and dispatches the master's log."""

    def __init__(
        self,
        log: CommitLog,
        writer: StoreWriter,
        make_queue: Callable[[bytes, int], object],
    ) -> None:
        """`make_queue` returns the queue of a topic and queue id, or None for a name that no queue
        can have."""
        self.log: CommitLog = log
        self.writer: StoreWriter = writer
        self.make_queue: Callable[[bytes, int], object] = make_queue
        # Log offset of the next byte that is expected.
        self.next_offset: int = log.end
        # Log offset behind the last dispatched record; less than the log's end on a full disk.
        self.dispatched: int = log.end
        # Records dispatched, and those whose head no queue can have, since the start.
        self.records: int = 0
        self.damaged: int = 0
        # The part of a record that has arrived.
        self._rest: bytearray = bytearray()
        # Bytes of a blank record that are still to come.
        self._skip: int = 0
        # The record at hand; bound to a buffer only while a method is working.
        self._stored: StoredRecord = StoredRecord()
        self._stored.durable_to = _EVERYTHING  # a received record can't be torn
        # What is wrong with it.
        self._problem: str = ""

    def restart(self, next_offset: int = -1) -> None:
        """The connection to the master is new: bytes are expected from the log's end on.

        From `next_offset` on, if that is larger: then zeros are before it.
        """
        self.next_offset = max(self.log.end, next_offset)
        self._rest = bytearray(self.next_offset - self.log.end)
        self._skip = 0

    def receive(self, data: memoryview) -> None:
        """Append the records that are complete with these bytes, which begin at `next_offset`.

        Raises ReplicationError if they are not valid records of this log, StoreError or OSError
        if they can't be written. In either case `restart` comes next.
        """
        self.next_offset += len(data)
        if self._skip > 0:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        if len(self._rest) > 0:
            self._rest += data
            if len(self._rest) < self._needed():
                return
            data, self._rest = memoryview(self._rest), bytearray()
        while len(data) > 0:
            taken = self._append_some(data)
            if taken == 0:
                self._rest = bytearray(data)
                break
            data = data[taken:]

    def dispatch(self) -> bool:
        """Dispatch all records of the log; False if there is no space for an entry."""
        while self.dispatched < self.log.end:
            if not self._dispatch_segment():
                return False
        return True

    def _needed(self) -> int:
        """Length of the record that has arrived in part; the length itself may be missing."""
        if len(self._rest) < layout.BLANK_BYTES:
            return layout.BLANK_BYTES
        if octets.get_i32(self._rest, layout.MAGIC_AT) == layout.MAGIC_BLANK:
            return layout.BLANK_BYTES
        return octets.get_i32(self._rest, layout.SIZE_AT)

    def _append_some(self, data: memoryview) -> int:
        """Append the records at the begin of `data`, up to the segment's end.

        Returns the bytes that are done with, 0 if there is no whole record.
        """
        segment_bytes = self.log.segments.segment_bytes
        left = segment_bytes - self.log.end % segment_bytes
        stored = self._stored
        stored.bind(data)
        at, kind = 0, _VALID
        while kind == _VALID and at < len(data):
            kind = self._check(at, len(data), left - at, self.log.end + at)
            if kind == _VALID:
                at += stored.size
        size = stored.size
        stored.release()
        if at > 0 and self.log.append_raw(data[:at]) < 0:
            raise self._no_room()
        if kind == _INVALID:
            raise ReplicationError(
                f"what the master sent for log offset {self.log.end} is not a valid record: "
                f"{self._problem}"
            )
        if kind == _BLANK:
            if self.log.roll() < 0:
                raise self._no_room()
            available = min(len(data) - at, size)
            self._skip = size - available
            at += available
        return at

    def _no_room(self) -> StoreError:
        refusal = self.log.refusal
        assert refusal is not None
        return refusal

    def _check(self, at: int, end: int, left: int, offset: int) -> int:
        """Look at the record at `at` of the buffer; the segment has `left` more bytes."""
        stored = self._stored
        if end - at < layout.BLANK_BYTES:
            return _INCOMPLETE
        size = octets.get_i32(stored.buffer, at + layout.SIZE_AT)
        magic = octets.get_i32(stored.buffer, at + layout.MAGIC_AT)
        if magic == layout.MAGIC_BLANK:
            stored.size = size
            if size == left:
                return _BLANK
            return self._invalid("the segments of the master have another length")
        if magic == layout.MAGIC_V1 or magic == layout.MAGIC_V2:
            if size > left - layout.BLANK_BYTES:
                return self._invalid("it does not fit into its segment")
            if size > end - at and size >= layout.FIXED_BYTES:
                return _INCOMPLETE
        if stored.read(at, end) == _NOTHING or stored.check(offset) == _NOTHING:
            return self._invalid(PROBLEMS[stored.problem])
        return _VALID

    def _invalid(self, problem: str) -> int:
        self._problem = problem
        return _INVALID

    def _dispatch_segment(self) -> bool:
        """Dispatch the records of one segment; False if there is no space for an entry."""
        segment = self.log.segments.find(self.dispatched)
        if segment is None:  # retention has deleted it
            self.dispatched = self.log.begin()
            return True
        stored = self._stored
        stored.bind(segment.view)
        begin = segment.start
        at = self.dispatched - begin
        end = min(self.log.end - begin, segment.size)
        done = True
        while at < end and done:
            stored.read(at, end)  # it was checked before it was written
            if stored.magic != layout.MAGIC_BLANK:
                done = self._dispatch_one()
            if done:
                at += stored.size
        self.dispatched = begin + at
        stored.release()
        return done

    def _dispatch_one(self) -> bool:
        """Dispatch the record that was read; False if there is no space for its entry."""
        stored = self._stored
        status = self.writer.dispatch(stored)
        if status == _NO_QUEUE:
            topic = bytes(stored.buffer[stored.topic_at : stored.topic_at + stored.topic_length])
            if self.make_queue(topic, stored.queue_id) is None:
                self.damaged += 1
                return True
            status = self.writer.dispatch(stored)
        if status == _REFUSED:
            return False
        self.records += 1
        return True
