"""The files of the timer: adding units, flushing them, and recovery at start-up.

    timerlog/           a unit for every waiting message
    timerwheel          the chain of units of every slot
    config/timercheck   the checkpoint (and a copy, .bak)

The checkpoint is written after the timer log and the wheel, and only when the CommitLog is durable
up to its end at that time. So a start finds at least everything that the checkpoint describes:

1. units behind the checkpoint's end are accepted while they are valid and their messages exist;
2. slots that point behind the last accepted unit are moved back along their chains;
3. the wheel has to match the checksum in the checkpoint or, after a crash, the units in the timer
   log, else it is rebuilt from them;
4. the queue of timed messages is read on after the message of the last unit, or from it on if
   only some of its units were written.

If the timer log is damaged, or the files contradict each other, they are rebuilt from the queue:
from its first message on, without messages that were due before the checkpoint. Until that is done,
the checkpoint says that it has to be done. The same is done if the clock was set back: the slots
that were passed can't be used again, because their units are still in the log.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.errors import StoreDamaged
from penstock.store.disk import Disk
from penstock.store.timer.timer_checkpoint import (
    REBUILDING,
    RUNNING,
    LoadedCheckpoint,
    TimerCheckpointFile,
    TimerProgress,
    clean_state,
)
from penstock.store.timer.timer_log import (
    MAGIC_COPY,
    MAGIC_DELETE,
    MAGIC_PLAIN,
    MAGIC_ROLL,
    NOWHERE,
    UNIT_BYTES,
    TimerLog,
    Unit,
)
from penstock.store.timer.timer_wheel import SPARE_SLOTS, Slot, TimerWheel
from penstock.wire.bodies.table_bodies import TimerCheckpoint

log = logging.getLogger(__name__)

CLOCK_BACK_MS_MAX: Final = 10_000
"""If the clock is further behind the slot in progress, it was set back."""
_SPREAD: Final = 8
"""Rolled messages are spread over this fraction of the roll window."""


class TimerStore:
    """Wheel, log and checkpoint of a broker's timer; single writer."""

    def __init__(
        self, disk: Disk, root: Path, *, precision_ms: int, segment_bytes: int, now_ms: int
    ) -> None:
        self.disk = disk
        self.precision_ms = precision_ms
        self.log = TimerLog(disk, root / "timerlog", segment_bytes)
        self.wheel = TimerWheel(disk, root / "timerwheel", precision_ms)
        self._check = TimerCheckpointFile(disk, root / "config" / "timercheck", precision_ms)
        self.progress = TimerProgress(read_ms=self.slot_of(now_ms))
        self.checkpointed = TimerProgress()  # the progress that the checkpoint holds
        self.rebuilding = False
        """Whether everything is read from the queue again, until `rebuild_done`."""
        self._before_rebuild = TimerProgress()  # while rebuilding: what was delivered before
        self.clean = True
        self._topic_counts: dict[int, int] | None = None  # counted while recovering
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
        copy: bool = False,
    ) -> Unit:
        """Add a message to a slot.

        A message that is added to several slots is a `copy` in all but the last call.
        """
        slot = self.wheel.get(slot_ms)
        written_ms = self.slot_of(now_ms)
        unit = Unit(
            slot.last if slot is not None else NOWHERE,
            MAGIC_PLAIN
            | (MAGIC_ROLL if roll else 0)
            | (MAGIC_DELETE if delete else 0)
            | (MAGIC_COPY if copy else 0),
            written_ms,
            _i32(slot_ms - written_ms),
            offset,
            size,
            topic_hash,
            due_ms,
        )
        if unit.delay_ms != slot_ms - written_ms:  # the delay does not fit 32 bits
            unit = unit._replace(written_ms=slot_ms, delay_ms=0)
        self.wheel.add(slot_ms, self.log.append(unit), _change(unit))
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
        check, backup = b"", False
        if durable is not None:
            state = clean_state(self.wheel.checksum(durable.read_ms)) if clean else RUNNING
            check = self._check.pack(durable, state)
            backup = self._check.backup_is_due(durable.read_ms) or clean

        def work() -> None:
            try:
                self.log.write(chunks)
                self.wheel.write(pages)
            except BaseException:
                self.wheel.put_back(pages)
                raise
            if check:
                self._check.write(check, backup=backup)
            self.log.drop_before(log_begin)

        self._flushing = (end, durable, clean)
        return work

    def flush_done(self) -> None:
        """The last flush job has succeeded."""
        end, durable, clean = self._flushing
        self.log.wrote(end)
        if durable is not None:
            self.checkpointed, self.clean = durable, clean
        self.wheel.forget_before(self.done_to_ms)

    @property
    def done_to_ms(self) -> int:
        """Slots before are not needed, now or by a start that begins at the checkpoint. While the
        files are rebuilt because the clock was set back, the checkpoint is ahead."""
        return min(self.checkpointed.read_ms, self.progress.read_ms)

    def checkpoint(self) -> TimerCheckpoint:
        """The checkpoint on the disk."""
        return self._check.fields(self.checkpointed)

    # --- opening

    def open(self, log_end: int, queue_offset_of: Callable[[int], int | None], now_ms: int) -> bool:
        """Recover; waits for the disk. False if everything has to be read from the queue again.

        `log_end` is the CommitLog's; `queue_offset_of` reads the message at a physical offset.
        """
        check = self._check.read(now_ms, self.wheel.slots * self.precision_ms)
        if check is None:
            if self.disk.names(self.log.folder):
                log.error(
                    "config/timercheck is missing: all messages in the queue of timed messages "
                    "are delivered again"
                )
            self.rebuild(now_ms)
            return False
        if check.backup:
            log.warning(
                "config/timercheck is missing or not valid: using its .bak; messages that were "
                "delivered since then are delivered again"
            )
        try:
            if check.rebuilding:
                raise StoreDamaged("the broker stopped while rebuilding them")
            self.check_clock(check.progress, now_ms)
            self.log.load()
            self._recover(check, log_end, queue_offset_of, now_ms)
        except StoreDamaged as error:
            log.warning("rebuilding the timer's files from its queue: %s", error)
            self.progress = self.checkpointed = check.progress
            self.rebuild(now_ms)
            return False
        return True

    def check_clock(self, progress: TimerProgress, now_ms: int) -> None:
        """Raise StoreDamaged if the clock was set back: until it reaches the slot in progress
        again, new messages would be late."""
        back_ms = progress.read_ms - now_ms
        if back_ms > CLOCK_BACK_MS_MAX:
            raise StoreDamaged(f"the clock was set back by {back_ms // 1000} s or more")

    def rebuild(self, now_ms: int) -> None:
        """Delete the files: everything is read from the queue again; waits for the disk.

        Call it again if it fails.
        """
        known = self.checkpointed != TimerProgress()
        if not self.rebuilding:
            self.rebuilding = True
            self._before_rebuild = self.progress if known else TimerProgress()
        if known:  # else there is no checkpoint
            self._check.write(self._check.pack(self.checkpointed, REBUILDING), backup=True)
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
        if check.precision_ms != self.precision_ms:
            raise StoreDamaged(
                f"the precision was {check.precision_ms} ms and is now {self.precision_ms} ms"
            )
        self._check_end(end)
        found: list[tuple[int, Unit]] = []
        for place, unit in self.log.scan(end):
            if unit.offset + unit.size > log_end:
                break
            found.append((place, unit))
            end = place + UNIT_BYTES
        self.clean = check.clean and not found
        self._recover_wheel(check, found, end, now_ms)
        self.log.cut(end)
        queue_offset = recorded.queue_offset
        last = found[-1][1] if found else None if check.ours or end == 0 else self._last_unit(end)
        if last is not None:
            offset = queue_offset_of(last.offset)
            if offset is not None:  # after a copy, the unit that counts is still to be added
                queue_offset = offset if last.magic & MAGIC_COPY else offset + 1
        self.progress = TimerProgress(read_ms, end, queue_offset, recorded.due_ms, recorded.done)
        self.checkpointed = self.progress

    def _recover_wheel(
        self, check: LoadedCheckpoint, found: list[tuple[int, Unit]], end: int, now_ms: int
    ) -> None:
        """Load the wheel as the checkpoint describes it, and add the units found after that."""
        read_ms, checksum = self.slot_of(check.progress.read_ms), check.wheel_checksum
        loaded = self.wheel.load(read_ms, now_ms)
        if loaded:
            self._truncate_chains(read_ms, check.progress.log_end)
            known = checksum is not None and self.wheel.checksum(read_ms) == checksum
            for place, unit in found:
                self._replay(read_ms, place, unit)
            if known:
                return
        slots = self._scan_slots(read_ms, end)
        if loaded and checksum is None and self._matches(read_ms, slots):
            return
        if end > 0:
            log.warning(
                "%s is missing or not valid: rebuilding it from %s",
                self.wheel.path,
                self.log.folder,
            )
        self.wheel.clear()
        for slot_ms, slot in slots.items():
            self.wheel.set(slot_ms, slot)

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

    def _scan_slots(self, read_ms: int, end: int) -> dict[int, Slot]:
        """The chains of all slots from `read_ms` on, read from the timer log; waits for the disk.

        Counts the messages by topic too, which needs the same scan.
        """
        slots: dict[int, list[int]] = {}
        counts: dict[int, int] = {}
        reached = self.log.begin
        for place, unit in self.log.scan(self.log.begin):
            if place >= end:
                break
            reached = place + UNIT_BYTES
            slot_ms, change = unit.slot_ms, _change(unit)
            if slot_ms >= read_ms:
                slot = slots.get(slot_ms)
                if slot is None:
                    slots[slot_ms] = [place, place, change]
                else:
                    slot[1] = place
                    slot[2] += change
                counts[unit.topic_hash] = counts.get(unit.topic_hash, 0) + change
        if reached < end and end % self.log.segment_bytes:
            raise StoreDamaged(f"{self.log.folder} has no valid unit at {reached}")
        self._topic_counts = counts
        return {slot_ms: Slot(*slot) for slot_ms, slot in slots.items()}

    def _matches(self, read_ms: int, slots: dict[int, Slot]) -> bool:
        """Whether the wheel has these chains; old segments of a chain may be deleted."""
        used = dict(self.wheel.used(read_ms))
        return used.keys() == slots.keys() and all(
            slot == slots[slot_ms]
            or (slot.first < self.log.begin and slot.last == slots[slot_ms].last)
            for slot_ms, slot in used.items()
        )

    def count_topics(self) -> dict[int, int]:
        """The number of waiting messages by the hash of their topic; may wait for the disk."""
        if self._topic_counts is None:
            self._scan_slots(self.progress.read_ms, self.log.end)
        counts, self._topic_counts = self._topic_counts, None
        return counts or {}

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


def _change(unit: Unit) -> int:
    """By how much a unit changes the number of waiting messages."""
    if unit.magic & MAGIC_COPY:
        return 0
    return -1 if unit.magic & MAGIC_DELETE else 1


def _i32(value: int) -> int:
    return max(min(value, (1 << 31) - 1), -(1 << 31))
