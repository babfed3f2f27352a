"""Tables to files: snapshots are taken in the loop, written in the pool, never out of order."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.rpc.answers import PersistentTable
from penstock.store.disk import Disk
from penstock.store.tables import ConfigFile


class Persistence:
    """Writes tables below a directory."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self._disk = disk
        self._root = root
        self._lock = threading.RLock()  # what is done before may be writing another table
        self._taken = 0
        self._written: dict[str, int] = {}
        self.before: dict[str, Callable[[], Callable[[], None] | None]] = {}
        """By a table's FILE: asked when a snapshot is taken for what has to be done before it is
        written, so that no table tells of something that is not on the disk yet."""

    def file(self, name: str) -> ConfigFile:
        """The file of a table by its `FILE`."""
        return ConfigFile(self._disk, self._root / name)

    def save(self, table: PersistentTable) -> Callable[[], None]:
        """Take the table as it is now; the work returned writes it, in the pool.

        Work that runs late, after a newer snapshot was written, does nothing.
        """
        self._taken += 1
        number, data, name = self._taken, table.snapshot(), table.FILE
        ask = self.before.get(name)
        first = None if ask is None else ask()
        private = getattr(table, "PRIVATE", False)

        def work() -> None:
            with self._lock:
                if self._written.get(name, 0) < number:
                    if private:
                        _make_private(self._root / f"{name}.tmp")
                    try:
                        if first is not None:
                            first()
                        self.file(name).persist(data)
                    except BaseException:
                        table.dirty = True  # so that the next round tries again
                        raise
                    self._written[name] = number

        return work


def _make_private(path: Path) -> None:
    """Make the file that will take the table's place, readable by its owner alone from the start:
    the disk writes into it and renames it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
