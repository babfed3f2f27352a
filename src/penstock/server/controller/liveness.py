"""Which replicas are alive.

A replica is alive as long as some controller gets its heartbeats. It is dead

- when no heartbeat has arrived within the time that its heartbeats name, or
- when the connection of its newest heartbeat is closed and its address refuses connections: the
  process has ended. This counts only if the controller could connect to the address before;
  otherwise it may simply be wrong from here.

A controller that has just started, or did not run for a while, has missed heartbeats. It does not
take replicas for dead because of that: see `is_dead`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Coroutine
from typing import Any, NamedTuple, Protocol

from penstock.clock import Clock
from penstock.controller.broker_set import HEARTBEAT_MS, Heartbeat, Living
from penstock.rpc.answers import ClientId
from penstock.server.controller.living_replicas import (
    REPLICAS_MAX,
    Heartbeats,
    LivingReplicas,
    ReplicaKey,
)
from penstock.server.controller.process_check import ProcessCheck

log = logging.getLogger(__name__)

GRACE_MS = HEARTBEAT_MS
"""For so long after its start, a controller presumes that a master is alive from which it has not
heard yet."""
FIRST_HEARTBEATS_MS = 2_000
"""After this time the address of such a master is dialed: brokers send heartbeats every second."""
TICK_MS = 100
"""How often `tick` has to be called."""
STALL_MS = 500
"""If it is called later than this, the controller did not run."""
REFUSED = "connection refused"


class Death(NamedTuple):
    """A replica is dead, as far as one controller knows."""

    key: ReplicaKey
    why: str


class Liveness(Protocol):
    """The living replicas of all broker sets."""

    deaths: asyncio.Queue[Death]
    """Replicas that may have to be replaced. The receiver asks `living` before it does that."""

    def heartbeat(self, heartbeat: Heartbeat) -> None: ...

    def isolated(self) -> str:
        """Why this controller may not know what the others have decided; empty if it does. Then it
        confirms no master."""

    def disconnected(self, client: ClientId) -> None:
        """A connection, perhaps of a replica, is closed."""

    async def living(self, name: str) -> Living:
        """The living replicas of a broker set, as all controllers know them now."""

    def last_seen(self, name: str) -> Living:
        """The same without asking anybody; it may be a little old."""

    def is_alive(self, key: ReplicaKey) -> bool:
        """Whether a replica is alive, as last seen."""

    def is_dead(self, key: ReplicaKey) -> bool:
        """Whether a replica that is not alive is dead; otherwise it may be only unknown here."""

    def why_dead(self, key: ReplicaKey) -> str: ...

    def suspect(self, key: ReplicaKey, address: str) -> None:
        """A replica is neither alive nor dead: find out more."""

    def tick(self) -> None:
        """Called every TICK_MS: find what has expired."""

    def count(self) -> int:
        """The number of living replicas."""

    async def close(self) -> None: ...


class SharedLiveness(Protocol):
    """What other controllers know."""

    async def revision(self, key: ReplicaKey) -> int:
        """The number of the last change of what all controllers know of a replica."""

    async def forget(self, key: ReplicaKey, revision: int) -> bool:
        """Let all controllers take a replica for dead; False if one has heard from it since."""

    def lost(self, key: ReplicaKey) -> None:
        """This controller gets no heartbeats of a replica any more."""


class LocalLiveness:
    """A `Liveness` by the heartbeats that this controller gets."""

    def __init__(
        self,
        clock: Clock,
        shared: SharedLiveness | None = None,
        processes: ProcessCheck | None = None,
    ) -> None:
        """`processes` replaces the real check in tests."""
        self.deaths: asyncio.Queue[Death] = asyncio.Queue()
        self._clock = clock
        self._shared = shared
        self._replicas = LivingReplicas()
        self._dead: dict[ReplicaKey, str] = {}
        """Replicas that have died since the start, and why."""
        self._tick_ms = self._clock.monotonic_ms()
        self._started_ms = self._tick_ms
        self._processes = processes or ProcessCheck(clock)
        self._suspected: set[ReplicaKey] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        key = ReplicaKey(heartbeat.name, heartbeat.replica_id)
        now_ms = self._clock.monotonic_ms()
        noted = Heartbeats(
            key,
            heartbeat.address,
            heartbeat.live,
            heartbeat.timeout_ms,
            now_ms + heartbeat.timeout_ms,
            heartbeat.client,
        )
        before = self._replicas.note(noted)
        if before is None:
            self._dead.pop(key, None)
            log.info("%s (%s) is alive", key, heartbeat.address)
        if before is None or before.client != heartbeat.client:
            self._spawn(self._try_address(noted))

    def isolated(self) -> str:
        return ""

    def disconnected(self, client: ClientId) -> None:
        for found in self._replicas.of_client(client):
            if found.reachable:
                self._spawn(self._check_process(found))

    async def living(self, name: str) -> Living:
        return self._replicas.of(name)

    def last_seen(self, name: str) -> Living:
        return self._replicas.of(name)

    def is_alive(self, key: ReplicaKey) -> bool:
        return self._replicas.find(key) is not None

    def is_dead(self, key: ReplicaKey) -> bool:
        return key in self._dead or self._running_ms() >= GRACE_MS

    def why_dead(self, key: ReplicaKey) -> str:
        return self._dead.get(key, "no heartbeats")

    def suspect(self, key: ReplicaKey, address: str) -> None:
        if key not in self._suspected and self._running_ms() >= FIRST_HEARTBEATS_MS:
            self._suspected.add(key)
            self._spawn(self._check_suspect(key, address))

    def tick(self) -> None:
        now_ms = self._clock.monotonic_ms()
        stalled_ms = now_ms - self._tick_ms - TICK_MS
        self._tick_ms = now_ms
        if stalled_ms > STALL_MS:
            log.warning("this controller did not run for %d ms", stalled_ms)
            self._replicas.postpone(stalled_ms)
            self._started_ms += stalled_ms
        for found in self._replicas.expired(now_ms):
            if self._shared is not None:
                self._shared.lost(found.key)
            self._died(found.key, f"no heartbeat for {found.timeout_ms} ms")

    def count(self) -> int:
        return len(self._replicas)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin_grace(self) -> None:
        """Behave as after the start: heartbeats may have been missed."""
        self._started_ms = self._clock.monotonic_ms()

    def heard_elsewhere(self, replicas: Container[ReplicaKey]) -> None:
        """Others hear from these replicas. If they cease to, that alone says nothing about them,
        also if this controller has taken them for dead before."""
        for key in [key for key in self._dead if key in replicas]:
            del self._dead[key]

    def forget_deaths(self, why: str) -> None:
        """Replicas that died for this reason may be alive."""
        for key in [key for key, reason in self._dead.items() if reason == why]:
            del self._dead[key]

    def died(self, key: ReplicaKey, why: str) -> None:
        """A replica is dead; `why` counts if this controller knows no reason of its own."""
        if key not in self._dead:
            self._died(key, why)
        else:
            self.deaths.put_nowait(Death(key, self._dead[key]))

    # --- processes that have ended

    async def _try_address(self, noted: Heartbeats) -> None:
        """Find out whether the address of a replica can be reached."""

        def is_open() -> bool:
            found = self._replicas.find(noted.key)
            return found is not None and found.client == noted.client and not found.reachable

        if await self._processes.has_started(noted.address, is_open):
            found = self._replicas.find(noted.key)
            if found is not None and found.address == noted.address:
                found.reachable = True

    async def _check_process(self, closed: Heartbeats) -> None:
        """The connection of a replica's newest heartbeat is closed."""

        def is_open() -> bool:
            found = self._replicas.find(closed.key)
            return found is not None and found.client == closed.client

        revision = 0 if self._shared is None else await self._shared.revision(closed.key)
        if not await self._processes.has_ended(closed.address, is_open):
            return
        if self._shared is None or await self._shared.forget(closed.key, revision):
            self._replicas.remove(closed)
            self._died(closed.key, REFUSED)

    async def _check_suspect(self, key: ReplicaKey, address: str) -> None:
        def is_open() -> bool:
            return not self.is_alive(key) and not self.is_dead(key)

        try:
            if await self._processes.has_ended(address, is_open):
                self._died(key, REFUSED)
        finally:
            self._suspected.discard(key)

    def _died(self, key: ReplicaKey, why: str) -> None:
        log.warning("%s is dead: %s", key, why)
        if len(self._dead) < REPLICAS_MAX:
            self._dead[key] = why
        self.deaths.put_nowait(Death(key, why))

    def _running_ms(self) -> int:
        """For how long this controller has been running."""
        return self._clock.monotonic_ms() - self._started_ms

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("can't find out whether a replica is alive: %s", error)
