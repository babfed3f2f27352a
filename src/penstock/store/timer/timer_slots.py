"""The chain of a timer slot that is due soon, in the order of delivery.

The chain is read from its end, block by block, before the slot begins. Then its messages are in
the order of the millisecond at which they are due, 16 bytes each, and within one millisecond in the
order in which they were stored. A message that comes later goes to the end of its millisecond.
"""

from array import array
from bisect import insort
from typing import Final

from penstock.errors import StoreDamaged
from penstock.store.timer.timer_log import (
    MAGIC_DELETE,
    MAGIC_ROLL,
    NOWHERE,
    UNIT_BYTES,
    TimerLog,
    Unit,
    read_unit,
)

_BLOCK_BYTES: Final = 316 * UNIT_BYTES
"""Read at once: neighbours in a chain are often close together."""
_ROLL_BIT: Final = 1 << 31
_WAITED_MAX: Final = _ROLL_BIT - 1


class TimerMessage:
    """A timed message that is due soon."""

    __slots__ = ("due_ms", "enqueued_ms", "offset", "roll", "size")

    def __init__(
        self, due_ms: int, offset: int, size: int, enqueued_ms: int, *, roll: bool
    ) -> None:
        self.due_ms = due_ms
        self.offset = offset
        self.size = size
        self.enqueued_ms = enqueued_ms
        self.roll = roll


