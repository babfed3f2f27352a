"""Watches the replication of a broker, for admin requests and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.replication_state import MasterState, ReplicationState, SlaveState
from penstock.replication.byte_rate import ByteRate

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.config import LiveSettings
    from penstock.server.replication.master_service import ReplicationMaster, SlaveConnection
    from penstock.server.replication.replication import Replication
    from penstock.server.replication.slave_service import ReplicationSlave

SAMPLE_SECONDS = 1.0


class ReplicationObserver:
    """Tells how the replication is going. Rates are those of the last second or so."""

    def __init__(self, settings: LiveSettings, replication: Replication, clock: Clock) -> None:
        self._settings = settings
        self._replication = replication
        self._clock = clock
        self._sent: dict[SlaveConnection, ByteRate] = {}
        self._received = ByteRate(clock.monotonic_ms())
        self._caught_up_ms = clock.monotonic_ms()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self._sample)

    def close(self) -> None:
        self._timer.cancel()

    def state(self) -> ReplicationState:
        """How the replication is going now."""
        config = self._settings.current.replication
        replication = self._replication
        master, slave = replication.master, replication.slave
        history = replication.history if slave is None else slave.log.history
        return ReplicationState(
            role=config.role,
            epochs=None if config.protocol == "static" else history.epochs,
            slaves=() if master is None else tuple(self._slaves(master)),
            master=None if slave is None else self._master(slave),
        )

    def _sample(self) -> None:
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self._sample)
        now_ms = self._clock.monotonic_ms()
        master, slave = self._replication.master, self._replication.slave
        if master is not None:
            known = self._sent
            self._sent = {one: known.get(one, ByteRate(now_ms)) for one in master.connections}
            for connection, rate in self._sent.items():
                rate.sample(connection.sent_bytes, now_ms)
        if slave is not None:
            self._received.sample(slave.received_bytes, now_ms)
            if _caught_up(slave):
                self._caught_up_ms = now_ms

    def _slaves(self, master: ReplicationMaster) -> Iterator[SlaveState]:
        """Those that are connected, and those that are still in sync without a connection."""
        connections = {
            connection.session.replica: connection
            for connection in master.connections
            if connection.session is not None
        }
        for replica in master.replicas.slaves.values():
            connection = connections.get(replica)
            position = -1
            if connection is not None and connection.session is not None:
                position = connection.session.position
            rate = None if connection is None else self._sent.get(connection)
            yield SlaveState(
                name=replica.name,
                address="" if connection is None else connection.peer,
                acknowledged=replica.acknowledged,
                sent=position if position >= 0 else replica.acknowledged,
                in_sync=replica.in_sync,
                acknowledges_flushed=replica.acknowledges_flushed,
                bytes_per_second=0 if rate is None else rate.per_second,
            )

    def _master(self, slave: ReplicationSlave) -> MasterState:
        session = slave.connection.session if slave.connection is not None else None
        known = session is not None and session.master_end >= 0
        behind_ms = self._clock.monotonic_ms() - self._caught_up_ms
        return MasterState(
            address=slave.master,
            connected=session is not None,
            log_end=slave.log.end + slave.behind if known else None,
            error=slave.error,
            behind_ms=0 if _caught_up(slave) else behind_ms,
            received_bytes=slave.received_bytes,
            bytes_per_second=self._received.per_second,
            read_ms=slave.read_ms,
            written_ms=slave.written_ms,
        )


def _caught_up(slave: ReplicationSlave) -> bool:
    """Whether the slave has all that it knows of in its master's log."""
    session = slave.connection.session if slave.connection is not None else None
    return session is not None and 0 <= session.master_end <= slave.log.end
