"""The services of a broker in the simulation of failover: those of a master and those of a slave.

They do what `ReplicationMaster`, `ReplicationSlave`, `Replication` and the store's writer do; the
methods have the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.replication.agreed_replicas import AgreedReplicas
from penstock.replication.controlled_role import Lead
from penstock.replication.master_session import SessionOptions
from penstock.replication.replicas import NO_LIMIT
from penstock.replication.slave_session import SlaveOptions
from tests.sim.failover_links import DiskLog, HaLink
from tests.sim.failover_world import Reply

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.replication.epochs import EpochHistory
    from tests.sim.failover_broker import Broker

REPORT_MS, IDLE_MS = 300, 1_200
TICK_MS = 250
FIND_MS = 100
RETRY_MS = 250
SEND_TIMEOUT_MS = 3_000
ASK_MS = 500
JOIN_MS = 2_000


class MasterView:
    """The log as sessions of slaves see it."""

    begin = 0
    segment_bytes = DiskLog.segment_bytes

    def __init__(self, service: MasterService) -> None:
        self._service = service

    @property
    def end(self) -> int:
        return len(self._service.broker.log.data)

    @property
    def history(self) -> EpochHistory:
        return self._service.broker.log.history

    @property
    def confirm_offset(self) -> int:
        return self._service.confirm_offset


class MasterService:
    """A master and the sends that wait for its slaves."""

    def __init__(self, broker: Broker, lead: Lead) -> None:
        log, world = broker.log, broker.world
        self.broker = broker
        self.world = world
        self.epoch = lead.epoch
        self.log = MasterView(self)
        self.links: dict[HaLink, None] = {}  # in the order of connecting
        self.waiting: list[tuple[int, int]] = []
        """Log offset of the end of sent records, and until when their clients wait."""
        self.acknowledging = True
        self.refusal = ""
        self._started_ms = world.now_ms
        self._complete = False  # the in-sync set has had enough members
        self.replicated_to = 0
        self.confirm_limit = NO_LIMIT
        self.confirm_offset = log.acknowledged  # as of a store that was just opened
        self.replicas: AgreedReplicas = broker.rules.replicas(
            broker.mode.rules,
            str(broker.replica_id),
            map(str, lead.in_sync),
            lead.in_sync_epoch,
            world.now_ms,
            log_end=len(log.data),
            confirmed=self.confirm_offset,
        )

    def start(self) -> None:
        self.progress()
        self.world.every(TICK_MS, self._tick, self.broker)
        self.broker.ledger.begins(self.epoch, self.broker)

    def close(self, *, silent: bool = False) -> None:
        for link in list(self.links):
            link.close_master(silent=silent)

    # --- clients

    def send(self, serial: int, length: int) -> bool:
        """A client sends a message; returns whether it is accepted."""
        broker = self.broker
        if self.refusal:
            return False
        broker.ledger.accepts(broker)
        last = broker.log.history.last
        assert last is not None
        broker.log.append(last.number, serial, length)
        broker.ledger.writes(last.number, len(broker.log.data) - length, serial)
        self.waiting.append((len(broker.log.data), self.world.now_ms + SEND_TIMEOUT_MS))
        self.after_work()
        return True

    def abandon_sends(self) -> None:
        self.waiting = []

    # --- progress

    def after_work(self) -> None:
        """As `Server.after_work`: publish, send to slaves, acknowledge what may be."""
        log = self.broker.log
        self.confirm_offset = min(log.acknowledged, self.confirm_limit)
        if self.acknowledging:
            end = self.log.end
            self.replicas.confirm_offset(end)
            self.replicated_to = self.replicas.acknowledged(end)
        for link in list(self.links):
            link.master_sends()
        limit = min(log.acknowledged, self.replicated_to)
        while self.waiting and self.waiting[0][0] <= limit:
            end, _ = self.waiting.pop(0)
            self.broker.ledger.acknowledges(self.broker, end)

    def progress(self) -> None:
        """As `ReplicationMaster.progress`."""
        if not self.acknowledging:
            return
        end = self.log.end
        self.replicas.confirm_offset(end)
        self.replicated_to = self.replicas.acknowledged(end)
        self.confirm_limit = max(self.replicas.confirm_limit(), self.confirm_offset)
        self._complete |= self.replicas.enough()
        joining = not self._complete and self.world.now_ms - self._started_ms < JOIN_MS
        if not self.replicas.enough() and not self.refusal and not joining:
            self.refusal = "not enough replicas"
        elif self.replicas.enough() and self.refusal == "not enough replicas":
            self.refusal = ""

    def acknowledged(self, link: HaLink) -> None:
        """A slave has reported."""
        self.ask_for_set()
        self.progress()
        self.after_work()

    def ask_for_set(self) -> None:
        number = self.replicas.number
        wanted = self.replicas.ask(self.log.end, self.world.now_ms)
        if wanted is not None:
            self.broker.ask_for_set(wanted, number)

    def agree(self, members: Iterable[str], number: int) -> None:
        if self.replicas.agree(members, number, self.world.now_ms):
            self.progress()
            self.after_work()

    def _tick(self) -> bool:
        if self.broker.services is not self:
            return False
        now_ms = self.world.now_ms
        for link in list(self.links):
            link.master_ticks()
        self.replicas.tick(self.log.end, now_ms)
        self.ask_for_set()
        if not self.replicas.enough():
            self.progress()
            self.after_work()
        while self.waiting and self.waiting[0][1] <= now_ms:
            self.waiting.pop(0)
        return True


class SlaveService:
    """A slave that follows one master at a time."""

    def __init__(self, broker: Broker, newest: int) -> None:
        self.broker = broker
        self.world = broker.world
        self._heard = max(newest, broker.assigned.epoch)
        self._master = ""
        self._finding = 0
        self._connecting = False
        self.link: HaLink | None = None
        self.confirm_offset = broker.log.acknowledged if broker.rules.slave_shows_all else 0
        """What readers see."""

    def start(self) -> None:
        assigned = self.broker.assigned
        self.world.every(TICK_MS, self._tick, self.broker)
        if assigned.address:
            self.follow(assigned.address, assigned.epoch)

    def close(self, *, silent: bool = False) -> None:
        self._finding += 1
        if self.link is not None:
            self.link.close_slave(silent=silent)

    @property
    def caught_up(self) -> bool:
        """As `LogFigures.caught_up`."""
        link = self.link
        return link is not None and 0 <= link.slave_session.master_end <= self.broker.log.end

    def publish(self) -> None:
        log = self.broker.log
        self.confirm_offset = max(min(log.acknowledged, log.confirmed), self.confirm_offset)

    # --- the master

    def follow(self, address: str, epoch: int) -> None:
        """As `Replication.follow`: the connection to the old master stays until the new one says
        that it is the master."""
        self._heard = max(self._heard, epoch)
        self._finding += 1
        self._find(address, self._finding)

    def disconnect(self) -> None:
        """Follow no master until the next news."""
        self._finding += 1
        self._master = ""
        if self.link is not None:
            self.link.close_slave()

    def _find(self, address: str, attempt: int) -> None:
        """As `Replication._find_master`."""
        if self.broker.services is not self or attempt != self._finding:
            return
        master = self.broker.brokers[address]

        def serve(reply: Reply) -> None:
            reply(isinstance(master.services, MasterService))

        def done(answer: bool | None) -> None:
            if attempt != self._finding:
                return
            if answer:
                self._set_master(address)
            else:
                self.world.at(FIND_MS, lambda: self._find(address, attempt), self.broker)

        self.world.call(self.broker, master, serve, done, ASK_MS)

    def _set_master(self, address: str) -> None:
        """As `ReplicationSlave.set_master`."""
        if address == self._master:
            return
        self._master = address
        if self.link is not None:
            self.link.close_slave()
        self._connect()

    def _connect(self) -> None:
        if self._connecting or self.link is not None or not self._master:
            return
        self._connecting = True
        self.world.at(RETRY_MS * 2, self._connect_failed, self.broker)
        broker, address = self.broker, self._master
        master = broker.brokers[address]
        life = broker.life

        def accept() -> None:
            alive = broker.life == life and broker.services is self and address == self._master
            if alive and self.link is None and isinstance(master.services, MasterService):
                self._connected(master.services)

        self.world.send(broker, master, accept)

    def _connect_failed(self) -> None:
        self._connecting = False

    def _connected(self, master: MasterService) -> None:
        broker, now_ms = self.broker, self.world.now_ms
        if self.world.blocked(master.broker, broker):
            return
        mode, rules = broker.mode, broker.rules
        self._connecting = False
        slave_session = rules.slave(
            broker.log,
            SlaveOptions(
                REPORT_MS,
                IDLE_MS,
                from_first_segment=True,
                broker_id=broker.replica_id or 0,
                acknowledges_flushed=mode.sync_flush,
                epoch_least=self._heard,
            ),
            now_ms,
        )
        options = SessionOptions(mode.frame_bytes_max, REPORT_MS, IDLE_MS, from_first_segment=True)
        peer = f"{broker.name}:{now_ms}"
        master_session = rules.master(master.log, master.replicas, options, peer, now_ms)
        self.link = HaLink(self.world, self, master, (slave_session, master_session))
        master.links[self.link] = None
        self.link.to_master.push(slave_session.start(now_ms))

    def link_lost(self, link: HaLink) -> None:
        if self.link is link:
            self.link = None
            self.broker.log.restart(len(self.broker.log.data))

    def truncate(self, offset: int) -> None:
        """As `Replication._truncate`: the next start of the store does it."""
        self.world.events["truncation"] += 1
        self.world.note(f"{self.broker.name} truncates its log to {offset}")
        before = self.broker.truncation
        self.broker.truncation = offset if before is None else min(offset, before)
        self.broker.restart()

    def flushed(self) -> None:
        if self.link is not None:
            self.link.slave_sends()

    def _tick(self) -> bool:
        if self.broker.services is not self:
            return False
        if self.link is not None:
            self.link.slave_ticks()
        else:
            self._connect()
        self.publish()
        return True
