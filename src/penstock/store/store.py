"""MessageStore: the one door to the engine: put, get, query, and the care of the files.

One thread puts and asks (a server's loop). Nothing here waits for the disk except what says so:
those methods belong into the I/O pool (`disk.submit`). Time comes as `now_ms`.

What readers see is what lies below `confirmed`: the log's end under async flush, the flushed
offset under sync flush.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from penstock.config import StoreConfig
from penstock.errors import DiskNearlyFull, PenstockError, WriteStopped
from penstock.store import retention
from penstock.store.checkpoint import Checkpoint, write_checkpoint
from penstock.store.commitlog import CommitLog
from penstock.store.consumequeue import ConsumeQueue
from penstock.store.disk import Disk
from penstock.store.flusher import Flusher
from penstock.store.get import COLD, FOUND, MESSAGE_WAS_REMOVING, NO_MATCHED_LOGIC_QUEUE, Reader
from penstock.store.layout import (
    Layout,
    StoreLock,
    check_sizes,
    note_sizes,
    refuse_foreign,
    stored_config,
)
from penstock.store.lookup import Lookup
from penstock.store.put import NO_QUEUE, PutPath
from penstock.store.recovery import Progress, Recovery, Report, Snapshot
from penstock.wire.output import Output
from penstock.wire.record import Record

log = logging.getLogger(__name__)

RETENTION_EVERY_MS = 10_000


@dataclass(frozen=True, slots=True)
class Found:
    """What a queue gave: a status of `store.get`, where to go on, and the records."""

    status: int
    next_offset: int
    min_offset: int
    max_offset: int
    count: int
    data: bytes


class MessageStore:
    """An open store. Without a config it has the defaults, and the sizes it was made with."""

    def __init__(
        self, root: Path | str, config: StoreConfig | None = None, *, disk: Disk | None = None,
        now_ms: int, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self.disk = disk or Disk()
        self.layout = Layout(Path(root))
        self.config = config or stored_config(self.disk, self.layout)
        self.on_arrival: Callable[[ConsumeQueue], None] | None = None
        self.pinned_from: Callable[[], int | None] = lambda: None
        self.checkpoint = Checkpoint()
        self._marks: list[tuple[int, int]] = []
        self._care: Future[None] | None = None
        self._queues_synced_ms = self._index_synced_ms = now_ms
        self._retention_ms = now_ms
        self._open(progress)

    # --- opening and closing

    def _open(self, progress: Progress | None) -> None:
        disk, layout, config = self.disk, self.layout, self.config
        disk.make_directory(layout.root)
        refuse_foreign(disk, layout)
        self._lock = StoreLock(layout)
        try:
            for folder in (layout.log, layout.queues, layout.config):
                disk.make_directory(folder)
            sizes_known = check_sizes(disk, layout, config)
            recovery = Recovery(disk, layout, config, progress)
            recovery.load_log(sizes_known=sizes_known)
            crashed = layout.abort.exists()
            by_mapping = config.append_by == "mapping" or (
                config.append_by == "auto" and not config.sync_flush
            )
            self.log = CommitLog(
                disk, recovery.row, by_mapping=by_mapping, lock_memory=config.lock_memory
            )
            self.flusher = Flusher(
                disk, group_commit=config.sync_flush, interval_ms=config.flush_interval_ms,
                least_bytes=config.flush_pages_least * 4096, thorough_ms=config.flush_thorough_ms,
            )  # fmt: skip
            self.queues = recovery.queues
            self.index = recovery.index if config.index_enabled else None
            self.path = PutPath(self.log, self.queues, self.index, self.flusher)
            self.path.index_tags = config.index_tags
            self._recovery = recovery
            self.report: Report = recovery.run(
                self.path, self.log, crashed=crashed, ours=sizes_known
            )
            self.checkpoint = recovery.checkpoint
            note_sizes(disk, layout, config)
            self._begin_writing()
        except BaseException:
            self._lock.release()
            raise

    def _begin_writing(self) -> None:
        disk, layout = self.disk, self.layout
        # The snapshot must go before anything is written: it speaks of a store that is closed.
        if layout.snapshot.exists():
            disk.unlink(layout.snapshot)
        disk.write_file(layout.abort, str(os.getpid()).encode())
        end = self.report.log_end
        self.path.store_ms = max(self.path.store_ms, self.report.store_ms)
        self.last_offset = self.report.last_offset
        self.log.start(end, lambda old, new: self.flusher.roll(old.fd, new.fd))
        self.flusher.start(self.log.current_fd(), end)
        self.path.settle()
        if disk.threads:
            disk.submit(self._warm_queues)
        self.reader = Reader(self.log, self.config.hot_bytes)
        self.lookup = Lookup(self.log, self.queues, self.index)

    def _warm_queues(self) -> None:
        """So that the first message of a queue after a restart does not wait for its page."""
        for queue in list(self.queues.rows):
            queue.warm()

    def close(self) -> None:
        """Make everything durable, say so in checkpoint and snapshot, let go of the files."""
        if self._care is not None:
            self._care.result()
            self._care = None
        self.path.settle()
        self.log.hand_over()
        self.flusher.want(self.log.end)
        stopped = self.flusher.failed()
        self.flusher.stop()
        clean = not stopped and not self.flusher.failed()
        if clean:
            self._sync_queues()
            if self.index is not None:
                self.index.sync()
            self.log.close()
            ms = self.path.store_ms
            write_checkpoint(self.disk, self.layout, Checkpoint(ms, ms, ms, 0, self.log.end))
            snapshot = self._snapshot().sealed()
            self.disk.write_file(self.layout.snapshot, msgspec.json.encode(snapshot))
            self.disk.unlink(self.layout.abort)
            self.disk.sync_directory(self.layout.root)
        else:
            self.log.close()
        if self.index is not None:
            self.index.close()
        self.disk.close()
        self._lock.release()

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            log_begin=self.log.begin(),
            log_end=self.log.end,
            last_offset=self.path.offset if self.path.puts else self.last_offset,
            store_ms=self.path.store_ms,
            queues=[
                (q.topic.decode(), q.queue_id, q.min_offset, q.max_offset) for q in self.queues.rows
            ],
        )

    # --- putting

    def put(self, record: Record, now_ms: int) -> int:
        """Store one message; see `store.put` for what may come of it."""
        status = self.path.put(record, now_ms)
        if status == NO_QUEUE and self._make_queue(record):
            status = self.path.put(record, now_ms)
        return status

    def put_batch(self, record: Record, now_ms: int) -> int:
        """Store the messages of a batch body; the record's own spans are spent afterwards."""
        status = self.path.put_batch(record, now_ms)
        if status == NO_QUEUE and self._make_queue(record):
            status = self.path.put_batch(record, now_ms)
        return status

    def _make_queue(self, record: Record) -> bool:
        topic = bytes(record.source[record.topic_at : record.topic_at + record.topic_length])
        return self.make_queue(topic, record.queue_id) is not None

    def make_queue(self, topic: bytes, queue_id: int) -> ConsumeQueue | None:
        """The queue of this name, made if it is new; None for a name that can't be one."""
        return self._recovery.add_queue(topic, queue_id)

    def settle(self) -> None:
        """End of a turn, and after the flusher rang: hand over, confirm, wake listeners."""
        self.flusher.acknowledge()
        if self.flusher.failed() and not isinstance(self.path.refusal, WriteStopped):
            code = self.flusher.failed()
            self.path.refusal = WriteStopped(
                f"flushing {self.layout.log} failed: {os.strerror(code)}; writing has stopped"
            )
            log.error("%s", self.path.refusal)
        if self.path.settle():
            self._attend()

    def _attend(self) -> None:
        """Have blocks allocated ahead by the pool, and wake whoever waits for messages."""
        hungry, self.path.hungry = self.path.hungry, []
        if self.disk.threads:
            for file in hungry:
                self.disk.submit(file.feed)
        arrived, self.path.arrived = self.path.arrived, []
        for queue in arrived:
            if queue.visible_max(self.path.confirmed) > queue.watched_from:
                if self.on_arrival is not None:
                    self.on_arrival(queue)
            else:
                self.path.arrived.append(queue)

    def watch(self, queue: ConsumeQueue) -> None:
        """Call `on_arrival` once, when this queue has got a message that readers may see."""
        if not queue.watched and queue not in self.path.arrived:
            queue.watched = True
            queue.watched_from = queue.visible_max(self.path.confirmed)

    @property
    def confirmed(self) -> int:
        """Readers see the log up to here."""
        return self.path.confirmed

    @property
    def refusal(self) -> Exception | None:
        """Why puts are refused, or None."""
        return self.path.refusal

    # --- getting (more in lookup.py)

    def get(
        self, topic: str, queue_id: int, offset: int, *, count_max: int = 32,
        bytes_max: int = 256 * 1024, codes: Sequence[int] = (), wait: bool = False,
    ) -> Found:  # fmt: skip
        """Messages of a queue from `offset` on, as records in one piece of bytes.

        Where that would wait for the disk the status is COLD: ask again with `wait`, in the pool.
        `codes` are hashes of wanted tags; none means all.
        """
        queue = self.queue(topic, queue_id)
        if queue is None:
            return Found(NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, 0, b"")
        reader = self.fresh_reader(codes)
        status = reader.find(queue, offset, count_max, bytes_max, self.confirmed, wait)
        output = Output(max(reader.total, 1))
        if status == FOUND and not reader.copy_to(output, wait):
            # With patience and still not there: retention took the segment away meanwhile.
            status = MESSAGE_WAS_REMOVING if wait else COLD
        return Found(
            status, reader.next_offset, reader.min_offset, reader.max_offset,
            reader.count, output.take(),
        )  # fmt: skip

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self.queues.get(topic.encode(), queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the newest message that readers may see; 0 if there is no such queue."""
        queue = self.queue(topic, queue_id)
        return queue.visible_max(self.path.confirmed) if queue is not None else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self.queue(topic, queue_id)
        return queue.min_offset if queue is not None else 0

    def fresh_reader(self, codes: Sequence[int] = ()) -> Reader:
        """A reader of its own, for a thread of the pool."""
        reader = Reader(self.log, self.config.hot_bytes)
        reader.only(codes)
        return reader

    # --- care

    def tick(self, now_ms: int) -> None:
        """Have done what is due: flushing queues, the checkpoint, retention. Call every second."""
        if self._care is not None:
            if not self._care.done():
                return
            care, self._care = self._care, None
            self._after_care(care)
        if not isinstance(self.path.refusal, WriteStopped | DiskNearlyFull):
            self.path.refusal = self.log.refusal = None  # the next put finds out
        if now_ms - self._retention_ms >= RETENTION_EVERY_MS:
            self._retention_ms = now_ms
            self._retain(now_ms)
        if now_ms - self._queues_synced_ms >= self.config.queue_flush_ms:
            self._queues_synced_ms = now_ms
            index_due = now_ms - self._index_synced_ms >= self.config.index_flush_ms
            if index_due:
                self._index_synced_ms = now_ms
            self._submit(self._care_for(index_due=index_due))

    def _submit(self, work: Callable[[], None]) -> None:
        """Have it done by the pool, after what was submitted before: no checkpoint may overtake
        the syncs of `expire`."""
        if not self.disk.threads:
            work()
            return
        before = self._care

        def in_turn() -> None:
            if before is not None:
                before.result()
            work()

        self._care = self.disk.submit(in_turn)

    def _after_care(self, care: "Future[None]") -> None:
        error = care.exception()
        if error is None:
            return
        if isinstance(error, PenstockError | OSError):
            self.path.refusal = WriteStopped(f"flushing {self.layout.root} failed: {error}")
            log.error("%s", self.path.refusal)
            return
        raise error

    def _care_for(self, *, index_due: bool) -> Callable[[], None]:
        """The work of one round: sync, then say in the checkpoint what is durable."""
        self._marks.append((self.log.end, self.path.store_ms))
        store_ms = self.path.store_ms
        dirty, self.path.dirty = self.path.dirty, []
        for queue in dirty:
            queue.dirty = False

        def work() -> None:
            for queue in dirty:
                queue.sync()
            index_ms = self.checkpoint.index_ms
            if index_due and self.index is not None:
                self.index.sync()
            if index_due or self.index is None:
                index_ms = store_ms
            flushed = self.flusher.flushed()
            log_ms = self.checkpoint.log_ms
            while self._marks and self._marks[0][0] <= flushed:
                log_ms = self._marks.pop(0)[1]
            self.checkpoint = Checkpoint(
                log_ms, store_ms, index_ms, 0, min(flushed, self.confirmed)
            )
            write_checkpoint(self.disk, self.layout, self.checkpoint)

        return work

    def _sync_queues(self) -> None:
        dirty, self.path.dirty = self.path.dirty, []
        for queue in dirty:
            queue.dirty = False
            queue.sync()

    def _retain(self, now_ms: int) -> None:
        percent = self.disk.space(self.layout.log).percent
        aged = [
            retention.Aged(s.start, s.size, self.disk.modified_ms(s.path))
            for s in self.log.row.segments
        ]
        decision = retention.decide(
            self.config, aged, now_ms=now_ms, hour=datetime.fromtimestamp(now_ms / 1000).hour,
            disk_percent=percent, refusing=isinstance(self.path.refusal, DiskNearlyFull),
            pinned_from=self.pinned_from(),
        )  # fmt: skip
        self._refuse_or_resume(decision.refuse, percent)
        if decision.delete:
            self.expire(decision.delete)

    def _refuse_or_resume(self, refuse: bool, percent: int) -> None:
        refusing = isinstance(self.path.refusal, DiskNearlyFull)
        if refuse and self.path.refusal is None:
            self.path.refusal = retention.nearly_full(self.config, self.layout.log, percent)
            log.warning("%s", self.path.refusal)
        elif refusing and not refuse:
            self.path.refusal = None
            log.warning("the disk is used to %d %%: writes are taken again", percent)

    def expire(self, count: int) -> None:
        """Delete the oldest segments, and the queue and index files that only spoke of them."""
        gone = [self.log.row.drop_first() for _ in range(count)]
        begin = self.log.begin()
        log.info("deleting %d segments: the log begins at %d now", count, begin)

        # Recovery can't replay what is deleted, so its queue entries must be on the disk before.
        dirty, self.path.dirty = self.path.dirty, []
        for queue in dirty:
            queue.dirty = False

        def work() -> None:
            for queue in dirty:
                queue.sync()
            for queue in self.queues.rows:
                queue.correct_min(begin)
                queue.drop_files_before(queue.min_offset)
            if self.index is not None:
                self.index.drop_before(begin)
            for segment in gone:
                self.log.row.unlink(segment)

        self._submit(work)
