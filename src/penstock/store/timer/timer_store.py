"""The files of the timer together: where units go, what is durable, what a start finds.

    timerlog/           a unit for every message that waits
    timerwheel          the chain of units of every slot
    config/timercheck   how far everything is (and .bak, for the case that somebody loses it)

The checkpoint has RocketMQ's 56 bytes, and behind them, in the same sector, what is ours: how far
the slot in work is, and the slots' length. All of it speaks of one moment, and it is written when
the log of messages is durable up to where it ended at that moment, after the timer log and after
the wheel. So a start finds everything that the checkpoint speaks of, and perhaps more:

1. units behind the checkpoint's end count as far as they are whole and their messages exist;
2. slots that point behind that are led back along their chains;
3. the queue is read on from the message of the last unit.

Where the files contradict themselves, they are made anew from the queue: from its first message on,
without those that were taken from it and due before the checkpoint. Until that is done, the
checkpoint says that it has to be done.
"""

import logging
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import BodyError, StoreDamaged
from penstock.store.disk import Disk
from penstock.store.timer.timer_log import (
    MAGIC_DELETE,
    MAGIC_PLAIN,
    MAGIC_ROLL,
    NOWHERE,
    UNIT_BYTES,
    TimerLog,
    Unit,
)
from penstock.store.timer.timer_wheel import SPARE_SLOTS, Slot, TimerWheel
from penstock.wire.bodies.client_bodies import DataVersion
from penstock.wire.bodies.table_bodies import TimerCheckpoint

log = logging.getLogger(__name__)

CHECK_BYTES: Final = 4096
BACKUP_MS: Final = 60_000
_SPREAD: Final = 8
"""Messages roll on within this part of the window."""
_OURS: Final = struct.Struct(">8s8q")
_CRC: Final = struct.Struct(">I")
_OURS_AT: Final = 64
_OURS_MAGIC: Final = b"PENSTOCK"
_CLEAN: Final = 1
_ANEW: Final = 2


class Progress(NamedTuple):
    """How far the timer is at one moment."""

    read_ms: int = 0  # slots before are done
    log_end: int = 0  # of the timer log
    queue_offset: int = 0  # the next message to take into the timer log
    due_ms: int = 0  # in the slot `read_ms`, what is due before is done
    done: int = 0  # and so many that are due at this millisecond


@dataclass(frozen=True, slots=True)
class Check:
    """A checkpoint that was read."""

    progress: Progress
    ours: bool  # the fields of one moment, not RocketMQ's
    precision_ms: int
    clean: bool
    anew: bool = False  # the files are being made anew


