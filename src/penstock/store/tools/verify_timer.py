"""Checks the timer's files: each entry of the timer log, and that the wheel lists all that wait.

All problems are notes: the broker finds them when it starts and rebuilds the files from the log of
messages. The files of a live store change all the time and are not checked.
"""

from collections.abc import Iterator
from pathlib import Path

from penstock.store.disk import Disk
from penstock.store.segment import NAME_DIGITS, is_number
from penstock.store.timer.timer_checkpoint import LoadedCheckpoint, TimerCheckpointFile
from penstock.store.timer.timer_log import SEGMENT_BYTES_MIN, UNIT_BYTES, Unit, is_filler, read_unit
from penstock.store.timer.timer_wheel import TimerWheel
from penstock.store.tools.problem import NOTE, Problem
from penstock.store.tools.verification_state import VerificationState

_REBUILT = "the broker rebuilds it when it starts"


def check_timer(state: VerificationState) -> Iterator[Problem]:
    """The problems of the timer's files, if Penstock wrote them."""
    root, disk = state.files.root, Disk()
    if state.files.live:
        return
    path = root / "config" / "timercheck"
    check = TimerCheckpointFile(disk, path, 1).read(now_ms=0, wheel_ms=0)  # Penstock's own fields
    names = [n for n in disk.names(root / "timerlog") if is_number(n) and len(n) == NAME_DIGITS]
    if check is None:
        if names and not path.exists():
            text = "is missing: the broker delivers all messages in the timer's queue again"
            yield Problem(NOTE, "timer.checkpoint", "config/timercheck", 0, text)
        return
    if check.rebuilding:
        return
    slots: dict[int, int] = {}  # by slot: its last unit
    reached = int(names[0]) if names else 0
    for place, unit in _units(root / "timerlog", names, check.progress.log_end):
        reached = place + UNIT_BYTES
        if unit is None:
            name = max(name for name in names if int(name) <= place)
            text = f"an entry is not valid: {_REBUILT}"
            yield Problem(NOTE, "timer.log", f"timerlog/{name}", place - int(name), text)
            return
        if unit.slot_ms >= check.progress.read_ms:
            slots[unit.slot_ms] = place
    if reached < check.progress.log_end:
        text = f"ends at {reached}, before {check.progress.log_end}: {_REBUILT}"
        yield Problem(NOTE, "timer.log", "timerlog", reached, text)
    elif not _wheel_is_valid(disk, root / "timerwheel", check, slots):
        text = f"does not list all waiting messages: {_REBUILT}"
        yield Problem(NOTE, "timer.wheel", "timerwheel", 0, text)


def _units(folder: Path, names: list[str], end: int) -> Iterator[tuple[int, Unit | None]]:
    """The units before `end` and their positions; None for one that is not valid."""
    for name in names:
        data, start = (folder / name).read_bytes(), int(name)
        for at in range(0, min(len(data) - SEGMENT_BYTES_MIN + 1, end - start), UNIT_BYTES):
            unit = read_unit(data, at)
            yield start + at, unit
            if unit is None or is_filler(data, at + UNIT_BYTES):
                break


def _wheel_is_valid(disk: Disk, path: Path, check: LoadedCheckpoint, slots: dict[int, int]) -> bool:
    """Whether the wheel has these chains, or longer ones, and matches the checkpoint's checksum."""
    wheel, read_ms = TimerWheel(disk, path, check.precision_ms), check.progress.read_ms
    if not wheel.load(read_ms, read_ms):
        return not slots
    for slot_ms, last in slots.items():
        slot = wheel.get(slot_ms)
        if slot is None or slot.last < last:
            return False
    checksum = check.wheel_checksum
    return checksum is None or wheel.checksum(read_ms) == checksum
