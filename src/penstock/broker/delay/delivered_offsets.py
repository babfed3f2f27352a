"""How far the delay levels are delivered, noted at once and without waiting for the disk.

A killed process leaves what it wrote in the page cache, delivered messages and this note alike. So
the note is valid if the operating system has not restarted since (`RecoveryReport.pages_kept`) and
the log reaches as far as it did then. After a power failure only the saved table of offsets counts.

    | magic 8 bytes | end of the log i64 | number of levels i32 | level i32, offset i64 … | CRC-32 |
"""

import logging
import struct
import zlib
from collections.abc import Mapping
from typing import Final

from penstock.store.store import MessageStore

log = logging.getLogger(__name__)

_MAGIC: Final = b"DELAYED1"
_HEAD: Final = struct.Struct(">8sqi")
_LEVEL: Final = struct.Struct(">iq")
_CRC: Final = struct.Struct(">I")
_PAGE_BYTES: Final = 4096


class DeliveredOffsets:
    """The note of one store: the next offset of each level, by its number."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._path = store.paths.delivered
        self._failing = False

    def load(self) -> dict[int, int]:
        """The noted offsets, if a process was killed; otherwise none, and the note is deleted."""
        disk, report = self._store.disk, self._store.report
        data = disk.read(self._path)
        if data is None:
            return {}
        found = _unpack(data)
        if report.clean or not report.pages_kept or found is None or found[0] > report.log_end:
            disk.unlink(self._path)  # it must not count after a later crash either
            return {}
        return found[1]

    def delete(self) -> None:
        """Delete the note: the offsets come from another broker from now on."""
        if self._store.disk.read(self._path) is not None:
            self._store.disk.unlink(self._path)

    def write(self, offsets: Mapping[int, int]) -> None:
        """Note offsets whose messages are all in the log's files."""
        data = _pack(self._store.log.written, offsets)
        disk = self._store.disk
        try:
            fd = disk.create(self._path, -(-len(data) // _PAGE_BYTES) * _PAGE_BYTES)
            try:
                disk.write(fd, memoryview(data), 0)
            finally:
                disk.close_file(fd)
        except OSError as error:  # then a restart repeats more
            if not self._failing:
                log.warning("can't write %s, will retry: %s", self._path, error.strerror)
            self._failing = True
        else:
            self._failing = False


def _pack(log_end: int, offsets: Mapping[int, int]) -> bytes:
    data = _HEAD.pack(_MAGIC, log_end, len(offsets))
    data += b"".join(_LEVEL.pack(level, offset) for level, offset in offsets.items())
    return data + _CRC.pack(zlib.crc32(data))


def _unpack(data: bytes) -> tuple[int, dict[int, int]] | None:
    """The end of the log and the offsets, or None."""
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        return None
    _, log_end, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * _LEVEL.size
    if count < 0 or len(data) < end + _CRC.size:
        return None
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return None
    return log_end, dict(_LEVEL.iter_unpack(data[_HEAD.size : end]))
