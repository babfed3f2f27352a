"""Index files: Java's format, chains, times, rolls, recovery."""

import os
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import DiskFull
from penstock.store.disk import FOLIO_BYTES_MAX
from penstock.store.index import KEYS_AHEAD, Index, IndexFile, file_name, index_file_bytes
from penstock.store.lookup import key_hash
from penstock.wire.layout import INDEX_ENTRY_BYTES, INDEX_NEXT_NUMBER_AT, INDEX_PREVIOUS_AT
from penstock.wire.record import java_hash
from tests.compat import golden
from tests.unit.store.conftest import EVER_MS, NOW_MS, WatchedDisk

SLOTS, ENTRIES = 16, 40
ENTRIES_AT = index_file_bytes(SLOTS, 0)


@pytest.fixture
def disk() -> WatchedDisk:
    return WatchedDisk()


@pytest.fixture
def file(disk: WatchedDisk, tmp_path: Path) -> IndexFile:
    return IndexFile(disk, tmp_path / "i", SLOTS, ENTRIES, new=True)


@pytest.fixture
def index(disk: WatchedDisk, tmp_path: Path) -> Index:
    return Index(disk, tmp_path / "index", SLOTS, ENTRIES)


def java_key_hash(key: str) -> int:
    value = abs(java_hash(key))
    return 0 if value == 1 << 31 else value


@pytest.mark.parametrize("case", golden.load("5.4.0")["index_hashes"], ids=lambda c: c["name"])
def test_keys_hash_as_in_java(case: dict[str, Any]) -> None:
    assert java_key_hash(case["key"]) == case["hash"]
    topic, mark, key = case["key"].partition("#")
    if mark:
        assert key_hash(topic, key) == case["hash"]


@pytest.mark.parametrize("case", golden.load("5.4.0")["index_files"], ids=lambda c: c["name"])
def test_files_equal_those_of_java_byte_for_byte(
    disk: WatchedDisk, tmp_path: Path, case: dict[str, Any]
) -> None:
    file = IndexFile(disk, tmp_path / "i", case["hash_slots"], case["max_entries"], new=True)
    for put in case["puts"]:
        assert file.is_full() != put["accepted"]
        if put["accepted"]:
            file.put(java_key_hash(put["key"]), put["physical_offset"], put["store_timestamp"])
    assert (tmp_path / "i").read_bytes().hex() == case["hex"]


def test_a_file_is_named_by_local_time() -> None:
    assert file_name(NOW_MS + 7)[-3:] == "007"
    assert len(file_name(NOW_MS)) == 17
    assert file_name(NOW_MS)[:4] == "2023"


def test_the_newest_entry_is_found_first(file: IndexFile) -> None:
    for n in range(10):
        file.put(5, 100 * n, NOW_MS + n)
    assert file.find(5, 0, EVER_MS, 64) == [100 * n for n in reversed(range(10))]
    assert file.find(5, 0, EVER_MS, 3) == [900, 800, 700]


def test_keys_that_share_a_slot_are_distinguished(file: IndexFile) -> None:
    for n in range(12):
        file.put(3 + SLOTS * (n % 3), n, NOW_MS)
    assert file.find(3, 0, EVER_MS, 64) == [9, 6, 3, 0]
    assert file.find(3 + SLOTS, 0, EVER_MS, 64) == [10, 7, 4, 1]
    assert file.find(3 + 3 * SLOTS, 0, EVER_MS, 64) == []
    assert file.find(4, 0, EVER_MS, 64) == []


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 9000, [0, 1, 2, 3]),
        (1000, 2000, [1, 2]),
        (1500, 1600, [1]),
        (3999, 9000, [3]),
        (4000, 9000, []),
        (-9, -1, []),
        (0, 0, [0]),
    ],
)
def test_an_entry_is_found_if_its_second_overlaps_the_range(
    file: IndexFile, begin: int, end: int, expected: list[int]
) -> None:
    for n in range(4):
        file.put(5, n, NOW_MS + 1000 * n)
    assert sorted(file.find(5, NOW_MS + begin, NOW_MS + end, 64)) == expected


def test_an_entry_older_than_the_file_has_the_begin_time_of_the_file(file: IndexFile) -> None:
    file.put(5, 1, NOW_MS)
    file.put(5, 2, NOW_MS - 60_000)
    assert file.find(5, NOW_MS, NOW_MS, 64) == [2, 1]


