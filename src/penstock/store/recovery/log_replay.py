"""Walks the records of the log after a crash, checks them and dispatches them again."""

from collections.abc import Callable, Mapping

from penstock.store.put import NO_QUEUE, StoreWriter
from penstock.store.segment import Segment
from penstock.wire.record import BLANK, NOTHING, StoredRecord

_BLANK, _NOTHING, _NO_QUEUE = BLANK, NOTHING, NO_QUEUE


class Replay:
    """One walk over segments; its counts are fields.

    `make_queue` returns the queue of a topic and queue id, or None for a name that no queue can
    have: such a record has a damaged header (which has no checksum) and gets no entry. Neither does
    a record below the offset that `removed` names for its topic: the topic was deleted there.
    """

    def __init__(
        self,
        writer: StoreWriter | None,
        make_queue: Callable[[bytes, int], object],
        removed: Mapping[str, int] | None = None,
    ) -> None:
        self.writer: StoreWriter | None = writer
        self.removed: dict[bytes, int] = {t.encode(): end for t, end in (removed or {}).items()}
        self.make_queue: Callable[[bytes, int], object] = make_queue
        # The record at hand; bound to a segment only while `run` is working.
        self.stored: StoredRecord = StoredRecord()
        # Records seen, those that no queue can have, and those of deleted topics.
        self.records: int = 0
        self.damaged: int = 0
        self.skipped: int = 0
        # Log offset of the last valid record, or -1.
        self.last_offset: int = -1
        # Whether the last `run` stopped where there is no valid record.
        self.ended: bool = False

    def run(self, segment: Segment, offset: int, bytes_max: int) -> int:
        """Continue at `offset` of this segment for about `bytes_max`; returns where it stopped.

        At the segment's end that is the start of the next. `ended` is set where no valid record
        is found; `stored.problem` then says why (0: a blank record that ends too early).
        """
        stored = self.stored
        self.ended = False
        stored.bind(segment.view)
        at = offset - segment.start
        end = segment.size
        stop = min(at + bytes_max, end)
        while at < stop:
            kind = stored.read(at, end)
            if kind == _BLANK:
                if at + stored.size != end:
                    self.ended = True
                    break
                at = end
                break
            if kind == _NOTHING or stored.check(segment.start + at) == _NOTHING:
                self.ended = True
                break
            if self.removed and self._is_removed():
                self.skipped += 1
            elif self.writer is not None and self.writer.replay(stored) == _NO_QUEUE:
                if self.make_queue(self._topic(), stored.queue_id) is None:
                    self.damaged += 1
                else:
                    self.writer.replay(stored)
            self.records += 1
            self.last_offset = segment.start + at
            at += stored.size
        stored.release()
        return segment.start + at

    def _is_removed(self) -> bool:
        """Whether the record belongs to a deleted topic; its store time counts nevertheless."""
        stored = self.stored
        if stored.physical_offset >= self.removed.get(self._topic(), 0):
            return False
        if self.writer is not None:
            self.writer.note_store_ms(stored.store_ms)
        return True

    def _topic(self) -> bytes:
        stored = self.stored
        return bytes(stored.buffer[stored.topic_at : stored.topic_at + stored.topic_length])
