"""The messages of a topic by store time, over all queues: oldest or newest first, page by page.

Each queue is read in small chunks and only as far as the page needs, so a page costs a few pulls
per queue, however long the topic is. As in RocketMQ's tools, the pulls are those of the group
TOOLS_CONSUMER, which stores no offsets.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.client.admin.admin_core import AdminCore
from penstock.client.admin.admin_values import MessagePage
from penstock.client.consumer.offset_store import offset_of_response, peer_of_queue
from penstock.client.consumer.pull_loop import PULL_ANSWERS
from penstock.client.consumer.subscription import SQL92, Subscription
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.errors import HeaderError
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import CheckClientRequestBody, MessageQueue
from penstock.wire.codes import (
    GROUP_TOOLS_CONSUMER,
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
    RequestCode,
    ResponseCode,
)
from penstock.wire.java_numbers import parse_nonnegative

PULL_COUNT = 32
SUSPEND_MARGIN_MS = 15_000
"""How long after its suspend time a pull may still be answered: Apache's brokers check suspended
pulls every 5 s."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The messages of a queue from an offset on, and the offset of the next pull."""

    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class Span:
    """A range of store times, both ends included, and the order."""

    since_ms: int | None
    until_ms: int | None
    newest_first: bool


class QueueView:
    """Reads queues without being a consumer. Topic names are with namespace."""

    def __init__(self, core: AdminCore, group: str = GROUP_TOOLS_CONSUMER) -> None:
        self._core = core
        self._session = core.session
        self._group = group

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        count_max: int,
        wanted: Subscription,
        *,
        wait_ms: int = 0,
    ) -> Pulled:
        """The messages from an offset on that match a filter; may wait for new ones."""
        fields = {
            "consumerGroup": self._group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "queueOffset": str(offset),
            "maxMsgNums": str(count_max),
            "sysFlag": str(PULL_SUBSCRIPTION | (PULL_SUSPEND if wait_ms else 0)),
            "commitOffset": "0",
            "suspendTimeoutMillis": str(wait_ms),
            "subscription": wanted.expression,
            "subVersion": str(wanted.version),
            "expressionType": wanted.kind,
        }
        peer = await peer_of_queue(self._session, queue)
        answer = await self._core.ask(
            peer.address,
            RequestCode.PULL_MESSAGE,
            fields,
            good=PULL_ANSWERS,
            timeout_ms=wait_ms
            + (SUSPEND_MARGIN_MS if wait_ms else self._session.options.timeout_ms),
        )
        numbers = [
            _number(answer.ext, name) for name in ("nextBeginOffset", "minOffset", "maxOffset")
        ]
        messages: list[ReceivedMessage] = []
        if answer.code == ResponseCode.SUCCESS:
            messages = decode_records(
                answer.body,
                queue.broker_name,
                namespace=self._session.options.namespace,
                received_ms=self._session.clock.now_ms(),
                tags=wanted.tag_bytes,
            )
        return Pulled(messages, *numbers)

    async def check_filter(self, wanted: Subscription) -> None:
        """Raise BadFilter for an expression that is not valid.

        A pull does not report it: Apache's broker then returns all messages.
        """
        if wanted.kind != SQL92:
            return
        route = await self._session.route(wanted.topic)
        body = CheckClientRequestBody(
            client_id=self._session.client_id, group=self._group, subscription_data=wanted.data()
        )
        address = self._session.broker(route.brokers[0]).address
        await self._core.ask(address, RequestCode.CHECK_CLIENT_CONFIG, {}, fastjson.encode(body))

    async def min_offset(self, queue: MessageQueue) -> int:
        """The offset of the first message."""
        return await self._offset(RequestCode.GET_MIN_OFFSET, queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """The offset of the next message that will be stored."""
        return await self._offset(RequestCode.GET_MAX_OFFSET, queue)

    async def offset_at(self, queue: MessageQueue, at_ms: int) -> int:
        """The first offset that was stored at a time or later; `max_offset` if there is none."""
        return await self._offset(
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queue, {"timestamp": str(at_ms)}
        )

    async def _offset(
        self, code: int, queue: MessageQueue, more: dict[str, str] | None = None
    ) -> int:
        fields = {"topic": queue.topic, "queueId": str(queue.queue_id), **(more or {})}
        peer = await peer_of_queue(self._session, queue)
        return offset_of_response((await self._core.ask(peer.address, code, fields)).ext)


class _QueueReader:
    """Reads one queue in chunks, forwards or backwards.

    `position` is where the next chunk begins, or, backwards, where it ends.
    """

    def __init__(self, view: QueueView, queue: MessageQueue, wanted: Subscription, span: Span):
        self.queue = queue
        self._view = view
        self._wanted = wanted
        self._span = span
        self._messages: deque[ReceivedMessage] = deque()
        self._at_end = False
        self.position = 0

    async def begin(self, position: int | None) -> None:
        """Find the first position: where the previous page ended, else by the time range."""
        span = self._span
        if position is not None:
            self.position = position
        elif span.newest_first:
            self.position = await self._end(span.until_ms)
        elif span.since_ms is not None:
            self.position = await self._view.offset_at(self.queue, span.since_ms)
        else:
            self.position = await self._view.min_offset(self.queue)

    async def head(self) -> ReceivedMessage | None:
        """The next message, which stays the next until `take`."""
        while not self._messages and not self._at_end:
            if self._span.newest_first:
                await self._read_back()
            else:
                await self._read_on()
        return self._messages[0] if self._messages else None

    def take(self) -> None:
        """Remove the next message."""
        self._messages.popleft()

    @property
    def resume(self) -> int | None:
        """The position for the next page; None if there are no more messages."""
        if self._messages:
            return self._messages[0].queue_offset + self._span.newest_first
        return None if self._at_end else self.position

    async def _end(self, until_ms: int | None) -> int:
        if until_ms is None:
            return await self._view.max_offset(self.queue)
        return await self._view.offset_at(self.queue, until_ms + 1)

    async def _read_on(self) -> None:
        pulled = await self._view.pull(self.queue, self.position, PULL_COUNT, self._wanted)
        until_ms = self._span.until_ms
        for message in pulled.messages:
            if until_ms is not None and message.store_ms > until_ms:
                self._at_end = True
                break
            self._messages.append(message)
        stuck = pulled.next_offset <= self.position
        self.position = pulled.next_offset
        self._at_end = self._at_end or stuck or self.position >= pulled.max_offset

    async def _read_back(self) -> None:
        end = self.position
        begin = at = max(end - PULL_COUNT, 0)
        floor = 0
        found: list[ReceivedMessage] = []
        while at < end:
            pulled = await self._view.pull(self.queue, at, end - at, self._wanted)
            floor = pulled.min_offset
            found += [message for message in pulled.messages if message.queue_offset < end]
            if pulled.next_offset <= at:
                break
            at = pulled.next_offset
        since_ms = self._span.since_ms
        for message in reversed(found):
            if since_ms is not None and message.store_ms < since_ms:
                self._at_end = True
                break
            self._messages.append(message)
        self.position = begin
        self._at_end = self._at_end or begin <= floor


async def read_page(
    core: AdminCore,
    queues: Sequence[MessageQueue],
    wanted: Subscription,
    span: Span,
    count_max: int,
    resume: dict[MessageQueue, int] | None,
) -> MessagePage:
    """The next messages of all queues, by store time."""
    chosen = [queue for queue in queues if resume is None or queue in resume]
    view = QueueView(core)
    await view.check_filter(wanted)
    readers = [_QueueReader(view, queue, wanted, span) for queue in chosen]
    await core.for_each(readers, lambda r: r.begin(resume[r.queue] if resume else None))
    sign = -1 if span.newest_first else 1
    heads = await core.for_each(readers, _QueueReader.head)
    heap = [
        (sign * message.store_ms, number, message)
        for number, message in enumerate(heads)
        if message is not None
    ]
    heapq.heapify(heap)
    messages: list[ReceivedMessage] = []
    while heap and len(messages) < count_max:
        _, number, message = heap[0]
        messages.append(message)
        reader = readers[number]
        reader.take()
        following = await reader.head() if len(messages) < count_max else None
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (sign * following.store_ms, number, following))
    left = {reader.queue: at for reader in readers if (at := reader.resume) is not None}
    bare = {core.bare_queue(queue): at for queue, at in left.items()}
    return MessagePage(tuple(messages), bare or None)


def _number(ext: Mapping[str, str], name: str) -> int:
    text = ext.get(name, "")
    number = parse_nonnegative(text)
    if number is None:
        raise HeaderError(f"the field {name} of a pull's response is {text[:40]!r}, not a number")
    return number
