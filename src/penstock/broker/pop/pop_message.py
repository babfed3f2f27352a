"""POP consumption: messages are lent for a time, not assigned by queue.

A pop takes messages of one queue or of all queues of a topic, and of the group's retry topics, for
a group. They are invisible to the group until they are acknowledged, which ends it, or until the
time is over, and then they come again through the retry topic.

| Part | What it does |
|---|---|
| `pop_request` | reads and checks requests |
| `pop_read` | reads messages of a queue |
| `loans`, `pop_journal` | what is lent: in memory, and in the log so that it survives |
| `pop_ack` | acknowledgements, and other invisible times |
| `revive` | brings back what nobody has acknowledged |
| `pop_order` | pops in order: one open pop of a queue at a time |
| `pop_wait` | requests that wait for messages |
| `pop_look` | requests that lend nothing: notifications, peeks, figures |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.pop.checkpoints import Key, Loan
from penstock.broker.pop.ordered_pop import OrderedPops, OrderedQueue
from penstock.broker.pop.pop_ack import Acks
from penstock.broker.pop.pop_metrics import add_pop_metrics
from penstock.broker.pop.pop_notification import Looks
from penstock.broker.pop.pop_polling import ALL_QUEUES, Waiting
from penstock.broker.pop.pop_reader import Taken, read, restore_topic
from penstock.broker.pop.pop_request import LateRequest, PopAsk, Requests
from penstock.broker.pop.revive import Revive
from penstock.broker.pop.revive_log import Journal
from penstock.broker.pull import SubscriptionError
from penstock.broker.retry.consumer_retry import Retry
from penstock.errors import NoPermission, PenstockError, SystemBusy
from penstock.metrics import Registry
from penstock.rpc.answers import Answer, InThread, PersistentTable, Reply, Suspend, TickAt
from penstock.rpc.command import Command
from penstock.rpc.router import Handler, Row
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import (
    POP_ORDER_REVIVE_QUEUE,
    RETRY_TOPIC_PREFIX,
    RequestCode,
    ResponseCode,
)
from penstock.wire.receipt_handle import (
    QueueKey,
    Receipt,
    format_message_offsets,
    format_start_offsets,
    kind_of,
)

CLEAN_MS: Final = 60_000
"""How often ordered queues are looked at that nobody uses any more."""
_ARRIVAL_MS: Final = 60_000

QueueName = tuple[str, str, int]  # topic, group, queue


@dataclass(slots=True)
class Haul:
    """What a pop has found so far."""

    taken: list[Taken] = field(default_factory=list)
    count: int = 0
    size: int = 0
    rest: int = 0  # messages that it left
    moved: bool = False  # past messages that nobody wants


class Pop:
    """Pops, acknowledgements and what comes back; `host` is the broker's address as messages note
    it."""

    def __init__(self, context: BrokerContext, retry: Retry, host: bytes) -> None:
        self._context = context
        self._store = context.store
        self._order = OrderedPops()
        self._order.load(context.persistence.file(OrderedPops.FILE))
        self._requests = Requests(context)
        self._waiting = Waiting(context)
        self.journal = Journal(context, host, self._order)
        self.revive = Revive(context, self.journal, host, self._waiting.listen)
        self._acks = Acks(context, self.journal, self._order, self._waiting)
        self._looks = Looks(context, self._requests, self._order, self._waiting, self._present)
        self._busy: set[QueueName] = set()  # being read by the pool for a pop
        self._turn = 0
        self._retry_share = 0
        self._now_ms = self._clean_ms = self._tick_ms = context.started_ms

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.POP_MESSAGE, self.pop),
            *(Row(row.code, self._timed(row.handler)) for row in self._acks.rows()),
            *self._looks.rows(),
        ]

    def _timed(self, handler: Handler) -> Handler:
        """Whoever an acknowledgement wakes pops at its time."""

        def handle(command: Command) -> Answer:
            self._now_ms = command.now_ms
            return handler(command)

        return handle

    # --- as a keeper of messages

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self._order,)

    def due(self) -> int:
        return min(self.revive.due(), self._order.due())

    def tick(self, now_ms: int) -> None:
        if now_ms < self._tick_ms - 1_000:
            self.journal.loans.set_back(now_ms)
            self._order.set_back(now_ms)
        self._now_ms = self._tick_ms = now_ms
        self.journal.catch_up(now_ms)
        self.revive.tick(now_ms)
        for queue in self._order.freed(now_ms):
            self._waiting.call(queue.topic, queue.group, queue.queue_id)
        self.journal.tick(now_ms)
        self._waiting.tick(now_ms)
        if not 0 <= now_ms - self._clean_ms < CLEAN_MS:
            self._clean_ms = now_ms
            self._order.clean(now_ms, self._read_queues, self._has_group)

    def finish(self, now_ms: int) -> None:
        """Before a clean end."""
        self.journal.tick(now_ms)

    def pinned_from(self) -> int | None:
        """Log offset of the first record that lent messages need; None if none are lent."""
        return self.journal.loans.pinned_from()

    def add_metrics(self, registry: Registry) -> None:
        add_pop_metrics(registry, self)

    def _read_queues(self, topic: str) -> int:
        config = self._context.topics.get(topic)
        return 0 if config is None else config.read_queue_nums

    def _has_group(self, group: str) -> bool:
        return self._context.groups.get(group) is not None

    def _present(self) -> int:
        """What time it is, for what is done outside a request: when a message came last, if that
        was later than our last request or turn."""
        stored_ms = self._store.path.store_ms
        near = self._now_ms < stored_ms <= self._now_ms + _ARRIVAL_MS
        return stored_ms if near else self._now_ms

    # --- pops

    def pop(self, command: Command) -> Answer:
        """POP_MESSAGE."""
        self._now_ms = command.now_ms
        try:
            ask = self._requests.pop(command)
        except LateRequest:
            remark = "the request came so late that its client does not wait any more"
            return Reply(ResponseCode.POLLING_TIMEOUT, _no_figures(), remark=remark)
        except SubscriptionError as error:
            return Reply(error.wire_code, remark=error.remark())
        limit = self._context.settings.current.broker.pop_batches_max
        if len(self.journal.loans) >= limit:
            raise SystemBusy.over(
                "too many batches of popped messages are not acknowledged",
                figure=len(self.journal.loans),
                limit=limit,
                unit="batches",
                setting="pop_batches_max",
            )
        return self._attempt(ask, last=False)

    def _attempt(self, ask: PopAsk, *, last: bool) -> Answer:
        """Look for messages; `last` if the client does not wait any longer."""
        haul = Haul()
        now_ms = self._present()
        for topic, queue_id in self._places(ask):
            queue = self._store.queue(topic, queue_id)
            name = (topic, ask.group, queue_id)
            if queue is None or name in self._busy or (topic != ask.topic and _mixes(haul, topic)):
                continue
            if self._context.offsets.take_reset(ask.group, topic, queue_id) is not None:
                self._order.clear(topic, ask.group, queue_id)
            offset = self._context.offsets.get(ask.group, topic, queue_id)
            if offset is None:
                begin = self._begin(ask, name, queue, last)
                if isinstance(begin, InThread):
                    if haul.taken:
                        haul.rest += queue.visible_max(self._store.confirmed)
                        continue
                    return begin
                offset = begin
            answer = self._take(ask, haul, name, queue, offset, now_ms, last)
            if answer is not None:
                return answer
        if haul.taken:
            return self._lend(ask, haul, now_ms)
        return self._wait(ask, haul, last)

    def _places(self, ask: PopAsk) -> Iterator[tuple[str, int]]:
        """The queues that a pop looks at, in order."""
        self._turn += 1
        turn, topics = self._turn, self._context.topics
        retries: list[tuple[str, int]] = []
        if not ask.ordered:
            names = self._waiting.retry_topics(ask.topic, ask.group)
            if turn % 2:
                names.reverse()
            for name in names:
                config = topics.get(name)
                if config is not None:
                    retries += [(name, queue_id) for queue_id in range(config.read_queue_nums)]
        self._retry_share += self._context.settings.current.broker.pop_retry_percent
        first = self._retry_share >= 100
        if first:
            self._retry_share -= 100
            yield from retries
        if ask.queue_id != ALL_QUEUES:
            yield ask.topic, ask.queue_id
        else:
            count = self._read_queues(ask.topic)
            for step in range(count):
                yield ask.topic, (turn + step) % count
        if not first:
            yield from retries

    def _take(
        self,
        ask: PopAsk,
        haul: Haul,
        name: QueueName,
        queue: ConsumeQueue,
        offset: int,
        now_ms: int,
        last: bool,
    ) -> Answer:
        """Take messages of a queue, if the group may have them. An answer if nothing was found yet
        and the disk has to be waited for, else None."""
        high = queue.visible_max(self._store.confirmed)
        if offset == high or self._is_blocked(ask, name, now_ms):
            return None
        config = self._context.settings.current.broker
        crowded = self.journal.loans.in_flight[name] > config.pop_in_flight_max
        if haul.count >= ask.count_max or (config.pop_in_flight_limited and crowded):
            haul.rest += max(high - offset, 0)
            return None
        space = config.pull_bytes_max - haul.size
        if space <= 0:
            haul.rest += max(high - offset, 0)
            return None
        taken = read(
            name[0],
            queue,
            offset,
            reader=self._store.reader,
            count_max=ask.count_max - haul.count,
            bytes_max=space,
            wanted=ask.wanted,
            confirmed=self._store.confirmed,
            wait=False,
        )
        if taken is None:
            if not haul.taken:
                return self._read_in_pool(ask, name, queue, offset, last)
            haul.rest += max(high - offset, 0)
            return None
        self._keep(ask, haul, taken)
        return None

    def _is_blocked(self, ask: PopAsk, name: QueueName, now_ms: int) -> bool:
        return ask.ordered and self._order.check_block(ask.attempt_id, *name, now_ms)

    def _keep(self, ask: PopAsk, haul: Haul, taken: Taken) -> None:
        """Add what a queue gave; the group goes on behind what it does not want."""
        haul.rest += taken.rest()
        if taken.offsets:
            haul.taken.append(taken)
            haul.count += len(taken.offsets)
            haul.size += len(taken.data)
        elif taken.next_offset != self._context.offsets.get(
            ask.group, taken.topic, taken.queue.queue_id
        ):
            self._context.offsets.commit(
                ask.group, taken.topic, taken.queue.queue_id, taken.next_offset, self._now_ms
            )
            haul.moved = True

    # --- reading what is not in memory

    def _read_in_pool(
        self, ask: PopAsk, name: QueueName, queue: ConsumeQueue, offset: int, last: bool
    ) -> InThread:
        """Have a queue read; nobody else of the group reads it meanwhile."""
        store, confirmed = self._store, self._store.confirmed
        bytes_max = self._context.settings.current.broker.pull_bytes_max
        self._busy.add(name)

        def work() -> Taken | Exception:
            try:
                return read(
                    name[0],
                    queue,
                    offset,
                    reader=store.fresh_reader(),
                    count_max=ask.count_max,
                    bytes_max=bytes_max,
                    wanted=ask.wanted,
                    confirmed=confirmed,
                    wait=True,
                ) or Taken(name[0], queue, offset, offset)
            except Exception as error:  # the queue is set free whatever happens
                return error

        def then(taken: Taken | Exception) -> Answer:
            self._busy.discard(name)
            if isinstance(taken, Exception):
                self._waiting.call_for(ask.topic, ask.group, (name[0], name[2]))
                raise taken
            return self._read(ask, name, taken, offset, last)

        return InThread(work, then)

    def _read(self, ask: PopAsk, name: QueueName, taken: Taken, offset: int, last: bool) -> Answer:
        offsets, now_ms = self._context.offsets, self._present()
        here = offsets.get(ask.group, name[0], name[2])
        gone = taken.queue.gone or here != offset or offsets.has_reset(ask.group, name[0], name[2])
        if gone or self._is_blocked(ask, name, now_ms):
            return self._attempt(ask, last=last)  # something else happened there meanwhile
        haul = Haul()
        self._keep(ask, haul, taken)
        answer = self._lend(ask, haul, now_ms) if haul.taken else self._wait(ask, haul, last)
        self._waiting.call_for(ask.topic, ask.group, (name[0], name[2]))
        return answer

    # --- where a group begins

    def _begin(
        self, ask: PopAsk, name: QueueName, queue: ConsumeQueue, last: bool
    ) -> int | InThread:
        """Where a group without progress begins; it may depend on what the disk holds."""
        if ask.from_first or name[0].startswith(RETRY_TOPIC_PREFIX):
            return self._commit_begin(name, queue.min_offset)
        look: Callable[[], bool] | None = None
        if self._context.settings.current.broker.pop_first_if_young:
            look = self._context.offsets.starts_young(name[0], name[2])
        if look is not None:
            return InThread(look, lambda young: self._begun(ask, name, young, last))
        return self._commit_begin(name, self._newest(queue))

    def _begun(self, ask: PopAsk, name: QueueName, young: bool, last: bool) -> Answer:
        queue = self._store.queue(name[0], name[2])
        if queue is not None and self._context.offsets.get(name[1], name[0], name[2]) is None:
            self._commit_begin(name, 0 if young else self._newest(queue))
        return self._attempt(ask, last=last)

    def _newest(self, queue: ConsumeQueue) -> int:
        return max(queue.visible_max(self._store.confirmed) - 1, 0)

    def _commit_begin(self, name: QueueName, offset: int) -> int:
        self._context.offsets.commit(name[1], name[0], name[2], offset, self._now_ms)
        return offset

    # --- answering

    def _lend(self, ask: PopAsk, haul: Haul, now_ms: int) -> Answer:
        """Lend what was found, and hand it out."""
        revive_queue_id = POP_ORDER_REVIVE_QUEUE if ask.ordered else self.journal.next_queue()
        keys = [
            Key(taken.topic, ask.group, taken.queue.queue_id, taken.start, now_ms)
            for taken in haul.taken
        ]
        pop_ms = self._acks.free_pop_ms(keys, now_ms)
        counts: list[str] = []
        given: list[Taken] = []
        for key, taken in zip(keys, haul.taken, strict=True):
            try:
                if ask.ordered:
                    counts.append(self._lend_in_order(ask, taken, pop_ms, now_ms))
                else:
                    key = key._replace(pop_ms=pop_ms)
                    loan = Loan(key, ask.invisible_ms, taken.offsets, revive_queue_id)
                    loan.place = taken.place
                    self.journal.lend(loan, now_ms, taken.next_offset)
            except PenstockError:
                if not given:
                    raise
                haul.rest += len(taken.offsets)
                continue
            given.append(taken)
        receipt = Receipt(
            0,
            pop_ms,
            ask.invisible_ms,
            revive_queue_id,
            kind_of(ask.topic),
            self._context.settings.current.broker.name,
            0,
            0,
        )
        body = b"".join([self._hand_out(ask, taken, receipt, now_ms) for taken in given])
        ext = _figures(ask, pop_ms, revive_queue_id, haul.rest, given)
        if ask.ordered:
            ext["orderCountInfo"] = ";".join(counts)
        if haul.rest > 0:
            self._waiting.call(ask.topic, ask.group, ask.queue_id)
        return Reply(ResponseCode.SUCCESS, ext, body, "FOUND")

    def _lend_in_order(self, ask: PopAsk, taken: Taken, pop_ms: int, now_ms: int) -> str:
        """Note an ordered pop; the group's offset stays where it begins."""
        queue = OrderedQueue(taken.topic, ask.group, taken.queue.queue_id)
        before = self._order.state(queue)
        counts = self._order.update(ask.attempt_id, *queue, pop_ms, ask.invisible_ms, taken.offsets)
        try:
            self.journal.note_order(queue, taken.start, now_ms)
        except PenstockError:
            self._order.restore(queue, before)
            raise
        self._context.effects.put(TickAt(self._order.due()))
        return counts

    def _hand_out(self, ask: PopAsk, taken: Taken, receipt: Receipt, now_ms: int) -> bytes:
        """Count what is given; the records as the client gets them."""
        context = self._context
        behind_ms = max(now_ms - taken.stored_ms, 0)
        context.stats.got(ask.group, taken.topic, len(taken.offsets), len(taken.data), behind_ms)
        if not ask.ordered:
            context.stats.popped(ask.group, ask.topic)
        shown = context.settings.current.broker.pop_retry_topic_shown
        if taken.topic == ask.topic or shown:
            return taken.data
        receipt = receipt._replace(
            start_offset=taken.start, kind=kind_of(taken.topic), queue_id=taken.queue.queue_id
        )
        texts = [receipt._replace(queue_offset=offset).format() for offset in taken.offsets]
        return restore_topic(taken.data, ask.topic, texts)

    def _wait(self, ask: PopAsk, haul: Haul, last: bool) -> Answer:
        """Nothing was found: wait for something, if the client does."""
        code = ResponseCode.POLLING_TIMEOUT
        if not last and ask.deadline_ms > self._present():
            if haul.moved and haul.rest > 0:
                # There is more to look at; others have their turn first.
                return InThread(lambda: None, lambda _: self._attempt(ask, last=False))
            wait_queue = self._waiting.wait_queue(ask, notify=False)
            if wait_queue is not None:
                retry = functools.partial(self._again, ask)
                return Suspend(wait_queue, ask.deadline_ms, retry, wait_queue.notifications)
            code = ResponseCode.POLLING_FULL
        self._context.stats.missed()
        ext = _figures(ask, self._present(), 0, haul.rest, [])
        return Reply(code, ext, remark="NO_MESSAGE_IN_QUEUE")

    def _again(self, ask: PopAsk, last: bool) -> Answer:
        """A pop that waited: perhaps there is something now."""
        try:
            self._requests.readable(ask.topic, ask.queue_id)
            group = self._context.groups.get(ask.group)
            if group is not None and not group.consume_enable:
                raise NoPermission(f"the group {ask.group} may not consume any more")
        except PenstockError:
            self._waiting.call(ask.topic, ask.group, ask.queue_id)  # whoever waits behind it, too
            raise
        return self._attempt(ask, last=last)


def _mixes(haul: Haul, topic: str) -> bool:
    """Whether messages of another retry topic were taken: an answer tells of one only."""
    return any(
        taken.topic != topic and taken.topic.startswith(RETRY_TOPIC_PREFIX) for taken in haul.taken
    )


def _figures(
    ask: PopAsk, pop_ms: int, revive_queue_id: int, rest: int, taken: list[Taken]
) -> dict[str, str]:
    """What the answer's header tells."""
    starts = {QueueKey(kind_of(t.topic), t.queue.queue_id): t.start for t in taken}
    offsets = {QueueKey(kind_of(t.topic), t.queue.queue_id): t.offsets for t in taken}
    return {
        "popTime": str(pop_ms),
        "invisibleTime": str(ask.invisible_ms),
        "reviveQid": str(revive_queue_id),
        "restNum": str(rest),
        "startOffsetInfo": format_start_offsets(starts),
        "msgOffsetInfo": format_message_offsets(offsets),
    }


def _no_figures() -> dict[str, str]:
    """Java unboxes these whatever the code is."""
    return {"popTime": "0", "invisibleTime": "0", "reviveQid": "0", "restNum": "0"}
