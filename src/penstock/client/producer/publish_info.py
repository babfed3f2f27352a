"""Where messages of a topic can go: one line per queue, and who chooses among them.

A topic that nobody has made yet is sent to by way of the template topic: the broker makes it.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from penstock.client.client_session import Session
from penstock.client.messages import Message, MessageQueue
from penstock.client.producer.fast_path import Ring
from penstock.client.producer.send_codec import Line
from penstock.client.topic_routes import Route
from penstock.errors import MessageIllegal, NoQueue
from penstock.wire.codes import TOPIC_AUTO_CREATE
from penstock.wire.record import java_hash

TEMPLATE_QUEUES = 4
"""Queues of a topic that is made by sending to it, where the template has as many."""

Selector: TypeAlias = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""The application's choice of a queue."""
Choice: TypeAlias = Callable[["TopicLines"], Line]
"""What a message that may not go to any queue is bound to."""


class TopicLines(Ring):
    """The queues of one topic that can be written to, by one route."""

    def __init__(self, session: Session, group: str, name: str, route: Route) -> None:
        self._session = session
        self._group = group
        self.name = name
        """As servers know it."""
        self.topic = session.without_namespace(name)
        self.template = route.topic != name
        queues = [queue for queue in route.write_queues if self._fits(queue)]
        if not queues:
            raise NoQueue(
                f"no queue of the topic {self.topic!r} can be written to; it has a route to "
                + (", ".join(route.brokers) or "no broker")
            )
        lines = tuple(
            self._line(MessageQueue(self.topic, queue.broker_name, queue.queue_id))
            for queue in queues
        )
        Ring.__init__(self, lines, random.randrange(len(lines)))
        self._by_place = {(line.broker_name, line.queue_id): line for line in lines}

    def at(self, queue: MessageQueue) -> Line:
        """A queue that somebody named; raises MessageIllegal, NoRoute."""
        if self._session.without_namespace(queue.topic) != self.topic:
            raise MessageIllegal(
                f"a message for {self.topic!r} can't go to a queue of {queue.topic!r}",
                hint="give a queue of the message's own topic",
            )
        line = self._by_place.get((queue.broker_name, queue.queue_id))
        if line is None:  # not writable by the route we know: the broker decides
            line = self._line(MessageQueue(self.topic, queue.broker_name, queue.queue_id))
        return line

    def by_key(self, ordering_key: str) -> Line:
        """The queue of an ordering key: the same as RocketMQ's selector by hash takes."""
        return self.lines[abs(java_hash(ordering_key)) % len(self.lines)]

    def _fits(self, queue: MessageQueue) -> bool:
        return not self.template or queue.queue_id < TEMPLATE_QUEUES

    def _line(self, queue: MessageQueue) -> Line:
        fields = {
            "a": self._group,
            "b": self.name,
            "c": TOPIC_AUTO_CREATE,
            "d": str(TEMPLATE_QUEUES),
            "e": str(queue.queue_id),
            "n": queue.broker_name,
        }
        known = self._session.address_of(queue.broker_name) is not None
        return Line(queue, fields, self._session.broker(queue.broker_name) if known else None)


def choice_of(
    message: Message,
    queue: MessageQueue | None,
    ordering_key: str | None,
    selector: Selector | None,
) -> Choice | None:
    """How a message is bound to a queue; None if it may go to any."""
    if queue is None and ordering_key is None and selector is None:
        return None
    if (queue is not None) + (selector is not None) + (ordering_key is not None) > 1:
        raise TypeError("give one of queue, ordering_key and selector")
    if queue is not None:
        return lambda lines: lines.at(queue)
    if ordering_key is not None:
        if not ordering_key:
            raise MessageIllegal(
                "an empty ordering key", hint="leave it out, or name what to order"
            )
        return lambda lines: lines.by_key(ordering_key)
    assert selector is not None
    return lambda lines: lines.at(selector(lines.queues, message))
