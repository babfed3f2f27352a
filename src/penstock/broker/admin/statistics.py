"""Figures of topics and groups: how far queues reach, how far groups are, how fast it goes.

Offsets are taken in the loop; store times of messages are read in the pool afterwards.
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

SLICE_QUEUES = 2_000
"""Queues whose offsets are gathered at once for all groups together: some 5 ms of the loop."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a queue ends and how far a group is in it."""

    queue: MessageQueue
    row: ConsumeQueue | None  # None: no message was ever put into it
    first_offset: int
    broker_offset: int
    consumer_offset: int | None
    pull_offset: int


@dataclass(frozen=True, slots=True)
class TopicStandings:
    """A group's standings in all queues of a topic, and how many messages/s it gets of it."""

    standings: list[Standing]
    get_tps: float


class StatisticsHandlers:
    """VIEW_BROKER_STATS_DATA, GET_TOPIC_STATS_INFO, GET_CONSUME_STATS and their kin."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.VIEW_BROKER_STATS_DATA, self.view_stats),
            Row(RequestCode.GET_TOPIC_STATS_INFO, self.topic_stats),
            Row(RequestCode.GET_CONSUME_STATS, self.consume_stats),
            Row(RequestCode.GET_BROKER_CONSUME_STATS, self.all_consume_stats),
            Row(RequestCode.QUERY_CONSUME_TIME_SPAN, self.time_spans),
        ]

    def view_stats(self, command: Command) -> Answer:
        """The windows of one counter."""
        name, key = command.text("statsName"), command.text("statsKey")
        cluster = self._context.settings.current.broker.cluster
        data = None
        if not name.startswith("BROKER_") or key == cluster:
            data = self._context.stats.view(name, key)
        if data is None:
            raise Refused(f"nothing was counted yet for {name} of {key}")
        return reply_with(data)

    def topic_stats(self, command: Command) -> Answer:
        """The ends of each queue of a topic, and when it last grew."""
        topic = command.text("topic")
        config = self._context.topics.need(topic)
        put_tps = self._context.stats.put_tps(topic)
        standings = self._standings("", topic, max(config.read_queue_nums, config.write_queue_nums))
        store = self._context.store

        def work() -> TopicStatsTable:
            table = {
                at.queue: TopicOffset(
                    min_offset=at.first_offset,
                    max_offset=at.broker_offset,
                    last_update_timestamp=max(stored_ms(store, at.row, at.broker_offset - 1), 0),
                )
                for at in standings
            }
            return TopicStatsTable(topic_put_tps=put_tps, offset_table=table)

        return reply_from_pool(work)

    def consume_stats(self, command: Command) -> Answer:
        """How far a group is, in the topics asked for or in all of its own."""
        group = command.text("consumerGroup")
        wanted = [topic for topic in command.text_or("topicList").split(";") if topic]
        if not wanted:
            topic = command.text_or("topic").strip()
            known = [topic] if topic else self._context.offsets.topics_of_group(group)
            wanted = [topic for topic in known if self._subscribes(group, topic)]
        found = [
            self._of_topic(group, topic, config.read_queue_nums)
            for topic in wanted
            if (config := self._context.topics.get(topic)) is not None
        ]
        store = self._context.store
        return reply_from_pool(lambda: _consume_stats(store, found))

    def all_consume_stats(self, command: Command) -> Answer:
        """How far every group is in each of its topics."""
        return self._next_slice(self._by_group(ordered=command.truth("isOrder")), [])

    def time_spans(self, command: Command) -> Answer:
        """From when to when the messages of each queue are, and where a group stands."""
        topic, group = command.text("topic"), command.text("group")
        config = self._context.topics.need(topic)
        standings = self._standings(group, topic, config.write_queue_nums)
        store = self._context.store

        def work() -> QueryConsumeTimeSpanBody:
            return QueryConsumeTimeSpanBody(
                consume_time_span_set=[_time_span(store, at, command.now_ms) for at in standings]
            )

        return reply_from_pool(work)

    # --- gathering, in the loop

    def _standings(self, group: str, topic: str, queues: int) -> list[Standing]:
        store, offsets = self._context.store, self._context.offsets
        broker_name = self._context.settings.current.broker.name
        found = []
        for queue_id in range(queues):
            row = store.queue(topic, queue_id)
            committed = offsets.get(group, topic, queue_id) if group else None
            pulled = offsets.pulled(group, topic, queue_id) if group else None
            found.append(
                Standing(
                    queue=MessageQueue(topic, broker_name, queue_id),
                    row=row,
                    first_offset=row.min_offset if row is not None else 0,
                    broker_offset=row.visible_max(store.confirm_offset) if row is not None else 0,
                    consumer_offset=committed,
                    pull_offset=max(committed or 0, pulled or 0),
                )
            )
        return found

    def _of_topic(self, group: str, topic: str, queues: int) -> TopicStandings:
        return TopicStandings(
            self._standings(group, topic, queues), self._context.stats.get_tps(group, topic)
        )

    def _subscribes(self, group: str, topic: str) -> bool:
        """False if the group is connected and subscribes to other topics only."""
        connected = self._context.clients.consumer_group(group)
        if connected is None or not connected.subscriptions:
            return True
        return topic in connected.subscriptions

    def _by_group(self, *, ordered: bool) -> Iterator[tuple[str, list[TopicStandings]]]:
        """Group after group; what changes meanwhile is seen or not."""
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
                    found.append(self._of_topic(group, topic, config.write_queue_nums))
            yield group, found

    def _next_slice(
        self,
        groups: Iterator[tuple[str, list[TopicStandings]]],
        done: list[dict[str, list[ConsumeStats]]],
    ) -> Answer:
        """Gather some groups, read in the pool, go on with the next ones."""
        gathered: list[tuple[str, list[TopicStandings]]] = []
        queues = 0
        for group, topics in groups:
            gathered.append((group, topics))
            queues += sum(len(topic.standings) for topic in topics)
            if queues >= SLICE_QUEUES:
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

        return InThread(work, lambda stats: self._next_slice(groups, done + stats))


# --- reading, in the pool


def stored_ms(store: MessageStore, row: ConsumeQueue | None, offset: int) -> int:
    """Store time of a queue's message, or -1 if it is not there; may wait for the disk."""
    entry = row.entry(offset) if row is not None else None
    if entry is None or entry[1] == FILLER_SIZE:
        return -1
    return store.lookup.store_ms(entry[0])


def _consume_stats(store: MessageStore, topics: list[TopicStandings]) -> ConsumeStats:
    table = {}
    for topic in topics:
        for at in topic.standings:
            consumed = at.consumer_offset or 0
            table[at.queue] = OffsetWrapper(
                broker_offset=at.broker_offset,
                consumer_offset=consumed,
                pull_offset=at.pull_offset,
                last_timestamp=max(stored_ms(store, at.row, consumed - 1), 0),
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


def _time_span(store: MessageStore, at: Standing, now_ms: int) -> QueueTimeSpan:
    first_ms = store.lookup.earliest_ms(at.row) if at.row is not None else -1
    # A group without progress has everything before it.
    consumed = at.consumer_offset if at.consumer_offset is not None else at.first_offset
    # What lay before the first message was deleted, so the next one is that.
    next_ms = stored_ms(store, at.row, max(consumed, at.first_offset))
    return QueueTimeSpan(
        message_queue=at.queue,
        min_time_stamp=first_ms,
        max_time_stamp=stored_ms(store, at.row, at.broker_offset - 1),
        consume_time_stamp=stored_ms(store, at.row, consumed - 1) if consumed > 0 else first_ms,
        delay_time=now_ms - next_ms if next_ms > 0 else 0,
    )
