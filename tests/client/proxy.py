"""A network that misbehaves on command: TCP proxies, and a NameServer that points at them.

    async with Network(cluster) as network:
        producer = AsyncProducer(network.nameservers)  # all its traffic goes through the proxies
        network.broker("broker-a").cut()

A proxy forwards bytes between a client and one server. It can cut all its connections (a reset),
close only one direction, stop forwarding while connections stay open (what a dead host or a
firewall looks like), delay every piece, refuse new connections, and cut by itself after a random
number of bytes: in the middle of a frame as well as between two.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from .clusters import Cluster

PIECE_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Proxy:
    """A listener that forwards to `target`, with the faults that its attributes set."""

    def __init__(self, target: str, chance: random.Random | None = None) -> None:
        self.target = target
        self.address = ""
        self.delay_s = 0.0
        self.refusing = False
        self.cut_bytes_mean = 0
        """Average number of bytes in either direction until a connection is cut; 0: never."""
        self.accepted = 0
        self.cuts = 0
        self._chance = chance or random.Random(1)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        self.refusing = True
        for _ in range(3):  # an accepted connection becomes a task a little later
            await asyncio.sleep(0.01)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for pair in list(self._pairs):
            pair.close()
        await self._server.wait_closed()

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._pairs)

    def cut(self) -> int:
        """Reset all connections; returns their number."""
        pairs = list(self._pairs)
        for pair in pairs:
            self._cut(pair)
        return len(pairs)

    def half_close(self) -> None:
        """Close the direction from server to client of each connection."""
        for pair in list(self._pairs):
            with contextlib.suppress(OSError, RuntimeError):
                pair.near.write_eof()

    def stall(self) -> None:
        """Stop forwarding; connections stay open and new ones are accepted."""
        self._flowing.clear()

    def flow(self) -> None:
        """Resume forwarding, including the data received meanwhile."""
        self._flowing.set()

    def _cut(self, pair: _Pair) -> None:
        self.cuts += 1
        self._pairs.discard(pair)
        pair.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # only `__aexit__` cancels
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            return
        await self._flowing.wait()
        host, port = self.target.split(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return
        pair = _Pair(writer, far_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._forward(reader, far_writer, pair), self._forward(far_reader, writer, pair)
            )
        finally:
            self._pairs.discard(pair)
            pair.close()

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: _Pair
    ) -> None:
        left = 0  # bytes until the next random cut; 0: not drawn yet
        try:
            async for piece in self._pieces(source):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                if self.cut_bytes_mean:
                    left = left or 1 + int(self._chance.expovariate(1 / self.cut_bytes_mean))
                    if len(piece) >= left:
                        sink.write(piece[:left])
                        await sink.drain()
                        self._cut(pair)
                        return
                    left -= len(piece)
                sink.write(piece)
                await sink.drain()
            sink.write_eof()
        except (OSError, RuntimeError):  # uvloop raises this for an aborted transport
            pair.close()

    async def _pieces(self, source: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while piece := await source.read(PIECE_BYTES):
            yield piece


class _Pair:
    """The two connections of one client."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near = near
        self.far = far

    def reset(self) -> None:
        for writer in (self.near, self.far):
            if not writer.transport.is_closing():
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _RESET
                )
            writer.transport.abort()

    def close(self) -> None:
        self.near.close()
        self.far.close()


class NameProxy(Proxy):
    """A proxy of a NameServer that replaces the brokers' addresses by those of their proxies."""

    def __init__(self, target: str, renamed: dict[str, str]) -> None:
        super().__init__(target)
        self._renamed = {old.encode(): new.encode() for old, new in renamed.items()}

    async def _pieces(self, source: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """Whole frames, because the replaced body has another length."""
        while True:
            try:
                size = int.from_bytes(await source.readexactly(4), "big")
                frame = await source.readexactly(size)
            except asyncio.IncompleteReadError:
                return
            at = 4 + (int.from_bytes(frame[:4], "big") & 0xFFFFFF)
            head, body = frame[:at], frame[at:]
            for old, new in self._renamed.items():
                body = body.replace(old, new)
            yield (len(head) + len(body)).to_bytes(4, "big") + head + body


class Network:
    """Proxies for a whole cluster: one per broker, and one for the NameServer."""

    def __init__(self, cluster: Cluster, *, seed: int = 1) -> None:
        self._cluster = cluster
        self._stack = contextlib.AsyncExitStack()
        chance = random.Random(seed)
        self.brokers = {
            broker.name: Proxy(broker.address, random.Random(chance.random()))
            for broker in cluster.brokers
        }
        self.names: NameProxy

    @property
    def nameservers(self) -> str:
        return self.names.address

    def broker(self, name: str) -> Proxy:
        return self.brokers[name]

    @property
    def cuts(self) -> int:
        return sum(proxy.cuts for proxy in (*self.brokers.values(), self.names))

    async def __aenter__(self) -> Self:
        for proxy in self.brokers.values():
            await self._stack.enter_async_context(proxy)
        renamed = {proxy.target: proxy.address for proxy in self.brokers.values()}
        self.names = NameProxy(self._cluster.names.address, renamed)
        await self._stack.enter_async_context(self.names)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
