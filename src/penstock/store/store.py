"""MessageStore: put, get, query and the maintenance of the files, behind one class.

One thread puts and reads (a server's loop). Only methods that say so wait for the disk: they belong
in the thread pool (`disk.submit`). Time comes as `now_ms`.

Readers see the log up to the confirm offset: the log's end under async flush, the flushed offset
under sync flush.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.config import StoreConfig
from penstock.errors import DiskFull, NotWriteable, WriteStopped
from penstock.store.commitlog import CommitLog
from penstock.store.consumequeue.consumequeue import ConsumeQueue, sync_all
from penstock.store.consumequeue.mapped_queues import mapped_max
from penstock.store.directory import (
    StoreLock,
    StorePaths,
    check_sizes,
    mark_open,
    refuse_foreign,
    stored_config,
    write_sizes,
)
from penstock.store.disk import STAT_BLOCK_BYTES, Disk, is_full
from penstock.store.flusher import Flusher
from penstock.store.get import COLD, FOUND, MESSAGE_WAS_REMOVING, NO_MATCHED_LOGIC_QUEUE, Reader
from penstock.store.lookup import Lookup
from penstock.store.maintenance import Maintenance, PinSource
from penstock.store.put import NO_QUEUE, StoreWriter
from penstock.store.recovery.checkpoint import Checkpoint, write_checkpoint
from penstock.store.recovery.opened_files import QUEUE_ID_MAX, Progress
from penstock.store.recovery.recovery import Recovery
from penstock.store.recovery.shutdown_snapshot import ShutdownSnapshot, index_rows
from penstock.store.recovery_report import RecoveryReport
from penstock.store.retention import Deletion
from penstock.store.segment import Segment
from penstock.store.tools.scrub import BackgroundScrub
from penstock.wire.output import Output
from penstock.wire.record import Record

log = logging.getLogger(__name__)

PREPARED_MAX = 16
"""Queues of a new topic whose files are made ahead; more are rarely written all at once."""

REMOVED_AT_ONCE = 100
"""Queues of a deleted topic that are removed before the caller can do something else."""

QueueListener = Callable[[ConsumeQueue], None]


@dataclass(frozen=True, slots=True)
class GetResult:
    """What a queue gave: a status of `store.get`, the next offset to read, and the records."""

    status: int
    next_offset: int
    min_offset: int
    max_offset: int
    count: int
    data: bytes


class MessageStore:
    """An open store. Without a config it has the defaults, and the sizes it was made with."""

    def __init__(
        self,
        root: Path | str,
        config: StoreConfig | None = None,
        *,
        disk: Disk | None = None,
        now_ms: int,
        progress: Progress | None = None,
    ) -> None:
        self.disk = disk or Disk()
        self.paths = StorePaths(Path(root))
        self.config = config or stored_config(self.disk, self.paths)
        self.disk.group_readable = self.config.group_readable
        self._closed = False
        self._arrival_listeners: list[QueueListener] = []
        self._queue_listeners: list[QueueListener] = []
        self.disk.make_directory(self.paths.root)
        refuse_foreign(self.disk, self.paths)
        self._lock = StoreLock(self.paths, self.disk.file_mode)
        try:
            self._open(now_ms, progress)
        except BaseException as error:
            self.disk.close()
            self._lock.release()
            no_space = self._no_space(error)
            if no_space is not None:
                raise no_space from error
            raise

    # --- opening and closing

    def _open(self, now_ms: int, progress: Progress | None) -> None:
        disk, paths, config = self.disk, self.paths, self.config
        for folder in (paths.log, paths.queues, paths.config):
            disk.make_directory(folder)
        disk.watch_filesystem(paths.queues)
        sizes_known = check_sizes(disk, paths, config)
        self._recovery = recovery = Recovery(disk, paths, config, progress)
        crashed = paths.abort.exists()
        recovery.load_log(sizes_known=sizes_known)
        self.queues = recovery.queues
        self.index = recovery.index if config.index_enabled else None
        by_mapping = config.append_by == "mapping" or (
            config.append_by == "auto" and not config.sync_flush
        )
        self.log = CommitLog(
            disk, recovery.segments, by_mapping=by_mapping, lock_memory=config.lock_memory
        )
        self.flusher = Flusher(
            disk,
            group_commit=config.sync_flush,
            interval_ms=config.flush_interval_ms,
            least_bytes=config.flush_pages_least * 4096,
            thorough_ms=config.flush_thorough_ms,
        )
        try:
            self.writer = StoreWriter(self.log, self.queues, self.index, self.flusher)
            self.writer.index_tags = config.index_tags
            self.report: RecoveryReport = recovery.run(
                self.writer, crashed=crashed, ours=sizes_known, now_ms=now_ms
            )
            for warning in self.report.warnings():
                log.warning("%s: %s", paths.root, warning)
            write_sizes(disk, paths, config)
            self._begin_writing()
        except BaseException:
            self.flusher.discard()
            raise
        self.reader = Reader(self.log, config.hot_bytes, config.check_cold_reads)
        self.lookup = Lookup(self.log, self.index, config.hot_bytes, config.check_cold_reads)
        self.scrub = BackgroundScrub(disk, paths.root, now_ms)
        self.maintenance = Maintenance(
            disk,
            paths,
            config,
            self.writer,
            recovery.mapped_queues,
            checkpoint=recovery.checkpoint,
            now_ms=now_ms,
        )

    def _no_space(self, error: BaseException) -> DiskFull | None:
        """What to report if the store can't be opened for lack of space; None: the error itself.

        The next start repeats what recovery has done so far.
        """
        if isinstance(error, OSError) and is_full(error):
            why = "the disk is full"
        elif isinstance(error, DiskFull) and error.hint == DiskFull.hint:
            why = error.message
        else:
            return None
        return DiskFull(
            f"{self.paths.root} can't be opened: {why}",
            hint="free disk space and start again; no stored message is lost",
        )

    def _begin_writing(self) -> None:
        disk, paths = self.disk, self.paths
        # Removed before anything is written: the snapshot describes a store that is closed.
        if paths.snapshot.exists():
            disk.unlink(paths.snapshot)
        mark_open(disk, paths, sync_flush=self.config.sync_flush)
        end = self.report.log_end
        self.writer.store_ms = max(self.writer.store_ms, self.report.store_ms)
        self.log.start(end, lambda old, new: self.flusher.roll(old.fd, new.fd))
        self.flusher.start(self.log.current_fd(), end)
        self.writer.publish()
        if disk.threads:
            disk.submit(self._warm_queues)

    def _warm_queues(self) -> None:
        """Read the last page of each queue, so that its first message does not wait for it."""
        for queue in list(self.queues.rows):
            if self._closed:
                break
            queue.warm()

    def close(self) -> None:
        """Make everything durable, write checkpoint and snapshot, close the files.

        If anything can't be made durable `abort` stays, and the next start recovers.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.maintenance.finish()
            self.publish()
            stopped = isinstance(self.writer.refusal, WriteStopped)
            self.flusher.stop()
            self.writer.refusal = NotWriteable(f"{self.paths.root} is closed")
            if not stopped and not self.flusher.failed():
                self._close_clean()
        except OSError as error:
            log.error("closing %s failed, the next start recovers: %s", self.paths.root, error)
        finally:
            self._release()

    def _release(self) -> None:
        self.writer.refusal = NotWriteable(f"{self.paths.root} is closed")
        try:
            self.flusher.stop()
            self.log.close()
            for queue in self.queues.rows:
                queue.close()
            if self.index is not None:
                self.index.close()
        finally:
            self.disk.close()
            self._lock.release()

    def _close_clean(self) -> None:
        sync_all(self.writer.take_dirty())
        if self.index is not None:
            self.index.sync()
        ms = self.writer.store_ms
        write_checkpoint(self.disk, self.paths, Checkpoint(ms, ms, ms, 0, self.log.end))
        snapshot = self._snapshot().sealed()
        self.disk.write_file(self.paths.snapshot, msgspec.json.encode(snapshot))
        self.disk.unlink(self.paths.abort)
        self.disk.sync_directory(self.paths.root)

    def _snapshot(self) -> ShutdownSnapshot:
        return ShutdownSnapshot(
            log_begin=self.log.begin(),
            log_end=self.log.end,
            last_offset=max(self.writer.last_offset, self.report.last_offset),
            store_ms=self.writer.store_ms,
            queues=[
                (q.topic.decode(), q.queue_id, q.min_offset, q.max_offset) for q in self.queues.rows
            ],
            files=[
                (q.file_starts[0] if q.file_starts else 0, len(q.file_starts))
                for q in self.queues.rows
            ],
            index=index_rows(self.index),
        )

    def begin_log_at(self, segment: Segment) -> Callable[[], None]:
        """Begin an empty log with this segment, which `log.create_begin` has created: a slave's log
        begins where its master's does. Returns work that waits for the disk."""
        delete_old = self.log.begin_at(segment)
        self.maintenance.deleted_to = segment.start
        self.publish()
        return delete_old

    # --- putting

    def put(self, record: Record, now_ms: int) -> int:
        """Store one message; `store.put` has the statuses."""
        status = self.writer.put(record, now_ms)
        if status == NO_QUEUE and self._make_queue(record):
            status = self.writer.put(record, now_ms)
        return status

    def put_batch(self, record: Record, now_ms: int) -> int:
        """Store the messages of a batch body; the record's own positions are overwritten."""
        status = self.writer.put_batch(record, now_ms)
        if status == NO_QUEUE and self._make_queue(record):
            status = self.writer.put_batch(record, now_ms)
        return status

    def _make_queue(self, record: Record) -> bool:
        topic = bytes(record.source[record.topic_at : record.topic_at + record.topic_length])
        return self.make_queue(topic, record.queue_id) is not None

    def make_queue(self, topic: bytes, queue_id: int) -> ConsumeQueue | None:
        """The queue of this name, made if it is new; None for a name that no queue can have, or
        while the queues of a deleted topic of this name are removed."""
        if self._recovery.removal.is_running(topic):
            return None
        known = self.queues.get(topic, queue_id)
        if known is not None:
            return known
        queue = self._recovery.add_queue(topic, queue_id)
        if queue is not None:
            for listener in self._queue_listeners:
                listener(queue)
        return queue

    def prepare(self, topic: str, queues: int) -> None:
        """Have the pool make the files of a new topic, so that first messages need not wait.

        At most PREPARED_MAX queues: one that never gets a message should cost nothing.
        """
        for queue_id in range(min(queues, PREPARED_MAX) if self.disk.threads else 0):
            queue = self.make_queue(topic.encode(), queue_id)
            if queue is not None:
                self.disk.submit(queue.prepare)

    def remove_queues(self, topic: bytes) -> Iterator[ConsumeQueue]:
        """Forget the queues of a deleted topic, one after another; they need not be removed at
        once. A new topic of the name begins at 0; until the last queue is removed, no new one of
        this name can be made.

        `finish_removal` deletes their files. Raises StoreError, and then nothing has changed.
        """
        removal = self._recovery.removal
        if removal.is_running(topic):
            return
        removal.begin(topic, log_begin=self.maintenance.deleted_to, log_end=self.log.end)
        try:
            while removed := self._remove_some(topic, REMOVED_AT_ONCE):
                yield from removed
        finally:
            self._remove_some(topic, QUEUE_ID_MAX)  # if the caller has stopped early
            removal.end(topic, log_begin=self.maintenance.deleted_to, log_end=self.log.end)
            writer = self.writer
            writer.dirty = [queue for queue in writer.dirty if not queue.deleted]
            writer.arrived = [queue for queue in writer.arrived if not queue.deleted]

    def _remove_some(self, topic: bytes, count_max: int) -> list[ConsumeQueue]:
        removed = self.queues.remove(topic, count_max)
        self._recovery.removal.retire(topic, removed)
        return removed

    def finish_removal(self) -> None:
        """Make removals durable and delete the files; waits for the disk."""
        self._recovery.removal.finish()

    def deleted_below(self, topic: bytes) -> int:
        """Where the log ended when a topic of this name was last deleted; 0 if never."""
        return self._recovery.removal.end_of(topic)

    def publish(self) -> None:
        """Make what was put visible: write it out, move the confirm offset, wake waiting readers.

        Call it after the requests of each read and when the flusher notifies.
        """
        self.flusher.acknowledge()
        if self.flusher.failed() and not isinstance(self.writer.refusal, WriteStopped):
            code = self.flusher.failed()
            self.writer.refusal = WriteStopped(
                f"flushing {self.paths.log} failed: {os.strerror(code)}; writing has stopped"
            )
            log.error("%s", self.writer.refusal)
        if self.writer.publish():
            self.notify()

    def notify(self) -> None:
        """Start the preallocations that are due, and call the arrival listeners."""
        due, self.writer.to_preallocate = self.writer.to_preallocate, []
        if self.disk.threads:
            for file in due:
                self.disk.submit(file.preallocate)
        arrived, self.writer.arrived = self.writer.arrived, []
        for queue in arrived:
            if queue.visible_max(self.writer.confirm_offset) > queue.watched_from:
                for listener in self._arrival_listeners:
                    listener(queue)
            else:
                self.writer.arrived.append(queue)

    def on_new_queue(self, listener: QueueListener) -> None:
        """Call `listener(queue)` when a queue is made, before it has messages."""
        self._queue_listeners.append(listener)

    def on_arrival(self, listener: QueueListener) -> None:
        """Call `listener(queue)` when a watched queue gets a message that readers may see."""
        self._arrival_listeners.append(listener)

    def watch(self, queue: ConsumeQueue) -> None:
        """Call the arrival listeners once, for the next message of this queue."""
        if not queue.watched and queue not in self.writer.arrived:
            queue.watched_from = queue.visible_max(self.writer.confirm_offset)
            if queue.max_offset > queue.watched_from:  # stored, but not confirmed yet
                self.writer.arrived.append(queue)
            else:
                queue.watched = True

    def sync_log(self, end: int) -> None:
        """Make the log durable up to this offset, whatever the flusher does; waits for the disk."""
        begin = self.flusher.flushed()
        for segment in list(self.log.segments.items):
            if segment.start + segment.size > begin and segment.start < end:
                try:
                    self.disk.sync(segment.fd)
                except OSError as error:
                    self.flusher.fail(error)
                    raise

    def disk_bytes(self) -> int:
        """The bytes that the files of log and index occupy on the disk."""
        files = [segment.path for segment in self.log.segments.items]
        files += [file.path for file in self.index.files] if self.index is not None else []
        found = (self.disk.stat(str(path)) for path in files)
        return sum(stat.st_blocks * STAT_BLOCK_BYTES for stat in found if stat is not None)

    @property
    def sends_wait(self) -> bool:
        """Whether a message is acknowledged only when it is flushed or replicated."""
        return self.flusher.group_commit or self.writer.replicated

    def acknowledged(self) -> int:
        """Messages up to this log offset may be acknowledged: they are as safe as promised."""
        offset = self.flusher.flushed() if self.flusher.group_commit else self.log.end
        return min(offset, self.writer.replicated_to) if self.writer.replicated else offset

    @property
    def confirm_offset(self) -> int:
        """Readers see the log up to here."""
        return self.writer.confirm_offset

    @property
    def refusal(self) -> Exception | None:
        """Why puts are refused, or None."""
        return self.writer.refusal

    # --- getting (more in lookup.py)

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        codes: Sequence[int] = (),
        wait: bool = False,
    ) -> GetResult:
        """Messages of a queue from `offset` on, as records one after another.

        Where that would wait for the disk the status is COLD: call again with `wait`, in the pool.
        `codes` are hashes of wanted tags; none means all.
        """
        queue = self.queue(topic, queue_id)
        if queue is None:
            return GetResult(NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, 0, b"")
        reader = self.new_reader(codes)
        status = reader.find(queue, offset, count_max, bytes_max, self.confirm_offset, wait)
        output = Output(1024)
        if status == FOUND and not reader.copy_to(output, wait):
            # Missing even with `wait`: retention has deleted the segment meanwhile.
            status = MESSAGE_WAS_REMOVING if wait else COLD
        elif status == FOUND and reader.count == 0:  # all of them are damaged
            status = MESSAGE_WAS_REMOVING
        return GetResult(
            status,
            reader.next_offset,
            reader.min_offset,
            reader.max_offset,
            reader.count,
            output.take(),
        )

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self.queues.get(topic.encode(), queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the newest message that readers may see; 0 if there is no such queue."""
        queue = self.queue(topic, queue_id)
        return queue.visible_max(self.writer.confirm_offset) if queue is not None else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self.queue(topic, queue_id)
        return queue.min_offset if queue is not None else 0

    def new_reader(self, codes: Sequence[int] = ()) -> Reader:
        """A reader for a thread of the pool."""
        reader = Reader(self.log, self.config.hot_bytes, self.config.check_cold_reads)
        reader.set_tag_hashes(codes)
        return reader

    # --- maintenance (more in maintenance.py)

    def reconfigure(self, config: StoreConfig) -> None:
        """Take over live settings."""
        self.config = self.maintenance.config = config
        self.writer.index_tags = config.index_tags
        self.maintenance.mapped_queues.mapped_max = mapped_max(self.disk, config)
        self.reader = Reader(self.log, config.hot_bytes, config.check_cold_reads)
        self.lookup = Lookup(self.log, self.index, config.hot_bytes, config.check_cold_reads)

    def on_retention(self, pinned_from: PinSource, *, unless_full: bool = False) -> None:
        """Keep messages from the log offset that `pinned_from()` returns; None pins nothing.

        With `unless_full` they are deleted if the use of the disk exceeds `disk_force_percent`.
        """
        if unless_full:
            self.maintenance.add_keep_source(pinned_from)
        else:
            self.maintenance.add_pin_source(pinned_from)

    def on_deletion(self, listener: Callable[[Deletion], None]) -> None:
        """Call `listener` in the pool after segments were deleted, instead of only logging it."""
        self.maintenance.on_deletion = listener

    def tick(self, now_ms: int) -> None:
        """Start what is due: flushing, the checkpoint, retention, scrub. Call it every second."""
        self.maintenance.tick(now_ms)
        self.scrub.tick(now_ms, self.config, self.flusher.flushed())

    def expire(self, count: int) -> None:
        """Delete the oldest segments, but never the last."""
        self.maintenance.expire(count)