def test_a_full_index_file_is_followed_by_a_new_one(index: Index) -> None:
    for n in range(100):
        index.put(n % 5, n, NOW_MS + 10 * n)
    assert len(index.files) == 3
    assert [f.next_number() for f in index.files] == [ENTRIES, ENTRIES, 23]
    assert index.find(2, 0, EVER_MS, 64) == [n for n in reversed(range(100)) if n % 5 == 2]
    assert index.find(2, 0, EVER_MS, 5) == [97, 92, 87, 82, 77]
    assert index.find(2, NOW_MS + 900, EVER_MS, 64)[0] == 97


def test_two_files_of_one_millisecond_have_different_names(index: Index) -> None:
    index.add(NOW_MS)
    index.add(NOW_MS)
    assert index.files[0].path != index.files[1].path


def test_an_index_is_loaded_from_its_files(index: Index, disk: WatchedDisk) -> None:
    for n in range(50):
        index.put(n % 5, n, NOW_MS)
    (index.folder / "20231114221320000").write_bytes(b"of another size")
    (index.folder / "readme").touch()
    again = Index(disk, index.folder, SLOTS, ENTRIES)
    invalid = again.load(extend=True)
    assert sorted(invalid) == ["20231114221320000", "readme"] or invalid == ["readme"]
    assert again.find(3, 0, EVER_MS, 64) == index.find(3, 0, EVER_MS, 64)
    again.put(3, 1000, NOW_MS)
    assert again.find(3, 0, EVER_MS, 1) == [1000]


def noise(rng: Random, length: int) -> bytes:
    return rng.randbytes(length)


