"""Sums over the answers to GET_BROKER_CONSUME_STATS: one answer has all groups of a broker."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.wire.bodies.admin_bodies import ConsumeStatsList

K = TypeVar("K")
N = TypeVar("N", int, float)

TopicOfGroup = tuple[str, str]
"""(group, topic), with namespace."""


@dataclass(slots=True)
class GroupFigures:
    """The figures of all groups and of the topics that they consume. Names have no namespace."""

    lags: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    topics_of: dict[str, set[str]] = field(default_factory=dict)
    lagging: dict[TopicOfGroup, int] = field(default_factory=dict)
    """(group, topic) with a lag, full names."""
    next_offsets: dict[str, int] = field(default_factory=dict)
    """Topic → sum of the next offsets of its queues."""
    topic_rates: dict[str, float] = field(default_factory=dict)
    groups_of: dict[str, set[str]] = field(default_factory=dict)


def sum_up(
    answers: Iterable[ConsumeStatsList],
    wanted: Callable[[str, str], bool],
    plain: Callable[[str], str],
) -> GroupFigures:
    """Add up the answers of all brokers.

    `wanted(group, topic)` leaves out system groups and topics, `plain` removes the namespace.
    """
    found = GroupFigures()
    for answer in answers:
        ends: dict[str, int] = {}
        for by_group in answer.consume_stats_list:
            for full_group, of_topics in by_group.items():
                for stats in of_topics:
                    if not stats.offset_table:
                        continue
                    full_topic = next(iter(stats.offset_table)).topic
                    if not wanted(full_group, full_topic):
                        continue
                    group, topic = plain(full_group), plain(full_topic)
                    offsets = stats.offset_table.values()
                    lag = sum(max(at.broker_offset - at.consumer_offset, 0) for at in offsets)
                    _add(found.lags, group, lag)
                    _add(found.rates, group, stats.consume_tps)
                    _add(found.topic_rates, topic, stats.consume_tps)
                    found.topics_of.setdefault(group, set()).add(topic)
                    found.groups_of.setdefault(topic, set()).add(group)
                    ends[topic] = max(ends.get(topic, 0), sum(at.broker_offset for at in offsets))
                    if lag:
                        _add(found.lagging, (full_group, full_topic), lag)
        for topic, end in ends.items():  # several groups of a broker report the same queues
            _add(found.next_offsets, topic, end)
    return found


def _add(sums: dict[K, N], key: K, value: N) -> None:
    sums[key] = sums[key] + value if key in sums else value


def largest(lagging: Mapping[TopicOfGroup, int], count: int) -> list[TopicOfGroup]:
    """The groups and topics with the largest lags."""
    return sorted(lagging, key=lambda key: (-lagging[key], key))[:count]
