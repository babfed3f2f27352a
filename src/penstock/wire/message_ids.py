"""The two kinds of message ids, both upper-case hexadecimal.

    offset id   ip (4 or 16) · port i32 · physical offset i64        assigned by the broker
    unique id   ip (4 or 16) · pid i16 · loader i32 · ms i32 · counter i16      by the client

Both have 32 digits with IPv4 and 56 with IPv6. `loader` is the hash of Java's class loader: any
number that differs between programs of one process. `ms` counts from the first of the month in
local time; a reader has to guess the month. Clock, process id and address are parameters.
"""

import struct
from datetime import datetime, timedelta, tzinfo
from ipaddress import ip_address
from typing import Final, NamedTuple

from penstock.errors import HeaderError

_OFFSET_TAIL: Final = struct.Struct(">iq")
_UNIQUE_TAIL: Final = struct.Struct(">HIIH")
_IP_BYTES: Final = {32: 4, 56: 16}  # by the number of digits
_STEP_BACK_MS: Final = 1_000_000  # a clock set back by less is treated as stopped


class OffsetId(NamedTuple):
    """Where a message is: the broker's address and the physical offset in its log."""

    ip: bytes
    port: int
    offset: int

    @property
    def host(self) -> str:
        """The address as text."""
        return str(ip_address(self.ip))


class UniqueId(NamedTuple):
    """The fields of a unique id; `ms` counts from the begin of a month."""

    ip: bytes
    pid: int
    loader: int
    ms: int
    counter: int

    @property
    def host(self) -> str:
        """The client's address as text."""
        return str(ip_address(self.ip))

    def born_ms(self, now_ms: int, zone: tzinfo | None = None) -> int:
        """When the id was made, if that was in the month before `now_ms`."""
        start_ms = month_start_ms(now_ms, zone)
        if start_ms + self.ms > now_ms:  # Java's >= is wrong for an id read in its own millisecond
            start_ms = month_start_ms(start_ms - 1, zone)
        return start_ms + self.ms


def encode_offset_id(ip: bytes, port: int, offset: int) -> str:
    """The id of the message at `offset` of the broker at `ip` (4 or 16 bytes) and `port`."""
    return (ip + _OFFSET_TAIL.pack(port, offset)).hex().upper()


def decode_offset_id(text: str) -> OffsetId:
    """The fields of an offset id; HeaderError if it is not valid."""
    ip, tail = _split("message id", text)
    port, offset = _OFFSET_TAIL.unpack(tail)
    if not 0 <= port <= 65535 or offset < 0:
        raise HeaderError(f"message id {text!r}: port {port}, offset {offset}")
    return OffsetId(ip, port, offset)


def decode_unique_id(text: str) -> UniqueId:
    """The fields of a unique id; HeaderError if it is not valid."""
    ip, tail = _split("unique id", text)
    return UniqueId(ip, *_UNIQUE_TAIL.unpack(tail))


class UniqueIds:
    """Makes unique ids for one program: up to 65,536 per millisecond without a duplicate."""

    __slots__ = ("_counter", "_next_ms", "_prefix", "_start_ms", "_zone")

    def __init__(
        self, ip: bytes, *, pid: int, loader: int, counter: int = 0, zone: tzinfo | None = None
    ) -> None:
        self._prefix = (ip + struct.pack(">HI", pid & 0xFFFF, loader & 0xFFFFFFFF)).hex().upper()
        self._counter = counter
        self._zone = zone
        self._start_ms = 0
        self._next_ms = 0

    def next(self, now_ms: int) -> str:
        """A new id, made at `now_ms`."""
        if now_ms >= self._next_ms or now_ms <= self._start_ms - _STEP_BACK_MS:
            self._start_ms = month_start_ms(now_ms, self._zone)
            # The 1st plus 32 days is always in the next month.
            self._next_ms = month_start_ms(self._start_ms + 32 * 86_400_000, self._zone)
        ms = max(now_ms - self._start_ms, 0)
        counter = self._counter
        self._counter = counter + 1 & 0xFFFF
        return f"{self._prefix}{ms:08X}{counter & 0xFFFF:04X}"


def month_start_ms(now_ms: int, zone: tzinfo | None = None) -> int:
    """The begin of the month of `now_ms`; in local time without a zone."""
    seconds, ms = divmod(now_ms, 1000)
    now = datetime.fromtimestamp(seconds, zone) + timedelta(milliseconds=ms)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return round(first.timestamp() * 1000)


def _split(what: str, text: str) -> tuple[bytes, bytes]:
    ip_bytes = _IP_BYTES.get(len(text))
    if ip_bytes is None:
        raise HeaderError(f"{what} {text[:60]!r} has {len(text)} characters instead of 32 or 56")
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) * 2 != len(text):  # fromhex ignores blanks
        raise HeaderError(f"{what} {text!r} is not hexadecimal")
    return data[:ip_bytes], data[ip_bytes:]
