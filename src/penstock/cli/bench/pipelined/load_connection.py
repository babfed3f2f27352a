"""A connection of the load generator: large reads and writes, many frames in each."""

import asyncio
import logging
import ssl as tls
import time
from typing import cast

from penstock.cli.bench.measurement import MS_NS
from penstock.cli.bench.pipelined.request_window import RequestWindow
from penstock.errors import PeerError, PeerLost, PeerTimeout, PeerUnreachable, WireError
from penstock.transport.peer import resolve, split_address

log = logging.getLogger(__name__)

READ_BYTES = 1024 * 1024
"""First size of the buffer, which grows to the longest response."""
PAUSE_AFTER_REFUSAL_S = 0.05
"""A load would otherwise repeat refused requests without a pause."""


class LoadConnection(asyncio.BufferedProtocol):
    """Sends what a window has to send, and gives it the responses."""

    def __init__(self, address: str, window: RequestWindow) -> None:
        self.window = window
        self._address = address
        self._failure: PeerError | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._begin = 0
        self._end = 0
        window.bind(self._buffer)
        # Since when the connection waits without having received anything.
        self._waiting_ns = 0
        self._resume: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        address: str,
        window: RequestWindow,
        *,
        ssl: tls.SSLContext | None,
        timeout_s: float,
    ) -> "LoadConnection":
        """Connect to a broker; raises PeerUnreachable."""
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        connection = cls(address, window)
        try:
            async with asyncio.timeout(timeout_s):
                numeric_host = (await resolve(host, port))[0]
                await loop.create_connection(
                    lambda: connection,
                    numeric_host,
                    port,
                    ssl=ssl,
                    server_hostname=host if ssl else None,
                )
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            reason = str(error) or f"no connection within {timeout_s:.0f} s"
            raise PeerUnreachable(f"can't connect: {reason}", address=address) from None
        return connection

    def push(self, now_ns: int) -> None:
        """Fill the window and send."""
        window = self.window
        if window.in_flight == 0:
            self._waiting_ns = now_ns
        window.fill(now_ns, time.time_ns() // MS_NS)
        if window.output.length and self._transport is not None:
            self._transport.write(window.output.take())
        if window.withheld and self._resume is None:
            loop = asyncio.get_running_loop()
            self._resume = loop.call_later(PAUSE_AFTER_REFUSAL_S, self._go_on)

    def check(self, now_ns: int, timeout_s: float) -> None:
        """Raise the error that has ended the connection, or PeerTimeout if nothing was received for
        this time although requests are in flight."""
        if self._failure is not None:
            raise self._failure
        if self.window.in_flight and now_ns - self._waiting_ns > timeout_s * 1e9:
            count = self.window.in_flight
            raise PeerTimeout(
                f"{count} requests are in flight, and nothing was received for {timeout_s:.0f} s",
                address=self._address,
            )

    def close(self) -> None:
        """Close the connection at once."""
        if self._resume is not None:
            self._resume.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _go_on(self) -> None:
        self._resume = None
        self.window.release_withheld()
        self.push(time.monotonic_ns())

    # --- asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._failure is None:
            reason = f"the connection failed: {exc}" if exc else "the server closed the connection"
            self._failure = PeerLost(reason, address=self._address)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._failure is not None:  # aborted: asyncio may read once more
            return
        now_ns = self._waiting_ns = time.monotonic_ns()
        self._end += nbytes
        try:
            self._begin = self.window.take(self._begin, self._end, now_ns)
        except WireError as error:
            self._failure = PeerError(
                f"the server sent an invalid response: {error.message}", address=self._address
            )
            self.close()
            return
        self._make_space()
        self.push(now_ns)

    def _make_space(self) -> None:
        """Make space for the rest of the first response."""
        have = self._end - self._begin
        missing = self.window.missing() if have else 1
        if have and missing <= len(self._buffer) - self._end:
            return
        old = self._buffer
        if have + missing > len(old):
            self._buffer = memoryview(bytearray(2 * (have + missing)))
            self.window.bind(self._buffer)
        self._buffer[:have] = old[self._begin : self._end]
        self._begin, self._end = 0, have
