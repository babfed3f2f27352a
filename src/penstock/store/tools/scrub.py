"""Scrubbing: reads the whole log at a limited rate and checks each record, read-only.

`Scrub` is one pass in small parts; `penstock store scrub` waits between them. `BackgroundScrub` is
the broker's: the pool reads what the rate allows, once per second.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from penstock.config import StoreConfig
from penstock.errors import StoreError
from penstock.store.disk import Disk
from penstock.store.tools.inspection import StoreFiles
from penstock.store.tools.problem import DAMAGE, Problem
from penstock.store.tools.survey import Progress
from penstock.store.tools.verify_log import LogVerification

log = logging.getLogger(__name__)

PIECE_BYTES = 256 * 1024
"""How much is read and checked at a time: a tenth of a millisecond of CPU time."""
REPORTED_MAX = 10_000
"""The maximum number of problems that are remembered, so that each is logged once."""
MEGABYTE = 1_000_000
_HOUR_MS = 3_600_000
_TICK_MS = 1000


class Scrub(LogVerification):
    """One pass over the log; `totals` are complete when `run` is exhausted.

    A store that a process has open is checked up to `confirm_offset`, by default the checkpoint's.
    """

    def __init__(
        self,
        files: StoreFiles,
        progress: Progress | None = None,
        *,
        confirm_offset: int | None = None,
    ) -> None:
        super().__init__(files, progress)
        files.chunk_bytes = PIECE_BYTES
        if files.live:
            known = self.checkpoint.confirm_offset if self.checkpoint is not None else 0
            files.stop = known if confirm_offset is None else confirm_offset

    @property
    def checked_bytes(self) -> int:
        return self.scan.log_bytes

    def run(self) -> Iterator[Problem | None]:
        """The problems of the log, and None after each part that was read."""
        for problem in self.segments():
            yield self.count(problem)
        for found in self.walk():
            yield self.count(found) if found is not None else None


class BackgroundScrub:
    """Passes over the log of an open store, one after another; driven by `tick`."""

    def __init__(self, disk: Disk, root: Path, now_ms: int) -> None:
        self.disk = disk
        self.root = root
        # Records checked and passes completed since the start.
        self.records = 0
        self.passes = 0
        # File and position of each damaged place that was found since the start.
        self.damaged: set[tuple[str, int]] = set()
        self._scrub: Scrub | None = None
        self._parts: Iterator[Problem | None] = iter(())
        self._job: Future[None] | None = None
        self._next_ms = self._last_ms = now_ms

    def tick(self, now_ms: int, config: StoreConfig, confirm_offset: int) -> None:
        """Have the pool check what the rate allows; call it every second."""
        if self._job is not None:
            if not self._job.done():
                return
            job, self._job = self._job, None
            job.result()
        elapsed_ms = min(max(now_ms - self._last_ms, 0), _TICK_MS)
        self._last_ms = now_ms
        interval_ms = config.scrub_hours * _HOUR_MS
        # A clock that was set back must not delay the next pass by more than the interval.
        self._next_ms = min(self._next_ms, now_ms + interval_ms)
        budget = config.scrub_mb_per_s * MEGABYTE * elapsed_ms // 1000
        if budget == 0 or (self._scrub is None and now_ms < self._next_ms):
            return
        if self._scrub is None:
            self._next_ms = now_ms + interval_ms
        self._job = self.disk.submit(lambda: self._work(budget, confirm_offset))

    def _work(self, budget: int, confirm_offset: int) -> None:
        """Check about `budget` bytes; waits for the disk."""
        try:
            scrub = self._scrub
            if scrub is None:
                scrub = self._scrub = Scrub(StoreFiles(self.root), confirm_offset=confirm_offset)
                self._parts = scrub.run()
            end = scrub.checked_bytes + budget
            before = scrub.scan.records
            while scrub.checked_bytes < end:
                found = next(self._parts, scrub)
                if found is scrub:
                    self._finish(scrub)
                    break
                if isinstance(found, Problem) and found.severity == DAMAGE:
                    self._report(found)
            self.records += scrub.scan.records - before
        except (StoreError, OSError) as error:
            self._scrub = None
            log.warning("the scrub of %s has ended early: %s", self.root, error)

    def _report(self, problem: Problem) -> None:
        place = (problem.file, problem.offset)
        if place not in self.damaged and len(self.damaged) < REPORTED_MAX:
            self.damaged.add(place)
            log.warning(
                "the scrub found damage: %s @%d: %s (%s)",
                self.root / problem.file,
                problem.offset,
                problem.text,
                problem.kind,
            )

    def _finish(self, scrub: Scrub) -> None:
        self._scrub = None
        self.passes += 1
        log.info(
            "scrubbed %s: %d records, %d damaged ranges",
            self.root,
            scrub.scan.records,
            scrub.totals.damage,
        )
