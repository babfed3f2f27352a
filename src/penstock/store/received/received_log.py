"""The log of a slave: records of the master's log are checked, appended as they are and dispatched.

What arrives ends anywhere, mostly inside a record. The log gets whole records only, because half of
one could be taken for a whole one after a crash: a record's text has no checksum. The rest waits in
memory. Every record is checked as in a recovery, before it is written: its magic number, its
lengths, its own log offset and the CRC of its body.

What is not a valid record is refused, and the caller connects again. If the same bytes arrive a
second time, they are in the master's log, which is damaged there: they become a damaged range of
this log, as in a recovery, and the log goes on behind them. `_accept` has the conditions.

The blank record at the end of a segment is written when its head has arrived, and the bytes that
fill the segment up are skipped: they are zero.
"""

import logging
from collections.abc import Callable

from penstock.errors import ReplicationError, StoreError
from penstock.store.commitlog import CommitLog
from penstock.store.put import NO_QUEUE, REFUSED, StoreWriter
from penstock.store.received.received_damage import (
    OTHER_BLANK,
    OTHER_LENGTH,
    PIECE_BYTES_MAX,
    ReceivedDamage,
    judge_received,
    next_look,
    received_damage,
    received_problem,
)
from penstock.store.recovery.damage import LENGTHS
from penstock.wire import layout, octets
from penstock.wire.record import NOTHING, StoredRecord

log = logging.getLogger(__name__)

_NOTHING, _NO_QUEUE, _REFUSED = NOTHING, NO_QUEUE, REFUSED
_OTHER_BLANK, _OTHER_LENGTH, _LENGTHS = OTHER_BLANK, OTHER_LENGTH, LENGTHS