@pytest.mark.parametrize("seed", range(6))
def test_slots_and_counts_are_rebuilt_from_entries(file: IndexFile, seed: int) -> None:
    rng = Random(seed)
    for n in range(30):
        file.put(rng.randrange(1 << 31), 10 * n, NOW_MS + 1000 * (n // 4))
    before = file.path.read_bytes()
    garbled = bytearray(before)
    garbled[8:16] = noise(rng, 8)  # end time
    garbled[24:ENTRIES_AT] = noise(rng, ENTRIES_AT - 24)  # end offset, counts, slots
    for number in range(1, 31):  # links
        at = ENTRIES_AT + number * INDEX_ENTRY_BYTES + INDEX_PREVIOUS_AT
        garbled[at : at + 4] = noise(rng, 4)
    with open(file.path, "r+b") as target:
        target.write(garbled)
    assert file.rethread(1 << 60) == 30
    assert file.path.read_bytes() == before


@pytest.mark.parametrize("kept", [0, 1, 7, 30])
def test_entries_behind_a_cut_are_removed(file: IndexFile, tmp_path: Path, kept: int) -> None:
    other = IndexFile(file.disk, tmp_path / "other", SLOTS, ENTRIES, new=True)
    for n in range(30):
        file.put(n * 7919, 10 * n, NOW_MS + 1000 * n)
        if n < kept:
            other.put(n * 7919, 10 * n, NOW_MS + 1000 * n)
    assert file.rethread(10 * kept) == kept
    upto = ENTRIES_AT + (kept + 1) * INDEX_ENTRY_BYTES
    assert file.path.read_bytes()[:upto] == other.path.read_bytes()[:upto]


def test_a_cut_deletes_empty_files(index: Index) -> None:
    for n in range(100):
        index.put(n % 5, 10 * n, NOW_MS)
    index.cut(500)
    assert len(index.files) == len(os.listdir(index.folder)) == 2
    assert index.find(2, 0, EVER_MS, 64) == [10 * n for n in reversed(range(50)) if n % 5 == 2]
    index.cut(0)
    assert index.current is None
    assert os.listdir(index.folder) == []
    index.put(1, 7, NOW_MS)
    assert index.find(1, 0, EVER_MS, 64) == [7]


def test_files_of_deleted_segments_are_deleted_except_the_last(index: Index) -> None:
    for n in range(100):
        index.put(n % 5, 10 * n, NOW_MS)
    index.drop_before(391)
    assert len(index.files) == 2
    index.drop_before(1 << 40)
    assert len(index.files) == 1
    assert index.find(2, 0, EVER_MS, 64)[0] == 970


def test_a_full_disk_refuses_before_anything_changes(disk: WatchedDisk, tmp_path: Path) -> None:
    file = IndexFile(disk, tmp_path / "i", SLOTS, 300_000, new=True)
    disk.no_space = lambda path: True
    before = file.path.read_bytes()[:ENTRIES_AT]
    for attempt in (file.ready, lambda: file.put(1, 2, NOW_MS)):
        with pytest.raises(DiskFull):
            attempt()
    assert file.path.read_bytes()[:ENTRIES_AT] == before


def test_entries_are_allocated_ahead(disk: WatchedDisk, tmp_path: Path) -> None:
    file = IndexFile(disk, tmp_path / "i", SLOTS, 300_000, new=True)
    file.ready()
    first = file.allocated
    assert first == (FOLIO_BYTES_MAX - ENTRIES_AT) // INDEX_ENTRY_BYTES
    while not file.needs_blocks:
        file.ready()
        file.put(1, file.next_number(), NOW_MS)
    assert file.next_number() < first
    file.needs_blocks = False
    file.preallocate()
    assert file.allocated > first
    disk.no_space = lambda path: True
    while file.next_number() < first + 10:
        file.ready()
        file.put(1, file.next_number(), NOW_MS)


def test_all_files_written_to_are_synced(index: Index, disk: WatchedDisk) -> None:
    for n in range(100):
        index.put(n, n, NOW_MS)
    disk.synced.clear()
    index.sync()
    assert {p.name for p in disk.synced} == set(os.listdir(index.folder))
    disk.synced.clear()
    index.sync()
    assert [p.name for p in disk.synced] == [index.files[-1].path.name]


@pytest.mark.parametrize("count", [-(1 << 30), -1, 0, ENTRIES + 1, (1 << 31) - 1])
def test_a_damaged_count_is_corrected(index: Index, disk: WatchedDisk, count: int) -> None:
    index.put(1, 10, NOW_MS)
    index.put(2, 20, NOW_MS)
    with open(index.files[0].path, "r+b") as target:
        target.seek(36)
        target.write(struct.pack(">i", count))
    again = Index(disk, index.folder, SLOTS, ENTRIES)
    again.load(extend=True)
    assert again.current is None or 1 <= again.current.next_number() <= ENTRIES


def test_a_search_during_a_put_finds_older_entries(
    file: IndexFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.put(5, 10, NOW_MS)
    real = file.disk.read_at

    def late(fd: int, length: int, at: int) -> bytes:
        if at < ENTRIES_AT and file.next_number() == 2:
            file.put(5, 20, NOW_MS)
        return real(fd, length, at)

    monkeypatch.setattr(file.disk, "read_at", late)
    assert 10 in file.find(5, 0, EVER_MS, 64)


def test_a_search_survives_the_deletion_of_a_file(index: Index) -> None:
    for n in range(50):
        index.put(1, n, NOW_MS)
    os.unlink(
        index.files[0].path
    )  # as the thread pool does before or after it removes the file from the list
    assert index.find(1, 0, EVER_MS, 64)[0] == 49


class SmallDisk(WatchedDisk):
    """A disk that is full up to one position of each file."""

    end = 1 << 40

    def allocate(self, fd: int, at: int, length: int, path: Path) -> None:
        if at + length > self.end:
            raise DiskFull(f"no space for {length} bytes of {path}")
        super().allocate(fd, at, length, path)


def test_a_full_disk_costs_no_entry_that_has_its_blocks(tmp_path: Path) -> None:
    """Recovery fills a file again in other steps than those in which it was allocated."""
    disk, path = SmallDisk(), tmp_path / file_name(NOW_MS)
    entries_at = IndexFile(disk, path, SLOTS, 400_000, new=True).entries_at
    disk.end = FOLIO_BYTES_MAX
    last = (FOLIO_BYTES_MAX - entries_at) // INDEX_ENTRY_BYTES - 1

    def opened_at(number: int) -> IndexFile:
        with path.open("r+b") as header:
            header.seek(INDEX_NEXT_NUMBER_AT)
            header.write(number.to_bytes(4, "big"))
        return IndexFile(disk, path, SLOTS, 400_000, new=False)

    for number in (1, last // 2, last - KEYS_AHEAD, last):
        file = opened_at(number)
        if number <= last - KEYS_AHEAD:
            file.ready()
        file.put(7, 1000 + number, NOW_MS)
    file = opened_at(last + 1)
    for attempt in (file.ready, lambda: file.put(7, 1001 + last, NOW_MS)):
        with pytest.raises(DiskFull):
            attempt()
    assert file.next_number() == last + 1
