"""Checks that a store is consistent: reads everything, changes nothing, yields what it finds.

1. The log, record by record: lengths, CRC, offset. At the same time each queue's entries: a record
   and its entry confirm each other (`log_scan`).
2. Queue entries that no record confirmed, and records without an entry (`verify_queues`).
3. Index entries against the records that they point at, and their chains (`verify_index`).
4. Checkpoint and snapshot against what was found.

What counts as damage depends on how the store was left. After a crash recovery begins at
`replay_from`: it truncates the log where no valid record follows, and rebuilds the queue and index
entries from there on. So a torn tail and stray entries behind that offset are only notes. An
invalid record with valid ones behind it is damage, because recovery would delete those too; unless
it was never completely written and is behind what the checkpoint calls durable, as after a power
cut.

A store that a process has open is checked up to where it was written when the check began.
"""

import itertools
from collections.abc import Iterator

from penstock.errors import ReadFailed
from penstock.store.tools.file_pieces import LogFile, read_piece
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
from penstock.wire.record import PROBLEMS, RECORD

SECTOR_BYTES = 512
TORN_BYTES_LEAST = 64
"""Fewer zeros in a sector may be a message's own data."""
TORN_BYTES_MAX = 8 * 1024 * 1024
_UNWRITTEN, _LENGTHS = 2, 5
_KINDS = ("", "short", "unwritten", "magic", "size", "lengths", "crc", "place", "torn")


class Verification(VerificationState):
    """One verification of a store; `totals` are complete when `run` is exhausted."""

    def run(self) -> Iterator[Problem]:
        """All problems, in the order of the files."""
        for step in (self._segments, self._log, self._queues, self._index, self._checkpoints):
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
            following = self._next_valid(offset, blank=why == AT_BLANK)
            if following is not None and self._is_torn(file, offset, following):
                yield self._torn(file, offset, following)
                break
            problem = self._bad_record(file, offset, following, blank=why == AT_BLANK)
            if problem is not None:
                yield problem
            if following is None:
                break
            offset = following
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

    def _next_valid(self, offset: int, *, blank: bool) -> int | None:
        """Where valid records continue behind an invalid one, or None."""
        stored = self.scan.stored
        if not blank and stored.problem > _LENGTHS:  # its size is plausible
            behind = offset + stored.size
            found = self.files.record(behind)
            if found is not None and found[0].check(behind) == RECORD:
                return behind
        return self.files.next_valid(offset + 1)

    def _is_torn(self, file: LogFile, offset: int, following: int) -> bool:
        """Whether a power cut or the copying of a live store may have left an invalid record: it is
        behind what the checkpoint calls durable, and a sector was never written."""
        confirm_offset = self.checkpoint.confirm_offset if self.checkpoint is not None else 0
        if not self.rebuilt_by_recovery(offset) or offset < confirm_offset:
            return False
        at, end = offset - file.start, min(following - file.start, file.length)
        data = read_piece(file.path, at, min(end - at, TORN_BYTES_MAX))
        edges = [0, *range(-at % SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
        return any(
            high - low >= TORN_BYTES_LEAST and not any(data[low:high])
            for low, high in itertools.pairwise(edges)
        )

    def _torn(self, file: LogFile, offset: int, following: int) -> Problem:
        text = (
            f"a sector was never written, records continue at log offset {following}: the result "
            "of a power cut or of copying a live store; recovery truncates the log here"
        )
        return Problem(NOTE, "log.torn-tail", self.name(file), offset - file.start, text)

    def _bad_record(
        self, file: LogFile, offset: int, following: int | None, *, blank: bool
    ) -> Problem | None:
        """The problem of an invalid record; None where the log simply ends."""
        number = self.scan.stored.problem
        what = "the blank record does not reach the segment's end" if blank else PROBLEMS[number]
        kind = "log.blank" if blank else f"log.{_KINDS[number]}"
        at = offset - file.start
        if following is not None:
            text = f"{what}: {following - offset} bytes up to log offset {following} are unreadable"
            if self.rebuilt_by_recovery(offset):
                text += "; recovery would truncate the log here and lose what follows"
            return Problem(DAMAGE, kind, self.name(file), at, text)
        if not blank and number == _UNWRITTEN:
            return None
        if self.files.crashed:
            return Problem(
                NOTE,
                "log.torn-tail",
                self.name(file),
                at,
                f"{what}: the torn tail of a crash or of a live store; recovery truncates it",
            )
        return Problem(DAMAGE, kind, self.name(file), at, f"{what}: the log's last record is lost")

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
