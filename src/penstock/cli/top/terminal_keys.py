"""Keys from the terminal, without waiting for the end of a line."""

import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

_ESCAPES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "pageup",
    b"\x1b[6~": "pagedown",
}


def keys_of(data: bytes) -> Iterator[str]:
    """The keys in what was read: single characters, or the names of arrows and pages."""
    at = 0
    while at < len(data):
        for sequence, name in _ESCAPES.items():
            if data.startswith(sequence, at):
                yield name
                at += len(sequence)
                break
        else:
            yield chr(data[at])
            at += 1


class KeyReader:
    """Sets the terminal to single keys while it is open."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno()
        self._before: list[Any] | None = None

    @property
    def file(self) -> int:
        """The descriptor to wait for."""
        return self._file

    def read(self) -> list[str]:
        """The keys that were pressed; none at the end of the input."""
        with contextlib.suppress(BlockingIOError):
            return list(keys_of(os.read(self._file, 64)))
        return []

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._file)
        tty.setcbreak(self._file)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._before is not None
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)
