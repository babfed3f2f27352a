"""What the engine does without the GIL: touching pages and the flusher's loop.

These Python bodies serve the uncompiled engine; `native.pxd` gives compiled modules C bodies that
let the GIL go. This module itself is never compiled.

The flusher shares one row of 64-bit numbers with the writer. The writer stores in the order
rolled files → current file → WANTED; the loop loads in the order WANTED → current → rolled, so the
file that holds byte WANTED is always among those it syncs.
"""

import errno
import os
import select

WANTED = 0  # log end handed to the page cache
FLUSHED = 1  # log end known to be on the disk
ERRNO = 2  # of the fdatasync that failed; the loop ends there
STOP = 3
CURRENT = 4  # descriptor of the segment being written
ROLLED_HEAD = 5  # next rolled descriptor to sync
ROLLED_TAIL = 6  # next free place among the rolled
WAKE = 7  # eventfd: the writer rings it
NOTIFY = 8  # eventfd: the loop rings it after each change
INTERVAL_MS = 9  # 0: sync whenever rung (group commit); else look this often
LEAST_BYTES = 10  # below this much a timed look does nothing
THOROUGH_MS = 11  # after this long a timed look syncs whatever there is
DEMAND = 12  # sync at once until FLUSHED reaches this
SYNCS = 13  # how many fdatasync calls were made
ROLLED = 16  # the ring of rolled descriptors
ROLLED_PLACES = 16
STATE_LENGTH = ROLLED + ROLLED_PLACES


def load(state: memoryview, place: int) -> int:
    """Read a number that the other thread writes."""
    return state[place]


def store(state: memoryview, place: int, value: int) -> None:
    """Write a number that the other thread reads, after everything written before."""
    state[place] = value


def touch(view: memoryview, at: int, length: int) -> None:
    """Fault pages in for writing without changing them. Uncompiled it does nothing: a store by
    another thread could undo a write of the appender."""


def lock(view: memoryview, at: int, length: int) -> int:
    """Keep pages in memory; returns an errno. Uncompiled it is not available."""
    return errno.ENOSYS


def unlock(view: memoryview, at: int, length: int) -> None:
    """Undo `lock`."""


def flush_loop(state: memoryview) -> None:
    """Sync the log until told to stop or a sync fails."""
    waited_ms = 0
    bell = select.poll()
    bell.register(state[WAKE], select.POLLIN)
    while True:
        interval = state[INTERVAL_MS]
        if bell.poll(interval or None):
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
    """Sync the rolled files, then the current one; notes the errno of a failure."""
    while True:
        rolled = state[ROLLED_HEAD] < state[ROLLED_TAIL]
        fd = state[ROLLED + state[ROLLED_HEAD] % ROLLED_PLACES] if rolled else current
        try:
            os.fdatasync(fd)
        except OSError as error:
            state[ERRNO] = error.errno or errno.EIO
            os.eventfd_write(state[NOTIFY], 1)
            return False
        state[SYNCS] += 1
        if not rolled:
            return True
        os.close(fd)
        state[ROLLED_HEAD] += 1
