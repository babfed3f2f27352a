"""Frames of static replication (RocketMQ's DefaultHAService). Numbers are big-endian.

| From   | Layout                                 | Meaning                                       |
|--------|----------------------------------------|-----------------------------------------------|
| slave  | offset i64                             | report: the end of the slave's log            |
| master | offset i64, length i32, `length` bytes | bytes of the log; a heartbeat if length is 0  |

The first report is the request: the master sends nothing before it arrives. Later reports are
acknowledgements, and only the newest one counts. A body is any part of one segment of the log: it
need not begin or end with a record.
"""

import struct
from typing import Final, NamedTuple

from penstock.replication.frame_limits import check_body, check_offset

REPORT_BYTES: Final = 8
HEADER_BYTES: Final = 12

_REPORT = struct.Struct(">q")
_HEADER = struct.Struct(">qi")


class StaticHeader(NamedTuple):
    """The header of a frame from the master. The body follows."""

    offset: int
    length: int


def encode_report(offset: int) -> bytes:
    return _REPORT.pack(offset)


def newest_report(view: memoryview, end: int) -> tuple[int | None, int]:
    """The newest complete report in [0, end), and the number of bytes that are consumed."""
    consumed = end - end % REPORT_BYTES
    if consumed == 0:
        return None, 0
    offset: int = _REPORT.unpack_from(view, consumed - REPORT_BYTES)[0]
    check_offset("the end of its log", offset)
    return offset, consumed


def encode_header(offset: int, length: int) -> bytes:
    return _HEADER.pack(offset, length)


def read_header(view: memoryview, at: int, end: int) -> StaticHeader | None:
    """The header at `at`; None if it is incomplete in [at, end)."""
    if end - at < HEADER_BYTES:
        return None
    header = StaticHeader._make(_HEADER.unpack_from(view, at))
    check_body(header.offset, header.length)
    return header
