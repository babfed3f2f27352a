"""A process that writes messages until it is killed, and prints what was acknowledged.

    python -m tests.faults.writer DIR sync|async SEED

One JSON line per acknowledged message. Acknowledged means: below the confirmed offset.
"""

import random
import sys
import time
import zlib
from pathlib import Path

import msgspec

from penstock.config import StoreConfig
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.record import Record

TOPICS = ("orders", "payments", "a-topic-with-a-long-name")
QUEUES = 3
TAGS = ("", "red", "green", "blue")


def small_store(*, sync_flush: bool) -> StoreConfig:
    """A store whose files are so small that each kind is rolled within a second."""
    return StoreConfig(
        segment_bytes=1 << 20, queue_file_entries=500, index_slots=500, index_entries=5000,
        sync_flush=sync_flush, queue_flush_ms=50, index_flush_ms=150, flush_interval_ms=20,
    )  # fmt: skip


class Ack(msgspec.Struct):
    """An acknowledged message."""

    topic: str
    queue_id: int
    queue_offset: int
    offset: int
    size: int
    crc: int
    tags: str
    keys: list[str]
    store_ms: int


def main() -> None:
    root, mode, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rng = random.Random(seed)
    store = MessageStore(
        root, small_store(sync_flush=mode == "sync"), now_ms=int(time.time() * 1000)
    )
    record = Record()
    record.store_host = bytes((127, 0, 0, 1, 0, 0, 42, 159))
    print("ready", flush=True)
    number = 0
    while True:
        now_ms = int(time.time() * 1000)
        put: list[Ack] = []
        for _ in range(rng.randint(1, 20)):
            number += 1
            put.append(_put(store, record, rng, f"{seed}-{number}", now_ms))
        store.publish()
        if mode == "sync":
            store.flusher.wait(store.log.end, 30)
            store.publish()
        assert all(ack.offset + ack.size <= store.confirm_offset for ack in put)
        sys.stdout.buffer.write(b"".join(msgspec.json.encode(a) + b"\n" for a in put))
        sys.stdout.buffer.flush()
        store.tick(now_ms)


def _put(store: MessageStore, record: Record, rng: random.Random, name: str, now_ms: int) -> Ack:
    topic, tags = rng.choice(TOPICS), rng.choice(TAGS)
    body = rng.randbytes(rng.choice((0, 7, 100, 1500)))
    keys = [name, f"{name}-again"][: rng.randint(0, 2)]
    properties = f"UNIQ_KEY\x01U{name}\x02"
    if tags:
        properties += f"TAGS\x01{tags}\x02"
    if keys:
        properties += f"KEYS\x01{' '.join(keys)}\x02"
    record.fill(topic.encode(), body, properties.encode())
    record.queue_id = rng.randrange(QUEUES)
    status = store.put(record, now_ms)
    assert status == PUT_OK, (status, store.refusal)
    path = store.writer
    return Ack(
        topic, record.queue_id, path.queue_offset, path.offset, record.size,
        zlib.crc32(body) & 0x7FFFFFFF, tags, [*keys, f"U{name}"], path.store_ms,
    )  # fmt: skip


if __name__ == "__main__":
    main()
