"""The timer log: one unit for every waiting message, chained by slot, in RocketMQ's layout.

    | 52 i32 | previous i64 | magic i32 | written i64 | delay i32 | offset i64 | size i32 |
    | hash of the topic i32 | due i64 |                                            52 bytes

`previous` is the position of the previous unit of the slot, or -1; `written` + `delay` is the slot.
`due` (reserved in RocketMQ, 0) is the millisecond at which the message is due, in 48 bits. Its 16
upper bits are a CRC of the other 50 bytes, or 0 where there is none. A segment's rest that is too
short for another unit is filled: | rest i32 | 0 i64 | 0xCBD43194 i32 |.

New units stay in memory until the pool has written them. Nothing is mapped: messages that wait for
days take no memory, and a full disk is an error in the pool.
"""

import struct
import threading
from binascii import crc_hqx
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import StoreDamaged
from penstock.store.disk import Disk
from penstock.store.segment import NAME_DIGITS, is_number, segment_name

UNIT_BYTES: Final = 52
FILLER_BYTES: Final = 16
FILLER_MAGIC: Final = 0xCBD43194 - (1 << 32)
SEGMENT_BYTES_MIN: Final = UNIT_BYTES + FILLER_BYTES
MAGIC_PLAIN: Final = 1
MAGIC_ROLL: Final = 2
MAGIC_DELETE: Final = 4
MAGIC_COPY: Final = 8
"""A further unit of a message, which is followed by the unit that counts. RocketMQ ignores the
flag."""
_MAGIC_MAX: Final = 15
NOWHERE: Final = -1

_UNIT: Final = struct.Struct(">iqiqiqiiq")
_CRC_AT: Final = 44
_DUE_AT: Final = 46
_DUE_BITS: Final = 48
_DUE_MASK: Final = (1 << _DUE_BITS) - 1
_FILLER: Final = struct.Struct(">iqi")
_SCAN_UNITS: Final = 20_000


class Unit(NamedTuple):
    """One waiting message."""

    previous: int
    magic: int
    written_ms: int
    delay_ms: int
    offset: int  # of the message in the log
    size: int
    topic_hash: int
    due_ms: int

    @property
    def slot_ms(self) -> int:
        return self.written_ms + self.delay_ms

    def pack(self) -> bytes:
        due_ms = min(max(self.due_ms, 0), _DUE_MASK)
        data = _UNIT.pack(UNIT_BYTES, *self[:-1], due_ms)
        return data[:_CRC_AT] + _crc_of(data).to_bytes(2, "big") + data[_DUE_AT:]


def read_unit(data: bytes, at: int) -> Unit | None:
    """The unit at a position of bytes that were read; None if it is not valid."""
    if len(data) - at < UNIT_BYTES:
        return None
    length, *fields = _UNIT.unpack_from(data, at)
    if length != UNIT_BYTES:
        return None
    crc = fields[-1] >> _DUE_BITS & 0xFFFF
    if crc:
        if _crc_of(data[at : at + UNIT_BYTES]) != crc:
            return None
        fields[-1] &= _DUE_MASK
    unit = Unit._make(fields)
    valid = 0 < unit.magic <= _MAGIC_MAX and unit.offset >= 0 and unit.size > 0
    return unit if valid else None


def _crc_of(data: bytes) -> int:
    return crc_hqx(data[_DUE_AT:], crc_hqx(data[:_CRC_AT], 0)) or 1  # 0 stands for none


class TimerLogChunk(NamedTuple):
    """Bytes to be written to one segment."""

    segment: int
    at: int
    data: bytes


