"""Checks the log of a store record by record: lengths, CRC, position; for `verify` and `scrub`.

What counts as damage depends on how the store was left: `recovery.damage` decides for recovery and
here what is a torn tail and what is damage. The log is checked up to `StoreFiles.stop`.
"""

from collections.abc import Iterator

import msgspec

from penstock.errors import ReadFailed
from penstock.store.directory import opened_here
from penstock.store.disk import Disk
from penstock.store.recovery.damage import DAMAGED, TORN, DamageJudge, DamageVerdict
from penstock.store.tools.file_pieces import LogFile, log_part
from penstock.store.tools.inspection import StoreFiles
from penstock.store.tools.log_scan import AT_BLANK, AT_END, MORE, LogScan
from penstock.store.tools.problem import DAMAGE, NOTE, Problem
from penstock.store.tools.survey import Progress
from penstock.wire.record import UNWRITTEN

_KINDS = ("", "short", "unwritten", "magic", "size", "lengths", "crc", "place", "torn")


class Totals(msgspec.Struct):
    """Counts of a verification."""

    log_begin: int = 0
    log_end: int = 0
    records: int = 0
    record_bytes: int = 0
    queues: int = 0
    queue_entries: int = 0
    index_files: int = 0
    index_entries: int = 0
    keys: int = 0
    first_ms: int = 0
    last_ms: int = 0
    damage: int = 0
    notes: int = 0


