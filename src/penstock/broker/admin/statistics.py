"""Statistics of topics and groups: offsets, lag and throughput.

Offsets are collected in the event loop; store times of messages are read in the thread pool.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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

STEP_QUEUES = 2_000
"""Queues whose offsets are collected in one step, for all groups: about 5 ms."""


@dataclass(frozen=True, slots=True)
class QueueOffsets:
    """The offsets of a queue, and of a group in it."""

    message_queue: MessageQueue
    queue: ConsumeQueue | None  # None: it never had a message
    first_offset: int
    broker_offset: int
    consumer_offset: int | None
    pull_offset: int


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """A group's offsets in all queues of a topic, and its messages per second."""

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
        queue_offsets = self._queue_offsets(
            "", topic, max(config.read_queue_nums, config.write_queue_nums)
        )
        store = self._context.store

        def work() -> TopicStatsTable:
            table = {
                at.message_queue: TopicOffset(
                    min_offset=at.first_offset,
                    max_offset=at.broker_offset,
                    last_update_timestamp=max(stored_ms(store, at.queue, at.broker_offset - 1), 0),
                )
                for at in queue_offsets
            }
            return TopicStatsTable(topic_put_tps=put_tps, offset_table=table)

        return reply_from_pool(work)

    def consume_stats(self, command: Command) -> Answer:
        """The offsets of a group in the requested topics, or in all its topics."""
        group = command.text("consumerGroup")
        wanted = [topic for topic in command.text_or("topicList").split(";") if topic]
        if not wanted:
            topic = command.text_or("topic").strip()
            known = [topic] if topic else self._context.offsets.topics_of_group(group)
            wanted = [topic for topic in known if self._subscribes(group, topic)]
        found = [
            self._topic_offsets(group, topic, config.read_queue_nums)
            for topic in wanted
            if (config := self._context.topics.get(topic)) is not None
        ]
        store = self._context.store
        return reply_from_pool(lambda: _consume_stats(store, found))

    def all_consume_stats(self, command: Command) -> Answer:
        """The offsets of all groups in all their topics."""
        return self._next_step(self._offsets_by_group(ordered=command.truth("isOrder")), [])

    def consume_time_spans(self, command: Command) -> Answer:
        """The store times of each queue's first, last and last consumed message."""
        topic, group = command.text("topic"), command.text("group")
        config = self._context.topics.need(topic)
        queue_offsets = self._queue_offsets(group, topic, config.write_queue_nums)
        store = self._context.store

        def work() -> QueryConsumeTimeSpanBody:
            return QueryConsumeTimeSpanBody(
                consume_time_span_set=[
                    _time_span(store, at, command.now_ms) for at in queue_offsets
                ]
            )

        return reply_from_pool(work)

    # --- in the event loop

    def _queue_offsets(self, group: str, topic: str, queues: int) -> list[QueueOffsets]:
        store, offsets = self._context.store, self._context.offsets
        broker_name = self._context.settings.current.broker.name
        found = []
        for queue_id in range(queues):
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

    def _topic_offsets(self, group: str, topic: str, queues: int) -> TopicOffsets:
        return TopicOffsets(
            self._queue_offsets(group, topic, queues), self._context.stats.get_tps(group, topic)
        )

    def _subscribes(self, group: str, topic: str) -> bool:
        """False if the group is connected and subscribes only to other topics."""
        connected = self._context.clients.consumer_group(group)
        if connected is None or not connected.subscriptions:
            return True
        return topic in connected.subscriptions

    def _offsets_by_group(self, *, ordered: bool) -> Iterator[tuple[str, list[TopicOffsets]]]:
        """The offsets of each group; changes during the iteration may be missed."""
        context = self._context
        topics: dict[str, list[str]] = {}
        for key in list(context.offsets.table.wrapper().offset_table):
            topic, _, group = key.rpartition("@")
            topics.setdefault(group, []).append(topic)
        for group in list(context.groups.table.groups):
            found = []
            for topic in topics.get(group, ()):
                config = context.topics.get(topic)
                if config is None or (ordered and not config.order):
                    continue
                if self._subscribes(group, topic):
                    found.append(self._topic_offsets(group, topic, config.write_queue_nums))
            yield group, found

    def _next_step(
        self,
        groups: Iterator[tuple[str, list[TopicOffsets]]],
        done: list[dict[str, list[ConsumeStats]]],
    ) -> Answer:
        """Collect some groups, read in the thread pool, continue with the next groups."""
        gathered: list[tuple[str, list[TopicOffsets]]] = []
        queues = 0
        for group, topics in groups:
            gathered.append((group, topics))
            queues += sum(len(topic.queue_offsets) for topic in topics)
            if queues >= STEP_QUEUES:
                break
        if not gathered:
            address = self._context.address
            return reply_from_pool(lambda: _all_consume_stats(done, address))
        store = self._context.store

        def work() -> list[dict[str, list[ConsumeStats]]]:
            return [
                {group: [_consume_stats(store, [topic]) for topic in topics]}
                for group, topics in gathered
            ]

        return InThread(work, lambda stats: self._next_step(groups, done + stats))


# --- in the thread pool


def stored_ms(store: MessageStore, queue: ConsumeQueue | None, offset: int) -> int:
    """Store time of a message, -1 if it does not exist; may wait for the disk."""
    entry = queue.entry(offset) if queue is not None else None
    if entry is None or entry[1] == FILLER_SIZE:
        return -1
    return store.lookup.store_ms(entry[0])


def _consume_stats(store: MessageStore, topics: list[TopicOffsets]) -> ConsumeStats:
    table = {}
    for topic in topics:
        for at in topic.queue_offsets:
            consumed = at.consumer_offset or 0
            table[at.message_queue] = OffsetWrapper(
                broker_offset=at.broker_offset,
                consumer_offset=consumed,
                pull_offset=at.pull_offset,
                last_timestamp=max(stored_ms(store, at.queue, consumed - 1), 0),
            )
    return ConsumeStats(
        offset_table=table, consume_tps=sum((topic.get_tps for topic in topics), 0.0)
    )


def _all_consume_stats(
    stats: list[dict[str, list[ConsumeStats]]], address: str
) -> ConsumeStatsList:
    wrappers = [
        wrapper
        for by_group in stats
        for topics in by_group.values()
        for topic in topics
        for wrapper in topic.offset_table.values()
    ]
    return ConsumeStatsList(
        consume_stats_list=stats,
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
