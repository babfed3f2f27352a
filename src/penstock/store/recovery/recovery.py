"""Recovery at start-up: from files in any state to a consistent log, queues and index.

A log that has lost its last segments is refused (`missing_log`).

After a clean shutdown (no `abort`) the snapshot says where the log and each queue end, and a look
at the log's end confirms it (`closed_log`); queue files are not even opened. Queues whose files are
not as they were are rebuilt, and only these (`entry_check`). Without a snapshot (an Apache store)
the queues tell how far the log was dispatched, and the rest is replayed.

After a crash:

1. Choose S, the newest segment start whose first record is not younger than the checkpoint.
   Everything before S is on the disk: log, queue entries and index entries.
2. Truncate the index to records below S, and find the entry of each queue where S begins.
3. Walk the log from S, check each record and dispatch it again: the record itself names the queue
   offset of its entry, so it does not matter what a power cut left behind. Queue entries are
   collected, then written queue by queue where the files differ, and what follows them is zeroed.
4. Where no valid record is found, `damage` decides. Damage inside the log is reported and skipped:
   the bytes stay, fillers stand for the lost queue entries. Otherwise the log is truncated there:
   the rest is saved (`log_tail`) and zeroed, and later segments are deleted. (If stale bytes
   remained, a later crash could take an old record behind a new one for its successor.)
5. Sync what was found, because readers may see it from now on. If pages of the last run are still
   in the page cache, they are written again first: see `log_tail.rewrite`.

If queues contradict the log (damaged or missing files), the whole log is walked.

Records of topics that were deleted since (`consumequeue.queue_removal`) get no entries.
"""

import logging

from penstock.config import StoreConfig
from penstock.store.consumequeue import queue_files
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.directory import StorePaths, mark_open, opened_here
from penstock.store.disk import Disk, is_full
from penstock.store.put import MS_MAX, StoreWriter
from penstock.store.recovery.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from penstock.store.recovery.closed_log import AS_CLOSED, CHANGED, REPLACED, compare
from penstock.store.recovery.damage import DAMAGED, DamageJudge, LostMessage, part_of
from penstock.store.recovery.entry_check import EntryCheck
from penstock.store.recovery.log_replay import Replay
from penstock.store.recovery.log_tail import rewrite, save_tail
from penstock.store.recovery.missing_log import refuse_missing_log
from penstock.store.recovery.opened_files import OpenedFiles, Progress, is_queue_name
from penstock.store.recovery.shutdown_snapshot import (
    FileCheck,
    QueueRow,
    ShutdownSnapshot,
    deleted_topics,
    find_bad_index_file,
    read_snapshot,
)
from penstock.store.recovery.truncation import Truncation, finish_truncation, read_truncation
from penstock.store.recovery_report import DamagedRange, RecoveryReport, ReplayDamage
from penstock.wire.record import RECORD, StoredRecord

log = logging.getLogger(__name__)

STEP_BYTES = 64 * 1024 * 1024
"""How much of the log is walked between two reports of progress."""
CLOCK_AHEAD_MS = 24 * 3600 * 1000
"""How far the clock may have been ahead when a record was stored; a later time is damage."""


