"""The flusher: group commit, timed flush, rolled files, failures, the end."""

import contextlib
import errno
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.store import native
from penstock.store.disk import Disk
from penstock.store.flusher import Flusher
from tests.unit.store.conftest import WAIT_SECONDS, WatchedDisk, reached

NEVER_MS = 3_600_000


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[int]]:
    """Descriptors of a few files."""
    fds = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT) for n in range(3)]
    yield fds
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class OnceFlusher(Flusher):
    """Can be stopped twice; handles are closed once."""

    stopped = False

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            super().stop()


Make = Callable[..., Flusher]


@pytest.fixture
def make() -> Iterator[Make]:
    """Creates flushers and stops those that a test leaves running."""
    made: list[Flusher] = []

    def build(
        disk: Disk | None = None, *, group_commit: bool = True, interval_ms: int = 1,
        least_bytes: int = 0, thorough_ms: int = NEVER_MS,
    ) -> Flusher:  # fmt: skip
        flusher = OnceFlusher(
            disk or Disk(), group_commit=group_commit, interval_ms=interval_ms,
            least_bytes=least_bytes, thorough_ms=thorough_ms,
        )  # fmt: skip
        made.append(flusher)
        return flusher

    yield build
    for flusher in made:
        flusher.stop()


def notified(flusher: Flusher) -> bool:
    """Whether the flusher notifies the event loop; waits for it."""
    return bool(readable([flusher.notify_fd], WAIT_SECONDS))


def readable(fds: list[int], seconds: float, poll: Callable[[], Any] = select.poll) -> list[int]:
    """Those of the descriptors that can be read, however many are open; waits for the first."""
    waiting = poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return [fd for fd, _ in waiting.poll(1000 * seconds)]


