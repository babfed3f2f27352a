"""Advances the clock of an in-process broker.

The clock jumps from one due message to the next. After each jump the driver waits until the
connected consumers have processed what they received, so that a retry of a retry becomes due at its
own time. It asks the consumers for the messages they hold, as an administrator would
(GET_CONSUMER_RUNNING_INFO). It also waits until producers have answered the check-backs that were
sent to them. It stops waiting for clients that make no progress for IDLE_CLIENT_MS, for example
because the test holds the messages.

Periodic work between two messages is done once, not once for every second of three days.
"""

import asyncio
import logging

from penstock.broker.consumers.client_groups import ConsumerGroup
from penstock.clock import LoopClock, pause
from penstock.errors import PenstockError
from penstock.server.services.broker_service import BrokerService
from penstock.testing.virtual_clock import NEAR_MS, BrokerClock
from penstock.testing.virtual_time import VirtualTimeBroker
from penstock.transport.peer import Peer
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumerRunningInfo
from penstock.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

POLL_MS = 1
"""The broker counts as idle after this time without a request."""
IDLE_CLIENT_MS = 250
BUSY_MS = 5_000
"""The longest wait for clients that never become idle, such as one that sends a message for each
message it receives."""
CALL_MS = 1_000


class ClockDriver:
    """Advances the clock of one broker. All methods are called in the broker's event loop."""

    def __init__(self, clock: BrokerClock, service: BrokerService, admin: Peer) -> None:
        self._clock = clock
        self._server = service.server
        broker = service.broker
        assert isinstance(broker, VirtualTimeBroker)
        self._broker = broker
        self._admin = admin
        self._real_clock = LoopClock()
        self._advancing = asyncio.Lock()

    async def advance(self, ms: int) -> None:
        """Advance the clock by `ms` milliseconds."""
        async with self._advancing:
            await self._wait_for_idle()
            end_ms = self._clock.now_ms() + ms
            await self._run_due(self._clock.now_ms())
            while (due_ms := self._next_ms()) < end_ms:
                await self._run_due(due_ms)
            await self._run_due(end_ms)
            while (due_ms := self._next_ms()) <= self._clock.now_ms() + NEAR_MS:
                await self._run_due(due_ms)

    def _next_ms(self) -> int:
        return max(self._broker.next_due(), self._clock.now_ms() + 1)

    async def _run_due(self, now_ms: int) -> None:
        """Set the time to `now_ms`, run what is due, and wait for what follows from it."""
        until_ms = self._real_clock.monotonic_ms() + BUSY_MS
        while await self._tick(now_ms):
            await self._wait_for_idle()
            if self._real_clock.monotonic_ms() > until_ms:
                return

    async def _tick(self, now_ms: int) -> bool:
        """Let the broker run what is due; returns whether it did anything."""
        before = self._activity()
        store = self._broker.context.store
        if not store.disk.threads:
            store.flusher.pump()
        self._clock.advance_to(now_ms)
        self._server.tick_at(now_ms)
        self._clock.advance_to(now_ms)
        await asyncio.sleep(0)
        return self._busy() or self._activity() != before

    def _activity(self) -> tuple[int, int]:
        """Counters of requests and stored messages, to detect activity."""
        return self._server.request_loop.requests, self._broker.context.store.writer.puts

    def _busy(self) -> bool:
        executor = self._server.answer_executor
        return bool(executor.thread_jobs or executor.tables.running)

    async def _wait_for_idle(self) -> None:
        """Wait until the broker and its clients are idle."""
        since_ms, seen, idle = self._real_clock.monotonic_ms(), (-1, -1), 0
        until_ms = since_ms + BUSY_MS
        while idle < 2:  # a message may have been on its way when the consumer answered
            await self._wait_for_silence(until_ms)
            if self._real_clock.monotonic_ms() > until_ms:
                log.warning("clients were busy for %d ms: the clock advances anyway", BUSY_MS)
                return
            held = await self._messages_held_by_consumers() + self._unanswered_checks()
            state = (self._broker.context.store.writer.puts, held)
            idle = idle + 1 if held == 0 and state == seen else 0
            if state != seen:
                since_ms, seen = self._real_clock.monotonic_ms(), state
            elif held and self._real_clock.monotonic_ms() - since_ms > IDLE_CLIENT_MS:
                log.debug("clients hold %d messages: the clock advances anyway", held)
                return

    async def _wait_for_silence(self, until_ms: int) -> None:
        before = None
        while self._busy() or before != self._activity():
            if self._real_clock.monotonic_ms() > until_ms:
                return
            before = self._activity()
            await pause(self._real_clock, POLL_MS)

    def _unanswered_checks(self) -> int:
        """The number of check-backs that wait for the answer of a producer."""
        groups = self._broker.transactions.half_messages.groups
        return sum(group.in_flight for group in groups.values())

    async def _messages_held_by_consumers(self) -> int:
        """The number of messages that the connected consumers have received and not completed."""
        groups = list(self._broker.context.clients.consumer_groups())
        calls = [
            self._messages_held(group, client) for group in groups for client in group.connections
        ]
        return sum(await asyncio.gather(*calls)) if calls else 0

    async def _messages_held(self, group: ConsumerGroup, client_id: str) -> int:
        ext = {"consumerGroup": group.name, "clientId": client_id}
        try:
            answer = await self._admin.call(
                RequestCode.GET_CONSUMER_RUNNING_INFO, ext, timeout_ms=CALL_MS
            )
            if answer.code != ResponseCode.SUCCESS:
                return 0
            info = fastjson.decode(answer.body, ConsumerRunningInfo)
        except PenstockError as error:
            log.debug("client %s did not report its messages: %s", client_id, error)
            return 0
        return sum(queue.cached_msg_count for queue in info.mq_table.values())
