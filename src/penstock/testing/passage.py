"""How time passes for a broker under test.

It goes from one due message to the next, and at each of them it waits until the connected consumers
have done what they will do about it, so that a retry of a retry falls due at its own time. That
they have is known by asking them, as an administrator would (GET_CONSUMER_RUNNING_INFO), what they
hold. Whoever holds messages and does not go on for PATIENCE_MS, because the test itself has them in
its hands, is not waited for any longer.

What happens between messages does not happen once for every second of three days, but once.
"""

import asyncio
import logging

from penstock.broker.consumers.clients import ConsumerGroup
from penstock.clock import LoopClock, pause
from penstock.errors import PenstockError
from penstock.server.broker_service import BrokerService
from penstock.testing.clock import CREEP_MS, BrokerClock
from penstock.testing.patient import PatientBroker
from penstock.transport.peer import Peer
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumerRunningInfo
from penstock.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

LOOK_MS = 1
"""A broker that was asked nothing for so long is left alone, as far as can be seen."""
PATIENCE_MS = 250
BUSY_MS = 5_000
"""Nor is anybody who always finds something to do: one that sends for each message another one."""
ASK_MS = 1_000


class Passage:
    """Lets time pass for one broker; everything here is called in its loop."""

    def __init__(self, clock: BrokerClock, service: BrokerService, admin: Peer) -> None:
        self._clock = clock
        self._server = service.server
        broker = service.broker
        assert isinstance(broker, PatientBroker)
        self._broker = broker
        self._admin = admin
        self._real = LoopClock()
        self._moving = asyncio.Lock()

    async def move(self, ms: int) -> None:
        """Let so much time pass."""
        async with self._moving:
            await self._settle()
            end_ms = self._clock.now_ms() + ms
            await self._carry_out(self._clock.now_ms())
            while (due_ms := self._next_ms()) < end_ms:
                await self._carry_out(due_ms)
            await self._carry_out(end_ms)
            while (due_ms := self._next_ms()) <= self._clock.now_ms() + CREEP_MS:
                await self._carry_out(due_ms)

    def _next_ms(self) -> int:
        return max(self._broker.next_due(), self._clock.now_ms() + 1)

    async def _carry_out(self, now_ms: int) -> None:
        """It is that late now: do what is due, and wait for what follows from it."""
        until_ms = self._real.monotonic_ms() + BUSY_MS
        while await self._tick(now_ms):
            await self._settle()
            if self._real.monotonic_ms() > until_ms:
                return

    async def _tick(self, now_ms: int) -> bool:
        """Let the broker look what is due by now; whether anything came of it."""
        before = self._done()
        store = self._broker.parts.store
        if not store.disk.threads:
            store.flusher.pump()
        self._clock.pass_to(now_ms)
        self._server.wake_at(now_ms)
        self._clock.pass_to(now_ms)
        await asyncio.sleep(0)
        return self._busy() or self._done() != before

    def _done(self) -> tuple[int, int]:
        """Figures that grow with whatever is done."""
        return self._server.turn.requests, self._broker.parts.store.path.puts

    def _busy(self) -> bool:
        return bool(self._server.carrier.pool_jobs or self._server.carrier.saving)

    async def _settle(self) -> None:
        """Wait until all have done what there is to do."""
        since_ms, seen, idle = self._real.monotonic_ms(), (-1, -1), 0
        until_ms = since_ms + BUSY_MS
        while idle < 2:  # an answer may be older than the message that was on its way then
            await self._wait_for_silence(until_ms)
            if self._real.monotonic_ms() > until_ms:
                log.warning("clients never rest: time goes on without waiting for them")
                return
            held = await self._held_by_consumers()
            state = (self._broker.parts.store.path.puts, held)
            idle = idle + 1 if held == 0 and state == seen else 0
            if state != seen:
                since_ms, seen = self._real.monotonic_ms(), state
            elif held and self._real.monotonic_ms() - since_ms > PATIENCE_MS:
                log.debug("consumers hold %d messages: time goes on without them", held)
                return

    async def _wait_for_silence(self, until_ms: int) -> None:
        before = None
        while self._busy() or before != self._done():
            if self._real.monotonic_ms() > until_ms:
                return
            before = self._done()
            await pause(self._real, LOOK_MS)

    async def _held_by_consumers(self) -> int:
        """How many messages the connected consumers have taken and not done with."""
        groups = list(self._broker.parts.clients.consumer_groups())
        asked = [self._held(group, client) for group in groups for client in group.connections]
        return sum(await asyncio.gather(*asked)) if asked else 0

    async def _held(self, group: ConsumerGroup, client_id: str) -> int:
        ext = {"consumerGroup": group.name, "clientId": client_id}
        try:
            answer = await self._admin.call(
                RequestCode.GET_CONSUMER_RUNNING_INFO, ext, timeout_ms=ASK_MS
            )
            if answer.code != ResponseCode.SUCCESS:
                return 0
            info = fastjson.decode(answer.body, ConsumerRunningInfo)
        except PenstockError as error:
            log.debug("%s does not tell what it holds: %s", client_id, error)
            return 0
        return sum(queue.cached_msg_count for queue in info.mq_table.values())
