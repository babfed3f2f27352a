"""Checks that a store is consistent: reads everything, changes nothing, yields what it finds.

1. The log, record by record: lengths, CRC, offset. At the same time each queue's entries: a record
   and its entry confirm each other (`log_scan`).
2. Queue entries that no record confirmed, and records without an entry (`verify_queues`).
3. Index entries against the records that they point at, and their chains (`verify_index`).
4. The timer's files against each other (`verify_timer`).
5. Checkpoint and snapshot against what was found.

What counts as damage depends on how the store was left. After a crash recovery begins at
`replay_from`: it truncates a torn tail, and rebuilds the queue and index entries from there on. So
a torn tail and stray entries behind that offset are only notes. `recovery.damage` decides for
recovery and here what is a torn tail and what is damage.

A store that a process has open is checked up to where it was written when the check began.
"""

from collections.abc import Iterator

from penstock.store.tools.problem import DAMAGE, NOTE, Problem
from penstock.store.tools.verification_state import VerificationState
from penstock.store.tools.verify_index import check_index
from penstock.store.tools.verify_queues import check_queues
from penstock.store.tools.verify_timer import check_timer

_KINDS = ("", "short", "unwritten", "magic", "size", "lengths", "crc", "place", "torn")


class Verification(VerificationState):
    """One verification of a store; `totals` are complete when `run` is exhausted."""

    def run(self) -> Iterator[Problem]:
        """All problems, in the order of the files."""
        for step in (
            self.segments,
            self._log,
            self._saved_tails,
            self._queues,
            self._index,
            self._timer,
            self._checkpoints,
        ):
            for problem in step():
                yield self.count(problem)

    def _saved_tails(self) -> Iterator[Problem]:
        """What recovery has cut from the log."""
        folder = self.files.paths.truncated
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            text = (
                f"{path.stat().st_size} bytes that recovery cut from the log's end are saved here; "
                "delete the file if nobody needs them"
            )
            yield Problem(NOTE, "log.truncated", f"{folder.name}/{path.name}", 0, text)

    # --- queues, index, timer, checkpoint

    def _queues(self) -> Iterator[Problem]:
        return check_queues(self)

    def _index(self) -> Iterator[Problem]:
        return check_index(self)

    def _timer(self) -> Iterator[Problem]:
        return check_timer(self)

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
