"""Very many queues in one store: 2,000 here, 20,000 at the depth of a proof."""

import os
import resource
from pathlib import Path

import pytest

from penstock.config import StoreConfig
from penstock.store.consumequeue import consumequeue
from penstock.store.disk import Disk
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.record import Record
from tests.depth import rounds
from tests.unit.store.conftest import NOW_MS, WatchedDisk, bodies, put, record

PER_TOPIC = 8
TOPICS = rounds(ci=2_000, proof=20_000) // PER_TOPIC
MAPPED_MAX = 100
CONFIG = StoreConfig(
    segment_bytes=32 << 20, index_slots=1000, index_entries=4000, queues_mapped_max=MAPPED_MAX
)


class CountingDisk(Disk):
    """Counts opened files."""

    def __init__(self) -> None:
        super().__init__()
        self.opens = 0

    def create(self, path: Path, size: int) -> int:
        self.opens += 1
        return super().create(path, size)

    def open_to_read(self, path: Path) -> int:
        self.opens += 1
        return super().open_to_read(path)


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def own_kib() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1])
    raise AssertionError("the kernel does not tell")


def send_to_all(store: MessageStore, body: bytes, now_ms: int) -> int:
    """Send a message to each queue; returns the maximum number of open handles."""
    record = Record()
    most = 0
    for topic in range(TOPICS):
        for queue_id in range(PER_TOPIC):
            record.fill(b"t%d" % topic, body)
            record.queue_id = queue_id
            assert store.put(record, now_ms) == PUT_OK, store.writer.fault
        store.publish()
        most = max(most, handles())
    return most


def wait_for_pool(store: MessageStore) -> None:
    store.maintenance.finish()
    store.disk.close()  # waits for submitted work; the next submission makes a new pool


def unmap_queues(store: MessageStore, now_ms: int) -> None:
    for n in range(1, 5):
        store.tick(now_ms + n * 60_000)
        wait_for_pool(store)


@pytest.mark.slow
def test_idle_queues_use_no_handle_and_little_memory(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        _check_generations(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _check_generations(root: Path) -> None:
    before, before_kib = handles(), own_kib()
    store = MessageStore(root, CONFIG, now_ms=NOW_MS)
    files = handles() - before
    most = send_to_all(store, b"first", NOW_MS)
    # The thread pool and a new index file need a handle now and then.
    assert most - before - files <= MAPPED_MAX + 8
    unmap_queues(store, NOW_MS)
    idle = handles() - before - files
    assert idle <= 2
    count = len(store.queues.rows)
    assert count == TOPICS * PER_TOPIC
    print(
        f"\n{count} queues: {most - before - files} handles at most, {idle} idle, "
        f"{(own_kib() - before_kib) * 1024 // count} bytes each"
    )
    store.close()

    disk = CountingDisk()
    again = MessageStore(root, CONFIG, disk=disk, now_ms=NOW_MS)
    wait_for_pool(again)  # the files that it reads ahead
    disk.opens = 0
    woken: list[bytes] = []
    again.on_arrival(lambda queue: woken.append(queue.topic))
    for queue in again.queues.rows:
        assert again.max_offset(queue.topic.decode(), queue.queue_id) == 1
        again.watch(queue)
    assert disk.opens == 0
    send_to_all(again, b"second", NOW_MS)
    assert len(woken) == count
    # The process dies: nothing is closed, and the next start recovers from a crash.
    again.flusher.stop()
    again.disk.close()
    again._lock.release()
    again.maintenance.mapped_queues.unmap_all()

    third = MessageStore(root, CONFIG, now_ms=NOW_MS)
    assert not third.report.clean
    assert len(third.maintenance.mapped_queues) == 0
    for topic in range(0, TOPICS, 7):
        assert bodies(third, f"t{topic}", topic % PER_TOPIC) == [b"first", b"second"]
    assert all(queue.max_offset == 2 for queue in third.queues.rows)
    third.close()


@pytest.mark.parametrize("synced", [True, False], ids=["together", "one by one"])
def test_many_changed_queues_are_synced_together(
    tmp_path: Path, synced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that fails: then each is, so that an error of another program's file is no error."""
    monkeypatch.setattr(consumequeue, "SYNC_SINGLY_MAX", 3)
    disk = WatchedDisk()
    calls = []

    def sync_filesystem() -> bool:
        calls.append(1)
        return synced

    monkeypatch.setattr(disk, "sync_filesystem", sync_filesystem)
    store = MessageStore(tmp_path, CONFIG, disk=disk, now_ms=NOW_MS)
    for number in range(4):
        put(store, record(topic=f"t{number}"))
    store.tick(NOW_MS + 10_000)
    wanted = {tmp_path / "consumequeue" / f"t{number}" / "0" for number in range(4)}
    assert {path.parent for path in disk.synced} & wanted == (set() if synced else wanted)
    assert len(calls) == 1
    disk.synced.clear()
    put(store, record(topic="t0"))
    store.tick(NOW_MS + 20_000)
    assert len(calls) == 1
    assert {path.parent for path in disk.synced} & wanted == {tmp_path / "consumequeue/t0/0"}
    store.close()


def test_the_file_system_is_synced(tmp_path: Path) -> None:
    disk = Disk()
    assert not disk.sync_filesystem(), "which one is not known"
    disk.watch_filesystem(tmp_path)
    assert disk.sync_filesystem()
    disk.close()
