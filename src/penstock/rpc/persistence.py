"""Writes tables to files: snapshots in the event loop, writes in the thread pool, in order."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.errors import DiskFull, NotWriteable
from penstock.rpc.answers import LargeTable, PersistentTable
from penstock.store.disk import Disk, is_full
from penstock.store.tables.config_tables import ConfigFile

_LATER: Final = "the change is in effect and is saved as soon as that is possible"


class Persistence:
    """Writes tables to files in a directory."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self._disk = disk
        self._root = root
        self._lock = threading.RLock()  # `before` work may write another table
        self._taken = 0
        self._written: dict[str, int] = {}
        self._backed_up: set[str] = set()  # tables that have a .bak
        self._before: dict[str, Callable[[], Callable[[], None] | None]] = {}

    def file(self, name: str) -> ConfigFile:
        """The file of a table by its `FILE`."""
        return ConfigFile(self._disk, self._root / name)

    def before(self, file: str, prepare: Callable[[], Callable[[], None] | None]) -> None:
        """Call `prepare` with each snapshot of a table, by its FILE.

        The work that it returns runs before the snapshot is written, so that no table refers to
        something that is not on disk yet.
        """
        self._before[file] = prepare

    def save(self, table: PersistentTable) -> Callable[[], None]:
        """Take a snapshot of the table; the returned work writes it and is for the thread pool.

        Work that runs after a newer snapshot was written does nothing.
        """
        self._taken += 1
        number, snapshot, name = self._taken, _begin_snapshot(table), table.FILE
        prepare = self._before.get(name)
        first = None if prepare is None else prepare()
        private = getattr(table, "PRIVATE", False)

        def work() -> None:
            with self._lock:
                if self._written.get(name, 0) < number:
                    try:
                        if first is not None:
                            first()
                        self._persist(name, snapshot(), private=private)
                    except OSError as error:
                        table.dirty = True
                        raise _unsaved(name, error) from error
                    except BaseException:
                        table.dirty = True  # so that it is written again
                        raise
                    self._written[name] = number

        return work

    def _persist(self, name: str, data: bytes, *, private: bool) -> None:
        """Write a table. The first time it is written twice, so that there is a .bak at once: else
        nobody would notice later that the file is missing."""
        file = self.file(name)
        new = name not in self._backed_up and file.is_new()
        for _ in range(2 if new else 1):
            if private:
                _make_private(self._root / f"{name}.tmp")
            file.persist(data)
        self._backed_up.add(name)


def _begin_snapshot(table: PersistentTable) -> Callable[[], bytes]:
    """The work that returns the snapshot; in the event loop, a large one would block it."""
    if isinstance(table, LargeTable):
        return table.begin_snapshot()
    data = table.snapshot()
    return lambda: data


def _unsaved(name: str, error: OSError) -> NotWriteable:
    if is_full(error):
        return DiskFull(f"no space to save {name}", hint=f"free disk space; {_LATER}")
    return NotWriteable(
        f"can't save {name}: {error.strerror}",
        hint=f"check the disk and the system's kernel log; {_LATER}",
    )


def _make_private(path: Path) -> None:
    """Create the temporary file, which becomes the table's file, readable by its owner only."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
