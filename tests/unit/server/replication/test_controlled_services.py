"""What a replica keeps of its log when its disk has failed."""

import asyncio
import errno
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.replication.assigned_role import AssignedRole
from penstock.server.replication.controlled_services import ControlledServices, RunningServices
from penstock.store.disk import Disk
from penstock.store.recovery.truncation import Truncation, read_truncation, request_truncation
from penstock.store.store import MessageStore
from tests.store_kit import (
    START_MS,
    Model,
    abandon,
    flush,
    open_store,
    put_ok,
    random_message,
    small_config,
)


@pytest.mark.parametrize("sync_flush", [True, False])
def test_what_was_not_flushed_is_truncated_under_sync_flush(
    tmp_path: Path, sync_flush: bool
) -> None:
    """Under async flush it may have been acknowledged."""
    config, rng, model = small_config(sync_flush=sync_flush), Random(1), Model()
    store = open_store(tmp_path, config, Disk())
    put_ok(store, model, [random_message(rng, 1)], START_MS)
    flush(store)
    flushed = store.flusher.flushed()
    store.flusher.fail(OSError(errno.EIO, "Input/output error"))
    put_ok(store, model, [random_message(rng, 2)], START_MS)
    end = store.log.end
    services = services_with(store)
    assert services.failed()
    asyncio.run(services.drop_unflushed())
    abandon(store)
    store = open_store(tmp_path, config, Disk())
    assert store.log.end == (flushed if sync_flush else end)
    assert flushed < end
    store.close()


def test_nothing_is_truncated_if_the_store_was_opened_again_meanwhile(tmp_path: Path) -> None:
    store, model = open_store(tmp_path, small_config(sync_flush=True), Disk()), Model()
    put_ok(store, model, [random_message(Random(1), 1)], START_MS)
    asyncio.run(services_with(store).drop_unflushed())
    assert read_truncation(store.disk, store.paths) is None
    store.close()


def services_with(store: MessageStore) -> ControlledServices:
    broker: Any = SimpleNamespace(context=SimpleNamespace(store=store))
    none: Any = None
    running = RunningServices(broker, none, none)
    return ControlledServices(lambda: running, lambda: None)


@pytest.mark.parametrize(
    ("role", "epoch", "served"),
    [("sync_master", 5, True), ("sync_master", 6, False), ("slave", 5, False)],
)
def test_the_services_of_a_master_start_once_in_an_epoch(
    role: str, epoch: int, served: bool
) -> None:
    none: Any = None
    replication: Any = SimpleNamespace(master=object(), epoch=5)
    services = ControlledServices(lambda: RunningServices(none, none, replication), lambda: None)
    services.assigned = AssignedRole(role=role, epoch=epoch)
    assert services.serves_assigned() is served


def test_the_smallest_truncation_counts(tmp_path: Path) -> None:
    disk = Disk()
    store = open_store(tmp_path, small_config(sync_flush=True), disk)
    for offset in (200, 300, 100):
        request_truncation(disk, store.paths, Truncation(offset, f"at {offset}"))
    assert read_truncation(disk, store.paths) == Truncation(100, "at 100")
    store.close()
