"""kill -9 of a master under a controller while every kind of message flows.

What test_kinds.py says of a broker that starts again holds at the next master too: what was
acknowledged arrives, at least once; nothing comes before its time; what was rolled back never
comes; what was seen in a queue stays where it was. In addition:

* A group goes on at an offset that it has committed, and loses at most what no slave had yet.
* A message in flight comes back after its invisible time, and not if it was acknowledged before.
* A queue lock of the old master is taken anew, by one consumer, and the queue stays in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PeerError
from penstock.wire.codes import ResponseCode
from tests.compat import clusters, penstock
from tests.compat.java_session import eventually
from tests.compat.test_controller import NAME, Servers
from tests.depth import rounds
from tests.faults.driver import PAUSE_S, Driver
from tests.faults.group_clients import GroupOffset, OrderedConsumer, OrderedQueue, Popper
from tests.faults.test_kinds import (
    ARRIVE_S,
    KINDS,
    SETTINGS,
    Kind,
    Load,
    check,
    check_order,
    expected,
    send_plain,
)

REPLICAS = 3
KILLS = rounds(ci=1, proof=20)
MODES = ["ASYNC_FLUSH", "SYNC_FLUSH"][: rounds(ci=1, proof=2)]
LEAST = 3
"""How often each kind of message must have got on between two kills."""
HEARTBEAT_S = 0.5
ORDERED = Kind("ordered", send_plain, in_order=True)
POPPED = Kind("popped", send_plain, in_order=False)
MEMBERS = ("first", "second")
REFUSED = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    }
)
"""Responses of a broker that is not the master, or not long enough to acknowledge anything."""


class Failovers:
    """Messages of every kind, and kills of the master."""

    def __init__(self, servers: Servers, seed: str) -> None:
        self.queue = OrderedQueue(ORDERED.name)
        self._servers = servers
        self._rng = random.Random(seed)
        self._master: str = servers.await_in_sync(REPLICAS)["masterAddress"]
        self.driver = driver = Driver(self._master, seed, refused=REFUSED)
        self._load = Load(driver)
        self._offset = GroupOffset(driver, ORDERED.name)
        self.popper = Popper(driver, servers.names.address, POPPED.name)

    async def run(self) -> None:
        await self.driver.broker_is_up()
        self._load.start()
        for kind in (ORDERED, POPPED):
            self._load.send(kind, 0)
        for name in MEMBERS:
            self.driver.start(OrderedConsumer(self.driver, name, self.queue).run())
        self.driver.start(self.popper.run())
        self.driver.start(self._stay_registered())
        for _ in range(KILLS):
            await self._everything_gets_on()
            await asyncio.sleep(self._rng.uniform(0, 1))
            await self._fail_over()
        await self._everything_gets_on()
        await self._load.end()
        await self._until_all_came(POPPED, self.popper.done)
        await self._until_all_came(ORDERED, self._consumed)
        await self.driver.close()

    async def _until_all_came(self, kind: Kind, came: Callable[[], set[str]]) -> None:
        wanted = expected(self.driver.history, kind)
        assert wanted
        await self._until(lambda: wanted <= came())

    def _consumed(self) -> set[str]:
        return {one.name for one in self.queue.got}

    async def _stay_registered(self) -> None:
        """A new master closes the connections of the time when it was a slave."""
        while True:
            with contextlib.suppress(PeerError):
                await self.driver.send_heartbeat()
            await asyncio.sleep(HEARTBEAT_S)

    async def _fail_over(self) -> None:
        old = self._servers.brokers[self._master]
        await self._offset_is_copied()
        await self._until(lambda: self.driver.life in self.queue.owners)
        await self._until(lambda: bool(self.popper.in_flight()))
        self.driver.broker_dies()
        await asyncio.to_thread(old.kill)
        self._master = await asyncio.to_thread(self._other_master)
        await self._go_on()
        await asyncio.to_thread(old.start)
        await asyncio.to_thread(self._servers.await_in_sync, REPLICAS)
        self.driver.check()

    async def _offset_is_copied(self) -> None:
        """Wait until both slaves have an offset of this life."""
        began = self.queue.end
        slaves = [address for address in self._servers.brokers if address != self._master]
        async with asyncio.timeout(ARRIVE_S):
            while (copied := min([await self._offset.read_at(one) for one in slaves])) <= began:
                await asyncio.sleep(PAUSE_S)
        self.queue.kept = copied

    def _other_master(self) -> str:
        def elected() -> str:
            found: str = self._servers.replicas().get("masterAddress", "")
            return "" if found == self._master else found

        found = eventually(elected)
        assert found, "no other replica was elected"
        return found

    async def _go_on(self) -> None:
        """At the new master, which may be starting still."""
        async with asyncio.timeout(ARRIVE_S):
            while True:
                with contextlib.suppress(PeerError):
                    await self.driver.broker_is_up(self._master)
                    return
                await asyncio.sleep(PAUSE_S)

    async def _everything_gets_on(self) -> None:
        before = self._progress()

        def gets_on() -> bool:
            return all(now >= before[what] + LEAST for what, now in self._progress().items())

        await self._until(gets_on)

    async def _until(self, holds: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(ARRIVE_S):
                while not holds():
                    self.driver.check()
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            raise AssertionError(f"stuck: {self._progress()}") from None

    def _progress(self) -> dict[str, int]:
        """How often each kind of message has got on."""
        history = self.driver.history
        counts = dict.fromkeys([kind.name for kind in (*KINDS, ORDERED, POPPED)], 0)
        for name, sent in history.sent.items():
            counts[name.partition("-")[0]] += sent.acked
        return counts | {
            "sent back": sum(one.acked for one in history.sent_back.values()),
            "given up": sum(one.acked for one in history.given_up.values()),
            "checked": history.checks,
            "consumed in order": len(self.queue.got),
            "popped and acknowledged": len(self.popper.done()),
        }


@pytest.fixture(params=MODES)
def servers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Servers]:
    settings: dict[str, Any] = {
        **SETTINGS,
        "brokerName": NAME,
        "enableControllerMode": True,
        "haSendHeartbeatInterval": 200,
        "flushDiskType": request.param,
    }
    with ExitStack() as stack:
        names = stack.enter_context(penstock.NameServer(tmp_path / "names"))
        controller = stack.enter_context(penstock.Controller(tmp_path / "controller"))
        brokers = [
            penstock.Broker(
                tmp_path / f"broker-{number}",
                tmp_path / f"store-{number}",
                names.address,
                controllerAddr=controller.address,
                **settings,
            )
            for number in range(REPLICAS)
        ]
        for broker in brokers:
            stack.callback(broker.kill)
            broker.begin()
        for broker in brokers:
            broker.await_ready()
        yield Servers(names, controller, {broker.address: broker for broker in brokers})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(clusters.APACHE, reason="all servers are ours")
def test_every_kind_of_message_goes_on_at_the_next_master(servers: Servers) -> None:
    failovers = Failovers(servers, "failovers")
    asyncio.run(failovers.run())
    check(failovers.driver.history, "failover")
    check_order(failovers.queue.got, (ORDERED.name, 0))
    assert len(failovers.queue.locked) == KILLS + 1, "the queue was not locked at every master"
    failovers.popper.check()
    again = sum(len(pops) > 1 for pops in failovers.popper.pops.values())
    print(
        f"{len(failovers.queue.got)} in order, {len(failovers.popper.pops)} popped, {again} again"
    )
