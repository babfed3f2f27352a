"""Prefetch: reads the chains of the next slots of the timer, and their messages.

A chain is read when its slot starts within 1.5 s, a long chain earlier. Messages that are due soon
are read too, unless they are in memory. The event loop never waits for the disk: such reads run in
the thread pool.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from penstock.broker.delay.delivery_time import recalled_key
from penstock.store.lookup import GONE
from penstock.store.store import MessageStore
from penstock.store.timer.timer_log import NOWHERE
from penstock.store.timer.timer_slots import Chain, TimerMessage
from penstock.store.timer.timer_store import TimerStore
from penstock.wire.message import decode_properties
from penstock.wire.record import RECORD, StoredRecord, java_hash

PREFETCH_MS: Final = 1_500
"""Longer than the server ever sleeps."""
LOOKAHEAD_MS: Final = 60_000
"""Slots are examined this long ahead: the longest chains take seconds to read."""
UNITS_PER_MS: Final = 50
"""Units of a chain that are read in a millisecond; a longer chain is read earlier."""
TICK_UNITS_MAX: Final = 500
THREAD_UNITS_MAX: Final = 5_000
PREFETCH_UNITS_MAX: Final = 2_000_000
"""Units in memory (16 bytes each) above which no further chain is read before it is due."""
CHAINS_MAX: Final = 256
RECORDS_MAX: Final = 1_024
RECORDS_BYTES_MAX: Final = 4 * 1024 * 1024
TICK_RECORDS_MAX: Final = 256
POLL_MS: Final = 5
NEVER: Final = 1 << 62


def read_properties(data: bytes, offset: int) -> tuple[dict[str, str], StoredRecord] | None:
    """Properties and header of the record at a log offset; None if it is not a record."""
    stored = StoredRecord()
    stored.bind(memoryview(bytearray(data or b"\0")))
    if stored.read(0, len(data)) != RECORD or stored.physical_offset != offset:
        return None
    text = data[stored.properties_at : stored.properties_at + stored.properties_length]
    return decode_properties(text), stored


class TimerPrefetch:
    """The chains of the next slots, and records that are due soon."""

    def __init__(self, store: MessageStore, files: TimerStore) -> None:
        self._store = store
        self._files = files
        self.chains: dict[int, Chain] = {}
        self.loaded_to_ms = files.progress.read_ms
        """All slots before this time are loaded; messages added to them are added here too."""
        self.due_ms = 0
        self._chain: Chain | None = None  # being read
        self._job: Future[Callable[[], None]] | None = None  # its result is run by the event loop
        self._records: dict[int, bytes] = {}
        self._records_bytes = 0
        self._cursors: dict[int, tuple[int, int]] = {}  # progress of reading records, by slot
        self._next_slot: tuple[int, int | None] | None = None  # valid until, next used slot

    def add(
        self,
        slot_ms: int,
        now_ms: int,
        *,
        offset: int,
        size: int,
        topic: str,
        due_ms: int,
        roll: bool,
        recalls: tuple[str, str] | None,
        copy: bool = False,
    ) -> None:
        """Add a message to a slot: in the files, and here if the slot is loaded.

        A recall that is added to several slots is a `copy` in all but the last call.
        """
        progress = self._files.progress
        if slot_ms == progress.read_ms:  # the slot in progress is delivered in order
            due_ms = max(due_ms, progress.due_ms)
        unit = self._files.add(
            slot_ms,
            now_ms,
            offset=offset,
            size=size,
            topic_hash=java_hash(topic),
            due_ms=due_ms,
            roll=roll,
            delete=recalls is not None,
            copy=copy,
        )
        if slot_ms >= self.loaded_to_ms:
            self._next_slot = None
            return
        chain = self.chains.get(slot_ms)
        if chain is None:
            chain = self._make_chain(slot_ms, NOWHERE)
        if recalls is not None and not roll:
            chain.recalled.add(recalls)
        else:
            chain.add(unit)

    def _make_chain(self, slot_ms: int, last: int) -> Chain:
        progress = self._files.progress
        chain = Chain(self._files.log, slot_ms, self._files.precision_ms, last)
        if slot_ms == progress.read_ms:
            chain.skip(progress.due_ms, progress.done if last != NOWHERE else 0)
        self.chains[slot_ms] = chain
        return chain

    # --- chains

    def load(self, now_ms: int) -> None:
        """Read chains and records that are due soon, up to the limits of a tick.

        Sets `due_ms`. Raises StoreDamaged if a chain can't be read.
        """
        self.due_ms = NEVER
        if not self._finish_job(now_ms):
            return
        units = TICK_UNITS_MAX
        while units > 0:
            chain = self._chain = self._chain or self._next_chain(now_ms)
            if chain is None:
                break
            count = chain.read(units, wait=False)
            if count < 0:
                self._submit(partial(_read_chain, chain), now_ms)
                return
            units -= count
            if chain.walked:
                units = self._read_recalls(chain, units, now_ms)
                if units < 0:
                    return
                if chain.recalls:
                    break
                chain.arrange()
                self._chain = None
        if units == 0:
            self.due_ms = now_ms
        self._read_ahead(now_ms)

    def _next_chain(self, now_ms: int) -> Chain | None:
        """The chain of the next slot that has to be read now."""
        files = self._files
        if (
            self._next_slot is None
            or now_ms >= self._next_slot[0]
            or now_ms < self._next_slot[0] - LOOKAHEAD_MS
        ):
            found = files.wheel.next_used(self.loaded_to_ms, now_ms + LOOKAHEAD_MS)
            self._next_slot = (now_ms + LOOKAHEAD_MS // 2, found)
        slot_ms = self._next_slot[1]
        slot = files.wheel.get(slot_ms) if slot_ms is not None else None
        prefetch_ms = files.slot_of(now_ms + PREFETCH_MS)
        if slot_ms is None or slot is None:
            self.loaded_to_ms = max(self.loaded_to_ms, prefetch_ms)
            return None
        start_ms = slot_ms - PREFETCH_MS - max(slot.units, 0) // UNITS_PER_MS
        loaded = sum(chain.count for chain in self.chains.values())
        if loaded > PREFETCH_UNITS_MAX or len(self.chains) > CHAINS_MAX:  # deliver those first
            return None
        if start_ms > now_ms:
            self.loaded_to_ms = max(self.loaded_to_ms, min(prefetch_ms, slot_ms))
            self.due_ms = min(self.due_ms, start_ms)
            return None
        self._next_slot = None
        self.loaded_to_ms = slot_ms + files.precision_ms
        return self._make_chain(slot_ms, slot.last)

    def _read_recalls(self, chain: Chain, limit: int, now_ms: int) -> int:
        """Read which messages of a slot were recalled.

        Returns what is left of the tick's limit, or -1 if a read is in flight.
        """
        store = self._store
        while chain.recalls and limit > 0:
            offset, size = chain.recalls[-1]
            data = store.lookup.read_record(offset, size, wait=False)
            if data is None:
                self._submit(partial(_read_recalls, store, chain, TICK_UNITS_MAX), now_ms)
                return -1
            chain.recalls.pop()
            _add_recall(chain, data, offset)
            limit -= 1
        return limit

    # --- records

    def take_record(self, waiting: TimerMessage, now_ms: int) -> bytes | None:
        """The record of a due message; GONE if it was deleted, None if a read is in flight."""
        data = self._records.pop(waiting.offset, None)
        if data is not None:
            self._records_bytes -= len(data)
            return data
        data = self._store.lookup.read_record(waiting.offset, waiting.size, wait=False)
        if data is None:
            if self._job is None:
                self._fetch([waiting], now_ms)
            self.due_ms = min(self.due_ms, now_ms + POLL_MS)
        return data

    def put_back(self, waiting: TimerMessage, data: bytes) -> None:
        """Keep the record of a message that is not delivered yet."""
        self._records[waiting.offset] = data
        self._records_bytes += len(data)

    def remove_slot(self, slot_ms: int) -> None:
        """Drop a slot that is done."""
        self.chains.pop(slot_ms, None)
        self._cursors.pop(slot_ms, None)
        if not self.chains:
            self._records.clear()
            self._records_bytes = 0

    def _read_ahead(self, now_ms: int) -> None:
        """Read the records that are due soon, except those in memory."""
        cold: list[TimerMessage] = []
        log = self._store.log
        hot_from = max(log.hot_from, log.written - self._store.config.hot_bytes)
        until_ms = now_ms + PREFETCH_MS
        for slot_ms in sorted(self.chains):
            chain = self.chains[slot_ms]
            left = min(TICK_RECORDS_MAX - len(cold), RECORDS_MAX - len(self._records))
            if slot_ms > until_ms or not chain.ready or left <= 0:
                break
            room = RECORDS_BYTES_MAX - self._records_bytes - sum(waiting.size for waiting in cold)
            if room <= 0:
                break
            cursor = self._cursors.get(slot_ms, (0, 0))
            found, self._cursors[slot_ms] = chain.ahead(cursor, until_ms, left, room)
            cold += [waiting for waiting in found if waiting.offset < hot_from]
        if cold:
            self._fetch(cold, now_ms)

    def _fetch(self, wanted: list[TimerMessage], now_ms: int) -> None:
        """Read records: those in the page cache at once, others in the thread pool."""
        rest = []
        for waiting in wanted:
            data = self._store.lookup.read_record(waiting.offset, waiting.size, wait=False)
            if data is None:
                rest.append(waiting)
            else:
                self.put_back(waiting, data)
        if rest:
            self._submit(lambda: self._read_records(rest), now_ms)

    def _read_records(self, wanted: list[TimerMessage]) -> Callable[[], None]:
        found = [
            (w, self._store.lookup.read_record(w.offset, w.size, wait=True) or GONE) for w in wanted
        ]

        def take() -> None:
            for waiting, data in found:
                self.put_back(waiting, data)

        return take

    # --- thread pool

    def _submit(self, work: Callable[[], Callable[[], None]], now_ms: int) -> None:
        self._job = self._store.disk.submit(work)
        self.due_ms = min(self.due_ms, now_ms + (POLL_MS if self._store.disk.threads else 0))

    def _finish_job(self, now_ms: int) -> bool:
        """Whether no read is in flight."""
        if self._job is not None:
            if not self._job.done():
                self.due_ms = now_ms + POLL_MS
                return False
            done, self._job = self._job, None
            done.result()()
        return True

    def wait_for_reads(self) -> None:
        """Wait for reads in the thread pool and discard their results."""
        if self._job is not None:
            self._job.exception()
            self._job = None


def _read_chain(chain: Chain) -> Callable[[], None]:
    chain.read(THREAD_UNITS_MAX, wait=True)
    return lambda: None


def _read_recalls(store: MessageStore, chain: Chain, limit: int) -> Callable[[], None]:
    wanted = chain.recalls[-limit:]
    keys = [
        _recall_in(store.lookup.read_record(offset, size, wait=True) or GONE, offset)
        for offset, size in wanted
    ]

    def take() -> None:
        del chain.recalls[-len(wanted) :]
        chain.recalled.update(key for key in keys if key is not None)

    return take


def _recall_in(data: bytes, offset: int) -> tuple[str, str] | None:
    found = read_properties(data, offset)
    return recalled_key(found[0]) if found is not None else None


def _add_recall(chain: Chain, data: bytes, offset: int) -> None:
    key = _recall_in(data, offset)
    if key is not None:
        chain.recalled.add(key)
