"""Tables and their files: what is on disk after the first write, and what is said about losses."""

import logging
import os
import stat
from pathlib import Path

import pytest

from penstock.rpc.changed_settings import ChangedSettings
from penstock.rpc.persistence import Persistence
from penstock.store.disk import Disk
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable


class PrivateSettings(ChangedSettings):
    PRIVATE = True


@pytest.fixture
def persistence(tmp_path: Path) -> Persistence:
    (tmp_path / "config").mkdir()
    return Persistence(Disk(), tmp_path)


def test_a_table_that_was_written_once_is_found_after_its_file_is_lost(
    persistence: Persistence, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = ConsumerOffsetTable()
    table.commit("T", "G", 0, 700, 1)
    persistence.save(table)()
    (tmp_path / table.FILE).unlink()
    again = ConsumerOffsetTable()
    assert again.load(persistence.file(table.FILE))
    assert again.get("T", "G", 0) == 700
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "consumerOffset.json is missing: using the .bak" in record.getMessage()


def test_later_writes_keep_the_previous_content(persistence: Persistence, tmp_path: Path) -> None:
    table = ChangedSettings()
    for number in range(3):
        table.set({"a": str(number)}, 1)
        persistence.save(table)()
    path = tmp_path / table.FILE
    assert b'"2"' in path.read_bytes()
    assert b'"1"' in path.with_name(path.name + ".bak").read_bytes()


def test_both_files_of_a_private_table_are_private(
    persistence: Persistence, tmp_path: Path
) -> None:
    persistence.save(PrivateSettings())()
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (tmp_path / "config").iterdir()]
    assert modes == [0o600, 0o600]
