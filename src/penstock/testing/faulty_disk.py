"""For tests: a disk that loses power, fails to sync and runs out of space, driven by a seed.

**The fault model of `FaultyDisk`** (what may be on the disk after `crash`):

* *Content.* A file holds its content at the last `sync`. Each 4 KiB page that has changed since
  then is written, not written, or torn: each of its 512-byte sectors is written or not. Writes into
  mappings can't be intercepted, so changed pages are found by comparing the file with its image.
  Pages may be written early: `write_back` simulates the kernel's writeback at some time, so a
  page on the disk can also be in a state between two syncs.
* *Length.* The file has one of the lengths it had since its last `sync`. An extension is zero until
  its pages are written. `sync` makes length and content durable, but not the name.
* *Names.* A creation, rename, unlink or mkdir is durable after `sync_directory` of its directory.
  Before that, each may be undone, independently of the others. A rename is atomic, and is undone if
  the creation of its source was undone. Files in a directory that was never created do not exist.
  What is created under a name that a directory's rename has freed does not exist without that
  rename, and is not made durable without it.
* *A failed sync* raises EIO and makes nothing durable. The next one works, as on Linux.
* *Space* is taken by `allocate` (and `write`) in blocks of 4 KiB, and returned by `unlink` and
  `truncate`. When none is left, `allocate` fails with ENOSPC. `stores_into_holes` lists pages that
  were written through a mapping without being allocated: on a full disk that is a SIGBUS.

Not modelled: bytes that change without being written (see tests/faults/test_damage.py), torn
sectors, failing reads, a sync of one file that makes others durable.

Nothing runs in the background: `threads` is False, so submitted work runs immediately, and the
flusher runs when a test calls `store.flusher.pump()`.
"""

import errno
import os
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

from penstock.errors import DiskFull
from penstock.store.disk import Disk, Space

PAGE_BYTES = 4096
SECTOR_BYTES = 512
NOT_ON_DISK = frozenset({"lock"})
"""The store's lock file is not created through the disk, and has no meaning after a restart."""

T = TypeVar("T")


class PowerCut(BaseException):
    """The power is lost. It is a BaseException, so that no code handles it as a disk error."""


class _Inode:
    """A file without its names: what is durable of it, and what may become of it."""

    def __init__(self, fd: int, image: bytes, *, fresh: bool) -> None:
        self.fd = fd  # our own descriptor: keeps the inode and its content after an unlink
        self.image = image
        self.lengths = [len(image)]
        self.fresh = fresh
        self.blocks = {n for n, page in enumerate(_pages(image)) if page.strip(b"\0")}

    def __del__(self) -> None:
        os.close(self.fd)

    def content(self) -> bytes:
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)

    def note_length(self) -> None:
        """Record a length that the file has had since its last sync."""
        length = os.fstat(self.fd).st_size
        if self.lengths[-1] != length:
            self.lengths.append(length)

    def make_durable(self, image: bytes) -> None:
        """Set the content that is on the disk."""
        self.image = image
        self.lengths = [len(image)]

    def number(self) -> int:
        return os.fstat(self.fd).st_ino


class _Change(NamedTuple):
    """One change of names: `old` is removed, `new` is added (a file, or None for a directory)."""

    folder: Path
    old: Path | None
    new: Path | None
    what: _Inode | None

    def apply(self, names: dict[Path, _Inode | None]) -> None:
        what = self.what
        if self.old is not None:
            if self.old not in names:
                return  # its creation was undone
            what = names.pop(self.old)
            if self.new is not None and what is None:  # a directory moves with its content
                for path in [path for path in names if self.old in path.parents]:
                    names[self.new / path.relative_to(self.old)] = names.pop(path)
        if self.new is not None:
            names[self.new] = what

    def is_at(self, path: Path) -> bool:
        """Whether something is created or changed at or below this path."""
        mine = self.new or self.old
        return mine is not None and (mine == path or path in mine.parents)

    def moved(self, old: Path, new: Path) -> "_Change":
        """The same change below a directory that was renamed."""

        def move(path: Path) -> Path:
            return new / path.relative_to(old)

        gone = self.old and move(self.old)
        return _Change(move(self.folder), gone, self.new and move(self.new), self.what)


