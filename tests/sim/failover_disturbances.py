"""Failures of etcd and of what controllers share, in the simulation of failover.

They happen at any time in a life. In the end a set that works is disturbed by some of them alone:
as long as one controller hears a master and reaches etcd, nobody else is elected in its place. What
is unavailable to all controllers at the same time does not count.

Two things do replace a living master, and are not tested therefore: a refused connection tells that
its process has ended, if no controller can report it because etcd does not answer; and a lease that
etcd has ended too early leaves no report for a second, if others read the reports just then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.sim.failover_broker import Broker
from tests.sim.failover_controllers import Controller
from tests.sim.failover_etcd import Etcd
from tests.sim.failover_ledger import Ledger
from tests.sim.failover_world import World
from tests.sim.replication_nodes import InvariantError

SETTLE_MS = 10_000
"""Until nothing is left of earlier failures: pauses end, leases are renewed."""
DEAF_MS = 5_000
"""After this time a controller that gets no heartbeats of a master has noticed it."""
REFUSED_MS = 1_500
"""After this time an address seems to refuse connections."""
CALM_MS = 14_000
"""How long a disturbance may have an effect: the grace of controllers, and some seconds."""


class EtcdFaults:
    """What happens to etcd, to its leases, and to the watches."""

    def __init__(self, world: World, etcd: Etcd, controllers: Sequence[Controller]) -> None:
        self._world = world
        self._etcd = etcd
        self._controllers = controllers

    def stop(self, duration_ms: int) -> None:
        """No controller reaches etcd; what is on the way arrives."""
        rng, pairs = self._world.rng, [(one.name, self._etcd.name) for one in self._controllers]
        answers = [(b, a) for a, b in pairs]
        pairs = rng.choice((pairs, answers, pairs + answers))  # answers: requests take effect
        self._world.note(f"etcd does not answer for {duration_ms} ms")
        self._world.block(pairs, duration_ms)
        self._world.events["etcd unavailable"] += 1
        self.interrupt_watches(0.5)

    def lose_leader(self, duration_ms: int) -> None:
        self._world.note(f"etcd has no leader for {duration_ms} ms")
        self._etcd.lose_leader(duration_ms)
        self._world.events["etcd without a leader"] += 1
        self.interrupt_watches(0.5)

    def interrupt_watches(self, probability: float) -> None:
        """Connections of watches are lost; some controllers do not notice that."""
        for stream in list(self._etcd.streams):
            if self._world.rng.random() < probability:
                silent = self._world.rng.random() < 0.3
                self._world.note(f"the watch of {stream.node.name} is lost, silent: {silent}")
                stream.cut(silent=silent)

    def hold_watches(self, controllers: Sequence[Controller], duration_ms: int) -> None:
        """Watches report late."""
        for stream in self._etcd.streams:
            if stream.node in controllers:
                self._world.note(f"the watch of {stream.node.name} is late by {duration_ms} ms")
                stream.hold(duration_ms)

    def compact(self) -> None:
        """Old changes are deleted, and watches have to begin again."""
        self._etcd.compact()
        self.interrupt_watches(0.7)

    def expire_lease(self, controller: Controller) -> None:
        """A lease expires too early."""
        lease = controller.process.lease
        if lease is not None and lease.id in self._etcd.leases:
            self._etcd.expire(lease.id)


class Disturbances:
    """Disturbs a set that works, while a controller hears its master."""

    def __init__(
        self,
        world: World,
        faults: EtcdFaults,
        controllers: Sequence[Controller],
        master: Broker,
        ledger: Ledger,
    ) -> None:
        self._world = world
        self._faults = faults
        self._controllers = controllers
        self._master = master
        self._ledger = ledger
        others = list(controllers)
        self._hears = world.rng.choice(others)
        """The controller to which nothing else happens than to all."""
        others.remove(self._hears)
        self._deaf = [one for one in others if world.rng.random() < 0.7]
        """Controllers that get no heartbeats of the master."""
        self._others = others

    def run(self) -> None:
        world, rng, ledger = self._world, self._world.rng, self._ledger
        world.run(SETTLE_MS)
        assert ledger.state is not None
        epoch = ledger.state.master_epoch
        for one in self._deaf:
            self._separate(one)
        if self._deaf:
            world.run(DEAF_MS)
        faults = self._faults_of_one() if len(self._controllers) == 1 else self._faults_of_some()
        depends = self._report_again, self._connect_again  # on reports that etcd takes at once
        for fault in sorted(rng.choices(faults, k=2), key=lambda fault: fault not in depends):
            fault()
            world.run(rng.choice((1_500, 5_000, CALM_MS)))
        world.run(CALM_MS)
        if ledger.state.master_epoch != epoch:
            raise InvariantError(f"{self._master.name} was replaced, although it was alive")
        world.heal()
        world.events["disturbed without an election"] += 1

    def _separate(self, controller: Controller) -> None:
        names = controller.name, self._master.name
        self._world.note(f"{' | '.join(names)}")
        self._world.block([names, names[::-1]], 1_000_000)

    def _faults_of_all(self) -> list[Callable[[], None]]:
        rng, faults = self._world.rng, self._faults
        return [
            # Longer than leases: a shorter one may cost only one controller its lease.
            lambda: faults.stop(rng.choice((4_500, 8_000, 15_000))),
            lambda: faults.lose_leader(rng.choice((500, 2_000, 4_000, 8_000))),
            lambda: faults.interrupt_watches(0.7),
            faults.compact,
        ]

    def _faults_of_one(self) -> list[Callable[[], None]]:
        """A single controller may itself fail."""
        return [
            *self._faults_of_all(),
            lambda: self._pause(self._hears),
            lambda: self._restart(self._hears),
        ]

    def _faults_of_some(self) -> list[Callable[[], None]]:
        other = self._world.rng.choice(self._others)
        return [
            *self._faults_of_all(),
            lambda: self._pause(other),
            lambda: self._restart(other),
            lambda: self._faults.expire_lease(other),
            self._report_again,
            self._connect_again,
        ]

    def _pause(self, controller: Controller) -> None:
        duration_ms = self._world.rng.choice((1_000, 5_000, 12_000))
        self._world.note(f"{controller.name} is paused for {duration_ms} ms")
        controller.paused_until_ms = self._world.now_ms + duration_ms

    def _restart(self, controller: Controller) -> None:
        self._world.note(f"{controller.name} is killed and starts")
        controller.end()
        controller.start()

    def _report_again(self) -> None:
        """The report expires and is written again, before others learn that it was gone."""
        self._faults.hold_watches(self._others, 4_000)
        self._faults.expire_lease(self._hears)
        self._world.run(DEAF_MS)

    def _connect_again(self) -> None:
        """All connections of the master are lost, and to one controller it seems that nobody
        listens at its address. The others hear from it again before that."""
        one = self._world.rng.choice(self._others)
        self._separate(one)
        if self._master.replica_id is not None:
            one.refuse_wrongly(self._master.replica_id, REFUSED_MS)
        self._world.run(300)
        self._master.lose_connections()
        self._world.run(DEAF_MS)
