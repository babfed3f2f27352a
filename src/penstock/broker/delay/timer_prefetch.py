"""The slots of the timer that come near: their chains, and their messages read ahead.

A chain is read when its slot begins within a second and a half, earlier if it is long, and the
messages of the next moments if they are not in memory anyhow. Neither is waited for by the loop:
what the disk has to bring is read by the pool.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from penstock.broker.delay.delivery_time import recalled_key
from penstock.store.lookup import GONE
from penstock.store.store import MessageStore
from penstock.store.timer.timer_log import NOWHERE
from penstock.store.timer.timer_slots import Chain, Waiting
from penstock.store.timer.timer_store import TimerStore
from penstock.wire.message import decode_properties
from penstock.wire.record import RECORD, StoredRecord, java_hash

AHEAD_MS: Final = 1_500
"""Longer than the server sleeps at most."""
FAR_MS: Final = 60_000
"""Slots are looked at so long before: the longest chains take some seconds."""
UNITS_PER_MS: Final = 50
"""So many more units of a chain take a millisecond more of time ahead."""
TICK_UNITS: Final = 500
POOL_UNITS: Final = 5_000
NEAR_UNITS_MAX: Final = 2_000_000
"""More are not held in memory (16 bytes each), unless it is their time."""
CHAINS_MAX: Final = 256
RECORDS_MAX: Final = 1_024
RECORDS_BYTES_MAX: Final = 4 * 1024 * 1024
TICK_RECORDS: Final = 256
POLL_MS: Final = 5
NEVER: Final = 1 << 62


def read_properties(data: bytes, offset: int) -> tuple[dict[str, str], StoredRecord] | None:
    """The properties of a record at its place of the log, and its head; None if it is none."""
    stored = StoredRecord()
    stored.bind(memoryview(bytearray(data or b"\0")))
    if stored.read(0, len(data)) != RECORD or stored.physical_offset != offset:
        return None
    text = data[stored.properties_at : stored.properties_at + stored.properties_length]
    return decode_properties(text), stored


class Near:
    """Chains by slot."""

    def __init__(self, store: MessageStore, files: TimerStore) -> None:
        self._store = store
        self._files = files
        self.chains: dict[int, Chain] = {}
        self.loaded_to_ms = files.progress.read_ms
        """What waits in slots before is here; what comes into them comes here too."""
        self.due_ms = 0
        self._chain: Chain | None = None  # being read
        self._job: Future[Callable[[], None]] | None = None  # what it answers runs in the loop
        self._records: dict[int, bytes] = {}
        self._records_bytes = 0
        self._cursors: dict[int, tuple[int, int]] = {}  # how far messages were read ahead, by slot
        self._peeked: tuple[int, int | None] | None = None  # until when, the next slot

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
    ) -> None:
        """Let a message wait in a slot: in the files, and here if the slot is near."""
        progress = self._files.progress
        if slot_ms == progress.read_ms:  # what is done there, is done in order
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
        )
        if slot_ms >= self.loaded_to_ms:
            self._peeked = None
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

    # --- reading chains

    def load(self, now_ms: int) -> None:
        """Read chains and messages whose time comes, as far as one turn allows.

        Sets when that has to go on. Raises StoreDamaged if a chain can't be read.
        """
        self.due_ms = NEVER
        if not self._finish_job(now_ms):
            return
        units = TICK_UNITS
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
        """The next slot whose chain has to be read by now."""
        files = self._files
        if self._peeked is None or now_ms >= self._peeked[0] or now_ms < self._peeked[0] - FAR_MS:
            found = files.wheel.next_used(self.loaded_to_ms, now_ms + FAR_MS)
            self._peeked = (now_ms + FAR_MS // 2, found)
        slot_ms = self._peeked[1]
        slot = files.wheel.get(slot_ms) if slot_ms is not None else None
        near_ms = files.slot_of(now_ms + AHEAD_MS)
        if slot_ms is None or slot is None:
            self.loaded_to_ms = max(self.loaded_to_ms, near_ms)
            return None
        start_ms = slot_ms - AHEAD_MS - max(slot.units, 0) // UNITS_PER_MS
        held = sum(chain.count for chain in self.chains.values())
        if held > NEAR_UNITS_MAX or len(self.chains) > CHAINS_MAX:  # they go first
            return None
        if start_ms > now_ms:
            self.loaded_to_ms = max(self.loaded_to_ms, min(near_ms, slot_ms))
            self.due_ms = min(self.due_ms, start_ms)
            return None
        self._peeked = None
        self.loaded_to_ms = slot_ms + files.precision_ms
        return self._make_chain(slot_ms, slot.last)

    def _read_recalls(self, chain: Chain, most: int, now_ms: int) -> int:
        """Learn which messages of a slot were recalled; how many more this turn allows, or -1 if
        the disk is waited for."""
        store = self._store
        while chain.recalls and most > 0:
            offset, size = chain.recalls[-1]
            data = store.lookup.read_record(offset, size, wait=False)
            if data is None:
                self._submit(partial(_read_recalls, store, chain, TICK_UNITS), now_ms)
                return -1
            chain.recalls.pop()
            _note_recall(chain, data, offset)
            most -= 1
        return most

    # --- reading messages

    def record(self, waiting: Waiting, now_ms: int) -> bytes | None:
        """A message whose time has come; GONE if there is none, None if the disk is waited for."""
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

    def keep(self, waiting: Waiting, data: bytes) -> None:
        """A message that could not be delivered yet."""
        self._records[waiting.offset] = data
        self._records_bytes += len(data)

    def drop(self, slot_ms: int) -> None:
        """A slot is done."""
        self.chains.pop(slot_ms, None)
        self._cursors.pop(slot_ms, None)
        if not self.chains:
            self._records.clear()
            self._records_bytes = 0

    def _read_ahead(self, now_ms: int) -> None:
        """Read the messages of the next moments, but those that are in memory anyhow."""
        cold: list[Waiting] = []
        log = self._store.log
        hot_from = max(log.hot_from, log.written - self._store.config.hot_bytes)
        until_ms = now_ms + AHEAD_MS
        for slot_ms in sorted(self.chains):
            chain = self.chains[slot_ms]
            left = min(TICK_RECORDS - len(cold), RECORDS_MAX - len(self._records))
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

    def _fetch(self, wanted: list[Waiting], now_ms: int) -> None:
        """Have messages read: at once those that the page cache has, the others by the pool."""
        rest = []
        for waiting in wanted:
            data = self._store.lookup.read_record(waiting.offset, waiting.size, wait=False)
            if data is None:
                rest.append(waiting)
            else:
                self.keep(waiting, data)
        if rest:
            self._submit(lambda: self._read_records(rest), now_ms)

    def _read_records(self, wanted: list[Waiting]) -> Callable[[], None]:
        found = [
            (w, self._store.lookup.read_record(w.offset, w.size, wait=True) or GONE) for w in wanted
        ]

        def take() -> None:
            for waiting, data in found:
                self.keep(waiting, data)

        return take

    # --- the pool

    def _submit(self, work: Callable[[], Callable[[], None]], now_ms: int) -> None:
        self._job = self._store.disk.submit(work)
        self.due_ms = min(self.due_ms, now_ms + (POLL_MS if self._store.disk.threads else 0))

    def _finish_job(self, now_ms: int) -> bool:
        """Whether nothing is waited for any more."""
        if self._job is not None:
            if not self._job.done():
                self.due_ms = now_ms + POLL_MS
                return False
            done, self._job = self._job, None
            done.result()()
        return True

    def wait(self) -> None:
        """Wait for the pool; what it read does not matter any more."""
        if self._job is not None:
            self._job.exception()
            self._job = None


def _read_chain(chain: Chain) -> Callable[[], None]:
    chain.read(POOL_UNITS, wait=True)
    return lambda: None


def _read_recalls(store: MessageStore, chain: Chain, most: int) -> Callable[[], None]:
    wanted = chain.recalls[-most:]
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


def _note_recall(chain: Chain, data: bytes, offset: int) -> None:
    key = _recall_in(data, offset)
    if key is not None:
        chain.recalled.add(key)
