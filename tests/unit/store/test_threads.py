"""Concurrent readers, writer and retention with real threads and files."""

import threading
from pathlib import Path

import pytest

from penstock.config import StoreConfig
from penstock.store.get import COLD, FOUND
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.message import decode_messages
from penstock.wire.record import Record
from tests.depth import rounds

NOW_MS = 1_700_000_000_000
QUEUES = 3
READERS = 3


class Readers:
    """Threads that read anywhere in the queues and check the offset of each record."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store
        self.stop = threading.Event()
        self.failures: list[BaseException] = []
        self.found = 0
        self.threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(READERS)
        ]

    def _run(self, number: int) -> None:
        try:
            step = number
            while not self.stop.is_set():
                step = (step * 31 + 17) % 9973
                self._read(step % QUEUES, step)
        except BaseException as error:
            self.failures.append(error)
            raise

    def _read(self, queue_id: int, step: int) -> None:
        store = self.store
        queue = store.queue("t", queue_id)
        assert queue is not None
        low = queue.min_offset
        offset = low + step % max(queue.max_offset - low, 1)
        got = store.get("t", queue_id, offset, wait=True)
        assert got.status != COLD
        if got.status == FOUND:
            self.found += 1
            for message in decode_messages(got.data):
                assert message.queue_id == queue_id
                assert message.queue_offset >= offset
                assert message.body == b"%d" % message.queue_offset
        store.lookup.offset_at(queue, NOW_MS + step, confirm_offset=store.confirm_offset)


@pytest.mark.slow
def test_pool_readers_writer_and_retention_run_concurrently(tmp_path: Path) -> None:
    config = StoreConfig(
        segment_bytes=16 * 1024, queue_file_entries=50, index_slots=50, index_entries=400,
        sync_flush=True, queues_mapped_max=QUEUES - 1, queue_rest_ms=1,
    )  # fmt: skip
    store = MessageStore(tmp_path, config, now_ms=NOW_MS)
    for queue_id in range(QUEUES):
        store.make_queue(b"t", queue_id)
    readers = Readers(store)
    record = Record()
    for thread in readers.threads:
        thread.start()
    try:
        for number in range(rounds(ci=4000, proof=40000)):
            record.fill(b"t", b"%d" % (number // QUEUES), b"KEYS\x01k%d\x02" % number)
            record.queue_id = number % QUEUES
            assert store.put(record, NOW_MS + number) == PUT_OK, store.refusal
            if number % 7 == 0:
                store.publish()
            if number % 50 == 0:
                store.tick(NOW_MS + 100 * number)
            if len(store.log.segments.items) > 6:
                store.expire(2)
    finally:
        readers.stop.set()
        for thread in readers.threads:
            thread.join()
    assert readers.failures == []
    assert readers.found > 0
    store.close()
