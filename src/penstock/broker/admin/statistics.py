"""Statistics of topics and groups: offsets, lag and throughput.

Offsets are collected in the event loop, step by step; between the steps store times of messages are
read in the thread pool.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from penstock.broker.admin.large_requests import refuse_too_many_queues
from penstock.broker.context import BrokerContext
from penstock.errors import Refused
from penstock.rpc.answers import Answer, InThread
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_from_pool, reply_with
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import FILLER_SIZE, ConsumeQueue
from penstock.store.store import MessageStore
from penstock.wire.bodies.admin_bodies import (
    ConsumeStats,
    ConsumeStatsList,
    OffsetWrapper,
    QueryConsumeTimeSpanBody,
    QueueTimeSpan,
    TopicOffset,
    TopicStatsTable,
)
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import RequestCode

STEP_QUEUES = 500
"""Queues whose offsets are collected in one step: about 2 ms."""

R = TypeVar("R")


class WantedTopic(NamedTuple):
    """A topic whose first queues are wanted, for a group if it has a name."""

    group: str
    topic: str
    queues: int


class QueueOffsets(msgspec.Struct, frozen=True, gc=False):
    """The offsets of a queue, and of a group in it."""

    message_queue: MessageQueue
    queue: ConsumeQueue | None  # None: it never had a message
    first_offset: int
    broker_offset: int
    consumer_offset: int | None
    pull_offset: int


class TopicOffsets(msgspec.Struct, frozen=True, gc=False):
    """A group's offsets in some queues of a topic, and its messages per second."""

    group: str
    topic: str
    queue_offsets: list[QueueOffsets]
    get_tps: float


