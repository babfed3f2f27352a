"""Pulls one queue in order: the next pull is sent before the last response is decoded.

Pulls contain their filter and are not suspended, so the group need not exist. Usually one pull is
in flight, because only its response tells where the next one starts. If a broker always returns the
same number of messages and no more (Apache's: 32), several pulls are sent ahead; if a response is
shorter, the later ones are cancelled.

Pulls to an unavailable or busy broker are retried with a new route, for up to `timeout_ms`.
"""

import asyncio
import logging
from collections import deque
from typing import Final

from penstock.arrow.backoff import TEMPORARY_CODES, permanent_cause
from penstock.arrow.offset_ranges import QueueRange
from penstock.client.client_session import Session
from penstock.client.consumer.pull_loop import PullAnswer, pull
from penstock.client.topic_routes import MASTER_ID
from penstock.clock import finish_within, pause
from penstock.errors import (
    NoNameServer,
    NoRoute,
    PeerError,
    PeerUntrusted,
    PenstockError,
    ReadGaveUp,
)
from penstock.wire.codes import PULL_SUBSCRIPTION, ResponseCode

log = logging.getLogger(__name__)

PULL_MESSAGES: Final = 1_024
"""Messages per pull: Penstock returns no more, and Apache allocates by this number."""
PULL_TIMEOUT_MS: Final = 15_000
"""How long to wait for a response, see `QueuePuller._wait`."""
_NO_LIMIT_MS: Final = 24 * 3_600_000
BACKOFF_MS: Final = 100
BACKOFF_MS_MAX: Final = 3_000
PREFETCH_MAX: Final = 8
"""Pulls in flight if the size of responses is known."""


