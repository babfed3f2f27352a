"""The pull-style consumer: the application asks for messages, and says where to go on.

    async with AsyncPullConsumer("localhost:9876", group="audit") as consumer:
        consumer.subscribe("Orders")        # shares the queues with other members of the group
        for message in await consumer.poll():
            ...
        await consumer.commit()

`assign` takes queues without sharing them. Messages are fetched ahead, so that `poll` mostly finds
some. With `auto_commit` progress is stored every five seconds: what an earlier poll returned counts
as done when `poll` is called again, or the consumer is closed without an error.
"""

import asyncio
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import TracebackType

from penstock.client.client_options import takes_options
from penstock.client.client_session import Session
from penstock.client.consumer.rebalance import ask_offset
from penstock.client.consumer.subscription import Subscription
from penstock.client.lifetime import Lifetime
from penstock.client.messages import MessageQueue
from penstock.client.pull.pull_core import PullCore, bare_queue
from penstock.client.pull.pull_options import PullConsumerOptions
from penstock.client.received_message import ReceivedMessage
from penstock.errors import InvalidParameter, QueueNotOurs
from penstock.wire.codes import RequestCode

POLL_MS = 5_000
POLL_COUNT = 100


class AsyncPullConsumer(Lifetime):
    """Polls messages of queues that are assigned to it, or that its group shares out.

    `start_at` is where a group begins that has no progress. Up to `messages_max` messages and
    `bytes_max` bytes of each queue are fetched ahead. `on_assigned` hears of queues that a
    rebalance gives us, `on_revoked` of those it takes: the latter may still be committed there.
    """

    @takes_options(PullConsumerOptions)
    def __init__(self, options: PullConsumerOptions) -> None:
        self.group = options.group
        self._session = Session(options)
        self._core = PullCore(self._session, options)
        self._queues = self._core.queues
        self._offsets = self._core.offsets

    # --- life

    async def start(self) -> None:
        """Begin to fetch; subscribe or assign before, or later."""
        if self._session.started:
            return
        await self._session.start()
        try:
            await self._core.start()
        except BaseException:
            await self._session.close()
            raise

    async def close(self) -> None:
        """Store progress, if that is automatic, and say goodbye."""
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

    # --- what to consume

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Poll a topic whose queues the members of the group share: all, some tags, or by SQL92."""
        self._core.subscribe(self._subscription(self._session.with_namespace(topic), tags, sql))

    def unsubscribe(self, topic: str) -> None:
        """Poll a topic no more."""
        self._core.unsubscribe(self._session.with_namespace(topic))

    def assign(
        self, queues: Iterable[MessageQueue], tags: str = "*", *, sql: str | None = None
    ) -> None:
        """Poll exactly these queues, whoever else does; replaces what was assigned before."""
        wanted = [self._inner(queue) for queue in queues]
        topics = sorted({queue.topic for queue in wanted})
        self._core.assign(wanted, [self._subscription(topic, tags, sql) for topic in topics])

    def assignment(self) -> list[MessageQueue]:
        """The queues that are polled now."""
        return sorted(bare_queue(self._session, queue) for queue in self._queues)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic that can be read."""
        route = await self._session.route(self._session.with_namespace(topic))
        return [bare_queue(self._session, queue) for queue in route.read_queues]

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Have `poll` return nothing of these until they are resumed."""
        self._queues.pause([self._ours(queue) for queue in queues])

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Poll these again."""
        self._queues.resume([self._ours(queue) for queue in queues])

    # --- messages

    async def poll(
        self, timeout_ms: int = POLL_MS, *, count_max: int = POLL_COUNT
    ) -> list[ReceivedMessage]:
        """The next messages, as soon as there are some; none after `timeout_ms`."""
        session = self._session
        session.check_alive()
        if count_max <= 0:
            raise InvalidParameter(f"count_max is {count_max}: at least 1 message is polled")
        if self._core.idle:
            raise InvalidParameter("nothing to poll", hint="call subscribe or assign first")
        self._core.note_done()
        end_ms = session.clock.monotonic_ms() + timeout_ms
        while True:
            messages = self._queues.take(count_max)
            left_ms = end_ms - session.clock.monotonic_ms()
            if messages or left_ms <= 0:
                return messages
            await self._queues.arrival(left_ms)
            session.check_alive()

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at this offset; raises InvalidParameter where the queue has no such."""
        inner = self._ours(queue)
        begin, end = await asyncio.gather(self.begin_offset(queue), self.end_offset(queue))
        if not begin <= offset <= end:
            raise InvalidParameter(
                f"there is no offset {offset} in {_name(queue)}: it has {begin} to {end}"
            )
        self._move(inner, offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Go on with the oldest message that is there."""
        inner = self._ours(queue)
        self._move(inner, await self.begin_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Go on with the next message that comes."""
        inner = self._ours(queue)
        self._move(inner, await self.end_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, moment: datetime) -> None:
        """Go on with the first message that was stored at this moment or later."""
        inner = self._ours(queue)
        self._move(inner, await self.offset_at(queue, moment))

    # --- offsets

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store progress now: these offsets, or all that was polled; raises what fails.

        An offset is that of the next message to consume, and not beyond what was polled.
        """
        wanted = self._queues.positions()
        if offsets is not None:
            positions, wanted = wanted, {}
            for queue, offset in offsets.items():
                position = positions.get(self._ours(queue), 0)
                if not 0 <= offset <= position:
                    raise InvalidParameter(
                        f"offset {offset} of {_name(queue)} can't be committed: its position is"
                        f" {position}",
                        hint="seek first to leave messages out",
                    )
                wanted[self._ours(queue)] = offset
        for queue, offset in wanted.items():
            self._offsets.update(queue, offset, only_up=False)
        stored = (self._offsets.commit(queue, offset) for queue, offset in wanted.items())
        for failure in await asyncio.gather(*stored, return_exceptions=True):
            if failure is not None:
                raise failure

    async def committed(self, queue: MessageQueue) -> int | None:
        """The progress that is stored for the group; None if there is none."""
        return await self._core.committed(self._inner(queue))

    async def position(self, queue: MessageQueue) -> int:
        """The offset of the next message that `poll` returns of this queue."""
        return await self._queues.position(self._ours(queue))

    async def begin_offset(self, queue: MessageQueue) -> int:
        """The offset of the oldest message that is there."""
        return await ask_offset(self._session, self._inner(queue), RequestCode.GET_MIN_OFFSET)

    async def end_offset(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        return await ask_offset(self._session, self._inner(queue), RequestCode.GET_MAX_OFFSET)

    async def offset_at(self, queue: MessageQueue, moment: datetime) -> int:
        """The offset of the first message that was stored at this moment or later."""
        return await ask_offset(
            self._session,
            self._inner(queue),
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            timestamp=str(int(moment.timestamp() * 1000)),
        )

    def _move(self, queue: MessageQueue, offset: int) -> None:
        if queue not in self._queues:  # gone while its offsets were asked for
            raise QueueNotOurs(_name(queue))
        self._queues.begin(queue, offset)

    # --- names

    def _subscription(self, topic: str, tags: str, sql: str | None) -> Subscription:
        return Subscription.of(topic, tags, sql, version=self._session.clock.now_ms())

    def _inner(self, queue: MessageQueue) -> MessageQueue:
        """A queue as servers know it."""
        return MessageQueue(
            self._session.with_namespace(queue.topic), queue.broker_name, queue.queue_id
        )

    def _ours(self, queue: MessageQueue) -> MessageQueue:
        """The same; raises QueueNotOurs."""
        inner = self._inner(queue)
        if inner not in self._queues:
            raise QueueNotOurs(_name(queue))
        return inner


def _name(queue: MessageQueue) -> str:
    return f"{queue.topic} queue {queue.queue_id} at {queue.broker_name}"