class StatisticsHandlers:
    """VIEW_BROKER_STATS_DATA, GET_TOPIC_STATS_INFO, GET_CONSUME_STATS and related requests."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.VIEW_BROKER_STATS_DATA, self.view_stats),
            Row(RequestCode.GET_TOPIC_STATS_INFO, self.topic_stats),
            Row(RequestCode.GET_CONSUME_STATS, self.consume_stats),
            Row(RequestCode.GET_BROKER_CONSUME_STATS, self.all_consume_stats),
            Row(RequestCode.QUERY_CONSUME_TIME_SPAN, self.consume_time_spans),
        ]

    def view_stats(self, command: Command) -> Answer:
        """The statistics of one counter."""
        name, key = command.text("statsName"), command.text("statsKey")
        cluster = self._context.settings.current.broker.cluster
        data = None
        if not name.startswith("BROKER_") or key == cluster:
            data = self._context.stats.view(name, key)
        if data is None:
            raise Refused(f"there are no statistics of {name} for {key} yet")
        return reply_with(data)

    def topic_stats(self, command: Command) -> Answer:
        """Min and max offset of each queue of a topic, and the time of its last message."""
        topic = command.text("topic")
        config = self._context.topics.need(topic)
        put_tps = self._context.stats.put_tps(topic)
        queues = max(config.read_queue_nums, config.write_queue_nums)
        store = self._context.store

        def read(part: TopicOffsets) -> dict[MessageQueue, TopicOffset]:
            return {
                at.message_queue: TopicOffset(
                    min_offset=at.first_offset,
                    max_offset=at.broker_offset,
                    last_update_timestamp=max(stored_ms(store, at.queue, at.broker_offset - 1), 0),
                )
                for at in part.queue_offsets
            }

        def finish(tables: list[dict[MessageQueue, TopicOffset]]) -> TopicStatsTable:
            table = {queue: offset for part in tables for queue, offset in part.items()}
            return TopicStatsTable(topic_put_tps=put_tps, offset_table=table)

        steps = self._collect([WantedTopic("", topic, queues)])
        return _in_steps(steps, read, lambda parts: reply_from_pool(lambda: finish(parts)))

    def consume_stats(self, command: Command) -> Answer:
        """The offsets of a group in the requested topics, or in all its topics."""
        group = command.text("consumerGroup")
        wanted = [topic for topic in command.text_or("topicList").split(";") if topic]
        if not wanted:
            topic = command.text_or("topic").strip()
            known = [topic] if topic else self._context.offsets.topics_of_group(group)
            wanted = [topic for topic in known if self._subscribes(group, topic)]
        known_topics = (
            WantedTopic(group, topic, config.read_queue_nums)
            for topic in wanted
            if (config := self._context.topics.get(topic)) is not None
        )
        store = self._context.store
        return _in_steps(
            self._collect(known_topics),
            lambda part: (part, _offset_table(store, part)),
            lambda parts: reply_from_pool(lambda: _consume_stats(parts)),
        )

    def all_consume_stats(self, command: Command) -> Answer:
        """The offsets of all groups in all their topics."""
        store, address = self._context.store, self._context.address
        groups = list(self._context.groups.table.groups)
        return _in_steps(
            self._collect(self._all_topics(groups, ordered=command.truth("isOrder"))),
            lambda part: (part, _offset_table(store, part)),
            lambda parts: reply_from_pool(lambda: _all_consume_stats(groups, parts, address)),
        )

    def consume_time_spans(self, command: Command) -> Answer:
        """The store times of each queue's first, last and last consumed message."""
        topic, group = command.text("topic"), command.text("group")
        config = self._context.topics.need(topic)
        store = self._context.store

        def finish(spans: list[list[QueueTimeSpan]]) -> QueryConsumeTimeSpanBody:
            return QueryConsumeTimeSpanBody(
                consume_time_span_set=[span for part in spans for span in part]
            )

        return _in_steps(
            self._collect([WantedTopic(group, topic, config.write_queue_nums)]),
            lambda part: [_time_span(store, at, command.now_ms) for at in part.queue_offsets],
            lambda spans: reply_from_pool(lambda: finish(spans)),
        )

    # --- in the event loop

    def _collect(self, wanted: Iterable[WantedTopic]) -> Iterator[list[TopicOffsets]]:
        """The offsets of these topics, in steps; changes during the iteration may be missed."""
        step: list[TopicOffsets] = []
        left, total = STEP_QUEUES, 0
        for group, topic, queues in wanted:
            total += queues
            refuse_too_many_queues(
                "statistics of too many queues in one response",
                total,
                hint="ask for single topics or groups",
            )
            tps = self._context.stats.get_tps(group, topic) if group else 0.0
            begin = 0
            while begin < queues:
                end = min(begin + left, queues)
                found = self._queue_offsets(group, topic, range(begin, end))
                step.append(TopicOffsets(group, topic, found, tps))
                left -= end - begin
                begin = end
                if left == 0:
                    yield step
                    step, left = [], STEP_QUEUES
        if step:
            yield step

    def _queue_offsets(self, group: str, topic: str, queues: range) -> list[QueueOffsets]:
        store, offsets = self._context.store, self._context.offsets
        broker_name = self._context.settings.current.broker.name
        found = []
        for queue_id in queues:
            queue = store.queue(topic, queue_id)
            committed = offsets.get(group, topic, queue_id) if group else None
            pulled = offsets.pulled(group, topic, queue_id) if group else None
            found.append(
                QueueOffsets(
                    message_queue=MessageQueue(topic, broker_name, queue_id),
                    queue=queue,
                    first_offset=queue.min_offset if queue is not None else 0,
                    broker_offset=queue.visible_max(store.confirm_offset)
                    if queue is not None
                    else 0,
                    consumer_offset=committed,
                    pull_offset=max(committed or 0, pulled or 0),
                )
            )
        return found

    def _subscribes(self, group: str, topic: str) -> bool:
        """False if the group is connected and subscribes only to other topics."""
        connected = self._context.clients.consumer_group(group)
        if connected is None or not connected.subscriptions:
            return True
        return topic in connected.subscriptions

    def _all_topics(self, groups: list[str], *, ordered: bool) -> Iterator[WantedTopic]:
        """All topics with offsets of these groups."""
        context = self._context
        for group in groups:
            for topic in context.offsets.topics_of_group(group):
                config = context.topics.get(topic)
                if config is None or (ordered and not config.order):
                    continue
                if self._subscribes(group, topic):
                    yield WantedTopic(group, topic, config.write_queue_nums)


