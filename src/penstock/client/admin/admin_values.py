"""What `AsyncAdmin` answers: frozen values. What nobody knows is None, never 0.

Times are milliseconds since 1970 by the servers' clocks, names are without the client's namespace.
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
"""The attribute that says which messages a topic takes."""


# --- brokers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class BrokerAddress:
    """A broker that the NameServers know; several of one name are a master and its replicas."""

    cluster: str
    name: str
    id: int
    address: str

    @property
    def is_master(self) -> bool:
        return self.id == MASTER_ID


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    """A broker's own figures, as far as it tells them."""

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
    """Share of the log's disk that is used, 0 to 1."""
    log_begin: int | None
    log_end: int | None
    earliest_ms: int | None
    raw: Mapping[str, str]
    """Everything that was told, in RocketMQ's names."""


@dataclass(frozen=True, slots=True)
class BrokerState:
    """A broker and how it does; `problem` says why there are no figures."""

    broker: BrokerAddress
    figures: BrokerFigures | None
    problem: PenstockError | None = None


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All brokers of all clusters that the NameServers know."""

    nameservers: tuple[str, ...]
    brokers: tuple[BrokerState, ...]

    @property
    def clusters(self) -> tuple[str, ...]:
        return tuple(sorted({state.broker.cluster for state in self.brokers}))


# --- topics --------------------------------------------------------------------------------------


class TopicKind(StrEnum):
    """Whose a topic is."""

    NORMAL = "normal"
    RETRY = "retry"
    DLQ = "dlq"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """A topic on one broker."""

    read_queues: int
    write_queues: int
    perm: int
    order: bool
    attributes: Mapping[str, str]

    @property
    def perm_text(self) -> str:
        """`rw`, `r`, `w` or `-`."""
        text = ("r" if self.perm & PERM_READ else "") + ("w" if self.perm & PERM_WRITE else "")
        return text or "-"

    @property
    def message_type(self) -> str:
        """NORMAL, FIFO, DELAY, TRANSACTION or MIXED; UNSPECIFIED where nobody said."""
        return self.attributes.get(MESSAGE_TYPE, "UNSPECIFIED")


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic and the brokers that have it."""

    name: str
    kind: TopicKind
    brokers: Mapping[str, TopicSettings]


@dataclass(frozen=True, slots=True)
class QueueState:
    """The ends of a queue: `max_offset` is the next to be written."""

    queue: MessageQueue
    min_offset: int
    max_offset: int
    updated_ms: int | None

    @property
    def count(self) -> int:
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic in full. Queues of `unreachable` brokers are missing."""

    topic: TopicInfo
    addresses: Mapping[str, Mapping[int, str]]
    """Broker name → broker id → address, as clients are told."""
    queues: tuple[QueueState, ...]
    groups: tuple[str, ...]
    put_tps: float | None
    unreachable: tuple[str, ...] = ()


# --- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """A consumer group on one broker."""

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
    """A group and the brokers that know it."""

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
    """Who is connected for a group, as the brokers see it; nobody leaves the rest None."""

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
    """How far a group is in a queue; `committed` is None where it has never said."""

    queue: MessageQueue
    max_offset: int
    committed: int | None
    pulled: int | None
    lag_ms: int | None
    """Age of the oldest message that is still to be consumed."""
    consumed_ms: int | None
    """When the last consumed message was stored."""
    client_id: str | None = None

    @property
    def lag(self) -> int | None:
        """Messages still to be consumed."""
        return None if self.committed is None else max(self.max_offset - self.committed, 0)


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a group is; queues of `unreachable` brokers are missing."""

    group: str
    queues: tuple[QueueProgress, ...]
    tps: float
    unreachable: tuple[str, ...] = ()

    @property
    def lag(self) -> int | None:
        """Messages still to be consumed; None if that is unknown of any queue."""
        lags = [queue.lag for queue in self.queues]
        known = [lag for lag in lags if lag is not None]
        return None if self.unreachable or len(known) < len(lags) else sum(known)

    @property
    def lag_ms(self) -> int | None:
        """Age of the oldest message that is still to be consumed."""
        ages = [queue.lag_ms for queue in self.queues]
        known = [age for age in ages if age is not None]
        return None if self.unreachable or len(known) < len(ages) else max(known, default=0)


# --- offsets -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueMove:
    """A group's progress in one queue, before and after."""

    queue: MessageQueue
    old: int | None
    new: int

    @property
    def skipped(self) -> int | None:
        """Messages that will not be consumed; less than 0: so many will be consumed again."""
        return None if self.old is None else self.new - self.old


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """What `apply_reset` will do. Nothing was changed yet."""

    group: str
    topic: str
    moves: tuple[QueueMove, ...]
    at_ms: int | None = None
    """The moment that was asked for, where it was one: 0 the first message, -1 the last."""

    @property
    def skipped(self) -> int:
        """Messages that will not be consumed."""
        return sum(max(move.skipped or 0, 0) for move in self.moves)

    @property
    def repeated(self) -> int:
        """Messages that will be consumed again."""
        return sum(max(-(move.skipped or 0), 0) for move in self.moves)


@dataclass(frozen=True, slots=True)
class ResetResult:
    """What took effect.

    `undo` is the plan that goes back; queues without progress before are not in it: progress can't
    be taken away. `failed` has the moves that were not made, each with its reason.
    """

    moves: tuple[QueueMove, ...]
    live: tuple[str, ...]
    """Brokers at which consumers are connected: these move with their next pull."""
    failed: tuple[tuple[QueueMove, PenstockError], ...]
    undo: ResetPlan


# --- messages ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages by time; `resume`, where there are more, continues behind them."""

    messages: tuple[ReceivedMessage, ...]
    resume: Mapping[MessageQueue, int] | None


class TrackState(StrEnum):
    """What became of a message in a group."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    """The group is past it, and its subscription does not want it."""
    PENDING = "pending"
    BROADCAST = "broadcast"
    """Each client keeps its own progress: brokers do not know."""
    UNKNOWN = "unknown"
    """The group has no progress there."""


@dataclass(frozen=True, slots=True)
class Track:
    """What became of a message in a group."""

    group: str
    state: TrackState
    online: bool


@dataclass(frozen=True, slots=True)
class DirectResult:
    """What a consumer said when it was given a message by hand."""

    client_id: str
    result: str
    """CR_SUCCESS, CR_LATER, CR_ROLLBACK, CR_COMMIT, CR_THROW_EXCEPTION or CR_RETURN_NULL."""
    remark: str | None
    spent_ms: int
    orderly: bool

    @property
    def is_success(self) -> bool:
        return self.result in ("CR_SUCCESS", "CR_COMMIT")
