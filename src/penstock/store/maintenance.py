"""Maintenance of a store's files: flushing queues and index, the checkpoint, retention.

`tick` decides in the loop and has the pool do the work, one job after another: no checkpoint may
overtake the syncs that it describes, nor those of `expire`.
"""

import errno
import logging
import mmap
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import datetime

from penstock.config import StoreConfig
from penstock.errors import (
    DiskNearlyFull,
    MasterNotConfirmed,
    NotEnoughReplicas,
    NotMaster,
    PenstockError,
    WriteStopped,
)
from penstock.store import retention
from penstock.store.consumequeue.consumequeue import ConsumeQueue, sync_all
from penstock.store.consumequeue.mapped_queues import MappedQueues
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk, is_full
from penstock.store.put import StoreWriter
from penstock.store.recovery.checkpoint import Checkpoint, write_checkpoint
from penstock.store.segment import Segment

log = logging.getLogger(__name__)

RETENTION_EVERY_MS = 10_000
UNMAP_BYTES = 16 * 1024 * 1024
"""How much of the log is unmapped in one call, which holds the GIL for less than a millisecond."""

_TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Failures before anything was asked of the disk: the next round tries again."""

PinSource = Callable[[], int | None]
"""The lowest log offset that is still needed, or None."""


class Maintenance:
    """Periodic work on the files of one store."""

    def __init__(
        self,
        disk: Disk,
        paths: StorePaths,
        config: StoreConfig,
        writer: StoreWriter,
        mapped_queues: MappedQueues,
        *,
        checkpoint: Checkpoint,
        now_ms: int,
    ) -> None:
        self.disk = disk
        self.paths = paths
        self.config = config
        self.writer = writer
        self.mapped_queues = mapped_queues
        self.checkpoint = checkpoint
        self.clock = retention.SteadyClock(now_ms, disk.modified_ms(paths.checkpoint))
        if self.clock.started_late:
            log.warning(
                "the store was not open for %s, or the clock was set forward: that time does not "
                "count for retention",
                _hours(now_ms - self.clock.time(now_ms)),
            )
        self.on_deletion: Callable[[retention.Deletion], None] = _log_deletion
        """Called in the pool after segments were deleted."""
        self.deleted_to = writer.log.begin()
        """Where the log's files begin: everything before is deleted for good."""
        self._pin_sources: list[PinSource] = []
        self._keep_sources: list[PinSource] = []
        self._to_delete: list[Segment] = []  # dropped from the log, not yet deleted
        self._store_times: list[tuple[int, int]] = []  # log end and store time at past rounds
        log_files = writer.log.segments.items
        self._unmapped_to = log_files[-1].start if log_files else 0  # see `_unmap_old_log`
        self._job: Future[None] | None = None
        self._queues: list[ConsumeQueue] = []  # those that the running job syncs
        self._queues_ms = self._index_ms = self._retention_ms = self._unmap_ms = now_ms

    def add_pin_source(self, lowest_needed: PinSource) -> None:
        """Never delete messages from the offset on that this names at the time of deletion."""
        self._pin_sources.append(lowest_needed)

    def add_keep_source(self, lowest_needed: PinSource) -> None:
        """As `add_pin_source`, but they are deleted if the disk is too full."""
        self._keep_sources.append(lowest_needed)

    def pinned_from(self) -> int | None:
        """Messages from this log offset on are still needed; None if none is."""
        return _lowest(self._pin_sources)

    def tick(self, now_ms: int) -> None:
        """Start what is due; nothing is flushed while the last job is still running."""
        step_ms = self.clock.observe(now_ms)
        if step_ms:
            log.warning(
                "the clock was set %s by %s: messages are not deleted earlier because of that",
                "forward" if step_ms > 0 else "back",
                _hours(abs(step_ms)),
            )
        self._unmap_idle(now_ms)
        self._unmap_old_log()
        if self._job is not None:
            if not self._job.done():
                return
            self.finish()
        # A clock that steps back must not stop the maintenance until it has caught up.
        self._queues_ms = min(self._queues_ms, now_ms)
        self._index_ms = min(self._index_ms, now_ms)
        self._retention_ms = min(self._retention_ms, now_ms)
        refusal = self.writer.refusal
        if not isinstance(refusal, WriteStopped | DiskNearlyFull):
            self.writer.log.refusal = None  # the next put tries again
            if not isinstance(refusal, NotMaster | NotEnoughReplicas | MasterNotConfirmed):
                self.writer.refusal = None
        if now_ms - self._retention_ms >= RETENTION_EVERY_MS:
            self._retention_ms = now_ms
            self._retain(now_ms)
        if now_ms - self._queues_ms >= self.config.queue_flush_ms:
            self._queues_ms = now_ms
            index_due = now_ms - self._index_ms >= self.config.index_flush_ms
            if index_due:
                self._index_ms = now_ms
            self._submit(self._flush_job(index_due=index_due))

    def _unmap_idle(self, now_ms: int) -> None:
        elapsed_ms = max(now_ms - self._unmap_ms, 0)
        self._unmap_ms = now_ms
        mappings = self.mapped_queues.unmap_idle(
            elapsed_ms, self.config.queue_rest_ms, self.writer.confirm_offset
        )
        if mappings:
            self.disk.submit(mappings.clear)

    def _unmap_old_log(self) -> None:
        """Unmap the pages of the log before its hot part, which are read without the mapping.

        They stay in the page cache. But mapped pages count as memory of the process: with all of
        the log, the kernel would take it for the largest one, and end it first when memory is
        short.
        """
        log = self.writer.log
        end = log.written - self.config.hot_bytes
        begin = max(self._unmapped_to, log.begin())
        pieces: list[tuple[Segment, int, int]] = []
        while begin + UNMAP_BYTES <= end and (segment := log.segments.find(begin)) is not None:
            at = begin - segment.start
            length = min(UNMAP_BYTES, segment.size - at)
            pieces.append((segment, at, length))
            begin += length
        self._unmapped_to = begin
        if pieces:
            self.disk.submit(lambda: _unmap(pieces))

    def finish(self) -> None:
        """Wait for the running job; if it failed, writing stops."""
        job, self._job = self._job, None
        if job is None:
            return
        wait([job])
        error = job.exception()
        if isinstance(error, OSError) and error.errno in _TEMPORARY:
            log.warning("flushing %s failed and is tried again: %s", self.paths.root, error)
            for queue in self._queues:
                self.writer.mark_dirty(queue)
        elif isinstance(error, PenstockError | OSError):
            self.writer.refusal = WriteStopped(f"flushing {self.paths.root} failed: {error}")
            log.error("%s", self.writer.refusal)
        elif error is not None:
            raise error

    def expire(self, count: int) -> None:
        """Delete the oldest segments, and the queue and index files that only refer to them."""
        segments, queues, index = self.writer.log.segments, self.writer.queues, self.writer.index
        count = min(count, len(segments.items) - 1)
        dropped = [segments.drop_first() for _ in range(count)]
        begin = segments.first
        # Recovery can't replay what is deleted, so its queue entries must be on the disk before.
        dirty = self.writer.take_dirty()

        def work() -> None:
            sync_all(dirty)
            gone = []
            for queue in list(queues.rows):
                first = queue.min_offset
                queue.correct_min(begin)
                queue.drop_files_before(queue.min_offset)
                if queue.min_offset > first and not queue.deleted:
                    gone.append((queue.topic.decode(), queue.queue_id, first, queue.min_offset))
            if index is not None:
                index.drop_before(begin)
            self._to_delete += dropped
            while self._to_delete:
                segment = self._to_delete[0]
                try:
                    segments.unlink(segment)
                except OSError as error:
                    # It and its successors stay, so that the next start finds no gap.
                    log.warning("%s can't be deleted: %s", segment.path, error)
                    break
                del self._to_delete[0]
                if segment.start == self.deleted_to:
                    self.deleted_to += segment.size
            if dropped:
                size = sum(segment.size for segment in dropped)
                self.on_deletion(retention.Deletion(len(dropped), size, begin, gone))

        self._submit(work)

    def _submit(self, work: Callable[[], None]) -> None:
        before = self._job

        def in_order() -> None:
            if before is not None:
                before.result()
            work()

        self._job = self.disk.submit(in_order)

    def _flush_job(self, *, index_due: bool) -> Callable[[], None]:
        """Sync queues and index, then write a checkpoint that says what is durable."""
        writer, flusher, index = self.writer, self.writer.flusher, self.writer.index
        store_ms = writer.store_ms
        self._store_times.append((writer.log.end, store_ms))
        dirty = self._queues = writer.take_dirty()

        def work() -> None:
            sync_all(dirty)
            index_ms = self.checkpoint.index_ms
            if index_due and index is not None:
                index.sync()
            if index_due or index is None:
                index_ms = store_ms
            flushed = flusher.flushed()
            log_ms = self.checkpoint.log_ms
            while self._store_times and self._store_times[0][0] <= flushed:
                log_ms = self._store_times.pop(0)[1]
            durable = min(flushed, writer.confirm_offset)
            self.checkpoint = Checkpoint(log_ms, store_ms, index_ms, 0, durable)
            try:
                write_checkpoint(self.disk, self.paths, self.checkpoint)
            except OSError as error:
                if not is_full(error):
                    raise
                # The older one stays valid: a recovery reads more of the log.
                log.warning("no space to write %s: trying again", self.paths.checkpoint)

        return work

    def _retain(self, now_ms: int) -> None:
        space = self.disk.space(self.paths.log)
        aged = [
            retention.AgedSegment(s.start, s.size, self.disk.modified_ms(s.path))
            for s in self.writer.log.segments.items
        ]
        decision = retention.decide(
            self.config,
            aged,
            now_ms=self.clock.time(now_ms),
            hour=datetime.fromtimestamp(now_ms / 1000).hour,
            disk=space,
            refusing=isinstance(self.writer.refusal, DiskNearlyFull),
            pinned_from=self.pinned_from(),
            kept_from=_lowest(self._keep_sources),
        )
        self._refuse_or_resume(decision, space.percent)
        if decision.delete:
            self.expire(decision.delete)

    def _refuse_or_resume(self, decision: retention.RetentionDecision, percent: int) -> None:
        refusing = isinstance(self.writer.refusal, DiskNearlyFull)
        if decision.refuse and self.writer.refusal is None:
            self.writer.refusal = retention.nearly_full(
                self.config, self.paths.log, percent, pinned=decision.pinned
            )
            log.warning("%s", self.writer.refusal)
        elif refusing and not decision.refuse:
            self.writer.refusal = None
            log.warning("writes are accepted again: the disk is %d %% full", percent)


def _lowest(sources: list[PinSource]) -> int | None:
    pins = (lowest_needed() for lowest_needed in sources)
    return min((pin for pin in pins if pin is not None), default=None)


def _unmap(pieces: list[tuple[Segment, int, int]]) -> None:
    for segment, at, length in pieces:
        mapping = segment.map
        assert isinstance(mapping, mmap.mmap)
        if not segment.locked:
            mapping.madvise(mmap.MADV_DONTNEED, at, length)


def _hours(ms: int) -> str:
    minutes = ms // 60_000
    return f"{minutes // 60} h {minutes % 60} min"


def _log_deletion(deletion: retention.Deletion) -> None:
    log.warning("%s", deletion.text())
