"""The care of a store's files: flushing queues and index, the checkpoint, retention.

`tick` decides in the loop and has the work done by the pool, one piece after the other: no
checkpoint may overtake the syncs that it speaks of, nor those of `expire`.
"""

import errno
import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import datetime

from penstock.config import StoreConfig
from penstock.errors import DiskNearlyFull, PenstockError, WriteStopped
from penstock.store import retention
from penstock.store.consumequeue.consumequeue import ConsumeQueue, sync_all
from penstock.store.consumequeue.mapped_queues import Awake
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk
from penstock.store.put import PutPath
from penstock.store.recovery.checkpoint import Checkpoint, write_checkpoint
from penstock.store.segment import Segment

log = logging.getLogger(__name__)

RETENTION_EVERY_MS = 10_000

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Failures before anything was asked of the disk: the next round tries again."""


class Care:
    """What is due from time to time."""

    def __init__(
        self,
        disk: Disk,
        paths: StorePaths,
        config: StoreConfig,
        path: PutPath,
        awake: Awake,
        now_ms: int,
    ) -> None:
        self.disk = disk
        self.paths = paths
        self.config = config
        self.path = path
        self.awake = awake
        self.checkpoint = Checkpoint()
        self.pinned_from: Callable[[], int | None] = lambda: None
        """Messages from this log offset on are still needed by somebody: never delete them."""
        self.deleted_to = path.log.begin()
        """Where the log's files begin: what lies before was deleted, for good."""
        self._leaving: list[Segment] = []  # dropped from the log, not yet deleted
        self._marks: list[tuple[int, int]] = []
        self._work: Future[None] | None = None
        self._queues: list[ConsumeQueue] = []
        self._queues_ms = self._index_ms = self._retention_ms = self._awake_ms = now_ms

    def tick(self, now_ms: int) -> None:
        """Have done what is due; flushes nothing while the last round is still under way."""
        self._let_rest(now_ms)
        if self._work is not None:
            if not self._work.done():
                return
            self.finish()
        # A clock that steps back must not stop the care until it has caught up.
        self._queues_ms = min(self._queues_ms, now_ms)
        self._index_ms = min(self._index_ms, now_ms)
        self._retention_ms = min(self._retention_ms, now_ms)
        if not isinstance(self.path.refusal, WriteStopped | DiskNearlyFull):
            self.path.refusal = self.path.log.refusal = None  # the next put finds out
        if now_ms - self._retention_ms >= RETENTION_EVERY_MS:
            self._retention_ms = now_ms
            self._retain(now_ms)
        if now_ms - self._queues_ms >= self.config.queue_flush_ms:
            self._queues_ms = now_ms
            index_due = now_ms - self._index_ms >= self.config.index_flush_ms
            if index_due:
                self._index_ms = now_ms
            self._submit(self._round(index_due=index_due))

    def _let_rest(self, now_ms: int) -> None:
        """Queues that nobody uses let go of their files."""
        elapsed_ms = max(now_ms - self._awake_ms, 0)
        self._awake_ms = now_ms
        idle = self.awake.turn(elapsed_ms, self.config.queue_rest_ms, self.path.confirmed)
        if idle:
            self.disk.submit(idle.clear)

    def finish(self) -> None:
        """Wait for what is under way; a failure of it stops writing."""
        work, self._work = self._work, None
        if work is None:
            return
        wait([work])
        error = work.exception()
        if isinstance(error, OSError) and error.errno in _PASSING:
            log.warning("flushing %s has to wait: %s", self.paths.root, error)
            for queue in self._queues:
                self.path.mark_dirty(queue)
        elif isinstance(error, PenstockError | OSError):
            self.path.refusal = WriteStopped(f"flushing {self.paths.root} failed: {error}")
            log.error("%s", self.path.refusal)
        elif error is not None:
            raise error

    def expire(self, count: int) -> None:
        """Delete the oldest segments, and the queue and index files that only spoke of them."""
        row, queues, index = self.path.log.row, self.path.queues, self.path.index
        count = min(count, len(row.segments) - 1)
        gone = [row.drop_first() for _ in range(count)]
        begin = row.first
        if count:
            log.info("deleting %d segments: the log begins at %d now", count, begin)
        # Recovery can't replay what is deleted, so its queue entries must be on the disk before.
        dirty = self.path.take_dirty()

        def work() -> None:
            sync_all(dirty)
            for queue in list(queues.rows):
                queue.correct_min(begin)
                queue.drop_files_before(queue.min_offset)
            if index is not None:
                index.drop_before(begin)
            self._leaving += gone
            while self._leaving:
                segment = self._leaving[0]
                try:
                    row.unlink(segment)
                except OSError as error:
                    # It and its successors stay, so that the next start finds no gap.
                    log.warning("%s can't be deleted: %s", segment.path, error)
                    break
                del self._leaving[0]
                if segment.start == self.deleted_to:
                    self.deleted_to += segment.size

        self._submit(work)

    def _submit(self, work: Callable[[], None]) -> None:
        before = self._work

        def in_turn() -> None:
            if before is not None:
                before.result()
            work()

        self._work = self.disk.submit(in_turn)

    def _round(self, *, index_due: bool) -> Callable[[], None]:
        """The work of one round: sync, then say in the checkpoint what is durable."""
        path, flusher, index = self.path, self.path.flusher, self.path.index
        store_ms = path.store_ms
        self._marks.append((path.log.end, store_ms))
        dirty = self._queues = path.take_dirty()

        def work() -> None:
            sync_all(dirty)
            index_ms = self.checkpoint.index_ms
            if index_due and index is not None:
                index.sync()
            if index_due or index is None:
                index_ms = store_ms
            flushed = flusher.flushed()
            log_ms = self.checkpoint.log_ms
            while self._marks and self._marks[0][0] <= flushed:
                log_ms = self._marks.pop(0)[1]
            durable = min(flushed, path.confirmed)
            self.checkpoint = Checkpoint(log_ms, store_ms, index_ms, 0, durable)
            write_checkpoint(self.disk, self.paths, self.checkpoint)

        return work

    def _retain(self, now_ms: int) -> None:
        percent = self.disk.space(self.paths.log).percent
        aged = [
            retention.Aged(s.start, s.size, self.disk.modified_ms(s.path))
            for s in self.path.log.row.segments
        ]
        decision = retention.decide(
            self.config,
            aged,
            now_ms=now_ms,
            hour=datetime.fromtimestamp(now_ms / 1000).hour,
            disk_percent=percent,
            refusing=isinstance(self.path.refusal, DiskNearlyFull),
            pinned_from=self.pinned_from(),
        )
        self._refuse_or_resume(decision, percent)
        if decision.delete:
            self.expire(decision.delete)

    def _refuse_or_resume(self, decision: retention.Decision, percent: int) -> None:
        refusing = isinstance(self.path.refusal, DiskNearlyFull)
        if decision.refuse and self.path.refusal is None:
            self.path.refusal = retention.nearly_full(
                self.config, self.paths.log, percent, pinned=decision.pinned
            )
            log.warning("%s", self.path.refusal)
        elif refusing and not decision.refuse:
            self.path.refusal = None
            log.warning("the disk is used to %d %%: writes are taken again", percent)
