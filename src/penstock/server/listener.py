"""Listens on a port, for plain connections or for both TLS and plain ones.

The first byte tells them apart: a TLS client starts with 0x16, a frame with at most 1. With TLS the
first byte of each connection is peeked at before the connection is accepted. Connections that send
nothing are closed after a while. When too many are silent, a new connection replaces the one that
has been silent longest, so that silent connections can't keep others out.

Accepted connections use TCP keepalive. A peer whose machine is gone is noticed within
`KEEPALIVE_SECONDS`, not only when it should have sent something: a NameServer then accepts the
broker at another address.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from penstock.clock import Alarm, Clock, LoopClock, pause
from penstock.errors import TlsError
from penstock.transport.tls import Tls

log = logging.getLogger(__name__)

BACKLOG = 1_024
FIRST_BYTE_MS = 30_000
HANDSHAKE_SECONDS = 10.0
SHUTDOWN_SECONDS = 0.5
WAITING_MAX = 2_048
"""Most connections that have sent nothing yet, and most that are in the TLS handshake."""
KEEPALIVE_SECONDS = 30
KEEPALIVE_PROBES = 3
ACCEPTS_PER_ITERATION = 64
FULL_PAUSE_MS = 500
"""How long accepting pauses after the process has run out of descriptors or memory."""
REFRESH_MS = 5_000

TLS_HANDSHAKE = 0x16

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Factory = Callable[[], asyncio.BaseProtocol]
HeldPorts = dict[int, list[socket.socket]]
"""Listening sockets by their port, from which nobody accepts connections for the moment."""


class Listener(ABC):
    """Listens on `port`."""

    def __init__(self, port: int) -> None:
        self.port = port

    @abstractmethod
    def hold(self) -> list[socket.socket]:
        """Accept no more connections, but keep the port open: returns the listening sockets. New
        connections wait until somebody listens on them again. Empty at the second call."""

    @abstractmethod
    async def close(self) -> None:
        """Accept no more connections; open ones stay open."""


async def listen(
    factory: Factory,
    host: str,
    port: int,
    *,
    tls: Tls | None = None,
    backlog: int = BACKLOG,
    clock: Clock | None = None,
    first_byte_ms: int = FIRST_BYTE_MS,
    waiting_max: int = WAITING_MAX,
    held: Sequence[socket.socket] = (),
) -> Listener:
    """Listen on an address. An empty host means all addresses, port 0 any free port. `held` are
    the sockets of that address that the last listener has kept open."""
    loop = asyncio.get_running_loop()
    if tls is None and held:
        return PlainListener(
            [await loop.create_server(factory, sock=one, backlog=backlog) for one in held]
        )
    if tls is None:
        server = await loop.create_server(
            factory, host or None, port, backlog=backlog, reuse_address=True
        )
        return PlainListener([server])
    sockets = list(held) or await _bind(host, port, backlog)
    return TlsListener(
        factory,
        sockets,
        tls,
        clock or LoopClock(),
        first_byte_ms=first_byte_ms,
        waiting_max=waiting_max,
    )


class _Accepted:
    """A connection whose protocol is being made."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.has_transport = False

    def close_if_cancelled(self, task: asyncio.Task[None]) -> None:
        """The task may have ended before it began. A transport closes its socket itself, and would
        never tell its protocol if somebody else did."""
        if task.cancelled() and not self.has_transport:
            self.socket.close()


class PlainListener(Listener):
    """Accepts plain connections only."""

    def __init__(self, servers: list[asyncio.Server]) -> None:
        super().__init__(servers[0].sockets[0].getsockname()[1])
        self._servers = servers
        for descriptor in self._descriptors():
            _keep_alive(descriptor)

    def _descriptors(self) -> list[int]:
        return [one.fileno() for server in self._servers for one in server.sockets]

    def hold(self) -> list[socket.socket]:
        held = [_duplicate(descriptor) for descriptor in self._descriptors()]
        self._stop_accepting()
        return held

    def _stop_accepting(self) -> None:
        for server in self._servers:
            server.close()

    async def close(self) -> None:
        self._stop_accepting()


