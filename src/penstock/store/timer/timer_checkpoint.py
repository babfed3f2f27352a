"""The timer's checkpoint, `config/timercheck`, and its copy `timercheck.bak`.

It has RocketMQ's 56 bytes and behind them, in the same sector, Penstock's own fields: the position
in the slot that is being delivered, the precision, and how the broker stopped. After a clean stop
the state contains the checksum of the wheel. All fields describe the same point in time.
"""

import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import BodyError
from penstock.store.disk import Disk
from penstock.wire.bodies.client_bodies import DataVersion
from penstock.wire.bodies.table_bodies import TimerCheckpoint

CHECK_BYTES: Final = 4096
BACKUP_MS: Final = 60_000
_OURS: Final = struct.Struct(">8s8q")
_CRC: Final = struct.Struct(">I")
_OURS_AT: Final = 64
_OURS_MAGIC: Final = b"PENSTOCK"
RUNNING: Final = 0
_CLEAN: Final = 1
REBUILDING: Final = 2
_STATE_MASK: Final = 0xFF
_CHECKSUM_AT: Final = 8
_HAS_CHECKSUM: Final = 1 << 40


def clean_state(wheel_checksum: int) -> int:
    """The state after a clean stop."""
    return _CLEAN | _HAS_CHECKSUM | wheel_checksum << _CHECKSUM_AT


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
    state: int = RUNNING
    backup: bool = False  # from the copy

    @property
    def clean(self) -> bool:
        return self.state & _STATE_MASK == _CLEAN

    @property
    def rebuilding(self) -> bool:
        """Whether the files were being rebuilt."""
        return self.state & _STATE_MASK == REBUILDING

    @property
    def wheel_checksum(self) -> int | None:
        """The checksum of the wheel's file; None if it is not known."""
        if not self.clean or not self.state & _HAS_CHECKSUM:
            return None
        return self.state >> _CHECKSUM_AT & 0xFFFFFFFF


class TimerCheckpointFile:
    """Writes and reads the checkpoint."""

    def __init__(self, disk: Disk, path: Path, precision_ms: int) -> None:
        self._disk = disk
        self._path = path
        self._backup = path.with_name(path.name + ".bak")
        self._precision_ms = precision_ms
        self._version = DataVersion()
        self._backup_ms = 0  # of the last copy

    def backup_is_due(self, read_ms: int) -> bool:
        """Whether the copy is to be written too; then the next one is due after BACKUP_MS."""
        due = not 0 <= read_ms - self._backup_ms < BACKUP_MS
        if due:
            self._backup_ms = read_ms
        return due

    def fields(self, progress: TimerProgress) -> TimerCheckpoint:
        """RocketMQ's fields."""
        return TimerCheckpoint(
            last_read_time_ms=progress.read_ms,
            last_timer_log_flush_pos=progress.log_end,
            last_timer_queue_offset=progress.queue_offset,
            master_timer_queue_offset=progress.queue_offset,
            data_version=self._version,
        )

    def pack(self, progress: TimerProgress, state: int) -> bytes:
        """The content of the file, with the next version."""
        self._version = self._version.next(max(progress.read_ms, 0))
        page = bytearray(CHECK_BYTES)
        fields = self.fields(progress).pack()
        page[: len(fields)] = fields
        ours = _OURS.pack(_OURS_MAGIC, *progress, self._precision_ms, state, self._version.counter)
        page[_OURS_AT : _OURS_AT + len(ours)] = ours
        _CRC.pack_into(page, _OURS_AT + len(ours), zlib.crc32(ours))
        return bytes(page)

    def write(self, page: bytes, *, backup: bool) -> None:
        """Write it in place: its fields are in one sector, so a power cut leaves old or new."""
        self._disk.make_directory(self._path.parent)
        self._disk.write_file(self._path, page)
        if backup:
            self._disk.write_file(self._backup, page)

    def read(self, now_ms: int, wheel_ms: int) -> LoadedCheckpoint | None:
        """The checkpoint, or else its copy; `wheel_ms` is the time that the wheel spans."""
        for backup in (False, True):
            data = self._disk.read(self._backup if backup else self._path) or b""
            try:
                theirs = TimerCheckpoint.unpack(data)
            except BodyError:
                continue
            progress = TimerProgress(
                theirs.last_read_time_ms,
                theirs.last_timer_log_flush_pos,
                theirs.last_timer_queue_offset,
            )
            self._version = theirs.data_version
            ours = _read_ours(data)
            # Every write counts the version up: if it is the same, Penstock's fields are current.
            if ours is not None and ours[1] == theirs.data_version.counter:
                return replace(ours[0], backup=backup)
            if 0 <= progress.read_ms < 2 * now_ms and min(progress) >= 0 and any(progress):
                oldest_ms = now_ms - now_ms % self._precision_ms - wheel_ms
                progress = progress._replace(read_ms=max(progress.read_ms, oldest_ms))
                return LoadedCheckpoint(progress, False, self._precision_ms, backup=backup)
        return None


def _read_ours(data: bytes) -> tuple[LoadedCheckpoint, int] | None:
    """Penstock's part of a checkpoint, and its version."""
    ours = data[_OURS_AT : _OURS_AT + _OURS.size]
    if len(data) < _OURS_AT + _OURS.size + _CRC.size or not ours.startswith(_OURS_MAGIC):
        return None
    if _CRC.unpack_from(data, _OURS_AT + _OURS.size)[0] != zlib.crc32(ours):
        return None
    _, *progress, precision_ms, state, counter = _OURS.unpack(ours)
    return LoadedCheckpoint(TimerProgress(*progress), True, precision_ms, state), counter
