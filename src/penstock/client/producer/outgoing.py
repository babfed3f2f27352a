"""A message made ready for its request: checked, compressed, with its properties.

The application's message stays as it is and may be sent again; each time it has an id of its own.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Final

from penstock.client.messages import Message
from penstock.client.producer.request_client import is_reply
from penstock.client.producer.send_codec import (
    SEND_REPLY_MESSAGE_V2,
    Flight,
    encode_batched,
    encode_fields,
    encode_properties,
)
from penstock.errors import BadSetting, MessageIllegal, NoPermission
from penstock.wire.codes import (
    PROPERTY_DELAY,
    PROPERTY_INSTANCE_ID,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
    RETRY_TOPIC_PREFIX,
    SEND_FORBIDDEN_TOPICS,
    SYS_TRANSACTION_PREPARED,
    topic_fault,
)
from penstock.wire.compression import Compression, compress, with_compression
from penstock.wire.frame import FRAME_BYTES_MAX, HEADER_BYTES_MAX
from penstock.wire.message import encode_properties as encode_more
from penstock.wire.message_ids import UniqueIds

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Longest body by default: RocketMQ's, on both ends."""
BATCH_BYTES_MAX: Final = 1024 * 1024
"""Longest body of a batch: brokers count it with the records' heads against their own limit."""

BATCH_COUNT_MAX: Final = 1_000
"""Most messages of a batch: the answer has an id for each, and its header a limit."""

_BODY_BYTES_LIMIT: Final = FRAME_BYTES_MAX - HEADER_BYTES_MAX
BATCH_FIELDS: Final = encode_fields({"m": "true"})
"""What a request with a batch has besides."""
_DELAY_LEVEL_MAX: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """How a producer sends."""

    retries: int = 2
    retry_not_stored: bool = False
    compression: str | None = "zlib"
    compress_above_bytes: int = 4096
    message_bytes_max: int = MESSAGE_BYTES_MAX
    avoid_faulty: bool = True
    avoid_ms: int | None = None
    in_flight_max: int = 10_000

    def __post_init__(self) -> None:
        kinds = [kind.name.lower() for kind in Compression]
        if self.compression is not None and self.compression not in kinds:
            raise BadSetting(
                f"compression is {self.compression!r}", hint=f"one of {', '.join(kinds)}, or None"
            )
        if not 0 < self.message_bytes_max <= _BODY_BYTES_LIMIT:
            raise BadSetting(
                f"message_bytes_max is {self.message_bytes_max}",
                hint=f"1 to {_BODY_BYTES_LIMIT}: a request has to fit into one frame",
            )
        for name, least in (("retries", 0), ("in_flight_max", 1), ("compress_above_bytes", 0)):
            value: int = getattr(self, name)
            if value < least:
                raise BadSetting(f"{name} is {value}", hint=f"{least} or more")
        if self.avoid_ms is not None and self.avoid_ms < 0:
            raise BadSetting(f"avoid_ms is {self.avoid_ms}", hint="milliseconds, or None")


class Batch:
    """Messages of one topic that leave in one request; grows while it is gathered."""

    __slots__ = ("entries", "ids", "length", "messages", "places")

    def __init__(self) -> None:
        self.places: list[int] = []  # where the caller had them
        self.messages: list[Message] = []
        self.entries: list[bytes] = []
        self.ids: list[str] = []
        self.length = 0

    def add(self, place: int, message: Message, entry: bytes, message_id: str) -> None:
        self.places.append(place)
        self.messages.append(message)
        self.entries.append(entry)
        self.ids.append(message_id)
        self.length += len(entry)

    @property
    def body(self) -> bytes:
        return b"".join(self.entries)

    @property
    def properties(self) -> bytes:
        """Those of the request: brokers before 5.4 add them to each message, so no id."""
        return b"WAIT\x01true\x02" if self.messages[0].wait_stored else b"WAIT\x01false\x02"


