"""The results of `AsyncAdmin`: frozen values. An unknown value is None, never 0.

Times are milliseconds since 1970 by the servers' clocks. Names are without the client's namespace.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.client.consumer.subscription import Subscription
from penstock.client.received_message import ReceivedMessage
from penstock.errors import PenstockError
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import MASTER_ID, PERM_READ, PERM_WRITE

MESSAGE_TYPE = "message.type"
"""The attribute with the type of messages that a topic accepts."""


def perm_text(perm: int) -> str:
    """A permission as `rw`, `r`, `w` or `-`."""
    return (("r" if perm & PERM_READ else "") + ("w" if perm & PERM_WRITE else "")) or "-"


# --- brokers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class BrokerAddress:
    """A registered broker. Brokers with the same name are a master and its replicas."""

    cluster: str
    name: str
    id: int
    address: str

    @property
    def is_master(self) -> bool:
        return self.id == MASTER_ID


@dataclass(frozen=True, slots=True)
class BrokerRuntimeInfo:
    """The runtime information of a broker. A value that it does not report is None."""

    version: str | None
    penstock_version: str | None
    started_ms: int | None
    put_tps: float | None
    get_tps: float | None
    put_today: int | None
    get_today: int | None
    put_yesterday: int | None
    get_yesterday: int | None
    disk_used: float | None
    """The used share of the CommitLog's disk, 0 to 1."""
    log_begin: int | None
    log_end: int | None
    earliest_ms: int | None
    raw: Mapping[str, str]
    """All reported values, by RocketMQ's names."""


BrokerFigures = BrokerRuntimeInfo  # the name before 0.1.0 was released


@dataclass(frozen=True, slots=True)
class BrokerState:
    """A broker and its runtime information, or the error that occurred when it was queried."""

    broker: BrokerAddress
    runtime_info: BrokerRuntimeInfo | None
    problem: PenstockError | None = None

    @property
    def figures(self) -> BrokerRuntimeInfo | None:
        """The name of `runtime_info` before 0.1.0 was released."""
        return self.runtime_info


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All registered brokers of all clusters."""

    nameservers: tuple[str, ...]
    brokers: tuple[BrokerState, ...]

    @property
    def clusters(self) -> tuple[str, ...]:
        return tuple(sorted({state.broker.cluster for state in self.brokers}))


# --- topics --------------------------------------------------------------------------------------


class TopicKind(StrEnum):
    """Whether a topic is an application's, a retry or dead letter topic, or RocketMQ's own."""

    NORMAL = "normal"
    RETRY = "retry"
    DLQ = "dlq"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """The settings of a topic on one broker."""

    read_queues: int
    write_queues: int
    perm: int
    order: bool
    attributes: Mapping[str, str]

    @property
    def perm_text(self) -> str:
        """`rw`, `r`, `w` or `-`."""
        return perm_text(self.perm)

    @property
    def message_type(self) -> str:
        """NORMAL, FIFO, DELAY, TRANSACTION or MIXED; UNSPECIFIED if it is not set."""
        return self.attributes.get(MESSAGE_TYPE, "UNSPECIFIED")


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic and the brokers that have it."""

    name: str
    kind: TopicKind
    brokers: Mapping[str, TopicSettings]


@dataclass(frozen=True, slots=True)
class QueueState:
    """The offsets of a queue. `max_offset` is the offset of the next message."""

    queue: MessageQueue
    min_offset: int
    max_offset: int
    updated_ms: int | None

    @property
    def count(self) -> int:
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """The details of a topic, without the queues of `unreachable` brokers."""

    topic: TopicInfo
    addresses: Mapping[str, Mapping[int, str]]
    """Broker name → broker id → address, as in the route."""
    queues: tuple[QueueState, ...]
    groups: tuple[str, ...]
    put_tps: float | None
    unreachable: tuple[str, ...] = ()


