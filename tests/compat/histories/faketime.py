"""Steps of a broker's clock, by libfaketime.

Debian's package is used where it is installed. Otherwise it is downloaded with apt-get and unpacked
into the user's cache directory. Only the time of day is changed: the monotonic clock goes on, as on
a machine whose clock is set.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from tests.compat.go_program import cache_root

PATTERN = "usr/lib/*/faketime/libfaketime.so.1"


@functools.cache
def library() -> Path | None:
    """The library; None if this machine can't have it."""
    root = cache_root() / "faketime"
    for folder in (Path("/"), root):
        found = sorted(folder.glob(PATTERN))
        if found:
            return found[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
        _run("apt-get", "-q", "download", "libfaketime", cwd=root)
        (package,) = root.glob("libfaketime_*.deb")
        _run("dpkg-deb", "-x", package.name, ".", cwd=root)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return next(iter(sorted(root.glob(PATTERN))), None)


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)


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
