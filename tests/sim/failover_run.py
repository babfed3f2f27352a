"""One simulated life of a broker set with its controllers, from a seed.

    python -m tests.sim.failover_run SEED

repeats a seed and prints what happened.

Brokers, controllers and etcd fail at any time: crashes, power cuts, pauses, partitions. Disks are
lost while another member of the in-sync set has all that is promised. In the end everything works
again: then a master must be elected, all logs must become equal, and sends must be acknowledged.
"""

import logging
import random
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from penstock.replication.replicas import ReplicaRules
from penstock.server.controller import broker_set_states
from tests.sim.failover_broker import Broker
from tests.sim.failover_controllers import Controller, ControllerRules, StateFile
from tests.sim.failover_disturbances import Disturbances, EtcdFaults
from tests.sim.failover_etcd import Etcd
from tests.sim.failover_ledger import Ledger
from tests.sim.failover_rules import BrokerRules, Mode
from tests.sim.failover_services import MasterService
from tests.sim.failover_world import Node, World
from tests.sim.replication_nodes import RECORD_BYTES_MAX, InvariantError

STEPS = 120
CONVERGENCE_MS = 60_000
"""How long it may take until everything works again. Pauses end after 9 s. A replica that may have
lost the end of its log waits 10 s, and so do controllers that have missed something. Requests of
which the outcome is not known are waited for 5 s."""
LAG_MS = 1_500
TICK_MS = 250
"""How often controllers look for what has expired; more rarely than in reality, to save time."""


class Rules(NamedTuple):
    """What is under test."""

    broker: BrokerRules = BrokerRules()
    controller: ControllerRules = ControllerRules()


def _rules(least: int) -> ReplicaRules:
    return ReplicaRules(True, least, least, True, lag_bytes_max=2000, lag_ms_max=LAG_MS)


MODES = [
    Mode("sync flush, two in sync", _rules(2), sync_flush=True),
    Mode("async flush, two in sync", _rules(2), sync_flush=False),
    Mode("sync flush, one in sync", _rules(1), sync_flush=True),
    Mode("async flush, one in sync", _rules(1), sync_flush=False),
    Mode("sync flush, two in sync, unclean elections", _rules(2), sync_flush=True, unclean=True),
]


