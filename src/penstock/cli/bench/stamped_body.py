"""The bodies of end-to-end messages: they carry the run, the begin and a number.

| bytes | content |
|---|---|
| 8 | id of the run, random: messages of other runs and producers are ignored |
| 8 | begin of the latency: nanoseconds of the generator's monotonic clock |
| 8 | number of the message, from 0; PROBE for messages that only test the subscription |

Sender and receiver are the same process, so they have the same clock.
"""

import os
import struct
from typing import Final

_HEAD = struct.Struct(">8sqQ")
HEAD_BYTES: Final = _HEAD.size
PROBE: Final = 2**64 - 1


class StampedBodies:
    """Writes and reads the bodies of one run."""

    def __init__(self, size: int) -> None:
        assert size >= HEAD_BYTES
        self._run = os.urandom(8)
        self._padding = os.urandom(size - HEAD_BYTES)

    def body(self, begin_ns: int, number: int) -> bytes:
        """The body of one message."""
        return _HEAD.pack(self._run, begin_ns, number) + self._padding

    def read(self, body: bytes) -> tuple[int, int] | None:
        """(begin, number) of a message of this run; None for any other."""
        if len(body) < HEAD_BYTES:
            return None
        run, begin_ns, number = _HEAD.unpack_from(body)
        return (begin_ns, number) if run == self._run else None


class SeenNumbers:
    """Which numbers have been received, one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = 0
        self.duplicates = 0

    def add(self, number: int) -> bool:
        """Add a number; False if it was there before."""
        at, bit = number >> 3, 1 << (number & 7)
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 4096 - len(self._bits)))
        if self._bits[at] & bit:
            self.duplicates += 1
            return False
        self._bits[at] |= bit
        self.count += 1
        return True

    def missing(self, others: "SeenNumbers") -> int:
        """How many of the other numbers are not here."""
        ours, theirs = int.from_bytes(self._bits, "little"), int.from_bytes(others._bits, "little")
        return (theirs & ~ours).bit_count()
