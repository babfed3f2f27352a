"""A mapped file of a log, and the list of them."""

import gc
import logging
import os
from pathlib import Path

import pytest

from penstock.errors import DiskFull
from penstock.store.disk import FOLIO_BYTES_MAX
from penstock.store.segment import SegmentList, segment_name
from tests.unit.store.conftest import WatchedDisk


@pytest.fixture
def segments(tmp_path: Path) -> SegmentList:
    return SegmentList(WatchedDisk(), tmp_path, 4096)


@pytest.mark.parametrize(
    ("offset", "name"),
    [
        (0, "00000000000000000000"),
        (1 << 30, "00000000001073741824"),
        ((1 << 62) - 1, "04611686018427387903"),
    ],
)
def test_a_segment_is_named_by_its_start_offset(offset: int, name: str) -> None:
    assert segment_name(offset) == name


def test_create_allocates_a_small_file_completely(segments: SegmentList, tmp_path: Path) -> None:
    segment = segments.create(8192)
    assert segment.path == tmp_path / "00000000000000008192"
    assert os.stat(segment.path).st_size == 4096
    assert os.stat(segment.path).st_blocks * 512 >= 4096
    assert segments.items == []


@pytest.mark.parametrize("offset", [0, 100, 3 << 20, (30 << 20) - 1])
def test_blocks_are_allocated_up_to_the_end_of_a_folio(tmp_path: Path, offset: int) -> None:
    """A store needs blocks for its whole folio: one that is partly a hole raises SIGBUS."""
    segment = SegmentList(WatchedDisk(), tmp_path, 30 << 20).create(0)
    segment.write_from(offset)
    assert segment.allocated <= offset
    segment.allocate(offset + 1)
    assert segment.allocated > offset
    assert segment.allocated % FOLIO_BYTES_MAX == 0 or segment.allocated == segment.size


def test_a_full_disk_leaves_no_file(segments: SegmentList, tmp_path: Path) -> None:
    segments.disk.no_space = lambda path: True  # type: ignore[attr-defined]
    with pytest.raises(DiskFull):
        segments.create(0)
    assert os.listdir(tmp_path) == []


def test_find_by_offset(segments: SegmentList) -> None:
    for start in (4096, 8192, 12288):
        segments.push(segments.create(start))
    found = [segments.find(o) for o in (-1, 0, 4095, 4096, 8191, 8192, 16383, 16384, 1 << 62)]
    starts = [s.start if s is not None else None for s in found]
    assert starts == [None, None, None, 4096, 4096, 8192, 12288, None, None]


def test_find_in_an_empty_list_returns_none(segments: SegmentList) -> None:
    assert segments.find(0) is None
    assert segments.find(-5) is None


def test_a_gap_between_segments_is_refused(segments: SegmentList) -> None:
    segments.push(segments.create(0))
    with pytest.raises(AssertionError):
        segments.push(segments.create(8192))


def test_dropping_the_oldest_segment_advances_the_start(segments: SegmentList) -> None:
    for start in (0, 4096):
        segments.push(segments.create(start))
    assert segments.drop_first().start == 0
    assert (segments.first, segments.find(0)) == (4096, None)
    assert segments.drop_first().start == 4096
    assert segments.first == 8192


def test_a_view_stays_valid_after_the_file_is_deleted(segments: SegmentList) -> None:
    segments.push(segments.create(0))
    segment = segments.drop_first()
    segments.disk.write(segment.fd, memoryview(b"hello"), 100)
    view = segment.slice(100, 5)
    segments.unlink(segment)
    del segment
    gc.collect()
    assert bytes(view) == b"hello"
    assert view.readonly
    assert not (segments.folder / segment_name(0)).exists()


def test_the_handle_is_closed_with_the_last_reference(segments: SegmentList) -> None:
    segment = segments.create(0)
    name = f"/proc/self/fd/{segment.fd}"
    path = os.readlink(name)
    del segment
    gc.collect()
    assert not os.path.exists(name) or os.readlink(name) != path


@pytest.mark.parametrize(
    ("at", "length"), [(0, 4096), (-5000, 100), (4000, 9999), (4096, 10), (9000, 10)]
)
def test_prefault_stays_within_the_file_and_changes_nothing(
    segments: SegmentList, at: int, length: int
) -> None:
    segment = segments.create(0)
    segments.disk.write(segment.fd, memoryview(b"\x07" * 4096), 0)
    segment.prefault(at, length)
    assert bytes(segment.slice(0, 4096)) == b"\x07" * 4096


def test_locking_memory_succeeds_or_has_a_reason(
    segments: SegmentList, caplog: pytest.LogCaptureFixture
) -> None:
    segment = segments.create(0)
    with caplog.at_level(logging.WARNING):
        segment.lock_or_warn()
    assert segment.locked != ("lock_memory" in caplog.text)
    segment.unlock()
    assert not segment.locked