class LogVerification:
    """The files of a store, the check of its log, and the totals."""

    def __init__(self, files: StoreFiles, progress: Progress | None = None) -> None:
        self.files = files
        self.tell = progress or (lambda what, done, of: None)
        self.totals = Totals(log_begin=files.log_begin)
        self.replay_from = files.replay_from()
        # Read before the log is walked: the checkpoint of a live store changes meanwhile.
        self.checkpoint = files.checkpoint()
        confirm_offset = self.checkpoint.confirm_offset if self.checkpoint is not None else 0
        if confirm_offset > files.log_beyond:
            confirm_offset = 0
        self.judge = DamageJudge(
            [log_part(file) for file in files.log],
            files.sizes.segment_bytes,
            durable_to=self._durable_to(confirm_offset),
            confirm_offset=confirm_offset,
        )
        self.scan = LogScan(None)

    def _durable_to(self, confirm_offset: int) -> int:
        """No record below this log offset can be torn."""
        files = self.files
        if not files.crashed or opened_here(Disk(), files.paths):
            return files.log_beyond
        return max(confirm_offset, self.replay_from)

    def rebuilt_by_recovery(self, physical_offset: int) -> bool:
        """Whether recovery rebuilds the entries of the record at this offset."""
        return self.files.crashed and physical_offset >= self.replay_from

    def name(self, file: LogFile) -> str:
        return str(file.path.relative_to(self.files.root))

    def count(self, problem: Problem) -> Problem:
        """Add a problem to the totals."""
        if problem.severity == DAMAGE:
            self.totals.damage += problem.count
        else:
            self.totals.notes += problem.count
        return problem

    # --- the segments

    def segments(self) -> Iterator[Problem]:
        """Problems of the files: missing ones, and wrong lengths."""
        size = self.files.sizes.segment_bytes
        expected = self.files.log_begin
        for place, file in enumerate(self.files.log):
            if file.start > expected:
                missing = (file.start - expected) // size
                yield Problem(
                    DAMAGE,
                    "log.missing-segment",
                    self.name(file),
                    0,
                    f"{missing or 'part of'} segment(s) before this one are missing: their "
                    "messages are lost and a broker refuses to open the store",
                    max(missing, 1),
                )
            expected = file.start + size
            if file.length != size:
                yield self._wrong_length(file, last=place == len(self.files.log) - 1)
        yield from self._missing_since_closed()

    def _missing_since_closed(self) -> Iterator[Problem]:
        """The first and last segments that the snapshot of a clean shutdown knows."""
        files, snapshot = self.files, self.files.snapshot
        if files.crashed or snapshot is None:
            return
        if snapshot.log_begin < files.log_begin:
            text = (
                f"the segments with log offsets {snapshot.log_begin} to {files.log_begin} were "
                "deleted since the store was closed: their messages are lost"
            )
            yield Problem(DAMAGE, "snapshot.log-begin", files.paths.snapshot.name, 0, text)
        if snapshot.log_end > files.log_beyond:
            text = (
                f"the last segments are missing: the log ended at {snapshot.log_end} when the "
                f"store was closed, the files end at {files.log_beyond}; a broker refuses to open "
                "the store"
            )
            yield Problem(DAMAGE, "log.missing-segment", files.paths.log.name, 0, text)

    def _wrong_length(self, file: LogFile, *, last: bool) -> Problem:
        size = self.files.sizes.segment_bytes
        text = f"has {file.length} bytes instead of {size}"
        if file.length < size and last and self.files.crashed:
            return Problem(
                NOTE,
                "log.short-tail",
                self.name(file),
                file.length,
                f"{text}: recovery extends it (if Penstock made the store)",
            )
        meaning = "the missing end is lost" if file.length < size else "the rest is not read"
        return Problem(
            DAMAGE, "log.length", self.name(file), min(file.length, size), f"{text}: {meaning}"
        )

    # --- the log

    def _log(self) -> Iterator[Problem]:
        return (found for found in self.walk() if found is not None)

    def walk(self) -> Iterator[Problem | None]:
        """Check the log. Yields its problems, and None after each part that was read."""
        files, scan = self.files, self.scan
        window = files.window()
        offset = end = files.log_begin
        needs = 0
        while files.stop is None or offset < files.stop:
            file = files.log_file(offset)
            if file is None:
                offset = next((f.start for f in files.log if f.start > offset), -1)
                if offset < 0:
                    break
                continue
            self.tell("log", offset - files.log_begin, files.log_beyond - files.log_begin)
            try:
                window.load(offset, needs)
            except ReadFailed as error:
                if file.path.exists():  # else retention has deleted it meanwhile
                    yield self._unreadable(file, offset, error)
                offset = file.start + files.sizes.segment_bytes
                continue
            why = scan.run(window)
            yield None
            offset = end = scan.offset
            needs = scan.needs if why == MORE else 0
            if why == MORE or offset == files.stop:
                continue
            segment_end = file.start + files.sizes.segment_bytes
            if why == AT_END or (why == AT_BLANK and offset + scan.blank == segment_end):
                end = offset if file.start + file.length < segment_end else segment_end
                offset = segment_end
                continue
            blank = why == AT_BLANK
            verdict = self.judge.judge(
                offset, 0 if blank else scan.stored.problem, scan.stored.size
            )
            if verdict.case == DAMAGED:
                yield self._damaged(file, offset, verdict, blank=blank)
                offset = end = verdict.following
                continue
            if verdict.case == TORN:
                yield self._torn(file, offset, verdict.following)
            elif (problem := self._at_log_end(file, offset, verdict, blank=blank)) is not None:
                yield problem
            break
        self._finish_log(end)

    def _finish_log(self, end: int) -> None:
        scan, totals = self.scan, self.totals
        scan.finish()
        beyond = self.files.log_beyond - self.files.log_begin
        self.tell("log", beyond, beyond)
        totals.log_end = end
        totals.records, totals.record_bytes = scan.records, scan.log_bytes
        totals.keys = scan.keys
        totals.first_ms, totals.last_ms = scan.first_ms, scan.last_ms

    def _torn(self, file: LogFile, offset: int, following: int) -> Problem:
        text = (
            f"a sector was never written, records continue at log offset {following}: the result "
            "of a power cut or of copying a live store; recovery truncates the log here and saves "
            "what follows in a file"
        )
        return Problem(NOTE, "log.torn-tail", self.name(file), offset - file.start, text)

    def _damaged(
        self, file: LogFile, offset: int, verdict: DamageVerdict, *, blank: bool
    ) -> Problem:
        stored = self.scan.stored
        text = (
            f"{verdict.reason}: {verdict.following - offset} bytes up to log offset "
            f"{verdict.following} are unreadable"
        )
        lost = self.judge.lost_message(
            offset, verdict.following, 0 if blank else stored.problem, stored.size
        )
        if lost is not None:
            topic = lost.topic.decode("utf-8", "replace")
            text += f"; it was a message of topic {topic}, queue {lost.queue_id}"
            text += f", queue offset {lost.queue_offset}" if lost.queued else ""
        if self.rebuilt_by_recovery(offset):
            text += "; recovery keeps these bytes and what follows them"
        return Problem(DAMAGE, self._kind(blank=blank), self.name(file), offset - file.start, text)

    def _kind(self, *, blank: bool) -> str:
        return "log.blank" if blank else f"log.{_KINDS[self.scan.stored.problem]}"

    def _at_log_end(
        self, file: LogFile, offset: int, verdict: DamageVerdict, *, blank: bool
    ) -> Problem | None:
        """The problem of an invalid record at the log's end; None where the log simply ends."""
        at = offset - file.start
        if not blank and self.scan.stored.problem == UNWRITTEN:
            return None
        if self.files.crashed:
            return Problem(
                NOTE,
                "log.torn-tail",
                self.name(file),
                at,
                f"{verdict.reason}: the torn tail of a crash or of a live store; recovery "
                "truncates it and saves it in a file",
            )
        text = f"{verdict.reason}: the log's last record is lost"
        return Problem(DAMAGE, self._kind(blank=blank), self.name(file), at, text)

    def _unreadable(self, file: LogFile, offset: int, error: ReadFailed) -> Problem:
        text = f"{error.message}: the rest of this segment is not checked"
        return Problem(DAMAGE, "log.unreadable", self.name(file), offset - file.start, text)
