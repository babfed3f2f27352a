"""The values that a handler returns, and the effects that it asks for; `server` executes both.

| Answer | Meaning |
|---|---|
| `Reply` | Send this response. |
| `None` | Send nothing: the request is one-way, or its response is in the output already. |
| `InThread` | Run `work` in the thread pool, then answer with what `then` returns. |
| `NextIteration` | Serve other clients first, then answer with what `then` returns. |
| `Suspend` | Long polling: call `retry` when messages arrive, or at the deadline. |
| `CallClient` | Send a request to another client and answer with what `then` returns. |
| `EncodedReply` | Send these bytes, if necessary after the log is flushed. |
| `RegisterTopics` | Register topics with the NameServers, then answer with what `then` returns. |
| `QueryRoute` | Query the NameServers for a route, then answer with what `then` returns. |
| `WhenDone` | Wait for work that the server does, then answer with what `then` returns. |

Effects go into the `EffectQueue`. They are executed in order, after the requests of one read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from penstock.wire.codes import ResponseCode
from penstock.wire.output import response

if TYPE_CHECKING:
    from penstock.rpc.command import Command
    from penstock.store.store import MessageStore
    from penstock.wire.bodies.client_bodies import TopicRouteData

ClientId: TypeAlias = int
"""The number of a connection. A number is never used twice."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response."""

    code: int = 0
    ext: Mapping[str, str] | None = None
    body: bytes = b""
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class InThread:
    """Work for the thread pool, because it may wait for the disk.

    `then` runs in the event loop with the result. An exception becomes the response. Work runs
    concurrently, but the `then` functions of equal `ordered_by` run in the order of the requests.
    Without `work`, `then` only waits for those before it and gets None.
    """

    work: Callable[[], Any] | None
    then: Callable[[Any], Answer]
    ordered_by: Hashable = None


@dataclass(frozen=True, slots=True)
class NextIteration:
    """The next step of a long request; `then` runs in the next iteration of the event loop."""

    then: Callable[[], Answer]


@dataclass(frozen=True, slots=True)
class Suspend:
    """Long polling: the request waits for messages in a queue, or in the queues of a WaitQueue.

    `retry(last)` is called when messages have arrived, and with `last` true at the deadline. It
    returns a Reply, or (unless `last`) another Suspend. `notifications` is the WaitQueue's count
    when this was decided: if it has grown since, the request is retried at once.
    """

    queue: Hashable
    deadline_ms: int
    retry: Callable[[bool], Answer]
    notifications: int = 0


@dataclass(frozen=True, slots=True)
class CallClient:
    """A request to another client; `then` makes the answer from its response."""

    client: ClientId
    code: int
    ext: Mapping[str, str]
    body: bytes
    then: Callable[[Reply], Answer]
    deadline_ms: int
    on_timeout: Reply


REGISTER_MS = 3_000
"""How long an admin request waits for the NameServers; mqadmin gives up after 5 s."""


@dataclass(frozen=True, slots=True)
class RegisterTopics:
    """Registers these topics with the NameServers, or all topics if none is named.

    `then` runs in the event loop when each NameServer has answered or failed, or at the deadline.
    """

    then: Callable[[], Answer]
    deadline_ms: int
    topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryRoute:
    """Queries the NameServers for a topic's route over all brokers.

    `then` runs in the event loop. It gets None if no NameServer answers or knows the topic.
    """

    topic: str
    then: Callable[[TopicRouteData | None], Answer]


class ServerWork(Protocol):
    """Work that the server has begun; its callbacks run in the event loop."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...

    def result(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class WhenDone:
    """Waits for work of the server; `then` gets its result. An exception becomes the response."""

    work: ServerWork
    then: Callable[[Any], Answer]


@dataclass(frozen=True, slots=True)
class EncodedReply:
    """A response in bytes, sent when the log up to `offset` may be acknowledged.

    `late` is sent instead if the flush takes too long, `unreplicated` if the slaves do.
    """

    data: bytes
    late: bytes = b""
    unreplicated: bytes = b""
    offset: int = 0


Answer: TypeAlias = (
    Reply
    | InThread
    | NextIteration
    | Suspend
    | CallClient
    | RegisterTopics
    | QueryRoute
    | WhenDone
    | EncodedReply
    | None
)


def reply_when_flushed(
    store: MessageStore, command: Command, reply: Reply, done: str = "stored"
) -> Answer:
    """A reply without a body to a request whose effect is in the log, up to the log's end now.

    It is sent when the log may be acknowledged. `done` tells the client what has been done if the
    flush or the slaves take too long.
    """
    if command.oneway or not store.sends_wait:
        return reply

    def encode(code: int, remark: str | None) -> bytes:
        return response(code, command.opaque, command.encoding, ext=reply.ext, remark=remark)

    return EncodedReply(
        encode(0, reply.remark),
        encode(
            ResponseCode.FLUSH_DISK_TIMEOUT,
            f"{done}, but not flushed to disk within flush_timeout_ms",
        ),
        encode(
            ResponseCode.FLUSH_SLAVE_TIMEOUT,
            f"{done}, but not replicated within slave_timeout_ms",
        ),
        store.log.end,
    )


@dataclass(frozen=True, slots=True)
class NotifyClient:
    """A one-way request to a client."""

    client: ClientId
    code: int
    ext: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class NotifyMembers:
    """The members or topics of a consumer group have changed: tell its members, now or soon.

    Several changes may cause one notification.
    """

    group: str
    members: Mapping[ClientId, object]
    """As they are when the notifications are sent."""


class PersistentTable(Protocol):
    """A table with a file, such as those of `store.tables`."""

    FILE: ClassVar[str]
    dirty: bool

    def snapshot(self) -> bytes: ...


@runtime_checkable
class LargeTable(PersistentTable, Protocol):
    """A table whose snapshot is made by the thread pool."""

    def begin_snapshot(self) -> Callable[[], bytes]:
        """The work that makes the snapshot of the present state."""


@dataclass(frozen=True, slots=True)
class PersistSoon:
    """Write a table to its file; several requests of one loop iteration cause one write."""

    table: PersistentTable


@dataclass(frozen=True, slots=True)
class RegisterSoon:
    """Register with the NameServers now, not at the next period."""


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close a client's connection."""

    client: ClientId
    why: str


@dataclass(frozen=True, slots=True)
class TickAt:
    """Call `tick` at this time at the latest: something became due after the last `due()`."""

    ms: int


Effect: TypeAlias = (
    NotifyClient | NotifyMembers | PersistSoon | RegisterSoon | CloseConnection | TickAt
)


@dataclass(slots=True)
class EffectQueue:
    """Effects that have not been executed yet, in order."""

    pending: list[Effect] = field(default_factory=list)

    def put(self, effect: Effect) -> None:
        self.pending.append(effect)

    def take(self) -> list[Effect]:
        """Remove and return all effects."""
        taken, self.pending = self.pending, []
        return taken
