"""Keeps the processes of `penstock up`: the NameServer here, every broker a child of its own.

A child says on its stdout when it is ready. One that does not come up at the start ends everything;
one that dies later is started again, after a pause that doubles as long as it keeps dying. Children
ask the kernel for SIGTERM when we end (`startup.end_with`), so not even SIGKILL leaves one behind.
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

PAUSE_S = 0.5
PAUSE_S_MAX = 30.0
STEADY_S = 60.0
"""A child that lived this long has recovered: its next pause is the shortest again."""
CLOSING_S = 30.0
"""What a store may take to close, beyond the time for unsent answers; then the child is killed."""
READY = "penstock broker "


class ChildError(PenstockError):
    """A child that ended before it was ready for the first time."""

    hint = "its own message stands above"


class Child:
    """One child process, started again whenever it ends."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = name
        self.ready = asyncio.Event()
        self._command = command
        self._environ = environ
        self._stopping = asyncio.Event()
        self._process: Process | None = None

    async def keep(self) -> None:
        """Run the child until `stop`; raises ChildError if it does not come up at first."""
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_S
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            if not self.ready.is_set():
                raise ChildError(f"{self.name} did not start: it {_ending(code)}")
            if loop.time() - began >= STEADY_S:
                pause_s = PAUSE_S
            log.error("%s %s: starting it again in %.1f s", self.name, _ending(code), pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def stop(self) -> None:
        """Ask the child to end, and do not start it again."""
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
        # In a session of its own Ctrl-C reaches only us, and we end the children in order.
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
                log.warning("%s is up again (process %d)", self.name, process.pid)
            else:
                self.ready.set()
        return await process.wait()


async def supervise(
    settings: Settings, children: Sequence[Child], on_up: Callable[[], None]
) -> None:
    """Run a NameServer and the children until SIGTERM or SIGINT; `on_up` once all are ready."""
    from penstock.server.nameserver_service import NameServerService

    stopped = asyncio.Event()
    _catch_signals(stopped, children)
    nameserver = NameServerService(settings)
    await nameserver.start()
    keepers = [asyncio.create_task(child.keep()) for child in children]
    stop = asyncio.create_task(stopped.wait())
    ready = asyncio.create_task(_all_ready(children))
    try:
        await _first_of(ready, stop, *keepers)
        if not stopped.is_set():
            on_up()
            await _first_of(stop, *keepers)
    finally:
        ready.cancel()
        stop.cancel()
        await _stop_children(children, keepers, settings.server.stop_ms / 1000 + CLOSING_S)
        await nameserver.stop()


def _catch_signals(stopped: asyncio.Event, children: Sequence[Child]) -> None:
    """The first signal stops everything in order; the second does not wait for the children."""

    def caught() -> None:
        if stopped.is_set():
            for child in children:
                child.kill()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, caught)


async def _all_ready(children: Sequence[Child]) -> None:
    for child in children:
        await child.ready.wait()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one is done; the error of a done one is raised."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()


async def _stop_children(
    children: Sequence[Child], keepers: Sequence[asyncio.Task[None]], patience_s: float
) -> None:
    for child in children:
        child.stop()
    _, late = await asyncio.wait(keepers, timeout=patience_s)
    if late:
        log.error("children did not end within %.0f s and are killed", patience_s)
        for child in children:
            child.kill()
    await asyncio.gather(*keepers, return_exceptions=True)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
