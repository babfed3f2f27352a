"""Runs servers until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.config import Settings


SWITCH_SECONDS = 0.0005
"""How long a computing thread of the pool keeps the event loop waiting, several times per request.
Python's default is 5 ms."""


class Runnable(Protocol):
    """A server that starts and stops."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a server on uvloop, or on asyncio's own loop if uvloop is not installed."""
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def serve_broker(settings: Settings, on_ready: Callable[[str], None]) -> None:
    """Run a broker until SIGTERM or SIGINT; `on_ready` gets the state of its registration."""
    from penstock.server.services.broker_service import BrokerService

    service = BrokerService(settings)
    await _serve(service, lambda: on_ready(service.registration_summary()), service.interrupt)


async def serve_nameserver(settings: Settings, on_ready: Callable[[], None]) -> None:
    """Run a NameServer until SIGTERM or SIGINT."""
    from penstock.server.services.nameserver_service import NameServerService

    await _serve(NameServerService(settings), on_ready)


async def serve_controller(settings: Settings, on_ready: Callable[[], None]) -> None:
    """Run a controller until SIGTERM or SIGINT."""
    from penstock.server.controller.controller_service import ControllerService

    await _serve(ControllerService(settings), on_ready)


async def _serve(
    service: Runnable, on_ready: Callable[[], None], interrupt: Callable[[], None] | None = None
) -> None:
    """`interrupt` ends a start that waits for other servers."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        if interrupt is not None:
            interrupt()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await service.start()
    # With 10,000 topics a full garbage collection of the loaded tables blocks the loop for 0.2 s.
    gc.freeze()
    try:
        if not stopped.is_set():
            on_ready()
        await stopped.wait()
    finally:
        await service.stop()