def broken_fd() -> int:
    """A descriptor that can't be synced: fdatasync of a pipe is EINVAL."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_group_commit_publishes_the_flushed_offset(make: Make, files: list[int]) -> None:
    flusher = make()
    flusher.start(files[0], 100)
    assert flusher.flushed() == 100
    flusher.want(250)
    assert notified(flusher)
    assert reached(flusher, 250)
    assert (flusher.flushed(), flusher.failed()) == (250, 0)


def test_one_sync_covers_many_requests(make: Make, files: list[int]) -> None:
    flusher = make(WatchedDisk())
    flusher.start(files[0], 0)
    for end in range(1, 50):
        flusher.want(end)
    flusher.pump()
    assert (flusher.flushed(), flusher.syncs()) == (49, 1)


def test_the_notification_is_cleared_after_it_was_acknowledged(
    make: Make, files: list[int]
) -> None:
    flusher = make()
    flusher.start(files[0], 0)
    flusher.want(1)
    assert notified(flusher)
    flusher.acknowledge()
    flusher.acknowledge()
    assert readable([flusher.notify_fd], 0) == []


def test_rolled_files_are_synced_before_the_current_file(files: list[int], make: Make) -> None:
    disk = WatchedDisk()
    flusher = make(disk)
    flusher.start(files[0], 0)
    flusher.roll(files[0], files[1])
    flusher.roll(files[1], files[2])
    flusher.want(900)
    flusher.pump()
    assert [p.name for p in disk.synced] == ["0", "1", "2"]
    flusher.want(950)
    flusher.pump()
    assert [p.name for p in disk.synced[3:]] == ["2"]


def test_the_thread_syncs_rolled_files_and_closes_its_copies(make: Make, files: list[int]) -> None:
    flusher = make()
    flusher.start(files[0], 0)
    before = len(os.listdir("/proc/self/fd"))
    flusher.roll(files[0], files[1])
    flusher.roll(files[1], files[2])
    assert len(os.listdir("/proc/self/fd")) == before + 2
    flusher.want(900)
    assert reached(flusher, 900)
    assert flusher.syncs() == 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rolled_file_is_synced_at_once_if_there_are_no_descriptors(
    make: Make, files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    flusher = make()
    flusher.start(files[0], 0)
    monkeypatch.setattr(os, "dup", dup)
    flusher.roll(files[0], files[1])
    monkeypatch.undo()
    flusher.want(10)
    assert flusher.wait(10, WAIT_SECONDS)
    assert not flusher.failed()


def test_rolled_files_beyond_the_limit_are_synced_at_once(make: Make, files: list[int]) -> None:
    disk = WatchedDisk()
    flusher = make(disk)
    flusher.start(files[0], 0)
    for _ in range(native.ROLLED_PLACES):
        flusher.roll(files[0], files[1])
    assert disk.synced == []
    flusher.roll(files[1], files[2])
    assert [p.name for p in disk.synced] == ["1"]


def test_a_failed_sync_during_a_roll_stops_writes(make: Make, files: list[int]) -> None:
    disk = WatchedDisk()
    flusher = make(disk)
    flusher.start(files[0], 0)
    for _ in range(native.ROLLED_PLACES):
        flusher.roll(files[0], files[1])
    disk.sync_fails = lambda path: True
    with contextlib.suppress(OSError):
        flusher.roll(files[1], files[2])
    assert flusher.failed() == errno.EIO


def test_a_failed_roll_does_not_advance_the_flushed_offset(
    make: Make, files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    class NoSync(Disk):
        def sync(self, fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    flusher = make(NoSync())
    flusher.start(files[0], 0)
    monkeypatch.setattr(os, "dup", refuse)
    flusher.roll(files[0], files[1])
    flusher.want(900)
    flusher.stop()
    assert flusher.failed() == errno.EIO
    assert flusher.flushed() == 0  # the checkpoint relies on this offset


def test_async_does_not_flush_few_bytes(make: Make, files: list[int]) -> None:
    flusher = make(group_commit=False, interval_ms=1, least_bytes=4096)
    flusher.start(files[0], 0)
    flusher.want(4095)
    flusher.want(4096)
    assert reached(flusher, 4096)
    assert flusher.syncs() == 1


def test_async_flushes_everything_after_the_thorough_interval(make: Make, files: list[int]) -> None:
    flusher = make(group_commit=False, interval_ms=1, least_bytes=1 << 40, thorough_ms=5)
    flusher.start(files[0], 0)
    flusher.want(1)
    assert reached(flusher, 1)


def test_async_flushes_on_demand(make: Make, files: list[int]) -> None:
    flusher = make(group_commit=False, interval_ms=NEVER_MS, least_bytes=1 << 40)
    flusher.start(files[0], 0)
    flusher.want(77)
    assert flusher.flushed() == 0
    flusher.demand()
    assert reached(flusher, 77)


def test_a_failed_sync_is_reported_and_final(make: Make) -> None:
    flusher = make()
    fd = broken_fd()
    flusher.start(fd, 10)
    flusher.want(20)
    assert notified(flusher)
    assert not reached(flusher, 20)
    assert flusher.failed() == errno.EINVAL
    flusher.want(30)
    flusher.demand()
    flusher.stop()
    assert flusher.flushed() == 10
    os.close(fd)


def test_a_failed_sync_of_a_rolled_file_is_reported(make: Make, files: list[int]) -> None:
    flusher = make()
    fd = broken_fd()
    flusher.start(fd, 0)
    flusher.roll(fd, files[0])
    flusher.want(20)
    assert not reached(flusher, 20)
    assert (flusher.failed(), flusher.flushed()) == (errno.EINVAL, 0)
    os.close(fd)
    os.close(flusher.state[native.ROLLED])  # the copy is left to us


def test_a_failure_without_threads_is_reported(make: Make, files: list[int]) -> None:
    disk = WatchedDisk()
    flusher = make(disk)
    flusher.start(files[0], 5)
    flusher.want(20)
    disk.sync_fails = lambda path: True
    flusher.pump()
    assert (flusher.failed(), flusher.flushed()) == (errno.EIO, 5)


def test_a_failure_without_threads_is_final(make: Make, files: list[int]) -> None:
    disk = WatchedDisk()
    flusher = make(disk)
    flusher.start(files[0], 5)
    flusher.want(20)
    disk.sync_fails = lambda path: True
    flusher.pump()
    disk.sync_fails = lambda path: False
    flusher.pump()
    assert (flusher.failed(), flusher.flushed()) == (errno.EIO, 5)


@pytest.mark.parametrize("group_commit", [True, False])
@pytest.mark.parametrize("threads", [True, False])
def test_stop_syncs_the_rest(
    make: Make, files: list[int], group_commit: bool, threads: bool
) -> None:
    flusher = make(
        Disk() if threads else WatchedDisk(), group_commit=group_commit, interval_ms=NEVER_MS,
        least_bytes=1 << 40,
    )  # fmt: skip
    flusher.start(files[0], 0)
    flusher.want(123)
    flusher.stop()
    assert flusher.flushed() == 123


def test_waiting_is_not_busy_while_the_notification_is_set(
    make: Make, files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_ms = 0

    class Poll:
        """Returns at once if there is something to read, otherwise after the timeout."""

        def __init__(self) -> None:
            self.watched: list[int] = []

        def register(self, fd: int, events: int) -> None:
            self.watched.append(fd)

        def poll(self, ms: int) -> list[tuple[int, int]]:
            nonlocal waited_ms
            ready = readable(self.watched, 0)
            waited_ms += 0 if ready else ms
            return [(fd, select.POLLIN) for fd in ready]

    flusher = make(WatchedDisk())
    flusher.start(files[0], 0)
    flusher.want(10)
    os.eventfd_write(flusher.notify_fd, 1)
    monkeypatch.setattr(select, "poll", Poll)
    assert not flusher.wait(10, 0.5)
    assert waited_ms >= 500
