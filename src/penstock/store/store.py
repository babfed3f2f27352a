"""MessageStore: the one door to the engine: put, get, query, and the care of the files.

One thread puts and asks (a server's loop). Nothing here waits for the disk except what says so:
those methods belong into the I/O pool (`disk.submit`). Time comes as `now_ms`.

What readers see is what lies below `confirmed`: the log's end under async flush, the flushed
offset under sync flush.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.config import StoreConfig
from penstock.errors import NotWriteable, WriteStopped
from penstock.store.commitlog import CommitLog
from penstock.store.consumequeue.consumequeue import ConsumeQueue, sync_all
from penstock.store.consumequeue.mapped_queues import mapped_max
from penstock.store.directory import (
    StoreLock,
    StorePaths,
    check_sizes,
    note_sizes,
    refuse_foreign,
    stored_config,
)
from penstock.store.disk import Disk
from penstock.store.flusher import Flusher
from penstock.store.get import COLD, FOUND, MESSAGE_WAS_REMOVING, NO_MATCHED_LOGIC_QUEUE, Reader
from penstock.store.lookup import Lookup
from penstock.store.maintenance import Care
from penstock.store.put import NO_QUEUE, PutPath
from penstock.store.recovery.checkpoint import Checkpoint, write_checkpoint
from penstock.store.recovery.recovery import Progress, Recovery, Report, Snapshot
from penstock.wire.output import Output
from penstock.wire.record import Record

log = logging.getLogger(__name__)

PREPARED_MAX = 16
"""Queues of a new topic whose files are made ahead; more are rarely written all at once."""


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
        self._closed = False
        self._arrival_listener: Callable[[ConsumeQueue], None] | None = None
        self._open(progress)
        self.care = Care(
            self.disk, self.paths, self.config, self.path, self._recovery.awake, now_ms
        )
        self.care.checkpoint = self._recovery.checkpoint

    # --- opening and closing

    def _open(self, progress: Progress | None) -> None:
        disk, paths, config = self.disk, self.paths, self.config
        disk.make_directory(paths.root)
        refuse_foreign(disk, paths)
        self._lock = StoreLock(paths)
        try:
            for folder in (paths.log, paths.queues, paths.config):
                disk.make_directory(folder)
            sizes_known = check_sizes(disk, paths, config)
            recovery = Recovery(disk, paths, config, progress)
            crashed = paths.abort.exists()
            recovery.load_log(sizes_known=sizes_known)
            by_mapping = config.append_by == "mapping" or (
                config.append_by == "auto" and not config.sync_flush
            )
            self.log = CommitLog(
                disk, recovery.row, by_mapping=by_mapping, lock_memory=config.lock_memory
            )
            self.flusher = Flusher(
                disk,
                group_commit=config.sync_flush,
                interval_ms=config.flush_interval_ms,
                least_bytes=config.flush_pages_least * 4096,
                thorough_ms=config.flush_thorough_ms,
            )
            self.queues = recovery.queues
            self.index = recovery.index if config.index_enabled else None
            self.path = PutPath(self.log, self.queues, self.index, self.flusher)
            self.path.index_tags = config.index_tags
            self._recovery = recovery
            self.report: Report = recovery.run(self.path, crashed=crashed, ours=sizes_known)
            for complaint in self.report.complaints():
                log.warning("%s: %s", paths.root, complaint)
            note_sizes(disk, paths, config)
            self._begin_writing()
        except BaseException:
            if hasattr(self, "flusher"):
                self.flusher.discard()
            disk.close()
            self._lock.release()
            raise

    def _begin_writing(self) -> None:
        disk, paths = self.disk, self.paths
        # The snapshot must go before anything is written: it speaks of a store that is closed.
        if paths.snapshot.exists():
            disk.unlink(paths.snapshot)
        disk.write_file(paths.abort, str(os.getpid()).encode())
        end = self.report.log_end
        self.path.store_ms = max(self.path.store_ms, self.report.store_ms)
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
            if self._closed:
                break
            queue.warm()

    def close(self) -> None:
        """Make everything durable, say so in checkpoint and snapshot, let go of the files.

        If anything can't be made durable `abort` stays, and the next start recovers.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.care.finish()
            self.settle()
            stopped = isinstance(self.path.refusal, WriteStopped)
            self.flusher.stop()
            self.path.refusal = NotWriteable(f"{self.paths.root} is closed")
            if not stopped and not self.flusher.failed():
                self._close_clean()
        except OSError as error:
            log.error("closing %s failed, the next start recovers: %s", self.paths.root, error)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.path.refusal = NotWriteable(f"{self.paths.root} is closed")
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
        sync_all(self.path.take_dirty())
        if self.index is not None:
            self.index.sync()
        ms = self.path.store_ms
        write_checkpoint(self.disk, self.paths, Checkpoint(ms, ms, ms, 0, self.log.end))
        snapshot = self._snapshot().sealed()
        self.disk.write_file(self.paths.snapshot, msgspec.json.encode(snapshot))
        self.disk.unlink(self.paths.abort)
        self.disk.sync_directory(self.paths.root)

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            log_begin=self.log.begin(),
            log_end=self.log.end,
            last_offset=max(self.path.last_offset, self.report.last_offset),
            store_ms=self.path.store_ms,
            queues=[
                (q.topic.decode(), q.queue_id, q.min_offset, q.max_offset) for q in self.queues.rows
            ],
            files=[
                (q.file_starts[0] if q.file_starts else 0, len(q.file_starts))
                for q in self.queues.rows
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

    def prepare(self, topic: str, queues: int) -> None:
        """Have the pool make the files of a new topic, so that first messages need not wait.

        Only of so many queues: one that never gets a message should cost nothing.
        """
        for queue_id in range(min(queues, PREPARED_MAX) if self.disk.threads else 0):
            queue = self.make_queue(topic.encode(), queue_id)
            if queue is not None:
                self.disk.submit(queue.prepare)

    def remove_queues(self, topic: bytes) -> list[ConsumeQueue]:
        """Forget the queues of a deleted topic; one made anew begins at 0.

        Their files go with `finish_removal`. Raises StoreError, and then nothing has changed.
        """
        mine = self.queues.of(topic)
        self._recovery.removal.take_away(
            topic, mine, log_begin=self.care.deleted_to, log_end=self.log.end
        )
        path = self.path
        if any(queue.dirty for queue in mine):
            path.dirty = [queue for queue in path.dirty if not queue.gone]
        path.arrived = [queue for queue in path.arrived if not queue.gone]
        return self.queues.remove(topic)

    def finish_removal(self) -> None:
        """Make removals durable and delete the files; waits for the disk."""
        self._recovery.removal.finish()

    def deleted_below(self, topic: bytes) -> int:
        """Where the log ended when a topic of this name was last deleted; 0 if never."""
        return self._recovery.removal.end_of(topic)

    def settle(self) -> None:
        """End of a turn, and after the flusher rang: hand over, confirm, wake listeners."""
        self.flusher.acknowledge()
        if self.flusher.failed() and not isinstance(self.path.refusal, WriteStopped):
            code = self.flusher.failed()
            self.path.refusal = WriteStopped(
                f"flushing {self.paths.log} failed: {os.strerror(code)}; writing has stopped"
            )
            log.error("%s", self.path.refusal)
        if self.path.settle():
            self.attend()

    def attend(self) -> None:
        """Have blocks allocated ahead by the pool, and wake whoever waits for messages."""
        hungry, self.path.hungry = self.path.hungry, []
        if self.disk.threads:
            for file in hungry:
                self.disk.submit(file.feed)
        arrived, self.path.arrived = self.path.arrived, []
        for queue in arrived:
            if queue.visible_max(self.path.confirmed) > queue.watched_from:
                if self._arrival_listener is not None:
                    self._arrival_listener(queue)
            else:
                self.path.arrived.append(queue)

    def on_arrival(self, listener: Callable[[ConsumeQueue], None]) -> None:
        """Call `listener(queue)` when a watched queue has a new message that readers may see."""
        self._arrival_listener = listener

    def watch(self, queue: ConsumeQueue) -> None:
        """Call the arrival listener once, when this queue has a new message."""
        if not queue.watched and queue not in self.path.arrived:
            queue.watched_from = queue.visible_max(self.path.confirmed)
            if queue.max_offset > queue.watched_from:  # stored already, on its way to the disk
                self.path.arrived.append(queue)
            else:
                queue.watched = True

    def sync_log(self, end: int) -> None:
        """Make the log durable up to this offset, whatever the flusher does; waits for the disk."""
        begin = self.flusher.flushed()
        for segment in list(self.log.row.segments):
            if segment.start + segment.size > begin and segment.start < end:
                self.disk.sync(segment.fd)

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
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        codes: Sequence[int] = (),
        wait: bool = False,
    ) -> Found:
        """Messages of a queue from `offset` on, as records in one piece of bytes.

        Where that would wait for the disk the status is COLD: ask again with `wait`, in the pool.
        `codes` are hashes of wanted tags; none means all.
        """
        queue = self.queue(topic, queue_id)
        if queue is None:
            return Found(NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, 0, b"")
        reader = self.fresh_reader(codes)
        status = reader.find(queue, offset, count_max, bytes_max, self.confirmed, wait)
        output = Output(1024)
        if status == FOUND and not reader.copy_to(output, wait):
            # With patience and still not there: retention took the segment away meanwhile.
            status = MESSAGE_WAS_REMOVING if wait else COLD
        return Found(
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
        return queue.visible_max(self.path.confirmed) if queue is not None else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self.queue(topic, queue_id)
        return queue.min_offset if queue is not None else 0

    def fresh_reader(self, codes: Sequence[int] = ()) -> Reader:
        """A reader of its own, for a thread of the pool."""
        reader = Reader(self.log, self.config.hot_bytes)
        reader.only(codes)
        return reader

    # --- care (more in care.py)

    def reconfigure(self, config: StoreConfig) -> None:
        """Take over live settings."""
        self.config = self.care.config = config
        self.path.index_tags = config.index_tags
        self.care.awake.most = mapped_max(self.disk, config)
        self.reader = Reader(self.log, config.hot_bytes)

    def on_retention(self, pinned_from: Callable[[], int | None]) -> None:
        """Keep messages from the log offset that `pinned_from()` returns; None pins nothing."""
        self.care.pinned_from = pinned_from

    def tick(self, now_ms: int) -> None:
        """Have done what is due: flushing queues, the checkpoint, retention. Call every second."""
        self.care.tick(now_ms)

    def expire(self, count: int) -> None:
        """Delete the oldest segments, but never the last."""
        self.care.expire(count)
