"""Messages per second that pulls gather, from queue entries to response bytes.

Neighbouring: one queue, so its records are next to each other in the log and merge into one range.
Scattered: eight queues in turn, so every record is a range of its own. The plain Python version
reads the same entries with struct and joins slices.
"""

import struct
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import penstock
from penstock.config import StoreConfig
from penstock.store.get import FOUND
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.output import Output
from penstock.wire.record import Record

MESSAGES = 200_000 if penstock.compiled() else 20_000
BATCH = 32
_ENTRY = struct.Struct(">qiq")


def filled(folder: Path, queues: int) -> MessageStore:
    store = MessageStore(folder, StoreConfig(index_enabled=False), now_ms=1)
    record = Record()
    record.fill(b"BenchTopic", b"x" * 128, b"TAGS\x01TagA\x02")
    for i in range(MESSAGES):
        record.queue_id = i % queues
        assert store.put(record, 1) == PUT_OK
    store.publish()
    return store


def gather(store: MessageStore) -> float:
    queue = store.queue("BenchTopic", 0)
    assert queue is not None
    output, reader, confirm_offset = Output(1 << 16), store.reader, store.confirm_offset
    count = offset = 0
    started = time.thread_time()
    while reader.find(queue, offset, BATCH, 1 << 18, confirm_offset) == FOUND:
        assert reader.copy_to(output)
        output.length = 0
        count += reader.count
        offset = reader.next_offset
    return count / (time.thread_time() - started)


def plain(store: MessageStore) -> float:
    queue = store.queue("BenchTopic", 0)
    assert queue is not None
    segment = store.log.segments.items[0]
    view = memoryview(segment.view)
    count = offset = 0
    started = time.thread_time()
    while entries := queue.read(offset, BATCH):
        found = []
        for at in range(0, len(entries), 20):
            position, size, _tag = _ENTRY.unpack_from(entries, at)
            found.append(view[position : position + size])
        b"".join(found)
        count += len(found)
        offset += len(found)
    return count / (time.thread_time() - started)


def main() -> None:
    table = Table(title=f"read gather: messages per second of one core ({BATCH} per pull)")
    for column in ("records", "messages/s", "target", "plain CPython", "ratio"):
        table.add_column(column, justify="left" if column == "records" else "right")
    for title, queues, target in (("neighbouring", 1, "≥ 2,000,000"), ("scattered", 8, "")):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            store = filled(Path(folder), queues)
            best = max(gather(store) for _ in range(5))
            peer = max(plain(store) for _ in range(3))
            table.add_row(title, f"{best:,.0f}", target, f"{peer:,.0f}", f"{best / peer:.1f}x")
            store.close()
    Console().print(table)


if __name__ == "__main__":
    main()
