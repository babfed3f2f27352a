"""Diagnosis: why a consumer receives nothing, checked with every heartbeat and logged once.

Each topic from which no message has come is checked, from the route down to the queues:

    route           no broker has the topic; similar names are given
    queue           more members than queues (and who has them), or the strategy gives us none
    lock            another member has locked our queues
    paused          by the application
    busy            flow control: too many messages are not handled yet
    pull            pulls fail: the broker is unreachable, or refuses them
    subscription    members of the group have different subscriptions
    filter          there are messages, and none matches our tags or SQL expression
    idle            there are no new messages in our queues

Faults are logged as warnings, the other reasons as info. A reason is logged again only if it did
not apply in between. `explain` returns all reasons at once, and the failures of handlers, which are
reported when they happen (`handler_failures`).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.client.client_session import Session
from penstock.client.consumer.process_queue import ProcessQueue
from penstock.client.consumer.rebalance import Allocation, Rebalancer, StartAt
from penstock.client.handler_failures import HandlerFailures
from penstock.clock import pause
from penstock.errors import PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumerConnection
from penstock.wire.bodies.client_bodies import MessageQueue, SubscriptionData
from penstock.wire.codes import RETRY_TOPIC_PREFIX, RequestCode

log = logging.getLogger(__name__)

FIRST_MS = 10_000
"""Time of the first check after the start, if heartbeats are not more frequent."""
NAMED_MAX = 5
"""Most members that are named in a reason."""


class DiagnosedConsumer(Protocol):
    """A consumer as the diagnosis sees it."""

    @property
    def group(self) -> str:
        """The group, with namespace."""

    @property
    def start_at(self) -> StartAt:
        """Where the group begins without committed offsets."""

    @property
    def process_queues(self) -> Mapping[MessageQueue, ProcessQueue]:
        """The assigned queues."""

    def subscriptions(self) -> Iterable[SubscriptionData]:
        """The subscriptions."""


class LockView(Protocol):
    """State of our queue locks (`orderly.OrderlyQueueLocks`)."""

    def holds(self, queue: MessageQueue) -> bool:
        """Whether a queue is locked for us."""

    def age_ms(self, queue: MessageQueue) -> int | None:
        """The time since the last confirmation of the lock; None if it is not ours."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why no messages of a topic are received."""

    topic: str
    kind: str
    text: str
    fault: bool = True

    @property
    def identity(self) -> tuple[str, str]:
        """Identifies a reason: by its text, or by its kind if the text has changing numbers."""
        return self.topic, self.kind if self.kind == "busy" else self.text


