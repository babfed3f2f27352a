"""Requests of POP consumers that pop nothing: NOTIFICATION, PEEK_MESSAGE, POLLING_INFO."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, TypeAlias

from penstock.broker.context import BrokerContext
from penstock.broker.long_polling import WaitQueue
from penstock.broker.pop.ordered_pop import OrderedPops
from penstock.broker.pop.pop_polling import ALL_QUEUES, QUEUES_PER_STEP, PopPolling
from penstock.broker.pop.pop_queues import round_robin
from penstock.broker.pop.pop_reader import ReadBatch, read_messages
from penstock.broker.pop.pop_request import PollRequest, PopRequestReader
from penstock.broker.pull.pull_subscription import ALL
from penstock.rpc.answers import Answer, InThread, NextIteration, Reply, Suspend
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.rpc.steps import in_steps
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import RequestCode, ResponseCode

RETRY_EVERY: Final = 5
"""One in this many peeks reads the retry topics first."""


TopicQueue: TypeAlias = tuple[str, ConsumeQueue | None]


class PopNotification:
    """NOTIFICATION, PEEK_MESSAGE and POLLING_INFO."""

    def __init__(
        self,
        context: BrokerContext,
        requests: PopRequestReader,
        order: OrderedPops,
        waiting: PopPolling,
        now: Callable[[], int],
    ) -> None:
        self._context = context
        self._requests = requests
        self._order = order
        self._polling = waiting
        self._now = now
        self._round_robin = 0

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.NOTIFICATION, self.notify),
            Row(RequestCode.PEEK_MESSAGE, self.peek),
            Row(RequestCode.POLLING_INFO, self.polling_info),
        ]

    # --- notifications

    def notify(self, command: Command) -> Answer:
        """NOTIFICATION: responds when a pop would find messages."""
        request = self._requests.notification(command)
        return self._check(request, command.now_ms, last=False)

    def _check(
        self, request: PollRequest, now_ms: int, *, last: bool, watched: WaitQueue | None = None
    ) -> Answer:
        """Respond if there are messages, else suspend the request.

        `watched` is its wait queue if all queues are watched. Only then can the search take several
        steps and end with a suspended request: arrivals between the steps are counted.
        """
        queues = self._queues(request)
        notifications = watched.notifications if watched is not None else 0

        def step() -> Answer:
            part = list(islice(queues, QUEUES_PER_STEP))
            if any(self._rest_of(request, at, now_ms) > 0 for at in part):
                return _notification_reply(found=True)
            complete = len(part) < QUEUES_PER_STEP
            if last or request.deadline_ms <= now_ms or (watched is not None and not complete):
                return _notification_reply(found=False) if complete else NextIteration(step)
            wait_queue = self._polling.wait_queue(request, notify=True)
            if wait_queue is None:
                return _notification_reply(found=False, full=True)

            def again() -> Answer:
                self._requests.readable(request.topic, request.queue_id)
                return self._check(request, now_ms, last=False, watched=wait_queue)

            def suspend() -> Answer:
                return self._suspend(request, wait_queue, notifications if watched else None)

            missed = not complete or (watched is not None and watched is not wait_queue)
            return self._polling.when_watched(wait_queue, again if missed else suspend, again)

        return step()

    def _suspend(
        self, request: PollRequest, wait_queue: WaitQueue, notifications: int | None
    ) -> Suspend:
        def retry(last: bool) -> Answer:
            self._requests.readable(request.topic, request.queue_id)
            now_ms = self._now()
            # Each message notifies one waiting request.
            if wait_queue.waking and self._has_more(request, wait_queue.woken, now_ms):
                self._context.long_polling.wake_next(wait_queue)
            return self._check(request, now_ms, last=last)

        if notifications is None:
            notifications = wait_queue.notifications
        return Suspend(wait_queue, request.deadline_ms, retry, notifications)

    def _has_more(self, request: PollRequest, messages: int, now_ms: int) -> bool:
        """Whether a pop could read more than this number of messages. Looks only at the first of
        very many queues; in the others, each arrival notifies one request."""
        for at in islice(self._queues(request), QUEUES_PER_STEP):
            messages -= self._rest_of(request, at, now_ms)
            if messages < 0:
                return True
        return False

    def _rest_of(self, request: PollRequest, at: TopicQueue, now_ms: int) -> int:
        """The number of messages of a queue that a pop could read."""
        topic, queue = at
        if queue is None:
            return 0
        rest = max(self._high(queue) - self._offset(request, topic, queue), 0)
        if rest and request.ordered:
            name = (topic, request.group, queue.queue_id)
            return 0 if self._order.check_block(request.attempt_id, *name, now_ms) else rest
        return rest

    # --- peeking

    def peek(self, command: Command) -> Answer:
        """PEEK_MESSAGE: messages that a pop would deliver, without changing state."""
        request = self._requests.peek(command)
        self._round_robin += 1
        positions: list[tuple[str, ConsumeQueue, int]] = []  # of the queues with messages

        def look_at(at: TopicQueue) -> None:
            topic, queue = at
            if queue is not None:
                offset = self._offset(request, topic, queue)
                if offset < self._high(queue):
                    positions.append((topic, queue, offset))

        queues = self._queues(request, self._round_robin)
        return in_steps(queues, look_at, lambda: self._read(request, positions))

    def _read(
        self, request: PollRequest, positions: list[tuple[str, ConsumeQueue, int]]
    ) -> InThread:
        rest = sum(self._high(queue) - offset for _, queue, offset in positions)
        store, confirm_offset = self._context.store, self._context.store.confirm_offset
        bytes_max = self._context.settings.current.broker.pull_bytes_max

        def work() -> list[ReadBatch]:
            found: list[ReadBatch] = []
            count, space = request.count_max, bytes_max
            for topic, queue, offset in positions:
                if count <= 0 or space <= 0:
                    break
                batch = read_messages(
                    topic,
                    request.group,
                    queue,
                    offset,
                    reader=store.new_reader(),
                    count_max=count,
                    bytes_max=space,
                    wanted=ALL,
                    confirm_offset=confirm_offset,
                    wait=True,
                )
                if batch is not None and batch.offsets:
                    found.append(batch)
                    count -= len(batch.offsets)
                    space -= len(batch.data)
            return found

        return InThread(work, lambda found: self._peek_reply(request, found, rest))

    def _peek_reply(self, request: PollRequest, found: list[ReadBatch], rest: int) -> Reply:
        ext = {"popTime": "0", "invisibleTime": "0", "reviveQid": "0", "restNum": str(rest)}
        if not found:
            return Reply(ResponseCode.PULL_NOT_FOUND, ext, remark="NO_MESSAGE_IN_QUEUE")
        for batch in found:
            behind_ms = max(self._now() - batch.stored_ms, 0)
            count, size = len(batch.offsets), len(batch.data)
            self._context.stats.got(request.group, request.topic, count, size, behind_ms)
        return Reply(ext=ext, body=b"".join([batch.data for batch in found]), remark="FOUND")

    # --- waiting requests

    def polling_info(self, command: Command) -> Answer:
        """POLLING_INFO: the number of suspended pops."""
        group, topic, queue_id = self._requests.allowed(command)
        return Reply(ext={"pollingNum": str(self._polling.count(topic, group, queue_id))})

    # --- common

    def _queues(self, request: PollRequest, number: int = 0) -> Iterator[TopicQueue]:
        """The queues that a pop reads, None for one that does not exist yet.

        `number` is that of a peek: it starts at another queue than the one before, and one in
        RETRY_EVERY peeks reads the retry topics first.
        """
        retries: list[str] = []
        if not request.ordered:
            retries = self._polling.retry_topics(request.topic, request.group)
        names = [request.topic, *retries]
        if number and number % RETRY_EVERY == 0:
            names = [*retries, request.topic]
        store = self._context.store
        for name in names:
            config = self._context.topics.get(name)
            if config is None:
                continue
            count = config.read_queue_nums
            if name == request.topic and request.queue_id != ALL_QUEUES:
                yield name, store.queue(name, request.queue_id)
                continue
            first = number if name == request.topic else 0
            for queue_id in round_robin(self._context, name, count, first, made_only=True):
                yield name, store.queue(name, queue_id)

    def _offset(self, request: PollRequest, topic: str, queue: ConsumeQueue) -> int:
        offset = self._context.offsets.get(request.group, topic, queue.queue_id)
        return queue.min_offset if offset is None else max(offset, queue.min_offset)

    def _high(self, queue: ConsumeQueue) -> int:
        return queue.visible_max(self._context.store.confirm_offset)


def _notification_reply(*, found: bool, full: bool = False) -> Reply:
    return Reply(ext={"hasMsg": str(found).lower(), "pollingFull": str(full).lower()})
