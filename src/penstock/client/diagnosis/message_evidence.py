"""What is known about a message and a group, before anything is concluded from it.

A value that could not be determined is `Unknown` with the reason. None means that there is none.
"""

from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from penstock.client.admin.async_admin import GroupMembers, GroupSettings
from penstock.client.consumer.subscription import Subscription
from penstock.client.diagnosis.traces import Delivery
from penstock.client.diagnosis.values import MessagePlace
from penstock.wire.bodies.admin_bodies import ProcessQueueInfo
from penstock.wire.bodies.client_bodies import MessageQueue

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that could not be determined."""

    reason: str


Known: TypeAlias = T | Unknown


@dataclass(frozen=True, slots=True)
class RouteEvidence:
    """The route of the message's topic, at the message's broker."""

    brokers: tuple[str, ...]
    readable: bool
    """Whether the topic has read permission on the broker of the message."""
    read_queues: int
    master: bool
    """Whether the broker of the message has a registered master."""


@dataclass(frozen=True, slots=True)
class QueueStateOfMember:
    """What a member reports about one of its queues."""

    info: ProcessQueueInfo | None
    """None: a queue that it pops."""
    in_work_since_ms: int | None = None
    """When its handler received the oldest message; only Penstock's consumers report it."""
    paused: bool | None = None
    """None: not reported."""
    failure: str | None = None
    """The last failure of a handler or of a pull."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """What a connected member reports about itself; `problem` if it does not answer."""

    client_id: str
    problem: str | None = None
    subscriptions: tuple[Subscription, ...] = ()
    """Topics without namespace."""
    queues: dict[MessageQueue, QueueStateOfMember] = field(default_factory=dict)
    """Its queues, without namespace."""
    orderly: bool = False
    started_ms: int | None = None

    def subscription(self, topic: str) -> Subscription | None:
        """Its subscription to a topic."""
        return next((one for one in self.subscriptions if one.topic == topic), None)


@dataclass(frozen=True, slots=True)
class RetryCopy:
    """A copy of the message for redelivery, in the group's retry topic or waiting for its time."""

    place: MessagePlace
    attempt: int
    """The number of the redelivery, from 1."""
    due_ms: int | None = None
    """The delivery time of a copy that waits for it; None: unknown."""
    waits: bool = False
    """Whether it is in a delay topic, and not in the retry topic yet."""
    committed: Known[int | None] = None
    """The committed offset of the copy's queue in the retry topic."""


@dataclass(frozen=True, slots=True)
class DelayedCopy:
    """The message in a delay topic, before its delivery to its topic."""

    place: MessagePlace
    topic: str
    due_ms: int | None


@dataclass(frozen=True, slots=True)
class HalfCopy:
    """The half message of a transaction."""

    place: MessagePlace
    topic: str
    checks: int
    resolved: Known[bool]
    """Whether an op message ended the transaction. Without a copy in the topic: rolled back."""


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a message may be gone: the first stored time or offset that is left."""

    made_ms: int | None
    """When the message was made, by its unique id."""
    earliest_ms: int | None
    """The store time of the oldest message that any broker still has."""
    offset: int | None = None
    """The offset that was asked for: of a queue, or of a log."""
    min_offset: int | None = None
    max_offset: int | None = None

    @property
    def is_deleted(self) -> bool:
        """Whether the message must be older than everything that is left."""
        if self.offset is not None and self.min_offset is not None:
            return self.offset < self.min_offset
        if self.made_ms is not None and self.earliest_ms is not None:
            return self.made_ms < self.earliest_ms
        return False


class MembershipEvidence:
    """What the members of a group tell; `members` is a field of the evidence."""

    __slots__ = ()

    members: Known[GroupMembers]

    @property
    def online(self) -> bool | None:
        """Whether the group has a connected member; None if it is not known."""
        if isinstance(self.members, Unknown):
            return None
        if self.members.members:
            return True
        return None if self.members.unreachable else False

    @property
    def broadcast(self) -> bool:
        """Whether each member consumes all messages."""
        return not isinstance(self.members, Unknown) and self.members.model == "BROADCASTING"


@dataclass(frozen=True, slots=True)
class MessageEvidence(MembershipEvidence):
    """All that was gathered about a message and a group."""

    wanted: str
    group: str
    topic: str | None
    """The topic that the message was sent to, if it is known."""
    now_ms: int
    how: str
    partial: tuple[str, ...] = ()
    copies: int = 0
    """Messages with this id in the topic: a producer that retries may store several."""
    message: MessagePlace | None = None
    absence: Absence | None = None
    delayed: DelayedCopy | None = None
    half: HalfCopy | None = None
    route: Known[RouteEvidence | None] = None
    settings: Known[dict[str, GroupSettings]] = field(default_factory=dict)
    """The settings of the group, by broker."""
    forbidden: Known[bool] = False
    """Whether the group is forbidden to read the topic on the message's broker."""
    members: Known[GroupMembers] = field(default_factory=lambda: Unknown("not queried"))
    states: tuple[MemberState, ...] = ()
    sql_matches: Known[bool] | None = None
    """The result of an SQL92 filter; None: the group has none."""
    committed: Known[int | None] = None
    min_offset: Known[int] = 0
    max_offset: Known[int] = 0
    lag_ms: int | None = None
    """The age of the oldest message of the queue that is not consumed."""
    retries: Known[tuple[RetryCopy, ...]] = ()
    """By store time."""
    dead: Known[tuple[MessagePlace, ...]] = ()
    pops: bool = False
    """Whether the group consumes with POP."""
    deliveries: tuple[Delivery, ...] = ()
    """Deliveries to the group, by the traces of its consumers; empty if they write none."""
    similar: str = ""
    """Groups with similar names, as text, if no broker has the group."""
    no_topic: str | None = None
    """That the given topic does not exist, as a sentence without its end, with similar names."""

    @property
    def pops_in_order(self) -> bool:
        """Whether the group pops the message's queue in order: an acknowledgement, not a pop, moves
        its offset there."""
        at = self.message
        if not self.pops or at is None or isinstance(self.settings, Unknown):
            return False
        settings = self.settings.get(at.broker)
        return settings is not None and settings.orderly

    @property
    def queue(self) -> MessageQueue | None:
        """The queue of the message."""
        at = self.message
        return None if at is None else MessageQueue(at.topic, at.broker, at.queue_id)

    @property
    def subscription(self) -> Subscription | None:
        """The group's subscription to the topic, as brokers have it."""
        if isinstance(self.members, Unknown):
            return None
        return next((s for s in self.members.subscriptions if s.topic == self.topic), None)

    @property
    def owner(self) -> Known[MemberState | None]:
        """The member that has the queue; None: nobody; Unknown: a member does not answer."""
        queue = self.queue
        for state in self.states:
            if queue is not None and queue in state.queues:
                return state
        silent = [state for state in self.states if state.problem is not None]
        if silent:
            return Unknown(f"{silent[0].client_id} does not tell its queues: {silent[0].problem}")
        return None if self.online is not None else Unknown("the members are not known")

    @property
    def matches(self) -> Known[bool | None]:
        """Whether the filter accepts the message; None without a subscription or message."""
        subscription, message = self.subscription, self.message
        if subscription is None or message is None:
            return None
        if self.sql_matches is not None:
            return self.sql_matches
        return subscription.tags is None or message.tags in subscription.tags

    @property
    def passed(self) -> Known[bool]:
        """Whether the committed offset is behind the message."""
        if isinstance(self.committed, Unknown):
            return self.committed
        if self.message is None:
            return Unknown("the message was not found")
        return self.committed is not None and self.committed > self.message.offset
