"""Append, queue entry and index entries in one call; batches, refusals, visibility."""

import contextlib
import errno
import os
import struct
from pathlib import Path

import pytest

from penstock.errors import DiskFull, StoreError, WriteStopped
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import ILLEGAL, PUT_OK, REFUSED
from penstock.wire import record as records
from penstock.wire.record import java_hash
from tests.unit.store.conftest import (
    EVER_MS,
    NOW_MS,
    SEGMENT_BYTES,
    StoreFixture,
    WatchedDisk,
    batch,
    bodies,
    flush,
    properties,
    put,
    record,
    sized,
)


def find(bench_store, topic: str, key: str) -> int:  # type: ignore[no-untyped-def]
    return len(
        bench_store.lookup.by_key(
            topic,
            key,
            begin_ms=0,
            end_ms=EVER_MS,
            most=64,
            confirm_offset=bench_store.confirm_offset,
        )
    )


def test_a_put_assigns_log_and_queue_offsets(stores: StoreFixture) -> None:
    store = stores.open()
    assert put(store, sized(100), sized(150), sized(100, queue_id=1)) == [0, 100, 250]
    assert (store.writer.offset, store.writer.queue_offset, store.writer.puts) == (250, 0, 3)
    assert store.writer.put_bytes == store.log.end == 350
    queue = store.queue("t", 0)
    assert queue is not None
    assert [queue.entry(n) for n in (0, 1)] == [(0, 100, 0), (100, 150, 0)]


def test_the_entry_carries_the_tag_hash(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(text=properties(tags="vip")), record(text=properties(tags="中文")))
    queue = store.queue("t", 0)
    assert queue is not None
    assert [queue.entry(n)[2] for n in (0, 1)] == [java_hash("vip"), java_hash("中文")]  # type: ignore[index]


def test_the_entry_of_a_delayed_message_carries_its_time(stores: StoreFixture) -> None:
    for end in (stores.crash, stores.close):
        store = stores.open()
        if end == stores.crash:
            delayed = {"topic": "SCHEDULE_TOPIC_XXXX", "text": properties(tags="vip")}
            put(store, record(queue_id=1, **delayed), record(queue_id=17, **delayed))  # type: ignore[arg-type]
        entries = [store.queue("SCHEDULE_TOPIC_XXXX", n).entry(0) for n in (1, 17)]  # type: ignore[union-attr]
        assert [e and e[2] - NOW_MS for e in entries] == [5000, 2 * 3_600_000]
        end(store)


def test_keys_unique_ids_and_tags_are_indexed(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(text=properties(keys="a  b c", unique="ID7", tags="vip")))
    assert [find(store, "t", k) for k in ("a", "b", "c", "ID7", "T#vip")] == [1, 1, 1, 1, 1]
    assert [find(store, "t", k) for k in ("", "a b", "vip", "d")] == [0, 0, 0, 0]
    assert find(store, "u", "a") == 0


def test_tags_are_indexed_only_if_enabled(stores: StoreFixture) -> None:
    store = stores.open(index_tags=False)
    put(store, record(text=properties(keys="a", tags="vip")))
    assert (find(store, "t", "a"), find(store, "t", "T#vip")) == (1, 0)


def test_without_an_index_nothing_is_found_by_key(stores: StoreFixture) -> None:
    store = stores.open(index_enabled=False)
    put(store, record(text=properties(keys="a")))
    assert find(store, "t", "a") == 0
    assert not store.paths.index.exists()


@pytest.mark.parametrize(
    ("transaction", "queued", "indexed"), [(0, 1, 1), (4, 0, 1), (8, 1, 1), (12, 0, 0)]
)
def test_half_messages_have_no_entry_and_rollbacks_no_key(
    stores: StoreFixture, transaction: int, queued: int, indexed: int
) -> None:
    store = stores.open()
    put(store, record(text=properties(keys="k"), sys_flag=transaction))
    assert store.max_offset("t", 0) == queued
    assert find(store, "t", "k") == indexed
    assert store.log.end > 0
    assert store.writer.queue_offset == 0


def test_store_time_never_goes_back(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(), now_ms=NOW_MS)
    put(store, record(), now_ms=NOW_MS - 5000)
    assert [store.lookup.store_ms(o) for o in (0, 93)] == [NOW_MS, NOW_MS]


