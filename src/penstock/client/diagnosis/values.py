"""The results of the diagnosis: facts, verdicts, places of messages. All values are frozen.

A fact that could not be determined has the status `unknown`, and its text says why. Times are
milliseconds since 1970 by the servers' clocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.client.admin.admin_resend import origin_topic
from penstock.client.namespace import without_namespace
from penstock.client.received_message import ReceivedMessage
from penstock.wire.codes import PROPERTY_REAL_TOPIC, PROPERTY_RETRY_TOPIC, RETRY_TOPIC_PREFIX


class FactStatus(StrEnum):
    """What a fact means for the consumption of a message, or for the health of a group."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


class FactKind(StrEnum):
    """The subject of a fact; the chain of a message has this order."""

    MESSAGE = "message"
    ROUTE = "route"
    GROUP = "group"
    MEMBERS = "members"
    SUBSCRIPTION = "subscription"
    FILTER = "filter"
    PERMISSION = "permission"
    OWNER = "owner"
    PROGRESS = "progress"
    CONSUMER = "consumer"
    POP = "pop"
    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Fact:
    """One link of the chain: a sentence and the values that it is derived from."""

    kind: FactKind
    status: FactStatus
    text: str
    evidence: Mapping[str, object] = field(default_factory=dict)
    """Values of JSON types, by name."""


class Verdict(StrEnum):
    """Where a message is, from the point of view of a group."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    """The subscription does not match it: the group does not receive it."""
    WAITING = "waiting"
    """Behind other messages of its queue."""
    IN_WORK = "in_work"
    """A member has received it and has not finished it."""
    BLOCKED = "blocked"
    """A member does not finish an earlier message of the queue."""
    PAUSED = "paused"
    """The owner of the queue has paused it."""
    RETRYING = "retrying"
    """A handler failed; the message is delivered again later."""
    DEAD_LETTER = "dead_letter"
    POPPED = "popped"
    """A POP consumer has received it; brokers do not report whether it was acknowledged."""
    DELAYED = "delayed"
    """Its delivery time has not come."""
    HALF = "half"
    """Its transaction is neither committed nor rolled back."""
    ROLLED_BACK = "rolled_back"
    NO_MEMBER = "no_member"
    NOT_SUBSCRIBED = "not_subscribed"
    NO_OWNER = "no_owner"
    """No member owns the queue."""
    CONSUME_DISABLED = "consume_disabled"
    NOT_READABLE = "not_readable"
    """The topic's permission or its number of read queues excludes the queue."""
    NO_GROUP = "no_group"
    NO_ROUTE = "no_route"
    DELETED = "deleted"
    """Older than what the brokers still have."""
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


class GroupVerdict(StrEnum):
    """The state of a consumer group: the most serious problem, if there is one."""

    HEALTHY = "healthy"
    BEHIND = "behind"
    """Members consume, but messages wait for a long time."""
    BLOCKED = "blocked"
    PAUSED = "paused"
    NO_OWNER = "no_owner"
    DIFFERENT_SUBSCRIPTIONS = "different_subscriptions"
    NO_MEMBER = "no_member"
    NEVER_CONSUMED = "never_consumed"
    """No member, and no committed offset."""
    CONSUME_DISABLED = "consume_disabled"
    DEAD_LETTERS = "dead_letters"
    """Consumption works, but there are dead letters."""
    NO_GROUP = "no_group"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """A stored copy of a message: where it is, and the properties that decide about delivery."""

    topic: str
    """The topic that it is stored in, without namespace."""
    broker: str
    queue_id: int
    offset: int
    store_ms: int
    born_ms: int
    message_id: str
    offset_id: str
    unique_id: str | None
    tags: str | None = None
    keys: tuple[str, ...] = ()
    reconsume_times: int = 0
    origin: str | None = None
    """The topic that it was sent to, without namespace; None if the copy does not name it."""

    @classmethod
    def of(cls, message: ReceivedMessage) -> "MessagePlace":
        """The place of a received message."""
        queue = message.queue
        origin = _origin(message)
        return cls(
            topic=queue.topic,
            broker=queue.broker_name,
            queue_id=queue.queue_id,
            offset=message.queue_offset,
            store_ms=message.store_ms,
            born_ms=message.born_ms,
            message_id=message.message_id,
            offset_id=message.offset_id,
            unique_id=message.unique_id,
            tags=message.tags,
            keys=tuple(message.keys),
            reconsume_times=message.reconsume_times,
            origin=None if origin is None else without_namespace(message.source.namespace, origin),
        )

    @property
    def text(self) -> str:
        """`topic/broker/queue@offset`, as `find_messages` reads it."""
        return f"{self.topic}/{self.broker}/{self.queue_id}@{self.offset}"

    def json(self) -> dict[str, object]:
        """The place as values of JSON types."""
        return {
            "topic": self.topic,
            "broker": self.broker,
            "queue": self.queue_id,
            "offset": self.offset,
            "store_ms": self.store_ms,
            "message_id": self.message_id,
            "offset_id": self.offset_id,
        }


def _origin(message: ReceivedMessage) -> str | None:
    """The topic (with namespace) that a message was sent to, also before its delivery to it."""
    origin = origin_topic(message) or message.properties.get(PROPERTY_REAL_TOPIC)
    if origin is not None and origin.startswith(RETRY_TOPIC_PREFIX):
        return message.properties.get(PROPERTY_RETRY_TOPIC)
    return origin


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a group has consumed a message, or has not."""

    wanted: str
    """The id or place that was asked for."""
    group: str
    message: MessagePlace | None
    facts: tuple[Fact, ...]
    verdict: Verdict
    text: str
    """The verdict as a sentence."""
    command: str | None
    """The next command to run."""
    partial: tuple[str, ...] = ()
    """What could not be searched; each a sentence."""

    @property
    def is_consumed(self) -> bool:
        return self.verdict is Verdict.CONSUMED


@dataclass(frozen=True, slots=True)
class GroupExplanation:
    """The state of a consumer group."""

    group: str
    facts: tuple[Fact, ...]
    verdict: GroupVerdict
    text: str
    command: str | None
    partial: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        return self.verdict is GroupVerdict.HEALTHY
