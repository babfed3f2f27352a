"""`AsyncPullConsumer`, the pull consumer: the application polls for messages and commits offsets.

    async with AsyncPullConsumer("localhost:9876", group="audit") as consumer:
        consumer.subscribe("Orders")        # shares the queues with other members of the group
        for message in await consumer.poll():
            ...
        await consumer.commit()

`assign` takes queues without sharing them. Messages are fetched ahead of `poll`. With `auto_commit`
offsets are committed every five seconds: the messages of a poll count as handled when `poll` is
called again, or when the consumer is closed without an error.
"""

import asyncio
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import TracebackType

from penstock.client.client_options import takes_options
from penstock.client.client_session import Session
from penstock.client.consumer.rebalance import query_offset
from penstock.client.consumer.subscription import Subscription
from penstock.client.lifetime import Lifetime
from penstock.client.messages import MessageQueue
from penstock.client.pull.pull_core import PullCore, public_queue
from penstock.client.pull.pull_options import PullConsumerOptions
from penstock.client.received_message import ReceivedMessage
from penstock.client.telemetry.span_creation import make_spans
from penstock.errors import InvalidParameter, QueueNotAssigned
from penstock.wire.codes import RequestCode

POLL_MS = 5_000
POLL_COUNT = 100


class AsyncPullConsumer(Lifetime):
    """Polls messages of queues that are assigned to it, or that its group shares.

    The options are described at `PullConsumerOptions`.
    """

    @takes_options(PullConsumerOptions)
    def __init__(self, options: PullConsumerOptions) -> None:
        self.group = options.group
        self._session = Session(options)
        self._core = PullCore(self._session, options)
        self._spans = make_spans(self._session, group=options.group, broadcast=options.broadcast)
        self.carries_context = self._spans is not None
        self._queues = self._core.queues
        self._offsets = self._core.offsets

    # --- lifecycle

    async def start(self) -> None:
        """Start to fetch; subscribe or assign before or after it."""
        if self._session.started:
            return
        await self._session.start()
        try:
            await self._core.start()
        except BaseException:
            await self._session.close()
            raise

    async def close(self) -> None:
        """Commit offsets if `auto_commit` is on, and unregister."""
        await self._close(done=True)

    async def _close(self, *, done: bool) -> None:
        if self._session.started:
            try:
                await self._core.close(done=done)
            finally:
                await self._session.close()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close(done=error is None)

    # --- subscriptions and assignment

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Poll a topic whose queues the members of the group share: all, some tags, or by SQL92."""
        self._core.subscribe(self._subscription(self._session.with_namespace(topic), tags, sql))

    def unsubscribe(self, topic: str) -> None:
        """Stop polling a topic."""
        self._core.unsubscribe(self._session.with_namespace(topic))

    def assign(
        self, queues: Iterable[MessageQueue], tags: str = "*", *, sql: str | None = None
    ) -> None:
        """Poll exactly these queues, without sharing them; replaces the previous assignment."""
        wanted = [self._with_namespace(queue) for queue in queues]
        topics = sorted({queue.topic for queue in wanted})
        self._core.assign(wanted, [self._subscription(topic, tags, sql) for topic in topics])

    def assignment(self) -> list[MessageQueue]:
        """The queues that are polled."""
        return sorted(public_queue(self._session, queue) for queue in self._queues)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All readable queues of a topic."""
        route = await self._session.route(self._session.with_namespace(topic))
        return [public_queue(self._session, queue) for queue in route.read_queues]

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Let `poll` return nothing of these queues until they are resumed."""
        self._queues.pause([self._assigned(queue) for queue in queues])

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Poll these queues again."""
        self._queues.resume([self._assigned(queue) for queue in queues])

    # --- messages

    async def poll(
        self, timeout_ms: int = POLL_MS, *, count_max: int = POLL_COUNT
    ) -> list[ReceivedMessage]:
        """The next messages; an empty list if there are none within `timeout_ms`."""
        session = self._session
        session.check_alive()
        if count_max <= 0:
            raise InvalidParameter(f"count_max is {count_max}", hint="give 1 or more")
        if self._core.idle:
            raise InvalidParameter(
                "there is no subscription or assignment", hint="call subscribe or assign first"
            )
        self._core.mark_polled_done()
        end_ms = session.clock.monotonic_ms() + timeout_ms
        asked_ns = 0 if self._spans is None else self._spans.now_ns()
        while True:
            messages = self._queues.take(count_max)
            if messages and self._spans is not None:
                self._spans.received(messages, asked_ns)
            left_ms = end_ms - session.clock.monotonic_ms()
            if messages or left_ms <= 0:
                return messages
            await self._queues.arrival(left_ms)
            session.check_alive()

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at this offset; raises InvalidParameter if the queue does not have it."""
        assigned = self._assigned(queue)
        begin, end = await asyncio.gather(self.begin_offset(queue), self.end_offset(queue))
        if not begin <= offset <= end:
            raise InvalidParameter(
                f"offset {offset} is not in {_name(queue)}: it has {begin} to {end}"
            )
        self._move(assigned, offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue at the oldest message."""
        assigned = self._assigned(queue)
        self._move(assigned, await self.begin_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Continue after the newest message."""
        assigned = self._assigned(queue)
        self._move(assigned, await self.end_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, moment: datetime) -> None:
        """Continue at the first message that was stored at this time or later."""
        assigned = self._assigned(queue)
        self._move(assigned, await self.offset_at(queue, moment))

    # --- offsets

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commit these offsets, or those of all polled messages; raises the first failure.

        An offset is that of the next message to consume. It must not exceed the position.
        """
        wanted = self._queues.positions()
        if offsets is not None:
            positions, wanted = wanted, {}
            for queue, offset in offsets.items():
                position = positions.get(self._assigned(queue), 0)
                if not 0 <= offset <= position:
                    raise InvalidParameter(
                        f"cannot commit offset {offset} of {_name(queue)}: its position is"
                        f" {position}",
                        hint="call seek first to skip messages",
                    )
                wanted[self._assigned(queue)] = offset
        for queue, offset in wanted.items():
            self._offsets.update(queue, offset, only_up=False)
        stored = (self._offsets.commit(queue, offset) for queue, offset in wanted.items())
        for failure in await asyncio.gather(*stored, return_exceptions=True):
            if failure is not None:
                raise failure

    async def committed(self, queue: MessageQueue) -> int | None:
        """The committed offset of the group; None if there is none."""
        return await self._core.committed(self._with_namespace(queue))

    async def position(self, queue: MessageQueue) -> int:
        """The offset of the next message of this queue that `poll` returns."""
        return await self._queues.position(self._assigned(queue))

    async def begin_offset(self, queue: MessageQueue) -> int:
        """The offset of the oldest message."""
        full = self._with_namespace(queue)
        return await query_offset(self._session, full, RequestCode.GET_MIN_OFFSET)

    async def end_offset(self, queue: MessageQueue) -> int:
        """The offset that the next stored message will get."""
        full = self._with_namespace(queue)
        return await query_offset(self._session, full, RequestCode.GET_MAX_OFFSET)

    async def offset_at(self, queue: MessageQueue, moment: datetime) -> int:
        """The offset of the first message that was stored at this time or later."""
        return await query_offset(
            self._session,
            self._with_namespace(queue),
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            timestamp=str(int(moment.timestamp() * 1000)),
        )

    def _move(self, queue: MessageQueue, offset: int) -> None:
        if queue not in self._queues:  # released while its offsets were queried
            raise QueueNotAssigned(_name(queue))
        self._queues.start(queue, offset)

    # --- helpers

    def _subscription(self, topic: str, tags: str, sql: str | None) -> Subscription:
        return Subscription.of(topic, tags, sql, version=self._session.clock.now_ms())

    def _with_namespace(self, queue: MessageQueue) -> MessageQueue:
        return MessageQueue(
            self._session.with_namespace(queue.topic), queue.broker_name, queue.queue_id
        )

    def _assigned(self, queue: MessageQueue) -> MessageQueue:
        """The queue with namespace; raises QueueNotAssigned if it is not assigned."""
        full = self._with_namespace(queue)
        if full not in self._queues:
            raise QueueNotAssigned(_name(queue))
        return full


def _name(queue: MessageQueue) -> str:
    return f"{queue.topic} queue {queue.queue_id} at {queue.broker_name}"
