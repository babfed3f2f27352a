"""Writes tables to their files in the thread pool: one write per file at a time.

Requests that arrive during a write share the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.rpc.answers import PersistentTable, PersistTable
from penstock.server.pending_response import Execute, PendingResponse

if TYPE_CHECKING:
    from penstock.rpc.persistence import Persistence

log = logging.getLogger(__name__)

_Waiting = list[tuple[PendingResponse, PersistTable]]


class TableWrites:
    """The writes of a server's tables."""

    def __init__(
        self,
        persistence: Persistence | None,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        soon_from_thread: Callable[..., None],
        execute: Execute,
        after_work: Callable[[], None],
    ) -> None:
        self._persistence = persistence
        self._submit = submit
        self._soon_from_thread = soon_from_thread
        self._execute = execute
        self._after_work = after_work
        self._writing: dict[str, bool] = {}  # by file: whether to write it once more
        self._waiting: dict[str, _Waiting] = {}  # by file: for the next write

    @property
    def running(self) -> bool:
        """Whether a table is being written."""
        return bool(self._writing)

    def write_for(self, pending: PendingResponse, answer: PersistTable) -> None:
        """Write a table and execute `then` afterwards."""
        pending.connection.adjust_in_flight(1)
        self._waiting.setdefault(answer.table.FILE, []).append((pending, answer))
        self.write(answer.table)

    def write(self, table: PersistentTable) -> None:
        """Write a table now, or when the running write of its file is done."""
        assert self._persistence is not None
        name = table.FILE
        if name in self._writing:
            self._writing[name] = True
            return
        waiting = self._waiting.pop(name, [])
        if not table.dirty:
            self._finish(waiting, True)
            return
        work = self._persistence.save(table)
        try:
            future = self._submit(work)
        except RuntimeError:  # the pool is closing; the broker writes dirty tables when it stops
            table.dirty = True
            self._finish(waiting, False)
            return
        self._writing[name] = False
        future.add_done_callback(
            lambda done: self._soon_from_thread(self._written, table, waiting, done)
        )

    def _written(self, table: PersistentTable, waiting: _Waiting, done: Future[Any]) -> None:
        again = self._writing.pop(table.FILE)
        error = done.exception()
        if error is not None:
            log.error("can't write %s: %s", table.FILE, error)
        # These first: the next write takes another snapshot.
        self._finish(waiting, error is None)
        if again and (error is None or table.FILE in self._waiting):
            self.write(table)

    def _finish(self, waiting: _Waiting, written: bool) -> None:
        for pending, answer in waiting:
            pending.connection.adjust_in_flight(-1)
            self._execute(pending, partial(answer.then, written))
        if waiting:
            self._after_work()
