"""Processes that are killed in the middle of their work, simulated in one event loop.

All tasks of a process run under its `SimulatedProcess`, which may kill the process whenever one of
them would wait. After that no code of the process runs, not even a `finally`, and its connections
are closed. As after kill -9, data that it has sent may or may not arrive.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Died(BaseException):
    """The process is dead."""


class SimulatedProcess:
    """A process that is killed at the step `dies_at` and delayed at random at other steps."""

    def __init__(
        self, dies_at: int | None = None, delays: random.Random | None = None,
        delay_probability: float = 0.01,
    ) -> None:  # fmt: skip
        self.dies_at = dies_at
        self.delays = delays
        self.delay_probability = delay_probability
        self.steps = 0
        self.dead = False
        self.died = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.transports: list[asyncio.BaseTransport] = []

    def step(self) -> bool:
        """Count a step; returns whether the process is dead."""
        self.steps += 1
        if self.steps == self.dies_at:
            self.dead = True
            self.died.set()
        return self.dead

    def delay(self) -> float:
        if self.delays is None or self.delays.random() > self.delay_probability:
            return 0.0
        return self.delays.random() * 0.02

    async def clean_up(self) -> None:
        """Close the connections and cancel the tasks of a dead process."""
        self.dead = True
        token = _process.set(self)  # callbacks of its protocols still belong to the process
        try:
            for transport in self.transports:
                transport.abort()  # type: ignore[attr-defined]
        finally:
            _process.reset(token)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


_process: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)


class _SteppedCoroutine:
    """A coroutine that asks its process before each step."""

    def __init__(self, work: Coroutine[Any, Any, T], process: SimulatedProcess) -> None:
        self._work = work
        self._process = process

    def __await__(self) -> Generator[Any, Any, Any]:
        work, process = self._work, self._process
        go: Callable[[], Any] = partial(work.send, None)
        while True:
            try:
                waits_for = go()
            except StopIteration as end:
                return end.value
            if process.step():
                go = partial(work.throw, Died())
                continue
            try:
                if seconds := process.delay():
                    yield from asyncio.sleep(seconds).__await__()
                got = yield waits_for
            except BaseException as error:
                go = partial(work.throw, Died() if process.dead else error)
            else:
                go = partial(work.send, got)


async def _stepwise(work: Coroutine[Any, Any, T], process: SimulatedProcess) -> T:
    result: T = await _SteppedCoroutine(work, process)
    return result


class Loop(asyncio.SelectorEventLoop):
    """An event loop on which tasks and connections belong to processes."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_make_task)
        self.set_exception_handler(_handle_exception)

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        made = await super().create_connection(*args, **kwargs)
        process = _process.get()
        if process is not None:
            process.transports.append(made[0])
            if process.dead:
                made[0].abort()
        return made


def _handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)


def _make_task(loop: Any, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    process = _process.get()
    if process is None or not asyncio.iscoroutine(work):
        return asyncio.Task(work, loop=loop, **kwargs)
    task = asyncio.Task(_stepwise(work, process), loop=loop, **kwargs)
    process.tasks.add(task)
    task.add_done_callback(process.tasks.discard)
    task.add_done_callback(lambda done: work.close())  # the task may not have started
    return task


async def run_process(process: SimulatedProcess, main: Callable[[], Awaitable[T]]) -> T:
    """Run a process to its end; raises Died if it is killed before."""

    async def body() -> T:
        return await main()

    token = _process.set(process)  # inherited by tasks and by the tasks that they create
    try:
        task = asyncio.get_running_loop().create_task(body())
    finally:
        _process.reset(token)
    death = asyncio.ensure_future(process.died.wait())
    try:
        await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
        if process.dead:
            raise Died
        return task.result()
    finally:
        death.cancel()
        await process.clean_up()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test on a `Loop`."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)
