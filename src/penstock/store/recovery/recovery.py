"""Recovery at start-up: from files in any state to a consistent log, queues and index.

After a clean shutdown (no `abort`) the snapshot says where the log and each queue end, and a look
at the log's end confirms it; queue files are not even opened. Without a snapshot (an Apache store)
the queues tell how far the log was dispatched, and the rest is replayed.

After a crash:

1. Choose S, the newest segment start whose first record is not younger than the checkpoint.
   Everything before S is on the disk: log, queue entries and index entries.
2. Truncate queues and index to records below S.
3. Walk the log from S, check each record and dispatch it again: the record itself names the queue
   offset of its entry, so it does not matter what a power cut left behind.
4. Where no valid record is found, `damage` decides. Damage inside the log is reported and skipped:
   the bytes stay, fillers stand for the lost queue entries. Otherwise the log is truncated there:
   the rest is saved (`log_tail`) and zeroed, and later segments are deleted. (If stale bytes
   remained, a later crash could take an old record behind a new one for its successor.)
5. Sync what was found, because readers may see it from now on.

If queues contradict the log (damaged or missing files), the whole log is walked.

Records of topics that were deleted since (`consumequeue.queue_removal`) get no entries.
"""

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.config import StoreConfig, delays_ms
from penstock.errors import StoreDamaged, StoreRefused
from penstock.store.consumequeue import queue_files
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.consumequeue.mapped_queues import MappedQueues, mapped_max
from penstock.store.consumequeue.queue_removal import QueueRemoval
from penstock.store.consumequeue.queue_table import QueueTable
from penstock.store.directory import StorePaths, mark_open, opened_here
from penstock.store.disk import Disk
from penstock.store.index import Index
from penstock.store.put import StoreWriter
from penstock.store.recovery.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from penstock.store.recovery.damage import DAMAGED, DamageJudge, LostMessage, part_of
from penstock.store.recovery.log_replay import Replay
from penstock.store.recovery.log_tail import save_tail
from penstock.store.recovery_report import DamagedRange, ReplayDamage, Report
from penstock.store.segment import NAME_DIGITS, Segment, SegmentList, is_number, segment_name
from penstock.wire.codes import TOPIC_SCHEDULE
from penstock.wire.layout import ENTRY_BYTES
from penstock.wire.record import NOTHING, RECORD, StoredRecord

STEP_BYTES = 64 * 1024 * 1024
"""How much of the log is walked between two reports of progress."""
QUEUE_ID_MAX = 1 << 20
SCHEDULE_TOPIC = TOPIC_SCHEDULE.encode()

Progress = Callable[[str, int, int], None]
"""Called with the phase, how much of it is done and how much there is."""


class Snapshot(msgspec.Struct):
    """The state at a clean shutdown, in `penstock.snapshot`."""

    log_begin: int
    log_end: int
    last_offset: int
    store_ms: int
    queues: list[tuple[str, int, int, int]]  # topic, queue id, min, max
    files: list[tuple[int, int]]  # of each queue: first entry of the first file, number of files
    check: int = 0  # CRC of the other fields

    def sealed(self) -> "Snapshot":
        return msgspec.structs.replace(self, check=self._crc())

    def is_whole(self) -> bool:
        return self.check == self._crc() and len(self.files) == len(self.queues)

    def _crc(self) -> int:
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, check=0)))


