"""The metrics of a broker, under RocketMQ's names where it has them.

All values are read at the scrape. docs/metrics.md explains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.broker.context import BrokerContext
from penstock.broker.flow_counters import FlowCounter
from penstock.broker.metrics.group_lags import GroupLags, GroupTopicLag
from penstock.broker.metrics.replication_metrics import add_replication_metrics
from penstock.metrics import Histogram, HistogramFamily, Registry, Sample
from penstock.store import native
from penstock.store.put import SIZE_BOUNDS
from penstock.wire.codes import (
    RETRY_TOPIC_PREFIX,
    is_system_group,
    is_system_topic,
    language_name,
)

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.store.store import MessageStore

STORAGE = ("storage_type", "storage_medium")
LOCAL_DISK = ("local", "disk")


def broker_metrics(broker: Broker, lags: GroupLags) -> Registry:
    """All metrics of a broker but those of its server. `lags` are taken before each scrape."""
    config = broker.context.settings.current.broker
    registry = Registry({"cluster": config.cluster, "node_type": "broker", "node_id": config.name})
    _add_messages(registry, broker.context)
    _add_consumers(registry, broker.context, lags)
    if broker.master is not None:
        _add_delay(registry, broker)
        broker.timers.add_metrics(registry)
        broker.transactions.add_metrics(registry)
        broker.pop.add_metrics(registry)
        broker.replies.add_metrics(registry)
    _add_clients(registry, broker.context)
    _add_storage(registry, broker.context, lags)
    _add_requests(registry, broker)
    add_replication_metrics(registry, broker.context)
    return registry


# --- messages ------------------------------------------------------------------------------------


def _add_messages(registry: Registry, context: BrokerContext) -> None:
    topic = ("topic", "is_system")
    registry.counter(
        "rocketmq_messages_in_total",
        "Messages stored since the start.",
        topic,
        read=lambda: [(q.topic, q.puts) for q in context.store.queues.rows],
        finish=_by_topic,
    )
    registry.counter(
        "rocketmq_throughput_in_total",
        "Bytes of messages stored since the start.",
        topic,
        read=lambda: [(q.topic, q.put_bytes) for q in context.store.queues.rows],
        finish=_by_topic,
    )
    group = ("topic", "consumer_group", "is_system", "is_retry")
    registry.counter(
        "rocketmq_messages_out_total",
        "Messages delivered to consumers since the start.",
        group,
        read=lambda: list(context.stats.groups.items()),
        finish=lambda found: _delivered(found, lambda flow: flow.nums),
    )
    registry.counter(
        "rocketmq_throughput_out_total",
        "Bytes of messages delivered to consumers.",
        group,
        read=lambda: list(context.stats.groups.items()),
        finish=lambda found: _delivered(found, lambda flow: flow.size),
    )
    registry.gauge(
        "rocketmq_topic_number",
        "Topics.",
        read=lambda: len(context.topics.table.topics),
    )
    registry.gauge(
        "rocketmq_consumer_group_number",
        "Subscription groups.",
        read=lambda: len(context.groups.table.groups),
    )
    registry.gauge(
        "rocketmq_broker_permission",
        "Permission of the broker: 4 read, 2 write, 6 both.",
        read=lambda: context.settings.current.broker.permission,
    )


def _by_topic(queues: list[tuple[bytes, int]]) -> Iterator[Sample]:
    """Messages or bytes by topic, summed over its queues."""
    sums: Counter[bytes] = Counter()
    for name, count in queues:
        if count:
            sums[name] += count
    for name, count in sums.items():
        topic = name.decode("utf-8", "replace")
        yield (topic, _truth(is_system_topic(topic))), count


def _delivered(
    flows: list[tuple[tuple[str, str], FlowCounter]], value: Callable[[FlowCounter], int]
) -> Iterator[Sample]:
    for (topic, group), flow in flows:
        yield (topic, group, *_kind_labels(topic, group)), value(flow)


# --- consumers -----------------------------------------------------------------------------------


def _add_consumers(registry: Registry, context: BrokerContext, lags: GroupLags) -> None:
    labels = ("consumer_group", "topic", "is_system", "is_retry")

    def add(name: str, help: str, value: Callable[[GroupTopicLag], int | None]) -> None:
        registry.gauge(
            f"rocketmq_consumer_{name}",
            help,
            labels,
            read=lambda: lags.rows,
            finish=lambda rows: _group_lags(rows, value),
        )

    def age(time_ms: int | None, count: int) -> int | None:
        if count == 0:
            return 0
        return None if time_ms is None else max(lags.taken_ms - time_ms, 0)

    add(
        "lag_messages",
        "Messages that the group has not committed, in queues where it has committed an offset.",
        lambda one: one.lag,
    )
    add(
        "lag_latency",
        "Age of the oldest of these messages, in ms.",
        lambda one: age(one.uncommitted_ms, one.lag),
    )
    add(
        "ready_messages",
        "Messages that the group has not pulled, in the same queues.",
        lambda one: one.ready,
    )
    add(
        "queueing_latency",
        "Age of the oldest message that the group has not pulled, in ms.",
        lambda one: age(one.unpulled_ms, one.ready),
    )
    registry.gauge(
        "penstock_consumer_behind_ms",
        "How much older than the broker's newest message the first message of the last pull was.",
        labels,
        read=lambda: list(context.stats.groups.items()),
        finish=_pull_delays,
    )


def _group_lags(
    rows: list[GroupTopicLag], value: Callable[[GroupTopicLag], int | None]
) -> Iterator[Sample]:
    for one in rows:
        number = value(one)
        if number is not None:
            yield (one.group, one.topic, *_kind_labels(one.topic, one.group)), number


def _pull_delays(flows: list[tuple[tuple[str, str], FlowCounter]]) -> Iterator[Sample]:
    for (topic, group), flow in flows:
        yield (group, topic, *_kind_labels(topic, group)), flow.behind_ms


# --- delayed and retried --------------------------------------------------------------------------


def _add_delay(registry: Registry, broker: Broker) -> None:
    delay, label = broker.context.delay, ("level",)
    registry.gauge(
        "penstock_delayed_messages",
        "Waiting messages by delay level.",
        label,
        read=lambda: [((str(n),), max(end - at, 0)) for n, at, end in delay.progress()],
    )
    registry.counter(
        "penstock_delayed_delivered_total",
        "Delivered delayed messages.",
        label,
        read=lambda: [((str(level.number),), level.delivered) for level in delay.levels.values()],
    )
    registry.counter(
        "penstock_delayed_dropped_total",
        "Delayed messages without a destination; the log names them.",
        read=lambda: delay.dropped,
    )
    registry.gauge(
        "penstock_delayed_late_ms",
        "How late the last delayed message was delivered.",
        read=lambda: delay.late_ms,
    )
    registry.counter(
        "rocketmq_send_to_dlq_messages_total",
        "Messages moved to the dead letter topic of a group.",
        ("consumer_group", "topic", "is_system"),
        read=lambda: _dead_letters(broker),
    )


def _dead_letters(broker: Broker) -> Iterator[Sample]:
    for (group, topic), count in list(broker.dead_letters.counts.items()):
        yield (group, topic, _kind_labels(topic, group)[0]), count


# --- connections ---------------------------------------------------------------------------------


def _add_clients(registry: Registry, context: BrokerContext) -> None:
    registry.gauge(
        "rocketmq_producer_connections",
        "Connected producers.",
        ("language", "version", "protocol_type"),
        read=lambda: _producers(context),
    )
    registry.gauge(
        "rocketmq_consumer_connections",
        "Connected consumers.",
        ("consumer_group", "language", "version", "consume_mode", "protocol_type", "is_system"),
        read=lambda: _consumers(context),
    )


def _producers(context: BrokerContext) -> Iterator[Sample]:
    counts: Counter[tuple[str, str]] = Counter()
    clients = set()
    for members in context.clients.producer_groups().values():
        for member in members:
            if member.client not in clients:  # one client may be in several groups
                clients.add(member.client)
                counts[language_name(member.language).lower(), str(member.version)] += 1
    for (language, version), count in counts.items():
        yield (language, version, "remoting"), count


def _consumers(context: BrokerContext) -> Iterator[Sample]:
    for group in list(context.clients.consumer_groups()):
        counts = Counter(
            (language_name(member.language).lower(), str(member.version))
            for member in group.members.values()
        )
        mode = "pull" if group.consume_type == "CONSUME_ACTIVELY" else "push"
        system = _truth(is_system_group(group.name))
        for (language, version), count in counts.items():
            yield (group.name, language, version, mode, "remoting", system), count


# --- store ---------------------------------------------------------------------------------------


def _add_storage(registry: Registry, context: BrokerContext, lags: GroupLags) -> None:
    store = context.store
    registry.add(
        HistogramFamily(
            "rocketmq_message_size",
            "Sizes of stored messages in bytes, with their properties.",
            lambda: [((), _sizes(store))],
        )
    )
    registry.add(
        HistogramFamily(
            "penstock_flush_seconds",
            "Time of the flushes of the log (fdatasync).",
            lambda: [((), _flush_times(store))],
        )
    )
    registry.gauge(
        "rocketmq_storage_message_reserve_time",
        "Age of the oldest stored message, in ms.",
        STORAGE,
        read=lambda: (
            [(LOCAL_DISK, max(lags.taken_ms - lags.earliest_ms, 0))] if lags.earliest_ms > 0 else []
        ),
    )
    registry.gauge(
        "rocketmq_storage_size",
        "Bytes of the commit log.",
        STORAGE,
        read=lambda: [(LOCAL_DISK, store.log.end - store.log.begin())],
    )
    registry.gauge(
        "rocketmq_storage_flush_behind_bytes",
        "Bytes of the log that are not flushed.",
        STORAGE,
        read=lambda: [(LOCAL_DISK, max(store.log.end - store.flusher.flushed(), 0))],
    )
    registry.gauge(
        "rocketmq_storage_dispatch_behind_bytes",
        "Bytes of the log without queue entries: always 0, both are written in one step.",
        STORAGE,
        read=lambda: [(LOCAL_DISK, 0)],
    )
    registry.gauge(
        "penstock_store_writable",
        "1 while the store accepts messages.",
        read=lambda: store.refusal is None,
    )
    _add_damage(registry, store)


def _add_damage(registry: Registry, store: MessageStore) -> None:
    registry.gauge(
        "penstock_store_damaged_ranges",
        "Damaged ranges of the log that the recovery at the start found and skipped.",
        read=lambda: store.report.damaged_ranges,
    )
    registry.gauge(
        "penstock_store_damaged_bytes",
        "Bytes in these ranges.",
        read=lambda: store.report.damaged_bytes,
    )
    registry.gauge(
        "penstock_store_damaged_records",
        "Damaged messages that reads have found since the start; they are not delivered.",
        read=lambda: len(store.log.damaged),
    )
    registry.counter(
        "penstock_store_scrubbed_records_total",
        "Records of the log that the scrub has checked.",
        read=lambda: store.scrub.records,
    )
    registry.gauge(
        "penstock_store_scrub_damaged",
        "Damaged places of the log that the scrub has found since the start.",
        read=lambda: len(store.scrub.damaged),
    )
    registry.gauge(
        "penstock_store_truncated_bytes",
        "Bytes that the recovery at the start cut from the log's end, after saving them.",
        read=lambda: store.report.saved_bytes,
    )


def _sizes(store: MessageStore) -> Histogram:
    writer = store.writer
    return Histogram.of(SIZE_BOUNDS, list(writer.size_counts), writer.put_bytes)


def _flush_times(store: MessageStore) -> Histogram:
    counts, total_ns = store.flusher.sync_times()
    bounds = [native.SYNC_BOUND_NS * 2**n / 1e9 for n in range(len(counts) - 1)]
    return Histogram.of(bounds, counts, total_ns / 1e9)


# --- requests -------------------------------------------------------------------------------------


def _add_requests(registry: Registry, broker: Broker) -> None:
    registry.counter(
        "penstock_sends_total",
        "Send requests by outcome; a batch is one request.",
        ("outcome",),
        read=lambda: _sends(broker),
    )
    registry.gauge(
        "penstock_suspended_requests",
        "Requests that are suspended until messages arrive.",
        read=lambda: len(broker.context.long_polling),
    )
    registry.gauge(
        "process_start_time_seconds",
        "Time of the broker's start.",
        read=lambda: broker.context.started_ms / 1000,
    )


def _sends(broker: Broker) -> list[Sample]:
    if broker.master is None:
        return []
    return [(("stored",), broker.send.sent), (("refused",), broker.send.refused)]


def _kind_labels(topic: str, group: str) -> tuple[str, str]:
    """The labels is_system and is_retry."""
    system = is_system_topic(topic) or is_system_group(group)
    return _truth(system), _truth(topic.startswith(RETRY_TOPIC_PREFIX))


def _truth(value: bool) -> str:
    return "true" if value else "false"
