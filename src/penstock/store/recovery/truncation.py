"""A truncation of the log that the next start carries out: `penstock.truncation`.

A slave whose log differs from that of its master truncates it. The offset is stored durably first,
and recovery does the work: it saves what it removes, and removes the queue and index entries too. A
crash meanwhile is followed by another recovery with the same offset.
"""

import msgspec

from penstock.errors import StoreDamaged
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk


class Truncation(msgspec.Struct, frozen=True):
    """Where the log is to end, the end of a record, and why."""

    offset: int
    reason: str


def request_truncation(disk: Disk, paths: StorePaths, truncation: Truncation) -> None:
    """Have the next start truncate the log. Of several requests, the smallest offset counts. Waits
    for the disk."""
    before = read_truncation(disk, paths)
    if before is not None and before.offset <= truncation.offset:
        return
    disk.replace(paths.truncation, msgspec.json.encode(truncation), backup=False)


def read_truncation(disk: Disk, paths: StorePaths) -> Truncation | None:
    """The truncation that was requested, if any."""
    data = disk.read(paths.truncation)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Truncation)
    except ValueError:
        raise StoreDamaged(
            f"{paths.truncation} is damaged: the offset at which the log must end is unknown",
            hint="delete the store of this slave, so that it begins again",
        ) from None


def finish_truncation(disk: Disk, paths: StorePaths) -> None:
    """The log is truncated."""
    disk.unlink(paths.truncation)
    disk.sync_directory(paths.root)
