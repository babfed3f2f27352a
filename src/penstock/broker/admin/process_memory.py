"""The memory of this process, as Linux reports it."""

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
