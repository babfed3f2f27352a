"""The metrics of a broker, under RocketMQ's names where it has them.

All values are read at the scrape. docs/metrics.md explains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.broker.context import BrokerContext
from penstock.broker.replication_metrics import add_replication_metrics
from penstock.broker.stats import FlowCounter
from penstock.metrics import Registry, Sample
from penstock.wire.codes import (
    RETRY_TOPIC_PREFIX,
    is_system_group,
    is_system_topic,
    language_name,
)

if TYPE_CHECKING:
    from penstock.broker.broker import Broker

STORAGE = ("storage_type", "storage_medium")
LOCAL_DISK = ("local", "disk")


def broker_metrics(broker: Broker) -> Registry:
    """All metrics of a broker but those of its server."""
    config = broker.context.settings.current.broker
    registry = Registry({"cluster": config.cluster, "node_type": "broker", "node_id": config.name})
    _add_messages(registry, broker.context)
    _add_consumers(registry, broker.context)
    if broker.master is not None:
        _add_delay(registry, broker)
        broker.timers.add_metrics(registry)
        broker.transactions.add_metrics(registry)
        broker.pop.add_metrics(registry)
        broker.replies.add_metrics(registry)
    _add_clients(registry, broker.context)
    _add_storage(registry, broker.context)
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
        read=lambda: _stored(context, 0),
    )
    registry.counter(
        "rocketmq_throughput_in_total",
        "Bytes of messages stored since the start.",
        topic,
        read=lambda: _stored(context, 1),
    )
    group = ("topic", "consumer_group", "is_system", "is_retry")
    registry.counter(
        "rocketmq_messages_out_total",
        "Messages delivered to consumers since the start.",
        group,
        read=lambda: _delivered(context, lambda flow: flow.nums),
    )
    registry.counter(
        "rocketmq_throughput_out_total",
        "Bytes of messages delivered to consumers.",
        group,
        read=lambda: _delivered(context, lambda flow: flow.size),
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


def _stored(context: BrokerContext, column: int) -> Iterator[Sample]:
    """Messages or bytes by topic, summed over its queues."""
    sums: Counter[bytes] = Counter()
    for queue in context.store.queues.rows:
        if queue.puts:
            sums[queue.topic] += queue.put_bytes if column else queue.puts
    for name, count in sums.items():
        topic = name.decode("utf-8", "replace")
        yield (topic, _truth(is_system_topic(topic))), count


def _delivered(context: BrokerContext, value: Callable[[FlowCounter], int]) -> Iterator[Sample]:
    for (topic, group), flow in list(context.stats.groups.items()):
        yield (topic, group, *_kind_labels(topic, group)), value(flow)


# --- consumers -----------------------------------------------------------------------------------


def _add_consumers(registry: Registry, context: BrokerContext) -> None:
    labels = ("consumer_group", "topic", "is_system", "is_retry")
    registry.gauge(
        "rocketmq_consumer_lag_messages",
        "Messages that the group has not committed, in queues where it has committed an offset.",
        labels,
        read=lambda: _consumer_lags(context),
    )
    registry.gauge(
        "penstock_consumer_behind_ms",
        "How much older than the broker's newest message the first message of the last pull was.",
        labels,
        read=lambda: _pull_delays(context),
    )


def _consumer_lags(context: BrokerContext) -> Iterator[Sample]:
    store = context.store
    for key, offsets in list(context.offsets.table.wrapper().offset_table.items()):
        topic, _, group = key.rpartition("@")
        lag = 0
        for queue_id, offset in offsets.items():
            first, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
            lag += max(end - max(offset, first), 0)
        yield (group, topic, *_kind_labels(topic, group)), lag


def _pull_delays(context: BrokerContext) -> Iterator[Sample]:
    for (topic, group), flow in list(context.stats.groups.items()):
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


def _add_storage(registry: Registry, context: BrokerContext) -> None:
    store = context.store
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
    registry.gauge(
        "penstock_store_writable",
        "1 while the store accepts messages.",
        read=lambda: store.refusal is None,
    )


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
