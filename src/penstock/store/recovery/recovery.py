"""Start-up: from files in any state to a log, queues and an index that agree.

Clean (no `abort`): the snapshot written at shutdown says where the log ends and how far each queue
goes, and one look at the log's end confirms it; queue files are not even opened. Without a
snapshot (a store of Apache's) the queues tell how far the log was dispatched, and what follows is
replayed.

After a crash:

1. Choose S, the newest segment start whose first record is not younger than the checkpoint.
   Everything before S is on the disk, log, queue entries and index entries alike.
2. Cut queues and index back to records below S.
3. Walk the log from S, check each record, dispatch it again: entries get the place that the
   record itself names, so it does not matter what a power cut left behind.
4. Where no good record follows, cut the log: the rest becomes zero and later segments go. (If
   stale bytes remained, a later crash could take an old record behind a new one for its successor.)
5. Sync what was found, because readers may see it from now on.

If queues contradict the log on the way (damaged or missing files), the whole log is walked.

Records of topics that were deleted since (`store.removal`) get no entries.
"""

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.config import StoreConfig, delays_ms
from penstock.errors import StoreDamaged, StoreRefused
from penstock.store.consumequeue import queue_files
from penstock.store.consumequeue.consumequeue import (
    FILLER_SIZE,
    ConsumeQueue,
)
from penstock.store.consumequeue.mapped_queues import MappedQueues, mapped_max
from penstock.store.consumequeue.queue_removal import Removal
from penstock.store.consumequeue.queue_table import QueueTable
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk
from penstock.store.index import Index
from penstock.store.put import StoreWriter
from penstock.store.recovery.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from penstock.store.recovery.log_replay import Replay
from penstock.store.segment import NAME_DIGITS, Segment, SegmentList, is_number, segment_name
from penstock.wire.codes import TOPIC_SCHEDULE
from penstock.wire.layout import ENTRY_BYTES
from penstock.wire.record import NOTHING, PROBLEMS, RECORD, UNWRITTEN, StoredRecord

STEP_BYTES = 64 * 1024 * 1024
"""How much of the log is walked between two reports of progress."""
QUEUE_ID_MAX = 1 << 20
SCHEDULE_TOPIC = TOPIC_SCHEDULE.encode()

