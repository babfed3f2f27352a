"""Carries out the decisions of a controller: compare-and-swap, elections, notifications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from penstock.clock import Clock, pause
from penstock.controller import decisions
from penstock.controller.broker_set import BrokerSet, LiveReplica, Living
from penstock.controller.handlers import role_change_body, role_change_fields
from penstock.errors import PenstockError
from penstock.server.controller.living_replicas import LivingReplicas
from penstock.transport.peer import Peer, Sign
from penstock.wire.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    import ssl as tls

    from penstock.config import LiveSettings
    from penstock.controller.decisions import Decision
    from penstock.rpc.answers import ClientId
    from penstock.server.controller.broker_set_store import BrokerSetStore

log = logging.getLogger(__name__)

NOTIFY_MS = 3_000

Decide = Callable[[BrokerSet | None, Living], "Decision"]
Found = dict[str, tuple[BrokerSet, Living]]


class BrokerSetStates:
    """The states of broker sets in a store, with the living replicas of each."""

    def __init__(
        self,
        settings: LiveSettings,
        store: BrokerSetStore,
        clock: Clock,
        *,
        sign: Sign | None = None,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._sign = sign
        self._ssl = ssl
        self._living = LivingReplicas()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.elections = 0

    def start(self) -> None:
        """Begin to look for dead masters."""
        self._spawn(self._scan())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what handlers call

    def decide(self, name: str, decide: Decide) -> asyncio.Task[Decision]:
        """Decide until the state has not changed meanwhile."""
        return self._spawn(self._decide(name, decide))

    def read(self, names: Iterable[str]) -> asyncio.Task[Found]:
        return self._spawn(self._read(names))

    def heartbeat(
        self, name: str, replica_id: int, live: LiveReplica, timeout_ms: int, client: ClientId
    ) -> None:
        until_ms = self._clock.monotonic_ms() + timeout_ms
        if self._living.heartbeat(name, replica_id, live, until_ms, client):
            log.info("replica %d of %s is alive", replica_id, name)

    def disconnected(self, client: ClientId) -> None:
        self._living.disconnected(client, self._clock.monotonic_ms())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _decide(self, name: str, decide: Decide) -> Decision:
        while True:
            state, version = await self._store.read(name)
            decision = decide(state, self._living.of(name))
            if not decision.changed:
                return decision
            if await self._store.replace(name, decision.state, version):
                if decision.elected and decision.state is not None:
                    self._elected(decision.state)
                return decision

    async def _read(self, names: Iterable[str]) -> Found:
        found: Found = {}
        for name in names:
            state = (await self._store.read(name)).state
            if state is not None:
                found[name] = state, self._living.of(name)
        return found

    # --- elections

    async def _scan(self) -> None:
        while True:
            for name, replica_id in self._living.expire(self._clock.monotonic_ms()):
                log.warning("replica %d of %s sends no heartbeats: it is dead", replica_id, name)
            try:
                for name in await self._store.names():
                    await self._replace_dead_master(name)
            except PenstockError as error:
                log.warning("can't look for dead masters: %s", error)
            await pause(self._clock, self._settings.current.controller.scan_ms)

    async def _replace_dead_master(self, name: str) -> None:
        state = (await self._store.read(name)).state
        living = self._living.of(name)
        if state is None or state.master_id is None or state.master_id in living or not living:
            return
        unclean = self._settings.current.controller.unclean_elections
        decision = await self._decide(
            name, lambda state, living: decisions.elect(state, name, living, unclean=unclean)
        )
        if decision.code == ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE:
            log.error("%s", decision.remark)

    def _elected(self, state: BrokerSet) -> None:
        self.elections += 1
        log.warning(
            "replica %s (%s) is the master of %s, epoch %d",
            state.master_id,
            state.master_address,
            state.name,
            state.master_epoch,
        )
        living = self._living.of(state.name)
        for one, replica in state.replicas.items():
            if one in living:
                self._spawn(self._notify(replica.address, state))

    async def _notify(self, address: str, state: BrokerSet) -> None:
        """Tell a replica who is the master. If that fails, it learns it when it asks next."""
        peer = Peer(address, sign=self._sign, ssl=self._ssl)
        try:
            await peer.call(
                RequestCode.NOTIFY_BROKER_ROLE_CHANGED,
                role_change_fields(state),
                role_change_body(state),
                timeout_ms=NOTIFY_MS,
            )
        except PenstockError as error:
            log.warning("can't tell %s who is the master of %s: %s", address, state.name, error)
        finally:
            await peer.close()
