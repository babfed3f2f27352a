"""Finds out whether the process of a broker has ended: nobody listens at its address then.

Only a refused connection says that. No answer, or a connection to a process that does not answer,
says nothing: the network or the process may be slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.clock import Clock, finish_within, pause
from penstock.transport.peer import resolve, split_address

DIAL_MS = 1_000
DIALS_MAX = 64
PAUSE_MS = 20
"""Until the next attempt; it doubles. A process that ends closes its sockets one after another."""
PAUSE_MS_MAX = 500
START_PAUSE_MS_MAX = 30_000


class ProcessCheck:
    """Dials the addresses of brokers, not too many at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots = asyncio.Semaphore(DIALS_MAX)

    async def dial(self, address: str) -> bool | None:
        """True if the connection was accepted, False if it was refused, None if neither."""
        async with self._slots:
            try:
                host, port = split_address(address)
                return await finish_within(self._clock, DIAL_MS, _dial(host, port))
            except (ValueError, OSError, TimeoutError):  # no address, no such name
                return None

    async def has_started(self, address: str, is_open: Callable[[], bool]) -> bool:
        """Dial until the connection is accepted: Apache's brokers send heartbeats before they
        listen. False as soon as the question is not open any more."""
        pause_ms = PAUSE_MS
        while is_open():
            if await self.dial(address) is True:
                return True
            await pause(self._clock, pause_ms)
            pause_ms = min(pause_ms * 2, START_PAUSE_MS_MAX)
        return False

    async def has_ended(self, address: str, is_open: Callable[[], bool]) -> bool:
        """Dial until the connection is refused; False as soon as the question is not open any
        more."""
        pause_ms = PAUSE_MS
        while is_open():
            if await self.dial(address) is False:
                return is_open()
            await pause(self._clock, pause_ms)
            pause_ms = min(pause_ms * 2, PAUSE_MS_MAX)
        return False


async def _dial(host: str, port: int) -> bool | None:
    refused = 0
    addresses = await resolve(host, port)
    for numeric_host in addresses:
        try:
            _, writer = await asyncio.open_connection(numeric_host, port)
        except ConnectionRefusedError:
            refused += 1
        except OSError:
            continue
        else:
            writer.transport.abort()
            return True
    return False if refused == len(addresses) else None
