"""Requests of POP consumers that pop nothing: NOTIFICATION, PEEK_MESSAGE, POLLING_INFO."""

from collections.abc import Callable, Iterator
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.pop.ordered_pop import OrderedPops
from penstock.broker.pop.pop_polling import ALL_QUEUES, PopPolling
from penstock.broker.pop.pop_reader import ReadBatch, read_messages
from penstock.broker.pop.pop_request import PollRequest, PopRequestReader
from penstock.broker.pull import ALL
from penstock.rpc.answers import Answer, InThread, Reply, Suspend
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import RequestCode, ResponseCode

RETRY_EVERY: Final = 5
"""One in this many peeks reads the retry topics first."""


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

    def _check(self, request: PollRequest, now_ms: int, *, last: bool) -> Answer:
        rest = self._rest(request, now_ms)
        if rest > 0 or last or request.deadline_ms <= now_ms:
            return _notification_reply(found=rest > 0)
        wait_queue = self._polling.wait_queue(request, notify=True)
        if wait_queue is None:
            return _notification_reply(found=False, full=True)

        def retry(last: bool) -> Answer:
            self._requests.readable(request.topic, request.queue_id)
            now_ms = self._now()
            # Each message notifies one waiting request.
            if wait_queue.waking and self._rest(request, now_ms) > wait_queue.woken:
                self._context.long_polling.wake_next(wait_queue)
            return self._check(request, now_ms, last=last)

        return Suspend(wait_queue, request.deadline_ms, retry, wait_queue.notifications)

    def _rest(self, request: PollRequest, now_ms: int) -> int:
        """The number of messages that a pop could read."""
        rest = 0
        for topic, queue in self._queues(request):
            name = (topic, request.group, queue.queue_id)
            if not request.ordered or not self._order.check_block(
                request.attempt_id, *name, now_ms
            ):
                rest += max(self._high(queue) - self._offset(request, topic, queue), 0)
        return rest

    # --- peeking

    def peek(self, command: Command) -> Answer:
        """PEEK_MESSAGE: messages that a pop would deliver, without changing state."""
        request = self._requests.peek(command)
        self._round_robin += 1
        queues = list(self._queues(request))
        split = next(
            (index for index, (topic, _) in enumerate(queues) if topic != request.topic),
            len(queues),
        )
        own, retries = queues[:split], queues[split:]
        begin = self._round_robin % max(len(own), 1)
        own = own[begin:] + own[:begin]
        queues = retries + own if self._round_robin % RETRY_EVERY == 0 else own + retries
        positions = [(topic, queue, self._offset(request, topic, queue)) for topic, queue in queues]
        rest = sum(max(self._high(queue) - offset, 0) for _, queue, offset in positions)
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

    def _queues(self, request: PollRequest) -> Iterator[tuple[str, ConsumeQueue]]:
        """The queues that a pop reads, those of the topic first."""
        topics, store = self._context.topics, self._context.store
        names = [request.topic]
        if not request.ordered:
            names += self._polling.retry_topics(request.topic, request.group)
        for name in names:
            config = topics.get(name)
            if config is None:
                continue
            queue_ids = range(config.read_queue_nums)
            if name == request.topic and request.queue_id != ALL_QUEUES:
                queue_ids = range(request.queue_id, request.queue_id + 1)
            for queue_id in queue_ids:
                queue = store.queue(name, queue_id)
                if queue is not None:
                    yield name, queue

    def _offset(self, request: PollRequest, topic: str, queue: ConsumeQueue) -> int:
        offset = self._context.offsets.get(request.group, topic, queue.queue_id)
        return queue.min_offset if offset is None else max(offset, queue.min_offset)

    def _high(self, queue: ConsumeQueue) -> int:
        return queue.visible_max(self._context.store.confirm_offset)


def _notification_reply(*, found: bool, full: bool = False) -> Reply:
    return Reply(ext={"hasMsg": str(found).lower(), "pollingFull": str(full).lower()})