@pytest.mark.parametrize(
    ("body", "topic", "text", "problem"),
    [
        (b"x" * 11, "t", b"", records.BODY_TOO_LONG),
        (b"", "t", b"x" * 32768, records.PROPERTIES_TOO_LONG),
        (b"", "t" * 256, b"", records.TOPIC_TOO_LONG),
        (b"", "", b"", records.TOPIC_EMPTY),
    ],
)
def test_messages_beyond_a_limit_are_refused(
    stores: StoreFixture, body: bytes, topic: str, text: bytes, problem: int
) -> None:
    store = stores.open(segment_bytes=1 << 17)
    made = record(body, topic, text=text)
    made.body_bytes_max = 10
    assert store.put(made, NOW_MS) == ILLEGAL
    assert (store.writer.problem, store.log.end, store.refusal) == (problem, 0, None)


def test_a_message_larger_than_a_segment_is_refused_and_the_next_is_stored(
    stores: StoreFixture,
) -> None:
    store = stores.open()
    assert store.put(sized(SEGMENT_BYTES - 7), NOW_MS) == ILLEGAL
    assert store.put_batch(batch([b"x" * 2000] * 2), NOW_MS) == ILLEGAL
    assert (store.writer.problem, store.log.end) == (records.TOO_LONG_FOR_SEGMENT, 0)
    assert put(store, sized(SEGMENT_BYTES - 8)) == [0]


@pytest.mark.parametrize(
    ("topic", "queue_id"), [("../../x", 0), ("a b", 0), ("t", -1), ("t", 1 << 20), ("t\0", 0)]
)
def test_an_invalid_topic_or_queue_id_creates_no_queue(
    stores: StoreFixture, topic: str, queue_id: int
) -> None:
    store = stores.open()
    assert store.put(record(topic=topic, queue_id=queue_id), NOW_MS) != PUT_OK
    assert (store.log.end, store.queues.rows) == (0, [])


def test_a_batch_is_stored_message_by_message(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(b"0"))
    assert store.put_batch(batch([b"1", b"22", b""], text=properties(tags="v")), NOW_MS) == PUT_OK
    assert (store.writer.offset, store.writer.queue_offset) == (93, 1)
    store.publish()
    assert bodies(store) == [b"0", b"1", b"22", b""]


def test_a_batch_is_never_split_over_segments(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, sized(3000))
    assert store.put_batch(batch([b"x" * 400, b"y" * 400, b"z" * 400]), NOW_MS) == PUT_OK
    store.publish()
    assert store.writer.offset == SEGMENT_BYTES
    assert bodies(store)[1:] == [b"x" * 400, b"y" * 400, b"z" * 400]


