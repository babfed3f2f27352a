"""The master's HA port: streams the log to its slaves.

Bytes that are in memory go from the mapping of the segment to the socket without a copy in this
process; others are read by the pool, one frame at a time. A slave that takes nothing has one frame
in flight, so it costs neither memory nor time of the event loop. What was appended in one loop
iteration is sent once, in the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from penstock.config import LiveSettings, Settings
from penstock.errors import NotEnoughReplicas, ReplicationError
from penstock.replication.agreed_replicas import AgreedReplicas
from penstock.replication.authentication import NONCE_BYTES, MasterAuthentication
from penstock.replication.master_session import (
    EpochMasterSession,
    Frame,
    MasterSession,
    SessionOptions,
    StaticMasterSession,
)
from penstock.replication.replicas import ReplicaRules, Replicas
from penstock.server.listener import Listener, listen

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.server.replication.store_logs import StoreMasterLog
    from penstock.store.store import MessageStore
    from penstock.transport.tls import Tls

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
"""Connections of the HA port; each slave has one."""
UNSENT_BYTES_MAX = 256 * 1024
"""A connection with more unsent bytes gets no further frame."""
FRAMES_AT_ONCE = 4
"""Frames to one slave in one loop iteration."""
TICK_SECONDS = 0.25
AUTHENTICATION_MS = 5_000
JOIN_MS = 2_000
"""How long a master that controllers have just elected stores messages while its in-sync set is too
small. Its slaves are connecting; their sends wait for them. A refusal is final for RocketMQ's
producers, which try three times at once."""


class ReplicationMaster:
    """Serves the slaves of one broker."""

    def __init__(
        self,
        settings: LiveSettings,
        store: MessageStore,
        master_log: StoreMasterLog,
        clock: Clock,
        after_work: Callable[[], None],
        replicas: Replicas,
        ask_for_set: Callable[[Iterable[str], int], None] | None = None,
    ) -> None:
        """`after_work` is called when slaves have acknowledged more, `ask_for_set` when the
        controllers should agree to another in-sync set than that with a number."""
        self._settings = settings
        self._store = store
        self.log = master_log
        self.clock = clock
        self._after_work = after_work
        self.replicas = replicas
        self._ask_for_set = ask_for_set
        self.connections: set[SlaveConnection] = set()
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sending = False  # `_send_all` is called in the next loop iteration
        self._sent_to = 0
        self._started_ms = clock.monotonic_ms()
        self._complete = False  # the in-sync set has had enough members
        self.acknowledging = True
        """Whether sends may be acknowledged: not by a master that may have been replaced."""
        self.deleted_bytes = 0
        """Bytes of the log that retention has deleted before a connected slave had them."""
        store.on_retention(self._needed_from, unless_full=True)
        self._apply(settings.current)
        settings.listeners.append(self._apply)

    def _apply(self, settings: Settings) -> None:
        """Take over live settings."""
        rules = self.replicas.rules = replica_rules(settings)
        self._store.writer.replicated = rules.sync and (rules.copies > 1 or rules.all_in_sync)
        self.progress()

    async def start(self, host: str, port: int, tls: Tls | None) -> None:
        """Listen for slaves."""
        self._listener = await listen(lambda: SlaveConnection(self), host, port, tls=tls)
        self._tick()

    @property
    def listening(self) -> bool:
        return self._listener is not None

    async def close(self) -> None:
        """Close the port and all connections."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            await self._listener.close()
        for connection in list(self.connections):
            connection.close("the master stops")
        self._settings.listeners.remove(self._apply)

    def log_grew(self) -> None:
        """Called after each read of a client and after each flush."""
        end = self.log.end
        if end == self._sent_to:
            return
        self._sent_to = end
        if self.replicas.rules.sync and self.acknowledging:
            self.replicas.confirm_offset(end)
            self._store.writer.replicated_to = self.replicas.acknowledged(end)
        if self.connections and not self._sending:
            self._sending = True
            self._loop.call_soon(self._send_all)

    def _needed_from(self) -> int | None:
        """The first byte of the log that a connected slave has not been sent yet."""
        if not self._settings.current.replication.keep_for_slaves:
            return None
        sessions = [connection.session for connection in self.connections]
        positions = [session.position for session in sessions if session is not None]
        return min((position for position in positions if position >= 0), default=None)

    def _send_all(self) -> None:
        self._sending = False
        for connection in list(self.connections):
            connection.send()

    def new_session(self, peer: str) -> MasterSession:
        replication = self._settings.current.replication
        options = SessionOptions(
            frame_bytes_max=replication.frame_bytes_max,
            report_ms=replication.report_ms,
            idle_ms=replication.idle_ms,
            from_first_segment=replication.from_first_segment,
            rate_bytes_max=replication.rate_bytes_max,
        )
        kind = StaticMasterSession if replication.protocol == "static" else EpochMasterSession
        return kind(self.log, self.replicas, options, peer, self.clock.monotonic_ms())

    def new_authentication(self) -> MasterAuthentication | None:
        """The check of a new connection; None if there is no secret."""
        secret = self._settings.current.replication.secret
        return MasterAuthentication(secret.encode(), os.urandom(NONCE_BYTES)) if secret else None

    def progress(self) -> None:
        """Slaves have acknowledged more, or the in-sync set has changed."""
        if not self.acknowledging:
            return
        writer, replicas = self._store.writer, self.replicas
        end = self.log.end
        replicas.confirm_offset(end)
        writer.replicated_to = replicas.acknowledged(end)
        writer.confirm_limit = max(replicas.confirm_limit(), writer.confirm_offset)
        self._refuse_or_resume()

    def acknowledged(self, session: MasterSession) -> None:
        """A slave has reported its offset."""
        if session.joined and session.replica is not None:
            log.info("slave %s is in sync", session.replica.name)
        self.ask_for_set()
        self.progress()
        self._after_work()

    def ask_for_set(self) -> None:
        """Ask the controllers for another in-sync set if the present one is not right."""
        replicas = self.replicas
        if self._ask_for_set is None or not isinstance(replicas, AgreedReplicas):
            return
        number = replicas.number
        wanted = replicas.ask(self.log.end, self.clock.monotonic_ms())
        if wanted is not None:
            self._ask_for_set(wanted, number)

    def agree(self, members: Iterable[str], number: int) -> None:
        """The controllers say what the in-sync set is."""
        replicas = self.replicas
        assert isinstance(replicas, AgreedReplicas)
        members = sorted(members)
        if replicas.agree(members, number, self.clock.monotonic_ms()):
            log.warning("the in-sync set is %s", ", ".join(members))
            self.progress()
            self._after_work()

    def _refuse_or_resume(self) -> None:
        writer = self._store.writer
        replicas = self.replicas
        self._complete |= replicas.enough()
        if not replicas.enough() and writer.refusal is None and not self._awaits_first_slaves():
            writer.refusal = NotEnoughReplicas(
                f"in-sync replicas not enough: {1 + len(replicas.in_sync)} of at least "
                f"{replicas.rules.in_sync_least} (min_in_sync_replicas)"
            )
            log.warning("%s", writer.refusal)
        elif replicas.enough() and isinstance(writer.refusal, NotEnoughReplicas):
            writer.refusal = None
            log.warning("writes are accepted again: %d replicas are in sync", len(replicas.in_sync))

    def _awaits_first_slaves(self) -> bool:
        """Whether this master was elected a moment ago, and its in-sync set was never complete."""
        if self._ask_for_set is None or self._complete:
            return False
        return self.clock.monotonic_ms() - self._started_ms < JOIN_MS

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        now_ms = self.clock.monotonic_ms()
        for connection in list(self.connections):
            connection.tick(now_ms)
        left = self.replicas.tick(self.log.end, now_ms)
        self.ask_for_set()
        for replica in left:
            log.warning(
                "slave %s is not in sync any more: it is %d bytes behind",
                replica.name,
                self.log.end - replica.acknowledged,
            )
        if left or not self.replicas.enough():
            self.progress()
            self._after_work()

    def run_in_pool(self, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        """Have the pool do something, then call `then` in the event loop."""
        future = self._store.disk.submit(work)
        future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(then, done))


