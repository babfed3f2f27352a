"""File operations of the operating system."""

import errno
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from penstock.cli.servers.startup import explained
from penstock.errors import DiskFull, ReadFailed
from penstock.store.disk import Disk, Space

MEMORY = Path("/dev/shm")


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.mark.parametrize(
    ("used", "free", "percent"), [(0, 100, 0), (75, 25, 75), (751, 249, 76), (1, 999, 1), (0, 0, 0)]
)
def test_disk_usage_is_rounded_up(used: int, free: int, percent: int) -> None:
    assert Space(used, free).percent == percent


def test_free_space_is_that_of_the_file_system(disk: Disk, tmp_path: Path) -> None:
    space = disk.space(tmp_path)
    assert space.used > 0
    assert 0 <= space.percent <= 100


def test_a_new_file_has_its_full_length_and_is_sparse(disk: Disk, tmp_path: Path) -> None:
    fd = disk.create(tmp_path / "a", 1 << 20)
    assert os.fstat(fd).st_size == 1 << 20
    assert os.fstat(fd).st_blocks == 0
    assert disk.next_data(fd, 0) == -1
    disk.close_file(fd)


def test_create_opens_an_existing_file(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    fd = disk.create(tmp_path / "a", 3)
    assert disk.read_at(fd, 10, 1) == b"bc"
    disk.close_file(fd)


def test_allocate_reserves_blocks(disk: Disk, tmp_path: Path) -> None:
    fd = disk.create(tmp_path / "a", 1 << 20)
    disk.allocate(fd, 0, 64 * 1024, tmp_path / "a")
    assert os.fstat(fd).st_blocks * 512 >= 64 * 1024
    disk.close_file(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_an_error_that_names_the_file(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(fd: int, at: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match=f"4096 bytes of {tmp_path / 'a'}"):
        disk.allocate(0, 0, 4096, tmp_path / "a")


def test_another_failure_to_allocate_is_not_a_full_disk(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.allocate(-1, 0, 4096, tmp_path / "a")


def test_write_and_read_at_an_offset(disk: Disk, tmp_path: Path) -> None:
    fd = disk.create(tmp_path / "a", 16)
    disk.write(fd, memoryview(b"hello"), 8)
    assert disk.read_at(fd, 16, 4) == b"\0\0\0\0hello\0\0\0"
    assert disk.read_at(fd, 4, 100) == b""
    disk.close_file(fd)


def test_short_writes_are_completed(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    fd = disk.create(tmp_path / "a", 16)
    disk.write(fd, memoryview(b"0123456789"), 2)
    assert disk.read_at(fd, 10, 2) == b"0123456789"
    disk.close_file(fd)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_read_that_would_block_is_reported(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def busy(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    reading, writing = os.pipe()  # not a file of a tmpfs
    monkeypatch.setattr(os, "preadv", busy)
    assert not disk.read_now(reading, memoryview(bytearray(4)), 0)
    os.close(reading)
    os.close(writing)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="there is no tmpfs")
def test_a_read_from_a_tmpfs_never_blocks(disk: Disk) -> None:
    with tempfile.NamedTemporaryFile(dir=MEMORY) as file:
        file.write(b"abcd")
        file.flush()
        target = memoryview(bytearray(2))
        assert disk.read_now(file.fileno(), target, 1)
        assert bytes(target) == b"bc"
        assert not disk.read_now(file.fileno(), target, 3), "the file ends there"


def test_a_short_read_counts_as_one_that_would_block(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    fd = disk.open_to_read(tmp_path / "a")
    assert not disk.read_now(fd, memoryview(bytearray(4)), 0)
    disk.close_file(fd)


def test_a_failed_read_raises_a_store_error(disk: Disk) -> None:
    with pytest.raises(ReadFailed, match="Bad file descriptor"):
        disk.read_now(-1, memoryview(bytearray(4)), 0)


def test_replace_keeps_the_old_content_as_a_backup(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    disk.replace(path, b"one")
    assert disk.names(tmp_path) == ["topics.json"]
    disk.replace(path, b"two, longer")
    disk.replace(path, b"three")
    assert disk.read(path) == b"three"
    assert disk.read(tmp_path / "topics.json.bak") == b"two, longer"
    assert disk.names(tmp_path) == ["topics.json", "topics.json.bak"]


def test_a_file_that_is_too_large_is_named_and_not_left_behind(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="File too large") as caught:
        disk.create(tmp_path / "segment", 1 << 40)
    assert disk.names(tmp_path) == []
    text = str(explained(caught.value))
    assert f"{tmp_path / 'segment'} would be too large" in text
    assert "store.segment_bytes" in text


def test_write_file_leaves_nothing_of_longer_content(disk: Disk, tmp_path: Path) -> None:
    disk.write_file(tmp_path / "abort", b"123456")
    disk.write_file(tmp_path / "abort", b"7")
    assert disk.read(tmp_path / "abort") == b"7"


def test_a_missing_file_reads_as_none(disk: Disk, tmp_path: Path) -> None:
    assert disk.read(tmp_path / "missing") is None
    assert disk.names(tmp_path / "missing") == []


def test_directories_are_created_durably(tmp_path: Path) -> None:
    synced = []

    class Noting(Disk):
        def sync_directory(self, path: Path) -> None:
            synced.append(path)
            super().sync_directory(path)

    disk = Noting()
    disk.make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    disk.make_directory(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_close_waits_for_submitted_work(disk: Disk) -> None:
    done = []
    future = disk.submit(lambda: done.append(1))
    disk.close()
    assert done == [1]
    assert future.result() is None
    assert disk.submit(lambda: 7).result() == 7
    disk.close()


def test_a_mapping_for_random_access_writes_to_the_file(disk: Disk, tmp_path: Path) -> None:
    path, size = tmp_path / "f", 2 * mmap.PAGESIZE
    fd = disk.create(path, size)
    view = disk.map_without_readahead(fd, size)
    disk.close_file(fd)
    view[size - 2 :] = b"ab"
    assert path.read_bytes() == bytes(size - 2) + b"ab"
    part = view[:1]  # keeps the mapping
    del view
    part[0] = 7
    assert path.read_bytes()[0] == 7


def test_a_file_that_can_not_be_mapped_is_an_error(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(mmap.PAGESIZE))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            disk.map_without_readahead(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)
