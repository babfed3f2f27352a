"""Synchronous clients and their event loop in a thread, without a server."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future, wait
from types import TracebackType

import pytest

import penstock.client.sync.loop_thread as module
import penstock.client.sync.sync_client as sync_client
from penstock.client.consumer.dispatch.handlers import Function
from penstock.client.sync.loop_thread import LoopThread, loop_thread
from penstock.client.sync.sync_client import SyncClient, blocking, in_loop
from penstock.client.sync.sync_handler_client import SyncHandlerClient
from penstock.errors import BlockingInLoop, ClientClosed


class AsyncEcho:
    """An asyncio client without a server."""

    carries_context = False

    def __init__(self, name: str = "echo") -> None:
        self.name = name
        self.events: list[str] = []
        self.cancelled = threading.Event()
        self.waiting = threading.Event()

    async def start(self) -> None:
        self.events.append("start")

    async def close(self) -> None:
        self.events.append("close")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.events.append(f"exit {error!r}")

    async def echo(self, text: str, *, times: int = 1) -> str:
        """Return the text."""
        await asyncio.sleep(0)
        if not text:
            raise ValueError("nothing to say")
        return text * times

    async def wait(self) -> None:
        self.waiting.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.set()

    def thread(self) -> str:
        return threading.current_thread().name


class Echo(SyncClient[AsyncEcho]):
    def __init__(self, name: str = "echo") -> None:
        super().__init__(lambda: AsyncEcho(name))

    echo = blocking(AsyncEcho.echo)
    wait = blocking(AsyncEcho.wait)
    thread = in_loop(AsyncEcho.thread)

    @property
    def inner(self) -> AsyncEcho:
        return self._client


def test_sync_method_waits_for_the_asyncio_client() -> None:
    with Echo() as echo:
        assert echo.echo("ho", times=3) == "hohoho"
        with pytest.raises(ValueError, match="nothing to say"):
            echo.echo("")
    assert echo.inner.events == ["start", "exit None"]
    assert echo.echo.__doc__ == "Return the text."


def test_exit_passes_the_error_of_the_block_on() -> None:
    echo = Echo()
    with pytest.raises(KeyError), echo:
        raise KeyError("lost")
    assert echo.inner.events == ["start", "exit KeyError('lost')"]


def test_client_that_is_not_started_or_closed_raises() -> None:
    echo = Echo()
    with pytest.raises(ClientClosed, match="Echo is not started"):
        echo.echo("x")
    echo.start()
    echo.close()
    echo.close()
    assert echo.inner.events == ["start", "close"]
    with pytest.raises(ClientClosed, match="start"):
        echo.echo("x")
    with echo:  # as another asynchronous client
        assert echo.echo("x") == "x"
    assert echo.inner.events == ["start", "exit None"]


def test_plain_methods_run_in_the_loop_after_start() -> None:
    echo = Echo()
    assert echo.thread() == threading.current_thread().name
    with echo:
        assert echo.thread() == "penstock"


def test_all_clients_share_one_thread() -> None:
    with Echo() as one, Echo() as other:
        assert one.thread() == other.thread()
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("penstock") == 1


def test_many_threads_use_one_client() -> None:
    with Echo() as echo:
        answers: list[str] = []

        def ask(number: int) -> None:
            answers.extend(echo.echo(f"{number}.{turn}") for turn in range(50))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == sorted(f"{n}.{turn}" for n in range(8) for turn in range(50))


def test_use_inside_an_event_loop_names_the_asyncio_class() -> None:
    echo = Echo()

    async def body() -> None:
        with pytest.raises(BlockingInLoop, match="runs in this thread: use AsyncEcho"):
            echo.start()

    asyncio.run(body())
    with echo:

        async def more() -> None:
            with pytest.raises(BlockingInLoop):
                echo.echo("x")
            with pytest.raises(BlockingInLoop):
                echo.close()
            assert await asyncio.to_thread(echo.echo, "x") == "x"

        asyncio.run(more())
        assert echo.echo("still open") == "still open"


def test_interrupt_of_the_caller_cancels_the_work() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with Echo() as echo:

            def shake() -> None:
                echo.inner.waiting.wait()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

            threading.Thread(target=shake).start()
            with pytest.raises(KeyboardInterrupt):
                echo.wait()
            assert echo.inner.cancelled.wait(10)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_cancelled_future_cancels_the_work() -> None:
    thread, inner = LoopThread("test"), AsyncEcho()
    future: Future[None] = thread.submit(inner.wait)
    inner.waiting.wait()
    assert future.cancel()
    assert inner.cancelled.wait(10)
    with pytest.raises(CancelledError):
        future.result()
    thread.stop()


def test_stop_cancels_running_work() -> None:
    thread, inner = LoopThread("test"), AsyncEcho()
    thread.submit(inner.wait)
    inner.waiting.wait()
    thread.stop()
    assert inner.cancelled.is_set()
    assert thread.loop.is_closed()
    assert "test" not in [each.name for each in threading.enumerate()]


def test_call_that_fails_before_it_starts_raises_in_the_caller() -> None:
    def broken() -> "asyncio.Future[int]":
        raise LookupError("no")

    with pytest.raises(LookupError):
        loop_thread().run(broken)


def test_unreferenced_client_is_closed_with_a_warning() -> None:
    clients = [Echo()]
    clients[0].start()
    inner = clients[0].inner
    with pytest.warns(ResourceWarning, match="a Echo was not closed"):
        clients.clear()
    loop_thread().run(inner.echo, "after the close")
    assert inner.events == ["start", "close"]


def test_interrupt_during_the_wakeup_does_not_block_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = LoopThread("test", asyncio.new_event_loop())
    wake = thread.loop.call_soon_threadsafe

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(thread.loop, "call_soon_threadsafe", wake)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread.loop, "call_soon_threadsafe", interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.submit(AsyncEcho().echo, "interrupted")
    assert thread.submit(AsyncEcho().echo, "x").result(10) == "x"
    thread.stop()


def test_calls_of_other_threads_leave_time_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", 0.0)
    thread = LoopThread("test")
    ready, order, done = threading.Event(), list[str](), threading.Event()

    def first() -> None:
        ready.wait(10)
        order.append("first")
        thread.loop.call_soon(order.append, "the loop's own")

    for call in (first, lambda: order.append("second"), done.set):
        thread.call_soon(call)
    ready.set()
    assert done.wait(10)
    thread.stop()
    assert order == ["first", "the loop's own", "second"]


def test_call_after_stop_raises() -> None:
    thread, inner = LoopThread("test"), AsyncEcho()
    waiting = thread.submit(inner.wait)
    inner.waiting.wait()
    thread.stop()
    assert waiting.cancelled()
    for _ in range(2):
        with pytest.raises(ClientClosed, match="has ended"):
            thread.run(inner.echo, "x")
    assert not waiting.cancel() or waiting.cancelled()


def test_wait_for_a_call_that_never_starts_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is queued while the loop ends is never started."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    thread = LoopThread("test")
    monkeypatch.setattr(thread, "call_soon", lambda call: None)
    future = thread.submit(AsyncEcho().echo, "x")
    with pytest.raises(TimeoutError):
        future.result(0.05)
    thread.stop()
    with pytest.raises(ClientClosed, match="has ended"):
        future.result()


def test_future_cancelled_before_the_start_is_done() -> None:
    thread, release = LoopThread("test"), threading.Event()
    thread.call_soon(lambda: release.wait(10))
    future = thread.submit(AsyncEcho().echo, "x")
    assert future.cancel()
    assert future.cancel()
    release.set()
    assert wait([future], 10).done == {future}
    thread.stop()


@pytest.mark.parametrize("count", [1, 3])
def test_work_is_cancelled_once(count: int) -> None:
    thread, progressed, tidied = LoopThread("test"), threading.Event(), threading.Event()

    async def work() -> None:
        try:
            progressed.set()
            await asyncio.get_running_loop().create_future()
        finally:
            progressed.set()
            await asyncio.sleep(0.02)
            tidied.set()

    future = thread.submit(work)
    progressed.wait(10)
    progressed.clear()
    for _ in range(count):
        future.cancel()
        progressed.wait(10)
    assert tidied.wait(10)
    thread.stop()


@pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
def test_work_that_exits_does_not_end_the_loop(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    thread = LoopThread("test", None if kind == "uvloop" else asyncio.new_event_loop())
    with pytest.raises(SystemExit):
        thread.run(leave)
    assert thread.run(AsyncEcho().echo, "x") == "x"
    assert "SystemExit in the event loop" in caplog.text
    thread.stop()


def test_notebook_cell_may_block_but_the_loop_thread_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync_client, "_in_notebook", lambda: True)
    with Echo() as echo:

        async def cell() -> str:
            return echo.echo("x")

        assert asyncio.run(cell()) == "x"
        with pytest.raises(BlockingInLoop):
            loop_thread().run(cell)


@pytest.mark.filterwarnings("error")
def test_unreferenced_client_is_closed_if_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    clients = [Echo()]
    clients[0].start()
    inner = clients[0].inner
    clients.clear()
    loop_thread().run(inner.echo, "after the close")
    assert inner.events == ["start", "close"]


def test_concurrent_starts_start_the_client_once() -> None:
    echo, both = Echo(), threading.Barrier(2)

    async def start() -> None:
        await asyncio.to_thread(both.wait, 10)

    echo.inner.start = start  # type: ignore[method-assign]
    threads = [threading.Thread(target=echo.start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    echo.close()
    del echo  # the finalizer of the second start must not warn


async def count(ended: threading.Event) -> AsyncIterator[int]:
    try:
        for number in range(10):
            yield number
    finally:
        ended.set()


def test_iterator_may_be_collected_in_the_loop() -> None:
    with Echo() as echo:
        ended = threading.Event()
        for number in echo._iterate(count(ended)):
            assert number == 0
            break
        assert ended.is_set()
        ended.clear()
        numbers = [echo._iterate(count(ended))]
        assert next(numbers[0]) == 0
        loop_thread().call_soon(numbers.clear)
        assert ended.wait(10)


# --- consumers


class AsyncRunner(AsyncEcho):
    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()
        self.handlers: list[Function] = []

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        self.events.append(f"subscribe {topic}")

    def on(self, topic: str, tags: str = "*", *, sql: str | None = None):  # type: ignore[no-untyped-def]
        def add(function: Function) -> Function:
            self.handlers.append(function)
            return function

        return add

    async def run(self) -> None:
        self.waiting.set()
        await self.ended.wait()
        self.events.append("ran")

    async def close(self) -> None:
        self.ended.set()
        await super().close()


class Runner(SyncHandlerClient[AsyncRunner]):
    def __init__(self) -> None:
        super().__init__(AsyncRunner)

    @property
    def inner(self) -> AsyncRunner:
        return self._client


def test_with_starts_a_consumer_that_has_a_subscription() -> None:
    with Runner() as runner:
        assert runner.inner.events == []

        @runner.on("T")
        def handle(message: object) -> None: ...

        runner.start()
        assert runner.inner.events == ["start"]
        assert runner.inner.handlers == [handle]
    runner = Runner()
    runner.subscribe("T")
    with runner:
        assert runner.inner.events == ["subscribe T", "start"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_ends_by_a_signal(number: signal.Signals) -> None:
    runner, before = Runner(), signal.getsignal(number)

    def tell() -> None:
        runner.inner.waiting.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    threading.Thread(target=tell).start()
    runner.run()
    assert "ran" in runner.inner.events
    assert signal.getsignal(number) is before


def test_run_ends_by_stop_from_another_thread() -> None:
    runner = Runner()
    running = threading.Thread(target=runner.run)
    running.start()
    runner.inner.waiting.wait()
    runner.stop()
    running.join(10)
    assert not running.is_alive()
    with pytest.raises(ClientClosed, match="Runner was closed"):
        runner.start()


def test_client_is_not_started_after_its_block() -> None:
    with Runner() as runner:
        pass
    with pytest.raises(ClientClosed):
        runner._started_client()
    assert runner.inner.events == []


def test_ignored_signals_stay_ignored() -> None:
    runner, before = Runner(), signal.signal(signal.SIGINT, signal.SIG_IGN)
    meanwhile: list[object] = []

    def tell() -> None:
        runner.inner.waiting.wait()
        meanwhile.append(signal.getsignal(signal.SIGINT))
        runner.stop()

    try:
        threading.Thread(target=tell).start()
        runner.run()
        assert [*meanwhile, signal.getsignal(signal.SIGINT)] == [signal.SIG_IGN] * 2
    finally:
        signal.signal(signal.SIGINT, before)


# --- the process


def run(code: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PENSTOCK_PURE"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=60, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_exit_closes_open_clients() -> None:
    out = run(
        """
        from tests.unit.client.sync.test_loop_thread import AsyncEcho, SyncClient
        class Loud(AsyncEcho):
            async def close(self):
                print("closed")
        client = SyncClient(Loud)
        client.start()
        print("end")
        """
    )
    assert out.split() == ["end", "closed"]


@pytest.mark.slow
def test_exit_does_not_wait_forever() -> None:
    began = time.monotonic()
    run(
        """
        import penstock.client.sync.loop_thread as loop_thread
        from tests.unit.client.sync.test_loop_thread import AsyncEcho, SyncClient
        loop_thread.EXIT_SECONDS = 0.3
        class Stuck(AsyncEcho):
            async def close(self):
                await self.wait()
        client = SyncClient(Stuck)
        client.start()
        """
    )
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_calls_during_exit_do_not_hang() -> None:
    out = run(
        """
        import atexit
        def late():
            for _ in range(2):
                try:
                    echo.echo("x")
                except Exception as error:
                    print(type(error).__name__)
        atexit.register(late)
        from tests.unit.client.sync.test_loop_thread import Echo, count
        import threading
        echo = Echo()
        echo.start()
        numbers = [echo._iterate(count(threading.Event())) for _ in range(3)]
        for each in numbers:
            next(each)
        """
    )
    assert out.split() == ["ClientClosed"] * 2
