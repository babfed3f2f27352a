"""Why a consumer gets nothing: looked into every heartbeat, and said in its log once.

A consumer that is silent tells nobody whether all is well. So each topic from which nothing has
come is examined, from the route down to the single queue:

    no route                no broker has the topic; similar names are given
    no queue                more members than queues (who has them), or the strategy gives us none
    lock                    another member holds the locks of our queues
    paused                  by the application
    busy                    the handlers have too much in work
    subscriptions           the group's members subscribe to the topic differently
    filter                  messages come by, and none fits our tags or SQL
    idle                    we are at the end of all queues: nothing new has come

What is a fault is logged as a warning, what is merely so as info. A reason is logged again only
after it was gone in between. `explain` gives all of them at once.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.client.client_session import Session
from penstock.client.consumer.process_queue import ProcessQueue
from penstock.client.consumer.rebalance import Rebalancer, Share, StartAt
from penstock.clock import pause
from penstock.errors import PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumerConnection
from penstock.wire.bodies.client_bodies import MessageQueue, SubscriptionData
from penstock.wire.codes import RETRY_TOPIC_PREFIX, RequestCode

log = logging.getLogger(__name__)

FIRST_MS = 10_000
"""When a new consumer is examined first, if its heartbeats are not closer than that."""
NAMED_MAX = 5
"""How many members are named in a reason."""


class Observed(Protocol):
    """What a diagnosis looks at."""

    @property
    def group(self) -> str:
        """The consumer's group, as servers know it."""

    @property
    def start_at(self) -> StartAt:
        """Where it begins without progress."""

    @property
    def works(self) -> Mapping[MessageQueue, ProcessQueue]:
        """The queues that it holds."""

    def subscriptions(self) -> Iterable[SubscriptionData]:
        """What it subscribes to."""


class LockView(Protocol):
    """Who knows our locks (`orderly.QueueLocks`)."""

    def holds(self, queue: MessageQueue) -> bool:
        """Whether a queue is locked for us."""

    def age_ms(self, queue: MessageQueue) -> int | None:
        """How long ago a broker confirmed our lock; None if another member has it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why nothing comes from a topic."""

    topic: str
    kind: str
    text: str
    fault: bool = True

    @property
    def identity(self) -> tuple[str, str]:
        """What makes it the same reason as before: its text, unless figures in it always change."""
        return self.topic, self.kind if self.kind == "busy" else self.text