_VALID, _INCOMPLETE, _BLANK, _INVALID = range(4)
_EVERYTHING = (1 << 63) - 1
_TEXT_BYTES_MAX = (1 << 15) - 1  # of a topic, and of properties


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
        # The part of a record that has arrived, and with how many bytes it is looked at again.
        self._rest: bytearray = bytearray()
        self._wanted: int = 0
        # Bytes of a blank record that are still to come.
        self._skip: int = 0
        # The record at hand; bound to a buffer only while a method is working.
        self._stored: StoredRecord = StoredRecord()
        self._stored.durable_to = _EVERYTHING  # a received record can't be torn
        # What is wrong with it: an index of PROBLEMS, or one of `received_damage`.
        self._problem: int = 0
        # A record of the master's log is known to begin here.
        self._boundary: int = -1
        # What was refused last, and its log offset.
        self._refused: bytes = b""
        self._refused_at: int = -1
        # Damaged ranges by their log offset, until they are dispatched.
        self._damage: dict[int, ReceivedDamage] = {}

    def restart(self, next_offset: int = -1, *, equal: bool = False) -> None:
        """The connection to the master is new: bytes are expected from the log's end on.

        From `next_offset` on, if that is larger: then zeros are before it. `equal`: the logs have
        been compared, so a record of the master's log begins where this log ends.
        """
        self.next_offset = max(self.log.end, next_offset)
        self._rest = bytearray(self.next_offset - self.log.end)
        self._wanted = layout.BLANK_BYTES
        self._skip = 0
        if equal or self.log.end % self.log.segments.segment_bytes == 0:
            self._boundary = self.log.end
        elif self._refused_at != self.log.end:
            self._boundary = -1  # the log of the master may be another one by now

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
            if len(self._rest) < self._wanted:
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
        if at > 0:
            if self.log.append_raw(data[:at]) < 0:
                raise self._no_room()
            self._boundary, self._refused = self.log.end, b""
        if kind == _INVALID:
            at += self._accept(data[at:], left - at, size)
        if kind == _BLANK:
            self._roll()
            available = min(len(data) - at, size)
            self._skip = size - available
            at += available
        return at

    def _accept(self, data: memoryview, left: int, size: int) -> int:
        """Take the damaged range at the begin of `data`; 0 if its end is not known yet.

        Raises ReplicationError unless all of this is certain:

        * The damage is in the master's log: the same bytes have arrived before. A connection that
          damages something damages something else the next time.
        * A record of the master's log begins here. Otherwise the logs may differ.
        * The segments of both logs have the same length.
        """
        offset = self.log.end
        refused = self._refused if self._refused_at == offset else b""
        known = min(len(refused), len(data))
        if self._boundary != offset or known == 0 or data[:known] != refused[:known]:
            raise self._refuse(data)
        length = judge_received(data, offset, left, self._problem, size)
        if self._problem == _OTHER_LENGTH or (self._problem == _OTHER_BLANK and length == size):
            raise self._refuse(data)
        if length == 0 and len(data) < min(PIECE_BYTES_MAX, left):
            self._wanted = next_look(len(data))
            return 0
        if not 0 < length <= PIECE_BYTES_MAX:
            length = min(PIECE_BYTES_MAX, left - layout.BLANK_BYTES)
        if length > len(refused):
            raise self._refuse(data)
        damage = received_damage(data[:length], offset, self._problem, size)
        if length < left:
            if self.log.append_raw(data[:length]) < 0:
                raise self._no_room()
        else:
            self._roll()  # nothing but the blank record can be there
        self._refused = b""
        self._boundary = self.log.end
        self._damage[offset] = damage
        self.writer.damage.add(damage.range)
        log.warning("the master has sent the same bytes twice: %s", damage.range)
        return length

    def _refuse(self, data: memoryview) -> ReplicationError:
        """Note what is refused."""
        self._refused = bytes(data[:PIECE_BYTES_MAX])
        self._refused_at = self.log.end
        return ReplicationError(
            f"what the master sent for log offset {self.log.end} is not a valid record: "
            f"{received_problem(self._problem)}",
            hint="the slave requests it again; if that does not help, compare the settings and the "
            "logs of both, or delete the slave's store so that it begins again",
        )

    def _roll(self) -> None:
        if self.log.roll() < 0:
            raise self._no_room()
        self._boundary = self.log.end

    def _no_room(self) -> StoreError:
        refusal = self.log.refusal
        assert refusal is not None
        return refusal

    def _check(self, at: int, end: int, left: int, offset: int) -> int:
        """Look at the record at `at` of the buffer; the segment has `left` more bytes."""
        stored = self._stored
        if end - at < layout.BLANK_BYTES:
            return self._incomplete(layout.BLANK_BYTES)
        size = octets.get_i32(stored.buffer, at + layout.SIZE_AT)
        magic = octets.get_i32(stored.buffer, at + layout.MAGIC_AT)
        stored.size = size
        if magic == layout.MAGIC_BLANK:
            return _BLANK if size == left else self._invalid(_OTHER_BLANK)
        if (magic == layout.MAGIC_V1 or magic == layout.MAGIC_V2) and (
            size > end - at or size > left - layout.BLANK_BYTES
        ):
            return self._check_lengths(at, end, left, size, magic)
        if stored.read(at, end) == _NOTHING or stored.check(offset) == _NOTHING:
            return self._invalid(stored.problem)
        return _VALID

    def _check_lengths(self, at: int, end: int, left: int, size: int, magic: int) -> int:
        """Look at a record that is not complete, or not within its segment.

        As far as its lengths have arrived they must be possible: a damaged size must not make the
        slave wait for bytes that belong to other records, or do not exist yet.
        """
        stored = self._stored
        if end - at < layout.FIXED_BYTES:
            return self._incomplete(layout.FIXED_BYTES)
        place = layout.body_at(octets.get_i32(stored.buffer, at + layout.SYS_FLAG_AT))
        if end - at < place:
            return self._incomplete(place)
        body_length = octets.get_i32(stored.buffer, at + place - layout.BODY_LENGTH_BEFORE_BODY)
        prefix = layout.topic_length_bytes(magic)
        text_bytes = size - place - body_length - prefix - layout.PROPERTIES_LENGTH_BYTES
        if body_length < 0 or not 0 <= text_bytes <= 2 * _TEXT_BYTES_MAX:
            return self._invalid(_LENGTHS)
        place += body_length + prefix
        if end - at < place:
            return self._incomplete(place)
        if prefix == 2:
            topic_length = octets.get_i16(stored.buffer, at + place - prefix)
        else:
            topic_length = stored.buffer[at + place - prefix]
        if topic_length < 0 or topic_length > text_bytes:
            return self._invalid(_LENGTHS)
        place += topic_length + layout.PROPERTIES_LENGTH_BYTES
        if end - at < place:
            return self._incomplete(place)
        properties_length = octets.get_i16(
            stored.buffer, at + place - layout.PROPERTIES_LENGTH_BYTES
        )
        if properties_length != size - place:
            return self._invalid(_LENGTHS)
        if size > left - layout.BLANK_BYTES:
            return self._invalid(_OTHER_LENGTH)
        return self._incomplete(size)

    def _incomplete(self, wanted: int) -> int:
        self._wanted = wanted
        return _INCOMPLETE

    def _invalid(self, problem: int) -> int:
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
            if self._damage and begin + at in self._damage:
                done = self._dispatch_damage(begin + at)
                if done:
                    at += self._damage.pop(begin + at).range.length
                continue
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
        unplaced = self.writer.unplaced
        status = self.writer.dispatch(stored)
        if status == _NO_QUEUE:
            if self.make_queue(self._topic(), stored.queue_id) is None:
                self.damaged += 1
                return True
            status = self.writer.dispatch(stored)
        if status == _REFUSED:
            return False
        if self.writer.unplaced != unplaced:
            topic = self._topic().decode("utf-8", "replace")
            self.log.note_damage(
                stored.physical_offset,
                f"a message of topic {topic}, queue {stored.queue_id}, or the one before it,",
                "its queue offset does not continue the queue",
            )
        self.records += 1
        return True

    def _topic(self) -> bytes:
        stored = self._stored
        return bytes(stored.buffer[stored.topic_at : stored.topic_at + stored.topic_length])

    def _dispatch_damage(self, offset: int) -> bool:
        """Have a filler stand for a lost message; False if there is no space for it."""
        lost = self._damage[offset].lost
        if lost is None or not lost.queued:
            return True
        queue = self.writer.queues.get(lost.topic, lost.queue_id)
        if queue is None or lost.queue_offset != queue.max_offset:
            return True  # the queue's next record shows what is missing
        try:
            queue.ready()
            self.writer.fill(queue, lost.queue_offset + 1)
        except (StoreError, OSError):
            return False
        return True
