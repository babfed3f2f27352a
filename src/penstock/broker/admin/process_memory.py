"""The memory and the limits of this process, as the operating system reports them."""

import resource
from pathlib import Path


def memory_bytes(field: str) -> int | None:
    """A field of /proc/self/status (VmRSS, RssAnon, …); None on other systems."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None
    )


def open_files_max() -> int | None:
    """How many files and connections this process may have open; None: no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def mapped_files_max() -> int | None:
    """How many files a process may map; None on other systems than Linux."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return None
