"""Shared by the store's tests: messages, small stores, and a model that knows every byte."""

import contextlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from penstock.config import StoreConfig
from penstock.store.disk import Disk
from penstock.store.get import FOUND
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.layout import BLANK_BYTES, MAGIC_V1
from penstock.wire.output import Output
from penstock.wire.record import Record, java_hash

SEGMENT_BYTES = 16 * 1024
START_MS = 1_700_000_000_000
HEAD = struct.Struct(">iiiiiqqiq8sq8siqi")
EVER_MS = 1 << 42
QueueName = tuple[str, int]


def small_config(*, sync_flush: bool, append_by: str = "auto") -> StoreConfig:
    """Files so small that a few dozen messages fill several of each kind."""
    return StoreConfig(
        segment_bytes=SEGMENT_BYTES, queue_file_entries=50, index_slots=50, index_entries=400,
        sync_flush=sync_flush, append_by=append_by, queue_flush_ms=1000, index_flush_ms=2000,
        queues_mapped_max=2,
    )  # fmt: skip


@dataclass(frozen=True)
class Message:
    """A message of a producer."""

    topic: str
    queue_id: int
    body: bytes
    tags: str = ""
    keys: tuple[str, ...] = ()
    unique: str = ""

    @property
    def queue(self) -> QueueName:
        return self.topic, self.queue_id

    @property
    def all_keys(self) -> tuple[str, ...]:
        return (*self.keys, self.unique) if self.unique else self.keys

    def properties(self) -> bytes:
        named = (("KEYS", " ".join(self.keys)), ("TAGS", self.tags), ("UNIQ_KEY", self.unique))
        return "".join(f"{name}\x01{value}\x02" for name, value in named if value).encode()

    def size(self) -> int:
        return 91 + len(self.body) + len(self.topic) + len(self.properties())

    def record(self) -> Record:
        record = Record()
        record.fill(self.topic.encode(), self.body, self.properties())
        record.queue_id = self.queue_id
        return record


def batch_record(messages: Sequence[Message]) -> Record:
    """A batch of messages of one queue."""
    body = b""
    for message in messages:
        text = message.properties()
        body += struct.pack(
            f">iiiii{len(message.body)}sh", 22 + len(message.body) + len(text), 0, 0, 0,
            len(message.body), message.body, len(text),
        ) + text  # fmt: skip
    record = Record()
    record.fill(messages[0].topic.encode(), body)
    record.queue_id = messages[0].queue_id
    return record


@dataclass(frozen=True)
class Stored:
    """A stored message with its log offset and queue offset."""

    message: Message
    offset: int
    queue_offset: int
    store_ms: int

    @property
    def end(self) -> int:
        return self.offset + self.message.size()

    def entry(self) -> tuple[int, int, int]:
        code = java_hash(self.message.tags) if self.message.tags else 0
        return self.offset, self.message.size(), code

    def data(self) -> bytes:
        """The bytes of the record, encoded independently of the store."""
        m = self.message
        text = m.properties()
        crc = zlib.crc32(m.body) & 0x7FFFFFFF
        head = HEAD.pack(
            m.size(), MAGIC_V1, crc, m.queue_id, 0, self.queue_offset, self.offset, 0, 0, bytes(8),
            self.store_ms, bytes(8), 0, 0, len(m.body),
        )  # fmt: skip
        topic = m.topic.encode()
        return head + m.body + bytes([len(topic)]) + topic + struct.pack(">h", len(text)) + text


@dataclass
class Model:
    """The log as a list: the expected offset of each message."""

    stored: list[Stored] = field(default_factory=list)
    end: int = 0
    store_ms: int = 0
    sizes: dict[QueueName, int] = field(default_factory=dict)

    def put(self, messages: Sequence[Message], now_ms: int) -> list[Stored]:
        """Place messages that are put together (one, or a batch)."""
        self.store_ms = max(self.store_ms, now_ms)
        total = sum(m.size() for m in messages)
        segment_end = self.end - self.end % SEGMENT_BYTES + SEGMENT_BYTES
        if self.end + total + BLANK_BYTES > segment_end:
            self.end = segment_end
        placed = []
        for message in messages:
            number = self.sizes.get(message.queue, 0)
            placed.append(Stored(message, self.end, number, self.store_ms))
            self.sizes[message.queue] = number + 1
            self.end = placed[-1].end
        self.stored += placed
        return placed

    def cut(self, count: int, end: int) -> None:
        """Keep only the first `count` messages."""
        self.stored = self.stored[:count]
        self.end = end
        self.store_ms = self.stored[-1].store_ms if self.stored else 0
        self.sizes = {s.message.queue: s.queue_offset + 1 for s in self.stored}

    def queues(self) -> dict[QueueName, list[Stored]]:
        rows: dict[QueueName, list[Stored]] = {}
        for stored in self.stored:
            rows.setdefault(stored.message.queue, []).append(stored)
        return rows


def random_message(rng: Random, serial: int, queue: QueueName | None = None) -> Message:
    topic, queue_id = queue or (rng.choice(("orders", "sms", "c")), rng.randrange(3))
    length = rng.choice((0, 1, rng.randrange(60), rng.randrange(400), rng.randrange(3001)))
    keys = [f"k{serial}", f"shared{rng.randrange(12)}", "\u4e1c"][: rng.choice((0, 1, 1, 2, 3))]
    return Message(
        topic, queue_id, rng.randbytes(length), rng.choice(("", "a", "b", "vip")), tuple(keys),
        rng.choice(("", f"ID{serial:030d}")),
    )  # fmt: skip