class TimerLog:
    """The segments, and the tail in memory; single writer, the pool writes and reads files."""

    def __init__(self, disk: Disk, folder: Path, segment_bytes: int) -> None:
        self.disk = disk
        self.folder = folder
        self.segment_bytes = segment_bytes
        self.begin = 0
        self.end = 0
        self._tail = bytearray()
        self._tail_from = 0  # units before are in the files
        self._files: dict[int, int] = {}
        self._opening = threading.Lock()
        self._unsynced: set[int] = set()
        self._names_changed = False

    # --- appending

    def append(self, unit: Unit) -> int:
        """Append a unit; returns its position."""
        left = self.segment_bytes - self.end % self.segment_bytes
        if left < SEGMENT_BYTES_MIN:
            self._tail += _FILLER.pack(left, 0, FILLER_MAGIC) + bytes(left - FILLER_BYTES)
            self.end += left
        place = self.end
        self._tail += unit.pack()
        self.end += UNIT_BYTES
        return place

    @property
    def unwritten(self) -> int:
        return len(self._tail)

    def unwritten_chunks(self) -> list[TimerLogChunk]:
        """The tail, split by segment; `wrote` removes it from memory."""
        found = []
        place = self._tail_from
        while place < self.end:
            segment = place - place % self.segment_bytes
            stop = min(segment + self.segment_bytes, self.end)
            data = self._tail[place - self._tail_from : stop - self._tail_from]
            found.append(TimerLogChunk(segment, place - segment, bytes(data)))
            place = stop
        return found

    def write(self, chunks: list[TimerLogChunk]) -> None:
        """Write chunks to their files, durably; waits for the disk."""
        for chunk in chunks:
            self.disk.write(self._open(chunk.segment), memoryview(chunk.data), chunk.at)
            self._unsynced.add(chunk.segment)
        for segment in sorted(self._unsynced):
            self.disk.sync(self._open(segment))
        self._unsynced.clear()
        if self._names_changed:
            self.disk.sync_directory(self.folder)
            self._names_changed = False

    def wrote(self, end: int) -> None:
        """The files hold all units up to this position."""
        del self._tail[: end - self._tail_from]
        self._tail_from = end

    # --- reading

    def read(self, at: int, length: int, *, wait: bool) -> bytes | None:
        """Up to `length` bytes of one segment; with `wait` false, None if that would wait."""
        if at >= self._tail_from:
            return bytes(self._tail[at - self._tail_from : at - self._tail_from + length])
        segment = at - at % self.segment_bytes
        length = min(length, segment + self.segment_bytes - at, self._tail_from - at)
        if wait:
            return self.disk.read_at(self._open(segment), length, at - segment)
        fd = self._files.get(segment)
        if fd is None:
            return None
        buffer = bytearray(length)
        return bytes(buffer) if self.disk.read_now(fd, memoryview(buffer), at - segment) else None

    def unit(self, place: int) -> Unit:
        """The unit at a position; waits for the disk. Raises StoreDamaged if there is none."""
        if self.begin <= place <= self.end - UNIT_BYTES:
            found = read_unit(self.read(place, UNIT_BYTES, wait=True) or b"", 0)
            if found is not None:
                return found
        raise StoreDamaged(f"{self.folder} has no valid unit at {place}")

    def scan(self, place: int) -> Iterator[tuple[int, Unit]]:
        """Units of the files from a position on, up to the first invalid one; may wait."""
        while (segment := place - place % self.segment_bytes) in self._files:
            length = min(_SCAN_UNITS * UNIT_BYTES, segment + self.segment_bytes - place)
            data = self.disk.read_at(self._files[segment], length, place - segment)
            at = 0
            while (unit := read_unit(data, at)) is not None:
                yield place + at, unit
                at += UNIT_BYTES
            place += at
            if at < len(data) or not data:
                if not is_filler(data, at):
                    return
                place = segment + self.segment_bytes

    # --- files

    def load(self) -> None:
        """Open the files; waits for the disk. Raises StoreDamaged if some are missing."""
        names = [n for n in self.disk.names(self.folder) if is_number(n) and len(n) == NAME_DIGITS]
        if not names:
            return
        size = self.disk.size(self.folder / names[0])
        if size >= SEGMENT_BYTES_MIN:
            self.segment_bytes = size
        for number, name in enumerate(names):
            start = int(name)
            if start != int(names[0]) + number * self.segment_bytes:
                raise StoreDamaged(f"a segment before {self.folder / name} is missing")
            if self.disk.size(self.folder / name) != self.segment_bytes:
                raise StoreDamaged(f"{self.folder / name} is truncated")
            self._files[start] = self.disk.open(self.folder / name)
        self.begin = int(names[0])
        self.end = self._tail_from = self.begin + len(names) * self.segment_bytes  # until `cut`

    def cut(self, end: int) -> None:
        """Truncate the log; waits for the disk."""
        for start in [start for start in self._starts() if start >= end and start > self.begin]:
            self._drop(start)
        last = end - end % self.segment_bytes
        if last in self._files:
            fd = self._files[last]
            self.disk.truncate(fd, end - last)
            self.disk.truncate(fd, self.segment_bytes)
            self.disk.sync(fd)
        if self._files:
            self.disk.sync_directory(self.folder)
        self.end = self._tail_from = end
        self._tail.clear()

    def clear(self) -> None:
        """Remove all units and files; waits for the disk."""
        for start in self._starts():
            self._drop(start)
        for name in self.disk.names(self.folder):  # those that `load` did not get to
            self.disk.unlink(self.folder / name)
        if self.folder.is_dir():
            self.disk.sync_directory(self.folder)
        self._tail.clear()
        self.begin = self.end = self._tail_from = 0

    def drop_before(self, log_begin: int) -> None:
        """Delete segments whose messages are all deleted from the log, but never the last one.

        Units are in the order of their messages, so the last one decides; if it is damaged, the
        first unit of the next segment.
        """
        while len(self._files) > 1 and self.begin + self.segment_bytes <= self._tail_from:
            units = (self.segment_bytes - FILLER_BYTES) // UNIT_BYTES
            places = (self.begin + (units - 1) * UNIT_BYTES, self.begin + self.segment_bytes)
            found = (
                read_unit(self.read(place, UNIT_BYTES, wait=True) or b"", 0) for place in places
            )
            last = next((unit for unit in found if unit is not None), None)
            if last is None or last.offset >= log_begin:
                return
            self._drop(self.begin)
            self.begin += self.segment_bytes
            self.disk.sync_directory(self.folder)

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            self.disk.close_file(fd)
        self._files.clear()

    def _starts(self) -> list[int]:
        return sorted(self._files)

    def _drop(self, start: int) -> None:
        self.disk.close_file(self._files.pop(start))
        self._unsynced.discard(start)
        self.disk.unlink(self.folder / segment_name(start))

    def _open(self, start: int) -> int:
        with self._opening:
            fd = self._files.get(start)
            if fd is None:
                self.disk.make_directory(self.folder)
                fd = self.disk.create(self.folder / segment_name(start), self.segment_bytes)
                self._files[start] = fd
                self._names_changed = True
            return fd


def is_filler(data: bytes, at: int) -> bool:
    """Whether the rest of a segment begins here."""
    return len(data) - at >= FILLER_BYTES and _FILLER.unpack_from(data, at)[2] == FILLER_MAGIC
