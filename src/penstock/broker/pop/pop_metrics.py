"""The figures of POP, under RocketMQ's names where it has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.metrics import Registry
from penstock.wire.codes import RETRY_TOPIC_PREFIX, is_system_group, is_system_topic

if TYPE_CHECKING:
    from penstock.broker.pop.pop_message import Pop

Sample = tuple[Sequence[str], float]


def add_pop_metrics(registry: Registry, pop: Pop) -> None:
    """All figures of a broker's pops."""
    journal, revive = pop.journal, pop.revive
    kinds = ("consumer_group", "topic", "revive_message_type")
    registry.gauge(
        "rocketmq_consumer_inflight_messages",
        "Messages that were popped and are neither acknowledged nor back yet.",
        ("consumer_group", "topic", "is_system", "is_retry"), read=lambda: _in_flight(pop),
    )  # fmt: skip
    registry.counter(
        "rocketmq_pop_revive_in_message_total", "Entries written to the revive log.",
        (*kinds, "put_status"), read=lambda: _written(pop),
    )  # fmt: skip
    registry.counter(
        "rocketmq_pop_revive_out_message_total",
        "Entries read from the revive log, at the start or from another broker's time.", kinds,
        read=lambda: [(key, count) for key, count in list(journal.read_again.items())],
    )  # fmt: skip
    registry.counter(
        "rocketmq_pop_revive_retry_messages_total",
        "Messages that nobody acknowledged in time and that were stored once more.",
        ("consumer_group", "topic", "put_status"),
        read=lambda: [((*key, "PUT_OK"), n) for key, n in list(revive.retried.items())],
    )  # fmt: skip
    registry.gauge(
        "rocketmq_pop_revive_lag",
        "Entries of the revive log from the first open batch on, by its queue.", ("queue_id",),
        read=lambda: [((str(n),), journal.behind(n)) for n in range(len(journal.queues))],
    )  # fmt: skip
    registry.gauge(
        "rocketmq_pop_revive_latency", "How late the last message came back, in ms.",
        read=lambda: revive.late_ms,
    )  # fmt: skip
    registry.gauge(
        "rocketmq_pop_checkpoint_buffer_size", "Batches of popped messages that are open.",
        read=lambda: len(journal.loans),
    )  # fmt: skip
    registry.counter(
        "penstock_pop_lost_total",
        "Popped messages that could not come back: deleted by retention meanwhile, or damaged.",
        read=lambda: revive.lost,
    )  # fmt: skip


def _in_flight(pop: Pop) -> Iterator[Sample]:
    sums: Counter[tuple[str, str]] = Counter()
    for (topic, group, _), count in list(pop.journal.loans.in_flight.items()):
        sums[group, topic] += count
    for (group, topic), count in sums.items():
        system = is_system_topic(topic) or is_system_group(group)
        marks = (str(system).lower(), str(topic.startswith(RETRY_TOPIC_PREFIX)).lower())
        yield (group, topic, *marks), count


def _written(pop: Pop) -> Iterator[Sample]:
    for key, count in list(pop.journal.written.items()):
        yield (*key, "PUT_OK"), count
