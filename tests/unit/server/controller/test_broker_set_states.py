"""Decisions are carried out once, dead masters are replaced, and replicas are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import pytest

from penstock.config import LiveSettings, Settings
from penstock.controller import decisions
from penstock.controller.broker_set import BrokerSet, Heartbeat, LiveReplica, ReplicaRecord
from penstock.errors import EtcdError
from penstock.server.controller.broker_set_states import StoredBrokerSetStates
from penstock.server.controller.broker_set_store import Versioned
from penstock.server.controller.liveness import GRACE_MS, LocalLiveness
from penstock.server.controller.notifications import PAUSES_MS, Notifications
from penstock.testing.virtual_clock import VirtualClock
from penstock.wire.codes import ResponseCode

from .test_liveness import FakeProcesses

NAME = "b"
TIMEOUT_MS = 3_000


class MemoryStore:
    """A `BrokerSetStore` that other controllers may use, too."""

    def __init__(self) -> None:
        self.states: dict[str, Versioned] = {}
        self.before_replace: list[Callable[[], None]] = []
        self.down = False
        self.reads = 0

    def put(self, state: BrokerSet) -> None:
        version = self.states.get(state.name, Versioned(None, 0)).version + 1
        self.states[state.name] = Versioned(state, version)

    async def names(self) -> Iterable[str]:
        return list(self.states)

    async def read(self, name: str) -> Versioned:
        self.reads += 1
        if self.down:
            raise EtcdError("down")
        await asyncio.sleep(0)
        return self.states.get(name, Versioned(None, 0))

    async def read_many(self, names: Iterable[str]) -> Mapping[str, Versioned]:
        return {name: await self.read(name) for name in names}

    async def replace(self, name: str, state: BrokerSet | None, version: int) -> bool:
        if self.before_replace:
            self.before_replace.pop(0)()
        await asyncio.sleep(0)
        if self.states.get(name, Versioned(None, 0)).version != version:
            return False
        assert state is not None
        self.put(state)
        return True

    def last_seen(self, name: str) -> BrokerSet | None:
        return self.states[name].state if name in self.states else None

    def all_last_seen(self) -> Iterable[BrokerSet]:
        return [found.state for found in self.states.values() if found.state is not None]


class RecordedNotifications(Notifications):
    """Notifications that are not sent."""

    def __init__(self, clock: VirtualClock, is_current: Callable[[BrokerSet], bool]) -> None:
        super().__init__(clock, is_current)
        self.sent: list[tuple[str, int]] = []
        self.failing = False

    async def _call(self, address: str, state: BrokerSet) -> str:
        self.sent.append((address, state.master_epoch))
        return "no answer" if self.failing else ""


def broker_set(master: int | None = 1, in_sync: tuple[int, ...] = (1, 2)) -> BrokerSet:
    replicas = {one: ReplicaRecord(f"host-{one}:1", "") for one in (1, 2, 3)}
    return BrokerSet("c", NAME, replicas, 4, master, 1, in_sync, 1)


class Fixture:
    """A controller over a store."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.store = MemoryStore()
        self.processes = FakeProcesses(self.clock)
        self.liveness = LocalLiveness(self.clock, processes=self.processes)
        self.states = StoredBrokerSetStates(
            LiveSettings(Settings(), "controller"), self.store, self.liveness, self.clock
        )
        self.told = RecordedNotifications(self.clock, self.states._is_current)
        self.states.notifications = self.told
        self.states.start()

    def heartbeats(self, *ids: int) -> None:
        for one in ids:
            live = LiveReplica(max_offset=one)
            beat = Heartbeat(NAME, one, f"host-{one}:1", live, TIMEOUT_MS, one)
            self.states.heartbeat(beat)

    async def live(self, ms: int, *ids: int) -> None:
        """Let time pass while replicas send heartbeats."""
        for _ in range(0, ms, 500):
            self.heartbeats(*ids)
            await self.clock.elapse(500)

    @property
    def state(self) -> BrokerSet:
        found = self.store.last_seen(NAME)
        assert found is not None
        return found


def run(main: Callable[[Fixture], Coroutine[Any, Any, None]]) -> None:
    async def with_fixture() -> None:
        fixture = Fixture()
        try:
            await main(fixture)
        finally:
            await fixture.states.close()
            await fixture.liveness.close()

    asyncio.run(with_fixture())


