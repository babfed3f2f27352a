"""A server: its listener, its connections, their limits, and the order of work of a turn."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.clock import Alarm, Clock, LoopClock, pause
from penstock.config import Live, ServerConfig, Settings
from penstock.errors import WireError
from penstock.rpc.answers import EffectQueue, EncodedReply
from penstock.server.answer_executor import AnswerExecutor, PendingResponse
from penstock.server.connection import ClientConnection
from penstock.server.listener import Listener, listen
from penstock.server.request_loop import RequestLoop, Service
from penstock.wire.frame import Request

if TYPE_CHECKING:
    from penstock.broker.long_polling import LongPolling
    from penstock.rpc.persistence import Persistence
    from penstock.store.store import MessageStore
    from penstock.transport.tls import Tls

log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
"""The shared buffer: as much as one read takes."""
TICK_MS = 1_000
"""Time-driven parts are looked at this often, or when the first of them is due."""
SWEEP_MS = 5_000
TURN_BYTES = 256 * 1024
"""After so many bytes of answers other connections have their turn."""
HELD_SHARE = 0.75
DRAIN_MS = 10
"""How often a stopping server looks whether everything has left."""
LAG_MS = 20
"""A turn longer than this is named in the log."""


@dataclass(slots=True)
class _Wait:
    """Answers that leave when the log is flushed up to `offset`."""

    offset: int
    deadline_ms: int
    connection: ClientConnection
    answers: bytes
    late: bytes


class Server:
    """Serves one service on one port."""

    def __init__(
        self,
        settings: Live,
        service: Service,
        request_loop: RequestLoop,
        effects: EffectQueue,
        *,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        store: MessageStore | None = None,
        long_polling: LongPolling | None = None,
        persistence: Persistence | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or LoopClock()
        self._settings = settings
        self.service = service
        self.request_loop = request_loop
        self._effects = effects
        self._store = store
        self._long_polling = long_polling
        self._loop = asyncio.get_running_loop()
        self.answer_executor = AnswerExecutor(self, submit, long_polling, persistence)
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.request_loop.bind(self.buffer, bytes(8))
        self.connections: dict[int, ClientConnection] = {}
        self.memory = 0
        self.bad_frames = 0
        self.refused_connections = 0
        self.lag_ms_max = 0.0
        self._numbers = 0
        self._waits: deque[_Wait] = deque()
        self._listeners: list[Listener] = []
        self._timer: Alarm | None = None
        self._timer_ms = 0
        self._sweep_ms = 0
        self._stopping = False
        self._stopped = False
        self._settings_changed(settings.current)
        settings.listeners.append(self._settings_changed)

    async def start(self, host: str, port: int, tls: Tls | None = None) -> None:
        """Listen; requests are served from now on."""
        await self.listen_too(host, port, tls)
        if self._store is not None:
            self._loop.add_reader(self._store.flusher.notify_fd, self.after_work)
        self._sweep_ms = self.now_ms() + SWEEP_MS
        self._tick()

    async def listen_too(self, host: str, port: int, tls: Tls | None = None) -> None:
        """Serve the same on another port."""
        self._listeners.append(await listen(lambda: ClientConnection(self), host, port, tls=tls))

    @property
    def port(self) -> int:
        return self._listeners[0].port

    async def stop(self) -> None:
        """Take no more connections, let answers leave, then close."""
        self._stopping = True
        for listener in self._listeners:
            await listener.close()
        deadline_ms = self._clock.monotonic_ms() + self.config().stop_ms
        while self._busy() and self._clock.monotonic_ms() < deadline_ms:
            await pause(self._clock, DRAIN_MS)
        for connection in list(self.connections.values()):
            connection.close("the server stops")
        while self.connections and self._clock.monotonic_ms() < deadline_ms:
            await pause(self._clock, DRAIN_MS)
        for connection in list(self.connections.values()):
            connection.abort("the server has stopped")
        while self.connections:  # an aborted one is gone at the next turn of the loop
            await pause(self._clock, 1)
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._store is not None:
            self._loop.remove_reader(self._store.flusher.notify_fd)

    def _busy(self) -> bool:
        waits = self._waits or self.answer_executor.pool_jobs or self.answer_executor.saving
        return bool(waits) or any(c.unsent for c in self.connections.values())

    def _settings_changed(self, settings: Settings) -> None:
        self.request_loop.output_bytes_max = min(settings.server.output_bytes_max, TURN_BYTES)

    # --- for connections

    def config(self) -> ServerConfig:
        return self._settings.current.server

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon(call, *arguments)

    def soon_from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to answer
            log.debug("work was done after the loop had ended")

    def joined(self, connection: ClientConnection) -> None:
        """Number a new connection, or refuse it."""
        limit = self.config().connections_max
        if self._stopping:
            connection.abort("the server stops")
            return
        if len(self.connections) >= limit:
            self.refused_connections += 1
            connection.abort(f"there are {limit} connections already (connections_max)")
            return
        self._numbers += 1
        connection.client = self._numbers
        self.connections[connection.client] = connection
        self.service.connected(connection.client, connection.peer, connection.active_ms)

    def left(self, connection: ClientConnection) -> None:
        """A connection is gone."""
        self.connections.pop(connection.client, None)
        if self._long_polling is not None:
            self._long_polling.drop(connection.client)
        self.answer_executor.lost(connection.client)
        self.service.disconnected(connection.client, self.now_ms())
        self.after_work()

    def after_turn(self, connection: ClientConnection, now_ms: int) -> None:
        """Send what a turn has made, carry on what it left."""
        request_loop = self.request_loop
        if request_loop.output.length:
            connection.write(request_loop.output.take())
        send = request_loop.send
        if send is not None and send.flush_pending.length:
            assert self._store is not None
            encoded = EncodedReply(
                send.flush_pending.take(), send.flush_timeout.take(), self._store.log.end
            )
            self.send_flushed(connection, encoded)
        if request_loop.deferred:
            deferred, request_loop.deferred = request_loop.deferred, []
            for opaque, encoding, oneway, answer in deferred:
                self.answer_executor.carry(
                    PendingResponse(connection, opaque, encoding, oneway), answer
                )
        if request_loop.responses:
            responses, request_loop.responses = request_loop.responses, []
            for opaque, reply in responses:
                self.answer_executor.answered(connection.client, opaque, reply)
        if request_loop.arrivals:
            request_loop.arrivals = False
            assert self._store is not None
            self._store.notify()
        if self._effects.pending:
            self.answer_executor.perform(self._effects.take())

    def held_max(self) -> int:
        """Above this, who is stuck is cut off and large frames are refused: the rest of the memory
        is for clients that do read and for requests that come in one piece."""
        return int(self.config().memory_bytes_max * HELD_SHARE)

    def is_over(self, limit: int) -> bool:
        """Whether more memory is held than this. What has left since a connection last wrote is not
        known without asking it, so all are asked before anybody is refused for it."""
        if self.memory > limit:
            self.recount()
        return self.memory > limit

    def recount(self) -> None:
        """Ask every connection how much it holds."""
        for connection in self.connections.values():
            connection.account()

    def cut_slowest(self) -> bool:
        """End the stuck connection that holds most; whether there was one."""
        now_ms = self.now_ms()
        slowest = max(self.connections.values(), key=lambda each: each.slowness(now_ms))
        stuck, held = slowest.slowness(now_ms)
        if stuck:
            slowest.cut(
                f"it holds {held} bytes and does not go on, and all clients together hold more "
                f"than {self.held_max()} ({HELD_SHARE:.0%} of memory_bytes_max)"
            )
        return stuck

    def send_flushed(self, connection: ClientConnection, answer: EncodedReply) -> None:
        """Send what may leave when the log is flushed so far."""
        if self._store is None or answer.offset <= self._store.flusher.flushed():
            connection.write(answer.data)
            return
        deadline_ms = self.now_ms() + self._settings.current.broker.flush_timeout_ms
        self.memory += len(answer.data)
        self._waits.append(_Wait(answer.offset, deadline_ms, connection, answer.data, answer.late))

    def after_work(self) -> None:
        """Something happened outside a turn, or the flusher rang: release what waits for the disk,
        wake listeners, carry out effects."""
        if self._stopped:  # the store is being closed by another thread
            return
        if self._store is not None:
            self._store.publish()
            self._release()
        if self._effects.pending:
            self.answer_executor.perform(self._effects.take())

    def peek_header(self, data: memoryview) -> tuple[int, int, bool] | None:
        """(opaque, encoding, whether nobody waits) of a frame whose header has come, or None."""
        if len(data) < 8:
            return None
        length = int.from_bytes(data[4:8], "big") & 0xFFFFFF
        if len(data) < 8 + length:
            return None
        frame = bytearray(data[: 8 + length])
        frame[0:4] = (4 + length).to_bytes(4, "big")
        request = Request(self.config().frame_bytes_max, self.config().header_bytes_max)
        request.bind(memoryview(frame))
        try:
            request.read(0, len(frame))
        except WireError:
            return None
        return request.opaque, request.encoding, request.is_oneway() or request.is_response()

    def note_lag(self, ns: int, code: int) -> None:
        """Name a turn that took too long."""
        ms = ns / 1e6
        if ms > self.lag_ms_max:
            self.lag_ms_max = ms
        if ms > LAG_MS:
            log.warning("a turn took %.0f ms; its last request was of code %d", ms, code)

    # --- time

    def wake_at(self, ms: int) -> None:
        """See to it that `tick` runs at this time at the latest."""
        if ms < self._timer_ms and self._timer is not None:
            self._timer.cancel()
            self._schedule(ms)

    def _schedule(self, ms: int) -> None:
        self._timer_ms = ms
        self._timer = self._clock.wake_at(ms, self._tick)

    def _tick(self) -> None:
        now_ms = self.now_ms()
        # Set first: what runs below may ask to be woken earlier.
        self._schedule(now_ms + TICK_MS)
        steps = [self.service.tick, self.answer_executor.tick, self._tick_waits, self._tick_sweep]
        if self._long_polling is not None:
            steps.append(self._long_polling.tick)
        for step in steps:
            try:
                step(now_ms)
            except Exception:  # one part's trouble must not stop the others
                log.exception("a tick failed")
        self.after_work()
        due = min(self.service.due(), self.answer_executor.due())
        if self._long_polling is not None:
            due = min(due, self._long_polling.due())
        if self._waits:
            due = min(due, self._waits[0].deadline_ms)
        self.wake_at(max(due, now_ms + 1))

    def _tick_waits(self, now_ms: int) -> None:
        if self._store is not None:
            self._release()
        while self._waits and self._waits[0].deadline_ms <= now_ms:
            wait = self._waits.popleft()
            self.memory -= len(wait.answers)
            wait.connection.write(wait.late)

    def _tick_sweep(self, now_ms: int) -> None:
        if now_ms >= self._sweep_ms or now_ms < self._sweep_ms - 2 * SWEEP_MS:
            self._sweep_ms = now_ms + SWEEP_MS
            self._sweep(now_ms)

    def _sweep(self, now_ms: int) -> None:
        """Close connections that are idle, or whose frame does not get finished."""
        idle_ms = self.config().idle_ms
        for connection in list(self.connections.values()):
            connection.account()
            if now_ms - connection.active_ms > idle_ms:
                connection.abort(f"idle for {idle_ms} ms (idle_ms)")
            elif connection.frame_since_ms and now_ms - connection.frame_since_ms > idle_ms:
                connection.abort(f"a frame was not finished within {idle_ms} ms (idle_ms)")

    def _release(self) -> None:
        """Let answers leave whose messages are on the disk; late ones, if they never will be."""
        assert self._store is not None
        flushed = self._store.flusher.flushed()
        failed = self._store.flusher.failed()
        while self._waits and (failed or self._waits[0].offset <= flushed):
            wait = self._waits.popleft()
            self.memory -= len(wait.answers)
            wait.connection.write(wait.late if wait.offset > flushed else wait.answers)
