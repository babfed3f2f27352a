"""What a handler may answer, and the effects it may ask for: values that `net` carries out.

| Answer | Meaning |
|---|---|
| `Reply` | the response |
| `None` | nothing is sent: the request was one-way, or the answer lies in the output already |
| `InThread` | run `work` in the I/O pool, then answer what `then` makes of its result |
| `Hold` | nothing to tell yet: call `again` when the queue has got messages, or at the deadline |
| `Relay` | ask another client and answer what `then` makes of its answer |
| `Encoded` | the response as bytes, perhaps when the log is flushed |
| `Registered` | tell the NameServers, and answer `then` when they know |
| `Saved` | write a table, and answer `then` when its file holds it |
| `Routed` | ask the NameServers for a topic's route, and answer what `then` makes of it |

Effects go into the outbox; they are carried out after the turn, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    from penstock.wire.bodies.client_bodies import TopicRouteData

ClientId: TypeAlias = int
"""A connection, opaque: numbers are never used twice."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response."""

    code: int = 0
    ext: Mapping[str, str] | None = None
    body: bytes = b""
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class InThread:
    """`work` may wait for the disk; `then` runs in the loop again. A raised error is the answer.

    Works run beside each other; those with the same `line` have their `then` in the order in which
    they were asked for. One without `work` only waits for its turn; its `then` gets None.
    """

    work: Callable[[], Any] | None
    then: Callable[[Any], Answer]
    line: Hashable = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Long polling. `again(last)` is called when `queue` has got messages (or, for the first of a
    line, one of its queues), and with `last` true at the deadline; it answers a Reply, or another
    Hold to go on waiting (never after `last`). `heard` is how often a line had been called when
    this was decided: if it was since, the request is tried again at once."""

    queue: Hashable
    deadline_ms: int
    again: Callable[[bool], Answer]
    heard: int = 0


@dataclass(frozen=True, slots=True)
class Relay:
    """A request to another client, whose answer becomes ours."""

    client: ClientId
    code: int
    ext: Mapping[str, str]
    body: bytes
    then: Callable[[Reply], Answer]
    deadline_ms: int
    on_timeout: Reply


REGISTER_MS = 3_000
"""How long a tool is kept waiting for NameServers; mqadmin gives up after 5 s."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The NameServers are told of these topics, or of all if none is named. `then` is called when
    each has answered or can't be reached, at the deadline at the latest; it runs in the loop."""

    then: Callable[[], Answer]
    deadline_ms: int
    topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Routed:
    """The route of a topic over all brokers is asked for. `then` gets it, or None if no NameServer
    knows it or answers; it runs in the loop."""

    topic: str
    then: Callable[[TopicRouteData | None], Answer]


@dataclass(frozen=True, slots=True)
class Saved:
    """The table is written. `then` runs in the loop when the file holds what the table holds now;
    it gets False if that can't be written. Those who ask during a write share the next one."""

    table: Table
    then: Callable[[bool], Answer]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A response that is bytes already. It leaves when the log is flushed up to `offset`, where
    that is waited for; `late` is sent in its place if that takes too long."""

    data: bytes
    late: bytes = b""
    offset: int = 0


Answer: TypeAlias = Reply | InThread | Hold | Relay | Registered | Routed | Saved | Encoded | None


@dataclass(frozen=True, slots=True)
class Tell:
    """A one-way request to a client."""

    client: ClientId
    code: int
    ext: Mapping[str, str]
    body: bytes = b""


class Table(Protocol):
    """What can be persisted: a table of `store.tables` and the like."""

    FILE: ClassVar[str]
    dirty: bool

    def snapshot(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Persist:
    """Write a table to its file soon; several of one turn are written once."""

    table: Table


@dataclass(frozen=True, slots=True)
class Register:
    """Tell the NameServers about our topics now, not at the next period."""


@dataclass(frozen=True, slots=True)
class Close:
    """End a client's connection."""

    client: ClientId
    why: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Call `tick` at this time at the latest: something became due since it was last asked."""

    ms: int


Effect: TypeAlias = Tell | Persist | Register | Close | Wake


@dataclass(slots=True)
class Outbox:
    """Effects of this turn, in order."""

    effects: list[Effect] = field(default_factory=list)

    def put(self, effect: Effect) -> None:
        self.effects.append(effect)

    def take(self) -> list[Effect]:
        """All effects; the outbox is empty afterwards."""
        taken, self.effects = self.effects, []
        return taken