def test_a_killed_master_is_replaced_at_once() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set())
        await f.live(1_000, 1, 2, 3)
        f.processes.found["host-1:1"] = False
        f.states.disconnected(1)
        await f.clock.elapse(1)
        assert (f.state.master_id, f.state.master_epoch, f.state.in_sync) == (2, 2, (2,))
        assert f.state.history[-1].reason == "replica 1 is dead: connection refused"
        assert f.told.sent == [("host-2:1", 2), ("host-3:1", 2)]
        assert f.states.elections == 1

    run(main)


def test_a_silent_master_is_replaced_after_its_timeout() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set())
        await f.live(1_000, 1, 2)
        await f.live(TIMEOUT_MS - 1_000, 2)
        assert f.state.master_id == 1
        await f.live(1_000, 2)
        assert f.state.master_id == 2
        assert f.state.history[-1].reason == "replica 1 is dead: no heartbeat for 3000 ms"

    run(main)


def test_after_its_start_a_controller_waits_for_the_heartbeats_of_the_master() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set())
        f.heartbeats(2)
        decision = await f.states.decide(
            NAME,
            lambda state, living: decisions.elect(state, NAME, living, now_ms=1, asking=2),
        )
        assert decision.code == ResponseCode.CONTROLLER_MASTER_STILL_EXIST
        await f.live(GRACE_MS - 1_000, 2)
        assert f.state.master_id == 1
        await f.live(2_000, 2)
        assert f.state.master_id == 2

    run(main)


def test_after_its_start_a_controller_finds_a_dead_master_by_its_address() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set())
        f.processes.found["host-1:1"] = False
        await f.live(3_000, 2)
        assert f.state.master_id == 2

    run(main)


def test_without_a_living_member_there_is_no_master_until_one_returns() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set(in_sync=(1,)))
        await f.live(1_000, 1, 2)
        await f.live(TIMEOUT_MS + 1_000, 2)
        assert (f.state.master_id, f.state.in_sync) == (None, (1,))
        assert f.states.without_master() == 1
        assert f.told.sent == []
        await f.live(1_000, 1, 2)
        assert (f.state.master_id, f.state.master_epoch) == (1, 2)
        assert f.states.without_master() == 0

    run(main)


def test_an_election_waits_until_the_store_answers() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set())
        await f.live(1_000, 1, 2)
        f.store.down = True
        await f.live(TIMEOUT_MS + 1_000, 2)
        assert f.state.master_id == 1
        f.store.down = False
        await f.live(1_000, 2)
        assert f.state.master_id == 2

    run(main)


def test_only_the_controller_whose_decision_counts_tells_the_replicas() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set())
        await f.live(1_000, 1, 2, 3)
        other = decisions.elect(
            f.state, NAME, {2: LiveReplica()}, now_ms=f.clock.now_ms(), why_dead="seen by another"
        ).state
        assert other is not None
        f.store.before_replace.append(lambda: f.store.put(other))
        f.processes.found["host-1:1"] = False
        f.states.disconnected(1)
        await f.clock.elapse(1_000)
        assert f.state == other
        assert f.told.sent == []
        assert (f.states.elections, f.states.conflicts) == (0, 1)

    run(main)


def test_a_decision_is_made_again_until_the_state_has_not_changed() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set())
        conflicts = 5
        f.store.before_replace += [lambda: f.store.put(f.state)] * conflicts
        deciding = f.states.decide(
            NAME, lambda state, living: decisions.register(state, NAME, living, 1, "new:1")
        )
        await f.clock.elapse(1_000)
        assert (await deciding).changed
        assert f.state.replicas[1].address == "new:1"
        assert f.states.conflicts == conflicts

    run(main)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_failed_notification_is_repeated_while_the_state_is_current(replaced: bool) -> None:
    async def main(f: Fixture) -> None:
        state = broker_set()
        f.store.put(state)
        f.told.failing = True
        f.told.notify("host-2:1", state)
        await f.clock.elapse(0)
        if replaced:
            newer = decisions.elect(state, NAME, {2: LiveReplica()}, now_ms=1).state
            assert newer is not None
            f.store.put(newer)
        await f.clock.elapse(sum(PAUSES_MS))
        assert len(f.told.sent) == (1 if replaced else 1 + len(PAUSES_MS))
        assert f.told.failures == (0 if replaced else 1)

    run(main)


def test_states_are_read_with_their_living_replicas() -> None:
    async def main(f: Fixture) -> None:
        f.store.put(broker_set())
        f.heartbeats(2)
        found = await f.states.read([NAME, "unknown"])
        assert list(found) == [NAME]
        assert sorted(found[NAME][1]) == [2]

    run(main)
