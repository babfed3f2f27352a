"""Which replicas a controller takes for dead, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.controller.broker_set import Heartbeat, LiveReplica
from penstock.errors import SystemBusy
from penstock.server.controller import living_replicas
from penstock.server.controller.liveness import GRACE_MS, REFUSED, TICK_MS, LocalLiveness
from penstock.server.controller.living_replicas import ReplicaKey
from penstock.server.controller.process_check import ProcessCheck
from penstock.testing.virtual_clock import VirtualClock

NAME = "b"
FIRST = ReplicaKey(NAME, 1)
TIMEOUT_MS = 3_000


class FakeProcesses(ProcessCheck):
    """Addresses by what a dial finds: True listens, False refuses, None neither."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.found: dict[str, bool | None] = {}
        self.dials: list[str] = []

    async def dial(self, address: str) -> bool | None:
        self.dials.append(address)
        await asyncio.sleep(0)
        return self.found.get(address, True)


class SharedRecords:
    """What other controllers know."""

    def __init__(self) -> None:
        self.number = 1
        self.forgotten: list[ReplicaKey] = []

    async def revision(self, key: ReplicaKey) -> int:
        return self.number

    async def forget(self, key: ReplicaKey, revision: int) -> bool:
        if revision == self.number:
            self.forgotten.append(key)
        return revision == self.number

    def lost(self, key: ReplicaKey) -> None:
        self.forgotten.append(key)


class Fixture:
    """A liveness, its clock and the processes of the brokers."""

    def __init__(self, shared: SharedRecords | None = None) -> None:
        self.clock = VirtualClock()
        self.processes = FakeProcesses(self.clock)
        self.liveness = LocalLiveness(self.clock, shared, self.processes)

    def heartbeat(self, client: int = 1, replica_id: int = 1, timeout_ms: int = TIMEOUT_MS) -> None:
        address = f"host-{replica_id}:1"
        self.liveness.heartbeat(
            Heartbeat(NAME, replica_id, address, LiveReplica(epoch=client), timeout_ms, client)
        )

    async def elapse(self, ms: int) -> None:
        for _ in range(0, ms, TICK_MS):
            await self.clock.elapse(TICK_MS)
            self.liveness.tick()

    def deaths(self) -> list[tuple[int, str]]:
        found = []
        while not self.liveness.deaths.empty():
            death = self.liveness.deaths.get_nowait()
            found.append((death.key.replica_id, death.why))
        return found


def run(
    main: Callable[[Fixture], Coroutine[Any, Any, None]], shared: SharedRecords | None = None
) -> None:
    async def with_fixture() -> None:
        fixture = Fixture(shared)
        try:
            await main(fixture)
        finally:
            await fixture.liveness.close()

    asyncio.run(with_fixture())


def test_a_replica_without_heartbeats_is_dead_after_its_own_timeout() -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat()
        f.heartbeat(client=2, replica_id=2, timeout_ms=10_000)
        await f.elapse(TIMEOUT_MS - TICK_MS)
        assert sorted(await f.liveness.living(NAME)) == [1, 2]
        assert f.deaths() == []
        await f.elapse(TICK_MS)
        assert sorted(await f.liveness.living(NAME)) == [2]
        assert f.deaths() == [(1, f"no heartbeat for {TIMEOUT_MS} ms")]
        assert f.liveness.is_dead(FIRST)
        f.heartbeat()
        assert f.liveness.is_alive(FIRST)
        assert not f.liveness.is_dead(FIRST)

    run(main)


def test_a_process_that_has_ended_is_dead_at_once() -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.processes.found["host-1:1"] = False
        f.liveness.disconnected(1)
        await f.clock.elapse(0)
        assert f.deaths() == [(1, REFUSED)]
        assert not f.liveness.is_alive(FIRST)

    run(main)


def test_a_process_that_ends_slowly_is_dialed_again() -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.liveness.disconnected(1)
        await f.elapse(500)
        assert f.deaths() == []
        f.processes.found["host-1:1"] = False
        await f.elapse(500)
        assert f.deaths() == [(1, REFUSED)]

    run(main)


@pytest.mark.parametrize("found", [True, None])
def test_a_closed_connection_alone_kills_nobody(found: bool | None) -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.processes.found["host-1:1"] = found
        f.liveness.disconnected(1)
        await f.elapse(TIMEOUT_MS - 2 * TICK_MS)
        assert f.deaths() == []
        await f.elapse(TICK_MS)
        assert f.deaths() == [(1, f"no heartbeat for {TIMEOUT_MS} ms")]

    run(main)


