"""The store against a list: any operations in any order give the same results in both.

The list (`Model`) knows the bytes and the place of every message and how far readers may see. The
process may die at any moment (files as they are, nothing closed); the power does not go here: see
tests/faults/test_power_loss.py.
"""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.store.disk import Disk
from penstock.store.get import (
    FOUND,
    NO_MATCHED_MESSAGE,
    NO_MESSAGE_IN_QUEUE,
    OFFSET_OVERFLOW_BADLY,
    OFFSET_OVERFLOW_ONE,
    OFFSET_TOO_SMALL,
)
from penstock.testing import FaultyDisk
from penstock.wire.record import java_hash
from tests.depth import rounds
from tests.store_kit import (
    EVER_MS,
    SEGMENT_BYTES,
    START_MS,
    Message,
    Model,
    QueueName,
    Stored,
    abandon,
    flush,
    open_store,
    put_ok,
    small_config,
    split,
    verify,
)

FILE_ENTRIES = 50
QUEUES: list[QueueName] = [("orders", 0), ("orders", 1), ("a", 0)]
TAGS = ["", "red", "blue", "\u84dd"]
KEYS = ["k1", "k2", "k3", "\u4e1c"]

queues = st.sampled_from(QUEUES)
bodies = st.one_of(st.binary(max_size=40), st.integers(0, 3000).map(bytes))
contents = st.tuples(
    bodies, st.sampled_from(TAGS), st.lists(st.sampled_from(KEYS), max_size=2, unique=True)
)
times = st.integers(-3000, 60_000).map(lambda ms: START_MS + ms)


