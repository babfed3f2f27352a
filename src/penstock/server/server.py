"""A server: its listeners, its connections and their limits, and the order of work of a read."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from penstock.clock import Alarm, Clock, LoopClock, pause
from penstock.config import LiveSettings, ServerConfig, Settings
from penstock.rpc.answers import EffectQueue, EncodedReply
from penstock.server.answer_executor import AnswerExecutor, NameServerCalls
from penstock.server.connection import ClientConnection
from penstock.server.full_reads import FullReads
from penstock.server.listener import HeldPorts, Listener, listen, release
from penstock.server.memory_limit import MemoryLimit
from penstock.server.pending_response import PendingResponse, ResponseConnection
from penstock.server.request_loop import SEND_CODES, RequestLoop, Service
from penstock.server.rpc_latency import RpcLatency
from penstock.wire.codes import ResponseCode

if TYPE_CHECKING:
    from penstock.broker.long_polling import LongPolling, SuspendedRequest
    from penstock.rpc.persistence import Persistence
    from penstock.store.store import MessageStore
    from penstock.transport.tls import Tls

log = logging.getLogger(__name__)

READ_BYTES = 96 * 1024
"""Size of the shared buffer, which limits one read."""
STEP_MS = 1_000
"""From this difference to the monotonic clock on, the system clock has not drifted: it was set."""
TICK_MS = 1_000
"""Longest time between two ticks; a tick is earlier if something is due."""
SWEEP_MS = 5_000
RESPONSE_BYTES = 256 * 1024
"""After this many bytes of responses to one connection, other connections are served."""
DRAIN_MS = 10
"""How often a stopping server checks whether everything is sent."""
SLOW_READ_MS = 20
"""The requests of one read that take longer than this are logged."""


@dataclass(slots=True)
class _FlushWait:
    """Responses that are sent when the log up to `offset` may be acknowledged."""

    offset: int
    deadline_ms: int
    connection: ResponseConnection
    reply: EncodedReply
    began_ns: int
    pending: PendingResponse | None
    """The only request; None: the sends of one read."""
    sends: tuple[int, int, int] = (0, 0, 0)
    """Their numbers, by SEND_CODES."""


class Server:
    """Serves one service on one port, or several."""

    def __init__(
        self,
        settings: LiveSettings,
        service: Service,
        request_loop: RequestLoop,
        effects: EffectQueue,
        *,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        store: MessageStore | None = None,
        long_polling: LongPolling | None = None,
        persistence: Persistence | None = None,
        nameservers: NameServerCalls | None = None,
        on_log: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`on_log` is called when the log may have grown, or more of it may be flushed."""
        self._on_log = on_log
        self._clock: Clock = clock or LoopClock()
        self._offset_ms = self._clock.now_ms() - self._clock.monotonic_ms()
        self._settings = settings
        self.service = service
        self.request_loop = request_loop
        self._effects = effects
        self._store = store
        self._long_polling = long_polling
        self._loop = asyncio.get_running_loop()
        self.connections: dict[int, ClientConnection] = {}
        self.memory = MemoryLimit(lambda: self.config().memory_bytes_max, self.connections)
        self.answer_executor = AnswerExecutor(
            self,
            submit,
            long_polling=long_polling,
            persistence=persistence,
            nameservers=nameservers,
        )
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.full_reads = FullReads(self.buffer, self.soon)
        self.request_loop.bind(self.buffer, bytes(8))
        self.bad_frames = 0
        self.refused_connections = 0
        self.lag_ms_max = 0.0
        self.rpc_latency = RpcLatency()
        self._read_ns = 0  # time of the last read
        self._last_client = 0
        self._flush_waits: deque[_FlushWait] = deque()
        self._listeners: list[Listener] = []
        self._held: HeldPorts = {}
        self._timer: Alarm | None = None
        self._timer_ms = 0
        self._sweep_ms = 0
        self._stopping = False
        self._hung_up = False  # the port is kept for the next server
        self._stopped = False
        self._settings_changed(settings.current)
        settings.listeners.append(self._settings_changed)

    async def start(
        self, host: str, port: int, tls: Tls | None = None, held: HeldPorts | None = None
    ) -> None:
        """Listen, and serve requests from now on. `held` are ports of the last server."""
        await self.listen_also(host, port, tls, held)
        if self._store is not None:
            self._loop.add_reader(self._store.flusher.notify_fd, self.after_work)
        self._sweep_ms = self.monotonic_ms() + SWEEP_MS
        self._tick()

    async def listen_also(
        self, host: str, port: int, tls: Tls | None = None, held: HeldPorts | None = None
    ) -> None:
        """Serve the same on another port."""
        sockets = [] if held is None else held.pop(port, [])
        self._listeners.append(
            await listen(lambda: ClientConnection(self), host, port, tls=tls, held=sockets)
        )

    @property
    def port(self) -> int:
        return self._listeners[0].port

    async def stop(self) -> None:
        """Stop listening, send the responses of requests in flight and of suspended ones, close the
        connections."""
        self._stopping = True
        for listener in self._listeners:
            await listener.close()
        release(self._held)
        deadline_ms = self._clock.monotonic_ms() + self.config().stop_ms
        while self._is_busy() and self._clock.monotonic_ms() < deadline_ms:
            await pause(self._clock, DRAIN_MS)
        self._close_connections("the server stops")
        while self.connections and self._clock.monotonic_ms() < deadline_ms:
            await pause(self._clock, DRAIN_MS)
        for connection in list(self.connections.values()):
            connection.abort("the server has stopped")
        while self.connections:  # aborted connections are gone after the next loop iteration
            await pause(self._clock, 1)
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._store is not None:
            self._loop.remove_reader(self._store.flusher.notify_fd)

    def _close_connections(self, why: str) -> None:
        for connection in list(self.connections.values()):
            if self._long_polling is not None:
                self._long_polling.answer(connection.client)
            connection.close(why)

    def take_ports(self) -> HeldPorts:
        """Accept no more connections, but keep the ports open for the next server: clients that
        connect in between wait for it."""
        self._hold_ports()
        held, self._held = self._held, {}
        return held

    def _hold_ports(self) -> None:
        for listener in self._listeners:
            if sockets := listener.hold():
                self._held[listener.port] = sockets

    def hang_up(self) -> None:
        """Close all connections, because the role of this broker changes: what their sends wait for
        will not come, and a refusal would be final for clients that try again at once. They connect
        again and wait until this broker can say who is the master."""
        self._hung_up = True
        self._hold_ports()
        while self._flush_waits:
            self._take_flush_wait()
        self._close_connections("the role of this broker changes")

    def _is_busy(self) -> bool:
        executor = self.answer_executor
        busy = self._flush_waits or executor.thread_jobs or executor.tables.running
        return bool(busy) or any(c.unsent for c in self.connections.values())

    def _settings_changed(self, settings: Settings) -> None:
        self.request_loop.output_bytes_max = min(settings.server.output_bytes_max, RESPONSE_BYTES)

    # --- for connections

    def config(self) -> ServerConfig:
        return self._settings.current.server

    def now_ms(self) -> int:
        """The time for the service.

        If the system clock was set, everything that expires is shifted first, so that the step does
        not count as time in which clients were silent.
        """
        now_ms = self._clock.now_ms()
        offset_ms = now_ms - self._clock.monotonic_ms()
        step_ms = offset_ms - self._offset_ms
        self._offset_ms = offset_ms
        if abs(step_ms) >= STEP_MS:
            self._clock_stepped(step_ms)
        return now_ms

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the next loop iteration."""
        self._loop.call_soon(call, *arguments)

    def connected(self, connection: ClientConnection) -> None:
        """Accept a new connection, or refuse it."""
        limit = self.config().connections_max
        if self._stopping or self._hung_up:
            connection.abort("the server stops")
            return
        if len(self.connections) >= limit:
            self.refused_connections += 1
            connection.abort(f"there are {limit} connections already (connections_max)")
            return
        self._last_client += 1
        connection.client = self._last_client
        self.connections[connection.client] = connection
        self.service.connected(connection.client, connection.peer, self.now_ms())

    def disconnected(self, connection: ClientConnection) -> None:
        """Forget a closed connection."""
        self.connections.pop(connection.client, None)
        if self._long_polling is not None:
            self._long_polling.drop(connection.client)
        self.answer_executor.client_calls.disconnected(connection.client)
        self.service.disconnected(connection.client, self.now_ms())
        self.after_work()

    def after_read(self, connection: ClientConnection) -> None:
        """Send the responses of a read and execute its other answers."""
        if self._on_log is not None:
            self._on_log()
        request_loop = self.request_loop
        if request_loop.output.length:
            connection.write(request_loop.output.take())
        send = request_loop.send
        if send is not None and send.pending.length:
            assert self._store is not None
            reply = EncodedReply(
                send.pending.take(),
                send.flush_timeout.take(),
                send.slave_timeout.take(),
                self._store.log.end,
            )
            self._send_flushed(connection, reply)
        if request_loop.answered:
            self.rpc_latency.observe_read(request_loop.answered, self._read_ns)
            request_loop.answered = {}
        if request_loop.deferred:
            deferred, request_loop.deferred = request_loop.deferred, []
            began_ns = perf_counter_ns() - self._read_ns
            for opaque, encoding, oneway, answer, code in deferred:
                pending = PendingResponse(connection, opaque, encoding, oneway, code, began_ns)
                self.answer_executor.execute(pending, answer)
        if request_loop.responses:
            responses, request_loop.responses = request_loop.responses, []
            for opaque, response in responses:
                self.answer_executor.client_calls.responded(connection.client, opaque, response)
        if request_loop.arrivals:
            request_loop.arrivals = False
            assert self._store is not None
            self._store.notify()
        if self._effects.pending:
            self.answer_executor.perform(self._effects.take())

    def wake(self, suspended: SuspendedRequest, last: bool) -> None:
        self.answer_executor.wake(suspended, last)

    def report_time(self, ns: int, code: int) -> None:
        """Take the time of a read, whose last request had this code."""
        self._read_ns = ns
        self.request_loop.finish_read(ns)
        ms = ns / 1e6
        if ms > self.lag_ms_max:
            self.lag_ms_max = ms
        if ms > SLOW_READ_MS:
            log.warning("the requests of one read took %.0f ms; the last code was %d", ms, code)

    # --- for the answer executor

    def soon_from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the event loop; called from another thread."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: there are no clients any more
            log.debug("work finished after the event loop was closed")

    def later(self, ms: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a delay, unless the server stops before."""
        self._loop.call_later(ms / 1000, self._unless_stopped, call, *arguments)

    def _unless_stopped(self, call: Callable[..., None], *arguments: Any) -> None:
        if not self._stopped:
            call(*arguments)

    def responded(self, pending: PendingResponse, response_code: int) -> None:
        """A response was written after the read of its request was served."""
        self.rpc_latency.observe(pending, response_code)

    def send_flushed(self, pending: PendingResponse, reply: EncodedReply) -> None:
        """Send a response when the log up to its offset may be acknowledged."""
        self._send_flushed(pending.connection, reply, pending)

    def _send_flushed(
        self,
        connection: ResponseConnection,
        reply: EncodedReply,
        pending: PendingResponse | None = None,
    ) -> None:
        """The same for one request, or for all sends of the last read."""
        request_loop = self.request_loop
        began_ns = perf_counter_ns() - self._read_ns if pending is None else pending.began_ns
        sends = (request_loop.sends_v1, request_loop.sends_v2, request_loop.sends_batch)
        wait = _FlushWait(reply.offset, 0, connection, reply, began_ns, pending, sends)
        if self._store is None or reply.offset <= self._store.acknowledged():
            self._write_flushed(wait, reply.data, ResponseCode.SUCCESS)
            return
        settings = self._settings.current
        wait_ms = settings.broker.flush_timeout_ms
        if self._store.writer.replicated:
            wait_ms = min(wait_ms, settings.replication.slave_timeout_ms)
        deadline_ms = self.now_ms() + wait_ms
        self.memory.used += len(reply.data)
        if not self._flush_waits:
            self.tick_at(deadline_ms)
        wait.deadline_ms = deadline_ms
        self._flush_waits.append(wait)

    def _write_flushed(self, wait: _FlushWait, data: bytes, response_code: int) -> None:
        """Write a response that may have waited."""
        wait.connection.write(data)
        if wait.pending is not None:
            self.rpc_latency.observe(wait.pending, response_code)
            return
        took_ns = perf_counter_ns() - wait.began_ns
        if response_code == ResponseCode.SUCCESS:
            self.request_loop.count_sends(*wait.sends, took_ns)
        else:
            for code, count in zip(SEND_CODES, wait.sends, strict=True):
                if count:
                    self.rpc_latency.observe_late(code, response_code, took_ns, count)

    def after_work(self) -> None:
        """Called after work outside of a read, and by the flusher: send responses whose messages
        are flushed, wake suspended requests, execute effects."""
        if self._stopped:  # another thread closes the store
            return
        if self._store is not None:
            self._store.publish()
            if self._on_log is not None:
                self._on_log()
            self._send_flushed_responses()
        if self._effects.pending:
            self.answer_executor.perform(self._effects.take())

    def tick_at(self, ms: int) -> None:
        """Call `tick` at this time at the latest."""
        if ms < self._timer_ms and self._timer is not None:
            self._timer.cancel()
            self._schedule(ms)

    # --- time

    def _schedule(self, ms: int) -> None:
        self._timer_ms = ms
        self._timer = self._clock.wake_at(ms, self._tick)

    def _tick(self) -> None:
        now_ms = self.now_ms()
        client_calls, long_polling = self.answer_executor.client_calls, self._long_polling
        # First, because the steps below may ask for an earlier tick.
        self._schedule(now_ms + TICK_MS)
        steps = [self.service.tick, client_calls.tick, self._tick_flush_waits, self._tick_sweep]
        if long_polling is not None:
            steps.append(long_polling.tick)
        for step in steps:
            try:
                step(now_ms)
            except Exception:  # the other steps must run
                log.exception("a periodic task failed")
        self.after_work()
        due = min(self.service.due(), client_calls.due())
        if long_polling is not None:
            due = min(due, long_polling.due())
        if self._flush_waits:
            due = min(due, self._flush_waits[0].deadline_ms)
        self.tick_at(max(due, now_ms + 1))

    def _clock_stepped(self, step_ms: int) -> None:
        direction = "forward" if step_ms > 0 else "back"
        log.info(
            "the clock was set %s by %d ms: no client expires because of that",
            direction,
            abs(step_ms),
        )
        self._timer_ms += step_ms
        self.service.clock_stepped(step_ms)
        self.answer_executor.client_calls.clock_stepped(step_ms)
        if self._long_polling is not None:
            self._long_polling.clock_stepped(step_ms)
        for wait in self._flush_waits:
            wait.deadline_ms += step_ms

    def _tick_flush_waits(self, now_ms: int) -> None:
        if self._store is not None:
            self._send_flushed_responses()
        while self._flush_waits and self._flush_waits[0].deadline_ms <= now_ms:
            wait = self._take_flush_wait()
            self._write_flushed(wait, *self._late_response(wait))

    def _send_flushed_responses(self) -> None:
        """Send the responses whose messages are safe; after a failed flush, all as late."""
        assert self._store is not None
        safe = self._store.acknowledged()
        failed = self._store.flusher.failed()
        while self._flush_waits and (failed or self._flush_waits[0].offset <= safe):
            wait = self._take_flush_wait()
            if wait.offset > safe:
                self._write_flushed(wait, *self._late_response(wait))
            else:
                self._write_flushed(wait, wait.reply.data, ResponseCode.SUCCESS)

    def _late_response(self, wait: _FlushWait) -> tuple[bytes, int]:
        """The response to a message that is not safe in time, and its code: the flush or the slaves
        are late."""
        assert self._store is not None
        flusher = self._store.flusher
        if (
            flusher.group_commit and wait.offset > flusher.flushed()
        ) or not wait.reply.unreplicated:
            return wait.reply.late, ResponseCode.FLUSH_DISK_TIMEOUT
        return wait.reply.unreplicated, ResponseCode.FLUSH_SLAVE_TIMEOUT

    def _take_flush_wait(self) -> _FlushWait:
        wait = self._flush_waits.popleft()
        self.memory.used -= len(wait.reply.data)
        return wait

    def _tick_sweep(self, now_ms: int) -> None:
        steady_ms = self.monotonic_ms()
        if steady_ms >= self._sweep_ms:
            self._sweep_ms = steady_ms + SWEEP_MS
            self._sweep(steady_ms)

    def _sweep(self, now_ms: int) -> None:
        """Close connections that are idle, or whose frame is not finished, at a monotonic time."""
        idle_ms = self.config().idle_ms
        for connection in list(self.connections.values()):
            connection.count_unsent()
            if now_ms - connection.active_ms > idle_ms:
                connection.abort(f"idle for {idle_ms} ms (idle_ms)")
            elif connection.frame_since_ms and now_ms - connection.frame_since_ms > idle_ms:
                connection.abort(f"a frame was not finished within {idle_ms} ms (idle_ms)")