class QueuePuller:
    """The pull responses of one queue."""

    def __init__(
        self, session: Session, part: QueueRange, *, group: str, expression: str, timeout_ms: int
    ) -> None:
        self._session = session
        self._part = part
        self._topic = session.with_namespace(part.topic)
        self._timeout_ms = timeout_ms
        self._can_prefetch = expression == "*"
        self._step = 0  # messages per response, if it is known
        self._seen = 0  # messages of the last response
        self._broker_id = MASTER_ID
        self._address = ""
        self._in_flight: deque[tuple[int, asyncio.Task[PullAnswer]]] = deque()
        self._backoff_ms = BACKOFF_MS
        self._failing_since_ms: int | None = None
        self._fields = {
            "consumerGroup": session.with_namespace(group),
            "topic": self._topic,
            "queueId": str(part.queue_id),
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": expression,
            "subVersion": "0",
            "expressionType": "TAG",
            "bname": part.broker,
            "sysFlag": str(PULL_SUBSCRIPTION),
        }

    @property
    def address(self) -> str:
        """The address of the last pull."""
        return self._address or "no known address"

    async def answer(self, offset: int) -> PullAnswer:
        """The response to a pull at this offset; raises ReadGaveUp, or a permanent refusal."""
        while True:
            try:
                answer = await self._next_answer(offset)
            except PenstockError as error:
                self.cancel()
                await self._failed(offset, error)
                continue
            self._failing_since_ms, self._backoff_ms = None, BACKOFF_MS
            self._broker_id = answer.suggested_broker_id
            self._learn(offset, answer)
            return answer

    async def prefetch(self, offset: int) -> None:
        """Send the pull at this offset, and later ones if possible, before the caller continues."""
        if offset >= self._part.until:
            return
        if self._in_flight and self._in_flight[0][0] != offset:
            self.cancel()
        if not self._in_flight:
            self._start_pull(offset)
        while self._step and len(self._in_flight) < PREFETCH_MAX:
            beyond = self._in_flight[-1][0] + self._step
            if beyond >= self._part.until:
                break
            self._start_pull(beyond)
        # One loop iteration for the task, one for the connection's output, one for the socket.
        for _ in range(3):
            await asyncio.sleep(0)

    def cancel(self) -> None:
        """Cancel all pulls in flight."""
        for _, task in self._in_flight:
            task.cancel()
            task.add_done_callback(_ignore)
        self._in_flight.clear()

    async def switch_to_master(self) -> None:
        """Pull from the master, with a new route: the last broker lacks messages."""
        self.cancel()
        self._broker_id = MASTER_ID
        await self._refresh()

    # --- one pull

    async def _next_answer(self, offset: int) -> PullAnswer:
        if not self._in_flight or self._in_flight[0][0] != offset:
            self.cancel()
            self._start_pull(offset)
        _, task = self._in_flight.popleft()
        try:
            if not task.done():
                await self._wait(task)
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _wait(self, task: asyncio.Task[PullAnswer]) -> None:
        """Wait until a pull is done. Only time spent here counts: the loop does not run while Spark
        processes the last batch, and a response may stay unread for long."""
        try:
            waiting = asyncio.wait([task])
            await finish_within(self._session.clock, PULL_TIMEOUT_MS, waiting)
        except TimeoutError:
            peer = self._session.peer(self._address) if self._address else None
            if peer is not None and (connection := peer.connection) is not None:
                connection.abort(f"no response to a pull within {PULL_TIMEOUT_MS} ms")

    def _start_pull(self, offset: int) -> None:
        self._in_flight.append((offset, asyncio.ensure_future(self._pull(offset))))

    async def _pull(self, offset: int) -> PullAnswer:
        session, part = self._session, self._part
        address = session.address_of(part.broker, self._broker_id)
        if address is None:
            await session.route(self._topic)
            address = session.address_of(part.broker, self._broker_id)
        if address is None:
            raise NoRoute(f"the address of the broker {part.broker!r} is unknown")
        self._address = address
        count = min(self._step or PULL_MESSAGES, part.until - offset)
        fields = {**self._fields, "queueOffset": str(offset), "maxMsgNums": str(count)}
        return await pull(session.peer(address), fields, timeout_ms=_NO_LIMIT_MS)

    def _learn(self, offset: int, answer: PullAnswer) -> None:
        """Find out whether every response has the same number of messages, the broker's limit."""
        if not self._can_prefetch or answer.next_offset >= self._part.until:
            return
        count = answer.next_offset - offset
        found = answer.code == ResponseCode.SUCCESS and answer.next_offset < answer.max_offset
        if not found or (self._step and count != self._step):
            self._step = self._seen = 0
        elif not self._step:
            self._step, self._seen = (count, 0) if count == self._seen else (0, count)

    # --- failures

    async def _failed(self, offset: int, error: PenstockError) -> None:
        """Wait before the next attempt; raises permanent errors."""
        slave = isinstance(error, PeerUntrusted) and self._broker_id != MASTER_ID
        if (cause := permanent_cause(error)) is not None and not slave:
            raise cause
        is_unavailable = isinstance(error, PeerError | NoRoute | NoNameServer)
        if not is_unavailable and error.answer_code not in TEMPORARY_CODES:
            raise error
        part, clock = self._part, self._session.clock
        now_ms = clock.monotonic_ms()
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms
            log.warning(
                "retrying a pull of topic %s, queue %d at %s: %s",
                part.topic,
                part.queue_id,
                part.broker,
                error.remark(),
            )
        failing_ms = now_ms - self._failing_since_ms
        if failing_ms + self._backoff_ms > self._timeout_ms:
            raise ReadGaveUp(
                f"topic {part.topic}, queue {part.queue_id}: the broker {part.broker}"
                f" ({self.address}) could not be read from at offset {offset}"
                f" for {failing_ms / 1000:.1f} s (readTimeout): {error}"
            ) from error
        await pause(clock, self._backoff_ms)
        self._backoff_ms = min(2 * self._backoff_ms, BACKOFF_MS_MAX)
        self._broker_id = MASTER_ID
        await self._refresh()

    async def _refresh(self) -> None:
        try:
            await self._session.find_route(self._topic)
        except PenstockError as error:
            log.info("could not refresh the route of %s: %s", self._topic, error)


def _ignore(task: asyncio.Task[PullAnswer]) -> None:
    if not task.cancelled():
        task.exception()  # mark it as retrieved
