"""The truncation of a slave's log whose end was written by a master that was replaced."""

from pathlib import Path
from random import Random

import pytest

from penstock.errors import StoreDamaged
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk
from penstock.store.recovery.truncation import Truncation, read_truncation, request_truncation
from penstock.testing import FaultyDisk, PowerCut
from tests.depth import rounds
from tests.store_kit import (
    START_MS,
    CrashError,
    CrashingDisk,
    Model,
    abandon,
    flush,
    open_store,
    put_ok,
    random_message,
    small_config,
    verify,
)

CONFIG = small_config(sync_flush=False)


@pytest.mark.parametrize("seed", range(rounds(ci=20, proof=400)))
def test_a_truncated_log_is_as_if_it_had_never_been_longer(tmp_path: Path, seed: int) -> None:
    """Also if the power fails while it is truncated, and for messages that are stored later."""
    rng, model = Random(seed), Model()
    disk = FaultyDisk(tmp_path / "0")
    store = open_store(disk.root, CONFIG, disk)
    for serial in range(rng.randrange(20, 150)):
        put_ok(
            store, model, [random_message(rng, serial)], START_MS + serial * rng.choice((1, 500))
        )
        if rng.random() < 0.1:
            flush(store)
            store.tick(START_MS + serial * 500)
    flush(store)
    end = store.log.end
    kept = rng.randrange(len(model.stored) + 1)
    cut = model.stored[kept].offset if kept < len(model.stored) else end
    if rng.random() < 0.5:
        store.close()
    else:
        abandon(store)
    request_truncation(disk, store.paths, Truncation(cut, "the master's log is different"))
    model.cut(kept, cut)
    for images in range(1, 4):
        if rng.random() < 0.6:
            disk.cut_after(rng.randrange(60))
        try:
            store = open_store(disk.root, CONFIG, disk, START_MS + 10**6)
            break
        except PowerCut:
            disk = FaultyDisk(disk.crash(tmp_path / str(images), rng))
    else:
        store = open_store(disk.root, CONFIG, disk, START_MS + 10**6)
    disk.cut_after(None)
    assert not store.paths.truncation.exists()
    assert store.log.end <= max(cut, CONFIG.segment_bytes) or store.log.end == cut
    verify(store, model)
    saved = sum(path.stat().st_size for path in store.paths.truncated.glob("*"))
    assert saved >= end - cut or kept == len(model.stored)
    for serial in range(1000, 1030):
        put_ok(store, model, [random_message(rng, serial)], START_MS + 10**6)
    flush(store)
    abandon(store)
    store = open_store(disk.root, CONFIG, disk, START_MS + 10**6)
    verify(store, model)
    store.close()


@pytest.mark.parametrize("power", [True, False], ids=["power failure", "kill -9"])
def test_a_crash_after_the_truncation_brings_nothing_back(tmp_path: Path, power: bool) -> None:
    """What was cut is gone from the log's files: recovery would take its records for messages
    (apache/rocketmq#10666)."""
    rng, model = Random(power), Model()
    disk = FaultyDisk(tmp_path / "0")
    store = open_store(disk.root, CONFIG, disk)
    for serial in range(100):
        put_ok(store, model, [random_message(rng, serial)], START_MS)
    flush(store)
    store.close()
    kept = len(model.stored) // 2
    cut = model.stored[kept].offset
    model.cut(kept, cut)
    request_truncation(disk, store.paths, Truncation(cut, "the master's log is different"))
    abandon(open_store(disk.root, CONFIG, disk, START_MS))
    if power:
        disk = FaultyDisk(disk.crash(tmp_path / "1", rng))
    store = open_store(disk.root, CONFIG, disk, START_MS)
    assert store.log.end == cut
    verify(store, model)
    store.close()


def test_a_damaged_request_refuses_the_start(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    store = open_store(tmp_path, CONFIG, disk)
    store.close()
    store.paths.truncation.write_bytes(b"{")
    with pytest.raises(StoreDamaged, match=r"penstock\.truncation is damaged"):
        open_store(tmp_path, CONFIG, FaultyDisk(tmp_path))


def test_a_crash_during_a_second_request_leaves_a_request(tmp_path: Path) -> None:
    paths, first, second = StorePaths(tmp_path), Truncation(2_000, "one"), Truncation(1_000, "two")
    request_truncation(Disk(), paths, first)
    with pytest.raises(CrashError):
        request_truncation(CrashingDisk(0), paths, second)
    assert read_truncation(Disk(), paths) == first
    request_truncation(CrashingDisk(1), paths, second)
    assert read_truncation(Disk(), paths) == second
