"""What the store does without the GIL: faulting pages in and the flusher's loop.

These Python bodies serve the uncompiled store; `native.pxd` gives compiled modules C bodies that
release the GIL. This module itself is never compiled.

The flusher shares an array of 64-bit numbers with the writer. The writer stores in the order rolled
files → current file → WANTED; the loop loads in the order WANTED → current → rolled, so the file
that holds byte WANTED is always among those that it syncs.
"""

import errno
import os
import select

from penstock.clock import monotonic_ns

WANTED = 0  # log end in the page cache
FLUSHED = 1  # log end on the disk
ERRNO = 2  # of the fdatasync that failed; the loop ends there
STOP = 3
CURRENT = 4  # descriptor of the segment being written
ROLLED_HEAD = 5  # next rolled descriptor to sync
ROLLED_TAIL = 6  # where the next rolled descriptor goes
WAKE = 7  # eventfd: wakes the loop
NOTIFY = 8  # eventfd: written by the loop after each change
INTERVAL_MS = 9  # 0: sync whenever woken (group commit); else check this often
LEAST_BYTES = 10  # a timed check syncs only if there is at least this much
THOROUGH_MS = 11  # after this long a timed check syncs any amount
DEMAND = 12  # sync at once until FLUSHED reaches this
SYNCS = 13  # number of fdatasync calls
SYNC_NS = 14  # their time
ROLLED = 16  # ring buffer of rolled descriptors
ROLLED_PLACES = 16
SYNC_COUNTS = ROLLED + ROLLED_PLACES  # fdatasync calls by their time: below 128 µs, below 256 µs, …
SYNC_PLACES = 16
STATE_LENGTH = SYNC_COUNTS + SYNC_PLACES
SYNC_BOUND_NS = 128_000
"""Upper bound of the first of these counts; each is twice the one before."""


def load(state: memoryview, place: int) -> int:
    """Read a number that the other thread writes."""
    return state[place]


def store(state: memoryview, place: int, value: int) -> None:
    """Write a number that the other thread reads, after everything written before."""
    state[place] = value


def touch(view: memoryview, at: int, length: int) -> None:
    """Fault pages in for writing without changing them. Uncompiled it does nothing: a store by
    another thread could overwrite a record that is being appended."""


def lock(view: memoryview, at: int, length: int) -> int:
    """Lock pages in memory; returns an errno. Not available uncompiled."""
    return errno.ENOSYS


def unlock(view: memoryview, at: int, length: int) -> None:
    """Undo `lock`."""


def flush_loop(state: memoryview) -> None:
    """Sync the log until STOP is set or a sync fails."""
    waited_ms = 0
    wake = select.poll()
    wake.register(state[WAKE], select.POLLIN)
    while True:
        interval = state[INTERVAL_MS]
        if wake.poll(interval or None):
            os.eventfd_read(state[WAKE])
        if state[ERRNO]:
            return
        stop = state[STOP]
        wanted = state[WANTED]
        current = state[CURRENT]
        behind = wanted - state[FLUSHED]
        waited_ms += interval
        demanded = stop or state[DEMAND] > state[FLUSHED] or interval == 0
        if behind > 0 and (
            demanded or behind >= state[LEAST_BYTES] or waited_ms >= state[THOROUGH_MS]
        ):
            waited_ms = 0
            if not _sync(state, current):
                return
            state[FLUSHED] = wanted
            os.eventfd_write(state[NOTIFY], 1)
        if stop:
            return


def _sync(state: memoryview, current: int) -> bool:
    """Sync the rolled files, then the current one; stores the errno of a failure."""
    while True:
        rolled = state[ROLLED_HEAD] < state[ROLLED_TAIL]
        fd = state[ROLLED + state[ROLLED_HEAD] % ROLLED_PLACES] if rolled else current
        began_ns = monotonic_ns()
        try:
            os.fdatasync(fd)
        except OSError as error:
            state[ERRNO] = error.errno or errno.EIO
            os.eventfd_write(state[NOTIFY], 1)
            return False
        state[SYNCS] += 1
        _count_sync(state, monotonic_ns() - began_ns)
        if not rolled:
            return True
        os.close(fd)
        state[ROLLED_HEAD] += 1


def _count_sync(state: memoryview, took_ns: int) -> None:
    place, bound_ns = 0, SYNC_BOUND_NS
    while place < SYNC_PLACES - 1 and took_ns > bound_ns:
        place, bound_ns = place + 1, bound_ns * 2
    state[SYNC_COUNTS + place] += 1
    state[SYNC_NS] += took_ns
