"""Work beside the requests: in the disk's thread pool, and in tasks that end with their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from penstock.store.disk import Disk

T = TypeVar("T")


def in_pool(disk: Disk, work: Callable[[], T]) -> asyncio.Future[T]:
    """Have the disk's thread pool do work that may wait for the disk."""
    return asyncio.wrap_future(disk.submit(work))


class TaskSet:
    """Tasks that their owner has started; it needs them only to end them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel the tasks and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