class FaultyDisk(Disk):
    """The files below `root`, and what a power cut would leave of them."""

    threads = False

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.failing = 0  # the number of following syncs that fail
        self.space_left: int | None = None  # bytes; None: no limit
        self.usage = Space(10, 90)  # what `space` returns, independent of the machine's disk
        self.dead = False
        self._steps_left: int | None = None
        self._files: dict[int, _Inode] = {}
        self._names: dict[Path, _Inode | None] = {}
        self._changes: list[_Change] = []
        root.mkdir(parents=True, exist_ok=True)
        for path in sorted(root.rglob("*")):
            self._names[path] = None if path.is_dir() else self._track(path, fresh=False)

    # --- faults

    def cut_after(self, steps: int | None) -> None:
        """Raise PowerCut instead of the change after the next `steps` changes; None: never."""
        self._steps_left = steps

    def write_back(self, rng: Random) -> None:
        """Write some pages to the disk, as the kernel's writeback would."""
        for file in self._files.values():
            now = file.content()
            if now == file.image or rng.random() < 0.5:
                continue
            image = bytearray(file.image[: len(now)].ljust(len(now), b"\0"))
            for at in range(0, len(now), PAGE_BYTES):
                if rng.random() < 0.5:
                    image[at : at + PAGE_BYTES] = now[at : at + PAGE_BYTES]
            file.make_durable(bytes(image))

    def crash(self, target: Path, rng: Random) -> Path:
        """Create in `target` (a new directory) what may be on the disk after a power cut now."""
        names = dict(self._names)
        taken: list[Path] = []  # names of directories whose rename is undone
        for change in self._changes:
            if any(change.is_at(path) for path in taken):
                continue
            if rng.random() < 0.5:
                change.apply(names)
            elif change.new is not None and names.get(change.old or self.root, ...) is None:
                taken += [change.old] if change.old is not None else []
        target.mkdir(parents=True)
        for path, file in sorted(names.items(), key=lambda item: item[0]):
            copy = target / path.relative_to(self.root)
            if not copy.parent.is_dir() or path.name in NOT_ON_DISK:
                continue
            if file is None:
                copy.mkdir()
            else:
                copy.write_bytes(_remains(file, rng))
        return target

    def stores_into_holes(self) -> list[tuple[Path, int]]:
        """(path, page number) of pages written through a mapping that no `allocate` covers.

        Only for files created on this disk: the blocks of older files are not known.
        """
        names = dict(self._names)
        for change in self._changes:
            change.apply(names)
        found = []
        for path, file in names.items():
            if file is None or not file.fresh:
                continue
            for number, page in enumerate(_pages(file.content())):
                if number not in file.blocks and page.strip(b"\0"):
                    found.append((path, number))
        return found

    def _step(self) -> None:
        if self._steps_left is not None:
            self._steps_left -= 1
            self.dead = self.dead or self._steps_left < 0
        if self.dead:
            raise PowerCut

    # --- the interface of Disk

    def make_one_directory(self, path: Path) -> None:
        self._step()
        path.mkdir(self.directory_mode)
        self._changes.append(_Change(path.parent, None, path, None))

    def create(self, path: Path, size: int) -> int:
        fd = self._open_or_make(path)
        if os.fstat(fd).st_size != size:
            self.truncate(fd, size)
        return fd

    def allocate(self, fd: int, at: int, length: int, path: Path) -> None:
        self._step()
        file = self._file(fd)
        if not self._take_space(file, at, length):
            raise DiskFull(f"no space for {length} bytes of {path}")
        super().allocate(fd, at, length, path)
        file.note_length()

    def truncate(self, fd: int, size: int) -> None:
        self._step()
        super().truncate(fd, size)
        file = self._file(fd)
        file.note_length()
        self._return_space(file, {b for b in file.blocks if b * PAGE_BYTES >= size})

    def write(self, fd: int, data: memoryview, at: int) -> None:
        self._step()
        file = self._file(fd)
        if not self._take_space(file, at, len(data)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data, at)
        file.note_length()

    def sync(self, fd: int) -> None:
        self._step()
        self._maybe_fail()
        file = self._file(fd)
        file.make_durable(file.content())

    def sync_filesystem(self) -> bool:
        return False  # the model syncs files and directories one by one

    def sync_directory(self, path: Path) -> None:
        self._step()
        self._maybe_fail()
        done = [c for c in self._changes if c.folder == path or self._frees(c, path)]
        for change in done:
            change.apply(self._names)
        self._changes = [c for c in self._changes if c not in done]

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent, "the model supports renames within one directory only"
        self._step()
        if old.is_dir():  # changes below it that are not durable move to the new name
            self._changes = [
                c.moved(old, new) if old in (c.folder, *c.folder.parents) else c
                for c in self._changes
            ]
        super().rename(old, new)
        self._changes.append(_Change(old.parent, old, new, None))

    def _frees(self, change: _Change, path: Path) -> bool:
        """Whether the change renames a directory whose old name is part of this path."""
        old = change.old
        if old is None or change.new is None or self._names.get(old, ...) is not None:
            return False
        return path == old or old in path.parents

    def remove_directory(self, path: Path) -> None:
        self._step()
        super().remove_directory(path)
        self._changes.append(_Change(path.parent, path, None, None))

    def unlink(self, path: Path) -> None:
        self._step()
        file = self._files[path.stat().st_ino]
        super().unlink(path)
        self._changes.append(_Change(path.parent, path, None, None))
        self._return_space(file, set(file.blocks))

    def write_file(self, path: Path, data: bytes) -> None:
        fd = self._open_or_make(path)
        try:
            self.truncate(fd, len(data))
            self.write(fd, memoryview(data), 0)
            self.sync(fd)
        finally:
            self.close_file(fd)
        self.sync_directory(path.parent)

    def space(self, path: Path) -> Space:
        return self.usage

    # `replace` consists of write_file, rename and sync_directory, each of which is a step here.

    def _open_or_make(self, path: Path) -> int:
        fresh = not path.exists()
        if fresh:
            self._step()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self.file_mode)
        if fresh:
            file = self._track(path, fresh=True)
            self._changes.append(_Change(path.parent, None, path, file))
        return fd

    def _track(self, path: Path, *, fresh: bool) -> _Inode:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file = _Inode(fd, b"" if fresh else path.read_bytes(), fresh=fresh)
        self._files[file.number()] = file
        return file

    def _file(self, fd: int) -> _Inode:
        return self._files[os.fstat(fd).st_ino]

    def _maybe_fail(self) -> None:
        if self.failing > 0:
            self.failing -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _take_space(self, file: _Inode, at: int, length: int) -> bool:
        wanted = set(range(at // PAGE_BYTES, -(-(at + length) // PAGE_BYTES))) - file.blocks
        if self.space_left is not None:
            if len(wanted) * PAGE_BYTES > self.space_left:
                return False
            self.space_left -= len(wanted) * PAGE_BYTES
        file.blocks |= wanted
        return True

    def _return_space(self, file: _Inode, blocks: set[int]) -> None:
        file.blocks -= blocks
        if self.space_left is not None:
            self.space_left += len(blocks) * PAGE_BYTES


def _pages(data: bytes) -> list[bytes]:
    return [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]


def _remains(file: _Inode, rng: Random) -> bytes:
    """What may be on the disk of one file."""
    now = file.content()
    length = rng.choice(file.lengths)
    old = file.image[:length].ljust(length, b"\0")
    new = now[:length].ljust(length, b"\0")
    if old == new:
        return old
    written_share = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
    result = bytearray(old)
    for at in range(0, length, PAGE_BYTES):
        step = SECTOR_BYTES if rng.random() < 0.4 else PAGE_BYTES
        for part in range(at, min(at + PAGE_BYTES, length), step):
            if rng.random() < written_share:
                result[part : part + step] = new[part : part + step]
    return bytes(result)