def test_the_close_of_an_old_connection_means_nothing() -> None:
    """Apache's controller evicts a healthy master then (apache/rocketmq#11045)."""

    async def main(f: Fixture) -> None:
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.heartbeat(client=2)
        await f.elapse(TICK_MS)
        f.processes.found["host-1:1"] = False
        f.liveness.disconnected(1)
        await f.elapse(TICK_MS)
        assert f.deaths() == []

    run(main)


def test_a_heartbeat_on_a_new_connection_ends_the_check() -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.liveness.disconnected(1)
        await f.elapse(TICK_MS)
        f.heartbeat(client=2)
        await f.elapse(500)
        f.processes.found["host-1:1"] = False
        dials = len(f.processes.dials)
        await f.elapse(1_000)
        assert len(f.processes.dials) == dials
        assert f.deaths() == []

    run(main)


def test_a_refused_connection_counts_only_if_the_address_was_reachable_before() -> None:
    """It may be an address that is valid for others only."""

    async def main(f: Fixture) -> None:
        f.processes.found["host-1:1"] = False
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.liveness.disconnected(1)
        await f.elapse(TICK_MS)
        assert f.deaths() == []

    run(main)


def test_a_broker_may_send_heartbeats_before_it_listens() -> None:
    """Apache's brokers do."""

    async def main(f: Fixture) -> None:
        f.processes.found["host-1:1"] = False
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.processes.found["host-1:1"] = True
        await f.elapse(1_000)
        f.processes.found["host-1:1"] = False
        f.liveness.disconnected(1)
        await f.elapse(TICK_MS)
        assert f.deaths() == [(1, REFUSED)]

    run(main)


def test_a_replica_from_which_another_controller_has_heard_since_is_not_dead() -> None:
    shared = SharedRecords()

    async def main(f: Fixture) -> None:
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.liveness.disconnected(1)
        await f.elapse(TICK_MS)
        shared.number += 1  # the broker was started again and has reached another controller
        f.processes.found["host-1:1"] = False
        await f.elapse(1_000)
        assert f.deaths() == []
        assert shared.forgotten == []

    run(main, shared)


def test_all_controllers_are_told_of_a_dead_process() -> None:
    shared = SharedRecords()

    async def main(f: Fixture) -> None:
        f.heartbeat(client=1)
        await f.elapse(TICK_MS)
        f.processes.found["host-1:1"] = False
        f.liveness.disconnected(1)
        await f.clock.elapse(0)
        assert shared.forgotten == [FIRST]
        assert f.deaths() == [(1, REFUSED)]

    run(main, shared)


def test_time_in_which_the_controller_did_not_run_does_not_count() -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat()
        await f.elapse(TICK_MS)
        await f.clock.elapse(60_000)  # without a tick
        f.liveness.tick()
        assert f.deaths() == []
        await f.elapse(TIMEOUT_MS)
        assert len(f.deaths()) == 1

    run(main)


def test_a_setting_of_the_clock_does_not_count() -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat()
        f.clock.set_by(3_600_000)
        await f.elapse(TIMEOUT_MS - TICK_MS)
        assert f.deaths() == []

    run(main)


# --- after the start


def test_an_unknown_replica_is_not_dead_after_the_start() -> None:
    async def main(f: Fixture) -> None:
        assert not f.liveness.is_dead(FIRST)
        await f.elapse(GRACE_MS)
        assert f.liveness.is_dead(FIRST)

    run(main)


def test_an_unknown_replica_whose_address_refuses_is_dead_soon() -> None:
    async def main(f: Fixture) -> None:
        f.liveness.suspect(FIRST, "host-1:1")
        assert f.processes.dials == []  # its first heartbeat may be on its way
        await f.elapse(2_000)
        for _ in range(10):
            f.liveness.suspect(FIRST, "host-1:1")
        await f.elapse(TICK_MS)
        assert not f.liveness.is_dead(FIRST)
        f.processes.found["host-1:1"] = False
        await f.elapse(1_000)
        assert f.deaths() == [(1, REFUSED)]
        assert f.liveness.is_dead(FIRST)

    run(main)


# --- limits


def test_the_number_of_replicas_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(living_replicas, "REPLICAS_MAX", 2)

    async def main(f: Fixture) -> None:
        f.heartbeat(replica_id=1)
        f.heartbeat(replica_id=2)
        f.heartbeat(replica_id=1)
        with pytest.raises(SystemBusy, match="limit is 2"):
            f.heartbeat(replica_id=3)

    run(main)