def put(store: MessageStore, messages: Sequence[Message], now_ms: int) -> int:
    """Put one message, or several of one queue as a batch."""
    if len(messages) == 1:
        return store.put(messages[0].record(), now_ms)
    return store.put_batch(batch_record(messages), now_ms)


def put_ok(store: MessageStore, model: Model, messages: Sequence[Message], now_ms: int) -> None:
    """Put, and compare the store's offsets with the model's."""
    placed = model.put(messages, now_ms)
    assert put(store, messages, now_ms) == PUT_OK, store.refusal
    assert (store.writer.offset, store.writer.queue_offset) == (
        placed[0].offset,
        placed[0].queue_offset,
    )


def open_store(root: Path, config: StoreConfig, disk: Disk, now_ms: int = START_MS) -> MessageStore:
    """Open a store; if that fails, nothing stays open in this process."""
    store = MessageStore.__new__(MessageStore)
    try:
        store.__init__(root, config, disk=disk, now_ms=now_ms)  # type: ignore[misc]
    except BaseException:
        _close_flusher(store)
        raise
    return store


def abandon(store: MessageStore) -> None:
    """Do what the end of the process does, and nothing else: files are not changed."""
    if store.disk.threads:
        with contextlib.suppress(OSError):
            store.flusher.stop()
    else:
        _close_flusher(store)
    store.disk.close()
    store._lock.release()


def _close_flusher(store: MessageStore) -> None:
    flusher = getattr(store, "flusher", None)
    if flusher is not None:
        flusher.discard()


def flush(store: MessageStore) -> None:
    """Flush and confirm all messages."""
    store.publish()
    if store.disk.threads:
        store.flusher.demand()
        assert store.flusher.wait(store.log.end, 30)
    else:
        store.flusher.pump()
    store.publish()


def read(store: MessageStore, queue: QueueName, offset: int, count: int = 32) -> list[bytes]:
    """Records of a queue from an offset on, as a consumer receives them."""
    found = store.queue(*queue)
    assert found is not None
    reader = store.new_reader()
    if reader.find(found, offset, count, 1 << 20, store.confirm_offset, True) != FOUND:
        return []
    output = Output()
    assert reader.copy_to(output, True)
    return split(output.take())


def read_all(store: MessageStore, queue: QueueName) -> Iterator[bytes]:
    """Every visible record of a queue."""
    offset = store.min_offset(*queue)
    while offset < store.max_offset(*queue):
        records = read(store, queue, offset)
        assert records, f"nothing at {offset} of {queue}"
        yield from records
        offset += len(records)


def split(data: bytes) -> list[bytes]:
    records = []
    while data:
        (size,) = struct.unpack_from(">i", data)
        assert 91 <= size <= len(data)
        records.append(data[:size])
        data = data[size:]
    return records


def verify(store: MessageStore, model: Model, begin: int = 0) -> None:
    """The store has exactly the model's messages from log offset `begin` on, all visible."""
    assert store.confirm_offset == store.log.end
    rows = model.queues()
    for queue in store.queues.rows:
        name = (queue.topic.decode(), queue.queue_id)
        if name not in rows:
            assert queue.max_offset == queue.min_offset, f"{name} holds messages that never were"
    for name, row in rows.items():
        expected = [s for s in row if s.offset >= begin]
        queue_ = store.queue(*name)
        if queue_ is None:
            assert not expected, f"the queue {name} is gone"
            continue
        assert store.max_offset(*name) == len(row), f"{name} is not dense"
        first = expected[0].queue_offset if expected else len(row)
        assert store.min_offset(*name) <= first, f"{name} begins too late"
        got = list(read_all(store, name))[first - store.min_offset(*name) :]
        assert got == [s.data() for s in expected], f"{name} holds other bytes"
        for stored in expected:
            assert queue_.entry(stored.queue_offset) == stored.entry()
            assert store.lookup.record(stored.offset, store.confirm_offset) == stored.data()
    verify_keys(store, model, begin)


def verify_keys(store: MessageStore, model: Model, begin: int = 0) -> None:
    """Each key finds its messages: the newest 64, oldest first."""
    holders: dict[tuple[str, str], list[bytes]] = {}
    for stored in model.stored:
        for key in stored.message.all_keys:
            holders.setdefault((stored.message.topic, key), []).append(
                stored.data() if stored.offset >= begin else b""
            )
    for (topic, key), expected in holders.items():
        found = store.lookup.by_key(
            topic, key, begin_ms=0, end_ms=EVER_MS, most=64, confirm_offset=store.confirm_offset
        )
        wanted = [data for data in expected[-64:] if data]
        assert found[len(found) - len(wanted) :] == wanted, f"the key {topic}#{key}"


class CrashError(Exception):
    """The process ends here."""


class CrashingDisk(Disk):
    """Ends the process at one of its steps that change names."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def _step(self) -> None:
        if self.steps == 0:
            raise CrashError
        self.steps -= 1

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)
