"""Where controllers keep the states of broker sets: by compare-and-swap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote

from penstock.controller.broker_set import BrokerSet, decode_broker_set
from penstock.errors import BodyError, StoreDamaged
from penstock.server.background import in_pool
from penstock.store.disk import Disk
from penstock.store.tables.config_tables import ConfigFile


class Versioned(NamedTuple):
    """A state, None if the broker set is not known, and the version that a change must name."""

    state: BrokerSet | None
    version: int


class BrokerSetStore(Protocol):
    """States of broker sets, by name."""

    async def names(self) -> Iterable[str]:
        """The known broker sets."""

    async def read(self, name: str) -> Versioned:
        """The present state."""

    async def read_many(self, names: Iterable[str]) -> Mapping[str, Versioned]:
        """The present states of several broker sets; not urgent."""

    async def replace(self, name: str, state: BrokerSet | None, version: int) -> bool:
        """Store another state, or none, if the version is still this one. It is durable then."""

    def last_seen(self, name: str) -> BrokerSet | None:
        """The state without asking anybody; it may be a little old."""

    def all_last_seen(self) -> Iterable[BrokerSet]:
        """The states of all broker sets in the same way."""


class FileStore:
    """States in files of one controller, which has no others beside it."""

    def __init__(self, disk: Disk, root: Path) -> None:
        """Waits for the disk."""
        self._disk = disk
        self._root = root
        self._versions = 0
        self._states: dict[str, Versioned] = {}
        self._writing = asyncio.Lock()
        disk.make_directory(root)
        for path in _files_in(root):
            state = ConfigFile(disk, path).load(_parse)
            if state is not None:
                self._states[state.name] = Versioned(state, self._next_version())

    async def names(self) -> Iterable[str]:
        return list(self._states)

    async def read(self, name: str) -> Versioned:
        return self._states.get(name) or Versioned(None, 0)

    async def read_many(self, names: Iterable[str]) -> Mapping[str, Versioned]:
        return {name: await self.read(name) for name in names}

    def last_seen(self, name: str) -> BrokerSet | None:
        found = self._states.get(name)
        return None if found is None else found.state

    def all_last_seen(self) -> Iterable[BrokerSet]:
        return [found.state for found in self._states.values() if found.state is not None]

    async def replace(self, name: str, state: BrokerSet | None, version: int) -> bool:
        async with self._writing:
            if (await self.read(name)).version != version:
                return False
            path = self._root / f"{quote(name, safe='')}.json"
            if state is None:
                await in_pool(self._disk, lambda: self._disk.forget(path))
                del self._states[name]
                return True
            await in_pool(self._disk, lambda: self._write(path, state.encode()))
            self._states[name] = Versioned(state, self._next_version())
            return True

    def _next_version(self) -> int:
        self._versions += 1
        return self._versions

    def _write(self, path: Path, data: bytes) -> None:
        for _ in range(2):  # so that the .bak has no older state
            self._disk.replace(path, data)


def _files_in(root: Path) -> list[Path]:
    """The files of states; of one that was being replaced, perhaps only the `.bak` exists."""
    backups = (path.with_suffix("") for path in root.glob("*.json.bak"))
    return sorted({*root.glob("*.json"), *backups})


def _parse(data: bytes) -> BrokerSet:
    try:
        return decode_broker_set(data)
    except StoreDamaged as error:
        raise BodyError(error.message) from None
