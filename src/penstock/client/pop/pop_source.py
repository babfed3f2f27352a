"""Pops messages: one request for all queues of a topic at a broker.

The messages of a response are invisible from then on, even if the caller was cancelled. So a
cancelled caller leaves its request behind, and the next caller continues with it.
"""

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.client.client_session import Session
from penstock.client.consumer.subscription import Subscription
from penstock.client.pop.ack_client import PopAckClient
from penstock.client.pop.popped_messages import PopTarget, read_popped, receipt_of
from penstock.client.received_message import ReceivedMessage
from penstock.clock import finish_within
from penstock.errors import NoRoute, PeerError, PenstockError
from penstock.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

POLL_MS_MAX = 20_000
"""Longest poll time of one request; a dead connection is detected after it."""

_ALL_QUEUES = "-1"
_FROM_FIRST, _FROM_LAST = "0", "1"
_NOTHING = (ResponseCode.POLLING_FULL, ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class PopLimits:
    """Most messages, their invisible time, and how long to wait for the first."""

    count_max: int
    invisible_ms: int
    wait_ms: int = 0


class PopSource:
    """Pops the messages of one group."""

    def __init__(
        self, session: Session, group: str, acks: PopAckClient, *, fifo: bool, from_first: bool
    ) -> None:
        self.subscriptions: dict[str, Subscription] = {}
        self._session = session
        self._group = group
        self._acks = acks
        self._fifo = fifo
        self._mode = _FROM_FIRST if from_first else _FROM_LAST
        self._abandoned: defaultdict[PopTarget, list[asyncio.Task[list[ReceivedMessage]]]]
        self._abandoned = defaultdict(list)
        self._attempts: dict[PopTarget, str] = {}
        self.failing: dict[PopTarget, str] = {}
        """Why the last pop of a target has failed."""
        self.received: dict[str, int] = {}
        """Messages of each topic that brokers have responded for."""

    async def targets(self) -> list[PopTarget]:
        """All targets of the subscribed topics; raises NoRoute if no topic has a route."""
        found, error = [], None
        for topic in list(self.subscriptions):
            try:
                route = await self._session.route(topic)
            except NoRoute as missing:
                error = missing
                continue
            names = {queue.broker_name for queue in route.read_queues}
            found += [PopTarget(topic, name) for name in sorted(names)]
        if not found and error is not None:
            raise error
        return found

    async def pop(self, target: PopTarget, request: PopLimits) -> list[ReceivedMessage]:
        """Popped messages; more than requested if another caller's request is continued."""
        abandoned = self._abandoned[target]
        clock = self._session.clock
        while abandoned:
            # The request is still waiting at the broker: there are no messages yet.
            if not abandoned[-1].done() and request.wait_ms <= 0:
                return []
            popping = abandoned.pop()
            try:
                found = await finish_within(clock, request.wait_ms, asyncio.shield(popping))
            except TimeoutError:
                abandoned.append(popping)
                return []
            except asyncio.CancelledError:
                abandoned.append(popping)
                raise
            now_ms = clock.monotonic_ms()
            found = [message for message in found if receipt_of(message).visible_ms > now_ms]
            if found:
                return found
        popping = asyncio.ensure_future(self._noted_pop(target, request))
        popping.add_done_callback(_mark_retrieved)
        try:
            return await asyncio.shield(popping)
        except asyncio.CancelledError:
            abandoned.append(popping)
            raise

    async def wait_for_any(self, targets: Iterable[PopTarget], wait_ms: int) -> PopTarget | None:
        """The first target that has messages; None if none has, or a request fails."""
        wait_ms = min(wait_ms, POLL_MS_MAX)
        requests = {
            asyncio.ensure_future(self._has_messages(target, wait_ms)): target for target in targets
        }
        waiting: set[asyncio.Task[bool]] = set(requests)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.result():
                        return requests[task]
            return None
        finally:
            for task in requests:
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def close(self) -> None:
        """Cancel requests that were left behind."""
        abandoned = [task for tasks in self._abandoned.values() for task in tasks]
        self._abandoned.clear()
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)

    async def _noted_pop(self, target: PopTarget, request: PopLimits) -> list[ReceivedMessage]:
        """As `_pop`; notes the outcome for `explain`."""
        try:
            found = await self._pop(target, request)
        except PenstockError as error:
            self.failing[target] = error.remark()
            raise
        self.failing.pop(target, None)
        self.received[target.topic] = self.received.get(target.topic, 0) + len(found)
        return found

    async def _pop(self, target: PopTarget, request: PopLimits) -> list[ReceivedMessage]:
        session, subscription = self._session, self.subscriptions[target.topic]
        await session.ensure_heartbeat(target.broker_name)
        # An ordered pop whose response was lost is repeated with its attempt id: the broker then
        # returns the same messages instead of blocking the queue until they are visible again.
        attempt = self._attempts.pop(target, None) or uuid.uuid4().hex
        wait_ms = min(request.wait_ms, POLL_MS_MAX)
        ext = self._common_fields(target, attempt, wait_ms) | {
            "maxMsgNums": str(request.count_max),
            "invisibleTime": str(request.invisible_ms),
            "initMode": self._mode,
            "exp": subscription.expression,
            "expType": subscription.kind,
        }
        clock = session.clock
        sent_ms = clock.monotonic_ms()
        try:
            answer = await session.call(
                session.master(target.broker_name),
                RequestCode.POP_MESSAGE,
                ext,
                timeout_ms=wait_ms + session.options.timeout_ms,
                good=(ResponseCode.SUCCESS, *_NOTHING),
            )
        except PeerError:
            self._attempts[target] = attempt
            raise
        if answer.code != ResponseCode.SUCCESS or not answer.body:
            return []
        messages = read_popped(
            answer,
            target,
            shown_topic=session.without_namespace(target.topic),
            now_ms=clock.now_ms(),
            popped_ms=clock.monotonic_ms() if wait_ms else sent_ms,
            check_crc=session.options.check_crc,
        )
        return self._filter_tags(subscription, messages)

    def _filter_tags(
        self, subscription: Subscription, messages: Sequence[ReceivedMessage]
    ) -> list[ReceivedMessage]:
        """Remove and acknowledge messages whose tag only has the hash of a subscribed one."""
        tags, found = subscription.tag_bytes, []
        for message in messages:
            if tags is None or message.has_tag(tags):
                found.append(message)
            else:
                self._session.spawn(self._acks.ack_or_log(receipt_of(message)))
        return found

    async def _has_messages(self, target: PopTarget, wait_ms: int) -> bool:
        """Whether a target has messages; waits up to `wait_ms` for them."""
        session = self._session
        try:
            answer = await session.call(
                session.master(target.broker_name),
                RequestCode.NOTIFICATION,
                self._common_fields(target, "", wait_ms),
                timeout_ms=wait_ms + session.options.timeout_ms,
            )
        except PenstockError as error:
            log.info(
                "no notification from broker %s for topic %s: %s",
                target.broker_name,
                target.topic,
                error,
            )
            return False
        return answer.ext.get("hasMsg") == "true"

    def _common_fields(self, target: PopTarget, attempt: str, wait_ms: int) -> dict[str, str]:
        """The header fields of pops and notifications."""
        ext = {
            "consumerGroup": self._group,
            "topic": target.topic,
            "queueId": _ALL_QUEUES,
            "pollTime": str(wait_ms),
            "order": "true" if self._fifo else "false",
            # 0: the wait starts when the broker reads the request; clocks may differ.
            "bornTime": "0",
            "bname": target.broker_name,
        }
        if self._fifo and attempt:
            ext["attemptId"] = attempt
        return ext


def _mark_retrieved(task: asyncio.Task[list[ReceivedMessage]]) -> None:
    if not task.cancelled():
        task.exception()  # mark as retrieved
