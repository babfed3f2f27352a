"""Controllers over a real etcd in this process, and what stands between them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import msgspec

from penstock.clock import LoopClock
from penstock.config import ControllerConfig, LiveSettings, Settings
from penstock.controller.broker_set import BrokerSet, Living
from penstock.controller.decisions import ControllerDecision
from penstock.server.controller.broker_set_states import StoredBrokerSetStates
from penstock.server.controller.etcd.etcd_backend import EtcdBackend
from tests.client.proxy import Proxy, _Pair

WAIT_S = 20.0


class LossyProxy(Proxy):
    """A proxy that loses answers: requests arrive, and the connection is reset instead."""

    def __init__(self, target: str, *, lost: float, seed: int) -> None:
        super().__init__(target)
        self._lost = lost
        self._random = random.Random(seed)

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: _Pair
    ) -> None:
        try:
            async for piece in self._pieces(source):
                if sink is pair.near and self._random.random() < self._lost:
                    self._cut(pair)
                    return
                sink.write(piece)
                await sink.drain()
            sink.write_eof()
        except (OSError, RuntimeError):
            pair.close()


class BareController:
    """A controller without a port."""

    def __init__(self, config: ControllerConfig, number: int = 1) -> None:
        self.backend = EtcdBackend(config, LoopClock(), f"controller-{number}:1")
        self.store, self.liveness = self.backend.store, self.backend.liveness
        self.states = StoredBrokerSetStates(
            LiveSettings(Settings(controller=config), "controller"),
            self.store,
            self.liveness,
            LoopClock(),
        )

    async def count(self, name: str) -> None:
        """One decision: the next id of a broker set is one higher."""

        def decide(state: BrokerSet | None, living: Living) -> ControllerDecision:
            state = state or BrokerSet("c", name, {}, 0)
            return ControllerDecision(
                msgspec.structs.replace(state, next_id=state.next_id + 1), changed=True
            )

        await self.states.decide(name, decide)

    async def counted(self, name: str) -> int:
        state = (await self.store.read(name)).state
        return 0 if state is None else state.next_id


@contextlib.asynccontextmanager
async def controller(
    endpoints: str, number: int = 1, *, elections: bool = False, **config: object
) -> AsyncIterator[BareController]:
    """A controller that has loaded its state; with `elections` it looks for dead masters."""
    settings = ControllerConfig(etcd=endpoints, **config)  # type: ignore[arg-type]
    tested = BareController(settings, number)
    await tested.backend.start()
    if elections:
        tested.states.start()
    try:
        yield tested
    finally:
        await tested.states.close()
        await tested.backend.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.01)
    assert holds(), what
