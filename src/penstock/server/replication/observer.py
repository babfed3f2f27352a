"""Watches the replication of a broker, for admin requests and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.replicas.replication_state import MasterState, ReplicationState, SlaveState
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
        self._note_master_end()
        master, slave = replication.master, replication.slave
        history = replication.history if slave is None else slave.log.history
        return ReplicationState(
            role=config.role,
            epochs=None if config.protocol == "static" else history.epochs,
            slaves=() if master is None else tuple(self._slaves(master)),
            master=None if slave is None else self._master(slave),
            deleted_bytes=0 if master is None else master.deleted_bytes,
        )

    def _sample(self) -> None:
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self._sample)
        now_ms = self._clock.monotonic_ms()
        self._note_master_end()
        master, slave = self._replication.master, self._replication.slave
        if master is not None:
            known = self._sent
            self._sent = {one: known.get(one, ByteRate(now_ms)) for one in master.connections}
            for connection, rate in self._sent.items():
                rate.sample(connection.sent_bytes, now_ms)
        if slave is not None:
            self._received.sample(slave.received_bytes, now_ms)
            if slave.caught_up:
                self._caught_up_ms = now_ms

    def _note_master_end(self) -> None:
        """The copies of tables ask for the end of the master's log."""
        slave, metadata = self._replication.slave, self._replication.metadata
        if slave is not None and metadata is not None:
            slave.told_end = metadata.state.master_end

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
                behind_ms=0
                if replica.acknowledged >= master.log.end
                else max(self._clock.monotonic_ms() - replica.caught_up_ms, 0),
            )

    def _master(self, slave: ReplicationSlave) -> MasterState:
        connection = slave.connection
        behind_ms = self._clock.monotonic_ms() - self._caught_up_ms
        return MasterState(
            address=slave.master,
            connected=connection is not None and connection.session is not None,
            log_end=max(slave.master_end, slave.log.end) if slave.master_end >= 0 else None,
            error=slave.error,
            behind_ms=0 if slave.caught_up else behind_ms,
            received_bytes=slave.received_bytes,
            bytes_per_second=self._received.per_second,
            read_ms=slave.read_ms,
            written_ms=slave.written_ms,
        )
