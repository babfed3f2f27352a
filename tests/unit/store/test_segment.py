"""One mapped file of a log, and the row of them."""

import gc
import logging
import os
from pathlib import Path

import pytest

from penstock.errors import DiskFull
from penstock.store.segment import SegmentRow, segment_name
from tests.unit.store.conftest import WatchedDisk


@pytest.fixture
def row(tmp_path: Path) -> SegmentRow:
    return SegmentRow(WatchedDisk(), tmp_path, 4096)


@pytest.mark.parametrize(
    ("offset", "name"),
    [
        (0, "00000000000000000000"),
        (1 << 30, "00000000001073741824"),
        ((1 << 62) - 1, "04611686018427387903"),
    ],
)
def test_a_segment_is_named_by_its_first_byte(offset: int, name: str) -> None:
    assert segment_name(offset) == name


def test_create_allocates_the_whole_file(row: SegmentRow, tmp_path: Path) -> None:
    segment = row.create(8192)
    assert segment.path == tmp_path / "00000000000000008192"
    assert os.stat(segment.path).st_size == 4096
    assert os.stat(segment.path).st_blocks * 512 >= 4096
    assert row.segments == []


def test_a_full_disk_leaves_no_file_behind(row: SegmentRow, tmp_path: Path) -> None:
    row.disk.no_space = lambda path: True  # type: ignore[attr-defined]
    with pytest.raises(DiskFull):
        row.create(0)
    assert os.listdir(tmp_path) == []


def test_find_by_offset(row: SegmentRow) -> None:
    for start in (4096, 8192, 12288):
        row.push(row.create(start))
    found = [row.find(o) for o in (-1, 0, 4095, 4096, 8191, 8192, 16383, 16384, 1 << 62)]
    starts = [s.start if s is not None else None for s in found]
    assert starts == [None, None, None, 4096, 4096, 8192, 12288, None, None]


def test_an_empty_row_finds_nothing(row: SegmentRow) -> None:
    assert row.find(0) is None
    assert row.find(-5) is None


def test_a_row_has_no_gaps(row: SegmentRow) -> None:
    row.push(row.create(0))
    with pytest.raises(AssertionError):
        row.push(row.create(8192))


def test_dropping_the_oldest_moves_the_begin(row: SegmentRow) -> None:
    for start in (0, 4096):
        row.push(row.create(start))
    assert row.drop_first().start == 0
    assert (row.first, row.find(0)) == (4096, None)
    assert row.drop_first().start == 4096
    assert row.first == 8192


def test_a_view_outlives_the_file(row: SegmentRow) -> None:
    row.push(row.create(0))
    segment = row.drop_first()
    row.disk.write(segment.fd, memoryview(b"hello"), 100)
    view = segment.slice(100, 5)
    row.unlink(segment)
    del segment
    gc.collect()
    assert bytes(view) == b"hello"
    assert view.readonly
    assert not (row.folder / segment_name(0)).exists()


def test_the_handle_goes_with_the_last_reference(row: SegmentRow) -> None:
    segment = row.create(0)
    name = f"/proc/self/fd/{segment.fd}"
    path = os.readlink(name)
    del segment
    gc.collect()
    assert not os.path.exists(name) or os.readlink(name) != path


@pytest.mark.parametrize(
    ("at", "length"), [(0, 4096), (-5000, 100), (4000, 9999), (4096, 10), (9000, 10)]
)
def test_prefault_stays_inside_and_changes_nothing(row: SegmentRow, at: int, length: int) -> None:
    segment = row.create(0)
    row.disk.write(segment.fd, memoryview(b"\x07" * 4096), 0)
    segment.prefault(at, length)
    assert bytes(segment.slice(0, 4096)) == b"\x07" * 4096


def test_memory_is_locked_or_it_is_said_why_not(
    row: SegmentRow, caplog: pytest.LogCaptureFixture
) -> None:
    segment = row.create(0)
    with caplog.at_level(logging.WARNING):
        segment.lock_or_warn()
    assert segment.locked != ("lock_memory" in caplog.text)
    segment.unlock()
    assert not segment.locked
