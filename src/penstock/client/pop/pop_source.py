"""Asking brokers to lend messages: one request for all queues of a topic at a broker.

An answer may hold messages whose loan has begun, whoever waits for it: a caller that gives up
leaves the request behind, and the next one takes it over.
"""

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.client.client_session import Session
from penstock.client.consumer.subscription import Subscription
from penstock.client.pop.invisible_time import Loans, loan_of
from penstock.client.pop.popped_messages import Loan, Place, read_popped
from penstock.client.received_message import ReceivedMessage
from penstock.clock import finish_within
from penstock.errors import NoRoute, PeerError, PenstockError
from penstock.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

HOLD_MS_MAX = 20_000
"""Longest that one request waits at a broker: a dead connection is found out so early."""

_ALL_QUEUES = "-1"
_FROM_FIRST, _FROM_LAST = "0", "1"
_NOTHING = (ResponseCode.POLLING_FULL, ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class Wish:
    """How many messages, lent for how long, and how long to wait for the first."""

    count_max: int
    invisible_ms: int
    wait_ms: int = 0


class PopSource:
    """Where messages of one group come from."""

    def __init__(
        self, session: Session, group: str, loans: Loans, *, fifo: bool, from_first: bool
    ) -> None:
        self.subscriptions: dict[str, Subscription] = {}
        self._session = session
        self._group = group
        self._loans = loans
        self._fifo = fifo
        self._mode = _FROM_FIRST if from_first else _FROM_LAST
        self._left: defaultdict[Place, list[asyncio.Task[list[ReceivedMessage]]]]
        self._left = defaultdict(list)
        self._attempts: dict[Place, str] = {}

    async def places(self) -> list[Place]:
        """All of them, by the routes; raises NoRoute if no topic has one."""
        found, error = [], None
        for topic in list(self.subscriptions):
            try:
                route = await self._session.route(topic)
            except NoRoute as missing:
                error = missing
                continue
            names = {queue.broker_name for queue in route.read_queues}
            found += [Place(topic, name) for name in sorted(names)]
        if not found and error is not None:
            raise error
        return found

    async def pop(self, place: Place, wish: Wish) -> list[ReceivedMessage]:
        """Messages lent to us, perhaps more than wished for if somebody else asked for them."""
        left = self._left[place]
        clock = self._session.clock
        while left:
            # Still with the broker: then there is nothing, or it is on its way here.
            if not left[-1].done() and wish.wait_ms <= 0:
                return []
            asking = left.pop()
            try:
                found = await finish_within(clock, wish.wait_ms, asyncio.shield(asking))
            except TimeoutError:
                left.append(asking)
                return []
            except asyncio.CancelledError:
                left.append(asking)
                raise
            now_ms = clock.monotonic_ms()
            found = [message for message in found if loan_of(message).ends_ms > now_ms]
            if found:
                return found
        asking = asyncio.ensure_future(self._pop(place, wish))
        asking.add_done_callback(_look_at)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            left.append(asking)
            raise

    async def await_any(self, places: Iterable[Place], wait_ms: int) -> Place | None:
        """The first place to have messages; None if none has, or a question fails."""
        wait_ms = min(wait_ms, HOLD_MS_MAX)
        asking = {asyncio.ensure_future(self._notified(place, wait_ms)): place for place in places}
        waiting: set[asyncio.Task[bool]] = set(asking)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.result():
                        return asking[task]
            return None
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def close(self) -> None:
        """Give up what is being asked."""
        asking = [task for tasks in self._left.values() for task in tasks]
        self._left.clear()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _pop(self, place: Place, wish: Wish) -> list[ReceivedMessage]:
        session, subscription = self._session, self.subscriptions[place.topic]
        await session.ensure_heartbeat(place.broker_name)
        # A pop in order whose answer got lost is repeated under its name: the broker lends the
        # same messages again instead of keeping the queue closed until their time is over.
        attempt = self._attempts.pop(place, None) or uuid.uuid4().hex
        wait_ms = min(wish.wait_ms, HOLD_MS_MAX)
        ext = self._asked(place, attempt, wait_ms) | {
            "maxMsgNums": str(wish.count_max),
            "invisibleTime": str(wish.invisible_ms),
            "initMode": self._mode,
            "exp": subscription.expression,
            "expType": subscription.kind,
        }
        clock = session.clock
        asked_ms = clock.monotonic_ms()
        try:
            answer = await session.call(
                session.broker(place.broker_name),
                RequestCode.POP_MESSAGE,
                ext,
                timeout_ms=wait_ms + session.options.timeout_ms,
                good=(ResponseCode.SUCCESS, *_NOTHING),
            )
        except PeerError:
            self._attempts[place] = attempt
            raise
        if answer.code != ResponseCode.SUCCESS or not answer.body:
            return []
        messages = read_popped(
            answer,
            place,
            shown_topic=session.without_namespace(place.topic),
            now_ms=clock.now_ms(),
            began_ms=clock.monotonic_ms() if wait_ms else asked_ms,
        )
        return self._meant(subscription, messages)

    def _meant(
        self, subscription: Subscription, messages: Sequence[ReceivedMessage]
    ) -> list[ReceivedMessage]:
        """Without messages whose tag only has the same hash as one that is subscribed to."""
        tags, meant = subscription.tag_bytes, []
        for message in messages:
            if tags is None or message.tagged(tags):
                meant.append(message)
            elif isinstance(message.owner, Loan):
                self._session.spawn(self._loans.ack_or_log(message.owner))
        return meant

    async def _notified(self, place: Place, wait_ms: int) -> bool:
        """Whether there is something, at the latest after `wait_ms`."""
        session = self._session
        try:
            answer = await session.call(
                session.broker(place.broker_name),
                RequestCode.NOTIFICATION,
                self._asked(place, "", wait_ms),
                timeout_ms=wait_ms + session.options.timeout_ms,
            )
        except PenstockError as error:
            log.info("%s can't tell of messages in %s: %s", place.broker_name, place.topic, error)
            return False
        return answer.ext.get("hasMsg") == "true"

    def _asked(self, place: Place, attempt: str, wait_ms: int) -> dict[str, str]:
        """What pops and notifications have in common."""
        ext = {
            "consumerGroup": self._group,
            "topic": place.topic,
            "queueId": _ALL_QUEUES,
            "pollTime": str(wait_ms),
            "order": "true" if self._fifo else "false",
            # 0: from when the broker reads it. Its clock may be another than ours.
            "bornTime": "0",
            "bname": place.broker_name,
        }
        if self._fifo and attempt:
            ext["attemptId"] = attempt
        return ext


def _look_at(task: asyncio.Task[list[ReceivedMessage]]) -> None:
    if not task.cancelled():
        task.exception()  # whoever waits has it, if anybody does
