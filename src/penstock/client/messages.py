"""What a producer hands over and what it gets back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum

from msgspec import Struct

from penstock.errors import MessageIllegal
from penstock.wire.bodies.client_bodies import MessageQueue

__all__ = ["Message", "MessageQueue", "SendReceipt", "SendStatus"]


class SendStatus(IntEnum):
    """How a send ended, with RocketMQ's names; all but SEND_OK are stored, and less safely."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(slots=True)
class Message:
    """A message to send.

    `keys` are for looking it up; `properties` are the application's own. At most one of
    `delay_level` (RocketMQ's 1 to 18), `delay` (from when the broker takes it) and `deliver_at`
    (a moment; a datetime without zone is local time) lets it wait. `wait_stored=False` lets the
    broker answer before the message is on its disk or its replicas.
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

    def __post_init__(self) -> None:
        if not self.topic:
            raise MessageIllegal("a message without a topic", hint="name the topic it goes to")
        if isinstance(self.keys, str):
            self.keys = (self.keys,)
        if isinstance(self.body, str):
            self.body = self.body.encode()
        waits = (self.delay_level > 0) + (self.delay is not None) + (self.deliver_at is not None)
        if waits > 1:
            raise MessageIllegal(
                "a message with more than one time to wait",
                hint="give one of delay_level, delay and deliver_at",
            )

    @property
    def content(self) -> bytes:
        """The body as bytes."""
        return self.body.encode() if isinstance(self.body, str) else bytes(self.body)


class SendReceipt(Struct, frozen=True):
    """Proof that a broker has taken a message."""

    status: SendStatus
    message_id: str
    offset_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    recall_handle: str | None = None
    region: str | None = None
