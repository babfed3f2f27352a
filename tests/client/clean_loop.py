"""Runs a coroutine and checks that it leaks nothing.

After it no task, thread, socket or unclosed transport of it may be there, and nothing may have gone
to the event loop's exception handler ("Task exception was never retrieved", and the like).
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from tests.depth import rounds

from .clusters import THREADS

LIMIT_S = rounds(ci=100, proof=500)
SETTLE_S = 2.0

LOOPS: tuple[Callable[[], asyncio.AbstractEventLoop], ...] = (
    asyncio.new_event_loop,
    uvloop.new_event_loop,
)


def loop_for(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Half of the tests run on the stdlib's loop, the others on uvloop; always the same ones."""
    return LOOPS[zlib.crc32(name.encode()) % len(LOOPS)]


def run_clean(
    work: Coroutine[Any, Any, object], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Run `work` to its end; raises AssertionError if something is leaked."""
    threads = set(threading.enumerate())
    sockets = open_sockets()
    complaints: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        runner.run(_checked(work))
        gc.collect()  # unreferenced objects now report what they leaked
    assert not complaints, f"the event loop's exception handler was called: {complaints}"
    left = {thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()}
    left = {name for name in left if not name.startswith(THREADS)}
    assert not left, f"threads stay: {left}"
    left = open_sockets() - sockets
    deadline = time.monotonic() + SETTLE_S
    while (
        left and time.monotonic() < deadline
    ):  # a cluster that starts at the same time probes its servers
        time.sleep(0.01)
        left &= open_sockets()
    assert not left, f"sockets stay: {sorted(left)}"


async def _checked(work: Coroutine[Any, Any, object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        await work
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    # Cancelled tasks need an iteration or two to end; a task that waits for something never ends.
    while (left := asyncio.all_tasks() - {asyncio.current_task()}) and loop.time() < deadline:
        await asyncio.sleep(0.01)
    assert not left, f"tasks stay: {left}"


def open_sockets() -> set[str]:
    """The inodes of this process's sockets."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found
