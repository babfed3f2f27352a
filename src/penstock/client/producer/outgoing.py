"""Prepares messages for sending: validation, compression, properties, batches.

The application's message is not changed and may be sent again; each send has its own message id.
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Final

from penstock.client.messages import Message
from penstock.client.producer.producer_options import BODY_BYTES_LIMIT, SendOptions
from penstock.client.producer.request_client import is_reply
from penstock.client.producer.send_codec import (
    SEND_REPLY_MESSAGE_V2,
    PendingSend,
    encode_batched,
    encode_fields,
    encode_properties,
)
from penstock.errors import MessageIllegal, NoPermission
from penstock.wire.codes import (
    PROPERTY_DELAY,
    PROPERTY_INSTANCE_ID,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_PRIORITY,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
    RETRY_TOPIC_PREFIX,
    SYS_TRANSACTION_PREPARED,
    is_send_forbidden,
    topic_fault,
)
from penstock.wire.compression import Compression, compress, with_compression
from penstock.wire.message import encode_properties as encode_more
from penstock.wire.message_ids import UniqueIds

BATCH_BYTES_MAX: Final = 1024 * 1024
"""Longest body of a batch: brokers count it and the record headers against their own limit."""
BATCH_COUNT_MAX: Final = 1_000
"""Most messages of a batch: the header of the response has an id for each, and is limited."""
BATCH_FIELDS: Final = encode_fields({"m": "true"})
"""Additional header fields of a batch."""
_DELAY_LEVEL_MAX: Final = 18
LOOP_BYTES: Final = 64 * 1024
"""Less than this is compressed per iteration of the event loop, the rest in a thread: it takes a
millisecond."""


class MessageBatch:
    """Messages of one topic that are sent in one request."""

    __slots__ = ("entries", "ids", "indexes", "length", "messages")

    def __init__(self) -> None:
        self.indexes: list[int] = []  # positions in the caller's list
        self.messages: list[Message] = []
        self.entries: list[bytes] = []
        self.ids: list[str] = []
        self.length = 0

    def add(self, index: int, message: Message, entry: bytes, message_id: str) -> None:
        self.indexes.append(index)
        self.messages.append(message)
        self.entries.append(entry)
        self.ids.append(message_id)
        self.length += len(entry)

    @property
    def body(self) -> bytes:
        return b"".join(self.entries)

    @property
    def properties(self) -> bytes:
        """Properties of the request. No id: brokers before 5.4 add them to each message."""
        return b"WAIT\x01true\x02" if self.messages[0].wait_stored else b"WAIT\x01false\x02"


class Packer:
    """Encodes the messages of one producer."""

    def __init__(self, options: SendOptions, namespace: str, client_ip: str) -> None:
        self._bytes_max = options.message_bytes_max
        self._compress_from = options.compress_above_bytes
        self._compression: Compression | None = None
        if options.compression is not None:
            self._compression = Compression[options.compression.upper()]
        else:
            self._compress_from = BODY_BYTES_LIMIT + 1
        self.plain_bytes = min(self._compress_from, self._bytes_max + 1)
        """Shorter bodies are sent without checks and compression."""
        self.common_properties = (
            encode_more({PROPERTY_INSTANCE_ID: namespace}) if namespace else b""
        )
        """Properties of every message."""
        self._ids = UniqueIds(
            ip_address(client_ip).packed,
            pid=os.getpid(),
            loader=secrets.randbits(32),
            counter=secrets.randbits(16),
        )
        self.next_id = self._ids.next
        self._loop_bytes = 0  # bodies that were compressed in this iteration of the loop

    def put_body(self, pending: PendingSend, message: Message) -> None:
        """Set the body of a send, compressed unless that has to happen in a thread. Raises
        MessageIllegal."""
        body = message.body
        if type(body) is not bytes:
            body = _as_bytes(body)
        length = len(body)
        if not 0 < length <= self._bytes_max:
            raise _bad_length(length, self._bytes_max)
        pending.body = body
        if length >= self._compress_from:
            if self._is_over_budget(length):
                pending.uncompressed = True
            else:
                pending.body, pending.sys_flag = self.compressed(body)

    def compressed(self, body: bytes) -> tuple[bytes, int]:
        """The body to send and its compression flags; it runs in any thread."""
        assert self._compression is not None
        smaller = compress(body, self._compression)
        if len(smaller) < len(body):
            return smaller, with_compression(0, self._compression)
        return body, 0

    def _is_over_budget(self, length: int) -> bool:
        """Whether this body is too much for the loop in this iteration."""
        if not self._loop_bytes:
            asyncio.get_running_loop().call_soon(self._start_iteration)
        self._loop_bytes += length
        return self._loop_bytes >= LOOP_BYTES

    def _start_iteration(self) -> None:
        self._loop_bytes = 0

    def flag(self, message: Message) -> int:
        """The application's flag of a message; raises MessageIllegal."""
        if not -0x80000000 <= message.flag <= 0x7FFFFFFF:
            raise MessageIllegal(
                f"flag {message.flag} is out of range", hint="a flag is a signed 32-bit integer"
            )
        return message.flag

    def special_properties(self, message: Message, ordering_key: str | None) -> bytes:
        """Properties for a delay, a priority or an ordering key, and the common properties."""
        properties: dict[str, str] = {}
        if ordering_key is not None:
            properties[PROPERTY_SHARDING_KEY] = ordering_key
        if message.priority is not None:
            if ordering_key is not None:
                raise MessageIllegal(
                    "a message with a priority cannot have an ordering key",
                    hint="give only one of them: the broker selects the queue by the priority",
                )
            properties[PROPERTY_PRIORITY] = str(message.priority)
        if message.delay_level:
            if not 0 < message.delay_level <= _DELAY_LEVEL_MAX:
                raise MessageIllegal(
                    f"there is no delay level {message.delay_level}",
                    hint=f"levels are 1 to {_DELAY_LEVEL_MAX}",
                )
            properties[PROPERTY_DELAY] = str(message.delay_level)
        if message.delay is not None:
            delay_ms = round(message.delay.total_seconds() * 1000)
            if delay_ms < 0:
                raise MessageIllegal(f"the delay is {delay_ms} ms", hint="it must not be negative")
            properties[PROPERTY_TIMER_DELAY_MS] = str(delay_ms)
        if message.deliver_at is not None:
            properties[PROPERTY_TIMER_DELIVER_MS] = str(
                round(message.deliver_at.timestamp() * 1000)
            )
        return encode_more(properties) + self.common_properties

    def internal(self, pending: PendingSend, message: Message) -> Message:
        """Move internal properties (transaction, reply, reconsume times) into the header."""
        properties = dict(message.properties)
        if properties.get(PROPERTY_TRANSACTION_PREPARED) == "true":
            pending.sys_flag |= SYS_TRANSACTION_PREPARED
        if is_reply(message):
            pending.code = SEND_REPLY_MESSAGE_V2
        if not message.topic.startswith(RETRY_TOPIC_PREFIX):
            return message
        times = {
            "j": properties.pop(PROPERTY_RECONSUME_TIME, ""),
            "l": properties.pop(PROPERTY_MAX_RECONSUME_TIMES, ""),
        }
        pending.extra_fields = encode_fields(times)
        return replace(message, properties=properties)

    def batches(
        self, messages: Sequence[Message], now_ms: int, ordering_key: str | None
    ) -> list[MessageBatch]:
        """Group messages into batches: by topic, within the limits of a batch."""
        limit = min(BATCH_BYTES_MAX, self._bytes_max)
        last: dict[tuple[str, bool], MessageBatch] = {}
        batches: list[MessageBatch] = []
        for index, message in enumerate(messages):
            content = self._batched_body(message)
            message_id = self.next_id(now_ms)
            more = self.common_properties
            if ordering_key is not None:
                more = self.special_properties(message, ordering_key)
            properties = encode_properties(message, message_id, more, False)
            entry = encode_batched(content, self.flag(message), properties)
            key = (message.topic, message.wait_stored)
            batch = last.get(key)
            if (
                batch is None
                or batch.length + len(entry) > limit
                or len(batch.messages) >= BATCH_COUNT_MAX
            ):
                batch = last[key] = MessageBatch()
                batches.append(batch)
            batch.add(index, message, entry, message_id)
        return batches

    def _batched_body(self, message: Message) -> bytes:
        if message.delay_level or message.delay is not None or message.deliver_at is not None:
            raise MessageIllegal(
                "a message with a delay cannot be sent in a batch", hint="send it alone"
            )
        if message.priority is not None:
            raise MessageIllegal(
                "a message with a priority cannot be sent in a batch", hint="send it alone"
            )
        if message.topic.startswith(RETRY_TOPIC_PREFIX):
            raise MessageIllegal(
                "retry topics do not accept batches", hint="send the message alone"
            )
        content = _as_bytes(message.body)
        if not 0 < len(content) <= self._bytes_max:
            raise _bad_length(len(content), self._bytes_max)
        return content


def check_topic(topic: str) -> None:
    """Raise MessageIllegal or NoPermission if clients cannot send to this topic."""
    fault = topic_fault(topic)
    if fault is not None:
        raise MessageIllegal(fault, hint="choose another topic name")
    if is_send_forbidden(topic):
        raise NoPermission(f"only brokers write to the topic {topic}", hint="send to another topic")


def _as_bytes(body: object) -> bytes:
    if isinstance(body, bytearray | memoryview | bytes):
        return bytes(body)
    if isinstance(body, str):
        return body.encode()
    raise MessageIllegal(
        f"a body cannot be of type {type(body).__name__}",
        hint="give bytes, or a str that is encoded as UTF-8",
    )


def _bad_length(length: int, bytes_max: int) -> MessageIllegal:
    if length == 0:
        return MessageIllegal(
            "the body is empty",
            hint="send at least one byte: RocketMQ's clients refuse empty bodies",
        )
    return MessageIllegal.over(
        "the body of the message is too long",
        figure=length,
        limit=bytes_max,
        setting="message_bytes_max",
    )
