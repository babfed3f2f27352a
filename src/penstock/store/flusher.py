"""Async flush and group commit: one thread that syncs the log and publishes the flushed offset.

Group commit: the writer writes records to the page cache and wakes the thread, which syncs once for
all that arrived meanwhile, stores the flushed offset and notifies. Compiled, the thread's loop does
not hold the GIL, so a busy event loop does not delay it (a Python thread takes 3 to 6 ms).

A failed sync ends the loop: what is on the disk is unknown from then on, so writing must stop.
"""

import errno
import os
import select
import threading
from array import array

from penstock.store import native
from penstock.store.disk import Disk

_WANTED = native.WANTED
_FLUSHED = native.FLUSHED
_ERRNO = native.ERRNO


def _duplicate(fd: int) -> int:
    """A copy of a descriptor, or -1 if the process has too many."""
    try:
        return os.dup(fd)
    except OSError:
        return -1


class Flusher:
    """Syncs the current segment of one log, and those that it has just rolled from."""

    def __init__(
        self,
        disk: Disk,
        *,
        group_commit: bool,
        interval_ms: int,
        least_bytes: int,
        thorough_ms: int,
    ) -> None:
        self.disk: Disk = disk
        # Whether every `want` is synced at once; fixed at the start.
        self.group_commit: bool = group_commit
        # Numbers shared with the thread; `store.native` lists them.
        self.state: memoryview = memoryview(array("q", bytes(8 * native.STATE_LENGTH)))
        # eventfds that wake the thread and notify the loop; -1 after `discard`.
        self.wake_fd: int = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.notify_fd: int = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # From `start` to `discard`; None where the disk has no threads.
        self._thread: threading.Thread | None = None
        self._started: bool = False
        state = self.state
        state[native.WAKE] = self.wake_fd
        state[native.NOTIFY] = self.notify_fd
        state[native.INTERVAL_MS] = 0 if group_commit else interval_ms
        state[native.LEAST_BYTES] = least_bytes
        state[native.THOROUGH_MS] = thorough_ms

    def start(self, fd: int, flushed: int) -> None:
        """Start with this segment; the log is durable up to `flushed`."""
        self.state[native.CURRENT] = fd
        self.state[native.WANTED] = flushed
        self.state[native.FLUSHED] = flushed
        self._started = True
        if self.disk.threads:
            self._thread = threading.Thread(target=self._run, name="penstock-flusher", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        native.flush_loop(self.state)

    def want(self, offset: int) -> None:
        """The page cache holds the log up to `offset`; with group commit it is synced at once."""
        native.store(self.state, _WANTED, offset)
        if self.group_commit:
            os.eventfd_write(self.wake_fd, 1)

    def roll(self, old_fd: int, new_fd: int) -> None:
        """The log continues in another file; the old one still has to be synced."""
        state = self.state
        tail = native.load(state, native.ROLLED_TAIL)
        try:
            copy = old_fd
            if tail - native.load(state, native.ROLLED_HEAD) >= native.ROLLED_PLACES:
                copy = -1
            elif self.disk.threads:
                copy = _duplicate(old_fd)
            if copy < 0:
                self.disk.sync(old_fd)
            else:
                native.store(state, native.ROLLED + tail % native.ROLLED_PLACES, copy)
                native.store(state, native.ROLLED_TAIL, tail + 1)
        except OSError as error:
            self.fail(error)
        native.store(state, native.CURRENT, new_fd)

    def fail(self, error: OSError) -> None:
        """A sync of the log has failed elsewhere: the kernel reports that only once."""
        native.store(self.state, native.ERRNO, error.errno or errno.EIO)

    def demand(self) -> None:
        """Sync everything now, whatever the interval says."""
        native.store(self.state, native.DEMAND, native.load(self.state, _WANTED))
        os.eventfd_write(self.wake_fd, 1)

    def flushed(self) -> int:
        """The log is durable up to here."""
        return native.load(self.state, _FLUSHED)

    def failed(self) -> int:
        """The errno of the sync that failed, or 0."""
        return native.load(self.state, _ERRNO)

    def syncs(self) -> int:
        """How many syncs were made since the start."""
        return native.load(self.state, native.SYNCS)

    def sync_times(self) -> tuple[list[int], int]:
        """Syncs by their time, up to `native.SYNC_BOUND_NS` and its doubles; ns of all."""
        state = self.state
        counts = [native.load(state, native.SYNC_COUNTS + n) for n in range(native.SYNC_PLACES)]
        return counts, native.load(state, native.SYNC_NS)

    def wait(self, offset: int, seconds: float) -> bool:
        """Block until the log is durable up to `offset`; for tools and tests, not for a loop."""
        poll = select.poll()
        poll.register(self.notify_fd, select.POLLIN)
        left_ms = int(seconds * 1000)
        while self.flushed() < offset and not self.failed() and left_ms > 0:
            if poll.poll(5):
                self.acknowledge()
            else:  # another reader may have taken the notification: poll
                left_ms -= 5
        return self.flushed() >= offset

    def acknowledge(self) -> None:
        """Reset the notification; call it before reading `flushed`."""
        try:
            os.eventfd_read(self.notify_fd)
        except BlockingIOError:
            return

    def pump(self) -> None:
        """Sync once in the caller's thread; for a disk without threads."""
        if self.failed():
            return
        state = self.state
        try:
            while state[native.ROLLED_HEAD] < state[native.ROLLED_TAIL]:
                self.disk.sync(
                    state[native.ROLLED + state[native.ROLLED_HEAD] % native.ROLLED_PLACES]
                )
                state[native.ROLLED_HEAD] += 1
            self.disk.sync(state[native.CURRENT])
        except OSError as error:
            state[native.ERRNO] = error.errno or errno.EIO
        else:
            state[native.SYNCS] += 1
            state[native.FLUSHED] = state[native.WANTED]

    def stop(self) -> None:
        """Sync what is left and end the thread; a second call does nothing."""
        if self._started and self._thread is None and self.wake_fd >= 0:
            self.pump()
        self.discard()

    def discard(self) -> None:
        """End the thread, which syncs a last time, and close the eventfds."""
        if self.wake_fd < 0:
            return
        if self._thread is not None:
            native.store(self.state, native.STOP, 1)
            os.eventfd_write(self.wake_fd, 1)
            self._thread.join()
            self._thread = None
        os.close(self.wake_fd)
        os.close(self.notify_fd)
        self.wake_fd = self.notify_fd = -1
