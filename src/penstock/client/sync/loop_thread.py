"""What stands between blocking calls and the asynchronous clients: one event loop in a thread.

The loop runs in one daemon thread per process. It begins with the first call and ends with the
process, after what is still open was closed. A blocking client is a `Face` over an asynchronous
one that lives there.

**Fork.** Threads do not come along into a child process, connections do, and are the parent's. So
a child leaves the parent's clients alone, without even tidying them up: closing a handle of theirs
would reach into the parent's epoll set. Its first call begins another thread; a face that only
sends or asks makes itself anew with the same options, and one with handlers says that it was
started before the fork, for two processes must not be one member of a group.
"""

import asyncio
import atexit
import ctypes
import logging
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from penstock.errors import BlockingInLoop, ClientClosed, ClientForked

log = logging.getLogger(__name__)

END_SECONDS = 3.0
"""How long the end of the process waits for clients that nobody closed."""

CANCEL_SECONDS = 2.0
"""How long it then waits for what is cancelled; on a busy machine a moment is not enough."""

LOOK_SECONDS = 0.5
"""How often who waits looks up: a signal that comes while a thread is about to wait is not heard
before it does something again."""

P = ParamSpec("P")
T = TypeVar("T")

Work = Coroutine[Any, Any, T] | asyncio.Future[T]


class LoopThread:
    """An event loop in a daemon thread, for callers in other threads."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or _new_loop()
        self._mail: deque[Callable[[], object]] = deque()
        self._called = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def begin(
        self, function: Callable[P, Work[T]], *args: P.args, **kwargs: P.kwargs
    ) -> "Future[T]":
        """Call something in the loop; the future gets what it comes to."""
        call = _Call(self, lambda: function(*args, **kwargs))
        self.soon(call.begin)
        return call

    def run(self, function: Callable[P, Work[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` comes to, called in the loop. An interrupt of the caller cancels it."""
        call = _Call(self, lambda: function(*args, **kwargs))
        try:
            self.soon(call.begin)
            return await_result(call)
        except BaseException:
            call.cancel()
            raise

    def soon(self, call: Callable[[], object]) -> None:
        """Call something in the loop, which must not fail; calls that come together wake it once.

        A call that finds the flag set is seen by the reader, who takes it down before reading.
        """
        self._mail.append(call)
        if self._called:
            return
        try:
            self._called = True
            self.loop.call_soon_threadsafe(self._read_mail)
        except BaseException as error:  # an interrupt, or the loop is closed
            self._called = False  # else nobody would ever wake it again
            if self.loop.is_closed():
                raise _ended() from error
            raise

    def runs(self) -> bool:
        """Whether it answers: neither after its end, nor in a child process, nor at the very end
        of the interpreter."""
        return self._thread.is_alive() and not sys.is_finalizing()

    def is_here(self) -> bool:
        """Whether the caller is in this thread."""
        return threading.current_thread() is self._thread

    def end(self, seconds: float = CANCEL_SECONDS) -> None:
        """Cancel what still runs there and end the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(seconds)

    def _read_mail(self) -> None:
        self._called = False
        mail = self._mail
        while mail:
            mail.popleft()()

    def _main(self) -> None:
        while True:
            try:
                self.loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio lets these two through
                log.error("%r in the event loop of the blocking clients, which goes on", error)
        self.loop.run_until_complete(_cancel_all())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def await_result(future: "Future[T]") -> T:
    """Wait; what is not done when the caller is interrupted is cancelled."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class _Call(Future[T]):
    """A call from another thread, and what it comes to; who cancels it cancels the work."""

    def __init__(self, thread: LoopThread, make: Callable[[], Work[T]]) -> None:
        super().__init__()
        self._thread = thread
        self._make = make
        self._work: asyncio.Future[T] | None = None

    def begin(self) -> None:
        """In the loop."""
        if self.cancelled():
            self.set_running_or_notify_cancel()
            return
        try:
            self._work = asyncio.ensure_future(self._make())
        except BaseException as error:  # it is the caller's
            self._settle(error, None)
        else:
            self._work.add_done_callback(self._work_done)

    def result(self, timeout: float | None = None) -> T:
        """As that of every future; it does not wait for a loop that has ended."""
        if timeout is not None:
            return super().result(timeout)
        while True:
            try:
                return super().result(LOOK_SECONDS)
            except TimeoutError:
                runs = self._thread.runs()
                if self.done():
                    return super().result()
                if not runs:
                    raise _ended() from None

    def cancel(self) -> bool:
        again = self.cancelled()
        cancelled = super().cancel()
        if cancelled and not again:  # a second time would disturb how the work tidies up
            with suppress(ClientClosed):
                self._thread.soon(self._cancel_work)
        return cancelled

    def _cancel_work(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def _work_done(self, work: asyncio.Future[T]) -> None:
        if work.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
            return
        error = work.exception()
        self._settle(error, None if error is not None else work.result())

    def _settle(self, error: BaseException | None, result: Any) -> None:
        if not self.set_running_or_notify_cancel():
            return
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)