# --- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of a consumer group on one broker."""

    consume_enabled: bool
    broadcast_enabled: bool
    orderly: bool
    from_min_enabled: bool
    retries_max: int
    retry_queues: int
    consume_timeout_minutes: int
    notify_enabled: bool
    broker_id: int
    broker_id_when_slow: int
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group and the brokers that have it."""

    name: str
    is_system: bool
    brokers: Mapping[str, GroupSettings]


@dataclass(frozen=True, slots=True)
class Member:
    """A connected client of a group."""

    client_id: str
    address: str
    language: str
    version: int
    version_text: str
    brokers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The connected members of a group, as the brokers report them.

    Without members the other values are None.
    """

    group: str
    members: tuple[Member, ...]
    subscriptions: tuple[Subscription, ...]
    model: str | None
    """CLUSTERING or BROADCASTING."""
    consume_type: str | None
    start_at: str | None
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """The progress of a group in a queue. `committed` is None if it never committed an offset."""

    queue: MessageQueue
    max_offset: int
    committed: int | None
    pulled: int | None
    lag_ms: int | None
    """The age of the oldest message that is not consumed yet."""
    consumed_ms: int | None
    """The store time of the last consumed message."""
    client_id: str | None = None

    @property
    def lag(self) -> int | None:
        """The number of messages that are not consumed yet."""
        return None if self.committed is None else max(self.max_offset - self.committed, 0)


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The progress of a group, without the queues of `unreachable` brokers."""

    group: str
    queues: tuple[QueueProgress, ...]
    tps: float
    unreachable: tuple[str, ...] = ()

    @property
    def lag(self) -> int | None:
        """The number of messages that are not consumed yet; None if any queue's is unknown."""
        lags = [queue.lag for queue in self.queues]
        known = [lag for lag in lags if lag is not None]
        return None if self.unreachable or len(known) < len(lags) else sum(known)

    @property
    def lag_ms(self) -> int | None:
        """The age of the oldest message that is not consumed yet."""
        ages = [queue.lag_ms for queue in self.queues]
        known = [age for age in ages if age is not None]
        return None if self.unreachable or len(known) < len(ages) else max(known, default=0)


# --- offsets -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueMove:
    """The old and the new offset of a group in one queue."""

    queue: MessageQueue
    old: int | None
    new: int

    @property
    def skipped(self) -> int | None:
        """The number of messages that will be skipped; negative if they will be consumed again."""
        return None if self.old is None else self.new - self.old


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """The changes that `apply_reset` will make."""

    group: str
    topic: str
    moves: tuple[QueueMove, ...]
    at_ms: int | None = None
    """The requested time, if any; 0 for the first message, -1 for the last."""

    @property
    def skipped(self) -> int:
        """The number of messages that will be skipped, without the `unknown` queues."""
        return sum(max(move.skipped or 0, 0) for move in self.moves)

    @property
    def repeated(self) -> int:
        """The number of messages that will be consumed again."""
        return sum(max(-(move.skipped or 0), 0) for move in self.moves)

    @property
    def unknown(self) -> int:
        """The number of queues without a committed offset, in which the effect is not known."""
        return sum(move.old is None for move in self.moves)


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The changes that were made.

    `undo` is the plan that restores the old offsets. It lacks queues that had none, because an
    offset can't be removed. `failed` has the moves that failed, each with its error.
    """

    moves: tuple[QueueMove, ...]
    live: tuple[str, ...]
    """Brokers with connected consumers, which continue at the new offset with their next pull."""
    failed: tuple[tuple[QueueMove, PenstockError], ...]
    undo: ResetPlan


# --- messages ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages by store time. If there are more, `resume` gets the next page."""

    messages: tuple[ReceivedMessage, ...]
    resume: Mapping[MessageQueue, int] | None


class TrackState(StrEnum):
    """Whether a group has consumed a message."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    """The group is past it, and its subscription does not match it."""
    PENDING = "pending"
    BROADCAST = "broadcast"
    """Each client keeps its own offsets, so brokers do not know."""
    UNKNOWN = "unknown"
    """The group has no offset in the queue."""


@dataclass(frozen=True, slots=True)
class Track:
    """The state of a message in a group."""

    group: str
    state: TrackState
    online: bool


@dataclass(frozen=True, slots=True)
class DirectResult:
    """The result of consuming a message directly."""

    client_id: str
    result: str
    """CR_SUCCESS, CR_LATER, CR_ROLLBACK, CR_COMMIT, CR_THROW_EXCEPTION or CR_RETURN_NULL."""
    remark: str | None
    spent_ms: int
    orderly: bool

    @property
    def is_success(self) -> bool:
        return self.result in ("CR_SUCCESS", "CR_COMMIT")