class Recovery(OpenedFiles):
    """Opens the files of one store and makes them consistent."""

    def __init__(
        self, disk: Disk, paths: StorePaths, config: StoreConfig, progress: Progress | None
    ) -> None:
        super().__init__(disk, paths, config, progress)
        self._entries = EntryCheck(self.segments)
        # Nothing below this log offset can be torn; `damage` says why.
        self._durable_to = 0
        # A queue entry of a record below this log offset was valid when it was written.
        self._used_to = 0
        # Where the log is to be truncated, or None.
        self._truncation: Truncation | None = None
        # Topics that another program deleted since the clean shutdown.
        self._deleted: set[str] = set()
        # Queues whose files are not as they were at the clean shutdown.
        self._damaged: list[ConsumeQueue] = []

    def run(self, writer: StoreWriter, *, crashed: bool, ours: bool, now_ms: int) -> RecoveryReport:
        """Make log, queues and index consistent. `ours`: Penstock wrote the checkpoint."""
        self.report.clean = not crashed
        self.checkpoint = read_checkpoint(self.disk, self.paths)
        writer.plausible_to_ms = max(now_ms + CLOCK_AHEAD_MS, self.checkpoint.log_ms)
        writer.damage = ReplayDamage(self.report, 0)  # also for what a slave receives later
        self.report.pages_kept = not crashed or opened_here(self.disk, self.paths)
        self._durable_to = self.beyond() if self.report.pages_kept else self._confirmed()
        self._used_to = self._durable_to if ours else 0
        short_index = self.load_index(extend=ours)
        if not ours:
            self.refuse_other_sizes()
        snapshot = read_snapshot(self.disk, self.paths)
        self._truncation = read_truncation(self.disk, self.paths)
        if self._truncation is not None:
            if snapshot is not None:
                self._mark_open()  # the snapshot describes the longer log
                self.disk.unlink(self.paths.snapshot)
                self.disk.sync_directory(self.paths.root)
            snapshot, crashed = None, True
        refuse_missing_log(self, snapshot, self._judge(), pages_kept=self.report.pages_kept)
        state = compare(self.segments, snapshot, self._judge(), self.report)
        newest = snapshot if state in (AS_CLOSED, CHANGED) else None
        if newest is not None:
            self._find_deleted_topics(newest)
        if snapshot is not None and state == AS_CLOSED and not crashed:
            begin = self._resume(snapshot, short_index=short_index)
            if begin is not None:
                self._rebuild(writer, begin, snapshot)
        else:
            # Files are written from here on: a crash meanwhile must not look like a clean shutdown.
            # `abort` also says which system opened the store, and the next recovery needs that.
            if not crashed:
                self._mark_open()
            self.load_queues()
            self._drop_removed(self.queues.rows)
            begin = None
            if state != REPLACED:
                begin = self._start_after_crash(ours=ours) if crashed else self._dispatched_end()
            self._recover(writer, self.queues.rows, begin, newest, position=crashed)
        if self._truncation is not None:
            finish_truncation(self.disk, self.paths)
        writer.plausible_to_ms = MS_MAX
        self.removal.finish_recovery(log_begin=self.segments.first, log_end=self.report.log_end)
        return self.report

    def _mark_open(self) -> None:
        mark_open(self.disk, self.paths, sync_flush=self.config.sync_flush)

    def _recover(
        self,
        writer: StoreWriter,
        queues: list[ConsumeQueue],
        begin: int | None,
        snapshot: ShutdownSnapshot | None,
        *,
        position: bool,
    ) -> None:
        """Replay the log from `begin`, or all of it if that is None or these queues contradict it.

        Unless their positions are known (`position` false) they are found in the files.
        """
        if begin is None or (position and not self._position(queues, begin)):
            end = self._replay_all(writer, queues)
        else:
            end = self._replay(writer, begin)
        behind = self._with_data_behind(queues)
        begin = self.report.replayed_from
        if begin > self.segments.first and (writer.gaps or self._has_strays(behind, begin)):
            end = self._replay_all(writer, queues)
            behind = self._with_data_behind(queues)
        data_end = self._judge().data_end(end)
        used_to = max(min(data_end, self._used_to), self._confirmed() if self._used_to else 0)
        if self._truncation is not None:
            used_to = 0  # their queue offsets are used again
        else:
            self._note_unwritten(end, snapshot)
        self._cut_queues(writer, behind, used_to=used_to)
        self._truncate_log(end, data_end)
        if snapshot is not None:
            self._restore_ends(writer, snapshot)
        for queue in queues:
            queue.hot_from = queue.max_offset
            if not queue.checked:
                queue.correct_min(self.segments.first)
        self.mapped_queues.unmap_all()

    def _with_data_behind(self, queues: list[ConsumeQueue]) -> list[ConsumeQueue]:
        """The queues whose files have something behind the last entry."""
        found = []
        total = len(queues)
        for done, queue in enumerate(queues):
            self._progress("queues", done, total)
            if not queue.checked and queue_files.has_data_from(queue, queue.max_offset):
                found.append(queue)
        self._progress("queues", total, total)
        return found

    def _has_strays(self, behind: list[ConsumeQueue], begin: int) -> bool:
        """Whether entries of records below `begin` are behind what was taken for a queue's end.

        The positions of damaged queues of a store that was closed are known.
        """
        return not self._damaged and any(self._entries.contradicts(q, begin) for q in behind)

    def _note_unwritten(self, end: int, snapshot: ShutdownSnapshot | None) -> None:
        """The log ends before what was on the disk: the bytes in between were lost."""
        known = max(self._confirmed(), snapshot.log_end if snapshot is not None else 0)
        if end < known:
            self.report.unwritten = (end, known)

    def _drop_removed(self, queues: list[ConsumeQueue]) -> None:
        """Delete the files of deleted topics whose names are in use again."""
        for queue in queues:
            if self.removal.end_of(queue.topic) > 0:
                queue_files.drop_files_of(queue, self.removal.end_of(queue.topic))

    def _replay_all(self, writer: StoreWriter, queues: list[ConsumeQueue]) -> int:
        """Queues contradict the log: rebuild them and the index from all of it."""
        self._forget_checkpoint()
        writer.gaps = writer.unplaced = 0
        for queue in queues:
            queue.close()
        self._position(queues, self.segments.first)
        return self._replay(writer, self.segments.first)

    def _forget_checkpoint(self) -> None:
        """Files are rebuilt: a crash meanwhile must begin at the log's begin."""
        self.checkpoint = Checkpoint(confirm_offset=self.checkpoint.confirm_offset)
        write_checkpoint(self.disk, self.paths, self.checkpoint)

    def _start_after_crash(self, *, ours: bool) -> int:
        """Where the checkpoint says to begin. Beyond what all parts have reached it is void: what
        is dispatched again is not durable yet."""
        known_ms = self.checkpoint.known_ms(with_index=ours)
        begin = self._start_segment(self.checkpoint.recover_from_ms(with_index=ours))
        if self._truncation is not None:
            segment = self.segments.find(self._truncation.offset)
            begin = min(begin, segment.start) if segment is not None else begin
        confirm_offset = self.checkpoint.confirm_offset
        self.checkpoint = Checkpoint(known_ms, known_ms, known_ms, 0, confirm_offset)
        return begin

    def _resume(self, snapshot: ShutdownSnapshot, *, short_index: set[str]) -> int | None:
        """Take over a snapshot if the files of queues and index are as it says.

        Returns None, or from where the log must be replayed to rebuild what is missing.
        """
        begin = snapshot.log_end
        check = FileCheck(self.disk, self.paths, self.config.queue_file_entries)
        for row in snapshot.rows():
            if row.topic in self._deleted:
                continue
            queue = self.add_queue(row.topic.encode(), row.queue_id)
            if queue is None:
                continue
            suspects = check.changed(row)
            queue.resume(row.first, row.files, row.low, row.high)
            if suspects is None or not all(
                self._entries.file_is_whole(queue, last) for last in suspects
            ):
                self._damaged.append(queue)
                self.report.add_rebuilt(f"consumequeue/{row.topic}/{row.queue_id}")
                begin = min(begin, self._rebuild_from(queue, row, snapshot.log_end))
        bad = find_bad_index_file(snapshot, self.index, short_index)
        if bad is not None and self.config.index_enabled:
            self.report.add_rebuilt(f"index/{bad[0]}")
            begin = min(begin, max(bad[1], self.segments.first))
        if self.report.rebuilt_files:
            return begin
        if self.segments.items and self.segments.items[-1].start > snapshot.log_end:
            self._save_tail(snapshot.log_end, self._judge().data_end(snapshot.log_end))
        self._drop_segments_from(snapshot.log_end)
        self.report.log_end = self.report.replayed_from = snapshot.log_end
        self.report.last_offset = snapshot.last_offset
        self.report.store_ms = snapshot.store_ms
        return None

    def _find_deleted_topics(self, snapshot: ShutdownSnapshot) -> None:
        """Find the topics that another program deleted since the clean shutdown."""
        folders = set(self.disk.names(self.paths.queues))
        missing = {row.topic for row in snapshot.rows() if row.files} - folders
        self._deleted = deleted_topics(self.disk, self.paths.config / "topics.json", missing)
        self.report.deleted_topics = sorted(self._deleted)

    def _rebuild_from(self, queue: ConsumeQueue, row: QueueRow, log_end: int) -> int:
        """The log offset behind the last record that a damaged queue still has an entry of."""
        if row.high == row.low:
            return log_end
        queue.load()
        if not queue.file_starts or queue.file_starts[0] != row.first:
            return self.segments.first
        queue.min_offset = row.first
        queue.max_offset = queue_files.count_below(queue, log_end)
        last = queue_files.last_real(queue, queue.max_offset)
        entry = queue.entry(last)
        if entry is None or not self._entries.last_matches(queue, queue.max_offset):
            return self.segments.first
        return max(entry[0] + entry[1], self.segments.first)

    def _rebuild(self, writer: StoreWriter, begin: int, snapshot: ShutdownSnapshot) -> None:
        """Rebuild damaged queues and the index of a store that was closed.

        The other queues keep the positions of the snapshot: the cost does not depend on how many
        they are.
        """
        self._forget_checkpoint()
        self._mark_open()  # a crash meanwhile must not look like a clean shutdown
        for queue in self.queues.rows:
            queue.complete = True
        for queue in self._damaged:
            queue.complete = False
            queue.resume(0, 0, 0, 0)
            queue.load()
        self._drop_removed(self._damaged)
        self._recover(writer, self._damaged, begin, snapshot, position=True)
        for queue in self.queues.rows:
            queue.complete = False

    def _restore_ends(self, writer: StoreWriter, snapshot: ShutdownSnapshot) -> None:
        """A queue never ends before its end at the shutdown: offsets are not used again."""
        self.report.last_offset = max(self.report.last_offset, snapshot.last_offset)
        self.report.store_ms = max(self.report.store_ms, snapshot.store_ms)
        for row in snapshot.rows():
            queue = self.queues.get(row.topic.encode(), row.queue_id)
            if row.topic in self._deleted or self.removal.end_of(row.topic.encode()) > 0:
                continue
            if queue is None and row.high > 0:
                queue = self.add_queue(row.topic.encode(), row.queue_id)
            if queue is not None:
                self._skip(writer, queue, row.high)

    def _dispatched_end(self) -> int | None:
        """Without a snapshot: the end of the last record that has a queue entry.

        None if a queue's last entry does not match its record: then the whole log is walked.
        """
        end = self.segments.first
        beyond = self.beyond()
        total = len(self.queues.rows)
        for done, queue in enumerate(self.queues.rows):
            self._progress("queues", done, total)
            queue_files.close_gaps(queue, beyond)
            queue.min_offset = queue.file_starts[0] if queue.file_starts else 0
            queue.max_offset = queue_files.find_below(queue, beyond)
            if not self._entries.last_matches(queue, queue.max_offset):
                return None
            entry = queue.entry(queue_files.last_real(queue, queue.max_offset))
            if entry is not None:
                end = max(end, entry[0] + entry[1])
        return end

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

    def _position(self, queues: list[ConsumeQueue], begin: int) -> bool:
        """Continue queues and index behind their entries of records below `begin`.

        What a queue's files have behind them stays until the end of the replay, because mostly it
        is the same. False if a queue's last entry does not match its record.
        """
        total = len(queues)
        for done, queue in enumerate(queues):
            self._progress("queues", done, total)
            queue_files.close_gaps(queue, begin)
            queue.min_offset = queue.file_starts[0] if queue.file_starts else 0
            queue.max_offset = queue.min_offset
            queue.checked = False
            if begin == self.segments.first:
                kept = queue_files.count_below(queue, begin)
            else:
                kept = queue_files.find_below(queue, begin)
                queue.max_offset = max(queue.max_offset, kept)
                if not self._entries.last_matches(queue, kept):
                    kept = queue_files.count_below(queue, begin)
                    queue.max_offset = max(queue.max_offset, kept)
                    if not self._entries.last_matches(queue, kept):
                        return False
            queue.max_offset = kept
        if self.config.index_enabled:
            self._progress("index", 0, 1)
            self.index.cut(begin)
        return True

    def _cut_queues(self, writer: StoreWriter, behind: list[ConsumeQueue], *, used_to: int) -> None:
        """Remove what the files of these queues have behind the last entry.

        Entries below the log offset `used_to` whose records are damaged or lost were valid: fillers
        replace them. Others are from before a power failure, and new records are in their place.
        The change is synced later, before a checkpoint or a deletion relies on it; until then the
        next start does it again.
        """
        end = self.report.log_end

        def is_used(offset: int, size: int) -> bool:
            if offset >= end or writer.damage.overlaps(offset, offset + size):
                return offset + size <= used_to
            return self._is_unplaced(offset, size)

        for queue in behind:
            self._skip(writer, queue, queue_files.end_of_used(queue, is_used))
            queue.cut(queue.max_offset)
            writer.mark_dirty(queue)

    def _is_unplaced(self, offset: int, size: int) -> bool:
        """Whether a record is there whose head names the wrong queue or queue offset.

        Then it has no entry in that queue, or it is the first one without being number 0.
        """
        named = self._entries.named_entry(offset, size)
        if named is None:
            return False
        topic, queue_id, queue_offset = named
        queue = self.queues.get(topic, queue_id)
        entry = queue.entry(queue_offset) if queue is not None else None
        if queue is None or entry is None or entry[0] != offset:
            return True
        return queue_offset == queue.min_offset > 0

    def _skip(self, writer: StoreWriter, queue: ConsumeQueue, offset: int) -> None:
        """Continue a queue at this offset or later: what is before it is not used again."""
        if offset <= queue.max_offset:
            return
        if queue.max_offset == queue.min_offset:
            queue.begin_at(offset)
            queue.ready()  # the name of its file keeps the position
            writer.mark_dirty(queue)
        else:
            writer.fill(queue, offset)

    def _replay(self, writer: StoreWriter, begin: int) -> int:
        """Walk and dispatch the log from `begin`; returns where it ends."""
        self.report.replayed_from = begin
        self.report.cut_reason = None
        deleted = dict.fromkeys(self._deleted, self.beyond())
        replay = Replay(writer, self.add_queue, {**self.removal.ends, **deleted})
        replay.stored.durable_to = self._durable_to
        writer.damage = ReplayDamage(self.report, begin)
        judge = self._judge()
        beyond = stop = self.beyond()
        if self._truncation is not None:
            stop = min(stop, self._truncation.offset)
        at = begin
        while True:
            segment = self.segments.find(at)
            if segment is None:
                break
            if at >= stop:
                assert self._truncation is not None
                self.report.cut_reason = f"{self._truncation.reason} (at offset {at})"
                break
            self._progress("log", at - begin, beyond - begin)
            at = replay.run(segment, at, min(STEP_BYTES, stop - at))
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
            message = str(lost)
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

    def _confirmed(self) -> int:
        """The checkpoint's confirm offset; 0 if it can't be right."""
        offset = self.checkpoint.confirm_offset
        return offset if offset <= self.beyond() else 0

    def _truncate_log(self, end: int, data_end: int) -> None:
        """Truncate the log at `end`, durably. From then on its content is known to be durable."""
        self._save_tail(end, data_end)
        if end < self.checkpoint.confirm_offset:
            self._write_confirmed(end)
        self._drop_segments_from(end)
        last = self.segments.find(end)
        if last is not None:
            self.disk.truncate(last.fd, end - last.start)
            self.disk.truncate(last.fd, last.size)
        if self.report.pages_kept and not self.report.clean:
            known = max(self.checkpoint.confirm_offset, self.report.replayed_from)
            rewrite(self.disk, self.segments.items, known, end)
        for segment in self.segments.items:
            if segment.start + segment.size > self.report.replayed_from:
                self.disk.sync(segment.fd)
        if end > self.checkpoint.confirm_offset:
            try:
                self._write_confirmed(end)
            except OSError as error:
                if not is_full(error):
                    raise
                # The older one stays valid: the next recovery reads more of the log.
                log.warning("no space to write %s: trying again", self.paths.checkpoint)

    def _write_confirmed(self, offset: int) -> None:
        self.checkpoint = self.checkpoint._replace(confirm_offset=offset)
        write_checkpoint(self.disk, self.paths, self.checkpoint)

    def _save_tail(self, end: int, data_end: int) -> None:
        """Save what the log has behind its end, before it is destroyed."""
        if data_end > end:
            path = save_tail(self.disk, self.paths, self.segments.items, end, data_end)
            self.report.saved_files.append(str(path))
            self.report.saved_bytes += data_end - end

    def _drop_segments_from(self, end: int) -> None:
        """Delete the segments that begin after the log's end."""
        while self.segments.items and self.segments.items[-1].start > end:
            self.segments.unlink(self.segments.drop_last())
