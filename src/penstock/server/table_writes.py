"""Writes tables to their files in the thread pool: one write per file at a time.

Changes that are made during a write share the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from penstock.rpc.answers import PersistentTable

if TYPE_CHECKING:
    from penstock.rpc.persistence import Persistence

log = logging.getLogger(__name__)


class TableWrites:
    """The writes of a server's tables."""

    def __init__(
        self,
        persistence: Persistence | None,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        soon_from_thread: Callable[..., None],
    ) -> None:
        self._persistence = persistence
        self._submit = submit
        self._soon_from_thread = soon_from_thread
        self._writing: dict[str, bool] = {}  # by file: whether to write it once more

    @property
    def running(self) -> bool:
        """Whether a table is being written."""
        return bool(self._writing)

    def write(self, table: PersistentTable) -> None:
        """Write a table now, or when the running write of its file is done."""
        assert self._persistence is not None
        name = table.FILE
        if name in self._writing:
            self._writing[name] = True
            return
        if not table.dirty:
            return
        work = self._persistence.save(table)
        try:
            future = self._submit(work)
        except RuntimeError:  # the pool is closing; the broker writes dirty tables when it stops
            table.dirty = True
            return
        self._writing[name] = False
        future.add_done_callback(lambda done: self._soon_from_thread(self._written, table, done))

    def _written(self, table: PersistentTable, done: Future[Any]) -> None:
        again = self._writing.pop(table.FILE)
        error = done.exception()
        if error is not None:
            log.error("can't write %s: %s", table.FILE, error)
        elif again:
            self.write(table)
