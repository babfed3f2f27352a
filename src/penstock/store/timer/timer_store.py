"""The files of the timer: adding units, flushing them, and recovery at start-up.

    timerlog/           a unit for every waiting message
    timerwheel          the chain of units of every slot
    config/timercheck   the checkpoint (and a copy, .bak)

The checkpoint has RocketMQ's 56 bytes and behind them, in the same sector, Penstock's own fields:
the position in the slot that is being delivered, and the precision. All fields describe the same
point in time. The checkpoint is written after the timer log and the wheel, and only when the
CommitLog is durable up to its end at that time. So a start finds at least everything that the
checkpoint describes:

1. units behind the checkpoint's end are accepted while they are valid and their messages exist;
2. slots that point behind the last accepted unit are moved back along their chains;
3. the queue of timed messages is read on from the message of the last unit.

If the files contradict each other they are rebuilt from the queue: from its first message on,
without messages that were due before the checkpoint. Until that is done, the checkpoint says that
it has to be done.
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
"""Rolled messages are spread over this fraction of the roll window."""
_OURS: Final = struct.Struct(">8s8q")
_CRC: Final = struct.Struct(">I")
_OURS_AT: Final = 64
_OURS_MAGIC: Final = b"PENSTOCK"
_CLEAN: Final = 1
_REBUILDING: Final = 2


class TimerProgress(NamedTuple):
    """The state of the timer at one time."""

    read_ms: int = 0  # slots before are delivered
    log_end: int = 0  # of the timer log
    queue_offset: int = 0  # the next message of the queue to add to the timer log
    due_ms: int = 0  # in the slot `read_ms`, messages due before are delivered
    done: int = 0  # and this many of those due at this millisecond


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that was read."""

    progress: TimerProgress
    ours: bool  # from Penstock's fields, not RocketMQ's
    precision_ms: int
    clean: bool
    rebuilding: bool = False  # the files were being rebuilt


