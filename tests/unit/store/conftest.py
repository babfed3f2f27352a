"""Shared by the store's unit tests: small stores, records, and a disk that records its calls."""

import errno
import os
import select
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.config import StoreConfig
from penstock.errors import DiskFull
from penstock.store.disk import Disk, Space
from penstock.store.flusher import Flusher
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.record import Record

NOW_MS = 1_700_000_000_000
SEGMENT_BYTES = 4096
FIXED_BYTES = 92  # of a record of topic "t" without properties and body
EVER_MS = 1 << 42
WAIT_SECONDS = 60  # for a thread of the store; never reached

T = TypeVar("T")


def nowhere(path: Path) -> bool:
    return False


class WatchedDisk(Disk):
    """The real files without threads; notes what is opened, synced and deleted, and fails at will.

    `no_space` and `sync_fails` tell by a path whether allocating or syncing fails there.
    """

    threads = False

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Path] = []
        self.synced: list[Path] = []
        self.deleted: list[Path] = []
        self.no_space: Callable[[Path], bool] = nowhere
        self.sync_fails: Callable[[Path], bool] = nowhere
        self.usage = Space(10, 90)

    def create(self, path: Path, size: int) -> int:
        self.opened.append(path)
        return super().create(path, size)

    def open(self, path: Path) -> int:
        self.opened.append(path)
        return super().open(path)

    def open_to_read(self, path: Path) -> int:
        self.opened.append(path)
        return super().open_to_read(path)

    def allocate(self, fd: int, at: int, length: int, path: Path) -> None:
        if self.no_space(path):
            raise DiskFull(f"no space for {length} bytes of {path}")
        super().allocate(fd, at, length, path)

    def sync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.sync_fails(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.synced.append(path)
        super().sync(fd)

    def unlink(self, path: Path) -> None:
        self.deleted.append(path)
        super().unlink(path)

    def space(self, path: Path) -> Space:
        return self.usage


def small_config(**changes: Any) -> StoreConfig:
    """Files so small that a few messages fill them."""
    sizes: dict[str, Any] = {
        "segment_bytes": SEGMENT_BYTES, "queue_file_entries": 8, "index_slots": 16,
        "index_entries": 40,
    }  # fmt: skip
    return StoreConfig(**{**sizes, **changes})


def properties(*, tags: str = "", keys: str = "", unique: str = "") -> bytes:
    named = (("KEYS", keys), ("TAGS", tags), ("UNIQ_KEY", unique))
    return "".join(f"{name}\x01{value}\x02" for name, value in named if value).encode()


def record(
    body: bytes = b"x", topic: str = "t", queue_id: int = 0, text: bytes = b"", sys_flag: int = 0
) -> Record:
    """A message of a producer."""
    made = Record()
    made.fill(topic.encode(), body, text)
    made.queue_id = queue_id
    made.sys_flag = sys_flag
    return made


def sized(size: int, queue_id: int = 0) -> Record:
    """A message of topic "t" whose record has this many bytes."""
    made = record(b"s" * (size - FIXED_BYTES), queue_id=queue_id)
    assert made.prepare() == 0
    assert made.size == size
    return made


def batch(bodies: Sequence[bytes], topic: str = "t", text: bytes = b"") -> Record:
    """A batch of messages of one queue."""
    parts = [
        struct.pack(
            f">iiiii{len(b)}sh", 22 + len(b) + len(text), 0, 0, 0, len(b), b, len(text)
        ) + text
        for b in bodies
    ]  # fmt: skip
    return record(b"".join(parts), topic)


def split(data: bytes) -> list[bytes]:
    """The records in consecutive bytes."""
    records = []
    while data:
        (size,) = struct.unpack_from(">i", data)
        records.append(data[:size])
        data = data[size:]
    return records


def body_of(data: bytes) -> bytes:
    """The body of a record with IPv4 hosts."""
    (length,) = struct.unpack_from(">i", data, 84)
    return data[88 : 88 + length]


class StoreFixture:
    """Opens stores below one directory and closes them at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: list[MessageStore] = []

    def open(
        self, disk: Disk | None = None, *, now_ms: int = NOW_MS, root: Path | None = None,
        **changes: Any,
    ) -> MessageStore:  # fmt: skip
        store = MessageStore(
            root or self.root, small_config(**changes), disk=disk or WatchedDisk(), now_ms=now_ms
        )
        self._open.append(store)
        return store

    def close(self, store: MessageStore) -> None:
        self._open.remove(store)
        store.close()

    def crash(self, store: MessageStore) -> None:
        """Do what the end of a process does: files are not changed."""
        self._open.remove(store)
        if store.disk.threads:
            store.flusher.stop()
        else:
            os.close(store.flusher.wake_fd)
            os.close(store.flusher.notify_fd)
        store.disk.close()
        store._lock.release()

    def end(self) -> None:
        for store in list(self._open):
            self.crash(store)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[StoreFixture]:
    made = StoreFixture(tmp_path / "store")
    yield made
    made.end()


def put(store: MessageStore, *records: Record, now_ms: int = NOW_MS) -> list[int]:
    """Put messages and end the loop iteration; returns their log offsets."""
    offsets = []
    for made in records:
        assert store.put(made, now_ms) == PUT_OK, store.refusal
        offsets.append(store.writer.offset)
    store.publish()
    return offsets


def flush(store: MessageStore) -> None:
    """Flush and confirm all messages."""
    store.publish()
    store.flusher.pump()
    store.publish()


def reached(flusher: Flusher, offset: int) -> bool:
    """Wait for the flusher thread: True when the log is flushed up to here, False if it failed."""
    poll = select.poll()
    poll.register(flusher.notify_fd, select.POLLIN)
    while flusher.flushed() < offset and not flusher.failed():
        assert poll.poll(WAIT_SECONDS * 1000), "the flusher is silent"
        flusher.acknowledge()
    return flusher.flushed() >= offset


def bodies(
    store: MessageStore, topic: str = "t", queue_id: int = 0, offset: int = 0
) -> list[bytes]:
    """The bodies of all visible messages of a queue from an offset on."""
    found = []
    while offset < store.max_offset(topic, queue_id):
        got = store.get(topic, queue_id, offset, wait=True)
        assert got.count, f"nothing at {offset}: status {got.status}"
        found += [body_of(data) for data in split(got.data)]
        offset = got.next_offset
    return found