BROKEN = {
    "empty": b"",
    "short": bytes(21),
    "total too long": struct.pack(">iiiiih", 23, 0, 0, 0, 0, 0),
    "total too small": struct.pack(">iiiiih", 21, 0, 0, 0, 0, 0),
    "body beyond": struct.pack(">iiiiih", 22, 0, 0, 0, 1, 0),
    "negative body": struct.pack(">iiiiih", 22, 0, 0, 0, -1, 0),
    "negative text": struct.pack(">iiiiih", 22, 0, 0, 0, 0, -1),
    "good, then half": struct.pack(">iiiiih", 22, 0, 0, 0, 0, 0) + b"\0\0",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_a_broken_batch_stores_nothing(stores: StoreFixture, body: bytes) -> None:
    store = stores.open()
    assert store.put_batch(record(body), NOW_MS) == ILLEGAL
    assert (store.writer.problem, store.log.end) == (records.BATCH_BROKEN, 0)


def test_a_batch_with_one_message_beyond_a_limit_stores_nothing(stores: StoreFixture) -> None:
    store = stores.open()
    made = batch([b"fits", b"does not fit"])
    made.body_bytes_max = 10
    assert store.put_batch(made, NOW_MS) == ILLEGAL
    assert (store.writer.problem, store.log.end) == (records.BODY_TOO_LONG, 0)


def test_mapping_and_pwrite_give_the_same_store(tmp_path: Path) -> None:
    stores = StoreFixture(tmp_path)
    content = []
    for way in ("mapping", "pwrite"):
        store = stores.open(root=tmp_path / way, append_by=way)
        for n in range(40):
            text = properties(keys=f"k{n}", tags="ab"[n % 2])
            put(store, record(bytes([n]) * (n * 41 % 500), text=text, queue_id=n % 3))
        stores.close(store)
        files = [p for p in sorted((tmp_path / way).rglob("*")) if p.name.isdigit() and p.is_file()]
        content.append([(p.relative_to(tmp_path / way), p.read_bytes()) for p in files])
    assert len(content[0]) > 8
    assert content[0] == content[1]


@pytest.mark.parametrize("part", ["commitlog", "consumequeue", "index"])
def test_a_full_disk_refuses_before_anything_is_written(stores: StoreFixture, part: str) -> None:
    disk = WatchedDisk()
    store = stores.open(disk)
    disk.no_space = lambda path: part in path.parts
    stored = 0
    while store.put(sized(150), NOW_MS) == PUT_OK:
        stored += 1
        store.publish()
    assert isinstance(store.refusal, DiskFull)
    assert part in str(store.refusal)
    assert len(bodies(store)) == store.max_offset("t", 0) == stored
    assert store.put(sized(100), NOW_MS) == REFUSED
    disk.no_space = lambda path: False
    store.tick(NOW_MS + 1000)
    put(store, sized(150))
    assert store.max_offset("t", 0) == stored + 1


@pytest.mark.parametrize("part", ["consumequeue", "index"])
def test_a_full_disk_in_the_middle_of_a_batch_stores_nothing(
    stores: StoreFixture, part: str
) -> None:
    disk = WatchedDisk()
    store = stores.open(disk, queue_file_entries=8, index_entries=8)
    text = properties(keys="k")
    put(store, *[record(b"x", text=text) for _ in range(6)])
    before = store.log.end
    disk.no_space = lambda path: part in path.parts
    assert store.put_batch(batch([b"y"] * 4, text=text), NOW_MS) == REFUSED
    store.publish()
    assert (store.log.end, store.max_offset("t", 0)) == (before, 6)


def test_a_message_with_more_keys_than_reserved_index_entries(stores: StoreFixture) -> None:
    store = stores.open(index_entries=2000)
    put(store, record(text=properties(keys=" ".join(f"k{n}" for n in range(300)))))
    assert [find(store, "t", f"k{n}") for n in (0, 150, 299)] == [1, 1, 1]


# --- the confirm offset


def test_async_flush_shows_a_message_at_the_end_of_the_loop_iteration(stores: StoreFixture) -> None:
    store = stores.open()
    store.put(record(), NOW_MS)
    assert store.max_offset("t", 0) == 0
    store.publish()
    assert store.max_offset("t", 0) == 1


def test_sync_flush_shows_a_message_when_it_is_flushed(stores: StoreFixture) -> None:
    store = stores.open(sync_flush=True)
    put(store, *[record() for _ in range(10)])
    assert (store.confirm_offset, store.max_offset("t", 0)) == (0, 0)
    flush(store)
    assert (store.confirm_offset, store.max_offset("t", 0)) == (store.log.end, 10)
    put(store, *[record() for _ in range(10)])
    assert store.max_offset("t", 0) == 10


@pytest.mark.parametrize("sync_flush", [False, True])
def test_a_watched_queue_notifies_once_when_messages_are_visible(
    stores: StoreFixture, sync_flush: bool
) -> None:
    store = stores.open(sync_flush=sync_flush)
    heard: list[tuple[int, int]] = []

    def hear(queue: ConsumeQueue) -> None:
        heard.append((queue.queue_id, queue.visible_max(store.confirm_offset)))

    store.on_arrival(hear)
    put(store, record(), record(queue_id=1))
    flush(store)
    assert heard == []
    for queue in store.queues.rows:
        store.watch(queue)
        store.watch(queue)
    store.put(record(), NOW_MS)
    store.put(record(), NOW_MS)
    assert heard == []
    flush(store)
    assert heard == [(0, 3)]
    put(store, record())
    flush(store)
    assert heard == [(0, 3)]


def test_a_message_being_flushed_notifies_a_later_watch(stores: StoreFixture) -> None:
    store = stores.open(sync_flush=True)
    heard: list[int] = []
    store.on_arrival(lambda queue: heard.append(queue.queue_id))
    put(store, record())
    queue = store.queue("t", 0)
    assert queue is not None
    assert store.max_offset("t", 0) == 0  # a consumer finds nothing, so it waits
    store.watch(queue)
    flush(store)
    assert heard == [0]


def test_a_failed_sync_stops_writes_and_is_reported(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    disk = WatchedDisk()
    store = stores.open(disk, sync_flush=True)
    put(store, record())
    disk.sync_fails = lambda path: "commitlog" in path.parts
    flush(store)
    assert isinstance(store.refusal, WriteStopped)
    assert "Input/output error" in str(store.refusal)
    assert "Input/output error" in caplog.text
    assert store.put(record(), NOW_MS) == REFUSED
    assert store.max_offset("t", 0) == 0
    store.tick(NOW_MS + 1000)
    assert store.put(record(), NOW_MS) == REFUSED


def test_a_failed_write_refuses_the_put(
    stores: StoreFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = WatchedDisk()
    store = stores.open(disk, append_by="pwrite")

    def fail(fd: int, data: memoryview, at: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store.put(record(), NOW_MS)
    monkeypatch.setattr(disk, "write", fail)
    with contextlib.suppress(OSError, StoreError):
        store.publish()
    assert store.confirm_offset == 0
    monkeypatch.undo()
    store.publish()
    assert bodies(store) == [b"x"]