class Life:
    """The steps of one seed."""

    def __init__(self, seed: int, rules: Rules, trace: Callable[[str], None] | None) -> None:
        self.world = world = World(seed, trace)
        self.rng = rng = world.rng
        self.mode = mode = MODES[seed % len(MODES)]._replace(
            frame_bytes_max=rng.choice((50, 150, 1000))
        )
        self.brokers: list[Broker] = []
        self.ledger = Ledger(world, self.brokers)
        self.etcd = Etcd(world, self.ledger.changed, compares=rules.controller.compares)
        count = rng.choice((1, 2, 2, 3))
        file = StateFile(self.ledger.changed) if count == 1 and rng.random() < 0.7 else None
        self.controllers = [
            Controller(index, world, self.etcd, rules.controller, file) for index in range(count)
        ]
        self.faults = EtcdFaults(world, self.etcd, [] if file else self.controllers)
        if file is None:
            self.ledger.etcd_confirmed_ms = lambda: self.etcd.confirmed_ms
        for index in range(rng.choice((2, 3, 3, 4))):
            self.brokers.append(Broker(f"b{index}", world, self.ledger, mode, rules.broker))
        by_name = {broker.name: broker for broker in self.brokers}
        for controller in self.controllers:
            controller.brokers.update(by_name)
            controller.unclean_elections = mode.unclean
        self.ledger.clean = not mode.unclean
        flush_ms = rng.choice((5, 20)) if mode.sync_flush else rng.choice((50, 200, 500))
        for broker in self.brokers:
            broker.controllers, broker.brokers = self.controllers, by_name
            broker.distance_ms = rng.choice((0, 0, 0, 5, 25))
            broker.start()
        world.every(flush_ms, self._flush, self.etcd)
        self.serial = 0
        self.gaps = rng.choice(((1, 2, 5), (2, 10, 50), (2, 10, 50, 150), (50, 150, 400)))
        """Between sends."""
        self.recovery = rng.choice((0.03, 0.08, 0.2))
        """How probable it is that a node starts again, at each step."""
        actions: list[tuple[Callable[[], None], float]] = [
            (self._crash, 1),
            (self._cut_power, 0.5),
            (self._lose_disk, 0.15),
            (self._fail_disk, 0.3),
            (self._pause, 0.7),
            (self._partition, 1),
            (self._cut_links, 2),
            (self._stop_controller, 0.7),
            (self._stop_etcd, 0.4),
            (self._disturb_etcd, 0.7),
            (self._designate, 1),
            (self._tell_late, 1),
        ]
        self.actions = [action for action, _ in actions]
        self.weights = [weight * rng.choice((0.0, 0.3, 1, 3)) for _, weight in actions]
        self.actions.append(lambda: None)
        self.weights.append(rng.choice((2, 8, 20)))

    def run(self) -> None:
        try:
            self._run()
        finally:
            for controller in self.controllers:
                controller.end()

    def _run(self) -> None:
        rng, world = self.rng, self.world
        world.run(2_000)
        for _ in range(STEPS):
            rng.choices(self.actions, self.weights)[0]()
            for _ in range(rng.choice((1, 3, 6, 12))):
                self._client()
                world.run(rng.choice(self.gaps))
            self._recover()
        self._converge()
        self._disturb()

    def _flush(self) -> None:
        for broker in self.brokers:
            runs = broker.up and broker.paused_until_ms <= self.world.now_ms
            if runs and broker.log.flushed < len(broker.log.data) and self.rng.random() < 0.7:
                broker.flush()

    # --- clients

    def _client(self) -> None:
        """Clients send to brokers that take themselves for the master, and read from all."""
        rng = self.rng
        able = [b for b in self.brokers if b.up and b.paused_until_ms <= self.world.now_ms]
        for broker in able:
            service = broker.services
            if isinstance(service, MasterService) and rng.random() < 0.8:
                for _ in range(rng.choice((1, 1, 3))):
                    self._send(service)
            if service is not None and rng.random() < 0.3:
                if not isinstance(service, MasterService):
                    service.publish()
                self.ledger.shows(broker, service.confirm_offset)

    def _send(self, service: MasterService) -> bool:
        self.serial += 1
        return service.send(self.serial, self.rng.randint(12, RECORD_BYTES_MAX))

    # --- failures

    def _up(self) -> list[Broker]:
        return [broker for broker in self.brokers if broker.up]

    def _some_broker(self) -> Broker | None:
        """Often the master."""
        up = self._up()
        masters = [broker for broker in up if isinstance(broker.services, MasterService)]
        among = masters if masters and self.rng.random() < 0.4 else up
        return self.rng.choice(among) if among else None

    def _crash(self) -> None:
        broker = self._some_broker()
        if broker is not None:
            self.world.note(f"{broker.name} is killed")
            broker.stop()
            self.world.events["crash"] += 1

    def _cut_power(self) -> None:
        up = self._up()
        count = self.rng.choice((1, 1, 2, len(up)))
        for broker in self.rng.sample(up, min(count, len(up))):
            before = len(broker.log.data)
            broker.stop(power=True)
            self.world.note(f"{broker.name} loses power: {before} → {len(broker.log.data)} bytes")
            self.world.events["power cut"] += 1

    def _lose_disk(self) -> None:
        broker, state = self._some_broker(), self.ledger.state
        if broker is None or state is None or self.mode.unclean:
            return
        left = [
            other
            for other in self.brokers
            if other is not broker and not other.damaged and not other.doubted
            and other.replica_id in (state.before or state.in_sync)
        ]  # fmt: skip
        if left:
            self.world.note(f"{broker.name} loses its disk with {len(broker.log.data)} bytes")
            broker.stop(power=True, disk=True)
            self.world.events["lost disk"] += 1

    def _fail_disk(self) -> None:
        """An fsync fails."""
        broker = self._some_broker()
        if broker is not None and broker.services is not None and not broker.log.failed:
            broker.fail_disk()
            self.world.events["failed disk"] += 1

    def _pause(self) -> None:
        nodes: list[Node] = [*self._up(), *self.controllers]
        node = self.rng.choice(nodes)
        longest_ms = 9_000 if isinstance(node, Controller) else 5_000
        duration_ms = self.rng.choice((50, 500, 2_000, longest_ms))
        self.world.note(f"{node.name} is paused for {duration_ms} ms")
        node.paused_until_ms = self.world.now_ms + duration_ms
        self.world.events["pause"] += 1

    def _partition(self) -> None:
        """Both ways, one way, or with one node that reaches both sides."""
        rng = self.rng
        names = [node.name for node in (*self.brokers, *self.controllers, self.etcd)]
        rng.shuffle(names)
        kind = rng.choice(("one node", "two sides", "bridge", "pair"))
        split = {"one node": 1, "pair": 1}.get(kind, rng.randint(1, len(names) - 1))
        left, right = names[:split], names[split:]
        if kind == "bridge" and len(right) > 1:
            right = right[1:]
        elif kind == "pair":
            right = right[:1]
        one_way = rng.random() < 0.3
        pairs = [(a, b) for a in left for b in right]
        if not one_way:
            pairs += [(b, a) for a, b in pairs]
        duration_ms = rng.choice((300, 1_500, 5_000, 9_000))
        self.world.note(
            f"{', '.join(left)} {'→' if one_way else '|'} {', '.join(right)} for {duration_ms} ms"
        )
        self.world.block(pairs, duration_ms)
        self.world.events["partition"] += 1

    def _cut_links(self) -> None:
        for broker in self._up():
            if isinstance(broker.services, MasterService):
                for link in sorted(broker.services.links, key=lambda link: link.slave.broker.name):
                    if self.rng.random() < 0.5:
                        link.cut()

    def _stop_controller(self) -> None:
        controller = self.rng.choice(self.controllers)
        if controller.up:
            self.world.note(f"{controller.name} is killed")
            controller.end()

    def _stop_etcd(self) -> None:
        """For longer than leases, or than the grace of controllers."""
        self.faults.stop(self.rng.choice((200, 1_500, 1_500, 5_000, 12_000, 20_000)))

    def _disturb_etcd(self) -> None:
        """What is shared by controllers fails in other ways."""
        faults, rng = self.faults, self.rng
        rng.choice(
            (
                lambda: faults.lose_leader(rng.choice((300, 2_000, 6_000))),
                lambda: faults.interrupt_watches(0.5),
                lambda: faults.hold_watches(self.controllers, rng.choice((500, 4_000))),
                lambda: faults.expire_lease(rng.choice(self.controllers)),
                faults.compact,
            )
        )()

    def _designate(self) -> None:
        """An operator has another replica elected, or a master hands over."""
        broker, state = self.rng.choice(self.brokers), self.ledger.state
        controller = self.rng.choice(self.controllers)
        able = controller.up and controller.paused_until_ms <= self.world.now_ms
        if able and broker.replica_id is not None and state is not None:
            self.world.note(f"{broker.name} is designated")
            controller.elect(broker.replica_id, lambda answer: None, designated=True)

    def _tell_late(self) -> None:
        """A notification arrives that was sent long ago."""
        broker = self._some_broker()
        told = self.rng.choice(self.controllers).told
        if broker is not None and told:
            state = self.rng.choice(told)
            self.world.note(f"{broker.name} is told late of epoch {state.master_epoch}")
            broker.learn(state)

    # --- recovery

    def _recover(self) -> None:
        for node in (*self.brokers, *self.controllers):
            if not node.up and self.rng.random() < self.recovery:
                self.world.note(f"{node.name} starts")
                node.start()

    def _converge(self) -> None:
        """Without failures the set works again."""
        self.world.note("all failures end")
        self.world.heal()
        for node in (*self.brokers, *self.controllers):
            if isinstance(node, Broker) and node.up and node.log.failed:
                node.stop()  # by an operator: perhaps no other replica can be the master
            if not node.up:
                node.start()
        self.etcd.elect_leader()
        for controller in self.controllers:
            controller.early_death = 0.0
            controller.refused_wrongly.clear()
        self._until(self._works, "the set does not work")
        acknowledged = self.world.events["acknowledged"]

        def sent() -> bool:
            master = self._master()
            if master is not None and not master.waiting:
                self._send(master)
            return self.world.events["acknowledged"] > acknowledged

        self._until(sent, "no acknowledgement")
        self._until(self._works, "the set does not work after a send")

    def _disturb(self) -> None:
        master = self._master()
        if master is None or self.rng.random() < 0.5:
            return
        self.world.note("the set is disturbed")
        Disturbances(self.world, self.faults, self.controllers, master.broker, self.ledger).run()
        self._until(self._works, "the set does not work after a disturbance")

    def _needs_operator(self) -> bool:
        """Whether a member of the in-sync set has lost its disk, and all others may have lost the
        end of their logs, with their power or because their disks have failed: nobody knows what is
        lost."""
        state = self.ledger.state
        members = set() if state is None else set(state.before or state.in_sync)
        present = [broker for broker in self.brokers if broker.replica_id in members]
        return len(present) < len(members) and all(
            broker.power_lost or broker.doubted for broker in present
        )

    def _until(self, done: Callable[[], bool], otherwise: str) -> None:
        until_ms = self.world.now_ms + CONVERGENCE_MS
        while self.world.now_ms < until_ms:
            self.world.run(100)
            if self._needs_operator() and not self.controllers[0].unclean_elections:
                self.world.events["operator"] += 1
                self.ledger.clean = False
                for controller in self.controllers:
                    controller.unclean_elections = True
            for broker in self.brokers:
                service = broker.services
                if isinstance(service, MasterService):
                    self.ledger.shows(broker, service.confirm_offset)
            if done():
                return
        raise InvariantError(f"{otherwise} after {CONVERGENCE_MS} ms: {self._why()}")

    def _master(self) -> MasterService | None:
        state = self.ledger.state
        if state is None:
            return None
        elected = state.master_id, state.master_epoch
        for broker in self.brokers:
            service = broker.services
            leads = isinstance(service, MasterService)
            if leads and (broker.replica_id, broker.leads_epoch) == elected:
                return service
        return None

    def _works(self) -> bool:
        master, state = self._master(), self.ledger.state
        if master is None or state is None:
            return False
        same = all(broker.log.data == master.broker.log.data for broker in self.brokers)
        ids = {broker.replica_id for broker in self.brokers}
        shown = master.confirm_offset == len(master.broker.log.data)
        return same and set(state.in_sync) == ids and not master.refusal and shown

    def _why(self) -> str:
        state = self.ledger.state
        if state is None:
            return "no state"
        listed = ", ".join(
            f"{b.name}={b.replica_id}:{len(b.log.data)}:{type(b.services).__name__}"
            for b in self.brokers
        )
        return (
            f"master {state.master_id}, epoch {state.master_epoch}, in sync "
            f"{list(state.in_sync)}, {listed}"
        )


def run_seed(
    seed: int, rules: Rules | None = None, trace: Callable[[str], None] | None = None
) -> Counter[str]:
    """Run a seed and count what happened; raises what is wrong."""
    rules = rules or Rules()
    random.seed(seed)  # the pause after conflicts of controllers
    penstock, level = logging.getLogger("penstock"), logging.getLogger("penstock").level
    penstock.setLevel(logging.CRITICAL)
    decisions = SimpleNamespace(elect=rules.controller.elect)
    try:
        with patch.multiple(broker_set_states, decisions=decisions, TICK_MS=TICK_MS):
            life = Life(seed, rules, trace)
            life.run()
    finally:
        penstock.setLevel(level)
    return life.world.events


if __name__ == "__main__":
    run_seed(int(sys.argv[1]), trace=print)
