"""Requests of POP consumers that lend nothing: is there a message, show me some, how many wait."""

from collections.abc import Callable, Iterator
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.pop.ordered_pop import OrderedPops
from penstock.broker.pop.pop_polling import ALL_QUEUES, Waiting
from penstock.broker.pop.pop_reader import Taken, read
from penstock.broker.pop.pop_request import Ask, Requests
from penstock.broker.pull import ALL
from penstock.rpc.answers import Answer, InThread, Reply, Suspend
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import RequestCode, ResponseCode

RETRY_EVERY: Final = 5
"""One of so many peeks looks at messages to retry first."""


class Looks:
    """NOTIFICATION, PEEK_MESSAGE and POLLING_INFO."""

    def __init__(
        self,
        context: BrokerContext,
        requests: Requests,
        order: OrderedPops,
        waiting: Waiting,
        present: Callable[[], int],
    ) -> None:
        self._context = context
        self._requests = requests
        self._order = order
        self._waiting = waiting
        self._present = present
        self._turn = 0

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.NOTIFICATION, self.notify),
            Row(RequestCode.PEEK_MESSAGE, self.peek),
            Row(RequestCode.POLLING_INFO, self.tell_waiting),
        ]

    # --- notifications

    def notify(self, command: Command) -> Answer:
        """Whether a pop would find something; if not, wait until it would."""
        ask = self._requests.notification(command)
        return self._look(ask, command.now_ms, last=False)

    def _look(self, ask: Ask, now_ms: int, *, last: bool) -> Answer:
        rest = self._rest(ask, now_ms)
        if rest > 0 or last or ask.deadline_ms <= now_ms:
            return _notified(found=rest > 0)
        wait_queue = self._waiting.wait_queue(ask, notify=True)
        if wait_queue is None:
            return _notified(found=False, full=True)

        def retry(last: bool) -> Answer:
            self._requests.readable(ask.topic, ask.queue_id)
            now_ms = self._present()
            # Each message is worth telling one of those who wait.
            if wait_queue.waking and self._rest(ask, now_ms) > wait_queue.woken:
                self._context.long_polling.wake_next(wait_queue)
            return self._look(ask, now_ms, last=last)

        return Suspend(wait_queue, ask.deadline_ms, retry, wait_queue.notifications)

    def _rest(self, ask: Ask, now_ms: int) -> int:
        """Messages that a pop could have."""
        rest = 0
        for topic, queue in self._queues(ask):
            name = (topic, ask.group, queue.queue_id)
            if not ask.ordered or not self._order.check_block(ask.attempt_id, *name, now_ms):
                rest += max(self._high(queue) - self._offset(ask, topic, queue), 0)
        return rest

    # --- peeking

    def peek(self, command: Command) -> Answer:
        """Messages that a pop would give, without lending them."""
        ask = self._requests.peek(command)
        self._turn += 1
        queues = list(self._queues(ask))
        split = next(
            (place for place, (topic, _) in enumerate(queues) if topic != ask.topic), len(queues)
        )
        own, retries = queues[:split], queues[split:]
        begin = self._turn % max(len(own), 1)
        own = own[begin:] + own[:begin]
        queues = retries + own if self._turn % RETRY_EVERY == 0 else own + retries
        places = [(topic, queue, self._offset(ask, topic, queue)) for topic, queue in queues]
        rest = sum(max(self._high(queue) - offset, 0) for _, queue, offset in places)
        store, confirmed = self._context.store, self._context.store.confirmed
        bytes_max = self._context.settings.current.broker.pull_bytes_max

        def work() -> list[Taken]:
            found: list[Taken] = []
            count, space = ask.count_max, bytes_max
            for topic, queue, offset in places:
                if count <= 0 or space <= 0:
                    break
                taken = read(
                    topic,
                    queue,
                    offset,
                    reader=store.fresh_reader(),
                    count_max=count,
                    bytes_max=space,
                    wanted=ALL,
                    confirmed=confirmed,
                    wait=True,
                )
                if taken is not None and taken.offsets:
                    found.append(taken)
                    count -= len(taken.offsets)
                    space -= len(taken.data)
            return found

        return InThread(work, lambda found: self._peeked(ask, found, rest))

    def _peeked(self, ask: Ask, found: list[Taken], rest: int) -> Reply:
        ext = {"popTime": "0", "invisibleTime": "0", "reviveQid": "0", "restNum": str(rest)}
        if not found:
            return Reply(ResponseCode.PULL_NOT_FOUND, ext, remark="NO_MESSAGE_IN_QUEUE")
        for taken in found:
            behind_ms = max(self._present() - taken.stored_ms, 0)
            count, size = len(taken.offsets), len(taken.data)
            self._context.stats.got(ask.group, ask.topic, count, size, behind_ms)
        return Reply(ext=ext, body=b"".join([taken.data for taken in found]), remark="FOUND")

    # --- figures

    def tell_waiting(self, command: Command) -> Answer:
        """How many pops wait."""
        group, topic, queue_id = self._requests.allowed(command)
        return Reply(ext={"pollingNum": str(self._waiting.count(topic, group, queue_id))})

    # --- common

    def _queues(self, ask: Ask) -> Iterator[tuple[str, ConsumeQueue]]:
        """The queues that a pop looks at, those of the topic first."""
        topics, store = self._context.topics, self._context.store
        names = [ask.topic]
        if not ask.ordered:
            names += self._waiting.retry_topics(ask.topic, ask.group)
        for name in names:
            config = topics.get(name)
            if config is None:
                continue
            queue_ids = range(config.read_queue_nums)
            if name == ask.topic and ask.queue_id != ALL_QUEUES:
                queue_ids = range(ask.queue_id, ask.queue_id + 1)
            for queue_id in queue_ids:
                queue = store.queue(name, queue_id)
                if queue is not None:
                    yield name, queue

    def _offset(self, ask: Ask, topic: str, queue: ConsumeQueue) -> int:
        offset = self._context.offsets.get(ask.group, topic, queue.queue_id)
        return queue.min_offset if offset is None else max(offset, queue.min_offset)

    def _high(self, queue: ConsumeQueue) -> int:
        return queue.visible_max(self._context.store.confirmed)


def _notified(*, found: bool, full: bool = False) -> Reply:
    return Reply(ext={"hasMsg": str(found).lower(), "pollingFull": str(full).lower()})
