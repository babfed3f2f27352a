"""Carries out the decisions of a controller: compare-and-swap, elections, notifications.

Several controllers may decide about a broker set at the same time. Each reads the state and the
living replicas, decides, and writes if the state has not changed; otherwise it decides again. Only
the one that has written an election tells the replicas.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.clock import Clock, pause
from penstock.controller import decisions
from penstock.controller.broker_set import BrokerSet, Heartbeat, LiveReplica, Living
from penstock.errors import PenstockError, SystemBusy
from penstock.server.background import TaskSet
from penstock.server.controller.liveness import TICK_MS, Liveness
from penstock.server.controller.living_replicas import ReplicaKey
from penstock.server.controller.notifications import Notifications
from penstock.server.controller.unchanged_logs import UnchangedLogs
from penstock.transport.peer import Sign

if TYPE_CHECKING:
    import ssl as tls

    from penstock.config import LiveSettings
    from penstock.controller.decisions import ControllerDecision
    from penstock.rpc.answers import ClientId
    from penstock.server.controller.broker_set_store import BrokerSetStore

log = logging.getLogger(__name__)

CONFLICT_MS = 20
"""The longest time that a decision waits after several conflicts with other controllers."""
CONFLICTS = 3

T = TypeVar("T")
Decide = Callable[[BrokerSet | None, Living], "ControllerDecision"]
Found = dict[str, tuple[BrokerSet, Living]]


class StoredBrokerSetStates:
    """The states of broker sets in a store, with the living replicas of each."""

    def __init__(
        self,
        settings: LiveSettings,
        store: BrokerSetStore,
        liveness: Liveness,
        clock: Clock,
        *,
        sign: Sign | None = None,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._liveness = liveness
        self._clock = clock
        self.notifications = Notifications(clock, self._is_current, sign=sign, ssl=ssl)
        self._logs = UnchangedLogs()
        self._tasks = TaskSet()
        self._replacing: set[str] = set()
        """Broker sets whose master is being replaced."""
        self.elections = 0
        """Elections that this controller has decided."""
        self.conflicts = 0
        """Decisions that were made again, because another one came first."""

    def start(self) -> None:
        """Begin to look for dead masters."""
        for work in (self._tick(), self._scan(), self._replace_dead()):
            self._tasks.spawn(work)

    async def close(self) -> None:
        await self._tasks.close()
        await self.notifications.close()

    def without_master(self) -> int:
        """The number of broker sets that have had a master and have none."""
        states = self._store.all_last_seen()
        return sum(state.master_id is None and not state.never_elected for state in states)

    # --- what handlers call

    def decide(self, name: str, decide: Decide) -> asyncio.Task[ControllerDecision]:
        """Decide until the state has not changed meanwhile."""
        return self._tasks.spawn(self._for_client(self._decide(name, decide)))

    def read(self, names: Iterable[str]) -> asyncio.Task[Found]:
        return self._tasks.spawn(self._for_client(self._read(names)))

    def heartbeat(self, heartbeat: Heartbeat) -> str:
        self._liveness.heartbeat(heartbeat)
        return self._liveness.isolated()

    def disconnected(self, client: ClientId) -> None:
        self._liveness.disconnected(client)

    async def _for_client(self, work: Coroutine[Any, Any, T]) -> T:
        """Work for which a client waits."""
        try:
            return await work
        except asyncio.CancelledError:
            raise SystemBusy("the controller stops", hint="ask another controller") from None

    async def _decide(self, name: str, decide: Decide) -> ControllerDecision:
        conflicts = 0
        while True:
            (state, version), living = await asyncio.gather(
                self._store.read(name), self._liveness.living(name)
            )
            known = self._with_presumed(state, living)
            decision = decide(state, self._logs.mark(state, known, self._clock.monotonic_ms()))
            if not decision.changed:
                return decision
            if await self._store.replace(name, decision.state, version):
                if decision.elected and decision.state is not None:
                    self._elected(decision.state, living)
                return decision
            self.conflicts += 1
            conflicts += 1
            if conflicts >= CONFLICTS:
                await pause(self._clock, random.randint(1, CONFLICT_MS))

    def _with_presumed(self, state: BrokerSet | None, living: Living) -> Living:
        """With the master, if this controller can't know yet whether it is alive."""
        master_id = None if state is None else state.master_id
        if state is None or master_id is None or master_id in living:
            return living
        if self._liveness.is_dead(ReplicaKey(state.name, master_id)):
            return living
        return {**living, master_id: LiveReplica(presumed=True)}

    async def _read(self, names: Iterable[str]) -> Found:
        found = await self._store.read_many(names)
        return {
            name: (state, self._liveness.last_seen(name))
            for name, (state, _) in found.items()
            if state is not None
        }

    # --- elections

    async def _tick(self) -> None:
        while True:
            self._liveness.tick()
            await pause(self._clock, TICK_MS)

    async def _replace_dead(self) -> None:
        while True:
            key = (await self._liveness.deaths.get()).key
            state = self._store.last_seen(key.name)
            if state is not None and state.master_id == key.replica_id:
                self._replace_soon(state)

    async def _scan(self) -> None:
        """Find dead masters of which nothing was reported, or that could not be replaced."""
        while True:
            for state in self._store.all_last_seen():
                self._look_at(state)
            await pause(self._clock, self._settings.current.controller.scan_ms)

    def _look_at(self, state: BrokerSet) -> None:
        if state.master_id is None:
            members = (ReplicaKey(state.name, one) for one in state.in_sync)
            if not state.never_elected and any(map(self._liveness.is_alive, members)):
                self._replace_soon(state)
            return
        key = ReplicaKey(state.name, state.master_id)
        if self._liveness.is_alive(key):
            return
        if self._liveness.is_dead(key):
            self._replace_soon(state)
        elif state.master_address is not None:
            self._liveness.suspect(key, state.master_address)

    def _replace_soon(self, state: BrokerSet) -> None:
        if state.name not in self._replacing and self._liveness.last_seen(state.name):
            self._replacing.add(state.name)
            self._tasks.spawn(self._replace_dead_master(state.name))

    async def _replace_dead_master(self, name: str) -> None:
        unclean = self._settings.current.controller.unclean_elections

        def decide(state: BrokerSet | None, living: Living) -> ControllerDecision:
            master_id = None if state is None else state.master_id
            why = "" if master_id is None else self._liveness.why_dead(ReplicaKey(name, master_id))
            now_ms = self._clock.now_ms()
            return decisions.elect(
                state, name, living, now_ms=now_ms, unclean=unclean, why_dead=why
            )

        try:
            decision = await self._decide(name, decide)
        except PenstockError as error:
            log.warning("can't replace the dead master of %s: %s", name, error)
            return
        finally:
            self._replacing.discard(name)
        if decision.changed and not decision.elected:
            log.error("%s", decision.remark)

    def _elected(self, state: BrokerSet, living: Living) -> None:
        self.elections += 1
        log.warning(
            "replica %s (%s) is the master of %s, epoch %d: %s",
            state.master_id,
            state.master_address,
            state.name,
            state.master_epoch,
            state.history[-1].reason,
        )
        for one, replica in state.replicas.items():
            if one in living:
                self.notifications.notify(replica.address, state)

    def _is_current(self, state: BrokerSet) -> bool:
        seen = self._store.last_seen(state.name)
        return seen is not None and seen.master_epoch <= state.master_epoch
