"""The replication of one broker, as a master or as a slave."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from penstock.broker.replicas.replica_state import ReplicaState
from penstock.clock import pause
from penstock.config.settings import ha_port
from penstock.errors import BadSetting, NotMaster, PeerError, PenstockError
from penstock.replication.agreed_replicas import AgreedReplicas
from penstock.replication.assigned_role import AssignedRole
from penstock.replication.controlled_role import Lead
from penstock.replication.epoch_file import EPOCH_FILE, load_epochs, save_epochs
from penstock.replication.epochs import EpochHistory
from penstock.replication.replicas import Replicas
from penstock.server.listener import is_loopback
from penstock.server.replication.forwarding import Forwarding
from penstock.server.replication.master_service import ReplicationMaster, replica_rules
from penstock.server.replication.metadata_sync import MetadataSync
from penstock.server.replication.replica_calls import ReplicaCalls
from penstock.server.replication.slave_service import ReplicationSlave
from penstock.server.replication.store_logs import StoreMasterLog, StoreSlaveLog
from penstock.store.put import OFFSET_MAX
from penstock.store.recovery.truncation import Truncation, request_truncation
from penstock.store.tables.config_tables import ConfigFile
from penstock.transport.tls import Tls, outgoing_context

if TYPE_CHECKING:
    import ssl as tls

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.config import LiveSettings
    from penstock.errors import LogsDiffer
    from penstock.store.store import MessageStore
    from penstock.transport.peer import Sign

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
UNSUPERVISED_MAX = 1_000
"""By how much the number of the epoch grows at most when a slave becomes the master by hand."""
FIND_MS = 100
"""How often a slave asks the next master for its HA address."""


class ControlledReplica(NamedTuple):
    """A replica whose role controllers have given."""

    replica_id: int
    lead: Lead
    """Master: its epoch and the in-sync set at the time of the election."""
    ask_for_set: Callable[[Iterable[str], int], None]
    stopping: bool = False
    """Slave: it only forwards requests before its process ends. It does not join the in-sync set,
    so that no send waits for it afterwards."""
    confirmed: int = 0
    """Slave: what is known to be confirmed. The end of the log may belong to no other replica, and
    may be replaced: readers must not see it before a master has confirmed it."""


class Replication:
    """Epochs, and the service of the broker's role."""

    def __init__(
        self,
        settings: LiveSettings,
        store: MessageStore,
        clock: Clock,
        restart: Callable[[], None],
        *,
        assigned: AssignedRole | None = None,
        promoted: bool = False,
        controlled: ControlledReplica | None = None,
    ) -> None:
        """`restart` closes the store and opens it again. `assigned` is a role that the settings do
        not have; `promoted`: it was given a moment ago. `controlled`: by controllers. Waits for the
        disk."""
        self._controlled = controlled
        self._restart = restart
        self._settings = settings
        self._store = store
        self._clock = clock
        self._path = store.paths.root / EPOCH_FILE
        self.history = load_epochs(store.disk, self._path)
        # The file may be ahead of a log that a power failure has shortened. Numbers of epochs are
        # not used again: slaves may have what was lost here.
        self._newest = self.history.last.number if self.history.last is not None else 0
        self.history.cut_after(store.log.end)
        self._assigned = assigned or AssignedRole()
        self._heard = max(self._newest, self._assigned.epoch)
        self._begins_role = promoted
        self.master: ReplicationMaster | None = None
        self.slave: ReplicationSlave | None = None
        self.metadata: MetadataSync | None = None
        self.forwarding: Forwarding | None = None
        self.calls = ReplicaCalls(settings)
        self._finding: asyncio.Task[None] | None = None
        if settings.current.replication.role != "slave":
            self._begin_epoch()
        elif controlled is not None:
            store.writer.confirm_limit = controlled.confirmed
            store.publish()

    def _begin_epoch(self) -> None:
        """A master continues the epoch of its last run, unless it was a slave or may have lost the
        end of its log: slaves may have that end, and must not take another one for it."""
        if self._settings.current.replication.protocol == "static":
            return
        log_end = self._store.log.end
        if self._controlled is not None:
            if self._assigned.epoch > self._newest:
                # What was stored before there were epochs belongs to the first one: a slave that is
                # killed while it copies that must have it in common with this master.
                first = not self.history.epochs
                begin = self._store.log.begin() if first else log_end
                self._append_epoch(self._assigned.epoch, begin)
            return
        if self._assigned.role and self._assigned.epoch > self._newest:
            self._begins_role = True
            self._append_epoch(self._assigned.epoch, log_end)
        elif not self._heard:
            # What was stored before there were epochs belongs to the first one.
            self._append_epoch(FIRST_EPOCH, self._store.log.begin())
        elif self._was_slave() and not self._continues_promotion():
            # Nobody counts the masters: an old one that is still running, or another slave, may
            # begin an epoch here as well. Equal numbers would hide that their logs differ.
            self._append_epoch(self._heard + random.randint(2, UNSUPERVISED_MAX), log_end)
        elif not self._store.report.pages_kept:
            self._append_epoch(self._heard + 1, log_end)

    def _continues_promotion(self) -> bool:
        """Whether this broker has begun the epoch of its promotion before; it may have been killed
        before it noted that it is no longer a slave."""
        return bool(self._assigned.role) and self._assigned.epoch == self._newest

    def _append_epoch(self, number: int, begin: int) -> None:
        self.history.append(number, begin)
        self._save(self.history)

    @property
    def epoch(self) -> int:
        """The epoch of this master; 0 without epochs."""
        static = self._settings.current.replication.protocol == "static"
        return 0 if static or self.history.last is None else self.history.last.number

    @property
    def stored_epoch(self) -> int:
        """The greatest epoch that was stored with the log, also if its begin is lost; 0: none."""
        return self._newest

    @property
    def registered_epoch(self) -> int:
        """The number by which NameServers tell this master from one that it has replaced: its
        epoch, or without epochs the time of its promotion."""
        return self.epoch or (self._assigned.epoch if self._assigned.role else 0)

    @property
    def newest_epoch(self) -> int:
        """The greatest number of an epoch that this broker has heard of."""
        last = (self.history if self.slave is None else self.slave.log.history).last
        return max(self._heard, last.number if last is not None else 0)

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
        ssl = outgoing_context(self._settings.current.tls)
        self.calls = ReplicaCalls(self._settings, sign, ssl)
        if broker.role.slave:
            self._follow(broker, after_work, sign, ssl)
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
        controlled = self._controlled
        self.master = ReplicationMaster(
            self._settings,
            self._store,
            master_log,
            self._clock,
            after_work,
            self._replicas(),
            None if controlled is None else controlled.ask_for_set,
        )
        try:
            await self.master.start(host, port, Tls.of(config.tls))
        except OSError as error:
            if config.replication.role == "sync_master":
                raise
            log.warning("slaves can't connect: port %d (replication.port): %s", port, error)

    def _replicas(self) -> Replicas:
        """The slaves of this master, of which none is known yet."""
        rules = replica_rules(self._settings.current)
        known = {"log_end": self._store.log.end, "confirmed": self._store.confirm_offset}
        if self._controlled is None:
            return Replicas(rules, **known)
        lead = self._controlled.lead
        return AgreedReplicas(
            rules,
            str(self._controlled.replica_id),
            map(str, lead.in_sync),
            lead.in_sync_epoch,
            self._clock.monotonic_ms(),
            **known,
        )

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
                "messages to anyone; set replication.secret, or replication.host to an address "
                "that only slaves reach"
            )
            return False
        log.warning(
            "every peer that reaches the HA port on %s may read all messages "
            "(replication.secret is not set)",
            host or "all addresses",
        )
        return True

    def _follow(
        self,
        broker: Broker,
        after_work: Callable[[], None],
        sign: Sign | None,
        ssl: tls.SSLContext | None,
    ) -> None:
        self.metadata = MetadataSync(
            self._settings, broker, broker.role, self._clock, sign=sign, ssl=ssl
        )
        self.metadata.start()
        confirmed = OFFSET_MAX if self._controlled is None else self._controlled.confirmed
        slave_log = StoreSlaveLog(self._store, self.history, self._save, confirmed=confirmed)

        def received() -> None:
            broker.role.hides_log &= not slave_log.opened_confirmed
            after_work()

        broker.role.hides_log &= not slave_log.opened_confirmed
        if self._controlled is not None:
            self.forwarding = Forwarding(broker.role, self._clock, ssl)
            broker.role.forward = self.forwarding.forward
        self.slave = ReplicationSlave(
            self._settings,
            slave_log,
            self._clock,
            received,
            ssl=ssl,
            find_begin=lambda: self.calls.log_begin(broker.role.master_address),
            epoch_least=lambda: self._heard,
            on_difference=self._truncate,
        )
        self.slave.start()
        if self._assigned.role and self._assigned.master_address:
            self.follow(self._assigned.master_address, self._assigned.epoch)

    def _truncate(self, difference: LogsDiffer) -> None:
        """Truncate the log: the next start of the store does it."""
        request_truncation(
            self._store.disk,
            self._store.paths,
            Truncation(difference.offset, "the master's log is different"),
        )
        self._restart()

    def set_master(self, address: str, ha_address: str) -> None:
        """A NameServer says where the master of this broker is. It may be out of date."""
        if self.slave is None or self.metadata is None or self._controlled is not None:
            return
        if ha_address == self.slave.master:
            self._stop_finding()
            self.metadata.set_master(address)
            return
        if self.slave.connection is not None or self._finding is not None:
            # There is a master, or one is expected: change only to one that is a master now.
            self.follow(address, self._heard)
            return
        self._follow_at(address, ha_address)

    def follow(self, address: str, epoch: int) -> None:
        """Follow the master of this epoch that serves clients at this address, as soon as it is
        one; refuse masters of earlier epochs."""
        self._heard = max(self._heard, epoch)
        self._stop_finding()
        self._finding = asyncio.ensure_future(self._find_master(address))

    def leave_master(self) -> None:
        """Follow and acknowledge to no master until the next one is known."""
        self._stop_finding()
        if self.slave is not None:
            self.slave.leave_master()

    def _stop_finding(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
            self._finding = None

    async def _find_master(self, address: str) -> None:
        """Ask the broker at an address for its HA address until it answers as a master."""
        warned = False
        while True:
            try:
                if ha_address := await self.calls.ha_address(address):
                    break
            except PenstockError as error:
                if not warned and not isinstance(error, PeerError):
                    warned = True
                    log.warning("%s does not report its HA address: %s", address, error)
            await pause(self._clock, FIND_MS)
        self._finding = None
        self._follow_at(address, ha_address)

    def _follow_at(self, address: str, ha_address: str) -> None:
        assert self.slave is not None
        assert self.metadata is not None
        self.metadata.set_master(address)
        if self._controlled is None or not self._controlled.stopping:
            self.slave.set_master(ha_address)

    async def compare(self, address: str, *, starting: bool) -> int:
        """Compare this master with another broker that is registered as the master of its name.

        Positive if this one has replaced it, negative if it has replaced this one, 0 if that is not
        known. A master that was replaced accepts no more messages.

        While it is starting, only a promotion makes this broker replace one that answers. One that
        does not answer was to step down, or an operator has decided that it is lost.
        """
        if self._controlled is not None:
            return 1  # the controllers have given this broker its role and id
        if self.slave is not None:
            return 0
        try:
            other = await self.calls.describe(address)
        except PeerError:
            return int(self._begins_role)
        except PenstockError:
            return 0
        if not other.ours or not other.role:
            return 0
        if other.role == "slave":
            return 1  # it has had the id before
        mine = self.epoch
        if other.epoch > mine > 0:
            self._store.writer.refusal = NotMaster(
                f"this broker was replaced: {address} is the master since epoch {other.epoch}",
                hint="change broker.id to an id that is not in use and set replication.role to "
                "slave, and restart this broker: it follows the new master",
            )
            return -1
        return int(other.epoch < mine and (self._begins_role or not starting))

    def log_grew(self) -> None:
        """Called after each read of a client and after each flush."""
        if self.master is not None:
            self.master.log_grew()
        elif self.slave is not None:
            self.slave.log_flushed()

    def not_ready(self) -> str | None:
        """Why a replica can't do its work under controllers, or None."""
        if self.slave is not None and (self.slave.connection is None or self._finding is not None):
            return "there is no master that this replica could follow"
        if self.master is not None and not self.master.replicas.enough():
            return "too few slaves have joined the in-sync set"
        return None

    async def close(self) -> None:
        """End all connections of the HA port."""
        self._stop_finding()
        if self.forwarding is not None:
            await self.forwarding.close()
        if self.master is not None:
            await self.master.close()
        if self.slave is not None:
            await self.slave.close()
        if self.metadata is not None:
            await self.metadata.close()