def _in_steps(
    steps: Iterator[list[TopicOffsets]],
    read: Callable[[TopicOffsets], R],
    finish: Callable[[list[R]], Answer],
) -> Answer:
    """Collect in the event loop and read in the thread pool, in turn; then answer."""
    results: list[R] = []

    def next_step() -> Answer:
        step = next(steps, None)
        if step is None:
            return finish(results)
        return InThread(lambda: [read(part) for part in step], add)

    def add(read_parts: list[R]) -> Answer:
        results.extend(read_parts)
        return next_step()

    return next_step()


# --- in the thread pool


def stored_ms(store: MessageStore, queue: ConsumeQueue | None, offset: int) -> int:
    """Store time of a message, -1 if it does not exist; may wait for the disk."""
    entry = queue.entry(offset) if queue is not None else None
    if entry is None or entry[1] == FILLER_SIZE:
        return -1
    return store.lookup.store_ms(entry[0])


OffsetTable = dict[MessageQueue, OffsetWrapper]


def _offset_table(store: MessageStore, part: TopicOffsets) -> OffsetTable:
    table = {}
    for at in part.queue_offsets:
        consumed = at.consumer_offset or 0
        table[at.message_queue] = OffsetWrapper(
            broker_offset=at.broker_offset,
            consumer_offset=consumed,
            pull_offset=at.pull_offset,
            last_timestamp=max(stored_ms(store, at.queue, consumed - 1), 0),
        )
    return table


def _consume_stats(parts: list[tuple[TopicOffsets, OffsetTable]]) -> ConsumeStats:
    table: OffsetTable = {}
    tps: dict[str, float] = {}
    for part, offsets in parts:
        table.update(offsets)
        tps[part.topic] = part.get_tps
    return ConsumeStats(offset_table=table, consume_tps=sum(tps.values(), 0.0))


def _all_consume_stats(
    groups: list[str], parts: list[tuple[TopicOffsets, OffsetTable]], address: str
) -> ConsumeStatsList:
    by_group: dict[str, dict[str, list[tuple[TopicOffsets, OffsetTable]]]] = {
        group: {} for group in groups
    }
    for part, offsets in parts:
        by_group[part.group].setdefault(part.topic, []).append((part, offsets))
    wrappers = [wrapper for _, offsets in parts for wrapper in offsets.values()]
    return ConsumeStatsList(
        consume_stats_list=[
            {group: [_consume_stats(of_topic) for of_topic in topics.values()]}
            for group, topics in by_group.items()
        ],
        broker_addr=address,
        total_diff=sum(at.broker_offset - at.consumer_offset for at in wrappers),
        total_inflight_diff=sum(at.pull_offset - at.consumer_offset for at in wrappers),
    )


def _time_span(store: MessageStore, at: QueueOffsets, now_ms: int) -> QueueTimeSpan:
    first_ms = store.lookup.earliest_ms(at.queue) if at.queue is not None else -1
    # A group without an offset has consumed nothing.
    consumed = at.consumer_offset if at.consumer_offset is not None else at.first_offset
    # Messages before the first one were deleted, so that is the next one.
    next_ms = stored_ms(store, at.queue, max(consumed, at.first_offset))
    return QueueTimeSpan(
        message_queue=at.message_queue,
        min_time_stamp=first_ms,
        max_time_stamp=stored_ms(store, at.queue, at.broker_offset - 1),
        consume_time_stamp=stored_ms(store, at.queue, consumed - 1) if consumed > 0 else first_ms,
        delay_time=now_ms - next_ms if next_ms > 0 else 0,
    )
