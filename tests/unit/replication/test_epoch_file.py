"""The file of epochs: durable, crash-safe, and with a current `.bak`."""

import logging
from pathlib import Path

import pytest

from penstock.errors import StoreDamaged
from penstock.replication.epoch_file import load_epochs, save_epochs
from penstock.replication.epochs import Epoch, EpochHistory
from penstock.store.disk import Disk
from tests.store_kit import CrashError, CrashingDisk

OLD = EpochHistory([Epoch(1, 0)])
NEW = EpochHistory([Epoch(1, 0), Epoch(2, 100)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "epochFileCheckpoint"


def backup(path: Path) -> Path:
    return path.with_name(path.name + ".bak")


def test_without_a_file_there_are_no_epochs(path: Path) -> None:
    assert load_epochs(Disk(), path) == EpochHistory()
    assert list(path.parent.iterdir()) == []


def test_epochs_are_saved_with_an_equal_bak(path: Path) -> None:
    for history in (OLD, NEW, OLD, EpochHistory()):
        save_epochs(Disk(), path, history)
        assert path.read_bytes() == backup(path).read_bytes() == history.encode()
        assert load_epochs(Disk(), path) == history


@pytest.mark.parametrize("damage", [b"", b"2\n355729437\n1-0\n", b"\0" * 22])
def test_a_damaged_file_is_replaced_by_its_bak(
    path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    save_epochs(Disk(), path, NEW)
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert load_epochs(Disk(), path) == NEW
    assert "using the .bak" in caplog.text
    save_epochs(Disk(), path, NEW)
    assert load_epochs(Disk(), path) == NEW


def test_a_damaged_file_without_a_good_bak_is_refused(path: Path) -> None:
    save_epochs(Disk(), path, NEW)
    path.write_bytes(b"?")
    backup(path).write_bytes(b"1\n0\n")
    with pytest.raises(StoreDamaged, match="epochFileCheckpoint"):
        load_epochs(Disk(), path)
    backup(path).unlink()
    with pytest.raises(StoreDamaged, match="epochFileCheckpoint"):
        load_epochs(Disk(), path)


@pytest.mark.parametrize("steps", range(4))
def test_a_crash_during_a_save_leaves_old_or_new_epochs(path: Path, steps: int) -> None:
    save_epochs(Disk(), path, OLD)
    with pytest.raises(CrashError):
        save_epochs(CrashingDisk(steps), path, NEW)
    assert load_epochs(Disk(), path) == (OLD if steps < 2 else NEW)
