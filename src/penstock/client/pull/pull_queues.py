"""The queues of a pull consumer: messages are fetched ahead of `poll`.

The position of a queue is the offset of the next message for `poll`. Moving it (`start`) discards
fetched messages and the pull in flight.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.client.client_session import Session
from penstock.client.consumer.offset_store import OffsetStore
from penstock.client.consumer.process_queue import FlowLimits, ProcessQueue, queue_text
from penstock.client.consumer.pull_loop import Puller, PullFailures
from penstock.client.consumer.rebalance import StartAt, first_offset
from penstock.client.consumer.subscription import Subscription
from penstock.client.messages import MessageQueue
from penstock.client.received_message import ReceivedMessage
from penstock.clock import finish_within, pause
from penstock.errors import PenstockError, QueueNotAssigned
from penstock.wire.codes import PULL_SUBSCRIPTION, PULL_SUSPEND

log = logging.getLogger(__name__)

RETRY_MS = 1_000
"""Pause before the start offset of a queue is queried again."""


class InlineFilterPuller(Puller):
    """Sends the filter in each pull, so brokers need not know the subscription."""

    def _pull_fields(self) -> Mapping[str, str]:
        fields = super()._pull_fields()
        subscription = self._subscription()
        return {
            **fields,
            "sysFlag": str(PULL_SUSPEND | PULL_SUBSCRIPTION),
            "subscription": subscription.expression,
        }


class PulledQueues:
    """All queues of a pull consumer; topics have the namespace."""

    def __init__(
        self,
        session: Session,
        group: str,
        offsets: OffsetStore,
        *,
        subscription: Callable[[str], Subscription],
        start_at: StartAt,
        limits: FlowLimits,
        batch: int,
    ) -> None:
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self._session = session
        self._group = group
        self._offsets = offsets
        self._subscription = subscription
        self._start_at = start_at
        self._limits = limits
        self._batch = batch
        self._pull_tasks: dict[MessageQueue, asyncio.Task[object]] = {}
        self._opening: dict[MessageQueue, asyncio.Task[object]] = {}  # start offset not known yet
        self._paused: set[MessageQueue] = set()
        self._suspended: set[MessageQueue] = set()
        self._arrived = asyncio.Event()
        self._failures = PullFailures()
        self._turn = 0  # index of the queue that `take` starts with

    # --- starting and ending

    def __contains__(self, queue: object) -> bool:
        return queue in self.process_queues or queue in self._opening

    def __iter__(self) -> Iterator[MessageQueue]:
        return iter({**self.process_queues, **self._opening})

    def open(self, queue: MessageQueue) -> None:
        """Start a queue at the committed offset, which is queried first."""
        self._opening[queue] = self._session.spawn(self._open(queue))

    def start(self, queue: MessageQueue, offset: int) -> None:
        """Start a queue at this offset; messages fetched before are discarded."""
        self._stop(queue)
        process_queue = self.process_queues[queue] = ProcessQueue(
            queue, offset, self._limits, ordered=True
        )
        process_queue.paused = queue in self._paused
        puller = InlineFilterPuller(
            self._session,
            self._group,
            process_queue,
            subscription=lambda: self._subscription(queue.topic),
            on_messages=self._messages_arrived,
            on_offset_moved=self._offset_moved,
            batch=self._batch,
            failures=self._failures,
        )
        self._pull_tasks[queue] = self._session.spawn(puller.run())

    def suspend(self, queue: MessageQueue) -> None:
        """Stop fetching and polling a queue; its position is still available."""
        self._suspended.add(queue)
        task = self._pull_tasks.pop(queue, None)
        if task is not None:
            task.cancel()

    def end(self, queue: MessageQueue) -> None:
        """Remove a queue that is no longer assigned."""
        self._stop(queue)
        self._paused.discard(queue)
        self._suspended.discard(queue)

    async def _open(self, queue: MessageQueue) -> None:
        while True:
            try:
                offset = await first_offset(self._session, self._offsets, queue, self._start_at)
                break
            except PenstockError as error:
                log.warning(
                    "%s: cannot find the start offset of queue %s: %s",
                    self._group,
                    queue_text(queue),
                    error,
                )
                await pause(self._session.clock, RETRY_MS)
        del self._opening[queue]  # otherwise `start` would cancel this task
        self.start(queue, offset)

    def _stop(self, queue: MessageQueue) -> None:
        for tasks in (self._opening, self._pull_tasks):
            task = tasks.pop(queue, None)
            if task is not None:
                task.cancel()
        process_queue = self.process_queues.pop(queue, None)
        if process_queue is not None:
            process_queue.drop()

    def _messages_arrived(
        self, process_queue: ProcessQueue, messages: list[ReceivedMessage]
    ) -> None:
        self._arrived.set()

    def _offset_moved(self, process_queue: ProcessQueue, offset: int) -> None:
        """The broker does not have the offset and suggests another."""
        if self.process_queues.get(process_queue.queue) is process_queue:
            # In another task: `start` cancels the pull loop, which called this.
            self._session.spawn(self._move(process_queue, offset))

    async def _move(self, process_queue: ProcessQueue, offset: int) -> None:
        if (
            self.process_queues.get(process_queue.queue) is process_queue
            and process_queue.queue not in self._suspended
        ):
            self.start(process_queue.queue, offset)

    # --- polling

    def take(self, count_max: int) -> list[ReceivedMessage]:
        """Messages of queues that are not paused, in the order of each queue."""
        queues = list(self.process_queues)
        self._turn = (self._turn + 1) % max(len(queues), 1)
        found: list[ReceivedMessage] = []
        for queue in queues[self._turn :] + queues[: self._turn]:
            process_queue = self.process_queues[queue]
            if not process_queue.count or process_queue.paused or queue in self._suspended:
                continue
            taken = process_queue.take(count_max - len(found))
            process_queue.finish(taken)
            found += taken
            if len(found) >= count_max:
                break
        return found

    async def arrival(self, ms: int) -> None:
        """Wait until messages may have arrived, at most this long."""
        self._arrived.clear()
        try:
            await finish_within(self._session.clock, ms, self._arrived.wait())
        except TimeoutError:
            return

    def positions(self) -> dict[MessageQueue, int]:
        """The position of each started queue."""
        return {
            queue: process_queue.progress for queue, process_queue in self.process_queues.items()
        }

    async def position(self, queue: MessageQueue) -> int:
        """The position of a queue; raises QueueNotAssigned."""
        opening = self._opening.get(queue)
        if opening is not None:
            await asyncio.wait([opening])
        process_queue = self.process_queues.get(queue)
        if process_queue is None:
            raise QueueNotAssigned(f"{queue.topic} queue {queue.queue_id} at {queue.broker_name}")
        return process_queue.progress

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Stop fetching and polling these queues; fetched messages are kept."""
        for queue in queues:
            self._paused.add(queue)
            if queue in self.process_queues:
                self.process_queues[queue].pause()

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Fetch and poll these queues again."""
        for queue in queues:
            self._paused.discard(queue)
            if queue in self.process_queues:
                self.process_queues[queue].resume()
                self._arrived.set()
