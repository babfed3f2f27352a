"""A broker in the simulation of failover: one replica of a broker set.

It uses `ControlledRole` and does what `ControlledBroker`, `ControlledServices` and `BrokerService`
of `penstock.server` do; the methods have the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.controller.broker_set import LiveReplica
from penstock.replication.controlled_role import ControlledRole, Follow, Lead, SetState, TakeOver
from penstock.wire.codes import ResponseCode
from tests.sim.failover_controllers import Answer, Controller, ControllerCalls, set_state
from tests.sim.failover_ledger import Ledger
from tests.sim.failover_links import DiskLog
from tests.sim.failover_rules import Assigned, BrokerRules, Mode
from tests.sim.failover_services import MasterService, SlaveService
from tests.sim.failover_world import Node, World

POLL_MS = 1_000
JOIN_RETRY_MS = 250, 500
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 3_000
LEASE_CHECK_MS = 100
ELECTED = ResponseCode.SUCCESS, ResponseCode.CONTROLLER_MASTER_STILL_EXIST


class Broker(Node):
    """A replica: its disk, and its process while it is up."""

    def __init__(
        self, name: str, world: World, ledger: Ledger, mode: Mode, rules: BrokerRules
    ) -> None:
        super().__init__(name)
        self.world, self.ledger, self.mode, self.rules = world, ledger, mode, rules
        self.controllers: list[Controller] = []
        self.brokers: dict[str, Broker] = {}
        """All brokers by address, which is their name here."""
        # On the disk:
        self.log = DiskLog(world, self, sync_flush=mode.sync_flush)
        self.replica_id: int | None = None
        self._application: tuple[int, str] | None = None
        self.truncation: int | None = None
        self.power_lost = False
        """The last process ended by a power cut."""
        self.damaged = False
        self.doubted = False
        """The disk has failed, and no master has given this replica its log since then."""
        # Of the process:
        self.up = False
        self.role: ControlledRole | None = None
        self.assigned = Assigned()
        self.lead_state = Lead(0, frozenset(), 0)
        self.services: MasterService | SlaveService | None = None
        self.electable = False
        self._restarting = self._restart_again = False
        self._registered: SetState | None = None
        self._calls = ControllerCalls(self, world, [])
        self._polling = False
        self._confirmed_ms = self.met_ms = 0
        self._unconfirmed = False
        self._connections: dict[str, tuple[int, int]] = {}
        """By the name of a controller: the process there, and the number of the connection."""

    @property
    def leads_epoch(self) -> int | None:
        return self.services.epoch if isinstance(self.services, MasterService) else None

    @property
    def disk_failed(self) -> bool:
        """As `ControlledServices.failed`."""
        return self.services is not None and self.log.failed

    # --- the process

    def start(self) -> None:
        """Start the process: it joins its set first, as `BrokerService.start` does."""
        self.up = True
        self.role = None
        self.services = None
        self.electable = False
        self.assigned = Assigned()
        self.lead_state = Lead(0, frozenset(), 0)
        self._restarting = self._restart_again = False
        self._calls = ControllerCalls(self, self.world, self.controllers)
        self._registered = None
        self._polling = self._unconfirmed = False
        self._connections = {}
        self._join()

    def stop(self, *, power: bool = False, disk: bool = False) -> None:
        """The process is killed; with `power` the machine fails, with `disk` its disk is lost."""
        if self.services is not None:
            self.services.close(silent=power)
        self.services, self.role, self.electable = None, None, False
        if not power:
            self.lose_connections()
        self.end()
        if power:
            self.power_lost = True
            if self.log.power_cut(self.world.rng) and not self.mode.sync_flush:
                self.damaged = True
        if disk:
            self.log = DiskLog(self.world, self, sync_flush=self.mode.sync_flush)
            self.replica_id = self._application = self.truncation = None
            self.power_lost = self.damaged = self.doubted = False
        self.ledger.check()

    def fail_disk(self) -> None:
        """An fsync fails, once. Brokers notice that within 100 ms; here, at once."""
        self.world.note(f"the disk of {self.name} fails behind {self.log.flushed}")
        self.log.fail()
        if self.role is not None and not self.rules.ignores_failed_disk:
            self._doubt_log()
        if isinstance(self.services, MasterService):
            self.services.refusal = "the disk has failed"
        elif self.services is not None and self.services.link is not None:
            self.services.link.close_slave()  # it can't receive any more

    def restart(self) -> None:
        """As `BrokerService._restart_soon`: the services stop and start, the process goes on."""
        if self._restarting:
            self._restart_again = True
            return
        self._restarting = True
        self.world.at(self.world.rng.choice((0, 1, 20)), self._stop_services, self)

    def _stop_services(self) -> None:
        self._drop_unflushed()
        if self.services is not None:
            self.services.close()
            self.services = None
        self.log.reopen()  # the store is closed
        self._start_services(self._restarted)

    def _start_services(self, then: Callable[[], None]) -> None:
        """Open the store and start the services of the role."""
        assigned, lead = self.assigned, self.lead_state
        if self.truncation is not None:
            self.log.truncate(self.truncation)
            self.truncation = None

        def started() -> None:
            newest = self.log.open()
            if not assigned.leads:
                self.services = SlaveService(self, newest)
            else:
                if assigned.epoch > newest:  # as `Replication._begin_epoch`
                    self.log.begin_epoch(assigned.epoch)
                self.services = MasterService(self, lead)
                self.world.note(f"{self.name} is the master of epoch {assigned.epoch}")
                self._apply_confirmation()
            self.services.start()
            then()

        self.world.at(self.world.rng.choice((2, 10, 50, 300)), started, self)

    def _restarted(self) -> None:
        if self._restart_again:
            self._restart_again = False
            self.world.at(0, self._stop_services, self)
        else:
            self._restarting = False

    def flush(self) -> None:
        """A flush ends."""
        self.log.flush()
        if isinstance(self.services, MasterService):
            self.services.after_work()
        elif self.services is not None:
            self.services.flushed()

    # --- joining the set

    def _join(self) -> None:
        """As `ControlledBroker.join`."""
        if self.replica_id is not None:
            self._register()
        elif self._application is not None:
            self._apply(*self._application)
        else:
            self._calls.call(lambda to, reply: to.next_id(reply), self._got_next_id)

    def _join_later(self) -> None:
        self.world.at(self.world.rng.randint(*JOIN_RETRY_MS), self._join, self)

    def _got_next_id(self, answer: Any, tried: int) -> None:
        if answer is None or isinstance(answer, Answer):
            self._join_later()
            return
        self._application = answer[0], f"{self.name};{self.world.now_ms}"
        self._apply(*self._application)

    def _apply(self, replica_id: int, check_code: str) -> None:
        def applied(answer: Answer | None, tried: int) -> None:
            if answer is None or answer.code == ResponseCode.SYSTEM_ERROR:
                self._join_later()
            elif not answer.ok:
                self._application = None
                self._join_later()
            else:
                self.replica_id, self._application = replica_id, None
                self.world.note(f"{self.name} is replica {replica_id}")
                self._register()

        self._calls.call(lambda to, reply: to.apply_id(replica_id, check_code, reply), applied)

    def _register(self) -> None:
        def registered(answer: Answer | None, tried: int) -> None:
            if answer is None or not answer.ok or answer.state is None:
                self._join_later()
                return
            self._registered = set_state(answer.state) if answer.alive else None
            self._start_services(self._meet_controllers)

        replica_id, name = self.replica_id, self.name
        assert replica_id is not None
        self._calls.call(lambda to, reply: to.register(replica_id, name, reply), registered)

    def _meet_controllers(self) -> None:
        """As `BrokerService._meet_controllers` and `ControlledBroker.start`."""
        world, last = self.world, max(self.log.saved, default=None)
        assert self.replica_id is not None
        complete = not self.power_lost or self.mode.sync_flush or self.rules.log_complete
        complete &= not self.doubted
        self.role = self.rules.role(
            self.replica_id,
            log_epoch=last.number if last is not None else 0,
            log_complete=complete,
            now_ms=world.now_ms,
        )
        if self.rules.forgets_power_cut:
            self.power_lost = False
        self._confirmed_ms = self.met_ms = world.now_ms
        world.every(POLL_MS, self._poll, self)
        world.every(LEASE_CHECK_MS, self._check_lease, self)
        world.every(POLL_MS, self._watch_disk, self)
        for controller in self.controllers:
            world.every(HEARTBEAT_MS, lambda to=controller: self._heartbeat(to), self)  # type: ignore[misc]

    # --- controllers

    def _poll(self) -> None:
        """Learn the state; ask for an election if there is no master."""
        if self._polling:
            return
        state, self._registered = self._registered, None
        if state is not None and state.master_id is not None:
            self._polled(state)
            return
        self._polling = True

        def answered(answer: Answer | None, tried: int) -> None:
            self._polling = False
            if answer is not None and answer.ok and answer.state is not None:
                self._polled(set_state(answer.state))

        self._calls.call(lambda to, reply: to.replica_info(reply), answered)

    def _polled(self, state: SetState) -> None:
        self.learn(state)
        role = self.role
        assert role is not None
        if role.needs_election:
            self._polling = True

            def elected(answer: Answer | None, tried: int) -> None:
                self._polling = False
                if answer is not None and answer.state is not None and answer.code in ELECTED:
                    self.learn(set_state(answer.state))

            self._calls.call(lambda to, reply: to.elect(role.own_id, reply), elected)

    def learn(self, state: SetState) -> None:
        """As `ControlledBroker.learn`; also called by notifications."""
        if self.role is None:
            return
        self._act(self.role.learn(state, self.world.now_ms))

    def _act(self, action: Lead | TakeOver | Follow | None) -> None:
        assert self.role is not None
        if isinstance(action, Lead):
            self.power_lost = self.doubted = False
            self._lead(action)
            self._check_lease()
        elif isinstance(action, TakeOver):
            if self._is_prepared():
                self._alter(frozenset([self.role.own_id]), *action, lambda refused: None)
        elif isinstance(action, Follow):
            self._follow(action)

    # --- roles, as `ControlledServices`

    def _lead(self, lead: Lead) -> None:
        leads = self.assigned.leads and self.assigned.epoch == lead.epoch
        if leads and lead.in_sync_epoch < self.lead_state.in_sync_epoch:
            return
        self.lead_state = lead
        if not leads:
            self.world.note(f"{self.name} learns that it is the master of epoch {lead.epoch}")
            self.assigned = Assigned(leads=True, epoch=lead.epoch)
            self._stop_writing()
            self.restart()
        elif isinstance(self.services, MasterService) and (
            self.services.epoch == lead.epoch or self.rules.asks_for_next_epoch
        ):
            self.services.agree(map(str, lead.in_sync), lead.in_sync_epoch)

    def _follow(self, follow: Follow) -> None:
        was_slave = not self.assigned.leads
        self.assigned = Assigned(epoch=follow.epoch, address=follow.address)
        self.world.note(f"{self.name} learns that {follow.address} leads epoch {follow.epoch}")
        if was_slave:
            if self.disk_failed:
                self.restart()
            elif isinstance(self.services, SlaveService):
                self.services.follow(follow.address, follow.epoch)
            return
        self._stop_writing()
        self.restart()

    def _is_prepared(self) -> bool:
        """Before this replica takes over: acknowledge nothing more, to clients or to the old
        master, and have the log on the disk. From then on no other replica may have it."""
        if self.rules.takes_over_unflushed:
            return True
        if self.services is None:  # they are being restarted
            return False
        if isinstance(self.services, SlaveService):
            self.services.disconnect()
        self._stop_writing()
        if self.disk_failed and not self.rules.ignores_failed_disk:
            self._doubt_log()
            return False
        self.log.reopen()
        return True

    def _doubt_log(self) -> None:
        """As `ControlledBroker._doubt_log`."""
        assert self.role is not None
        self.role.doubt_log()
        self.doubted, self.electable = True, False
        self._drop_unflushed()

    def _drop_unflushed(self) -> None:
        """As `ControlledServices.drop_unflushed`."""
        if self.disk_failed and self.mode.sync_flush and not self.rules.keeps_unflushed:
            cut = self.log.flushed
            self.truncation = cut if self.truncation is None else min(cut, self.truncation)

    def _watch_disk(self) -> None:
        if not self.disk_failed or self.role is None or self.rules.ignores_failed_disk:
            return
        self._doubt_log()
        if self.role.leads:
            self._hand_over()
        elif not self.role.needs_election:
            self.restart()

    def _hand_over(self) -> None:
        role = self.role
        assert role is not None
        others = set() if role.state is None else role.state.in_sync - {role.own_id}
        other = min(others, default=None)

        def answered(answer: Answer | None, tried: int) -> None:
            if answer is not None and answer.state is not None and answer.code in ELECTED:
                self.learn(set_state(answer.state))

        if other is not None:
            self._calls.call(lambda to, reply: to.elect(other, reply, designated=True), answered)

    def _stop_writing(self) -> None:
        if isinstance(self.services, MasterService):
            self.services.refusal = "not the master"
            self.services.acknowledging = False
            self.services.abandon_sends()

    # --- heartbeats and the lease

    def _heartbeat(self, controller: Controller) -> None:
        role, services, now_ms = self.role, self.services, self.world.now_ms
        assert role is not None
        if isinstance(services, SlaveService) and services.caught_up and not self.disk_failed:
            role.caught_up()
            self.power_lost = self.doubted = False
        if role.complete and not self.electable:
            self.electable = True
            self.ledger.check()
        last = self.log.history.last
        epoch = last.number if last is not None else 0
        live = LiveReplica(epoch, len(self.log.data), complete=role.complete, takes_over=True)
        replica_id, life = role.own_id, self.life

        if self.world.rng.random() < self.world.loss / 10:
            self._disconnect(controller)
        client = self._connect(controller)

        def arrive() -> None:
            controller.heartbeat(client, replica_id, self.name, live, HEARTBEAT_TIMEOUT_MS, reply)

        def reply(answer: Answer) -> None:
            if answer.ok:
                self.world.send(controller, self, confirmed)

        def confirmed() -> None:
            if self.life == life:
                self._confirmed(now_ms)

        self.world.send(self, controller, arrive)

    def lose_connections(self) -> None:
        """The connections to all controllers are closed; the next heartbeats open others."""
        for controller in self.controllers:
            self._disconnect(controller)

    def _connect(self, controller: Controller) -> int:
        """The number of the connection to a controller."""
        life, client = self._connections.get(controller.name, (-1, 0))
        if life != controller.life or controller.has_closed(client):
            self.world.connections += 1
            client = self.world.connections
            self._connections[controller.name] = controller.life, client
        return client

    def _disconnect(self, controller: Controller) -> None:
        """The connection to a controller is closed; the controller notices that, perhaps late."""
        life, client = self._connections.pop(controller.name, (-1, 0))

        def closed() -> None:
            if controller.life == life:
                controller.disconnected(client)

        if client:
            self.world.send(self, controller, closed)

    def _confirmed(self, sent_ms: int) -> None:
        self._confirmed_ms = max(self._confirmed_ms, sent_ms)
        if self._unconfirmed and self.world.now_ms - self._confirmed_ms <= HEARTBEAT_TIMEOUT_MS:
            self._unconfirmed = False
            self._apply_confirmation()

    def _check_lease(self) -> None:
        age_ms = self.world.now_ms - self._confirmed_ms
        expired = age_ms > HEARTBEAT_TIMEOUT_MS and self.role is not None and self.role.leads
        if expired and not self._unconfirmed:
            self._unconfirmed = True
            self.world.events["lease expired"] += 1
            self._apply_confirmation()

    def _apply_confirmation(self) -> None:
        service = self.services
        if not isinstance(service, MasterService):
            return
        if self._unconfirmed and not service.refusal:
            service.refusal = "not confirmed"
        elif not self._unconfirmed and service.refusal == "not confirmed":
            service.refusal = ""
        service.acknowledging = not self._unconfirmed
        service.progress()
        service.after_work()

    # --- the in-sync set

    def ask_for_set(self, members: Iterable[str], number: int) -> None:
        """Ask the controllers for another in-sync set."""
        assert self.role is not None
        epoch = self.role.epoch
        if isinstance(self.services, MasterService) and not self.rules.asks_for_next_epoch:
            epoch = self.services.epoch

        def answered(refused: bool) -> None:
            if isinstance(self.services, MasterService):
                self.services.replicas.answered(number, refused=refused)

        self._alter(frozenset(int(name) for name in members), epoch, number, answered)

    def _alter(
        self, members: frozenset[int], epoch: int, number: int, then: Callable[[bool], None]
    ) -> None:
        """As `ControlledBroker._alter`; `then` gets whether the request is refused."""
        replica_id = self.replica_id
        assert replica_id is not None

        def answered(answer: Answer | None, failed: int) -> None:
            if answer is not None and answer.ok:
                assert answer.state is not None
                assert self.role is not None
                agreed = frozenset(answer.state.in_sync), answer.state.in_sync_epoch
                self._act(self.role.agreed(epoch, *agreed, self.world.now_ms))
            else:
                self._poll()
            then(self.rules.is_refused(None if answer is None else answer.code, failed))

        self._calls.call(
            lambda to, reply: to.alter(replica_id, epoch, members, number, reply), answered
        )
