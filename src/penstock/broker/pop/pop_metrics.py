"""Metrics of POP, with RocketMQ's names where it has them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from penstock.broker.pop.revive import Revive
from penstock.broker.pop.revive_log import ReviveLog
from penstock.metrics import Registry
from penstock.wire.codes import RETRY_TOPIC_PREFIX, is_system_group, is_system_topic

Sample = tuple[Sequence[str], float]


def add_pop_metrics(registry: Registry, revive_log: ReviveLog, revive: Revive) -> None:
    """Register all metrics of POP."""
    labels = ("consumer_group", "topic", "revive_message_type")
    registry.gauge(
        "rocketmq_consumer_inflight_messages",
        "Popped messages that are neither acknowledged nor revived.",
        ("consumer_group", "topic", "is_system", "is_retry"),
        read=lambda: _in_flight(revive_log),
    )
    registry.counter(
        "rocketmq_pop_revive_in_message_total",
        "Entries written to the revive log.",
        (*labels, "put_status"),
        read=lambda: _written(revive_log),
    )
    registry.counter(
        "rocketmq_pop_revive_out_message_total",
        "Entries read from the revive log at start, or from another broker's timer.",
        labels,
        read=lambda: [(key, count) for key, count in list(revive_log.entries_read.items())],
    )
    registry.counter(
        "rocketmq_pop_revive_retry_messages_total",
        "Messages that were not acknowledged in time and were put into a retry topic.",
        ("consumer_group", "topic", "put_status"),
        read=lambda: [((*key, "PUT_OK"), n) for key, n in list(revive.retried.items())],
    )
    registry.gauge(
        "rocketmq_pop_revive_lag",
        "Entries in a queue of the revive log since its oldest open checkpoint.",
        ("queue_id",),
        read=lambda: [((str(n),), revive_log.lag(n)) for n in range(len(revive_log.queues))],
    )
    registry.gauge(
        "rocketmq_pop_revive_latency",
        "Delay of the last revived message, in ms.",
        read=lambda: revive.latency_ms,
    )
    registry.gauge(
        "rocketmq_pop_checkpoint_buffer_size",
        "Open POP checkpoints.",
        read=lambda: len(revive_log.checkpoints),
    )
    registry.counter(
        "penstock_pop_lost_total",
        "Popped messages that could not be revived: deleted by retention, or damaged.",
        read=lambda: revive.lost,
    )


def _in_flight(revive_log: ReviveLog) -> Iterator[Sample]:
    sums: Counter[tuple[str, str]] = Counter()
    for (topic, group, _), count in list(revive_log.checkpoints.in_flight.items()):
        sums[group, topic] += count
    for (group, topic), count in sums.items():
        system = is_system_topic(topic) or is_system_group(group)
        marks = (str(system).lower(), str(topic.startswith(RETRY_TOPIC_PREFIX)).lower())
        yield (group, topic, *marks), count


def _written(revive_log: ReviveLog) -> Iterator[Sample]:
    for key, count in list(revive_log.writer.written.items()):
        yield (*key, "PUT_OK"), count
