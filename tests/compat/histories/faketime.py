"""Steps of a broker's clock, by libfaketime.

Only the time of day is changed: the monotonic clock goes on, as on a machine whose clock is set.
"""

from __future__ import annotations

from pathlib import Path

from tests.compat import debian_package


def library() -> Path | None:
    """The library; None if this machine can't have it."""
    return debian_package.file_of("libfaketime", "usr/lib/*/faketime/libfaketime.so.1")


class FakeClock:
    """The clock of one process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.step(0)

    def step(self, seconds: float) -> None:
        """Let the clock differ from the machine's by this much. Takes effect within a second."""
        self._file.write_text(f"{seconds:+.3f}\n")

    def environment(self) -> dict[str, str]:
        found = library()
        assert found is not None
        return {
            "LD_PRELOAD": str(found),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
