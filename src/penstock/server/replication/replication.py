"""The replication of one broker, as a master or as a slave."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.config.settings import ha_port
from penstock.replication.epoch_file import load_epochs, save_epochs
from penstock.replication.epochs import EpochHistory
from penstock.server.replication.master_service import ReplicationMaster
from penstock.server.replication.slave_service import ReplicationSlave
from penstock.server.replication.store_logs import StoreMasterLog, StoreSlaveLog
from penstock.store.recovery.truncation import Truncation, request_truncation
from penstock.transport.tls import Tls, outgoing_context

if TYPE_CHECKING:
    from penstock.broker.replica_role import ReplicaRole
    from penstock.clock import Clock
    from penstock.config import LiveSettings
    from penstock.errors import LogsDiffer
    from penstock.store.store import MessageStore

log = logging.getLogger(__name__)

EPOCH_FILE = "epochFileCheckpoint"
FIRST_EPOCH = 1


class Replication:
    """Epochs, and the service of the broker's role."""

    def __init__(
        self,
        settings: LiveSettings,
        store: MessageStore,
        clock: Clock,
        restart: Callable[[], None],
    ) -> None:
        """`restart` closes the store and opens it again. Waits for the disk."""
        self._restart = restart
        self._settings = settings
        self._store = store
        self._clock = clock
        self._path = store.paths.root / EPOCH_FILE
        self.history = load_epochs(store.disk, self._path)
        # The file may be ahead of a log that a power failure has shortened.
        self.history.cut_from(max(store.log.end, 1))
        self.master: ReplicationMaster | None = None
        self.slave: ReplicationSlave | None = None
        self._role: ReplicaRole | None = None
        if settings.current.replication.role != "slave":
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """A master writes its own epoch; it continues that of its last run."""
        if self._settings.current.replication.protocol == "static" or self.history.last is not None:
            return
        # What was stored before there were epochs belongs to the first one.
        self.history.append(FIRST_EPOCH, self._store.log.begin())
        self._save(self.history)

    def _save(self, history: EpochHistory) -> None:
        save_epochs(self._store.disk, self._path, history)

    async def start(self, role: ReplicaRole, after_work: Callable[[], None]) -> None:
        """Listen for slaves, or follow the master."""
        self._role = role
        if role.slave:
            self._follow(after_work)
        else:
            await self._serve(after_work)

    async def _serve(self, after_work: Callable[[], None]) -> None:
        config = self._settings.current
        port = ha_port(config)
        if port == 0 or (config.broker.port == 0 and config.replication.port < 0):
            return
        master_log = StoreMasterLog(self._store, self.history)
        self.master = ReplicationMaster(
            self._settings, self._store, master_log, self._clock, after_work
        )
        host = config.replication.host or config.broker.host
        try:
            await self.master.start(host, port, Tls.of(config.tls))
        except OSError as error:
            if config.replication.role == "sync_master":
                raise
            log.warning("slaves can't connect: port %d (replication.port): %s", port, error)

    def _follow(self, after_work: Callable[[], None]) -> None:
        slave_log = StoreSlaveLog(self._store, self.history, self._save)
        self.slave = ReplicationSlave(
            self._settings,
            slave_log,
            self._clock,
            after_work,
            ssl=outgoing_context(self._settings.current.tls),
            on_difference=self._truncate,
        )
        self.slave.start()

    def _truncate(self, difference: LogsDiffer) -> None:
        """Truncate the log: the next start of the store does it."""
        request_truncation(
            self._store.disk,
            self._store.paths,
            Truncation(difference.offset, "the master's log is different"),
        )
        self._restart()

    def set_master(self, address: str, ha_address: str) -> None:
        """A NameServer says where the master of this broker is."""
        if self.slave is not None and self._role is not None:
            self._role.master_address = address
            self.slave.set_master(ha_address)

    def log_grew(self) -> None:
        """Called after each read of a client and after each flush."""
        if self.master is not None:
            self.master.log_grew()
        elif self.slave is not None:
            self.slave.log_flushed()

    async def close(self) -> None:
        """End all connections of the HA port."""
        if self.master is not None:
            await self.master.close()
        if self.slave is not None:
            await self.slave.close()