class SlaveConnection(asyncio.Protocol):
    """The connection of one slave."""

    def __init__(self, service: ReplicationMaster) -> None:
        self._service = service
        self._transport: Any = None
        self.peer = ""
        self._authentication = service.new_authentication()
        self.session: MasterSession | None = None
        self.sent_bytes = 0
        self._paused = False
        self._reading = False  # the pool reads the next frame
        self._made_ms = service.clock.monotonic_ms()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        name = transport.get_extra_info("peername") or ("", 0)
        self.peer = f"{name[0]}:{name[1]}"
        if len(self._service.connections) >= CONNECTIONS_MAX:
            self.close(f"there are {CONNECTIONS_MAX} connections of slaves already")
            return
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self._service.connections.add(self)
        if self._authentication is None:
            self.session = self._service.new_session(self.peer)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._service.connections.discard(self)
        if self.session is not None:
            self.session.closed()
            log.info("the connection of slave %s is closed", self.peer)

    def close(self, why: str) -> None:
        if self._transport is not None:
            log.warning("closing the connection of slave %s: %s", self.peer, why)
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            if self._authentication is not None:
                data = self._authenticate(data)
            if self.session is not None and data:
                answer = self.session.receive(data, self._service.clock.monotonic_ms())
                if answer:
                    self._transport.write(answer)
                self._service.acknowledged(self.session)
                self.send()
        except ReplicationError as error:
            self.close(str(error))

    def _authenticate(self, data: bytes) -> bytes:
        """Check who the peer is; returns what it sent behind that."""
        authentication = self._authentication
        assert authentication is not None
        answer = authentication.receive(data)
        if answer:
            self._transport.write(answer)
        if not authentication.done:
            return b""
        self._authentication = None
        self.session = self._service.new_session(self.peer)
        return bytes(authentication.rest)

    # --- sending

    def send(self) -> None:
        """Send what the connection takes."""
        for _ in range(FRAMES_AT_ONCE):
            if self._paused or self._reading or self._transport is None or self.session is None:
                return
            frame = self.session.next_frame(self._service.clock.monotonic_ms())
            if frame is None:
                return
            if frame.length == 0:
                self._transport.write(frame.header)
                continue
            data = self._service.log.view(frame.offset, frame.length)
            if data is None:
                self._read(frame)
                return
            self._write(frame, data)
        asyncio.get_running_loop().call_soon(self.send)

    def _write(self, frame: Frame, data: memoryview | bytes) -> None:
        assert self.session is not None
        self._transport.writelines((frame.header, data))
        self.sent_bytes += frame.length
        if self._transport.get_write_buffer_size() == 0:
            self.session.taken_at_once()
        elif self._paused:
            self.session.taken_late()

    def _read(self, frame: Frame) -> None:
        """Have the pool read the bytes of a frame."""
        self._reading = True
        read, offset, length = self._service.log.read, frame.offset, frame.length
        self._service.run_in_pool(
            lambda: read(offset, length), lambda done: self._read_done(frame, done)
        )

    def _read_done(self, frame: Frame, done: Future[bytes]) -> None:
        self._reading = False
        if self._transport is None:
            return
        try:
            data = done.result()
        except OSError as error:
            self.close(f"the log can't be read: {error}")
            return
        if len(data) != frame.length:
            self.close(str(self._deleted(frame.offset)))
            return
        self._write(frame, data)
        self.send()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.send()

    def tick(self, now_ms: int) -> None:
        """Send a heartbeat if one is due; close a silent connection."""
        if self.session is None:
            if now_ms - self._made_ms > AUTHENTICATION_MS:
                self.close("it did not authenticate itself")
            return
        try:
            self.session.check_idle(now_ms)
            if 0 <= self.session.position < self._service.log.begin:
                raise self._deleted(self.session.position)
        except ReplicationError as error:
            self.close(str(error))
            return
        self.send()

    def _deleted(self, offset: int) -> ReplicationError:
        """Retention has deleted what the slave needs next."""
        deleted = self._service.log.begin - offset
        self._service.deleted_bytes += deleted
        replica = self.session.replica if self.session is not None else None
        return ReplicationError(
            f"retention has deleted {deleted} bytes of the log, from offset {offset} on, that "
            f"slave {self.peer if replica is None else replica.name} has not received",
            hint="delete the slave's store so that it begins again, and free disk space or raise "
            "retain_hours so that it can catch up",
        )


def replica_rules(settings: Settings) -> ReplicaRules:
    """What the settings promise."""
    replication = settings.replication
    return ReplicaRules(
        sync=replication.role == "sync_master",
        copies=replication.copies_required(),
        in_sync_least=replication.in_sync_least(),
        all_in_sync=replication.all_in_sync_acknowledge or bool(replication.controllers),
        lag_bytes_max=replication.lag_bytes_max,
        lag_ms_max=replication.lag_ms_max,
    )
