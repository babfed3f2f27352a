"""What `topic delete` deletes: the messages, and what else depends on the topic."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin, ScheduledMessages, TopicDescription

SCAN_MAX = 200
"""Records of delay topics that are read on each broker to find messages for the topic."""


@dataclass(frozen=True, slots=True)
class TopicDeletion:
    """What is known before a topic is deleted."""

    described: "TopicDescription"
    masters: frozenset[str]
    """The brokers that delete it, if they have it."""
    waiting: tuple[str, ...]
    """Sentences about messages that wait for their delivery to the topic."""

    @property
    def brokers(self) -> list[str]:
        """The brokers that have the topic and delete it."""
        return [broker for broker in self.described.topic.brokers if broker in self.masters]

    def lines(self) -> Iterator[str]:
        """What is deleted, as lines."""
        found = self.described
        queues = [state for state in found.queues if state.queue.broker_name in self.masters]
        for state in queues:
            if state.count:
                yield (
                    f"{state.queue.broker_name} queue {state.queue.queue_id}: "
                    f"{count_text(state.count, 'message')} "
                    f"(offsets {state.min_offset} to {state.max_offset})"
                )
        total = count_text(sum(state.count for state in queues), "message")
        yield f"{total} in {count_text(len(queues), 'queue')}"
        yield from self.waiting
        if found.groups:
            yield f"groups that lose their messages: {', '.join(found.groups)}"
        for broker in found.unreachable:
            yield f"{broker} can't be reached; it keeps the topic"


async def plan_deletion(admin: "AsyncAdmin", name: str, cluster: str | None) -> TopicDeletion:
    """What a deletion of the topic on the brokers of a cluster, or on all, deletes."""
    from penstock.errors import PenstockError

    described = await admin.describe_topic(name)
    masters = frozenset(broker.name for broker in await admin.masters(cluster))
    try:
        found = await admin.scheduled(
            topic=name, cluster=cluster, count_max=SCAN_MAX, scan_max=SCAN_MAX
        )
        waiting = tuple(_waiting(found, name))
    except PenstockError as error:
        text = "delayed and timer messages that wait for their delivery to it are not counted"
        waiting = (f"{text}: {error.message}",)
    return TopicDeletion(described, masters, waiting)


def print_deletion(plan: TopicDeletion) -> None:
    """Say what a deletion deletes, on stderr like the question."""
    click.echo("\n".join(plan.lines()), err=True)


def _waiting(found: "ScheduledMessages", name: str) -> Iterator[str]:
    """Brokers count timer messages by topic, and those of delay levels only by level."""
    levels = sum(one.level is not None for one in found.messages)
    for count, what in (
        (found.by_topic.get(name, 0), "timer message"),
        (levels, "delayed message"),
    ):
        if count:
            waits = "waits for its delivery" if count == 1 else "wait for their delivery"
            yield f"{count_text(count, what)} {waits} to the topic"
    if any("level" in text for text in found.partial):
        yield "not all delayed messages were read: more may wait for their delivery to the topic"
