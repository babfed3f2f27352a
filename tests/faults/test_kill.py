"""kill -9 at random moments, repeatedly on one store, in both flush modes."""

import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from penstock.store.lookup import key_hash
from penstock.store.store import MessageStore
from penstock.wire.record import RECORD, StoredRecord, java_hash
from tests.depth import rounds
from tests.faults.writer import Ack, small_store

ROOT = Path(__file__).parents[2]
ENTRY = struct.Struct(">qiq")


def write_and_kill(folder: Path, mode: str, seed: int, seconds: float) -> list[Ack]:
    """Run the writer for a while, kill it, and return the messages it had acknowledged."""
    command = [sys.executable, "-m", "tests.faults.writer", str(folder), mode, str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        lines = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            lines.append(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=Ack) for line in lines if line.endswith(b"\n")]


def check(store: MessageStore, acks: list[Ack]) -> None:
    """Every acknowledged message exists, complete and in order, and is found by queue and key."""
    stored = StoredRecord()
    for ack in acks:
        data = store.lookup.record(ack.offset, store.confirm_offset)
        assert data is not None, f"lost {ack}"
        stored.bind(memoryview(bytearray(data)))
        assert stored.read(0, len(data)) == RECORD
        assert stored.check(ack.offset) == RECORD
        assert stored.body_crc == ack.crc
        assert (stored.queue_id, stored.queue_offset) == (ack.queue_id, ack.queue_offset)
        queue = store.queue(ack.topic, ack.queue_id)
        assert queue is not None
        tags_code = java_hash(ack.tags) if ack.tags else 0
        assert queue.entry(ack.queue_offset) == (ack.offset, ack.size, tags_code)
    for ack in acks[:: max(len(acks) // 300, 1)]:
        for key in ack.keys:
            assert store.index is not None
            hits = store.index.find(
                key_hash(ack.topic, key), ack.store_ms - 1000, ack.store_ms + 1000, 1000
            )
            assert ack.offset in hits, f"key {key} of {ack} is not in the index"
            assert len(hits) == len(set(hits)), f"key {key} is indexed twice"


def check_everything(store: MessageStore, acks: list[Ack]) -> int:
    """The whole log and all queues at once; returns how many entries there are."""
    records = walk(store)
    for ack in acks:
        assert records.get(ack.offset) == (
            ack.topic, ack.queue_id, ack.queue_offset, ack.size, ack.crc,
        ), f"lost {ack}"  # fmt: skip
    entries = 0
    for queue in store.queues.rows:
        offset = queue.min_offset
        while offset < queue.max_offset:
            for position, size, _code in ENTRY.iter_unpack(queue.read(offset, 500) or b""):
                expected = (queue.topic.decode(), queue.queue_id, offset, size)
                assert records[position][:4] == expected
                offset += 1
                entries += 1
    assert entries == len(records), "each record has its entry, and only one"
    return entries


def walk(store: MessageStore) -> dict[int, tuple[str, int, int, int, int]]:
    """All records by offset: topic, queue id, queue offset, size, body CRC."""
    records = {}
    stored = StoredRecord()
    for segment in store.log.segments.items:
        stored.bind(segment.view)
        at = 0
        while segment.start + at < store.log.end and stored.read(at, segment.size) == RECORD:
            assert stored.check(segment.start + at) == RECORD
            topic = bytes(segment.view[stored.topic_at : stored.topic_at + stored.topic_length])
            records[segment.start + at] = (
                topic.decode(), stored.queue_id, stored.queue_offset, stored.size, stored.body_crc,
            )  # fmt: skip
            at += stored.size
    stored.release()
    return records


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_acknowledged_messages_survive_kill_9(tmp_path: Path, mode: str) -> None:
    count = rounds(ci=4, proof=50)
    rng = random.Random(f"kill-{mode}")
    acks: list[Ack] = []
    for generation in range(count):
        got = write_and_kill(tmp_path, mode, generation, rng.uniform(0.05, 0.5))
        acks += got
        config = small_store(sync_flush=mode == "sync")
        store = MessageStore(tmp_path, config, now_ms=int(time.time() * 1000))
        assert not store.report.clean
        newest = acks[-20_000:]
        check(store, got)
        check(store, newest[:: max(len(newest) // 500, 1)])
        if generation % 2:  # every other time the next writer finds a store that was closed
            store.close()
        else:
            abandon(store)
    store = MessageStore(
        tmp_path, small_store(sync_flush=mode == "sync"), now_ms=int(time.time() * 1000)
    )
    entries = check_everything(store, acks)
    print(f"{mode}: {count} kills, {len(acks)} acknowledged, {entries} entries, none lost")
    store.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", [0, 110], ids=["size", "body"])
def test_a_flipped_bit_and_kill_9_cost_one_message(tmp_path: Path, place: int) -> None:
    """Also after a second kill -9, of a process that has recovered the store and continued."""
    acks = write_and_kill(tmp_path, "sync", 1, 0.5)
    acknowledged = [range(acks[0].offset, acks[-1].offset + acks[-1].size)]
    victim = next(a for a in acks[len(acks) // 2 :] if a.size > 1500)
    acks.remove(victim)
    flip(tmp_path, victim.offset + place)
    store = MessageStore(tmp_path, small_store(sync_flush=True), now_ms=int(time.time() * 1000))
    assert [d.offset for d in store.report.damage] == [victim.offset]
    abandon(store)
    for generation in (2, 3):
        got = write_and_kill(tmp_path, "sync", generation, 0.2)
        acknowledged.append(range(got[0].offset, got[-1].offset + got[-1].size))
        acks += got
    store = MessageStore(tmp_path, small_store(sync_flush=True), now_ms=int(time.time() * 1000))
    check(store, acks)
    # A recovery that begins behind the damage does not meet it again.
    assert {d.offset for d in store.report.damage} <= {victim.offset}
    # kill -9 may leave half a record, which no producer has an answer for; only that is cut.
    for path in store.paths.truncated.glob("*"):
        begin = int(path.name.partition("-")[0])
        assert all(begin not in offsets[1:] for offsets in acknowledged), f"{path.name} was cut"
    found = store.get(victim.topic, victim.queue_id, victim.queue_offset, wait=True)
    assert found.next_offset > victim.queue_offset
    store.close()


def flip(root: Path, offset: int) -> None:
    """Flip a bit of the log."""
    size = small_store(sync_flush=True).segment_bytes
    with open(root / "commitlog" / f"{offset - offset % size:020d}", "r+b") as file:
        file.seek(offset % size)
        old = file.read(1)[0]
        file.seek(offset % size)
        file.write(bytes([old ^ 1]))


def abandon(store: MessageStore) -> None:
    """Leave a store as a killed process does: nothing is written any more."""
    store.flusher.stop()
    store.disk.close()
    store._lock.release()
