"""Controllers in the simulation of failover.

A controller runs the server's code on a `NodeLoop`: `StoredBrokerSetStates` with the decisions of
`penstock.controller.decisions`, and `LocalLiveness`. Over etcd it also runs `EtcdStore`,
`ControllerLease`, `Reports`, `View`, `Watch` and `ReportedLiveness`, with the client and the etcd
of `failover_etcd`. A single controller may keep its state in a file instead.

Only this is modelled: the requests of brokers (as `penstock.controller.controller` reads them), the
notifications, the connections that find out whether a process has ended, and the file.

A controller may take a replica for dead too early or too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from penstock.config import LiveSettings
from penstock.controller import decisions
from penstock.controller.broker_set import BrokerSet, Heartbeat, LiveReplica, Living
from penstock.controller.decisions import ControllerDecision
from penstock.errors import PenstockError
from penstock.replication.controlled_role import SetState
from penstock.rpc.answers import ClientId
from penstock.server.controller.broker_set_states import Decide, StoredBrokerSetStates
from penstock.server.controller.broker_set_store import BrokerSetStore, Versioned
from penstock.server.controller.etcd.controller_lease import ControllerLease
from penstock.server.controller.etcd.etcd_client import EtcdClient
from penstock.server.controller.etcd.etcd_store import EtcdStore
from penstock.server.controller.etcd.etcd_watch import Watch
from penstock.server.controller.etcd.reported_liveness import ReportedLiveness
from penstock.server.controller.etcd.reports import Reports
from penstock.server.controller.etcd.view import View
from penstock.server.controller.liveness import Liveness, LocalLiveness
from penstock.server.controller.living_replicas import ReplicaKey
from penstock.server.controller.notifications import Notifications
from penstock.server.controller.process_check import DIAL_MS, ProcessCheck
from penstock.wire.codes import ResponseCode
from tests.sim.failover_etcd import KEYS, NAME, Etcd, SimulatedEtcdClient
from tests.sim.failover_world import Node, Reply, World
from tests.sim.node_loop import NodeClock, NodeLoop

CLUSTER = "cluster"
START_MS = 10_000
"""As in `etcd_backend`."""

CALL_MS = 1_000
"""How long a broker waits for a controller."""
ATTEMPTS = 2


class Answer(NamedTuple):
    """The answer of a controller."""

    code: int
    state: BrokerSet | None = None
    alive: bool = False
    """Whether the master is alive, in the answer to a registration."""

    @property
    def ok(self) -> bool:
        return self.code == ResponseCode.SUCCESS


class ControllerRules(NamedTuple):
    """The rules of controllers and etcd, and the classes under test."""

    elect: Callable[..., ControllerDecision] = decisions.elect
    alter: Callable[..., ControllerDecision] = decisions.alter_in_sync
    compares: bool = True
    """Whether a swap compares the version."""
    states: type[StoredBrokerSetStates] = StoredBrokerSetStates
    view: type[View] = View
    reports: type[Reports] = Reports
    liveness: type[ReportedLiveness] = ReportedLiveness


class StateFile:
    """The file of a controller that has no etcd. Its disk is never lost."""

    def __init__(self, changed: Callable[[BrokerSet | None], None]) -> None:
        self.state: BrokerSet | None = None
        self.version = 0
        self.changed = changed


class FileStoreModel:
    """As `FileStore`: a write takes a while, and is durable if the process ends meanwhile."""

    def __init__(self, file: StateFile, loop: NodeLoop, *, compares: bool) -> None:
        self._file = file
        self._loop = loop
        self._compares = compares
        self._writing = asyncio.Lock()

    async def names(self) -> Iterable[str]:
        return [state.name for state in self.all_last_seen()]

    async def read(self, name: str) -> Versioned:
        return Versioned(self._file.state, self._file.version)

    async def read_many(self, names: Iterable[str]) -> Mapping[str, Versioned]:
        return {name: await self.read(name) for name in names}

    def last_seen(self, name: str) -> BrokerSet | None:
        return self._file.state

    def all_last_seen(self) -> Iterable[BrokerSet]:
        return [] if self._file.state is None else [self._file.state]

    async def replace(self, name: str, state: BrokerSet | None, version: int) -> bool:
        async with self._writing:
            if self._compares and self._file.version != version:
                return False
            written, world = self._loop.create_future(), self._loop.world

            def write() -> None:
                self._file.version += 1
                self._file.state = state
                self._file.changed(state)
                world.at(0, lambda: self._loop.enter(lambda: written.set_result(None)), node)

            node = self._loop.node
            world.at(world.rng.choice((1, 1, 5, 50)), write)
            await written
            return True


class Dials(ProcessCheck):
    """Dials addresses in the simulated network."""

    def __init__(self, controller: Controller, loop: NodeLoop) -> None:
        super().__init__(NodeClock(loop))
        self._controller = controller
        self._loop = loop

    async def dial(self, address: str) -> bool | None:
        """An address that refuses connections is that of a process that has ended; a machine
        without power does not answer. Sometimes a device in between refuses connections."""
        controller, world = self._controller, self._loop.world
        answered = self._loop.create_future()

        def answer(accepted: bool | None) -> None:
            if not answered.done():
                self._loop.enter(lambda: answered.set_result(accepted))

        def after(accepted: bool | None) -> Callable[[], None]:
            return lambda: world.at(0, lambda: answer(accepted), controller)

        if address in controller.refused_wrongly:
            if world.now_ms >= controller.refused_wrongly[address]:
                del controller.refused_wrongly[address]
                world.at(1, lambda: answer(False), controller)
        elif not world.blocked(broker := controller.brokers[address], controller):
            silent = not broker.up and broker.power_lost  # type: ignore[attr-defined]
            world.send(controller, broker, after(True), after(None if silent else False))
        world.at(DIAL_MS, lambda: answer(None), controller)
        return cast("bool | None", await answered)


class NotificationsModel:
    """As `Notifications`: one dials the broker, and may be very late."""

    def __init__(self, controller: Controller, world: World) -> None:
        self._controller = controller
        self._world = world

    def notify(self, address: str, state: BrokerSet) -> None:
        world, broker, told = self._world, self._controller.brokers[address], set_state(state)
        self._controller.told.append(told)
        late_ms = world.rng.randint(0, 15_000) if world.rng.random() < world.slow * 3 else 0
        world.at(
            late_ms,
            lambda: world.send(self._controller, broker, lambda: broker.learn(told)),  # type: ignore[attr-defined]
            self._controller,
        )


class Process:
    """What a controller has while it runs, as `ControllerService` and `EtcdBackend` start it."""

    def __init__(self, controller: Controller, world: World, number: int) -> None:
        self.loop = NodeLoop(world, controller)
        self.watch: Watch | None = None
        self.lease: ControllerLease | None = None
        self.reports: Reports | None = None
        self.states: StoredBrokerSetStates | None = None
        """None until the controller listens."""
        self.local: LocalLiveness
        self._controller = controller
        self._world = world
        self._number = number
        self._clock = NodeClock(self.loop)
        self._tasks: list[asyncio.Task[None]] = []
        self.loop.enter(self._open)

    def _open(self) -> None:
        if self._controller.file is None:
            self._open_etcd(self._controller.etcd)
            return
        compares = self._controller.rules.compares
        self.local = LocalLiveness(self._clock, None, Dials(self._controller, self.loop))
        self._listen(
            FileStoreModel(self._controller.file, self.loop, compares=compares), self.local
        )

    def _open_etcd(self, etcd: Etcd) -> None:
        clock, own, rules = self._clock, self._number, self._controller.rules
        simulated = SimulatedEtcdClient(etcd, self.loop)
        client = cast(EtcdClient, simulated)
        view = rules.view(KEYS, own)
        self.lease = lease = ControllerLease(client, clock)
        self.watch = watch = Watch(
            client, KEYS, view, lease, clock, own=own, address=self._controller.name
        )
        self.reports = reports = rules.reports(client, KEYS, view, lease, clock, own=own)
        liveness = rules.liveness(clock, reports, view, lease)
        self.local = liveness._local
        self.local._processes = Dials(self._controller, self.loop)
        store = EtcdStore(client, KEYS, view, clock, own=own)

        async def load() -> None:
            await watch.read_all()
            await lease.acquire()

        async def start() -> None:
            loading = asyncio.ensure_future(load())
            self._world.at(START_MS, lambda: self.loop.enter(loading.cancel), self._controller)
            await asyncio.wait([loading])
            if not loading.cancelled():
                loading.exception()  # the tasks go on trying
            simulated.call_ms = self._controller.etcd_call_ms
            for work in (
                watch.run(), watch.tick(), lease.run(), reports.run(), liveness.report_deaths(),
            ):  # fmt: skip
                self._tasks.append(asyncio.ensure_future(work))
            self._listen(store, liveness)

        self._tasks.append(asyncio.ensure_future(start()))

    def _listen(self, store: BrokerSetStore, liveness: Liveness) -> None:
        settings = cast(LiveSettings, SimpleNamespace(current=self._controller))
        states = self._controller.rules.states(settings, store, liveness, self._clock)
        states.notifications = cast(
            Notifications, NotificationsModel(self._controller, self._world)
        )
        states.start()
        self.states = states


class Controller(Node):
    """A controller: its process while it is up."""

    def __init__(
        self, index: int, world: World, etcd: Etcd, rules: ControllerRules, file: StateFile | None
    ) -> None:
        super().__init__(f"controller {index}")
        self._world = world
        self.etcd, self.file, self.rules = etcd, file, rules
        self.brokers: dict[str, Node] = {}
        """By address. They have methods `learn` and an attribute `power_lost`."""
        self.told: list[SetState] = []
        """All notifications."""
        rng = world.rng
        self.early_death = rng.choice((0.0, 0.0, 0.01))
        """How probable it is, at each scan, that a replica is taken for dead."""
        self.refused_wrongly: dict[str, int] = {}
        """Addresses that seem to refuse connections, from a time on."""
        self.etcd_call_ms = rng.choice((900, 3_000, 10_000))
        self.unclean_elections = False
        self.scan_ms = rng.choice((250, 500))
        self.start()

    @property
    def controller(self) -> Controller:
        """The settings of a controller are read here."""
        return self

    def start(self) -> None:
        self.up = True
        self._closed: set[ClientId] = set()
        self._world.every(self.scan_ms, self._doubt, self)
        self.process = Process(self, self._world, self._world.rng.randint(1, 2**60))

    def end(self) -> None:
        super().end()
        self.process.loop.end()

    # --- requests; the answers are of the type Answer

    def heartbeat(
        self,
        client: ClientId,
        replica_id: int,
        address: str,
        live: LiveReplica,
        timeout_ms: int,
        reply: Reply,
    ) -> None:
        rng, states = self._world.rng, self.process.states
        if states is None or client in self._closed:
            return
        if self.early_death and rng.random() < 0.02:
            timeout_ms += rng.randint(0, 5_000)
        beat = Heartbeat(NAME, replica_id, address, live, timeout_ms, client)

        def note() -> None:
            isolated = states.heartbeat(beat)
            if isolated:
                self._world.events["isolated"] += 1
            reply(Answer(ResponseCode.SYSTEM_BUSY if isolated else ResponseCode.SUCCESS))

        self.process.loop.enter(note)

    def has_closed(self, client: ClientId) -> bool:
        """Whether a connection is closed here."""
        return client in self._closed

    def disconnected(self, client: ClientId) -> None:
        """The connection of a broker is closed."""
        self._closed.add(client)
        states = self.process.states
        if states is not None:
            self.process.loop.enter(lambda: states.disconnected(client))

    def next_id(self, reply: Reply) -> None:
        def found(state: BrokerSet | None) -> None:
            reply((decisions.next_id(state),))

        self._read(found, reply)

    def replica_info(self, reply: Reply) -> None:
        self._read(lambda state: reply(Answer(ResponseCode.SUCCESS, state)), reply)

    def apply_id(self, replica_id: int, check_code: str, reply: Reply) -> None:
        self._decide(
            lambda state, living: decisions.apply_id(state, CLUSTER, NAME, replica_id, check_code),
            reply,
        )

    def register(self, replica_id: int, address: str, reply: Reply) -> None:
        alive: list[bool] = []

        def decide(state: BrokerSet | None, living: Living) -> ControllerDecision:
            alive[:] = [state is not None and state.master_id in living]
            return decisions.register(state, NAME, living, replica_id, address)

        def with_alive(answer: Any) -> None:
            reply(answer._replace(alive=bool(alive and alive[0])))

        self._decide(decide, with_alive)

    def elect(self, asking: int, reply: Reply, *, designated: bool = False) -> None:
        unclean, elect = self.unclean_elections, self.rules.elect
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
        alter = self.rules.alter
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

    def _decide(self, decide: Decide, reply: Reply) -> None:
        states = self.process.states
        if states is None:
            return

        def counted(state: BrokerSet | None, living: Living) -> ControllerDecision:
            if any(live.presumed for live in living.values()):
                self._world.events["master presumed"] += 1
            return decide(state, living)

        def decided(task: asyncio.Task[ControllerDecision]) -> None:
            decision = _result(task)
            if decision is None:
                reply(Answer(ResponseCode.SYSTEM_ERROR))
            else:
                reply(Answer(decision.code, decision.state))

        self.process.loop.enter(lambda: states.decide(NAME, counted).add_done_callback(decided))

    def _read(self, found: Callable[[BrokerSet | None], None], reply: Reply) -> None:
        states = self.process.states
        if states is None:
            return

        def read(task: asyncio.Task[Any]) -> None:
            states = _result(task)
            if states is None:
                reply(Answer(ResponseCode.SYSTEM_ERROR))
            else:
                found(states[NAME][0] if NAME in states else None)

        self.process.loop.enter(lambda: states.read([NAME]).add_done_callback(read))

    # --- mistakes

    def _doubt(self) -> None:
        """A living replica may be taken for one whose process has ended."""
        world = self._world
        if self.early_death and world.rng.random() < self.early_death:
            heard = sorted(self.process.local.last_seen(NAME))
            if heard:
                self.refuse_wrongly(world.rng.choice(heard), 0)

    def refuse_wrongly(self, replica_id: int, delay_ms: int) -> None:
        """The connection of a replica is closed, and its address refuses connections once, after a
        while; before that it does not answer. A device in between does that."""
        found = self.process.local._replicas.find(ReplicaKey(NAME, replica_id))
        if found is not None and found.reachable:
            self._world.events["taken for dead"] += 1
            self.refused_wrongly[found.address] = self._world.now_ms + delay_ms
            self.disconnected(found.client)


def _result(task: asyncio.Task[Any]) -> Any:
    """What a task has returned; None if it has failed with an error for the client."""
    try:
        return task.result()
    except PenstockError:
        return None


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