class TlsListener(Listener):
    """Accepts TLS connections, and plain ones if they are allowed."""

    def __init__(
        self,
        factory: Factory,
        sockets: list[socket.socket],
        tls: Tls,
        clock: Clock,
        *,
        first_byte_ms: int,
        waiting_max: int,
    ) -> None:
        super().__init__(sockets[0].getsockname()[1])
        self.tls = tls
        self.refused = 0
        self._factory = factory
        self._sockets = sockets
        self._clock = clock
        self._first_byte_ms = first_byte_ms
        self._waiting_max = waiting_max
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, Alarm] = {}  # by socket, the oldest first
        self._plain: set[asyncio.Task[None]] = set()  # plain connections, done at once
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._pause: Alarm | None = None
        self._watch = asyncio.ensure_future(self._watch_files())
        self._resume()

    def hold(self) -> list[socket.socket]:
        held = [_duplicate(listening.fileno()) for listening in self._sockets]
        self._stop_accepting()
        return held

    def _stop_accepting(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self._sockets = []

    async def close(self) -> None:
        self._watch.cancel()
        self._stop_accepting()
        for waiting in list(self._waiting):
            self._stop_waiting(waiting)
        # Plain connections are made in the next loop iteration, and closed by their protocols.
        # uvloop does not tell the protocol of a connection that is cancelled just when it is made.
        for task in self._handshakes:
            task.cancel()
        tasks = (self._watch, *self._plain, *self._handshakes)
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def waiting(self) -> int:
        """Connections without a first byte or in the handshake."""
        return len(self._waiting) + len(self._handshakes)

    # --- accepting

    def _resume(self) -> None:
        self._pause = None
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_ITERATION):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._pause_accepting(error)
                return
            self._wait_for_byte(accepted)

    def _pause_accepting(self, error: OSError) -> None:
        log.error("can't accept connections: %s; raise the limit of open files", error.strerror)
        for listening in self._sockets:
            self._loop.remove_reader(listening)
        self._pause = self._clock.wake_at(self._clock.now_ms() + FULL_PAUSE_MS, self._resume)

    def _wait_for_byte(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        count = len(self._waiting)
        if count >= self._waiting_max:
            oldest = next(iter(self._waiting))
            self._stop_waiting(oldest, f"{count} connections are silent, this one the longest")
        self._waiting[accepted] = self._clock.wake_at(
            self._clock.now_ms() + self._first_byte_ms,
            lambda: self._stop_waiting(accepted, f"it was silent for {self._first_byte_ms} ms"),
        )
        self._loop.add_reader(accepted, self._peek, accepted)

    def _stop_waiting(self, waiting: socket.socket, why: str = "") -> None:
        self._waiting.pop(waiting).cancel()
        self._loop.remove_reader(waiting)
        self._refuse(waiting, why)

    def _refuse(self, accepted: socket.socket, why: str) -> None:
        if why:
            self.refused += 1
            log.info("closing the connection of %s: %s", _name(accepted), why)
        accepted.close()

    # --- the first byte

    def _peek(self, waiting: socket.socket) -> None:
        try:
            first = waiting.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self._stop_waiting(waiting)  # closed by the client
            return
        secure = first[0] == TLS_HANDSHAKE
        if not secure and not self.tls.plain_allowed:
            self._stop_waiting(waiting, "it does not use TLS, and tls.mode is enforcing")
            return
        self._waiting.pop(waiting).cancel()
        self._loop.remove_reader(waiting)
        accepted = _Accepted(waiting)
        task = asyncio.ensure_future(self._accept_protocol(accepted, secure=secure))
        task.add_done_callback(accepted.close_if_cancelled)
        if not secure:
            self._plain.add(task)
            task.add_done_callback(self._plain.discard)
            return
        if len(self._handshakes) >= self._waiting_max:
            self.refused += 1
            next(iter(self._handshakes)).cancel()
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _accept_protocol(self, connection: _Accepted, *, secure: bool) -> None:
        accepted = connection.socket
        name = _name(accepted)

        def factory() -> asyncio.BaseProtocol:
            connection.has_transport = True
            return self._factory()

        try:
            if secure:
                context = self.tls.context or await asyncio.to_thread(self.tls.make_context)
                await self._loop.connect_accepted_socket(
                    factory,
                    accepted,
                    ssl=context,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
            else:
                await self._loop.connect_accepted_socket(factory, accepted)
        except (OSError, TlsError) as error:  # the ssl module's errors are OSErrors
            self.refused += 1
            level = logging.WARNING if isinstance(error, TlsError) else logging.INFO
            log.log(level, "TLS handshake with %s failed: %s", name, error)
            accepted.close()

    async def _watch_files(self) -> None:
        while True:
            await pause(self._clock, REFRESH_MS)
            try:
                await asyncio.to_thread(self.tls.refresh)
            except Exception:  # the next check may succeed
                log.exception("can't check the certificate files")


def release(held: HeldPorts) -> None:
    """Close ports that were kept open: connections are refused instead of waiting."""
    for sockets in held.values():
        for listening in sockets:
            listening.close()
    held.clear()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on this host."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _name(accepted: socket.socket) -> str:
    try:
        host, port, *_ = accepted.getpeername()
    except OSError:
        return "a client that has disconnected"
    return f"{host}:{port}"


async def _bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if len(sockets) > 1 and port == 0:  # the same port on every address
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            _keep_alive(listening.fileno())
            listening.bind(address)
            listening.listen(backlog)
    except OSError as error:
        for listening in sockets:
            listening.close()
        text = f"can't listen on {host or '*'}:{port}: {error.strerror}"
        raise OSError(error.errno, text) from None
    return sockets


def _duplicate(descriptor: int) -> socket.socket:
    """The same socket once more; uvloop's own sockets can't be used directly."""
    copy = socket.socket(fileno=os.dup(descriptor))
    copy.setblocking(False)
    return copy


def _keep_alive(descriptor: int) -> None:
    """Use TCP keepalive on a socket, and on connections that it accepts."""
    interval = KEEPALIVE_SECONDS // (2 * KEEPALIVE_PROBES)
    # uvloop's sockets have no setsockopt.
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS // 2)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
