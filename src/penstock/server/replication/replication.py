"""The replication of one broker, as a master or as a slave."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.broker.replica_state import ReplicaState
from penstock.config.settings import ha_port
from penstock.errors import BadSetting, ReplicationError
from penstock.replication.epoch_file import load_epochs, save_epochs
from penstock.replication.epochs import EpochHistory
from penstock.server.listener import is_loopback
from penstock.server.metadata_sync import MetadataSync
from penstock.server.replication.master_service import ReplicationMaster
from penstock.server.replication.slave_service import ReplicationSlave
from penstock.server.replication.store_logs import StoreMasterLog, StoreSlaveLog
from penstock.store.recovery.truncation import Truncation, request_truncation
from penstock.store.tables import ConfigFile
from penstock.transport.peer import Peer
from penstock.transport.tls import Tls, outgoing_context
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_numbers import parse_long

if TYPE_CHECKING:
    import ssl as tls

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.config import LiveSettings
    from penstock.errors import LogsDiffer
    from penstock.store.store import MessageStore
    from penstock.transport.peer import Sign

log = logging.getLogger(__name__)

EPOCH_FILE = "epochFileCheckpoint"
FIRST_EPOCH = 1
UNSUPERVISED_MAX = 1_000
"""By how much the number of the epoch grows at most when a slave becomes the master by hand."""
CALL_MS = 3_000


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
        self.history.cut_after(store.log.end)
        self.master: ReplicationMaster | None = None
        self.slave: ReplicationSlave | None = None
        self.metadata: MetadataSync | None = None
        if settings.current.replication.role != "slave":
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """A master continues the epoch of its last run, unless it was a slave or may have lost the
        end of its log: slaves may have that end, and must not take another one for it."""
        if self._settings.current.replication.protocol == "static":
            return
        last, log_end = self.history.last, self._store.log.end
        if last is None:
            # What was stored before there were epochs belongs to the first one.
            self.history.append(FIRST_EPOCH, self._store.log.begin())
        elif self._was_slave():
            # Nobody counts the masters: an old one that is still running, or another slave, may
            # begin an epoch here as well. Equal numbers would hide that their logs differ.
            self.history.append(last.number + random.randint(2, UNSUPERVISED_MAX), log_end)
        elif not self._store.report.pages_kept:
            self.history.append(last.number + 1, log_end)
        else:
            return
        self._save(self.history)

    def _was_slave(self) -> bool:
        """Whether the broker was a slave when it last ran; `Broker` clears that note later."""
        state = ReplicaState()
        state.load(ConfigFile(self._store.disk, self._store.paths.root / ReplicaState.FILE))
        return state.content.slave

    def _save(self, history: EpochHistory) -> None:
        save_epochs(self._store.disk, self._path, history)

    @property
    def listening(self) -> bool:
        """Whether slaves can connect."""
        return self.master is not None and self.master.listening

    async def start(
        self, broker: Broker, after_work: Callable[[], None], sign: Sign | None
    ) -> None:
        """Listen for slaves, or follow the master. `sign` signs requests to the master."""
        if broker.role.slave:
            self._follow(broker, after_work, sign)
        else:
            await self._serve(after_work)

    async def _serve(self, after_work: Callable[[], None]) -> None:
        config = self._settings.current
        port = ha_port(config)
        host = config.replication.host or config.broker.host
        unused = port == 0 or (config.broker.port == 0 and config.replication.port < 0)
        if unused or not self._may_listen(host):
            if config.replication.role == "sync_master":
                raise BadSetting(
                    "replication.role is sync_master, but slaves can't connect: the HA port is off",
                    hint="set replication.port and, with access control, replication.secret; or "
                    "set replication.role to async_master",
                )
            return
        durable = config.replication.protocol == "static" and config.store.sync_flush
        master_log = StoreMasterLog(self._store, self.history, flushed_only=durable)
        self.master = ReplicationMaster(
            self._settings, self._store, master_log, self._clock, after_work
        )
        try:
            await self.master.start(host, port, Tls.of(config.tls))
        except OSError as error:
            if config.replication.role == "sync_master":
                raise
            log.warning("slaves can't connect: port %d (replication.port): %s", port, error)

    def _may_listen(self, host: str) -> bool:
        """Whether the HA port may be opened: whoever connects to it reads all messages."""
        config = self._settings.current
        certified = config.tls.mode == "enforcing" and config.tls.client_auth == "require"
        checked = config.replication.secret or certified
        if checked or is_loopback(host):
            return True
        if config.access.authentication and not config.replication.host:
            log.warning(
                "slaves can't connect: access control is on, and the HA port would show all "
                "messages to everybody; set replication.secret, or replication.host to an address "
                "that only slaves reach"
            )
            return False
        log.warning(
            "every peer that reaches the HA port on %s may read all messages "
            "(replication.secret is not set)",
            host or "all addresses",
        )
        return True

    def _follow(self, broker: Broker, after_work: Callable[[], None], sign: Sign | None) -> None:
        ssl = outgoing_context(self._settings.current.tls)
        self.metadata = MetadataSync(
            self._settings, broker, broker.role, self._clock, sign=sign, ssl=ssl
        )
        self.metadata.start()
        slave_log = StoreSlaveLog(self._store, self.history, self._save)
        self.slave = ReplicationSlave(
            self._settings,
            slave_log,
            self._clock,
            after_work,
            ssl=ssl,
            find_begin=lambda: _log_begin(broker.role.master_address, sign, ssl),
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
        if self.slave is not None and self.metadata is not None:
            self.metadata.set_master(address)
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
        if self.metadata is not None:
            await self.metadata.close()


async def _log_begin(address: str, sign: Sign | None, ssl: tls.SSLContext | None) -> int:
    """Where the log of a master begins; 0 if the master's address is not known.

    Raises PenstockError if the master does not say it, as Apache's during its first second: from an
    offset that it has deleted, it would send heartbeats for ever.
    """
    if not address:
        return 0
    peer = Peer(address, sign=sign, ssl=ssl)
    try:
        answer = await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO, {}, timeout_ms=CALL_MS)
    finally:
        await peer.close()
    if answer.code != ResponseCode.SUCCESS:
        raise ReplicationError(f"the begin of the master's log is not known: {answer.remark}")
    table = fastjson.decode(answer.body, KVTable).table
    return max(parse_long(table.get("commitLogMinOffset", "")) or 0, 0)
