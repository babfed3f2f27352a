"""One record of the log by its place and size, at once if it is in memory."""

from penstock.store.store import MessageStore
from penstock.wire.layout import FIXED_BYTES

GONE = b""
"""There is no such record any more, or never was."""


def pick(store: MessageStore, offset: int, size: int, *, wait: bool) -> bytes | None:
    """The bytes at a place of the log; None if that would wait for the disk and may not."""
    log = store.log
    segment = log.row.find(offset)
    if segment is None or size < FIXED_BYTES or offset + size > log.handed:
        return GONE
    at = offset - segment.start
    if at + size > segment.size:
        return GONE
    if wait:
        data = segment.disk.read_at(segment.fd, size, at)
        return data if len(data) == size else GONE
    if offset >= max(log.hot_from, log.handed - store.config.hot_bytes):
        return bytes(segment.slice(offset, size))
    room = bytearray(size)
    return bytes(room) if segment.disk.read_now(segment.fd, memoryview(room), at) else None