class Packer:
    """Makes requests' parts from messages, for one client."""

    def __init__(self, options: SendOptions, namespace: str, client_ip: str) -> None:
        self._bytes_max = options.message_bytes_max
        self._compress_from = options.compress_above_bytes
        self._compression: Compression | None = None
        if options.compression is not None:
            self._compression = Compression[options.compression.upper()]
        else:
            self._compress_from = _BODY_BYTES_LIMIT + 1
        self.plain_bytes = min(self._compress_from, self._bytes_max + 1)
        """Bodies shorter than this are sent as they are."""
        self.own = encode_more({PROPERTY_INSTANCE_ID: namespace}) if namespace else b""
        """Properties that every message has."""
        self._ids = UniqueIds(
            ip_address(client_ip).packed,
            pid=os.getpid(),
            loader=secrets.randbits(32),
            counter=secrets.randbits(16),
        )
        self.next_id = self._ids.next

    def body(self, message: Message) -> tuple[bytes, int]:
        """The body as it is sent, and its sysFlag. Raises MessageIllegal."""
        body = message.body
        if type(body) is not bytes:
            body = _as_bytes(body)
        length = len(body)
        if not 0 < length <= self._bytes_max:
            raise _bad_length(length, self._bytes_max)
        if length >= self._compress_from:
            assert self._compression is not None
            smaller = compress(body, self._compression)
            if len(smaller) < length:
                return smaller, with_compression(0, self._compression)
        return body, 0

    def flag(self, message: Message) -> int:
        """The application's own number of a message; raises MessageIllegal."""
        if not -0x80000000 <= message.flag <= 0x7FFFFFFF:
            raise MessageIllegal(f"the flag {message.flag}", hint="flags have 32 bits, signed")
        return message.flag

    def special(self, message: Message, ordering_key: str | None) -> bytes:
        """Properties of a message that waits for its time, or goes where its key tells; and own."""
        properties: dict[str, str] = {}
        if ordering_key is not None:
            properties[PROPERTY_SHARDING_KEY] = ordering_key
        if message.delay_level:
            if not 0 < message.delay_level <= _DELAY_LEVEL_MAX:
                raise MessageIllegal(
                    f"delay level {message.delay_level}", hint=f"levels are 1 to {_DELAY_LEVEL_MAX}"
                )
            properties[PROPERTY_DELAY] = str(message.delay_level)
        if message.delay is not None:
            delay_ms = round(message.delay.total_seconds() * 1000)
            if delay_ms < 0:
                raise MessageIllegal(f"a delay of {delay_ms} ms", hint="it can't be negative")
            properties[PROPERTY_TIMER_DELAY_MS] = str(delay_ms)
        if message.deliver_at is not None:
            properties[PROPERTY_TIMER_DELIVER_MS] = str(
                round(message.deliver_at.timestamp() * 1000)
            )
        return encode_more(properties) + self.own

    def internal(self, flight: Flight, message: Message) -> Message:
        """Move what the client's own machinery says by properties into the request's header."""
        properties = dict(message.properties)
        if properties.get(PROPERTY_TRANSACTION_PREPARED) == "true":
            flight.sys_flag |= SYS_TRANSACTION_PREPARED
        if is_reply(message):
            flight.code = SEND_REPLY_MESSAGE_V2
        if not message.topic.startswith(RETRY_TOPIC_PREFIX):
            return message
        times = {
            "j": properties.pop(PROPERTY_RECONSUME_TIME, ""),
            "l": properties.pop(PROPERTY_MAX_RECONSUME_TIMES, ""),
        }
        flight.extra = encode_fields(times)
        return replace(message, properties=properties)

    def batches(
        self, messages: Sequence[Message], now_ms: int, ordering_key: str | None
    ) -> list[Batch]:
        """Messages in groups that can be sent together: one topic, not too long, none waits."""
        limit = min(BATCH_BYTES_MAX, self._bytes_max)
        last: dict[tuple[str, bool], Batch] = {}
        batches: list[Batch] = []
        for place, message in enumerate(messages):
            content = self._batched_body(message)
            message_id = self.next_id(now_ms)
            more = self.own if ordering_key is None else self.special(message, ordering_key)
            properties = encode_properties(message, message_id, more, False)
            entry = encode_batched(content, self.flag(message), properties)
            key = (message.topic, message.wait_stored)
            batch = last.get(key)
            if (
                batch is None
                or batch.length + len(entry) > limit
                or len(batch.messages) >= BATCH_COUNT_MAX
            ):
                batch = last[key] = Batch()
                batches.append(batch)
            batch.add(place, message, entry, message_id)
        return batches

    def _batched_body(self, message: Message) -> bytes:
        if message.delay_level or message.delay is not None or message.deliver_at is not None:
            raise MessageIllegal(
                "a message that waits for its time can't be sent in a batch", hint="send it alone"
            )
        if message.topic.startswith(RETRY_TOPIC_PREFIX):
            raise MessageIllegal("retry topics take no batches", hint="send the message alone")
        content = _as_bytes(message.body)
        if not 0 < len(content) <= self._bytes_max:
            raise _bad_length(len(content), self._bytes_max)
        return content


def check_topic(topic: str) -> None:
    """Raise MessageIllegal or NoPermission where nothing can be sent to a topic of this name."""
    fault = topic_fault(topic)
    if fault is not None:
        raise MessageIllegal(fault, hint="choose another topic name")
    if topic in SEND_FORBIDDEN_TOPICS:
        raise NoPermission(
            f"only brokers write to the topic {topic}", hint="send to a topic of your own"
        )


def _as_bytes(body: object) -> bytes:
    if isinstance(body, bytearray | memoryview | bytes):
        return bytes(body)
    if isinstance(body, str):
        return body.encode()
    raise MessageIllegal(
        f"a body of type {type(body).__name__}", hint="bodies are bytes, or text (UTF-8)"
    )


def _bad_length(length: int, bytes_max: int) -> MessageIllegal:
    if length == 0:
        return MessageIllegal(
            "a message without a body", hint="RocketMQ's clients send none: send at least one byte"
        )
    return MessageIllegal.over(
        "the body of the message is too long",
        figure=length,
        limit=bytes_max,
        setting="message_bytes_max",
    )
