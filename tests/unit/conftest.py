"""Fixtures and markers of the unit tests."""

import errno
import os
import stat
from collections.abc import Iterator

import pytest
from _pytest.unittest import TestCaseFunction


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark Hypothesis state machines as slow: they are the only unittest-style tests here."""
    for item in items:
        if isinstance(item, TestCaseFunction):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def fsync_returns_at_once() -> Iterator[None]:
    """Unit tests do not wait for the disk: no test can see whether an fsync reached it.

    The integration and fault tests, and the compiled flusher, call the real fsync.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", check_sync)
        patch.setattr(os, "fdatasync", check_sync)
        yield


def check_sync(fd: int) -> None:
    """Raise OSError where fsync would: for a closed file or a pipe."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
