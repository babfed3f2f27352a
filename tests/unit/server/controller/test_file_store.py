"""States of broker sets in files: whenever the controller is killed, none is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.controller.broker_set import BrokerSet
from penstock.server.controller.broker_set_store import FileStore
from penstock.store.disk import Disk
from tests.store_kit import CrashError, CrashingDisk

SETS = "broker-a", "a/b.json", "c.bak"


def state(name: str, epoch: int) -> BrokerSet:
    return BrokerSet("cluster", name, {}, 1, master_epoch=epoch)


async def change(store: FileStore, name: str, to: BrokerSet | None) -> None:
    assert await store.replace(name, to, (await store.read(name)).version)


def epochs(root: Path) -> dict[str, int]:
    """The stored states, as the next controller reads them."""
    return {one.name: one.master_epoch for one in FileStore(Disk(), root).all_last_seen()}


def test_states_are_there_after_a_restart(tmp_path: Path) -> None:
    async def run() -> None:
        store = FileStore(Disk(), tmp_path)
        for epoch in (1, 2):
            for name in SETS:
                await change(store, name, state(name, epoch))
        assert not await store.replace(SETS[0], state(SETS[0], 3), 1)
        await change(store, SETS[2], None)

    asyncio.run(run())
    assert epochs(tmp_path) == {SETS[0]: 2, SETS[1]: 2}


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("name", SETS)
def test_a_controller_that_is_killed_has_the_old_state_or_the_new_one(
    tmp_path: Path, name: str, steps: int
) -> None:
    async def run() -> None:
        for one in SETS:
            await change(FileStore(Disk(), tmp_path), one, state(one, 1))
        store = FileStore(CrashingDisk(steps), tmp_path)
        with pytest.raises(CrashError):
            await change(store, name, state(name, 2))

    asyncio.run(run())
    assert epochs(tmp_path) == dict.fromkeys(SETS, 1) | {name: 1 if steps < 2 else 2}


@pytest.mark.parametrize("steps", range(2))
def test_a_controller_that_is_killed_brings_no_older_state_back(tmp_path: Path, steps: int) -> None:
    async def run() -> None:
        store = FileStore(Disk(), tmp_path)
        for epoch in (1, 2):
            await change(store, SETS[0], state(SETS[0], epoch))
        with pytest.raises(CrashError):
            await change(FileStore(CrashingDisk(steps), tmp_path), SETS[0], None)

    asyncio.run(run())
    assert epochs(tmp_path) == {SETS[0]: 2}
