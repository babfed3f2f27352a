"""Writes tables to their files in the thread pool: one write per file at a time.

Changes that are made during a write share the next one. After a write there is a pause of PAUSE
times its duration: a large table is not written all the time while thousands of topics are created.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from penstock.rpc.answers import PersistentTable

if TYPE_CHECKING:
    from penstock.rpc.persistence import Persistence

log = logging.getLogger(__name__)

PAUSE: Final = 9
PAUSE_MS_MAX: Final = 2_000


class TableWrites:
    """The writes of a server's tables."""

    def __init__(
        self,
        persistence: Persistence | None,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        soon_from_thread: Callable[..., None],
        later: Callable[..., None],
        monotonic_ms: Callable[[], int],
    ) -> None:
        """`later` calls a function after a delay in milliseconds."""
        self._persistence = persistence
        self._submit = submit
        self._soon_from_thread = soon_from_thread
        self._later = later
        self._monotonic_ms = monotonic_ms
        self._writing: dict[str, int] = {}  # by file: when the write began
        self._pausing: set[str] = set()  # files that were written just now

    @property
    def running(self) -> bool:
        """Whether a table is being written."""
        return bool(self._writing)

    def write(self, table: PersistentTable) -> None:
        """Write a table now, or after the running write of its file and the pause."""
        assert self._persistence is not None
        name = table.FILE
        if not table.dirty or name in self._writing or name in self._pausing:
            return
        work = self._persistence.save(table)
        try:
            future = self._submit(work)
        except RuntimeError:  # the pool is closing; the broker writes dirty tables when it stops
            table.dirty = True
            return
        self._writing[name] = self._monotonic_ms()
        future.add_done_callback(lambda done: self._soon_from_thread(self._written, table, done))

    def _written(self, table: PersistentTable, done: Future[Any]) -> None:
        took_ms = self._monotonic_ms() - self._writing.pop(table.FILE)
        error = done.exception()
        if error is not None:
            log.error("can't write %s: %s", table.FILE, error)
        self._pausing.add(table.FILE)
        self._later(min(PAUSE * took_ms, PAUSE_MS_MAX), self._pause_ended, table, error is None)

    def _pause_ended(self, table: PersistentTable, write_again: bool) -> None:
        self._pausing.discard(table.FILE)
        if write_again:
            self.write(table)
