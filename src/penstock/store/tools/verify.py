"""Checks that a store is consistent: reads everything, changes nothing, yields what it finds.

1. The log, record by record: lengths, CRC, offset. At the same time each queue's entries: a record
   and its entry confirm each other (`log_scan`).
2. Queue entries that no record confirmed, and records without an entry (`verify_queues`).
3. Index entries against the records that they point at, and their chains (`verify_index`).
4. Checkpoint and snapshot against what was found.

What counts as damage depends on how the store was left. After a crash recovery begins at
`replay_from`: it truncates a torn tail, and rebuilds the queue and index entries from there on. So
a torn tail and stray entries behind that offset are only notes. `recovery.damage` decides for
recovery and here what is a torn tail and what is damage.

A store that a process has open is checked up to where it was written when the check began.
"""

from collections.abc import Iterator

from penstock.errors import ReadFailed
from penstock.store.recovery.damage import DAMAGED, TORN, Verdict
from penstock.store.tools.file_pieces import LogFile
from penstock.store.tools.log_scan import (
    AT_BLANK,
    AT_END,
    MORE,
    LogScan,
    LogWindow,
)
from penstock.store.tools.problem import DAMAGE, NOTE, Problem
from penstock.store.tools.verification_state import VerificationState
from penstock.store.tools.verify_index import check_index
from penstock.store.tools.verify_queues import check_queues
from penstock.wire.record import UNWRITTEN

_KINDS = ("", "short", "unwritten", "magic", "size", "lengths", "crc", "place", "torn")


class Verification(VerificationState):
    """One verification of a store; `totals` are complete when `run` is exhausted."""

    def run(self) -> Iterator[Problem]:
        """All problems, in the order of the files."""
        for step in (
            self._segments,
            self._log,
            self._saved_tails,
            self._queues,
            self._index,
            self._checkpoints,
        ):
            for problem in step():
                if problem.severity == DAMAGE:
                    self.totals.damage += problem.count
                else:
                    self.totals.notes += problem.count
                yield problem

    # --- the segments

    def _segments(self) -> Iterator[Problem]:
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
                why = _step(scan, window, offset, needs)
            except ReadFailed as error:
                yield self._unreadable(file, offset, error)
                offset = file.start + files.sizes.segment_bytes
                continue
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

    def _damaged(self, file: LogFile, offset: int, verdict: Verdict, *, blank: bool) -> Problem:
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
        self, file: LogFile, offset: int, verdict: Verdict, *, blank: bool
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

    def _saved_tails(self) -> Iterator[Problem]:
        """What recovery has cut from the log."""
        folder = self.files.paths.truncated
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            text = (
                f"{path.stat().st_size} bytes that recovery cut from the log's end are saved here; "
                "delete the file if nobody needs them"
            )
            yield Problem(NOTE, "log.truncated", f"{folder.name}/{path.name}", 0, text)

    def _unreadable(self, file: LogFile, offset: int, error: ReadFailed) -> Problem:
        text = f"{error.message}: the rest of this segment is not checked"
        return Problem(DAMAGE, "log.unreadable", self.name(file), offset - file.start, text)

    # --- queues, index, checkpoint

    def _queues(self) -> Iterator[Problem]:
        return check_queues(self)

    def _index(self) -> Iterator[Problem]:
        return check_index(self)

    def _checkpoints(self) -> Iterator[Problem]:
        files, totals = self.files, self.totals
        if self.scan.backwards:
            yield Problem(
                NOTE,
                "log.times",
                "commitlog",
                0,
                "store times step back: searches by time may be wrong by as much",
                self.scan.backwards,
            )
        snapshot = files.snapshot
        if not files.crashed and snapshot is not None and snapshot.log_end != totals.log_end:
            yield Problem(
                DAMAGE,
                "snapshot.log-end",
                files.paths.snapshot.name,
                0,
                f"the log ended at {snapshot.log_end} when the store was closed, valid records "
                f"end at {totals.log_end}",
            )
        yield from self._checkpoint()

    def _checkpoint(self) -> Iterator[Problem]:
        files, totals = self.files, self.totals
        name = files.paths.checkpoint.name
        checkpoint = self.checkpoint
        if checkpoint is None:
            if files.paths.checkpoint.exists():
                yield Problem(DAMAGE, "checkpoint.short", name, 0, "has fewer than 40 bytes")
            elif totals.records and not files.crashed:
                text = "is missing: recovery after a crash would begin with the first segment"
                yield Problem(NOTE, "checkpoint.absent", name, 0, text)
            return
        for place, what in enumerate(("log", "queues", "index")):
            if checkpoint[place] > totals.last_ms and totals.records:
                yield Problem(
                    DAMAGE,
                    "checkpoint.time",
                    name,
                    8 * place,
                    f"says that the {what} is durable up to {checkpoint[place]} ms, the newest "
                    f"record is from {totals.last_ms} ms: records are missing at the log's end",
                )
        if checkpoint.confirm_offset > totals.log_end:
            yield Problem(
                DAMAGE,
                "checkpoint.confirmed",
                name,
                32,
                f"says that the log was confirmed and durable up to {checkpoint.confirm_offset}, "
                f"valid records end at {totals.log_end}",
            )


def _step(scan: LogScan, window: LogWindow, offset: int, needs: int) -> int:
    window.load(offset, needs)
    return scan.run(window)
