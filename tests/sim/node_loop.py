"""An event loop of one simulated process, so that the server's coroutines run in virtual time.

The loop has no thread of its own: whatever happens at a node enters the loop, and the loop runs
until nothing is ready. If the process ends, what its coroutines wait for never happens.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from tests.sim.failover_world import Node, World

T = TypeVar("T")


class NodeLoop(asyncio.AbstractEventLoop):
    """The event loop of a process."""

    def __init__(self, world: World, node: Node) -> None:
        self.world = world
        self.node = node
        self._ready: deque[asyncio.Handle] = deque()
        self._ended = False

    def enter(self, call: Callable[[], object]) -> None:
        """Call a function in the process, and run what becomes ready by that."""
        if self._ended:
            return
        outer = events._get_running_loop()
        if outer is self:
            call()
            return
        events._set_running_loop(self)
        try:
            call()
            while self._ready:
                self._ready.popleft()._run()
        finally:
            events._set_running_loop(outer)

    def end(self) -> None:
        """The process ends: its coroutines do not go on."""
        self._ended = True
        for task in asyncio.all_tasks(self):
            task.get_coro().close()  # type: ignore[union-attr]

    # --- what tasks and futures need

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **options)

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error that nobody has handled. Tasks of a process that has ended are none."""
        error = context.get("exception")
        if error is not None and self.world.error is None:
            self.world.error = error


class NodeAlarm:
    """An `Alarm`."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class NodeClock:
    """A `Clock` of a process."""

    def __init__(self, loop: NodeLoop) -> None:
        self._loop = loop
        self._world = loop.world

    def now_ms(self) -> int:
        return self._world.now_ms

    def monotonic_ms(self) -> int:
        return self._world.now_ms

    def wake_at(self, ms: int, callback: Callable[[], object]) -> NodeAlarm:
        alarm = NodeAlarm(callback)

        def ring() -> None:
            if alarm.callback is not None:
                self._loop.enter(alarm.callback)

        self._world.at(max(ms - self._world.now_ms, 0), ring, self._loop.node)
        return alarm
