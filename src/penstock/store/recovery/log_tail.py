"""The log's tail: what a recovery does with its bytes.

`rewrite` is for the part that stays.

Before the rest is cut, what is not zero is saved in a file, durably.

The files are in `penstock.truncated/`, named by the log offset and the number of bytes. A crash
between saving and cutting is harmless: the next recovery finds the same bytes, and the same file.
"""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.errors import DiskFull
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk
from penstock.store.segment import NAME_DIGITS, Segment

_PIECE_BYTES = 1024 * 1024


def save_tail(
    disk: Disk, paths: StorePaths, segments: Iterable[Segment], begin: int, end: int
) -> Path:
    """Save the log bytes [begin, end) and return the file. Raises DiskFull: nothing is cut then."""
    items = list(segments)
    disk.make_directory(paths.truncated)
    path = _free_name(disk, paths.truncated, items, begin, end)
    if path.exists():
        return path
    beside = path.with_name(path.name + ".tmp")
    fd = disk.create(beside, end - begin)
    try:
        for offset, data in _pieces(disk, items, begin, end):
            if any(data):
                disk.write(fd, memoryview(data), offset - begin)
        disk.sync(fd)
    except (DiskFull, OSError) as error:
        disk.unlink(beside)
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"the log must be truncated at offset {begin}, and there is no space to save the "
            f"{end - begin} bytes behind it in {path}",
            hint="free disk space and start again; nothing has been changed",
        ) from error
    finally:
        disk.close_file(fd)
    disk.rename(beside, path)
    disk.sync_directory(paths.truncated)
    return path


def rewrite(disk: Disk, segments: Iterable[Segment], begin: int, end: int) -> None:
    """Write the log bytes [begin, end) again, so that the next sync brings them to the disk.

    After an fsync that failed, the kernel takes the pages for clean: they can be read, and the next
    fsync succeeds without writing them. The process that noticed may have been killed at once.
    """
    for segment in segments:
        at, stop = max(begin, segment.start), min(end, segment.start + segment.size)
        for offset, data in _pieces(disk, [segment], at, stop):
            disk.write(segment.fd, memoryview(data), offset - segment.start)


def _free_name(disk: Disk, folder: Path, segments: list[Segment], begin: int, end: int) -> Path:
    """A new name, or that of a file with these bytes."""
    name = f"{begin:0{NAME_DIGITS}d}-{end - begin}"
    path, number = folder / name, 1
    while path.exists() and not _holds(disk, path, segments, begin, end):
        number += 1
        path = folder / f"{name}.{number}"
    return path


def _holds(disk: Disk, path: Path, segments: list[Segment], begin: int, end: int) -> bool:
    if disk.size(path) != end - begin:
        return False
    fd = disk.open_to_read(path)
    try:
        return all(
            disk.read_at(fd, len(data), offset - begin) == data
            for offset, data in _pieces(disk, segments, begin, end)
        )
    finally:
        disk.close_file(fd)


def _pieces(
    disk: Disk, segments: list[Segment], begin: int, end: int
) -> Iterator[tuple[int, bytes]]:
    """The bytes with their log offsets."""
    for segment in segments:
        offset = max(begin, segment.start)
        stop = min(end, segment.start + segment.size)
        while offset < stop:
            length = min(_PIECE_BYTES, stop - offset)
            data = disk.read_at(segment.fd, length, offset - segment.start)
            if not data:
                break
            yield offset, data
            offset += len(data)
