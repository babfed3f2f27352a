"""The base of synchronous clients: an asyncio client on the event loop of `loop_thread`.

**Fork.** In a child process a client that only sends or queries is created again with the same
options on its first use. A client with handlers raises ClientForked: two processes must not be the
same member of a group.
"""

import asyncio
import os
import sys
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from penstock.client.sync.loop_thread import Work, await_result, loop_thread, process_state
from penstock.errors import BlockingInLoop, ClientClosed, ClientForked

P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient(Protocol):
    """An asyncio client."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


ClientT = TypeVar("ClientT", bound=AsyncClient)


class SyncClient(Generic[ClientT]):
    """A synchronous client over an asyncio client; it can be used in any thread."""

    _survives_fork = True
    """Whether a child process may use an inherited client."""

    def __init__(self, make: Callable[[], ClientT]) -> None:
        self._make = make
        self._client = make()
        self._pid = os.getpid()
        self._started = False
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._reset_state()

    def start(self) -> None:
        """Start; `with` does it."""
        self._current()
        if not self._started:
            if self._finalizer is not None:
                self._recreate()
            self._run(self._client.start)
            if not self._started:  # another thread may have been faster
                self._mark_started()

    def close(self) -> None:
        """Close; `with` does it."""
        if self._mark_closed():
            self._run(self._client.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mark_closed():
            self._run(self._client.__aexit__, kind, error, trace)

    def _mark_started(self) -> None:
        self._started = True
        self._finalizer = weakref.finalize(
            self, _close_unreferenced, os.getpid(), self._client, type(self).__name__
        )
        self._finalizer.atexit = False
        process_state().clients.add(self)

    def _mark_closed(self) -> bool:
        """Whether there is a client to close; the parent closes an inherited one."""
        closes = self._started and self._pid == os.getpid()
        if closes:
            self._check_caller()
            assert self._finalizer is not None
            self._finalizer.detach()
        self._started = False
        process_state().clients.discard(self)
        return closes

    def _current(self) -> ClientT:
        """The asyncio client of this process."""
        if self._pid != os.getpid():
            with process_state().lock:
                if self._pid != os.getpid():
                    self._use_after_fork()
        return self._client

    def _started_client(self) -> ClientT:
        """The asyncio client; raises ClientClosed if it is not started."""
        client = self._current()
        if not self._started:
            raise ClientClosed(f"the {type(self).__name__} is not started or already closed")
        return client

    def _use_after_fork(self) -> None:
        """First use in a child process; a client that was not started needs no change."""
        if self._started:
            if not self._survives_fork:
                raise self._forked(self._pid)
            self._recreate()
            self._run(self._client.start)
            self._mark_started()
        self._pid = os.getpid()

    def _forked(self, pid: int) -> ClientForked:
        return ClientForked(
            f"this {type(self).__name__} was started in process {pid}, and this is process "
            f"{os.getpid()}: two processes cannot be the same member of a group",
            hint="start it after the fork, in the start-up code of the worker",
        )

    def _recreate(self) -> None:
        """Replace the asyncio client: the old one is closed, or belongs to the parent."""
        self._client = self._make()
        self._reset_state()

    def _reset_state(self) -> None:
        """Initialize the attributes that belong to one asyncio client."""

    def _run(self, function: Callable[P, Work[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_caller()
        return loop_thread().run(function, *args, **kwargs)

    def _call_in_loop(self, work: Callable[[], T]) -> T:
        """Call a function that does not wait: in the loop if the client is started."""
        if not self._started or loop_thread().is_current():
            return work()

        async def run_in_loop() -> T:
            return work()

        return self._run(run_in_loop)

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous iterator."""

        async def next_item() -> T:
            return await anext(items)

        pid = os.getpid()
        if isinstance(items, AsyncGenerator):
            process_state().generators.add(items)
        try:
            while True:
                if pid != os.getpid():
                    raise self._forked(pid)
                try:
                    item = self._run(next_item)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if isinstance(items, AsyncGenerator) and pid == os.getpid():
                self._close_generator(items)

    def _close_generator(self, items: AsyncGenerator[Any, Any]) -> None:
        """The garbage collector may call this in any thread, also at interpreter shutdown."""
        with suppress(ClientClosed):
            closing = loop_thread().submit(items.aclose)
            if asyncio._get_running_loop() is None:
                await_result(closing)

    def _check_caller(self) -> None:
        if blocks_loop():
            name = type(self).__name__
            raise BlockingInLoop(
                f"{name} blocks, and an event loop runs in this thread: use Async{name} there",
                hint=f"`async with Async{name}(…)`, and `await` its methods",
            )


def blocks_loop() -> bool:
    """Whether a call that waits would block an event loop: one runs in this thread, and it is not
    that of a notebook, which waits for the cell anyway."""
    if asyncio._get_running_loop() is None:
        return False
    return loop_thread().is_current() or not _in_notebook()


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient[Any], P], T]:
    """A synchronous method that waits for this coroutine method of the asyncio client."""
    name = method.__name__

    @wraps(method)
    def wait(client: SyncClient[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        outcome: T = client._run(getattr(client._started_client(), name), *args, **kwargs)
        return outcome

    return wait


def blocking_function(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient[Any], P], T]:
    """A synchronous method that waits for this coroutine function of the asyncio client."""

    @wraps(function)
    def wait(client: SyncClient[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        outcome: T = client._run(function, client._started_client(), *args, **kwargs)
        return outcome

    return wait


def in_loop(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[SyncClient[Any], P], T]:
    """A synchronous method that calls this plain method of the asyncio client."""
    name = method.__name__

    @wraps(method)
    def call(client: SyncClient[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        function: Callable[P, T] = getattr(client._current(), name)
        return client._call_in_loop(lambda: function(*args, **kwargs))

    return call


def _close_unreferenced(pid: int, client: AsyncClient, name: str) -> None:
    """The garbage collector has found an open synchronous client."""
    if pid == os.getpid():
        with suppress(ClientClosed):
            loop_thread().submit(client.close)
        warnings.warn(f"a {name} was not closed", ResourceWarning, stacklevel=2)


def _in_notebook() -> bool:
    """Whether this is a notebook cell: the loop of its kernel waits for the cell anyway."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None
