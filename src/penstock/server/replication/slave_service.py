"""A slave's connection to its master: receives the log, reports, reconnects with a back-off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl as tls
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from penstock.clock import finish_within, pause
from penstock.config import LiveSettings
from penstock.errors import LogsDiffer, PenstockError, ReplicationError
from penstock.replication.authentication import NONCE_BYTES, SlaveAuthentication
from penstock.replication.slave_session import (
    UNKNOWN,
    EpochSlaveSession,
    SlaveOptions,
    SlaveSession,
    StaticSlaveSession,
)
from penstock.transport.peer import split_address

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.server.replication.store_logs import StoreSlaveLog

log = logging.getLogger(__name__)

READ_BYTES = 1024 * 1024
CONNECT_SECONDS = 5.0
RETRY_MS, RETRY_MS_MAX = 250, 5_000
TICK_MS = 250
AUTHENTICATION_MS = 5_000
PROGRESS_MS = 10_000
"""How often a slave that catches up logs its progress."""
BEHIND_BYTES = 64 * 1024 * 1024
"""A slave that is further behind logs its progress."""


class ReplicationSlave:
    """Follows one master at a time."""

    def __init__(
        self,
        settings: LiveSettings,
        slave_log: StoreSlaveLog,
        clock: Clock,
        after_work: Callable[[], None],
        *,
        ssl: tls.SSLContext | None = None,
        find_begin: Callable[[], Awaitable[int]],
        epoch_least: Callable[[], int],
        on_difference: Callable[[LogsDiffer], None],
    ) -> None:
        """`after_work` is called when readers may see more. `find_begin` asks where the master's
        log begins. Masters whose last epoch is below `epoch_least` are refused. `on_difference`
        must truncate the log, which needs a restart of the store; this service has ended then."""
        self._find_begin = find_begin
        self._epoch_least = epoch_least
        self._settings = settings
        self.log = slave_log
        self.clock = clock
        self.after_work = after_work
        self._ssl = ssl
        self._on_difference = on_difference
        self.master = settings.current.replication.master
        """The HA address of the master; empty if it is not known."""
        self.connection: MasterConnection | None = None
        self.told_end = -1
        """The end of the master's log as the master said it when it was asked; -1: not known. The
        HA protocols tell only what they send."""
        self.error = ""
        self.received_bytes = 0
        self.read_ms = self.written_ms = 0  # of the last read and the last report, by the calendar
        self._task: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None  # the attempt to follow `master`
        self._address_known = asyncio.Event()
        self._reported_ms = 0
        self._reported_end = 0

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def saved() -> None:
            loop.call_soon_threadsafe(self._epochs_stored)

        self.log.on_saved = saved
        self._task = asyncio.ensure_future(self._run())

    def _epochs_stored(self) -> None:
        """The pool has stored the epochs of the master, or could not: go on, or try again."""
        try:
            self.log.epochs_stored()
        except (PenstockError, OSError) as error:
            if self.connection is not None:
                self.connection.fail(error)
            return
        self.log_flushed()

    async def close(self) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.connection is not None:
            self.connection.close()

    def set_master(self, address: str) -> None:
        """The NameServer says where the master's HA port is."""
        if self._settings.current.replication.master or address == self.master:
            return
        log.info("the master's HA address is %s", address)
        self.master = address
        self._address_known.set()
        if self._following is not None:
            self._following.cancel()  # it may wait for a machine that is gone

    def leave_master(self) -> None:
        """End the connection, and make no other before `set_master`."""
        self.master = ""
        if self.connection is not None:
            self.connection.close()
        if self._following is not None:
            self._following.cancel()

    def log_flushed(self) -> None:
        """Called after each flush: acknowledge what is on the disk."""
        if self.connection is not None:
            self.connection.report()

    @property
    def master_end(self) -> int:
        """The end of the master's log; -1 if it is not known."""
        session = self.connection.session if self.connection is not None else None
        return max(self.told_end, session.master_end if session is not None else -1)

    @property
    def behind(self) -> int:
        """How many bytes of the master's log are missing, as far as that is known."""
        return max(self.master_end - self.log.end, 0)

    @property
    def caught_up(self) -> bool:
        """Whether the slave has all that it knows of in its master's log."""
        return 0 <= self.master_end <= self.log.end

    def new_session(self) -> SlaveSession:
        settings = self._settings.current
        replication = settings.replication
        options = SlaveOptions(
            report_ms=replication.report_ms,
            idle_ms=replication.idle_ms,
            from_first_segment=replication.from_first_segment,
            broker_id=settings.broker.id,
            learner=replication.learner,
            acknowledges_flushed=settings.store.sync_flush,
            epoch_least=self._epoch_least(),
        )
        now_ms = self.clock.monotonic_ms()
        if replication.protocol == "static":
            return StaticSlaveSession(self.log, options, now_ms)
        return EpochSlaveSession(self.log, options, now_ms)

    def new_authentication(self) -> SlaveAuthentication | None:
        """The check of a new connection; None if there is no secret."""
        secret = self._settings.current.replication.secret
        return SlaveAuthentication(secret.encode(), os.urandom(NONCE_BYTES)) if secret else None

    async def _run(self) -> None:
        wait_ms = RETRY_MS
        while True:
            if not self.master:
                self._address_known.clear()
                await self._address_known.wait()
            before, master = self.received_bytes, self.master
            try:
                await self._follow_until_changed(master)
            except LogsDiffer as error:
                log.warning("%s", error)
                try:
                    self._on_difference(error)
                    return
                except OSError as failure:
                    self._failed(failure)
            except (PenstockError, OSError, ValueError) as error:
                if self.log.begin_wanted != UNKNOWN:
                    await self._move_begin(self.log.begin_wanted)
                    continue
                self._failed(error)
            wait_ms = RETRY_MS if self.received_bytes > before else min(2 * wait_ms, RETRY_MS_MAX)
            if self.master == master:
                self._address_known.clear()
                with contextlib.suppress(TimeoutError):
                    await finish_within(self.clock, wait_ms, self._address_known.wait())
            if self.master != master:
                wait_ms = RETRY_MS

    async def _follow_until_changed(self, address: str) -> None:
        """Follow a master; returns when there is another one."""
        self._following = following = asyncio.ensure_future(self._follow(address))
        try:
            await following
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.master == address or (current is not None and current.cancelling()):
                raise  # the service is closed
        finally:
            following.cancel()

    async def _follow(self, address: str) -> None:
        """Connect and receive the log until the connection is lost."""
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        replication = self._settings.current.replication
        if replication.protocol == "static" and self.log.end == 0:
            begin = await self._find_begin()
            if begin > 0 and replication.from_first_segment:
                await self.log.move_begin(begin)
        connection = MasterConnection(self)
        async with asyncio.timeout(CONNECT_SECONDS):
            await loop.create_connection(lambda: connection, host, port, ssl=self._ssl)
        self.connection = connection
        try:
            while not connection.closed.done():
                await asyncio.wait([connection.closed], timeout=TICK_MS / 1000)
                connection.tick()
            connection.closed.result()
        finally:
            self.connection = None
            connection.closed.cancel()
            connection.close()

    async def _move_begin(self, offset: int) -> None:
        """Begin the empty log where the master's log begins."""
        try:
            await self.log.move_begin(offset)
        except (PenstockError, OSError) as error:
            self._failed(error)
            await pause(self.clock, RETRY_MS_MAX)

    def _failed(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if text != self.error:  # logged once, not at each attempt
            log.warning("replication from %s: %s; trying again", self.master, text)
        self.error = text

    def received(self, count: int) -> None:
        """Bytes have arrived and are in the log."""
        self.read_ms = self.clock.now_ms()
        self.received_bytes += count
        if self.error:
            log.info("replication from %s continues at log offset %d", self.master, self.log.end)
            self.error = ""
        self.log.publish(self.read_ms)
        self.after_work()
        self._log_progress()

    def _log_progress(self) -> None:
        now_ms, end = self.clock.monotonic_ms(), self.log.end
        if now_ms - self._reported_ms < PROGRESS_MS:
            return
        seconds = (now_ms - self._reported_ms) / 1000
        rate = (end - self._reported_end) / seconds if self._reported_ms else 0.0
        self._reported_ms, self._reported_end = now_ms, end
        if self.behind > BEHIND_BYTES and rate > 0:
            log.info(
                "catching up: %d MiB behind the master, %.0f MiB/s, about %.0f s left",
                self.behind >> 20,
                rate / (1 << 20),
                self.behind / rate,
            )


class MasterConnection(asyncio.BufferedProtocol):
    """The connection to the master."""

    def __init__(self, service: ReplicationSlave) -> None:
        self._service = service
        self._transport: Any = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._authentication = service.new_authentication()
        self.session: SlaveSession | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._made_ms = service.clock.monotonic_ms()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._authentication is not None:
            self._transport.write(self._authentication.hello())
        else:
            self._begin()

    def _begin(self) -> None:
        self.session = self._service.new_session()
        self._transport.write(self.session.start(self._service.clock.monotonic_ms()))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            reason = str(error) if error else "the master closed the connection"
            self.closed.set_exception(ReplicationError(reason, hint="check the master's log"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Exception) -> None:
        """Close the connection because of an error."""
        if not self.closed.done():
            self.closed.set_exception(error)
        self.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        if self.closed.done():
            return
        try:
            data = self._buffer[:count]
            if self._authentication is not None:
                data = self._authenticate(data)
            if self.session is not None and len(data) > 0:
                self.session.receive(data, self._service.clock.monotonic_ms())
                self._service.received(len(data))
                self.report()
        except (PenstockError, OSError) as error:
            self.fail(error)

    def _authenticate(self, data: memoryview) -> memoryview:
        authentication = self._authentication
        assert authentication is not None
        answer = authentication.receive(bytes(data))
        if answer:
            self._transport.write(answer)
        if not authentication.done:
            return data[:0]
        self._authentication = None
        rest = memoryview(bytearray(authentication.rest))
        self._begin()
        return rest

    def report(self) -> None:
        """Report what the slave has, if that is due."""
        if self.session is not None and self._transport is not None:
            report = self.session.report(self._service.clock.monotonic_ms())
            if report:
                self._transport.write(report)
                self._service.written_ms = self._service.clock.now_ms()

    def tick(self) -> None:
        """Report at least every few seconds; close the connection if the master is silent."""
        now_ms = self._service.clock.monotonic_ms()
        if self.session is None:
            if now_ms - self._made_ms > AUTHENTICATION_MS:
                self.fail(ReplicationError("the master did not authenticate itself"))
            return
        try:
            self.session.check_idle(now_ms)
        except ReplicationError as error:
            self.fail(error)
            return
        self.report()
