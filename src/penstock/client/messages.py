"""Messages to send and the receipts of sends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum

from msgspec import Struct

from penstock.errors import MessageIllegal
from penstock.wire.bodies.client_bodies import MessageQueue

__all__ = ["Message", "MessageQueue", "SendReceipt", "SendStatus"]


PRIORITY_MAX = 2**31 - 1


class SendStatus(IntEnum):
    """Result of a send, by RocketMQ's names.

    The message is stored with any status. All but SEND_OK tell that a flush or replica timed out.
    """

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(slots=True)
class Message:
    """A message to send.

    `keys` are indexed for queries; `properties` belong to the application. At most one of
    `delay_level` (RocketMQ's 1 to 18), `delay` (counted from the arrival at the broker) and
    `deliver_at` (a naive datetime is local time) delays the delivery. With `wait_stored=False` the
    broker responds without waiting for the flush and the replicas. POP consumers receive messages
    with a higher `priority` first if the topic has the type PRIORITY.
    """

    topic: str
    body: bytes | str = b""
    tags: str | None = None
    keys: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    flag: int = field(default=0, kw_only=True)
    delay_level: int = field(default=0, kw_only=True)
    delay: timedelta | None = field(default=None, kw_only=True)
    deliver_at: datetime | None = field(default=None, kw_only=True)
    wait_stored: bool = field(default=True, kw_only=True)
    priority: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.topic:
            raise MessageIllegal("the message has no topic", hint="give the topic to send to")
        if isinstance(self.keys, str):
            self.keys = (self.keys,)
        if isinstance(self.body, str):
            self.body = self.body.encode()
        delays = (self.delay_level > 0) + (self.delay is not None) + (self.deliver_at is not None)
        if delays > 1:
            raise MessageIllegal(
                "the message has more than one delay",
                hint="give only one of delay_level, delay and deliver_at",
            )
        if self.priority is not None:
            if not 0 <= self.priority <= PRIORITY_MAX:
                raise MessageIllegal(
                    f"priority is {self.priority}", hint=f"give 0 to {PRIORITY_MAX}, or None"
                )
            if delays:
                raise MessageIllegal(
                    "a message with a priority cannot have a delay", hint="give only one of them"
                )

    @property
    def content(self) -> bytes:
        """The body as bytes."""
        return self.body.encode() if isinstance(self.body, str) else bytes(self.body)


class SendReceipt(Struct, frozen=True):
    """The broker's acknowledgement of a stored message."""

    status: SendStatus
    message_id: str
    offset_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    recall_handle: str | None = None
    region: str | None = None