class Diagnosis:
    """Looks after one consumer."""

    def __init__(
        self,
        session: Session,
        observed: Observed,
        rebalancer: Rebalancer,
        locks: LockView | None = None,
    ) -> None:
        self._session = session
        self._group = observed.group
        self._observed = observed
        self._rebalancer = rebalancer
        self._locks = locks
        self._received: dict[str, int] = {}
        self._said: set[tuple[str, str]] = set()

    async def explain(self) -> list[str]:
        """All reasons for which nothing comes, topic by topic; empty if messages flow."""
        return [reason.text for reason in await self._reasons()]

    async def keep_explaining(self) -> None:
        """Look at silent topics every heartbeat, and log what is new; to be spawned."""
        clock, heartbeat_ms = self._session.clock, self._session.options.heartbeat_ms
        await pause(clock, min(FIRST_MS, heartbeat_ms))
        while True:
            await self.look()
            await pause(clock, heartbeat_ms)

    async def look(self) -> None:
        """Log the reasons that are new since the last look."""
        silent = self._silent_topics()
        reasons = [reason for reason in await self._reasons() if reason.topic in silent]
        for reason in reasons:
            if reason.identity not in self._said:
                level = logging.WARNING if reason.fault else logging.INFO
                log.log(level, "%s gets nothing: %s", self._group, reason.text)
        self._said = {reason.identity for reason in reasons}

    def _silent_topics(self) -> set[str]:
        """Topics from which nothing has come since the last look."""
        received = Counter[str]()
        for work in self._observed.works.values():
            received[work.queue.topic] += work.received
        topics = {subscription.topic for subscription in self._observed.subscriptions()}
        before, self._received = self._received, dict(received)
        return {topic for topic in topics if received[topic] == before.get(topic, 0)}

    async def _reasons(self) -> list[Reason]:
        works = list(self._observed.works.values())
        reasons: list[Reason] = []
        subscriptions = [
            subscription
            for subscription in self._observed.subscriptions()
            if not subscription.topic.startswith(RETRY_TOPIC_PREFIX)
        ]
        if not subscriptions:
            reasons.append(Reason("", "nothing", "it subscribes to no topic"))
        for subscription in subscriptions:
            ours = [work for work in works if work.queue.topic == subscription.topic]
            found = await self._examine(subscription, ours)
            if found is not None:
                reasons.append(found)
        return reasons

    async def _examine(
        self, subscription: SubscriptionData, works: list[ProcessQueue]
    ) -> Reason | None:
        """The first reason that holds for a topic; None if messages come, or may."""
        topic = subscription.topic
        share = self._rebalancer.shares.get(topic)
        if self._session.cached_route(topic) is None:
            return await self._no_route(topic)
        if share is None:
            return Reason(
                topic, "begin", f"the queues of {self._bare(topic)} are not shared out yet"
            )
        if not works:
            return self._no_queue(share)
        return (
            self._waiting(topic, works)
            or await self._different(subscription, share)
            or self._unfit(subscription, works)
            or self._idle(topic, works)
        )

    async def _no_route(self, topic: str) -> Reason:
        try:
            text = str(await self._session.nameservers.no_route(topic))
        except PenstockError as error:
            text = str(error)
        return Reason(topic, "route", text)

    def _no_queue(self, share: Share) -> Reason:
        topic, name = share.topic, self._bare(share.topic)
        if not share.queues:
            return Reason(
                topic, "queue", f"{name} has no queue that can be read: see its permissions"
            )
        if share.problem is not None:
            return Reason(topic, "queue", f"no queue of {name} is ours yet: {share.problem}")
        members, queues = len(share.clients), len(share.queues)
        if self._session.client_id not in share.clients and not self._rebalancer.broadcast:
            return Reason(
                topic,
                "queue",
                f"no queue of {name} is ours: its brokers do not list {self._session.client_id}"
                f" among the {members} members of {self._group}",
            )
        owners = self._rebalancer.owners(share)
        named = ", ".join(f"{client} has {count}" for client, count in owners[:NAMED_MAX])
        more = f" and {len(owners) - NAMED_MAX} more" if len(owners) > NAMED_MAX else ""
        if members > queues:
            why = f"its {queues} queues go to {queues} of the {members} members of {self._group}"
            step = "stop members, or give the topic more queues"
        else:
            why = f"the strategy gives its {queues} queues to others of {members} members"
            step = "all members must use the same strategy"
        return Reason(topic, "queue", f"no queue of {name} is ours: {why} ({named}{more}); {step}")

    def _waiting(self, topic: str, works: list[ProcessQueue]) -> Reason | None:
        """Reasons for which our queues are not pulled."""
        name = self._bare(topic)
        if self._locks is not None and not any(self._locks.holds(w.queue) for w in works):
            return self._no_locks(self._locks, topic, works)
        if all(work.paused for work in works):
            return Reason(topic, "paused", f"{name} is paused: resume() lets it go on", fault=False)
        full = [work for work in works if work.full is not None]
        if len(full) == len(works):
            return Reason(
                topic,
                "busy",
                f"the handlers of {name} have too much in work: {full[0].full}"
                " (in the first of its queues)",
            )
        return None

    def _no_locks(self, locks: LockView, topic: str, works: list[ProcessQueue]) -> Reason:
        ours = f"the locks of our {len(works)} queues of {self._bare(topic)}"
        if any(locks.age_ms(work.queue) is not None for work in works):
            brokers = ", ".join(sorted({work.queue.broker_name for work in works}))
            return Reason(
                topic, "lock", f"{ours} could not be renewed in time: does {brokers} answer?"
            )
        share = self._rebalancer.shares.get(topic, Share(topic))
        others = [client for client in share.clients if client != self._session.client_id]
        holder = " or ".join(others[:NAMED_MAX]) or "a member that has gone"
        return Reason(
            topic,
            "lock",
            f"{ours} are held elsewhere, by {holder}; brokers free the locks of a dead member after"
            " a minute",
        )

    async def _different(self, mine: SubscriptionData, share: Share) -> Reason | None:
        """Whether the broker has another subscription of the group for the topic.

        It keeps one for all: whoever sent the last heartbeat decides for everybody.
        """
        if len(share.clients) < 2:
            return None
        theirs = await self._connections(share)
        if theirs is None:
            return None
        name = self._bare(mine.topic)
        other = theirs.subscription_table.get(mine.topic)
        if other is None:
            return Reason(
                mine.topic,
                "subscription",
                f"other members of {self._group} do not subscribe to {name}, we do:"
                " all members must have the same subscriptions",
            )
        if _filter(other) == _filter(mine):
            return None
        return Reason(
            mine.topic,
            "subscription",
            f"members of {self._group} subscribe to {name} differently, others by"
            f" {other.sub_string!r}, we by {mine.sub_string!r}:"
            " all must have the same subscription",
        )

    async def _connections(self, share: Share) -> ConsumerConnection | None:
        """How a broker of the topic sees the group; None where it does not say."""
        try:
            answer = await self._session.call(
                self._session.broker(share.queues[0].broker_name),
                RequestCode.GET_CONSUMER_CONNECTION_LIST,
                {"consumerGroup": self._group},
            )
            return fastjson.decode(answer.body, ConsumerConnection)
        except PenstockError as error:
            log.debug("%s: its members' subscriptions are not told: %s", self._group, error)
            return None

    def _unfit(self, subscription: SubscriptionData, works: list[ProcessQueue]) -> Reason | None:
        if any(work.received for work in works):
            return None
        begun_at = self._rebalancer.begun_at
        if not any(work.next_offset > (begun_at(work.queue) or 0) for work in works):
            return None
        return Reason(
            subscription.topic,
            "filter",
            f"messages of {self._bare(subscription.topic)} came by and none fits"
            f" {subscription.sub_string!r} ({subscription.expression_type}):"
            " check the filter against what is sent",
        )

    def _idle(self, topic: str, works: list[ProcessQueue]) -> Reason | None:
        if any(work.count or work.received or work.next_offset < work.end_offset for work in works):
            return None
        name = self._bare(topic)
        text = f"nothing new has come to the {len(works)} queues of {name} that are ours"
        if self._observed.start_at == "last":
            text += '; a new group begins with new messages, with start_at="first" with the oldest'
        return Reason(topic, "idle", text, fault=False)

    def _bare(self, topic: str) -> str:
        return self._session.without_namespace(topic)


def _filter(subscription: SubscriptionData) -> tuple[str, object]:
    """What a subscription chooses, however it is written."""
    if subscription.tags_set:
        return subscription.expression_type, subscription.tags_set
    return subscription.expression_type, subscription.sub_string or "*"