Progress = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done and how much there is."""


class Snapshot(msgspec.Struct):
    """The state at a clean shutdown, in `penstock.snapshot`."""

    log_begin: int
    log_end: int
    last_offset: int
    store_ms: int
    queues: list[tuple[str, int, int, int]]  # topic, queue id, min, max
    files: list[tuple[int, int]]  # of each of them: first entry of the first file, how many files
    check: int = 0  # CRC of all the rest: one wrong digit would be believed

    def sealed(self) -> "Snapshot":
        return msgspec.structs.replace(self, check=self._crc())

    def is_whole(self) -> bool:
        return self.check == self._crc() and len(self.files) == len(self.queues)

    def _crc(self) -> int:
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, check=0)))


class Report(msgspec.Struct):
    """What recovery found and did."""

    clean: bool = True
    replayed_from: int = 0
    records: int = 0
    strange_records: int = 0
    log_end: int = 0
    last_offset: int = -1
    cut_reason: str | None = None
    store_ms: int = 0
    strange_files: list[str] = msgspec.field(default_factory=list)
    short_files: list[str] = msgspec.field(default_factory=list)

    def complaints(self) -> list[str]:
        """What a person should know, in sentences."""
        said = [
            f"the segment {name} has lost its end: its messages can't be read"
            for name in self.short_files
        ]
        said += [
            f"index/{name} is no index file of ours and is left aside"
            for name in self.strange_files
        ]
        if self.strange_records:
            said.append(f"{self.strange_records} records have damaged heads and no queue entry")
        if self.cut_reason and not self.cut_reason.startswith(PROBLEMS[UNWRITTEN]):
            said.append(f"the log was cut: {self.cut_reason}")
        return said


class Recovery:
    """One opening of a store's files."""

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
        self.removal = Removal(disk, paths)
        self.report = Report()
        self._delays_ms = delays_ms(config.delay_levels)
        self._progress = progress or (lambda what, done, of: None)

    def load_log(self, *, sizes_known: bool) -> None:
        """Map the log's segments; short ones are extended if it is known that they are short."""
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
                    raise StoreDamaged(f"{self.paths.log} lacks the segment {missing}")
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
            f"{path} tells of segments of {length} bytes, the setting segment_bytes is "
            f"{self.config.segment_bytes}",
            hint="set segment_bytes (mappedFileSizeCommitLog) to what the store was made with",
        )

    def load_queues(self) -> None:
        """Find all queues there are; positions are set later."""
        for topic in self.disk.names(self.paths.queues):
            for queue_id in self.disk.names(self.paths.queues / topic):
                if is_number(queue_id):
                    queue = self.add_queue(os.fsencode(topic), int(queue_id))
                    if queue is not None:
                        queue.load()

    def add_queue(self, topic: bytes, queue_id: int) -> ConsumeQueue | None:
        """The queue of this name, made if it is new; None if that can't be a queue's name."""
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
            )
            if topic == SCHEDULE_TOPIC:  # beyond the table are levels that it once had
                queue.delay_ms = self._delays_ms[min(queue_id, len(self._delays_ms) - 1)]
            self.queues.add(queue)
        return queue

    def run(self, writer: StoreWriter, *, crashed: bool, ours: bool) -> Report:
        """Bring log, queues and index to agree. `ours`: the checkpoint was written by Penstock."""
        self.report.clean = not crashed
        self.checkpoint = read_checkpoint(self.disk, self.paths)
        self.report.strange_files = (
            self.index.load(extend=ours) if self.config.index_enabled else []
        )
        if not ours:
            self._refuse_other_sizes()
        if not crashed and self._resume():
            self._settle_removal()
            return self.report
        # From here on files are written to: a crash meanwhile must not look like a clean end.
        self.disk.write_file(self.paths.abort, str(os.getpid()).encode())
        self.load_queues()
        for queue in self.queues.rows:
            if self.removal.end_of(queue.topic) > 0:
                queue_files.drop_files_of(queue, self.removal.end_of(queue.topic))
        begin = self._start_after_crash(ours=ours) if crashed else self._dispatched_end()
        if begin is None or (crashed and not self._cut_back(writer, begin)):
            end = self._replay_all(writer)
        else:
            end = self._replay(writer, begin)
            if writer.gaps and begin > self.segments.first:
                end = self._replay_all(writer)
        self._cut_log(end)
        for queue in self.queues.rows:
            queue.hot_from = queue.max_offset
            queue.correct_min(self.segments.first)
        self.mapped_queues.unmap_all()
        self._settle_removal()
        return self.report

    def _settle_removal(self) -> None:
        self.removal.finish_recovery(log_begin=self.segments.first, log_end=self.report.log_end)

    def _replay_all(self, writer: StoreWriter) -> int:
        """Queues or index contradict the log: let all of it tell what they should say."""
        self.checkpoint = Checkpoint(confirm_offset=self.checkpoint.confirm_offset)
        write_checkpoint(self.disk, self.paths, self.checkpoint)
        writer.gaps = writer.unplaced = 0
        for queue in self.queues.rows:
            queue.close()
        self._cut_back(writer, self.segments.first)
        return self._replay(writer, self.segments.first)

    def _start_after_crash(self, *, ours: bool) -> int:
        """Where to begin by the checkpoint, which is then void beyond what all parts reached:
        what is dispatched again is not durable yet."""
        known_ms = self.checkpoint.known_ms(with_index=ours)
        begin = self._start_segment(self.checkpoint.recover_from_ms(with_index=ours))
        confirm_offset = self.checkpoint.confirm_offset
        self.checkpoint = Checkpoint(known_ms, known_ms, known_ms, 0, confirm_offset)
        return begin

    def _refuse_other_sizes(self) -> None:
        """A store of Apache's, seen for the first time: do its files have the sizes set?"""
        self.load_queues()
        for queue in self.queues.rows:
            length = queue_files.strange_size(queue)
            if length is not None:
                raise StoreRefused(
                    f"{queue.folder} has files of {length} bytes, the setting queue_file_entries "
                    f"makes {self.config.queue_file_entries * ENTRY_BYTES}",
                    hint="set queue_file_entries to what the store was made with "
                    "(mappedFileSizeConsumeQueue / 20)",
                )
        strange = [n for n in self.report.strange_files if is_number(n)]
        if strange:
            raise StoreRefused(
                f"{self.paths.index / strange[0]} is no index file of {self.config.index_slots} "
                f"slots and {self.config.index_entries} entries",
                hint="set index_slots (maxHashSlotNum) and index_entries (maxIndexNum) to what the "
                "store was made with",
            )

    def _resume(self) -> bool:
        """Take over the snapshot of a clean shutdown, if the log confirms it."""
        data = self.disk.read(self.paths.snapshot)
        if data is None:
            return False
        try:
            snapshot = msgspec.json.decode(data, type=Snapshot)
        except ValueError:  # DecodeError, or bytes that are no UTF-8
            return False
        if not snapshot.is_whole():
            return False
        if snapshot.log_begin != self.segments.first or not self._ends_at(snapshot):
            return False
        folders = set(self.disk.names(self.paths.queues))
        if not folders >= {topic for topic, _, low, high in snapshot.queues if high > low}:
            return False  # somebody else deleted topics meanwhile
        noted = zip(snapshot.queues, snapshot.files, strict=True)
        for (topic, queue_id, low, high), (first, files) in noted:
            queue = self.add_queue(topic.encode(), queue_id)
            if queue is not None:
                queue.resume(first, files, low, high)
        self._drop_segments_from(snapshot.log_end)
        self.report.log_end = self.report.replayed_from = snapshot.log_end
        self.report.last_offset = snapshot.last_offset
        self.report.store_ms = snapshot.store_ms
        return True

    def _ends_at(self, snapshot: Snapshot) -> bool:
        """Whether the log's last record is the snapshot's, with nothing behind it."""
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
            return (
                snapshot.log_end
                == self.segments.first + len(self.segments.items) * self.segments.segment_bytes
            )
        stored.bind(segment.view)
        return stored.read(snapshot.log_end - segment.start, segment.size) == NOTHING

    def _dispatched_end(self) -> int | None:
        """Clean, but without a snapshot: the end of the last record that has a queue entry.

        None if a queue's last entry does not lead to its record: then nothing can be trusted.
        """
        end = self.segments.first
        beyond = self.segments.first + len(self.segments.items) * self.segments.segment_bytes
        total = len(self.queues.rows)
        for done, queue in enumerate(self.queues.rows):
            self._progress("queues", done, total)
            queue_files.close_gaps(queue, beyond)
            queue.min_offset = queue.file_starts[0] if queue.file_starts else 0
            queue.max_offset = queue_files.find_below(queue, beyond)
            if not self._last_is_home(queue, queue.max_offset):
                return None
            entry = queue.entry(queue.max_offset - 1)
            if entry is not None and entry[1] != FILLER_SIZE:
                end = max(end, entry[0] + entry[1])
        return end

    def _last_is_home(self, queue: ConsumeQueue, end: int) -> bool:
        """Whether the record of the entry before `end` lies where the entry says, if anywhere."""
        entry = queue.entry(end - 1)
        if entry is None or entry[1] == FILLER_SIZE or entry[0] < self.segments.first:
            return True
        queue_offset, offset, size = end - 1, entry[0], entry[1]
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
        """The newest segment start whose first record is whole and not younger than this."""
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

    def _cut_back(self, writer: StoreWriter, begin: int) -> bool:
        """Keep only queue and index entries of records below `begin`.

        What was cut is synced with the rest, before a checkpoint or a deletion counts on it: until
        then the next start cuts again. False if a queue's last entry below does not lead to its
        record.
        """
        total = len(self.queues.rows)
        for done, queue in enumerate(self.queues.rows):
            self._progress("queues", done, total)
            queue_files.close_gaps(queue, begin)
            queue.min_offset = queue.file_starts[0] if queue.file_starts else 0
            queue.max_offset = queue.min_offset
            kept = queue_files.find_below(queue, begin)
            queue.max_offset = max(queue.max_offset, kept)
            if begin == self.segments.first or not self._last_is_home(queue, kept):
                kept = queue_files.count_below(queue, begin)
                queue.max_offset = max(queue.max_offset, kept)
                if begin > self.segments.first and not self._last_is_home(queue, kept):
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
        replay = Replay(writer, self.add_queue, self.removal.ends)
        replay.stored.durable_to = self.checkpoint.confirm_offset
        beyond = self.segments.first + len(self.segments.items) * self.segments.segment_bytes
        at = begin
        while not replay.ended:
            segment = self.segments.find(at)
            if segment is None:
                break
            self._progress("log", at - begin, beyond - begin)
            at = replay.run(segment, at, STEP_BYTES)
        writer.end_replay()
        self._progress("log", beyond - begin, beyond - begin)
        self.report.records = replay.records
        self.report.strange_records = replay.strange + writer.unplaced
        self.report.log_end = at
        self.report.last_offset = replay.last_offset
        self.report.store_ms = writer.store_ms
        if replay.ended and replay.stored.problem:
            self.report.cut_reason = f"{PROBLEMS[replay.stored.problem]} (at offset {at})"
        return at

    def _cut_log(self, end: int) -> None:
        """Let the log end at `end`, durably, with nothing behind it."""
        if end < self.checkpoint.confirm_offset:
            self.checkpoint = self.checkpoint._replace(confirm_offset=end)
            write_checkpoint(self.disk, self.paths, self.checkpoint)
        self._drop_segments_from(end)
        last = self.segments.find(end)
        if last is not None:
            self.disk.truncate(last.fd, end - last.start)
            self.disk.truncate(last.fd, last.size)
        for segment in self.segments.items:
            if segment.start + segment.size > self.report.replayed_from:
                self.disk.sync(segment.fd)

    def _drop_segments_from(self, end: int) -> None:
        """Delete the segments that begin behind the log's end."""
        while self.segments.items and self.segments.items[-1].start > end:
            self.segments.unlink(self.segments.drop_last())


def is_queue_name(topic: bytes) -> bool:
    """Whether a topic can be a directory's name: RocketMQ's characters, and not too long."""
    if not 0 < len(topic) <= 255:
        return False
    # A plus stands in retry topics of POP only.
    return all(c in b"%|-_+" or 48 <= c <= 57 or 65 <= c <= 90 or 97 <= c <= 122 for c in topic)
