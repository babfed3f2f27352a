"""Publish info: the writable queues of a topic, and how a queue is selected for a message.

If a topic has no route yet, the route of the template topic is used: the broker creates the topic
on the first send.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from penstock.client.client_session import Session
from penstock.client.messages import Message, MessageQueue
from penstock.client.producer.fast_path import RoundRobin
from penstock.client.producer.send_codec import SendTarget
from penstock.client.topic_routes import Route
from penstock.errors import MessageIllegal, NoQueue
from penstock.wire.codes import TOPIC_AUTO_CREATE
from penstock.wire.record import java_hash

TEMPLATE_QUEUES = 4
"""Most queues of a topic that the broker creates on the first send."""

QueueSelector: TypeAlias = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""The application's function that selects a queue."""
TargetSelector: TypeAlias = Callable[["TopicPublishInfo"], SendTarget]
"""Selects the queue of a message that must not go to any queue in turn."""


class TopicPublishInfo(RoundRobin):
    """The writable queues of one topic, from one route."""

    def __init__(self, session: Session, group: str, name: str, route: Route) -> None:
        self._session = session
        self._group = group
        self.name = name
        """With the namespace."""
        self.topic = session.without_namespace(name)
        self.from_template = route.topic != name
        queues = [
            queue
            for queue in route.write_queues
            if not self.from_template or queue.queue_id < TEMPLATE_QUEUES
        ]
        if not queues:
            raise NoQueue(
                f"topic {self.topic!r} has no writable queue; brokers in its route: "
                + (", ".join(route.brokers) or "none")
            )
        targets = tuple(
            self._target(MessageQueue(self.topic, queue.broker_name, queue.queue_id))
            for queue in queues
        )
        RoundRobin.__init__(self, targets, random.randrange(len(targets)))
        self._by_queue = {(target.broker_name, target.queue_id): target for target in targets}

    def target_of(self, queue: MessageQueue) -> SendTarget:
        """The target of a given queue; raises MessageIllegal, NoRoute."""
        if self._session.without_namespace(queue.topic) != self.topic:
            raise MessageIllegal(
                f"a message for topic {self.topic!r} cannot go to a queue of {queue.topic!r}",
                hint="give a queue of the message's topic",
            )
        target = self._by_queue.get((queue.broker_name, queue.queue_id))
        if target is None:  # not writable according to this route: the broker decides
            target = self._target(MessageQueue(self.topic, queue.broker_name, queue.queue_id))
        return target

    def by_ordering_key(self, ordering_key: str) -> SendTarget:
        """The queue of an ordering key, as RocketMQ's SelectMessageQueueByHash selects it."""
        return self.targets[abs(java_hash(ordering_key)) % len(self.targets)]

    def _target(self, queue: MessageQueue) -> SendTarget:
        fields = {
            "a": self._group,
            "b": self.name,
            "c": TOPIC_AUTO_CREATE,
            "d": str(TEMPLATE_QUEUES),
            "e": str(queue.queue_id),
            "n": queue.broker_name,
        }
        address = self._session.master_address(queue.broker_name)
        peer = None if address is None else self._session.peer(address)
        return SendTarget(queue, fields, peer)


def target_selector(
    message: Message,
    queue: MessageQueue | None,
    ordering_key: str | None,
    selector: QueueSelector | None,
) -> TargetSelector | None:
    """How the queue of a message is selected; None for round robin."""
    if queue is None and ordering_key is None and selector is None:
        return None
    if (queue is not None) + (selector is not None) + (ordering_key is not None) > 1:
        raise TypeError("give only one of queue, ordering_key and selector")
    if queue is not None:
        return lambda info: info.target_of(queue)
    if ordering_key is not None:
        if not ordering_key:
            raise MessageIllegal("the ordering key is empty", hint="give a key, or leave it out")
        return lambda info: info.by_ordering_key(ordering_key)
    assert selector is not None
    return lambda info: info.target_of(selector(info.queues, message))
