"""Supervises `penstock up`: the NameServer and the controller run in this process, each broker in a
child process.

A child reports on its stdout that it is ready. If a child fails before that, everything stops. A
child that ends later is restarted after a delay, which doubles while the child keeps failing.
Children receive SIGTERM from Linux when this process ends (`startup.end_with`), so that none is
left behind even after SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from penstock.config import Settings

log = logging.getLogger(__name__)

DELAY_S = 0.5
DELAY_S_MAX = 30.0
STEADY_S = 60.0
"""After running for this long a child counts as recovered, and its delay is reset."""
CLOSING_S = 30.0
"""How long a store may take to close, in addition to `stop_ms`; then the child is killed."""
READY = "penstock broker "
CONSOLE_STOP_S = 5.0


class ChildStartError(PenstockError):
    """A child process ended before it was ready for the first time."""

    hint = "see its error message above"


class ChildProcess:
    """A child process that is restarted whenever it ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        after: ChildProcess | None = None,
    ) -> None:
        """It is started when `after` is ready for the first time."""
        self.name = name
        self._after = after
        self.ready = asyncio.Event()
        self._command = command
        self._environ = environ
        self._stopping = asyncio.Event()
        self._process: Process | None = None

    async def supervise(self) -> None:
        """Run the child until `stop`; raises ChildStartError if it fails before it is ready."""
        if self._after is not None:
            await _either(self._after.ready, self._stopping)
        loop = asyncio.get_running_loop()
        delay_s = DELAY_S
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            if not self.ready.is_set():
                raise ChildStartError(f"{self.name} did not start: it {_exit_reason(code)}")
            if loop.time() - began >= STEADY_S:
                delay_s = DELAY_S
            log.error("%s %s; restarting in %.1f s", self.name, _exit_reason(code), delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            delay_s = min(delay_s * 2, DELAY_S_MAX)

    def stop(self) -> None:
        """Send SIGTERM to the child, and do not restart it."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _run_once(self) -> int:
        # In a new session the child does not receive Ctrl-C: this process stops it in order.
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=self._environ,
        )
        self._process = process
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            if not text.startswith(READY):
                print(text, file=sys.stderr)
            elif self.ready.is_set():
                log.warning("%s is ready again (process %d)", self.name, process.pid)
            else:
                self.ready.set()
        return await process.wait()


class ConsoleProcess:
    """The web console. It starts when the servers are ready, and they do not depend on it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._process: Process | None = None

    async def run(self) -> None:
        """Start it, and repeat what it prints: its address, or why it did not start."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=self._environ,
        )
        assert process.stdout is not None
        async for line in process.stdout:
            print(line.decode(errors="replace").rstrip(), file=sys.stderr, flush=True)
        code = await process.wait()
        if code:
            log.warning("the web console %s; the servers continue without it", _exit_reason(code))

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if that does not help."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), CONSOLE_STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def supervise(
    settings: Settings,
    children: Sequence[ChildProcess],
    on_up: Callable[[], None],
    *,
    with_controller: bool = False,
    console: ConsoleProcess | None = None,
) -> None:
    """Run a NameServer, a controller if it is wanted, and the children until a signal; call `on_up`
    when all are ready, and then start the console."""
    from penstock.server.controller.controller_service import ControllerService
    from penstock.server.services.nameserver_service import NameServerService

    stopped = asyncio.Event()
    _catch_signals(stopped, children)
    nameserver = NameServerService(settings)
    await nameserver.start()
    controller = ControllerService(settings) if with_controller else None
    if controller is not None:
        await controller.start()
    supervisors = [asyncio.create_task(child.supervise()) for child in children]
    stop = asyncio.create_task(stopped.wait())
    ready = asyncio.create_task(_all_ready(children))
    console_task: asyncio.Task[None] | None = None
    try:
        await _first_of(ready, stop, *supervisors)
        if not stopped.is_set():
            on_up()
            if console is not None:
                console_task = asyncio.create_task(console.run())
            await _first_of(stop, *supervisors)
    finally:
        ready.cancel()
        stop.cancel()
        if console is not None and console_task is not None:
            await console.stop()
            console_task.cancel()
            await asyncio.gather(console_task, return_exceptions=True)
        await _stop_children(children, supervisors, settings.server.stop_ms / 1000 + CLOSING_S)
        if controller is not None:
            await controller.stop()
        await nameserver.stop()


def _catch_signals(stopped: asyncio.Event, children: Sequence[ChildProcess]) -> None:
    """The first signal stops everything in order; the second kills the children."""

    def caught() -> None:
        if stopped.is_set():
            for child in children:
                child.kill()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, caught)


async def _all_ready(children: Sequence[ChildProcess]) -> None:
    for child in children:
        await child.ready.wait()


async def _either(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await _first_of(*waiting)
    finally:
        for future in waiting:
            future.cancel()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one is done, and raise its error if it failed."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()


async def _stop_children(
    children: Sequence[ChildProcess], supervisors: Sequence[asyncio.Task[None]], timeout_s: float
) -> None:
    for child in children:
        child.stop()
    _, late = await asyncio.wait(supervisors, timeout=timeout_s)
    if late:
        log.error("killing the brokers: they did not stop within %.0f s", timeout_s)
        for child in children:
            child.kill()
    await asyncio.gather(*supervisors, return_exceptions=True)


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
