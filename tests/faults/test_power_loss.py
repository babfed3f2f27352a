"""Power cuts at any moment: acknowledged messages survive, and what survives is correct.

Each seed is one history on a `FaultyDisk`: random work, a power cut (between two calls or inside
one, recovery included), recovery from what the disk kept, and on from there for several
generations. The model knows the place and the bytes of every message; after each recovery the log
must be a prefix of it that holds everything that was promised, and queues and index must follow
from the log.
"""

from pathlib import Path
from random import Random

import pytest

from penstock.store.store import MessageStore
from penstock.testing import FaultyDisk, PowerCut
from tests.depth import rounds
from tests.store_kit import (
    SEGMENT_BYTES,
    START_MS,
    Message,
    Model,
    abandon,
    flush,
    open_store,
    put_ok,
    random_message,
    read,
    small_config,
    verify,
)

GENERATIONS = 4
WORK = ("put",) * 45 + ("batch",) * 10 + ("publish",) * 15 + ("flush",) * 8 + ("tick",) * 10 + (
    "write back", "write back", "write back", "read", "read", "expire", "die",
)  # fmt: skip


class History:
    """One store through several power cuts."""

    def __init__(self, seed: int, folder: Path, *, sync_flush: bool) -> None:
        self.rng = Random(seed)
        self.folder = folder
        self.sync_flush = sync_flush
        append_by = self.rng.choice(("auto", "mapping", "pwrite"))
        self.config = small_config(sync_flush=sync_flush, append_by=append_by)
        self.model = Model()
        self.now_ms = START_MS
        self.serial = 0
        self.begin = 0  # retention has deleted the log up to here
        self.promised = 0  # the log must survive up to here
        self.images = 0
        self.disk = FaultyDisk(folder / "0")
        self.store: MessageStore | None = None

    def run(self) -> None:
        for _ in range(GENERATIONS):
            self.open()
            if self.rng.random() < 0.6:
                self.disk.cut_after(self.rng.randrange(250))
            try:
                for _ in range(self.rng.randrange(10, 160)):
                    self.work(self.rng.choice(WORK))
                if self.rng.random() < 0.2:
                    self.close()
            except PowerCut:
                pass
            self.lose_power()
        self.open()
        self.work("put")
        flush(self.opened())
        verify(self.opened(), self.model, self.begin)
        self.close()
        self.store = self.reopen()
        assert self.store.report.clean
        verify(self.store, self.model, self.begin)
        self.store.close()

    def opened(self) -> MessageStore:
        assert self.store is not None
        return self.store

    def reopen(self) -> MessageStore:
        return open_store(self.disk.root, self.config, self.disk, self.now_ms)

    def open(self) -> None:
        """Recover; the power may fail during that, too."""
        for _ in range(3):
            if self.rng.random() < 0.5:
                self.disk.cut_after(self.rng.randrange(60))
            try:
                self.store = self.reopen()
                break
            except PowerCut:
                self.lose_power()
        else:
            self.store = self.reopen()
        self.disk.cut_after(None)
        self.after_recovery()

    def after_recovery(self) -> None:
        store = self.opened()
        end = store.report.log_end
        left = [s for s in self.model.stored if s.end <= end]
        last = left[-1].end if left else 0
        assert end >= self.promised, f"promised was {self.promised}: {store.report.cut_reason}"
        assert end in (last, -(-last // SEGMENT_BYTES) * SEGMENT_BYTES), "not where a record ends"
        assert store.log.begin() <= self.begin
        self.model.cut(len(left), end)
        self.promised = max(self.promised, end) if self.sync_flush else self.promised
        verify(store, self.model, self.begin)

    def close(self) -> None:
        store, self.store = self.opened(), None
        try:
            store.close()
        except PowerCut:
            store._lock.release()  # as at the end of the process
            raise
        self.promised = self.model.end

    def lose_power(self) -> None:
        if self.store is not None:
            self.note_promise()
            abandon(self.store)
            self.store = None
        assert self.disk.stores_into_holes() == []
        self.images += 1
        self.disk = FaultyDisk(self.disk.crash(self.folder / str(self.images), self.rng))

    def note_promise(self) -> None:
        store = self.opened()
        safe = store.confirm_offset if self.sync_flush else store.flusher.flushed()
        self.promised = max(self.promised, safe)

    def work(self, what: str) -> None:
        rng, store = self.rng, self.opened()
        self.now_ms += rng.choice((0, 1, 40, 400, 1500))
        if what in ("put", "batch"):
            self.put(1 if what == "put" else rng.randrange(2, 5))
        elif what == "publish":
            store.publish()
        elif what == "flush":
            flush(store)
        elif what == "tick":
            store.tick(self.now_ms)
        elif what == "write back":
            self.disk.write_back(rng)
        elif what == "read" and self.model.stored:
            self.read()
        elif what == "expire" and len(store.log.segments.items) > 2:
            flush(store)
            self.begin = store.log.segments.items[1].start
            store.expire(1)
        elif what == "die":
            self.die()
        self.note_promise()

    def put(self, count: int) -> None:
        first = random_message(self.rng, self.serial)
        others = [random_message(self.rng, self.serial + i, first.queue) for i in range(1, count)]
        self.serial += count
        put_ok(self.opened(), self.model, [first, *others], self.now_ms)

    def read(self) -> None:
        stored = self.rng.choice(self.model.stored)
        if stored.offset >= self.begin and stored.end <= self.opened().confirm_offset:
            assert read(self.opened(), stored.message.queue, stored.queue_offset, 1) == [
                stored.data()
            ]

    def die(self) -> None:
        """The process ends, the machine does not: the page cache has all written bytes."""
        store = self.opened()
        written = store.log.written
        abandon(store)
        self.store = None
        self.store = self.reopen()
        self.promised = self.promised if not self.sync_flush else max(self.promised, written)
        self.after_recovery()
        assert self.opened().report.log_end >= written


@pytest.mark.parametrize("seed", range(rounds(ci=24, proof=400)))
def test_sync_flush_keeps_every_acknowledged_message(tmp_path: Path, seed: int) -> None:
    History(seed, tmp_path, sync_flush=True).run()


@pytest.mark.parametrize("seed", range(rounds(ci=16, proof=200)))
def test_async_flush_recovers_a_valid_prefix(tmp_path: Path, seed: int) -> None:
    History(seed + 1_000_000, tmp_path, sync_flush=False).run()


def test_a_lost_queue_file_between_two_others_loses_no_entry(tmp_path: Path) -> None:
    """Two files of a queue are newer than the checkpoint; the power cut undoes one creation."""
    config = small_config(sync_flush=True)
    disk = FaultyDisk(tmp_path)
    store = open_store(tmp_path, config, disk)
    model = Model()
    for _ in range(40):
        put_ok(store, model, [Message("t", 0, b"old")], START_MS)
    for later_ms in (10_000, 20_000):  # the second one's checkpoint covers the first
        while store.log.end < later_ms // 10_000 * SEGMENT_BYTES:
            put_ok(store, model, [Message("other", 0, bytes(3000))], START_MS + later_ms)
        flush(store)
        store.tick(START_MS + later_ms)
    for _ in range(100):
        put_ok(store, model, [Message("t", 0, b"new")], START_MS + 20_000)
    flush(store)
    abandon(store)
    (tmp_path / "consumequeue" / "t" / "0" / f"{1000:020d}").unlink()
    store = open_store(tmp_path, config, FaultyDisk(tmp_path))
    assert store.report.replayed_from > 0, "else everything is dispatched again"
    verify(store, model)
    store.close()
