"""The queues of a pull consumer: messages are fetched ahead, and handed out when asked for.

A queue's position is the offset of the next message that is handed out. Moving it (`begin`) throws
away what was fetched and what is on its way; then pulling begins anew.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.client.client_session import Session
from penstock.client.consumer.offset_store import Offsets
from penstock.client.consumer.process_queue import FlowLimits, ProcessQueue
from penstock.client.consumer.pull_loop import Puller, Troubles
from penstock.client.consumer.rebalance import StartAt, first_offset
from penstock.client.consumer.subscription import Subscription
from penstock.client.messages import MessageQueue
from penstock.client.received_message import ReceivedMessage
from penstock.clock import finish_within, pause
from penstock.errors import PenstockError, QueueNotOurs
from penstock.wire.codes import PULL_SUBSCRIPTION, PULL_SUSPEND

log = logging.getLogger(__name__)

AGAIN_MS = 1_000
"""After so long it is asked again where to begin in a queue."""


class CarryingPuller(Puller):
    """Pulls with the filter in each request: brokers need not know this consumer's subscription."""

    def _pull_fields(self) -> Mapping[str, str]:
        fields = super()._pull_fields()
        subscription = self._subscription()
        return {
            **fields,
            "sysFlag": str(PULL_SUSPEND | PULL_SUBSCRIPTION),
            "subscription": subscription.expression,
        }


class PulledQueues:
    """All queues that a consumer pulls; topics are named as servers know them."""

    def __init__(
        self,
        session: Session,
        group: str,
        offsets: Offsets,
        *,
        subscription: Callable[[str], Subscription],
        start_at: StartAt,
        limits: FlowLimits,
        batch: int,
    ) -> None:
        self.works: dict[MessageQueue, ProcessQueue] = {}
        self._session = session
        self._group = group
        self._offsets = offsets
        self._subscription = subscription
        self._start_at = start_at
        self._limits = limits
        self._batch = batch
        self._pullers: dict[MessageQueue, asyncio.Task[object]] = {}
        self._opening: dict[MessageQueue, asyncio.Task[object]] = {}
        self._paused: set[MessageQueue] = set()
        self._withheld: set[MessageQueue] = set()
        self._arrived = asyncio.Event()
        self._troubles = Troubles()
        self._turn = 0

    # --- coming and going

    def __contains__(self, queue: object) -> bool:
        return queue in self.works or queue in self._opening

    def __iter__(self) -> Iterator[MessageQueue]:
        return iter({**self.works, **self._opening})

    def open(self, queue: MessageQueue) -> None:
        """Begin where the group has come to, which is found out first."""
        self._opening[queue] = self._session.spawn(self._open(queue))

    def begin(self, queue: MessageQueue, offset: int) -> None:
        """Go on at this offset, and with nothing that was fetched before."""
        self._stop(queue)
        work = self.works[queue] = ProcessQueue(queue, offset, self._limits, ordered=True)
        work.paused = queue in self._paused
        puller = CarryingPuller(
            self._session,
            self._group,
            work,
            subscription=lambda: self._subscription(queue.topic),
            received=self._received,
            moved=self._moved,
            batch=self._batch,
            troubles=self._troubles,
        )
        self._pullers[queue] = self._session.spawn(puller.run())

    def withhold(self, queue: MessageQueue) -> None:
        """Hand out nothing more of a queue and fetch no more; its position can still be asked."""
        self._withheld.add(queue)
        puller = self._pullers.pop(queue, None)
        if puller is not None:
            puller.cancel()

    def end(self, queue: MessageQueue) -> None:
        """The queue is not ours any more."""
        self._stop(queue)
        self._paused.discard(queue)
        self._withheld.discard(queue)

    async def _open(self, queue: MessageQueue) -> None:
        while True:
            try:
                offset = await first_offset(self._session, self._offsets, queue, self._start_at)
                break
            except PenstockError as error:
                log.warning(
                    "%s: where to begin in %s is not known yet: %s", self._group, queue, error
                )
                await pause(self._session.clock, AGAIN_MS)
        del self._opening[queue]  # so that this task is not called off
        self.begin(queue, offset)

    def _stop(self, queue: MessageQueue) -> None:
        for tasks in (self._opening, self._pullers):
            task = tasks.pop(queue, None)
            if task is not None:
                task.cancel()
        work = self.works.pop(queue, None)
        if work is not None:
            work.drop()

    def _received(self, work: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        self._arrived.set()

    def _moved(self, work: ProcessQueue, offset: int) -> None:
        """The broker has no such offset and names another."""
        if self.works.get(work.queue) is work:
            # Not from inside the puller, which is called off by it.
            self._session.spawn(self._move(work, offset))

    async def _move(self, work: ProcessQueue, offset: int) -> None:
        if self.works.get(work.queue) is work and work.queue not in self._withheld:
            self.begin(work.queue, offset)

    # --- handing out

    def take(self, count_max: int) -> list[ReceivedMessage]:
        """Messages of queues that are not paused: of each in order, each queue in its turn."""
        queues = list(self.works)
        self._turn = (self._turn + 1) % max(len(queues), 1)
        found: list[ReceivedMessage] = []
        for queue in queues[self._turn :] + queues[: self._turn]:
            work = self.works[queue]
            if not work.count or work.paused or queue in self._withheld:
                continue
            taken = work.take(count_max - len(found))
            work.finish(taken)
            found += taken
            if len(found) >= count_max:
                break
        return found

    async def arrival(self, ms: int) -> None:
        """Wait until there may be something to take, at most so long."""
        self._arrived.clear()
        try:
            await finish_within(self._session.clock, ms, self._arrived.wait())
        except TimeoutError:
            return

    def positions(self) -> dict[MessageQueue, int]:
        """The offset of the next message of each queue, as far as it is known."""
        return {queue: work.progress for queue, work in self.works.items()}

    async def position(self, queue: MessageQueue) -> int:
        """The offset of the next message; raises QueueNotOurs."""
        opening = self._opening.get(queue)
        if opening is not None:
            await asyncio.wait([opening])
        work = self.works.get(queue)
        if work is None:
            raise QueueNotOurs(f"{queue.topic} queue {queue.queue_id} at {queue.broker_name}")
        return work.progress

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Hand out and fetch nothing more of these; what is here is kept."""
        for queue in queues:
            self._paused.add(queue)
            if queue in self.works:
                self.works[queue].pause()

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """The same queues again."""
        for queue in queues:
            self._paused.discard(queue)
            if queue in self.works:
                self.works[queue].resume()
                self._arrived.set()