class TimerStore:
    """Wheel, log and checkpoint of a broker's timer. One writer."""

    def __init__(
        self, disk: Disk, root: Path, *, precision_ms: int, segment_bytes: int, now_ms: int
    ) -> None:
        self.disk = disk
        self.precision_ms = precision_ms
        self.log = TimerLog(disk, root / "timerlog", segment_bytes)
        self.wheel = TimerWheel(disk, root / "timerwheel", precision_ms)
        self._check_file = root / "config" / "timercheck"
        self.progress = Progress(read_ms=self.slot_of(now_ms))
        self.noted = Progress()  # as the checkpoint has it
        self.rebuilding = False
        """Everything is taken from the queue again. Whoever does that says when it is done."""
        self._told = Progress()  # while that goes on: what is known to be done
        self.clean = True
        self._version = DataVersion()
        self._backed_ms = 0
        self._rolls = 0
        self._rounded: tuple[int, Progress | None, bool] = (0, None, False)

    # --- slots

    def slot_of(self, ms: int) -> int:
        return ms - ms % self.precision_ms

    def place(self, slot_ms: int, now_ms: int, window_ms: int) -> tuple[int, bool]:
        """Where a unit for this slot goes, and whether it has to be rolled on from there."""
        precision, read_ms = self.precision_ms, self.progress.read_ms
        now_slot_ms = self.slot_of(now_ms)
        far_ms = slot_ms - now_slot_ms
        roll = far_ms >= window_ms
        if roll:
            ahead_ms = window_ms if far_ms - window_ms >= window_ms // 3 else window_ms // 2
            slot_ms = now_slot_ms + self.slot_of(ahead_ms - self._spread(window_ms))
        last_ms = (
            read_ms + (self.wheel.slots - SPARE_SLOTS) * precision
        )  # the wheel has not turned further
        if slot_ms > last_ms:
            slot_ms, roll = last_ms, True
        return max(slot_ms, read_ms), roll

    def _spread(self, window_ms: int) -> int:
        """So much earlier: what was sent in one go must not have to be stored again in one go."""
        slots = max(window_ms // _SPREAD // self.precision_ms, 1)
        self._rolls = (self._rolls + 1) % slots
        return (slots - 1 - self._rolls) * self.precision_ms

    def add(
        self,
        slot_ms: int,
        now_ms: int,
        *,
        offset: int,
        size: int,
        topic_hash: int,
        due_ms: int,
        roll: bool,
        delete: bool,
    ) -> Unit:
        """Let a message wait in a slot."""
        slot = self.wheel.get(slot_ms)
        written_ms = self.slot_of(now_ms)
        unit = Unit(
            slot.last if slot is not None else NOWHERE,
            MAGIC_PLAIN | (MAGIC_ROLL if roll else 0) | (MAGIC_DELETE if delete else 0),
            written_ms,
            _i32(slot_ms - written_ms),
            offset,
            size,
            topic_hash,
            due_ms,
        )
        if unit.delay_ms != slot_ms - written_ms:  # so long ago that it can't be said
            unit = unit._replace(written_ms=slot_ms, delay_ms=0)
        self.wheel.add(slot_ms, self.log.append(unit), -1 if delete else 1)
        return unit

    def pass_slots(self, to_ms: int) -> None:
        """Everything before this slot is done."""
        read_ms = self.progress.read_ms
        at_ms = self.wheel.next_used(read_ms, to_ms)
        while at_ms is not None:
            self.wheel.passed(at_ms)
            at_ms = self.wheel.next_used(at_ms + self.precision_ms, to_ms)
        self.progress = self.progress._replace(read_ms=to_ms, due_ms=0, done=0)

    # --- durability

    def round(
        self, noted: Progress | None, log_begin: int, *, clean: bool = False
    ) -> Callable[[], None]:
        """Work for the pool: write what is new, and then a checkpoint. Call `rounded` after it.

        `noted` is progress whose traces in the log of messages are durable.
        """
        pieces, end = self.log.pieces(), self.log.end
        pages = self.wheel.take_dirty()
        check = self._pack(noted, _CLEAN if clean else 0) if noted is not None else b""

        backup = noted is not None and (clean or noted.read_ms - self._backed_ms >= BACKUP_MS)
        if backup and noted is not None:
            self._backed_ms = noted.read_ms

        def work() -> None:
            try:
                self.log.write(pieces)
                self.wheel.write(pages)
            except BaseException:
                self.wheel.put_back(pages)
                raise
            if check:
                self._write_check(self._check_file, check)
                if backup:
                    self._write_check(self._backup, check)
            self.log.drop_before(log_begin)

        self._rounded = (end, noted, clean)
        return work

    def rounded(self) -> None:
        """The last round is done."""
        end, noted, clean = self._rounded
        self.log.wrote(end)
        if noted is not None:
            self.noted, self.clean = noted, clean
        self.wheel.forget_before(self.noted.read_ms)  # a start begins there

    @property
    def _backup(self) -> Path:
        return self._check_file.with_name("timercheck.bak")

    def checkpoint(self) -> TimerCheckpoint:
        """How far the timer is, as it is on the disk."""
        return TimerCheckpoint(
            last_read_time_ms=self.noted.read_ms,
            last_timer_log_flush_pos=self.noted.log_end,
            last_timer_queue_offset=self.noted.queue_offset,
            master_timer_queue_offset=self.noted.queue_offset,
            data_version=self._version,
        )

    def _pack(self, progress: Progress, state: int) -> bytes:
        self._version = self._version.next(max(progress.read_ms, 0))
        page = bytearray(CHECK_BYTES)
        fields = TimerCheckpoint(
            last_read_time_ms=progress.read_ms,
            last_timer_log_flush_pos=progress.log_end,
            last_timer_queue_offset=progress.queue_offset,
            master_timer_queue_offset=progress.queue_offset,
            data_version=self._version,
        ).pack()
        page[: len(fields)] = fields
        ours = _OURS.pack(_OURS_MAGIC, *progress, self.precision_ms, state, self._version.counter)
        page[_OURS_AT : _OURS_AT + len(ours)] = ours
        _CRC.pack_into(page, _OURS_AT + len(ours), zlib.crc32(ours))
        return bytes(page)

    def _write_check(self, path: Path, page: bytes) -> None:
        """In place: all that matters lies in one sector, so a power cut leaves old or new."""
        self.disk.make_directory(path.parent)
        self.disk.write_file(path, page)

    def _read_check(self, now_ms: int) -> Check | None:
        for path in (self._check_file, self._backup):
            data = self.disk.read(path)
            try:
                theirs = TimerCheckpoint.unpack(data or b"")
            except BodyError:
                continue
            told = Progress(
                theirs.last_read_time_ms,
                theirs.last_timer_log_flush_pos,
                theirs.last_timer_queue_offset,
            )
            self._version = theirs.data_version
            ours = _read_ours(data or b"")
            # RocketMQ counts its versions: other fields of the same version are damaged ones.
            if ours is not None and ours[1] == theirs.data_version.counter:
                return ours[0]
            oldest_ms = self.slot_of(now_ms) - self.wheel.slots * self.precision_ms
            if 0 <= told.read_ms < 2 * now_ms and min(told) >= 0 and any(told):
                told = told._replace(read_ms=max(told.read_ms, oldest_ms))
                return Check(told, False, self.precision_ms, False)
        return None

    # --- opening

    def open(self, log_end: int, queue_offset_of: Callable[[int], int | None], now_ms: int) -> bool:
        """Find what waits; waits for the disk. False if all has to be taken from the queue again.

        `log_end` is that of the log of messages; `queue_offset_of` reads the message at an offset.
        """
        check = self._read_check(now_ms)
        if check is None:
            if self.disk.names(self.log.folder):
                log.error(
                    "config/timercheck is lost: everything that the queue of timed messages "
                    "has is delivered again"
                )
            self.rebuild(now_ms)
            return False
        try:
            if check.anew:
                raise StoreDamaged("the broker ended before they were complete")
            self.log.load()
            self._recover(check, log_end, queue_offset_of, now_ms)
        except StoreDamaged as error:
            log.error("the timer's files are made anew from its queue: %s", error)
            self.progress = self.noted = check.progress
            self.rebuild(now_ms)
            return False
        return True

    def rebuild(self, now_ms: int) -> None:
        """Drop the files: everything is taken from the queue again; waits for the disk.

        May be called again where it failed.
        """
        known = self.noted != Progress()
        if not self.rebuilding:
            self.rebuilding = True
            self._told = self.progress if known else Progress()
        if known:  # else there is no checkpoint
            page = self._pack(self.noted, _ANEW)
            self._write_check(self._check_file, page)
            self._write_check(self._backup, page)
        self.log.clear()
        self.wheel.clear()
        self.clean = False
        self.progress = Progress(self.slot_of(min(now_ms, self._told.read_ms or now_ms)))

    def was_done(self, queue_offset: int, due_ms: int) -> bool:
        """While everything is taken again: whether a message was delivered before."""
        told = self._told
        return queue_offset < told.queue_offset and due_ms < max(told.read_ms + 1, told.due_ms)

    def _recover(
        self, check: Check, log_end: int, queue_offset_of: Callable[[int], int | None], now_ms: int
    ) -> None:
        told = check.progress
        read_ms, end = self.slot_of(told.read_ms), told.log_end
        self.clean = check.clean
        if check.precision_ms != self.precision_ms:
            raise StoreDamaged(f"slots had {check.precision_ms} ms, now {self.precision_ms}")
        self._check_end(end)
        found = []
        for place, unit in self.log.scan(end):
            if unit.offset + unit.size > log_end:
                break
            found.append((place, unit))
            end = place + UNIT_BYTES
        if not self.wheel.load(read_ms, now_ms):
            self._rebuild_wheel(read_ms, end)
        else:
            self._lead_back(read_ms, end)
            for place, unit in found:
                self._replay(read_ms, place, unit)
        self.log.cut(end)
        queue_offset = told.queue_offset
        last = found[-1][1] if found else None if check.ours or end == 0 else self._last_unit(end)
        if last is not None:
            offset = queue_offset_of(last.offset)
            queue_offset = offset + 1 if offset is not None else queue_offset
        self.progress = Progress(read_ms, end, queue_offset, told.due_ms, told.done)
        self.noted = self.progress

    def _check_end(self, end: int) -> None:
        """The checkpoint's end must be the end of a unit: else the log is another, or shorter."""
        if end == 0:
            return
        if not self.log.begin <= end <= self.log.end:
            raise StoreDamaged(f"{self.log.folder} does not hold {end}, where it ended")
        if end % self.log.segment_bytes:
            self.log.unit(end - UNIT_BYTES)

    def _last_unit(self, end: int) -> Unit | None:
        return self.log.unit(end - UNIT_BYTES) if end % self.log.segment_bytes else None

    def _lead_back(self, read_ms: int, end: int) -> None:
        """Let no slot point behind the end, and look whether its last unit is its own."""
        for slot_ms, slot in list(self.wheel.used(read_ms)):
            last, count = slot.last, slot.units
            while last >= end:
                unit = self.log.unit(last)
                if unit.previous >= last:
                    raise StoreDamaged(f"the unit at {last} comes before itself")
                last, count = unit.previous, count - _change(unit)
            if last < self.log.begin:
                self.wheel.erase(slot_ms)
            elif self.log.unit(last).slot_ms != slot_ms:
                raise StoreDamaged(f"the unit at {last} is not of the slot {slot_ms}")
            elif last != slot.last:
                self.wheel.set(slot_ms, Slot(min(slot.first, last), last, count))

    def _replay(self, read_ms: int, place: int, unit: Unit) -> None:
        if unit.slot_ms < read_ms:
            return
        slot = self.wheel.get(unit.slot_ms)
        if slot is None or slot.last < place:
            self.wheel.add(unit.slot_ms, place, _change(unit))

    def _rebuild_wheel(self, read_ms: int, end: int) -> None:
        """The wheel is lost: the log has all chains."""
        if end > 0:
            log.warning(
                "%s is lost or of another make: made anew from %s", self.wheel.path, self.log.folder
            )
        self.wheel.clear()
        reached = self.log.begin
        for place, unit in self.log.scan(self.log.begin):
            if place >= end:
                break
            self._replay(read_ms, place, unit)
            reached = place + UNIT_BYTES
        if reached < end and end % self.log.segment_bytes:
            raise StoreDamaged(f"{self.log.folder} has no unit at {reached}")

    def count_topics(self) -> dict[int, int]:
        """How many messages wait, by the hash of their topic; waits for the disk."""
        counts: dict[int, int] = {}
        for _, unit in self.log.scan(self.log.begin):
            if unit.slot_ms >= self.progress.read_ms:
                counts[unit.topic_hash] = counts.get(unit.topic_hash, 0) + _change(unit)
        return counts

    def first_offsets(self) -> list[tuple[int, int]]:
        """(end of a slot, log offset): until that slot is done, the messages from there on are
        needed; waits for the disk."""
        found: list[tuple[int, int]] = []
        for slot_ms, slot in self.wheel.used(self.progress.read_ms):
            first = self.log.unit(max(slot.first, self.log.begin)).offset
            found.append((slot_ms + self.precision_ms, first))
        low, marks = 1 << 62, []
        for end_ms, first in reversed(found):
            if first < low:
                low = first
                marks.append((end_ms, first))
        return marks[::-1]

    def close(self) -> None:
        self.log.close()


def _read_ours(data: bytes) -> tuple[Check, int] | None:
    """Our part of a checkpoint, and the version it is of."""
    ours = data[_OURS_AT : _OURS_AT + _OURS.size]
    if len(data) < _OURS_AT + _OURS.size + _CRC.size or not ours.startswith(_OURS_MAGIC):
        return None
    if _CRC.unpack_from(data, _OURS_AT + _OURS.size)[0] != zlib.crc32(ours):
        return None
    _, *progress, precision_ms, state, counter = _OURS.unpack(ours)
    clean, anew = state == _CLEAN, state == _ANEW
    return Check(Progress(*progress), True, precision_ms, clean, anew), counter


def _change(unit: Unit) -> int:
    """By how much a unit changes the count of what waits."""
    return -1 if unit.magic & MAGIC_DELETE else 1


def _i32(value: int) -> int:
    return max(min(value, (1 << 31) - 1), -(1 << 31))