class Diagnosis:
    """The diagnosis of one consumer."""

    def __init__(
        self,
        session: Session,
        consumer: DiagnosedConsumer,
        rebalancer: Rebalancer,
        locks: LockView | None = None,
        failures: HandlerFailures | None = None,
    ) -> None:
        self._session = session
        self._group = consumer.group
        self._consumer = consumer
        self._rebalancer = rebalancer
        self._locks = locks
        self._failures = failures
        self._received: dict[str, int] = {}  # topic → messages received at the last check
        self._logged: set[tuple[str, str]] = set()  # identities of the last check's reasons

    async def explain(self) -> list[str]:
        """All reasons why no messages are received, by topic, then the failures of handlers."""
        reasons = [reason.text for reason in await self._reasons()]
        return reasons if self._failures is None else reasons + self._failures.texts()

    async def keep_explaining(self) -> None:
        """Check silent topics at every heartbeat and log new reasons."""
        clock, heartbeat_ms = self._session.clock, self._session.options.heartbeat_ms
        await pause(clock, min(FIRST_MS, heartbeat_ms))
        while True:
            await self.check()
            await pause(clock, heartbeat_ms)

    async def check(self) -> None:
        """Log the reasons that are new since the last check."""
        silent = self._silent_topics()
        reasons = [reason for reason in await self._reasons() if reason.topic in silent]
        for reason in reasons:
            if reason.identity not in self._logged:
                level = logging.WARNING if reason.fault else logging.INFO
                log.log(level, "%s receives nothing: %s", self._group, reason.text)
        self._logged = {reason.identity for reason in reasons}

    def _silent_topics(self) -> set[str]:
        """Topics from which nothing was received since the last check."""
        received = Counter[str]()
        for process_queue in self._consumer.process_queues.values():
            received[process_queue.queue.topic] += process_queue.received
        topics = {subscription.topic for subscription in self._consumer.subscriptions()}
        before, self._received = self._received, dict(received)
        return {topic for topic in topics if received[topic] == before.get(topic, 0)}

    async def _reasons(self) -> list[Reason]:
        process_queues = list(self._consumer.process_queues.values())
        reasons: list[Reason] = []
        subscriptions = [
            subscription
            for subscription in self._consumer.subscriptions()
            if not subscription.topic.startswith(RETRY_TOPIC_PREFIX)
        ]
        if not subscriptions:
            reasons.append(Reason("", "nothing", "there is no subscription"))
        for subscription in subscriptions:
            ours = [
                process_queue
                for process_queue in process_queues
                if process_queue.queue.topic == subscription.topic
            ]
            found = await self._examine(subscription, ours)
            if found is not None:
                reasons.append(found)
        return reasons

    async def _examine(
        self, subscription: SubscriptionData, process_queues: list[ProcessQueue]
    ) -> Reason | None:
        """The first reason that applies to a topic; None if there is none."""
        topic = subscription.topic
        allocation = self._rebalancer.allocations.get(topic)
        if self._session.cached_route(topic) is None:
            return await self._no_route(topic)
        if allocation is None:
            return Reason(
                topic,
                "start",
                f"the queues of {self._without_namespace(topic)} are not assigned yet",
            )
        if not process_queues:
            return self._no_queue(allocation)
        return (
            self._waiting(topic, process_queues)
            or self._failing(topic, process_queues)
            or await self._different(subscription, allocation)
            or self._unfit(subscription, process_queues)
            or self._idle(topic, process_queues)
        )

    async def _no_route(self, topic: str) -> Reason:
        try:
            text = str(await self._session.nameservers.no_route(topic))
        except PenstockError as error:
            text = str(error)
        return Reason(topic, "route", text)

    def _no_queue(self, allocation: Allocation) -> Reason:
        topic, name = allocation.topic, self._without_namespace(allocation.topic)
        if not allocation.queues:
            return Reason(topic, "queue", f"{name} has no readable queue: check its permissions")
        if allocation.problem is not None:
            return Reason(
                topic, "queue", f"no queue of {name} is assigned yet: {allocation.problem}"
            )
        members, queues = len(allocation.clients), len(allocation.queues)
        if self._session.client_id not in allocation.clients and not self._rebalancer.broadcast:
            return Reason(
                topic,
                "queue",
                f"no queue of {name} is assigned: its brokers do not list"
                f" {self._session.client_id} among the {members} members of {self._group}",
            )
        owners = self._rebalancer.owners(allocation)
        named = ", ".join(f"{client} has {count}" for client, count in owners[:NAMED_MAX])
        more = f" and {len(owners) - NAMED_MAX} more" if len(owners) > NAMED_MAX else ""
        if members > queues:
            why = f"its {queues} queues go to {queues} of the {members} members of {self._group}"
            step = "stop members, or add queues to the topic"
        else:
            why = f"the strategy assigns its {queues} queues to others of the {members} members"
            step = "all members must use the same strategy"
        return Reason(
            topic, "queue", f"no queue of {name} is assigned: {why} ({named}{more}); {step}"
        )

    def _waiting(self, topic: str, process_queues: list[ProcessQueue]) -> Reason | None:
        """Why our queues are not pulled."""
        name = self._without_namespace(topic)
        if self._locks is not None and not any(self._locks.holds(w.queue) for w in process_queues):
            return self._no_locks(self._locks, topic, process_queues)
        if all(process_queue.paused for process_queue in process_queues):
            return Reason(
                topic, "paused", f"{name} is paused: call resume() to continue", fault=False
            )
        full = [process_queue for process_queue in process_queues if process_queue.full is not None]
        if len(full) == len(process_queues):
            return Reason(
                topic,
                "busy",
                f"flow control pauses the pulls of {name}: {full[0].full}"
                " (in the first of its queues)",
            )
        return None

    def _failing(self, topic: str, process_queues: list[ProcessQueue]) -> Reason | None:
        """Why our queues can't be pulled."""
        failing = [one for one in process_queues if one.pull_failure is not None]
        if not failing:
            return None
        return Reason(
            topic,
            "pull",
            f"pulls from {len(failing)} of our {len(process_queues)} queues of"
            f" {self._without_namespace(topic)} fail: {failing[0].pull_failure}",
        )

    def _no_locks(self, locks: LockView, topic: str, process_queues: list[ProcessQueue]) -> Reason:
        locks_text = (
            f"the locks of our {len(process_queues)} queues of {self._without_namespace(topic)}"
        )
        if any(locks.age_ms(process_queue.queue) is not None for process_queue in process_queues):
            brokers = ", ".join(
                sorted({process_queue.queue.broker_name for process_queue in process_queues})
            )
            return Reason(
                topic, "lock", f"{locks_text} could not be renewed in time: check {brokers}"
            )
        allocation = self._rebalancer.allocations.get(topic, Allocation(topic))
        others = [client for client in allocation.clients if client != self._session.client_id]
        holder = " or ".join(others[:NAMED_MAX]) or "a member that has left"
        return Reason(
            topic,
            "lock",
            f"{locks_text} are held by {holder}; brokers release the locks of a dead member after a"
            " minute",
        )

    async def _different(self, mine: SubscriptionData, allocation: Allocation) -> Reason | None:
        """Whether the broker has another subscription of the group for the topic.

        The broker keeps one per group: that of the last heartbeat.
        """
        if len(allocation.clients) < 2:
            return None
        theirs = await self._connections(allocation)
        if theirs is None:
            return None
        name = self._without_namespace(mine.topic)
        other = theirs.subscription_table.get(mine.topic)
        if other is None:
            return Reason(
                mine.topic,
                "subscription",
                f"other members of {self._group} do not subscribe to {name}:"
                " all members must have the same subscriptions",
            )
        if _filter(other) == _filter(mine):
            return None
        return Reason(
            mine.topic,
            "subscription",
            f"members of {self._group} subscribe to {name} differently: others with"
            f" {other.sub_string!r}, this one with {mine.sub_string!r};"
            " all members must have the same subscriptions",
        )

    async def _connections(self, allocation: Allocation) -> ConsumerConnection | None:
        """The group as a broker of the topic sees it; None if it does not respond."""
        try:
            answer = await self._session.call(
                self._session.broker(allocation.queues[0].broker_name),
                RequestCode.GET_CONSUMER_CONNECTION_LIST,
                {"consumerGroup": self._group},
            )
            return fastjson.decode(answer.body, ConsumerConnection)
        except PenstockError as error:
            log.debug("%s: cannot query the members' subscriptions: %s", self._group, error)
            return None

    def _unfit(
        self, subscription: SubscriptionData, process_queues: list[ProcessQueue]
    ) -> Reason | None:
        if any(process_queue.received for process_queue in process_queues):
            return None
        start_offset = self._rebalancer.start_offset
        if not any(
            process_queue.next_offset > (start_offset(process_queue.queue) or 0)
            for process_queue in process_queues
        ):
            return None
        return Reason(
            subscription.topic,
            "filter",
            f"no message of {self._without_namespace(subscription.topic)} has matched"
            f" {subscription.sub_string!r} ({subscription.expression_type}):"
            " compare the filter with the messages",
        )

    def _idle(self, topic: str, process_queues: list[ProcessQueue]) -> Reason | None:
        if any(
            process_queue.count
            or process_queue.received
            or process_queue.next_offset < process_queue.end_offset
            for process_queue in process_queues
        ):
            return None
        name = self._without_namespace(topic)
        text = f"there are no new messages in our {len(process_queues)} queues of {name}"
        if self._consumer.start_at == "last":
            text += '; a new group begins at the end of the queues unless start_at="first"'
        return Reason(topic, "idle", text, fault=False)

    def _without_namespace(self, topic: str) -> str:
        return self._session.without_namespace(topic)


def _filter(subscription: SubscriptionData) -> tuple[str, object]:
    """The filter of a subscription in a normalized form."""
    if subscription.tags_set:
        return subscription.expression_type, subscription.tags_set
    return subscription.expression_type, subscription.sub_string or "*"
