"""Models of etcd and of controllers, for the simulation of failover.

The decisions are those of `penstock.controller.decisions`. A controller carries them out as
`StoredBrokerSetStates` of `penstock.server.controller` does: read, decide, compare and swap, again
if the state has changed meanwhile. If etcd does not answer, the change may have taken effect, or
may do so later: the controller answers with an error.

Which replicas are alive, each controller knows from heartbeats. It may take a replica for dead too
early or too late. One that has just started presumes that a master is alive, as `LocalLiveness`
does, unless nobody listens at its address.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.controller import decisions
from penstock.controller.broker_set import BrokerSet, LiveReplica, Living, decode_broker_set
from penstock.controller.decisions import ControllerDecision
from penstock.replication.controlled_role import SetState
from penstock.wire.codes import ResponseCode
from tests.sim.failover_world import Node, Reply, World

NAME = "set"
CLUSTER = "cluster"
ETCD_MS = 1_000
"""How long a controller waits for etcd."""

GRACE_MS, FIRST_HEARTBEATS_MS = 10_000, 2_000
"""As in `liveness`."""

CALL_MS = 1_000
"""How long a broker waits for a controller."""
ATTEMPTS = 2

Decide = Callable[[BrokerSet | None, Living], ControllerDecision]


class Answer(NamedTuple):
    """The answer of a controller."""

    code: int
    state: BrokerSet | None = None

    @property
    def ok(self) -> bool:
        return self.code == ResponseCode.SUCCESS


class ControllerRules(NamedTuple):
    """The rules of controllers and etcd."""

    elect: Callable[..., ControllerDecision] = decisions.elect
    alter: Callable[..., ControllerDecision] = decisions.alter_in_sync
    compares: bool = True
    """Whether a swap compares the version."""
    decides_again: bool = False
    """Whether a controller whose answer of etcd was lost decides again."""


class Etcd(Node):
    """One key with its version."""

    def __init__(self, world: World, changed: Callable[[], None], *, compares: bool) -> None:
        """`changed` is called after each change."""
        super().__init__("etcd")
        self.state: BrokerSet | None = None
        self.revision = 0
        self._changed = changed
        self._compares = compares
        self._world = world

    def read(self, reply: Reply) -> None:
        reply((self.state, self.revision))

    def swap(self, state: BrokerSet | None, revision: int, reply: Reply) -> None:
        if self._compares and revision != self.revision:
            reply(False)
            return
        self.revision += 1
        self.state = None if state is None else decode_broker_set(state.encode())
        if state is not None:
            self._world.note(
                f"etcd: master {state.master_id}, epoch {state.master_epoch}, in sync "
                f"{list(state.in_sync)}, number {state.in_sync_epoch}, before {list(state.before)}"
            )
        self._changed()
        reply(True)


class Controller(Node):
    """A controller without a state of its own but who is alive."""

    def __init__(self, index: int, world: World, etcd: Etcd, rules: ControllerRules) -> None:
        super().__init__(f"controller {index}")
        self._world = world
        self._etcd = etcd
        self._rules = rules
        self._living: dict[int, tuple[LiveReplica, int]] = {}
        self._dead: set[int] = set()
        """Replicas that have died since the start."""
        self._started_ms = 0
        self.brokers: dict[str, Node] = {}
        """By address. They have a method `learn`."""
        self.told: list[SetState] = []
        """All notifications."""
        self.unclean = False
        self.early_death = world.rng.choice((0.0, 0.0, 0.01))
        """How probable it is, at each scan, that a replica is taken for dead."""
        self._scan_ms = world.rng.choice((250, 500))
        self.start()

    def start(self) -> None:
        self.up = True
        self._living = {}
        self._dead = set()
        self._started_ms = self._world.now_ms
        self._world.every(self._scan_ms, self._scan, self)

    # --- requests; the answers are of the type Answer

    def heartbeat(self, replica_id: int, live: LiveReplica, timeout_ms: int, reply: Reply) -> None:
        rng = self._world.rng
        if self.early_death and rng.random() < 0.02:
            timeout_ms += rng.randint(0, 5_000)
        self._living[replica_id] = live, self._world.now_ms + timeout_ms
        self._dead.discard(replica_id)
        reply(Answer(ResponseCode.SUCCESS))

    def next_id(self, reply: Reply) -> None:
        def found(answer: Any) -> None:
            if answer is None:
                reply(Answer(ResponseCode.SYSTEM_ERROR))
            else:
                reply((decisions.next_id(answer[0]),))

        self._world.call(self, self._etcd, self._etcd.read, found, ETCD_MS)

    def apply_id(self, replica_id: int, check_code: str, reply: Reply) -> None:
        self._decide(
            lambda state, living: decisions.apply_id(state, CLUSTER, NAME, replica_id, check_code),
            reply,
        )

    def register(self, replica_id: int, address: str, reply: Reply) -> None:
        self._decide(
            lambda state, living: decisions.register(state, NAME, living, replica_id, address),
            reply,
        )

    def replica_info(self, reply: Reply) -> None:
        self._world.call(
            self,
            self._etcd,
            self._etcd.read,
            lambda found: reply(
                Answer(ResponseCode.SYSTEM_ERROR)
                if found is None
                else Answer(ResponseCode.SUCCESS, found[0])
            ),
            ETCD_MS,
        )

    def elect(self, asking: int, reply: Reply, *, designated: bool = False) -> None:
        unclean, elect = self.unclean, self._rules.elect
        self._decide(
            lambda state, living: elect(
                state,
                NAME,
                living,
                asking=asking,
                designated=designated,
                unclean=unclean,
                now_ms=self._world.now_ms,
            ),
            reply,
        )

    def alter(
        self,
        master_id: int,
        master_epoch: int,
        members: frozenset[int],
        number: int,
        reply: Reply,
    ) -> None:
        alter = self._rules.alter
        self._decide(
            lambda state, living: alter(
                state,
                NAME,
                living,
                master_id=master_id,
                master_epoch=master_epoch,
                members=members,
                in_sync_epoch=number,
            ),
            reply,
        )

    # --- decisions

    @property
    def living(self) -> Living:
        return {one: live for one, (live, _) in self._living.items()}

    def _decide(self, decide: Decide, reply: Reply) -> None:
        """As `StoredBrokerSetStates._decide`."""
        world, etcd = self._world, self._etcd

        def begin() -> None:
            world.call(self, etcd, etcd.read, found, ETCD_MS)

        def found(answer: Any) -> None:
            if answer is None:
                reply(Answer(ResponseCode.SYSTEM_ERROR))
                return
            state, revision = answer
            decision = decide(state, self._with_presumed(state))
            if not decision.changed:
                reply(Answer(decision.code, decision.state))
                return

            def swapped(answer: Any) -> None:
                if answer is None and not self._rules.decides_again:
                    reply(Answer(ResponseCode.SYSTEM_ERROR))
                elif not answer:
                    begin()
                else:
                    if decision.elected and decision.state is not None:
                        self._notify(decision.state)
                    reply(Answer(decision.code, decision.state))

            def swap(swap_reply: Reply) -> None:
                etcd.swap(decision.state, revision, swap_reply)

            world.call(self, etcd, swap, swapped, ETCD_MS)

        begin()

    def _with_presumed(self, state: BrokerSet | None) -> Living:
        """As `StoredBrokerSetStates._with_presumed`."""
        master_id = None if state is None else state.master_id
        if master_id is None or master_id in self._living or self._is_dead(master_id):
            return self.living
        self._world.events["master presumed"] += 1
        return {**self.living, master_id: LiveReplica(presumed=True)}

    def _is_dead(self, replica_id: int) -> bool:
        """As `LocalLiveness.is_dead`."""
        return replica_id in self._dead or self._running_ms >= GRACE_MS

    @property
    def _running_ms(self) -> int:
        return self._world.now_ms - self._started_ms

    def _suspect(self, state: BrokerSet) -> None:
        """As `LocalLiveness.suspect`: an address that refuses connections is that of a process that
        has ended; a machine without power does not answer."""
        if self._running_ms < FIRST_HEARTBEATS_MS or state.master_address is None:
            return
        broker = self.brokers[state.master_address]
        refuses = not broker.up and not broker.power_lost  # type: ignore[attr-defined]
        if refuses and not self._world.blocked(self, broker) and state.master_id is not None:
            self._dead.add(state.master_id)

    def _scan(self) -> None:
        """As `StoredBrokerSetStates._scan`."""
        world = self._world
        if self.early_death and self._living and world.rng.random() < self.early_death:
            self._died(world.rng.choice(sorted(self._living)))
            world.events["taken for dead"] += 1
        for one, (_, until_ms) in list(self._living.items()):
            if until_ms <= world.now_ms:
                self._died(one)
        world.call(self, self._etcd, self._etcd.read, self._replace_dead_master, ETCD_MS)

    def _died(self, replica_id: int) -> None:
        del self._living[replica_id]
        self._dead.add(replica_id)

    def _replace_dead_master(self, answer: Any) -> None:
        state = None if answer is None else answer[0]
        living = self._living
        if state is None or state.master_id is None or state.master_id in living or not living:
            return
        if not self._is_dead(state.master_id):
            self._suspect(state)
            return
        unclean, elect = self.unclean, self._rules.elect
        self._decide(
            lambda state, living: elect(
                state, NAME, living, unclean=unclean, now_ms=self._world.now_ms
            ),
            lambda answer: None,
        )

    def _notify(self, state: BrokerSet) -> None:
        """As `StoredBrokerSetStates._elected`: 1008 to all living replicas."""
        self._world.events["election"] += 1
        for one, replica in state.replicas.items():
            if one in self._living:
                self._tell(self.brokers[replica.address], set_state(state))

    def _tell(self, broker: Node, state: SetState) -> None:
        """A notification dials the broker, and may be very late."""
        world = self._world
        self.told.append(state)
        late_ms = world.rng.randint(0, 15_000) if world.rng.random() < world.slow * 3 else 0
        world.at(
            late_ms,
            lambda: world.send(self, broker, lambda: broker.learn(state)),  # type: ignore[attr-defined]
            self,
        )


class ControllerCalls:
    """Calls of a broker to its controllers, as `Controllers`."""

    def __init__(self, broker: Node, world: World, controllers: list[Controller]) -> None:
        self._broker = broker
        self._world = world
        self._controllers = controllers
        self.leader: Controller | None = None
        """The controller that is asked; another one after a failure."""

    def call(
        self, request: Callable[[Controller, Reply], None], done: Callable[[Any, int], None]
    ) -> None:
        """`done` gets the answer or None, and how many attempts failed."""

        def attempt(failed: int) -> None:
            if self.leader is None:
                self.leader = self._world.rng.choice(self._controllers)
            to = self.leader

            def answered(answer: Any) -> None:
                if answer is not None:
                    done(answer, failed)
                    return
                if self.leader is to:
                    self.leader = None
                if failed + 1 < ATTEMPTS:
                    attempt(failed + 1)
                else:
                    done(None, failed + 1)

            self._world.call(self._broker, to, lambda reply: request(to, reply), answered, CALL_MS)

        attempt(0)


def set_state(state: BrokerSet) -> SetState:
    """What a broker learns of a state; as `read_state` of `controlled_broker`."""
    return SetState(
        state.master_id,
        state.master_address or "",
        state.master_epoch,
        frozenset(state.in_sync),
        state.in_sync_epoch,
        state.master_incomplete,
        not state.before,
    )