async def _cancel_all() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ended() -> ClientClosed:
    return ClientClosed(
        "the event loop of the blocking clients has ended",
        hint="it ends with the process, and a child process does not have its parent's",
    )


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# --- the one thread of the process ---------------------------------------------------------------


class _Process:
    """What there is once per process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: LoopThread | None = None
        self.open: weakref.WeakSet[Face[Any]] = weakref.WeakSet()
        self.iterations: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()


_process = _Process()


def loop_thread() -> LoopThread:
    """The thread of all blocking clients of this process."""
    thread = _process.thread
    if thread is None:
        with _process.lock:
            if _process.thread is None:
                _process.thread = LoopThread("penstock")
            thread = _process.thread
    return thread


def _leave_parent_alone() -> None:
    """In a child process: never touch what the parent's thread works with, not even at the end."""
    global _process
    left = (
        _process.thread,
        [face._inner for face in list(_process.open)],
        list(_process.iterations),
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
    _process = _Process()


def _close_all() -> None:
    """At the end of the process: say goodbye, in bounded time."""
    thread = _process.thread
    if thread is None:
        return
    ends = [items.aclose for items in list(_process.iterations)]  # before their clients
    ends += [face._inner.close for face in list(_process.open)]
    wait([thread.begin(end) for end in ends], END_SECONDS)
    thread.end()


def _close_forgotten(pid: int, inner: "Client", name: str) -> None:
    """Nobody has the face of an open client any more."""
    if pid == os.getpid():
        with suppress(ClientClosed):
            loop_thread().begin(inner.close)
        warnings.warn(f"a {name} was not closed", ResourceWarning, stacklevel=2)


os.register_at_fork(after_in_child=_leave_parent_alone)
atexit.register(_close_all)


# --- faces ---------------------------------------------------------------------------------------


class Client(Protocol):
    """An asynchronous client."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


Inner = TypeVar("Inner", bound=Client)


class Face(Generic[Inner]):
    """A client whose calls block, over one that is asynchronous; any thread may use it."""

    _reopens = True
    """Whether a child process may go on with it."""

    def __init__(self, make: Callable[[], Inner]) -> None:
        self._make = make
        self._inner = make()
        self._pid = os.getpid()
        self._started = False
        self._goodbye: weakref.finalize[Any, Any] | None = None
        self._reset()

    def start(self) -> None:
        """Begin; `with` does so."""
        self._live()
        if not self._started:
            if self._goodbye is not None:
                self._renew()
            self._run(self._inner.start)
            if not self._started:  # another thread may have been faster
                self._note_started()

    def close(self) -> None:
        """End, in order; `with` does so."""
        if self._ends():
            self._run(self._inner.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ends():
            self._run(self._inner.__aexit__, kind, error, trace)

    def _ends(self) -> bool:
        """Whether there is something to close: what is inherited is the parent's to close."""
        ends = self._started and self._pid == os.getpid()
        if ends:
            self._check_caller()
            assert self._goodbye is not None
            self._goodbye.detach()
        self._started = False
        _process.open.discard(self)
        return ends

    def _live(self) -> Inner:
        """The asynchronous client, which after a fork is another one."""
        if self._pid != os.getpid():
            with _process.lock:
                if self._pid != os.getpid():
                    self._arrive()
        return self._inner

    def _open(self) -> Inner:
        """The asynchronous client, which is started."""
        inner = self._live()
        if not self._started:
            raise ClientClosed(f"the {type(self).__name__} is not started, or closed")
        return inner

    def _arrive(self) -> None:
        """First use in a child process; what was not started has nothing of the parent's."""
        if self._started:
            if not self._reopens:
                raise self._forked(self._pid)
            self._renew()
            self._run(self._inner.start)
            self._note_started()
        self._pid = os.getpid()

    def _forked(self, pid: int) -> ClientForked:
        return ClientForked(
            f"this {type(self).__name__} was started in process {pid}, and this is process "
            f"{os.getpid()}: two processes can't be one member of a group",
            hint="start it after the fork: in the worker's own start-up code",
        )

    def _note_started(self) -> None:
        self._started = True
        self._goodbye = weakref.finalize(
            self, _close_forgotten, os.getpid(), self._inner, type(self).__name__
        )
        self._goodbye.atexit = False
        _process.open.add(self)

    def _renew(self) -> None:
        """Begin with another asynchronous client: the one before is closed, or the parent's."""
        self._inner = self._make()
        self._reset()

    def _reset(self) -> None:
        """Set what belongs to one asynchronous client."""

    def _run(self, function: Callable[P, Work[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_caller()
        return loop_thread().run(function, *args, **kwargs)

    def _do(self, work: Callable[[], T]) -> T:
        """Call something that does not wait: in the loop, once it might disturb it there."""
        if not self._started or loop_thread().is_here():
            return work()

        async def work_there() -> T:
            return work()

        return self._run(work_there)

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        """What an asynchronous iterator gives, one by one."""

        async def next_one() -> T:
            return await anext(items)

        pid = os.getpid()
        if isinstance(items, AsyncGenerator):
            _process.iterations.add(items)
        try:
            while True:
                if pid != os.getpid():
                    raise self._forked(pid)
                try:
                    item = self._run(next_one)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if isinstance(items, AsyncGenerator) and pid == os.getpid():
                self._end(items)

    def _end(self, items: AsyncGenerator[Any, Any]) -> None:
        """The garbage collector may ask for it, in whatever thread, and at the very end."""
        with suppress(ClientClosed):
            ending = loop_thread().begin(items.aclose)
            if asyncio._get_running_loop() is None:
                await_result(ending)

    def _check_caller(self) -> None:
        if asyncio._get_running_loop() is None:
            return
        if loop_thread().is_here() or not _in_notebook():
            name = type(self).__name__
            raise BlockingInLoop(
                f"{name} blocks, and an event loop runs in this thread: use Async{name} there",
                hint=f"`async with Async{name}(…)`, and `await` before its calls",
            )


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Face[Any], P], T]:
    """The method of a face that waits for this one of the asynchronous client."""
    name = method.__name__

    @wraps(method)
    def wait(face: Face[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        outcome: T = face._run(getattr(face._open(), name), *args, **kwargs)
        return outcome

    return wait


def in_loop(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Face[Any], P], T]:
    """The method of a face that calls this plain one."""
    name = method.__name__

    @wraps(method)
    def call(face: Face[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        function: Callable[P, T] = getattr(face._live(), name)
        return face._do(lambda: function(*args, **kwargs))

    return call


def _in_notebook() -> bool:
    """Whether a cell runs here: the kernel's loop waits for it anyway."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None