class Recovery:
    """Opens the files of one store and makes them consistent."""

    def __init__(
        self, disk: Disk, paths: StorePaths, config: StoreConfig, progress: Progress | None
    ) -> None:
        self.disk = disk
        self.paths = paths
        self.config = config
        self.segments = SegmentList(disk, paths.log, config.segment_bytes)
        self.queues = QueueTable()
        self.mapped_queues = MappedQueues(mapped_max(disk, config))
        self.index = Index(disk, paths.index, config.index_slots, config.index_entries)
        self.checkpoint = Checkpoint()
        self.removal = QueueRemoval(disk, paths)
        self.report = Report()
        # Nothing below this log offset can be torn; `damage` says why.
        self._durable_to = 0
        self._delays_ms = delays_ms(config.delay_levels)
        self._progress = progress or (lambda what, done, of: None)

    def load_log(self, *, sizes_known: bool) -> None:
        """Map the log's segments; short ones are extended if the segment size is known."""
        names = [
            n for n in self.disk.names(self.paths.log) if is_number(n) and len(n) == NAME_DIGITS
        ]
        size = self.config.segment_bytes
        for place, name in enumerate(names):
            path = self.paths.log / name
            start = int(name)
            length = self.disk.size(path)
            if place and start != self.segments.first + place * size:
                if (start - self.segments.first) % size == 0:
                    missing = segment_name(self.segments.first + place * size)
                    raise StoreDamaged(f"segment {missing} is missing in {self.paths.log}")
                raise self._other_size(path, start - self.segments.first)
            if length == 0 and place == len(names) - 1 and place > 0:
                self.disk.unlink(path)
                break
            if length != size and (length > size or not sizes_known):
                raise self._other_size(path, length)
            if length < size and place < len(names) - 1:
                self.report.short_files.append(name)
            self.segments.push(Segment(self.disk, path, start, size, self.disk.create(path, size)))

    def _other_size(self, path: Path, length: int) -> StoreRefused:
        return StoreRefused(
            f"{path} belongs to segments of {length} bytes, the setting segment_bytes is "
            f"{self.config.segment_bytes}",
            hint="set segment_bytes (mappedFileSizeCommitLog) to the size of the store's files",
        )

    def load_queues(self) -> None:
        """Find all queues; their positions are set later."""
        for topic in self.disk.names(self.paths.queues):
            for queue_id in self.disk.names(self.paths.queues / topic):
                if is_number(queue_id):
                    queue = self.add_queue(os.fsencode(topic), int(queue_id))
                    if queue is not None:
                        queue.load()

    def add_queue(self, topic: bytes, queue_id: int) -> ConsumeQueue | None:
        """The queue of this name, made if it is new; None for a name that no queue can have."""
        queue = self.queues.get(topic, queue_id)
        if queue is None and is_queue_name(topic) and 0 <= queue_id < QUEUE_ID_MAX:
            folder = self.paths.queues / topic.decode() / str(queue_id)
            queue = ConsumeQueue(
                self.disk,
                folder,
                topic,
                queue_id,
                self.config.queue_file_entries,
                self.mapped_queues,
                delay_ms=self._delay_ms(queue_id) if topic == SCHEDULE_TOPIC else -1,
            )
            self.queues.add(queue)
        return queue

    def _delay_ms(self, queue_id: int) -> int:
        """The delay of a level's queue; levels that the table had once get its longest."""
        return self._delays_ms[min(queue_id, len(self._delays_ms) - 1)]

    def run(self, writer: StoreWriter, *, crashed: bool, ours: bool) -> Report:
        """Make log, queues and index consistent. `ours`: Penstock wrote the checkpoint."""
        self.report.clean = not crashed
        self.checkpoint = read_checkpoint(self.disk, self.paths)
        whole = not crashed or opened_here(self.disk, self.paths)
        self._durable_to = self._beyond() if whole else self._confirmed()
        self.report.invalid_index_files = (
            self.index.load(extend=ours) if self.config.index_enabled else []
        )
        if not ours:
            self._refuse_other_sizes()
        if not crashed and self._resume():
            self._finish_removal()
            return self.report
        # Files are written from here on: a crash meanwhile must not look like a clean shutdown.
        if not crashed:  # else it says which system opened the store; the next recovery needs that
            mark_open(self.disk, self.paths)
        self.load_queues()
        for queue in self.queues.rows:
            if self.removal.end_of(queue.topic) > 0:
                queue_files.drop_files_of(queue, self.removal.end_of(queue.topic))
        begin = self._start_after_crash(ours=ours) if crashed else self._dispatched_end()
        if begin is None or (crashed and not self._truncate_queues(writer, begin)):
            end = self._replay_all(writer)
        else:
            end = self._replay(writer, begin)
            if writer.gaps and begin > self.segments.first:
                end = self._replay_all(writer)
        self._truncate_log(end)
        for queue in self.queues.rows:
            queue.hot_from = queue.max_offset
            queue.correct_min(self.segments.first)
        self.mapped_queues.unmap_all()
        self._finish_removal()
        return self.report

    def _finish_removal(self) -> None:
        self.removal.finish_recovery(log_begin=self.segments.first, log_end=self.report.log_end)

    def _replay_all(self, writer: StoreWriter) -> int:
        """Queues contradict the log: rebuild queues and index from all of it."""
        self.checkpoint = Checkpoint(confirm_offset=self.checkpoint.confirm_offset)
        write_checkpoint(self.disk, self.paths, self.checkpoint)
        writer.gaps = writer.unplaced = 0
        for queue in self.queues.rows:
            queue.close()
        self._truncate_queues(writer, self.segments.first)
        return self._replay(writer, self.segments.first)

    def _start_after_crash(self, *, ours: bool) -> int:
        """Where the checkpoint says to begin. Beyond what all parts have reached it is void: what
        is dispatched again is not durable yet."""
        known_ms = self.checkpoint.known_ms(with_index=ours)
        begin = self._start_segment(self.checkpoint.recover_from_ms(with_index=ours))
        confirm_offset = self.checkpoint.confirm_offset
        self.checkpoint = Checkpoint(known_ms, known_ms, known_ms, 0, confirm_offset)
        return begin

    def _refuse_other_sizes(self) -> None:
        """Refuse an Apache store whose files do not have the configured sizes."""
        self.load_queues()
        for queue in self.queues.rows:
            length = queue_files.other_file_size(queue)
            if length is not None:
                raise StoreRefused(
                    f"{queue.folder} has files of {length} bytes, the setting queue_file_entries "
                    f"requires {self.config.queue_file_entries * ENTRY_BYTES}",
                    hint="set queue_file_entries to the size of the store's files "
                    "(mappedFileSizeConsumeQueue / 20)",
                )
        invalid = [n for n in self.report.invalid_index_files if is_number(n)]
        if invalid:
            raise StoreRefused(
                f"{self.paths.index / invalid[0]} is not an index file with "
                f"{self.config.index_slots} slots and {self.config.index_entries} entries",
                hint="set index_slots (maxHashSlotNum) and index_entries (maxIndexNum) to the "
                "sizes of the store's files",
            )

    def _resume(self) -> bool:
        """Take over the snapshot of a clean shutdown if the log confirms it."""
        data = self.disk.read(self.paths.snapshot)
        if data is None:
            return False
        try:
            snapshot = msgspec.json.decode(data, type=Snapshot)
        except ValueError:  # DecodeError, or not UTF-8
            return False
        if not snapshot.is_whole():
            return False
        if snapshot.log_begin != self.segments.first or not self._ends_at(snapshot):
            return False
        folders = set(self.disk.names(self.paths.queues))
        if not folders >= {topic for topic, _, low, high in snapshot.queues if high > low}:
            return False  # another program has deleted topics meanwhile
        rows = zip(snapshot.queues, snapshot.files, strict=True)
        for (topic, queue_id, low, high), (first, files) in rows:
            queue = self.add_queue(topic.encode(), queue_id)
            if queue is not None:
                queue.resume(first, files, low, high)
        if self.segments.items and self.segments.items[-1].start > snapshot.log_end:
            self._save_tail(snapshot.log_end)
        self._drop_segments_from(snapshot.log_end)
        self.report.log_end = self.report.replayed_from = snapshot.log_end
        self.report.last_offset = snapshot.last_offset
        self.report.store_ms = snapshot.store_ms
        return True

    def _ends_at(self, snapshot: Snapshot) -> bool:
        """Whether the log's last record is the snapshot's, and nothing follows it."""
        stored = StoredRecord()
        if snapshot.last_offset >= 0:
            segment = self.segments.find(snapshot.last_offset)
            if segment is None:
                return snapshot.last_offset < self.segments.first
            stored.bind(segment.view)
            kind = stored.read(snapshot.last_offset - segment.start, segment.size)
            if kind != RECORD or stored.check(snapshot.last_offset) == NOTHING:
                return False
        segment = self.segments.find(snapshot.log_end)
        if segment is None:
            return snapshot.log_end == self._beyond()
        stored.bind(segment.view)
        return stored.read(snapshot.log_end - segment.start, segment.size) == NOTHING

    def _dispatched_end(self) -> int | None:
        """Without a snapshot: the end of the last record that has a queue entry.

        None if a queue's last entry does not match its record: then the whole log is walked.
        """
        end = self.segments.first
        beyond = self._beyond()
        total = len(self.queues.rows)
        for done, queue in enumerate(self.queues.rows):
            self._progress("queues", done, total)
            queue_files.close_gaps(queue, beyond)
            queue.min_offset = queue.file_starts[0] if queue.file_starts else 0
            queue.max_offset = queue_files.find_below(queue, beyond)
            if not self._last_entry_matches(queue, queue.max_offset):
                return None
            entry = queue.entry(queue_files.last_real(queue, queue.max_offset))
            if entry is not None:
                end = max(end, entry[0] + entry[1])
        return end

    def _last_entry_matches(self, queue: ConsumeQueue, end: int) -> bool:
        """Whether the entry before `end` matches its record, or the record is deleted."""
        queue_offset = queue_files.last_real(queue, end)
        entry = queue.entry(queue_offset)
        if entry is None or entry[0] < self.segments.first:
            return True
        offset, size = entry[0], entry[1]
        segment = self.segments.find(offset)
        if segment is None:
            return False
        stored = StoredRecord()
        stored.bind(segment.view)
        at = offset - segment.start
        if stored.read(at, segment.size) != RECORD or stored.check(offset) != RECORD:
            return False
        return (stored.size, stored.queue_id, stored.queue_offset) == (
            size,
            queue.queue_id,
            queue_offset,
        )

    def _start_segment(self, threshold_ms: int) -> int:
        """The newest segment whose first record is valid and not younger than this."""
        stored = StoredRecord()
        for segment in reversed(self.segments.items):
            stored.bind(segment.view)
            if (
                stored.read(0, segment.size) == RECORD
                and stored.check(segment.start) == RECORD
                and 0 < stored.store_ms <= threshold_ms
            ):
                return segment.start
        return self.segments.first

    def _truncate_queues(self, writer: StoreWriter, begin: int) -> bool:
        """Keep only queue and index entries of records below `begin`.

        The truncation is synced later, before a checkpoint or a deletion relies on it; until then
        the next start truncates again. False if a queue's last entry does not match its record.
        """
        total = len(self.queues.rows)
        for done, queue in enumerate(self.queues.rows):
            self._progress("queues", done, total)
            queue_files.close_gaps(queue, begin)
            queue.min_offset = queue.file_starts[0] if queue.file_starts else 0
            queue.max_offset = queue.min_offset
            kept = queue_files.find_below(queue, begin)
            queue.max_offset = max(queue.max_offset, kept)
            if begin == self.segments.first or not self._last_entry_matches(queue, kept):
                kept = queue_files.count_below(queue, begin)
                queue.max_offset = max(queue.max_offset, kept)
                if begin > self.segments.first and not self._last_entry_matches(queue, kept):
                    return False
            if queue_files.has_data_from(queue, kept):
                queue.cut(kept)
                writer.mark_dirty(queue)
            queue.max_offset = kept
        if self.config.index_enabled:
            self._progress("index", 0, 1)
            self.index.cut(begin)
        return True

    def _replay(self, writer: StoreWriter, begin: int) -> int:
        """Walk and dispatch the log from `begin`; returns where it ends."""
        self.report.replayed_from = begin
        self.report.cut_reason = None
        replay = Replay(writer, self.add_queue, self.removal.ends)
        replay.stored.durable_to = self._durable_to
        writer.damage = ReplayDamage(self.report, begin)
        judge = self._judge()
        beyond = self._beyond()
        at = begin
        while True:
            segment = self.segments.find(at)
            if segment is None:
                break
            self._progress("log", at - begin, beyond - begin)
            at = replay.run(segment, at, STEP_BYTES)
            if not replay.ended:
                continue
            problem, size = replay.stored.problem, replay.stored.size
            verdict = judge.judge(at, problem, size)
            if verdict.case != DAMAGED:
                self.report.cut_reason = f"{verdict.reason} (at offset {at})"
                break
            lost = judge.lost_message(at, verdict.following, problem, size)
            self._isolate(writer, at, verdict.following, verdict.reason, lost)
            at = verdict.following
        writer.end_replay()
        self._progress("log", beyond - begin, beyond - begin)
        self.report.records = replay.records
        self.report.damaged_records = replay.damaged + writer.unplaced
        self.report.log_end = at
        self.report.last_offset = replay.last_offset
        self.report.store_ms = writer.store_ms
        return at

    def _isolate(
        self, writer: StoreWriter, begin: int, end: int, reason: str, lost: LostMessage | None
    ) -> None:
        """Note a damaged range; a message whose queue is known there becomes a filler."""
        message = ""
        if lost is not None and is_queue_name(lost.topic):
            message = f"a message of topic {lost.topic.decode()}, queue {lost.queue_id}"
            if lost.queued:
                message += f", queue offset {lost.queue_offset}"
        writer.damage.add(DamagedRange(begin, end - begin, reason, message))
        if lost is not None and message and begin >= self.removal.end_of(lost.topic):
            queue = self.queues.get(lost.topic, lost.queue_id)
            if queue is not None and lost.queued and lost.queue_offset == queue.max_offset:
                writer.fill(queue, lost.queue_offset + 1)

    def _judge(self) -> DamageJudge:
        return DamageJudge(
            [part_of(segment) for segment in self.segments.items],
            self.segments.segment_bytes,
            durable_to=self._durable_to,
            confirm_offset=self._confirmed(),
        )

    def _beyond(self) -> int:
        """The end of the last segment."""
        return self.segments.first + len(self.segments.items) * self.segments.segment_bytes

    def _confirmed(self) -> int:
        """The checkpoint's confirm offset; 0 if it can't be right."""
        offset = self.checkpoint.confirm_offset
        return offset if offset <= self._beyond() else 0

    def _truncate_log(self, end: int) -> None:
        """Truncate the log at `end`, durably. From then on its content is known to be durable."""
        self._save_tail(end)
        if end < self.checkpoint.confirm_offset:
            self._write_confirmed(end)
        self._drop_segments_from(end)
        last = self.segments.find(end)
        if last is not None:
            self.disk.truncate(last.fd, end - last.start)
            self.disk.truncate(last.fd, last.size)
        for segment in self.segments.items:
            if segment.start + segment.size > self.report.replayed_from:
                self.disk.sync(segment.fd)
        if end > self.checkpoint.confirm_offset:
            self._write_confirmed(end)

    def _write_confirmed(self, offset: int) -> None:
        self.checkpoint = self.checkpoint._replace(confirm_offset=offset)
        write_checkpoint(self.disk, self.paths, self.checkpoint)

    def _save_tail(self, end: int) -> None:
        """Save what the log has behind its end, before it is destroyed."""
        data_end = self._judge().data_end(end)
        if data_end > end:
            path = save_tail(self.disk, self.paths, self.segments.items, end, data_end)
            self.report.saved_files.append(str(path))
            self.report.saved_bytes += data_end - end

    def _drop_segments_from(self, end: int) -> None:
        """Delete the segments that begin after the log's end."""
        while self.segments.items and self.segments.items[-1].start > end:
            self.segments.unlink(self.segments.drop_last())


def is_queue_name(topic: bytes) -> bool:
    """Whether a topic can be a directory's name: RocketMQ's characters, and not too long."""
    if not 0 < len(topic) <= 255:
        return False
    # Only retry topics of POP contain a plus.
    return all(c in b"%|-_+" or 48 <= c <= 57 or 65 <= c <= 90 or 97 <= c <= 122 for c in topic)