class Chain:
    """The messages of one slot; `ready` when the chain is read completely."""

    def __init__(self, log: TimerLog, slot_ms: int, precision_ms: int, last: int) -> None:
        self.slot_ms = slot_ms
        self.precision_ms = precision_ms
        self.recalled: set[tuple[str, str]] = set()  # topic and unique key
        self.recalls: list[tuple[int, int]] = []  # log offset and size, still to be read
        self.count = 0
        self.due_ms = 0  # messages due before are delivered
        self.done = 0  # and this many of those due at this millisecond
        self._log = log
        self._at = last  # the next unit to read
        self._block = b""
        self._block_from = 0
        self._times: list[int] = []  # the milliseconds at which messages are due, sorted
        self._units: dict[int, array[int]] = {}  # by time: log offset, and the other fields packed
        self._late: list[Unit] = []  # added while the chain was read
        self._arranged = last == NOWHERE

    @property
    def end_ms(self) -> int:
        return self.slot_ms + self.precision_ms

    @property
    def ready(self) -> bool:
        return self._arranged and not self.recalls

    @property
    def walked(self) -> bool:
        """Whether the chain was read; `arrange` comes next."""
        return self._at == NOWHERE

    def skip(self, due_ms: int, done: int) -> None:
        """Before the chain is read: messages due before this time are delivered, and `done` of
        those due at it."""
        self.due_ms, self.done = due_ms, done

    # --- reading

    def read(self, count: int, *, wait: bool) -> int:
        """Read up to `count` units; returns how many. With `wait` false, -1 if that would wait.

        The pool may do this while units are added. Raises StoreDamaged if the chain is broken.
        """
        for number in range(count):
            if self._at == NOWHERE:
                return number
            unit = self._next(wait)
            if unit is None:
                return -1
            if unit.slot_ms != self.slot_ms or unit.previous >= self._at:
                raise StoreDamaged(f"the unit at {self._at} does not belong to slot {self.slot_ms}")
            self._take(unit)
            self._at = unit.previous if unit.previous >= self._log.begin else NOWHERE
        return count

    def _next(self, wait: bool) -> Unit | None:
        at = self._at
        if not self._block_from <= at <= self._block_from + len(self._block) - UNIT_BYTES:
            segment = at - at % self._log.segment_bytes
            begin = max(at + UNIT_BYTES - _BLOCK_BYTES, segment)
            begin += (at - begin) % UNIT_BYTES
            found = self._log.read(begin, at + UNIT_BYTES - begin, wait=wait)
            if found is None:
                return None
            if len(found) < at + UNIT_BYTES - begin:  # the file ends, or the tail begins, within
                begin, found = at, self._log.read(at, UNIT_BYTES, wait=wait)
                if found is None:
                    return None
            self._block, self._block_from = found, begin
        unit = read_unit(self._block, at - self._block_from)
        if unit is None:
            raise StoreDamaged(f"{self._log.folder} has no valid unit at {at}")
        return unit

    def arrange(self) -> None:
        """Reverse the chain, which was read from its end, and append units that came meanwhile."""
        self._block = b""
        self._arranged = True
        for units in self._units.values():
            units.reverse()
        for time in [time for time in self._units if time < self.due_ms]:
            self.count -= len(self._units.pop(time)) // 2
        self.done = min(self.done, len(self._units.get(self.due_ms, ())) // 2)
        self.count -= self.done
        self._times = sorted(self._units)
        late, self._late = self._late, []
        for unit in late:
            self.add(unit)

    def _take(self, unit: Unit) -> None:
        """Add a unit that was read; its two numbers are in reverse order until `arrange`."""
        if unit.magic & (MAGIC_DELETE | MAGIC_ROLL) == MAGIC_DELETE:
            self.recalls.append((unit.offset, unit.size))
            return
        due_ms = self.time_of(unit)
        units = self._units.get(due_ms)
        if units is None:
            units = self._units[due_ms] = array("q")
        units.append(self._packed(unit))
        units.append(unit.offset)
        self.count += 1

    def _packed(self, unit: Unit) -> int:
        waited = min(max(self.slot_ms - unit.written_ms, 0) // self.precision_ms, _WAITED_MAX)
        return unit.size << 32 | (_ROLL_BIT if unit.magic & MAGIC_ROLL else 0) | waited

    def time_of(self, unit: Unit) -> int:
        """When a unit of this slot is due. A unit of RocketMQ does not say: then at the end of the
        slot, or at its begin if it has to be rolled."""
        if unit.due_ms > 0:
            return unit.due_ms
        return self.slot_ms if unit.magic & MAGIC_ROLL else self.end_ms

    # --- what comes later

    def add(self, unit: Unit) -> None:
        """Add a message that came into the slot after its chain was read."""
        if not self._arranged:
            self._late.append(unit)
            return
        due_ms = max(self.time_of(unit), self.due_ms)
        units = self._units.get(due_ms)
        if units is None:
            units = self._units[due_ms] = array("q")
            insort(self._times, due_ms)
        units.append(unit.offset)
        units.append(self._packed(unit))
        self.count += 1

    # --- delivering

    def head(self) -> TimerMessage | None:
        """The next message."""
        for due_ms in self._times:
            done = self.done if due_ms == self.due_ms else 0
            units = self._units[due_ms]
            if 2 * done < len(units):
                return self._message(due_ms, units, done)
        return None

    def pop(self, due_ms: int) -> None:
        """The next message, due at this time, is delivered."""
        if due_ms != self.due_ms:
            self.due_ms, self.done = due_ms, 0
            while self._times[0] < due_ms:
                del self._units[self._times.pop(0)]
        self.done += 1
        self.count -= 1

    def ahead(
        self, cursor: tuple[int, int], until_ms: int, most: int, bytes_most: int
    ) -> tuple[list[TimerMessage], tuple[int, int]]:
        """Messages after a cursor (time, number at that time) that are due up to a time, and the
        cursor after them. The last one may exceed `bytes_most`."""
        found: list[TimerMessage] = []
        cursor = time, number = max(cursor, (self.due_ms, self.done))  # earlier ones are delivered
        for due_ms in self._times:
            if due_ms < time:
                continue
            if due_ms > until_ms or len(found) >= most or bytes_most <= 0:
                break
            units = self._units[due_ms]
            at = number if due_ms == time else 0
            while at < len(units) // 2 and len(found) < most and bytes_most > 0:
                found.append(self._message(due_ms, units, at))
                bytes_most -= found[-1].size
                at += 1
            cursor = (due_ms, at)
        return found, cursor

    def _message(self, due_ms: int, units: "array[int]", number: int) -> TimerMessage:
        offset, packed = units[2 * number], units[2 * number + 1]
        enqueued_ms = self.slot_ms - (packed & _WAITED_MAX) * self.precision_ms
        return TimerMessage(due_ms, offset, packed >> 32, enqueued_ms, roll=packed & _ROLL_BIT != 0)
