"""The timer wheel: the chain of units of each time slot, in RocketMQ's layout.

    | slot (time / precision) i64 | first unit i64 | last unit i64 | count i32 | 0 i32 |    32 bytes

The file `timerwheel` has 1,209,600 slots, found by slot mod 1,209,600; one whose time differs is
empty. With slots of a second that is two weeks, and every waiting message is within them.

Only pages of slots in use are in memory (5 MB for two days with slots of a second): the other slots
of the file are in the past. The pool writes the pages that have changed.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from penstock.store.disk import Disk

SLOTS: Final = 2 * 7 * 86_400
SPARE_SLOTS: Final = 60
"""Slots that are never used, so that new units do not reach slots that are still to be read."""
SLOT_BYTES: Final = 32
PAGE_SLOTS: Final = 128
PAGE_BYTES: Final = PAGE_SLOTS * SLOT_BYTES

_SLOT: Final = struct.Struct(">qqqii")
_READ_PAGES: Final = 256


class Slot(NamedTuple):
    """The chain of a slot: positions in the timer log, and its length."""

    first: int
    last: int
    units: int


class TimerWheel:
    """Slots by time; single writer, the pool writes pages."""

    slots = SLOTS

    def __init__(self, disk: Disk, path: Path, precision_ms: int) -> None:
        self.disk = disk
        self.path = path
        self.precision_ms = precision_ms
        self.file_bytes = self.slots * SLOT_BYTES
        self._pages: dict[int, bytearray] = {}
        self._counts: dict[int, int] = {}
        self._last_slots: dict[int, int] = {}  # the last slot in use, by page
        self._dirty: set[int] = set()

    def get(self, slot_ms: int) -> Slot | None:
        """The chain of a slot; None if the slot is empty."""
        number = slot_ms // self.precision_ms
        page = self._pages.get(number % self.slots // PAGE_SLOTS)
        if page is None:
            return None
        time, first, last, count, _ = _SLOT.unpack_from(page, number % PAGE_SLOTS * SLOT_BYTES)
        return Slot(first, last, count) if time == number else None

    def add(self, slot_ms: int, place: int, count: int) -> None:
        """Append a unit to a slot's chain."""
        slot = self.get(slot_ms)
        if slot is None:
            self.set(slot_ms, Slot(place, place, count))
        else:
            self.set(slot_ms, Slot(slot.first, place, slot.units + count))

    def set(self, slot_ms: int, slot: Slot) -> None:
        number = slot_ms // self.precision_ms
        index = number % self.slots // PAGE_SLOTS
        page = self._pages.get(index)
        if page is None:
            page = self._pages[index] = bytearray(PAGE_BYTES)
            self._counts[index] = self._last_slots[index] = 0
        before = self.get(slot_ms)
        self._counts[index] += slot.units - (before.units if before is not None else 0)
        _SLOT.pack_into(page, number % PAGE_SLOTS * SLOT_BYTES, number, *slot, 0)
        self._last_slots[index] = max(self._last_slots[index], number)
        self._dirty.add(index)

    def erase(self, slot_ms: int) -> None:
        """Remove a chain."""
        self.set(slot_ms, Slot(0, 0, 0))
        number = slot_ms // self.precision_ms
        page = self._pages[number % self.slots // PAGE_SLOTS]
        _SLOT.pack_into(page, number % PAGE_SLOTS * SLOT_BYTES, 0, 0, 0, 0, 0)

    def pass_slot(self, slot_ms: int) -> None:
        """All messages of this slot are delivered; the file may still list them."""
        slot = self.get(slot_ms)
        if slot is not None:
            self._counts[slot_ms // self.precision_ms % self.slots // PAGE_SLOTS] -= slot.units

    def next_used(self, from_ms: int, to_ms: int) -> int | None:
        """The first slot of [from, to) that has a chain."""
        number, end = from_ms // self.precision_ms, -(-to_ms // self.precision_ms)
        while number < end:
            page = self._pages.get(number % self.slots // PAGE_SLOTS)
            stop = min(number - number % PAGE_SLOTS + PAGE_SLOTS, end)
            while page is not None and number < stop:
                if _SLOT.unpack_from(page, number % PAGE_SLOTS * SLOT_BYTES)[0] == number:
                    return number * self.precision_ms
                number += 1
            number = stop
        return None

    def used(self, from_ms: int) -> Iterator[tuple[int, Slot]]:
        """All chains from a slot on, in order of time."""
        first = from_ms // self.precision_ms
        end = first + self.slots
        for start in self._page_starts(first):
            at_ms = max(start, first) * self.precision_ms
            end_ms = min(start + PAGE_SLOTS, end) * self.precision_ms
            while (found_ms := self.next_used(at_ms, end_ms)) is not None:
                slot = self.get(found_ms)
                assert slot is not None
                yield found_ms, slot
                at_ms = found_ms + self.precision_ms

    def _page_starts(self, first: int) -> list[int]:
        """The first slot of each page in use within one revolution from slot `first` on.

        The page of `first` itself occurs twice: its last slots come first, its first ones last.
        """
        base = first - first % self.slots
        starts = (base + index * PAGE_SLOTS for index in self._pages)
        both = (at for start in starts for at in (start, start + self.slots))
        return sorted(at for at in both if first - PAGE_SLOTS < at < first + self.slots)

    def count(self, from_ms: int, to_ms: int) -> int:
        """The number of waiting messages in the slots of [from, to)."""
        number, end = from_ms // self.precision_ms, to_ms // self.precision_ms
        total = 0
        while number < end:
            index = number % self.slots // PAGE_SLOTS
            stop = min(number - number % PAGE_SLOTS + PAGE_SLOTS, end)
            if index in self._pages:
                if stop - number == PAGE_SLOTS:
                    total += self._counts[index]
                else:
                    found = (self.get(n * self.precision_ms) for n in range(number, stop))
                    total += sum(slot.units for slot in found if slot is not None)
            number = stop
        return max(total, 0)

    def total(self) -> int:
        """The number of all waiting messages."""
        return max(sum(self._counts.values()), 0)

    def checksum(self, from_ms: int) -> int:
        """A checksum of all chains from a slot on."""
        crc = 0
        for slot_ms, slot in self.used(from_ms):
            crc = zlib.crc32(_SLOT.pack(slot_ms, *slot, 0), crc)
        return crc

    def forget_before(self, slot_ms: int) -> None:
        """Free the memory of pages that are in the past and written."""
        first = slot_ms // self.precision_ms
        for page in [page for page, last in self._last_slots.items() if last < first]:
            if page not in self._dirty:
                del self._pages[page], self._counts[page], self._last_slots[page]

    # --- the file

    def take_dirty(self) -> list[tuple[int, bytes]]:
        """The pages that have changed since the last call; the caller writes them."""
        dirty, self._dirty = self._dirty, set()
        return [(index, bytes(self._pages[index])) for index in sorted(dirty)]

    def put_back(self, pages: list[tuple[int, bytes]]) -> None:
        """Mark pages as changed again that could not be written."""
        self._dirty.update(index for index, _ in pages if index in self._pages)

    def write(self, pages: list[tuple[int, bytes]]) -> None:
        """Write pages to the file, durably; waits for the disk."""
        if not pages:
            return
        new = not self.path.exists()
        fd = self.disk.create(self.path, self.file_bytes)
        try:
            for index, page in pages:
                self.disk.write(fd, memoryview(page), index * PAGE_BYTES)
            self.disk.sync(fd)
        finally:
            self.disk.close_file(fd)
        if new:
            self.disk.sync_directory(self.path.parent)

    def load(self, read_ms: int, now_ms: int) -> bool:
        """Read the chains from `read_ms` on from the file; waits for the disk.

        False if there is no file, or one that was written with another precision.
        """
        if not self.path.exists() or self.disk.size(self.path) != self.file_bytes:
            return False
        first, valid = read_ms // self.precision_ms, True
        fd = self.disk.open_to_read(self.path)
        try:
            at = self.disk.next_data(fd, 0)
            while 0 <= at < self.file_bytes and valid:
                at -= at % PAGE_BYTES
                data = self.disk.read_at(fd, _READ_PAGES * PAGE_BYTES, at)
                valid = self._take(data, at // SLOT_BYTES, first, now_ms)
                at = self.disk.next_data(fd, at + len(data)) if data else self.file_bytes
        finally:
            self.disk.close_file(fd)
        self._dirty.clear()
        return valid

    def clear(self) -> None:
        """Remove all chains and the file; waits for the disk."""
        self._pages.clear()
        self._counts.clear()
        self._last_slots.clear()
        self._dirty.clear()
        if self.path.exists():
            self.disk.unlink(self.path)
            self.disk.sync_directory(self.path.parent)

    def _take(self, data: bytes, index: int, first: int, now_ms: int) -> bool:
        for place, fields in enumerate(_SLOT.iter_unpack(data), index):
            number, unit, last, count, _ = fields
            if number == 0:
                continue
            if (
                number % self.slots != place
                or not now_ms < number * self.precision_ms * 2 < 4 * now_ms
            ):
                return False
            if first <= number < first + self.slots and 0 <= unit <= last:
                self.set(number * self.precision_ms, Slot(unit, last, count))
        return True
