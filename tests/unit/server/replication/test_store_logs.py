"""The log of a slave and its epochs: nothing is acknowledged whose epoch is not stored."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from penstock.replication.epochs import Epoch, EpochHistory
from penstock.server.replication.store_logs import StoreSlaveLog
from penstock.wire import layout
from tests.store_kit import START_MS, open_store, small_config
from tests.unit.store.conftest import WatchedDisk
from tests.unit.store.received.test_received_log import master_log


class SlowDisk(WatchedDisk):
    """Work for the pool waits until the test runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.slow = False

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        if not self.slow:
            return super().submit(work)
        self.waiting.append((work, Future()))
        return self.waiting[-1][1]

    def run_one(self) -> None:
        work, done = self.waiting.pop(0)
        try:
            done.set_result(work())
        except OSError as error:
            done.set_exception(error)


def test_an_epoch_is_stored_before_its_bytes_are_acknowledged(tmp_path: Path) -> None:
    model, log = master_log(tmp_path / "master", 2, 10)
    disk, saved = SlowDisk(), []
    failing = False

    def save(history: EpochHistory) -> None:
        if failing:
            raise OSError("no disk")
        saved.append(history.epochs)

    store = open_store(tmp_path / "slave", small_config(sync_flush=False), disk)
    slave = StoreSlaveLog(store, EpochHistory(), save)
    done: list[None] = []
    slave.on_saved = lambda: done.append(None)
    disk.slow = True
    assert slave.may_receive
    slave.follow(EpochHistory([Epoch(1, 0)]))
    assert not slave.may_receive
    slave.restart(0, equal=True)
    second = model.stored[5].offset
    slave.receive(memoryview(bytearray(log[:second])))
    assert (slave.end, slave.acknowledged, saved) == (second, 0, [])
    slave.follow(EpochHistory([Epoch(1, 0), Epoch(2, second)]))  # meanwhile
    slave.receive(memoryview(bytearray(log[second:])))
    disk.run_one()
    slave.epochs_stored()
    assert (len(done), saved, slave.acknowledged) == (1, [(Epoch(1, 0),)], 0)
    failing = True
    disk.run_one()
    with pytest.raises(OSError, match="no disk"):
        slave.epochs_stored()
    assert slave.acknowledged == 0
    failing = False
    slave.follow(EpochHistory([Epoch(1, 0), Epoch(2, second)]))
    assert slave.acknowledged == 0
    disk.run_one()
    slave.epochs_stored()
    assert saved[-1] == (Epoch(1, 0), Epoch(2, second))
    assert slave.acknowledged == len(log)
    assert slave.may_receive
    slave.follow(EpochHistory(saved[-1]))  # they are stored already
    assert (disk.waiting, slave.acknowledged) == ([], len(log))
    disk.slow = False
    store.close()


def test_a_store_time_in_the_future_is_not_believed(tmp_path: Path) -> None:
    model, log = master_log(tmp_path / "master", 2, 10)
    damaged = bytearray(log)
    damaged[model.stored[4].offset + layout.BORN_HOST_AT + layout.HOST_V4_BYTES] ^= 0x10
    store = open_store(tmp_path / "slave", small_config(sync_flush=False), SlowDisk())
    slave = StoreSlaveLog(store, EpochHistory(), lambda history: None)
    slave.restart(0)
    slave.receive(memoryview(damaged))
    slave.publish(START_MS + 10)
    assert store.writer.store_ms == model.store_ms
    store.close()


def test_a_slave_that_starts_knows_how_much_is_confirmed(tmp_path: Path) -> None:
    """The end of its log may be on no other replica, and may be replaced."""
    model, log = master_log(tmp_path / "master", 2, 10)
    second = model.stored[5].offset
    store = open_store(tmp_path / "slave", small_config(sync_flush=False), SlowDisk())
    slave = StoreSlaveLog(store, EpochHistory(), lambda history: None)
    slave.restart(0)
    slave.receive(memoryview(bytearray(log)))
    slave.publish()
    store.close()
    store = open_store(tmp_path / "slave", small_config(sync_flush=False), SlowDisk())
    slave = StoreSlaveLog(store, EpochHistory(), lambda history: None, confirmed=second)
    assert (store.log.end, store.confirm_offset, slave.opened_confirmed) == (
        len(log),
        second,
        False,
    )
    slave.confirm(model.stored[7].offset)
    slave.publish()
    assert (store.confirm_offset, slave.opened_confirmed) == (model.stored[7].offset, False)
    slave.confirm(len(log))
    slave.publish()
    assert (store.confirm_offset, slave.opened_confirmed) == (len(log), True)
    store.close()
