"""The file system as the store sees it, and the thread pool that waits for it.

All file access goes through a `Disk`, so that tests can replace it by a faulty one. Methods that
change names (`create`, `rename`, `unlink`) are durable only after `sync_directory`.
"""

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.errors import DiskFull, ReadFailed, StoreError

POOL_THREADS = 4
"""Cold reads of several consumers, a preallocation and an unlink may wait at the same time."""

FOLIO_BYTES_MAX = mmap.PAGESIZE * min(mmap.PAGESIZE // 8, 2048)
"""The largest unit of Linux's page cache: 2 MiB where a page has 4 KiB. A store into a mapping
needs blocks for the whole unit (folio) that its page belongs to. So a file is safe from SIGBUS on a
full disk only if it is allocated up to a multiple of this, or read without read-ahead."""
STAT_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the blocks of the file system are."""

_TMPFS_MAGIC = 0x01021994
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FAILURES = (errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAPPINGS_MAX = Path("/proc/sys/vm/max_map_count")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
T = TypeVar("T")


def folio_end(at: int) -> int:
    """The first position from `at` on at which a folio may end."""
    return -(-at // FOLIO_BYTES_MAX) * FOLIO_BYTES_MAX


def is_full(error: OSError) -> bool:
    """Whether a file system or a quota is full."""
    return error.errno in _FULL


def disk_failure(error: Exception) -> StoreError | None:
    """The error to report for a failed access to a file; None if the disk is not to blame."""
    if not isinstance(error, OSError):
        return None
    if is_full(error):
        return DiskFull(f"no space for {error.filename}" if error.filename else "the disk is full")
    return ReadFailed(f"the disk failed: {error}") if error.errno in _FAILURES else None


@functools.cache
def _mapping_type(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Bytes at an address that are unmapped when nothing refers to them any more."""

    class Mapping(ctypes.c_char * size):  # type: ignore[misc]
        __slots__ = ()

        def __del__(self) -> None:
            _LIBC.munmap(ctypes.c_void_p(ctypes.addressof(self)), ctypes.c_size_t(size))

    return Mapping


def _map_without_handle(fd: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """A mapping for random access. Before Python 3.13 `mmap.mmap` keeps a file handle."""
    address = _LIBC.mmap(
        None, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd,
        ctypes.c_long(0),
    )  # fmt: skip
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    mapping = _mapping_type(size).from_address(address)
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_RANDOM)
    return mapping


def _is_in_memory(fd: int) -> bool:
    """Whether a file is on tmpfs."""
    found = ctypes.create_string_buffer(256)  # struct statfs begins with the type, a long
    size = ctypes.sizeof(ctypes.c_long)
    return (
        _LIBC.fstatfs(fd, found) == 0
        and int.from_bytes(found.raw[:size], sys.byteorder) == _TMPFS_MAGIC
    )


def _syncfs_reports_errors() -> bool:
    """Whether `syncfs` fails if the file system could not write something: from Linux 5.8 on."""
    version = [int(part) for part in platform.release().split(".")[:2] if part.isdigit()]
    return sys.platform == "linux" and version >= [5, 8] and hasattr(_LIBC, "syncfs")


class Space(NamedTuple):
    """Use of the file system that holds a path."""

    used: int
    free: int

    @property
    def percent(self) -> int:
        """Used share as RocketMQ counts it: rounded up, without the blocks reserved for root."""
        total = self.used + self.free
        return -(-100 * self.used // total) if total else 0


class Disk:
    """The real file system."""

    threads = True
    """Whether the flusher and the pool run threads of their own."""
    group_readable = False
    """Whether new files and directories can be read by their group; never by others."""
    _filesystem = -1
    """A directory of the file system; it tells `syncfs` of the errors since it was opened."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __del__(self) -> None:
        self._forget_filesystem()

    def _forget_filesystem(self) -> None:
        fd, self._filesystem = self._filesystem, -1
        if fd >= 0:
            os.close(fd)

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Run work that may wait for the disk in the pool; at once if threads are off."""
        if not self.threads:
            done: Future[T] = Future()
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
            return done
        if self._pool is None:
            self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="penstock-io")
        return self._pool.submit(work)

    def close(self) -> None:
        """Wait for the submitted work and end the pool."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._forget_filesystem()

    @property
    def directory_mode(self) -> int:
        return 0o750 if self.group_readable else 0o700

    @property
    def file_mode(self) -> int:
        return 0o640 if self.group_readable else 0o600

    def make_directory(self, path: Path, *, durable: bool = True) -> None:
        """Create a directory and its parents; unless durable, the caller syncs each parent."""
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            self.make_one_directory(folder)
            if durable:
                self.sync_directory(folder.parent)

    def make_one_directory(self, path: Path) -> None:
        path.mkdir(self.directory_mode, exist_ok=True)

    def create(self, path: Path, size: int) -> int:
        """Open a file for reading and writing, with a sparse length of `size` if it is new."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self.file_mode)
        before = os.fstat(fd).st_size
        if before != size:
            try:
                os.ftruncate(fd, size)
            except OSError as error:
                os.close(fd)
                if before == 0:
                    path.unlink()
                raise OSError(error.errno, error.strerror, str(path)) from error
        return fd

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def open_to_read(self, path: Path) -> int:
        """Open a file for reads without read-ahead, which would fill large folios over holes."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def allocate(self, fd: int, at: int, length: int, path: Path) -> None:
        """Allocate blocks, so that no later store into a mapping hits a full disk."""
        try:
            os.posix_fallocate(fd, at, length)
        except OSError as error:
            if is_full(error):
                raise DiskFull(f"no space for {length} bytes of {path}") from error
            raise

    def allocate_in(self, path: Path, at: int, length: int) -> None:
        """`allocate` for a file that is not open."""
        fd = self.open(path)
        try:
            self.allocate(fd, at, length, path)
        finally:
            self.close_file(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def map(self, fd: int, size: int, writable: bool = True) -> mmap.mmap:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        if sys.version_info >= (3, 13):
            return mmap.mmap(fd, size, access=access, trackfd=False)  # costs no handle
        return mmap.mmap(fd, size, access=access)

    def map_without_readahead(self, fd: int, size: int) -> memoryview:
        """Map a sparse file that is written little by little, until the view is dropped.

        With read-ahead the first store would fill memory with pages of zeros. There may be
        thousands of such mappings, so they cost no file handle.
        """
        if sys.version_info >= (3, 13):
            mapping = self.map(fd, size)
            mapping.madvise(mmap.MADV_RANDOM)
            return memoryview(mapping)
        return memoryview(_map_without_handle(fd, size)).cast("B")

    def mappings_max(self) -> int:
        """How many mappings the process may have (vm.max_map_count)."""
        try:
            return int(_MAPPINGS_MAX.read_text())
        except (OSError, ValueError):
            return 65_530

    def write(self, fd: int, data: memoryview, at: int) -> None:
        """Write all of `data` at a position of the file."""
        while data:
            done = os.pwrite(fd, data, at)
            data = data[done:]
            at += done

    def read_at(self, fd: int, length: int, at: int) -> bytes:
        """Up to `length` bytes; may wait for the disk."""
        return os.pread(fd, length, at)

    def read_now(self, fd: int, target: memoryview, at: int) -> bool:
        """Fill `target` from the page cache; False if that would wait."""
        try:
            return os.preadv(fd, [target], at, os.RWF_NOWAIT) == len(target)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return False
            if error.errno == errno.EOPNOTSUPP:  # by tmpfs, which never waits, and by network files
                return _is_in_memory(fd) and os.preadv(fd, [target], at) == len(target)
            raise ReadFailed(f"can't read {len(target)} bytes: {error}") from error

    def next_data(self, fd: int, at: int) -> int:
        """The first position from `at` on that is not a hole, or -1."""
        try:
            return os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return -1
            raise

    def data_ranges(self, fd: int, at: int, end: int) -> list[tuple[int, int]]:
        """The ranges of positions in [at, end) that are not holes."""
        ranges = []
        while at < end:
            begin = self.next_data(fd, at)
            if not 0 <= begin < end:
                break
            at = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
            ranges.append((begin, at))
        return ranges

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_file(self, path: Path) -> None:
        """`sync` for a file that is not open."""
        fd = self.open(path)
        try:
            self.sync(fd)
        finally:
            self.close_file(fd)

    def watch_filesystem(self, path: Path) -> None:
        """Let `sync_filesystem` sync the file system of this directory; before it is written."""
        if self._filesystem < 0 and _syncfs_reports_errors():
            self._filesystem = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def sync_filesystem(self) -> bool:
        """Sync all files and directories of the file system, those of others too.

        False if they may not be durable: the caller then syncs its own one by one, and only their
        errors count.
        """
        return self._filesystem >= 0 and _LIBC.syncfs(self._filesystem) == 0

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    def close_file(self, fd: int) -> None:
        os.close(fd)

    def names(self, path: Path | str) -> list[str]:
        """Names in a directory, sorted; none if it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def stat(self, path: str) -> os.stat_result | None:
        """Length, blocks and times of a file, or None if it does not exist."""
        try:
            return os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def system_id(self, path: Path) -> str:
        """Identifies the running operating system and a directory; empty if that is unknown.

        It changes when the system restarts, and is another one for a copy of the directory.
        """
        try:
            return f"{_BOOT_ID.read_text().strip()}:{path.stat().st_ino}"
        except OSError:
            return ""

    def modified_ms(self, path: Path) -> int:
        """When a file was last written; 0 if it does not exist."""
        try:
            return path.stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return 0

    def space(self, path: Path) -> Space:
        stat = os.statvfs(path)
        used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        return Space(used, stat.f_bavail * stat.f_frsize)

    def read(self, path: Path) -> bytes | None:
        """A small file's content, or None if the file does not exist."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a small file in place, durably but not atomically; `replace` is atomic."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self.file_mode)
        try:
            os.ftruncate(fd, len(data))
            self.write(fd, memoryview(data), 0)
            self.sync(fd)
        finally:
            self.close_file(fd)
        self.sync_directory(path.parent)

    def replace(self, path: Path, data: bytes, *, backup: bool = True) -> None:
        """Replace a file. A crash leaves the old content or the new one.

        The old content is kept as .bak. If the crash comes in between, only that exists. Without
        `backup`, the file itself always exists.
        """
        beside = path.with_name(path.name + ".tmp")
        self.write_file(beside, data)
        if backup and path.exists():
            self.rename(path, path.with_name(path.name + ".bak"))
            self.sync_directory(path.parent)
        self.rename(beside, path)
        self.sync_directory(path.parent)

    def forget(self, path: Path) -> None:
        """Delete a file that `replace` has written, durably; the .bak first, so that no old content
        is left without the new one."""
        for one in (path.with_name(path.name + ".bak"), path):
            if one.exists():
                self.unlink(one)
        self.sync_directory(path.parent)