class StoreMachine(RuleBasedStateMachine):
    """The rules are the broker's operations on a store; each compares its result at once."""

    sync_flush = True
    append_by = "auto"
    real_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="penstock-sim"))
        self.disk: Disk = Disk() if self.real_disk else FaultyDisk(self.root / "s")
        self.config = small_config(sync_flush=self.sync_flush, append_by=self.append_by)
        self.model = Model()
        self.now_ms = START_MS
        self.begin = 0
        self.written = 0
        self.visible = 0
        self.store = self._open()

    def teardown(self) -> None:
        flush(self.store)
        self.visible = self.model.end
        verify(self.store, self.model, self.begin)
        self.store.close()
        shutil.rmtree(self.root)

    def _open(self):  # type: ignore[no-untyped-def]
        return open_store(self.root / "s", self.config, self.disk, self.now_ms)

    def _row(self, queue: QueueName) -> list[Stored]:
        """The messages of a queue that readers can see, expired ones included."""
        return [s for s in self.model.queues().get(queue, []) if s.end <= self.visible]

    def _min(self, queue: QueueName) -> int:
        row = self.model.queues().get(queue, [])
        return next((s.queue_offset for s in row if s.offset >= self.begin), len(row))

    # --- writing

    @rule(queue=queues, content=contents)
    def put(self, queue: QueueName, content: tuple[bytes, str, list[str]]) -> None:
        body, tags, keys = content
        put_ok(self.store, self.model, [Message(*queue, body, tags, tuple(keys))], self.now_ms)

    @rule(queue=queues, batch=st.lists(contents, min_size=2, max_size=5))
    def put_batch(self, queue: QueueName, batch: list[tuple[bytes, str, list[str]]]) -> None:
        messages = [Message(*queue, body, tags, tuple(keys)) for body, tags, keys in batch]
        put_ok(self.store, self.model, messages, self.now_ms)

    @rule(queue=queues, count=st.integers(1, 60))
    def put_many(self, queue: QueueName, count: int) -> None:
        """Fill queue and index files."""
        for i in range(count):
            message = Message(*queue, b"%d" % i, TAGS[i % 3], (f"{queue[0]}{i}",))
            put_ok(self.store, self.model, [message], self.now_ms)

    @rule(queue=queues)
    def roll(self, queue: QueueName) -> None:
        """Continue in the next segment."""
        before = self.store.log.rolls
        while self.store.log.rolls == before:
            put_ok(self.store, self.model, [Message(*queue, bytes(5000))], self.now_ms)

    @rule(ms=st.integers(-2000, 6000))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def publish(self) -> None:
        self.store.publish()
        self.written = self.model.end
        self.visible = self.store.confirm_offset
        if not self.sync_flush:
            assert self.visible == self.model.end
        elif not self.real_disk:
            assert self.visible == self.store.flusher.flushed()

    @rule()
    def flush(self) -> None:
        flush(self.store)
        self.written = self.visible = self.model.end

    @precondition(lambda self: not self.real_disk)
    @rule()
    def flusher_runs(self) -> None:
        """The progress is not published yet, so readers see what they saw before."""
        self.store.flusher.pump()

    @rule()
    def tick(self) -> None:
        self.store.tick(self.now_ms)
        self._wait_for_pool()

    @rule(kind=st.sampled_from(["idle", "all"]))
    def unmap(self, kind: str) -> None:
        """Unmap queues: the idle ones by the clock, or all at once."""
        if kind == "all":
            self.store.maintenance.mapped_queues.unmap_all()
        else:
            self.store.maintenance.mapped_queues.unmap_idle(
                60_000, 60_000, self.store.confirm_offset
            )

    @precondition(lambda self: len(self.store.log.segments.items) > 1)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        self.flush()
        segments = self.store.log.segments.items
        count = data.draw(st.integers(1, len(segments) - 1))
        self.begin = segments[count].start
        self.store.expire(count)
        self._wait_for_pool()

    def _wait_for_pool(self) -> None:
        if self.disk.threads:
            self.disk.close()  # waits for submitted work; the next submission makes a new pool

    # --- shutdowns and starts

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.store = self._open()
        assert self.store.report.clean
        self.written = self.visible = self.model.end
        self._opened()

    @rule()
    def die_and_open(self) -> None:
        abandon(self.store)
        self.store = self._open()
        assert not self.store.report.clean
        end = self.store.report.log_end
        left = [s for s in self.model.stored if s.end <= end]
        last = left[-1].end if left else 0
        assert end >= self.written
        assert end in (last, -(-last // SEGMENT_BYTES) * SEGMENT_BYTES)
        if self.append_by == "mapping":
            assert len(left) == len(self.model.stored)
        self.model.cut(len(left), end)
        self.written = self.visible = end
        self._opened()

    def _opened(self) -> None:
        assert self.store.log.begin() == self.begin
        verify(self.store, self.model, self.begin)

    # --- reading

    @rule(
        queue=queues, offset=st.integers(0, 200), count=st.integers(1, 40),
        size=st.sampled_from([1, 500, 5000, 1 << 20]),
        tags=st.lists(st.sampled_from(TAGS[1:]), unique=True), wait=st.booleans(),
    )  # fmt: skip
    def read(
        self, queue: QueueName, offset: int, count: int, size: int, tags: list[str], wait: bool
    ) -> None:
        if self.store.queue(*queue) is None:
            return
        codes = [java_hash(tag) for tag in tags]
        found = self.store.get(
            *queue, offset, count_max=count, bytes_max=size, codes=codes, wait=wait
        )
        row, low = self._row(queue), self._min(queue)
        if len(row) == 0 or not low <= offset < len(row):
            assert found.status == self._miss(offset, low, len(row))
            return
        assert found.status in (FOUND, NO_MATCHED_MESSAGE)
        assert offset < found.next_offset <= len(row)
        seen = [s for s in row[offset : found.next_offset] if not tags or s.message.tags in tags]
        assert split(found.data) == [s.data() for s in seen]
        assert len(seen) <= count
        assert len(seen) <= 1 or len(found.data) <= size
        if found.next_offset < len(row) and found.next_offset % FILE_ENTRIES and len(seen) < count:
            assert len(found.data) + row[found.next_offset].message.size() > size, "stopped early"

    def _miss(self, offset: int, low: int, high: int) -> int:
        if high == 0:
            return NO_MESSAGE_IN_QUEUE
        if offset < low:
            return OFFSET_TOO_SMALL
        return OFFSET_OVERFLOW_ONE if offset == high else OFFSET_OVERFLOW_BADLY

    @precondition(lambda self: self.model.stored)
    @rule(data=st.data())
    def read_at_physical_offset(self, data: st.DataObject) -> None:
        stored = data.draw(st.sampled_from(self.model.stored))
        there = self.begin <= stored.offset and stored.end <= self.visible
        found = self.store.lookup.record(stored.offset, self.store.confirm_offset)
        assert found == (stored.data() if there else None)
        assert self.store.lookup.record(stored.offset + 1, self.store.confirm_offset) is None

    @rule(topic=st.sampled_from(["orders", "a"]), key=st.sampled_from(KEYS), at=times, to=times)
    def find_by_key(self, topic: str, key: str, at: int, to: int) -> None:
        begin_ms, end_ms = min(at, to), max(at, to)
        found = self.store.lookup.by_key(
            topic,
            key,
            begin_ms=begin_ms,
            end_ms=end_ms,
            most=64,
            confirm_offset=self.store.confirm_offset,
        )
        holders = [
            s for s in self.model.stored
            if s.message.topic == topic and key in s.message.keys
            and s.offset >= self.begin and s.end <= self.visible
        ]  # fmt: skip
        exact = [s.data() for s in holders if begin_ms <= s.store_ms <= end_ms]
        wide = [s.data() for s in holders if begin_ms - 999 <= s.store_ms <= end_ms + 999]
        assert [data for data in found if data in exact] == exact
        assert [data for data in wide if data in found] == found, "found what is not in the range"

    @rule(queue=queues, ms=times, upper=st.booleans())
    def find_by_time(self, queue: QueueName, ms: int, upper: bool) -> None:
        found = self.store.queue(*queue)
        if found is None:
            return
        low = self._min(queue)
        row = self._row(queue)[low:]
        if upper:
            before = [s.queue_offset for s in row if s.store_ms <= ms]
            expected = before[-1] if before else low
        else:
            after = [s.queue_offset for s in row if s.store_ms >= ms]
            expected = after[0] if after else low + len(row)
        got = self.store.lookup.offset_at(
            found, ms, confirm_offset=self.store.confirm_offset, upper=upper
        )
        assert got == expected

    @invariant()
    def offsets_agree(self) -> None:
        if self.sync_flush and self.real_disk:
            return  # the flusher may be ahead of what was published
        assert self.store.confirm_offset == self.visible
        for queue in QUEUES:
            assert self.store.max_offset(*queue) == len(self._row(queue))
            assert self.store.min_offset(*queue) == self._min(queue)
        assert self.store.log.end == self.model.end
        assert self.now_ms < EVER_MS


class SyncMachine(StoreMachine):
    """Sync flush: staged, written once per loop iteration, visible when flushed."""


class AsyncMachine(StoreMachine):
    """Async flush: written directly into the mapping."""

    sync_flush = False
    append_by = "mapping"


class ThreadedMachine(StoreMachine):
    """The real disk with its pool and flusher thread."""

    sync_flush = False
    append_by = "mapping"
    real_disk = True


TestSyncFlush = SyncMachine.TestCase
TestAsyncFlush = AsyncMachine.TestCase
TestThreads = ThreadedMachine.TestCase
TestSyncFlush.settings = TestAsyncFlush.settings = settings(
    max_examples=rounds(ci=60, proof=500), stateful_step_count=40
)
TestThreads.settings = settings(max_examples=rounds(ci=10, proof=100), stateful_step_count=30)
