"""The checkpoint: the store times up to which everything is on the disk.

    log i64 @0 | queues i64 @8 | index i64 @16 | flushed by the master i64 @24
    | confirm offset i64 @32

in a page of 4,096 bytes. Recovery after a crash begins with the newest segment whose first record
is not younger; `SLACK_MS` is RocketMQ's allowance for times that are equal or step back.
"""

from typing import NamedTuple

from penstock.store.directory import StorePaths
from penstock.store.disk import Disk
from penstock.wire import octets

PAGE_BYTES = 4096
SLACK_MS = 3000


class Checkpoint(NamedTuple):
    """Store times in ms, and offsets; 0 means unknown."""

    log_ms: int = 0
    queues_ms: int = 0
    index_ms: int = 0
    master_flushed: int = 0
    confirm_offset: int = 0

    def recover_from_ms(self, *, with_index: bool) -> int:
        """Records up to this store time are known to be complete and dispatched."""
        return max(self.known_ms(with_index=with_index) - SLACK_MS, 0)

    def known_ms(self, *, with_index: bool) -> int:
        """The store time that all parts have reached."""
        times = [self.log_ms, self.queues_ms]
        if with_index:
            times.append(self.index_ms)
        return min(times)


def read_checkpoint(disk: Disk, paths: StorePaths) -> Checkpoint:
    data = disk.read(paths.checkpoint)
    if data is None or len(data) < 40:
        return Checkpoint()
    return Checkpoint(*(octets.get_i64(data, 8 * i) for i in range(5)))


def write_checkpoint(disk: Disk, paths: StorePaths, checkpoint: Checkpoint) -> None:
    """Write it in place: its 40 bytes are in one sector, so a power cut leaves old or new."""
    page = bytearray(PAGE_BYTES)
    for i, value in enumerate(checkpoint):
        octets.put_i64(page, 8 * i, value)
    disk.write_file(paths.checkpoint, bytes(page))
