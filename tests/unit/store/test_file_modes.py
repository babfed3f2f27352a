"""Modes of the files and directories of a store."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from penstock.store.store import MessageStore
from tests.store_kit import small_config
from tests.unit.store.conftest import NOW_MS, put, record


def modes(root: Path) -> tuple[set[int], set[int]]:
    """The modes of directories and of files below and including `root`."""
    entries = [root, *root.rglob("*")]
    mode = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in entries}
    return (
        {mode[entry] for entry in entries if entry.is_dir()},
        {mode[entry] for entry in entries if entry.is_file()},
    )


@pytest.mark.parametrize(
    ("group_readable", "directories", "files"), [(False, 0o700, 0o600), (True, 0o750, 0o640)]
)
def test_a_store_is_not_readable_by_others(
    tmp_path: Path, group_readable: bool, directories: int, files: int
) -> None:
    umask = os.umask(0)
    try:
        root = tmp_path / "data" / "store"
        config = msgspec.structs.replace(
            small_config(sync_flush=False), group_readable=group_readable
        )
        store = MessageStore(root, config, now_ms=NOW_MS)
        put(store, record(b"x", "T", 0))
        store.close()
        assert modes(tmp_path / "data") == ({directories}, {files})
    finally:
        os.umask(umask)