class TimerStore:
    """Wheel, log and checkpoint of a broker's timer; single writer."""

    def __init__(
        self, disk: Disk, root: Path, *, precision_ms: int, segment_bytes: int, now_ms: int
    ) -> None:
        self.disk = disk
        self.precision_ms = precision_ms
        self.log = TimerLog(disk, root / "timerlog", segment_bytes)
        self.wheel = TimerWheel(disk, root / "timerwheel", precision_ms)
        self._check_file = root / "config" / "timercheck"
        self.progress = TimerProgress(read_ms=self.slot_of(now_ms))
        self.checkpointed = TimerProgress()  # the progress that the checkpoint holds
        self.rebuilding = False
        """Whether everything is read from the queue again, until `rebuild_done`."""
        self._before_rebuild = TimerProgress()  # while rebuilding: what was delivered before
        self.clean = True
        self._version = DataVersion()
        self._backup_ms = 0  # of the last copy of the checkpoint
        self._rolls = 0
        self._flushing: tuple[int, TimerProgress | None, bool] = (0, None, False)

    # --- slots

    def slot_of(self, ms: int) -> int:
        return ms - ms % self.precision_ms

    def choose_slot(self, slot_ms: int, now_ms: int, window_ms: int) -> tuple[int, bool]:
        """The slot for a unit that is due in `slot_ms`, and whether it is rolled from there."""
        precision, read_ms = self.precision_ms, self.progress.read_ms
        now_slot_ms = self.slot_of(now_ms)
        far_ms = slot_ms - now_slot_ms
        roll = far_ms >= window_ms
        if roll:
            ahead_ms = window_ms if far_ms - window_ms >= window_ms // 3 else window_ms // 2
            slot_ms = now_slot_ms + self.slot_of(ahead_ms - self._spread(window_ms))
        last_ms = read_ms + (self.wheel.slots - SPARE_SLOTS) * precision  # the wheel ends there
        if slot_ms > last_ms:
            slot_ms, roll = last_ms, True
        return max(slot_ms, read_ms), roll

    def _spread(self, window_ms: int) -> int:
        """How much earlier a unit is rolled, so that messages sent at once do not roll at once."""
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
        """Add a message to a slot."""
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
        if unit.delay_ms != slot_ms - written_ms:  # the delay does not fit 32 bits
            unit = unit._replace(written_ms=slot_ms, delay_ms=0)
        self.wheel.add(slot_ms, self.log.append(unit), -1 if delete else 1)
        return unit

    def pass_slots(self, to_ms: int) -> None:
        """All slots before this one are delivered."""
        read_ms = self.progress.read_ms
        at_ms = self.wheel.next_used(read_ms, to_ms)
        while at_ms is not None:
            self.wheel.pass_slot(at_ms)
            at_ms = self.wheel.next_used(at_ms + self.precision_ms, to_ms)
        self.progress = self.progress._replace(read_ms=to_ms, due_ms=0, done=0)

    # --- durability

    def flush_job(
        self, durable: TimerProgress | None, log_begin: int, *, clean: bool = False
    ) -> Callable[[], None]:
        """Work for the pool: write new units and slots, then a checkpoint. Then call `flush_done`.

        `durable` is the progress for the checkpoint: what it describes is durable in the CommitLog.
        """
        chunks, end = self.log.unwritten_chunks(), self.log.end
        pages = self.wheel.take_dirty()
        check = self._pack(durable, _CLEAN if clean else 0) if durable is not None else b""

        backup = durable is not None and (clean or durable.read_ms - self._backup_ms >= BACKUP_MS)
        if backup and durable is not None:
            self._backup_ms = durable.read_ms

        def work() -> None:
            try:
                self.log.write(chunks)
                self.wheel.write(pages)
            except BaseException:
                self.wheel.put_back(pages)
                raise
            if check:
                self._write_check(self._check_file, check)
                if backup:
                    self._write_check(self._backup, check)
            self.log.drop_before(log_begin)

        self._flushing = (end, durable, clean)
        return work

    def flush_done(self) -> None:
        """The last flush job has succeeded."""
        end, durable, clean = self._flushing
        self.log.wrote(end)
        if durable is not None:
            self.checkpointed, self.clean = durable, clean
        self.wheel.forget_before(self.checkpointed.read_ms)  # a start begins there

    @property
    def _backup(self) -> Path:
        return self._check_file.with_name("timercheck.bak")

    def checkpoint(self) -> TimerCheckpoint:
        """The checkpoint on the disk."""
        return TimerCheckpoint(
            last_read_time_ms=self.checkpointed.read_ms,
            last_timer_log_flush_pos=self.checkpointed.log_end,
            last_timer_queue_offset=self.checkpointed.queue_offset,
            master_timer_queue_offset=self.checkpointed.queue_offset,
            data_version=self._version,
        )

    def _pack(self, progress: TimerProgress, state: int) -> bytes:
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
        """Write it in place: its fields are in one sector, so a power cut leaves old or new."""
        self.disk.make_directory(path.parent)
        self.disk.write_file(path, page)

    def _read_check(self, now_ms: int) -> LoadedCheckpoint | None:
        for path in (self._check_file, self._backup):
            data = self.disk.read(path)
            try:
                theirs = TimerCheckpoint.unpack(data or b"")
            except BodyError:
                continue
            progress = TimerProgress(
                theirs.last_read_time_ms,
                theirs.last_timer_log_flush_pos,
                theirs.last_timer_queue_offset,
            )
            self._version = theirs.data_version
            ours = _read_ours(data or b"")
            # Every write counts the version up: if it is the same, Penstock's fields are current.
            if ours is not None and ours[1] == theirs.data_version.counter:
                return ours[0]
            oldest_ms = self.slot_of(now_ms) - self.wheel.slots * self.precision_ms
            if 0 <= progress.read_ms < 2 * now_ms and min(progress) >= 0 and any(progress):
                progress = progress._replace(read_ms=max(progress.read_ms, oldest_ms))
                return LoadedCheckpoint(progress, False, self.precision_ms, False)
        return None

    # --- opening

    def open(self, log_end: int, queue_offset_of: Callable[[int], int | None], now_ms: int) -> bool:
        """Recover; waits for the disk. False if everything has to be read from the queue again.

        `log_end` is the CommitLog's; `queue_offset_of` reads the message at a physical offset.
        """
        check = self._read_check(now_ms)
        if check is None:
            if self.disk.names(self.log.folder):
                log.error(
                    "config/timercheck is missing: all messages in the queue of timed messages "
                    "are delivered again"
                )
            self.rebuild(now_ms)
            return False
        try:
            if check.rebuilding:
                raise StoreDamaged("the broker stopped while rebuilding them")
            self.log.load()
            self._recover(check, log_end, queue_offset_of, now_ms)
        except StoreDamaged as error:
            log.error("rebuilding the timer's files from its queue: %s", error)
            self.progress = self.checkpointed = check.progress
            self.rebuild(now_ms)
            return False
        return True

    def rebuild(self, now_ms: int) -> None:
        """Delete the files: everything is read from the queue again; waits for the disk.

        Call it again if it fails.
        """
        known = self.checkpointed != TimerProgress()
        if not self.rebuilding:
            self.rebuilding = True
            self._before_rebuild = self.progress if known else TimerProgress()
        if known:  # else there is no checkpoint
            page = self._pack(self.checkpointed, _REBUILDING)
            self._write_check(self._check_file, page)
            self._write_check(self._backup, page)
        self.log.clear()
        self.wheel.clear()
        self.clean = False
        self.progress = TimerProgress(
            self.slot_of(min(now_ms, self._before_rebuild.read_ms or now_ms))
        )

    def rebuild_done(self) -> None:
        """Everything was read from the queue."""
        self.rebuilding = False

    def was_delivered(self, queue_offset: int, due_ms: int) -> bool:
        """While rebuilding: whether a message was delivered before."""
        before = self._before_rebuild
        return queue_offset < before.queue_offset and due_ms < max(
            before.read_ms + 1, before.due_ms
        )

    def _recover(
        self,
        check: LoadedCheckpoint,
        log_end: int,
        queue_offset_of: Callable[[int], int | None],
        now_ms: int,
    ) -> None:
        recorded = check.progress
        read_ms, end = self.slot_of(recorded.read_ms), recorded.log_end
        self.clean = check.clean
        if check.precision_ms != self.precision_ms:
            raise StoreDamaged(
                f"the precision was {check.precision_ms} ms and is now {self.precision_ms} ms"
            )
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
            self._truncate_chains(read_ms, end)
            for place, unit in found:
                self._replay(read_ms, place, unit)
        self.log.cut(end)
        queue_offset = recorded.queue_offset
        last = found[-1][1] if found else None if check.ours or end == 0 else self._last_unit(end)
        if last is not None:
            offset = queue_offset_of(last.offset)
            queue_offset = offset + 1 if offset is not None else queue_offset
        self.progress = TimerProgress(read_ms, end, queue_offset, recorded.due_ms, recorded.done)
        self.checkpointed = self.progress

    def _check_end(self, end: int) -> None:
        """Check that the checkpoint's end is the end of a unit: else the log is not the same."""
        if end == 0:
            return
        if not self.log.begin <= end <= self.log.end:
            raise StoreDamaged(f"{self.log.folder} does not reach {end}, where it ended")
        if end % self.log.segment_bytes:
            self.log.unit(end - UNIT_BYTES)

    def _last_unit(self, end: int) -> Unit | None:
        return self.log.unit(end - UNIT_BYTES) if end % self.log.segment_bytes else None

    def _truncate_chains(self, read_ms: int, end: int) -> None:
        """Move slots that point behind the end back, and check that their last unit is theirs."""
        for slot_ms, slot in list(self.wheel.used(read_ms)):
            last, count = slot.last, slot.units
            while last >= end:
                unit = self.log.unit(last)
                if unit.previous >= last:
                    raise StoreDamaged(f"the unit at {last} links to itself or a later one")
                last, count = unit.previous, count - _change(unit)
            if last < self.log.begin:
                self.wheel.erase(slot_ms)
            elif self.log.unit(last).slot_ms != slot_ms:
                raise StoreDamaged(f"the unit at {last} does not belong to slot {slot_ms}")
            elif last != slot.last:
                self.wheel.set(slot_ms, Slot(min(slot.first, last), last, count))

    def _replay(self, read_ms: int, place: int, unit: Unit) -> None:
        if unit.slot_ms < read_ms:
            return
        slot = self.wheel.get(unit.slot_ms)
        if slot is None or slot.last < place:
            self.wheel.add(unit.slot_ms, place, _change(unit))

    def _rebuild_wheel(self, read_ms: int, end: int) -> None:
        """Rebuild the wheel from the timer log, which has all chains."""
        if end > 0:
            log.warning(
                "%s is missing or not valid: rebuilding it from %s",
                self.wheel.path,
                self.log.folder,
            )
        self.wheel.clear()
        reached = self.log.begin
        for place, unit in self.log.scan(self.log.begin):
            if place >= end:
                break
            self._replay(read_ms, place, unit)
            reached = place + UNIT_BYTES
        if reached < end and end % self.log.segment_bytes:
            raise StoreDamaged(f"{self.log.folder} has no valid unit at {reached}")

    def count_topics(self) -> dict[int, int]:
        """The number of waiting messages by the hash of their topic; waits for the disk."""
        counts: dict[int, int] = {}
        for _, unit in self.log.scan(self.log.begin):
            if unit.slot_ms >= self.progress.read_ms:
                counts[unit.topic_hash] = counts.get(unit.topic_hash, 0) + _change(unit)
        return counts

    def first_offsets(self) -> list[tuple[int, int]]:
        """(end of a slot, log offset): until that slot is delivered, messages from the offset on
        are needed; waits for the disk."""
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


def _read_ours(data: bytes) -> tuple[LoadedCheckpoint, int] | None:
    """Penstock's part of a checkpoint, and its version."""
    ours = data[_OURS_AT : _OURS_AT + _OURS.size]
    if len(data) < _OURS_AT + _OURS.size + _CRC.size or not ours.startswith(_OURS_MAGIC):
        return None
    if _CRC.unpack_from(data, _OURS_AT + _OURS.size)[0] != zlib.crc32(ours):
        return None
    _, *progress, precision_ms, state, counter = _OURS.unpack(ours)
    clean, rebuilding = state == _CLEAN, state == _REBUILDING
    return LoadedCheckpoint(
        TimerProgress(*progress), True, precision_ms, clean, rebuilding
    ), counter


def _change(unit: Unit) -> int:
    """By how much a unit changes the number of waiting messages."""
    return -1 if unit.magic & MAGIC_DELETE else 1


def _i32(value: int) -> int:
    return max(min(value, (1 << 31) - 1), -(1 << 31))
