"""Processes that die in the midst of their work, in one event loop.

Everything that a process does runs under its `Fate`: each time one of its tasks would wait, the
fate may let it die there and then. Nothing of it runs any more after that, no `finally` either, and
its connections are gone: as after kill -9, what it had sent may arrive or not.
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


class Fate:
    """What becomes of a process: it dies at the step `dies_at`, and dawdles at others."""

    def __init__(
        self, dies_at: int | None = None, dawdles: random.Random | None = None,
        dawdling: float = 0.01,
    ) -> None:  # fmt: skip
        self.dies_at = dies_at
        self.dawdles = dawdles
        self.dawdling = dawdling
        self.steps = 0
        self.dead = False
        self.died = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.transports: list[asyncio.BaseTransport] = []

    def step(self) -> bool:
        """One more step; whether it is the last one, or one after it."""
        self.steps += 1
        if self.steps == self.dies_at:
            self.dead = True
            self.died.set()
        return self.dead

    def dawdle(self) -> float:
        if self.dawdles is None or self.dawdles.random() > self.dawdling:
            return 0.0
        return self.dawdles.random() * 0.02

    async def bury(self) -> None:
        """Take away what is left of a dead process."""
        self.dead = True
        token = _fate.set(self)  # what its protocols do about it is not outside of it
        try:
            for transport in self.transports:
                transport.abort()  # type: ignore[attr-defined]
        finally:
            _fate.reset(token)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


_fate: ContextVar[Fate | None] = ContextVar("fate", default=None)


class _Steps:
    """A coroutine whose every step is the fate's to allow."""

    def __init__(self, work: Coroutine[Any, Any, T], fate: Fate) -> None:
        self._work = work
        self._fate = fate

    def __await__(self) -> Generator[Any, Any, Any]:
        work, fate = self._work, self._fate
        go: Callable[[], Any] = partial(work.send, None)
        while True:
            try:
                waits_for = go()
            except StopIteration as end:
                return end.value
            if fate.step():
                go = partial(work.throw, Died())
                continue
            try:
                if seconds := fate.dawdle():
                    yield from asyncio.sleep(seconds).__await__()
                got = yield waits_for
            except BaseException as error:
                go = partial(work.throw, Died() if fate.dead else error)
            else:
                go = partial(work.send, got)


async def _stepwise(work: Coroutine[Any, Any, T], fate: Fate) -> T:
    result: T = await _Steps(work, fate)
    return result


class Loop(asyncio.SelectorEventLoop):
    """An event loop on which tasks and connections belong to processes."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_make_task)
        self.set_exception_handler(_say_unless_dead)

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        made = await super().create_connection(*args, **kwargs)
        fate = _fate.get()
        if fate is not None:
            fate.transports.append(made[0])
            if fate.dead:
                made[0].abort()
        return made


def _say_unless_dead(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)


def _make_task(loop: Any, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    fate = _fate.get()
    if fate is None or not asyncio.iscoroutine(work):
        return asyncio.Task(work, loop=loop, **kwargs)
    task = asyncio.Task(_stepwise(work, fate), loop=loop, **kwargs)
    fate.tasks.add(task)
    task.add_done_callback(fate.tasks.discard)
    task.add_done_callback(lambda done: work.close())  # it may not have begun
    return task


async def process(fate: Fate, main: Callable[[], Awaitable[T]]) -> T:
    """Run a process; raises Died if it did not live to its end."""

    async def body() -> T:
        return await main()

    token = _fate.set(fate)  # tasks and what they make inherit it
    try:
        task = asyncio.get_running_loop().create_task(body())
    finally:
        _fate.reset(token)
    death = asyncio.ensure_future(fate.died.wait())
    try:
        await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
        if fate.dead:
            raise Died
        return task.result()
    finally:
        death.cancel()
        await fate.bury()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test on such a loop."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)
