"""Pulls of one queue, answered in order: the next one is on its way before the last is looked at.

Pulls carry their filter and are not held, so brokers need not know who asks. Mostly one pull is in
flight, since only its answer says where the next one begins. A broker that gives the same number
of messages each time and no more (Apache's: 32) is asked for several answers ahead; where one
turns out shorter, those after it are called off.

A broker that is away or busy is asked again and again, by a fresh route, up to `timeout_ms`.
"""

import asyncio
import logging
from collections import deque
from typing import Final

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
from penstock.spark.backoff import TEMPORARY_CODES, permanent_cause
from penstock.spark.source.offset_ranges import QueueRange
from penstock.wire.codes import PULL_SUBSCRIPTION, ResponseCode

log = logging.getLogger(__name__)

PULL_MESSAGES: Final = 1_024
"""Messages asked for at a time: Penstock gives no more, and Apache makes room by this number."""
PULL_TIMEOUT_MS: Final = 15_000
"""How long an answer is waited for, see `Pulls._wait`."""
_EVER_MS: Final = 24 * 3_600_000
BACKOFF_MS: Final = 100
BACKOFF_MS_MAX: Final = 3_000
AHEAD_MAX: Final = 8
"""Pulls in flight where the size of answers is known."""


class Pulls:
    """The answers of one queue from an offset on."""

    def __init__(
        self, session: Session, part: QueueRange, *, group: str, expression: str, timeout_ms: int
    ) -> None:
        self._session = session
        self._part = part
        self._topic = session.with_namespace(part.topic)
        self._timeout_ms = timeout_ms
        self._may_guess = expression == "*"
        self._step = 0  # how many messages each answer has, if that is known
        self._seen = 0  # how many the last one had
        self._broker_id = MASTER_ID
        self._address = ""
        self._flying: deque[tuple[int, asyncio.Task[PullAnswer]]] = deque()
        self._again_ms = BACKOFF_MS
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
        """Where the last pull went."""
        return self._address or "at no known address"

    async def answer(self, offset: int) -> PullAnswer:
        """What the broker has from this offset on; raises ReadGaveUp, or a refusal for good."""
        while True:
            try:
                answer = await self._first(offset)
            except PenstockError as error:
                self.call_off()
                await self._failed(offset, error)
                continue
            self._failing_since_ms, self._again_ms = None, BACKOFF_MS
            self._broker_id = answer.suggested_broker_id
            self._learn(offset, answer)
            return answer

    async def ask_ahead(self, offset: int) -> None:
        """See to it that the pull at this offset, and what may follow, leaves before we go on."""
        if offset >= self._part.until:
            return
        if self._flying and self._flying[0][0] != offset:
            self.call_off()
        if not self._flying:
            self._launch(offset)
        while self._step and len(self._flying) < AHEAD_MAX:
            beyond = self._flying[-1][0] + self._step
            if beyond >= self._part.until:
                break
            self._launch(beyond)
        # One turn of the loop for the task, one for the connection's output, one for the socket.
        for _ in range(3):
            await asyncio.sleep(0)

    def call_off(self) -> None:
        """Forget what is in flight."""
        for _, task in self._flying:
            task.cancel()
            task.add_done_callback(_ignore)
        self._flying.clear()

    async def elsewhere(self) -> None:
        """The broker asked last has less than there should be: ask the master, by a fresh route."""
        self.call_off()
        self._broker_id = MASTER_ID
        await self._refresh()

    # --- one pull

    async def _first(self, offset: int) -> PullAnswer:
        if not self._flying or self._flying[0][0] != offset:
            self.call_off()
            self._launch(offset)
        _, task = self._flying.popleft()
        try:
            if not task.done():
                await self._wait(task)
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _wait(self, task: asyncio.Task[PullAnswer]) -> None:
        """Until a pull is over. Only the time counts in which we wait: while Spark is busy with
        the last batch the loop stands still, and an answer may lie there unread for long."""
        try:
            waiting = asyncio.wait([task])
            await finish_within(self._session.clock, PULL_TIMEOUT_MS, waiting)
        except TimeoutError:
            peer = self._session.peer(self._address) if self._address else None
            if peer is not None and (connection := peer.connection) is not None:
                connection.abort(f"no answer to a pull within {PULL_TIMEOUT_MS} ms")

    def _launch(self, offset: int) -> None:
        self._flying.append((offset, asyncio.ensure_future(self._pull(offset))))

    async def _pull(self, offset: int) -> PullAnswer:
        session, part = self._session, self._part
        address = session.address_of(part.broker, self._broker_id)
        if address is None:
            await session.route(self._topic)
            address = session.address_of(part.broker, self._broker_id)
        if address is None:
            raise NoRoute(f"no address is known of the broker {part.broker!r}")
        self._address = address
        count = min(self._step or PULL_MESSAGES, part.until - offset)
        fields = {**self._fields, "queueOffset": str(offset), "maxMsgNums": str(count)}
        return await pull(session.peer(address), fields, timeout_ms=_EVER_MS)

    def _learn(self, offset: int, answer: PullAnswer) -> None:
        """How many messages an answer has, where the broker's own limit seems to decide that."""
        if not self._may_guess or answer.next_offset >= self._part.until:
            return
        count = answer.next_offset - offset
        found = answer.code == ResponseCode.SUCCESS and answer.next_offset < answer.max_offset
        if not found or (self._step and count != self._step):
            self._step = self._seen = 0
        elif not self._step:
            self._step, self._seen = (count, 0) if count == self._seen else (0, count)

    # --- when it fails

    async def _failed(self, offset: int, error: PenstockError) -> None:
        """Wait a little before the next attempt; raises where that makes no sense."""
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
            log.warning("%s: a pull failed and is tried again: %s", part, error.remark())
        away_ms = now_ms - self._failing_since_ms
        if away_ms + self._again_ms > self._timeout_ms:
            raise ReadGaveUp(
                f"topic {part.topic}, queue {part.queue_id}: the broker {part.broker}"
                f" ({self.address}) could not be read from at offset {offset}"
                f" for {away_ms / 1000:.1f} s (readTimeout): {error}"
            ) from error
        await pause(clock, self._again_ms)
        self._again_ms = min(2 * self._again_ms, BACKOFF_MS_MAX)
        self._broker_id = MASTER_ID
        await self._refresh()

    async def _refresh(self) -> None:
        try:
            await self._session.find_route(self._topic)
        except PenstockError as error:
            log.info("the route of %s is not fresh: %s", self._topic, error)


def _ignore(task: asyncio.Task[PullAnswer]) -> None:
    if not task.cancelled():
        task.exception()  # nobody waits for it any more
