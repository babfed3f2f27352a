"""Message traces, as RocketMQ's: records of sent, consumed, committed and recalled messages.

Several records (trace_records.py) are the body of a message to the trace topic. Its keys are the
ids and keys of the traced messages, so that it can be queried by them. Tracing never delays the
client: records beyond the limit are dropped and counted.
"""

import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.client.client_session import Session
from penstock.client.messages import Message, SendReceipt, SendStatus
from penstock.client.trace.trace_records import (
    ConsumeCode,
    MessageKind,
    TraceRecord,
    decode_traces,
    encode_record,
)
from penstock.clock import Alarm, finish_within
from penstock.errors import PenstockError
from penstock.wire.codes import (
    DEFAULT_REGION,
    KEY_SEPARATOR,
    PROPERTY_MSG_REGION,
    PROPERTY_TRACE_ON,
    PROPERTY_TRANSACTION_PREPARED,
)
from penstock.wire.message_ids import UniqueIds

if TYPE_CHECKING:
    from penstock.client.received_message import ReceivedMessage

__all__ = ["ConsumeCode", "ConsumeTrace", "MessageKind", "TraceRecord", "Tracer", "decode_traces"]

log = logging.getLogger(__name__)

WAITING_MAX: Final = 2_048
"""Records that wait to be sent; more are dropped. RocketMQ's value, as are the next two."""
FLUSH_AT: Final = 20
FLUSH_MS: Final = 5_000
BODY_BYTES_MAX: Final = 128_000
KEYS_CHARS_MAX: Final = 8 * 1024
"""Keys of one message: they are properties, which are limited to 32 KiB."""
CLOSE_MS: Final = 5_000

SendTrace: TypeAlias = Callable[[Message], Awaitable[object]]
"""Sends a message with traces, which is not traced, by a producer of the same session."""


class ConsumeTrace(NamedTuple):
    """The traced messages of one handler call: `consuming` returns it, `consumed` takes it."""

    request_id: str
    began_ms: int
    handled: int
    topic: str
    messages: tuple[tuple[str, str | None], ...]  # (id, keys)


class _EncodedRecord(NamedTuple):
    topic: str
    text: str
    keys: tuple[str, ...]


class Tracer:
    """Writes the traces of one producer or consumer."""

    def __init__(self, session: Session, group: str, send: SendTrace, trace_topic: str) -> None:
        self._clock = session.clock
        self._spawn = session.spawn
        self._group = group
        self._send = send
        self._topic = trace_topic
        self._waiting: deque[_EncodedRecord] = deque()
        self._alarm: Alarm | None = None
        self._worker: asyncio.Task[object] | None = None
        self._failing = False
        self._closed = False
        self.dropped = 0
        ip, _, _ = session.client_id.partition("@")
        self._ids = UniqueIds(
            ip_address(ip).packed,
            pid=os.getpid(),
            loader=random.getrandbits(32),
            counter=random.getrandbits(16),
        )

    # --- traced events

    def sent(
        self,
        message: Message,
        receipt: SendReceipt,
        *,
        address: str,
        born_ms: int,
        kind: MessageKind | None = None,
        body_bytes: int | None = None,
        trace_on: bool = True,
    ) -> None:
        """A message was acknowledged (any status) by the broker at `address`.

        `born_ms` is the session clock's `now_ms` at the first attempt. `trace_on` is False if the
        broker's response has TRACE_ON=false. With `kind=None` the kind follows from the message.
        Failed sends are not traced, as in Java. For a batch: once per message, with its receipt.
        """
        if not trace_on or message.topic == self._topic:
            return
        keys = KEY_SEPARATOR.join(message.keys) if message.keys else None
        self._add(
            message.topic,
            receipt.message_id,
            keys,
            "Pub",
            born_ms,
            receipt.region or DEFAULT_REGION,
            self._group,
            message.topic,
            receipt.message_id,
            message.tags,
            keys,
            address,
            len(message.content) if body_bytes is None else body_bytes,
            self._clock.now_ms() - born_ms,
            _kind_of(message) if kind is None else kind,
            receipt.offset_id,
            receipt.status is SendStatus.SEND_OK,
        )

    def consuming(self, messages: Sequence["ReceivedMessage"]) -> ConsumeTrace | None:
        """The handler is called with messages of one topic; None if none of them is traced."""
        now_ms = self._clock.now_ms()
        request_id = self._ids.next(now_ms)
        traced: list[tuple[str, str | None]] = []
        topic = ""
        for message in messages:
            properties = message.properties
            if properties.get(PROPERTY_TRACE_ON) == "false" or message.topic == self._topic:
                continue
            topic = message.topic
            keys = KEY_SEPARATOR.join(message.keys) or None
            self._add(
                topic,
                message.message_id,
                keys,
                "SubBefore",
                now_ms,
                properties.get(PROPERTY_MSG_REGION, DEFAULT_REGION),
                self._group,
                request_id,
                message.message_id,
                message.reconsume_times,
                keys,
            )
            traced.append((message.message_id, keys))
        if not traced:
            return None
        return ConsumeTrace(request_id, now_ms, len(messages), topic, tuple(traced))

    def consumed(self, token: ConsumeTrace | None, code: ConsumeCode) -> None:
        """The handler returned."""
        if token is None:
            return
        now_ms = self._clock.now_ms()
        cost_ms = (now_ms - token.began_ms) // token.handled
        for message_id, keys in token.messages:
            self._add(
                token.topic,
                message_id,
                keys,
                "SubAfter",
                token.request_id,
                message_id,
                cost_ms,
                code is ConsumeCode.SUCCESS,
                keys,
                code,
                now_ms,
                self._group,
            )

    def ended(
        self,
        *,
        topic: str,
        message_id: str,
        tags: str | None,
        keys: str | None,
        address: str,
        transaction_id: str | None,
        state: str,
        from_check: bool,
        region: str | None = None,
    ) -> None:
        """A transaction was resolved; `state` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""
        self._add(
            topic,
            message_id,
            keys,
            "EndTransaction",
            self._clock.now_ms(),
            region or DEFAULT_REGION,
            self._group,
            topic,
            message_id,
            tags,
            keys,
            address,
            MessageKind.COMMIT,
            transaction_id,
            state,
            from_check,
        )

    def recalled(
        self, *, topic: str, message_id: str, success: bool, region: str | None = None
    ) -> None:
        """A timer message was recalled."""
        self._add(
            topic,
            message_id,
            None,
            "Recall",
            self._clock.now_ms(),
            region or DEFAULT_REGION,
            self._group,
            topic,
            message_id,
            success,
        )

    # --- sending

    async def flush(self) -> None:
        """Send the waiting records and wait for the responses."""
        while self._waiting or self._worker is not None:
            self._start()
            assert self._worker is not None
            await asyncio.wait([self._worker])

    async def close(self) -> None:
        """Flush within a limited time; call it before the session and the producer close."""
        try:
            await finish_within(self._clock, CLOSE_MS, self.flush())
        except TimeoutError:
            log.warning("lost %d trace records of group %s", len(self._waiting), self._group)
            self._waiting.clear()
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    def _add(self, topic: str, message_id: str, keys: str | None, *fields: object) -> None:
        if self._closed:
            return
        if len(self._waiting) >= WAITING_MAX:
            if self.dropped == 0:
                log.warning(
                    "too many traces of group %s are waiting: dropping new ones", self._group
                )
            self.dropped += 1
            return
        found_by = [message_id]
        if keys and len(keys) < KEYS_CHARS_MAX:
            found_by += keys.split(KEY_SEPARATOR)
        self._waiting.append(_EncodedRecord(topic, encode_record(*fields), tuple(found_by)))
        if len(self._waiting) >= FLUSH_AT:
            self._start()
        elif self._alarm is None and self._worker is None:
            self._alarm = self._clock.wake_at(self._clock.now_ms() + FLUSH_MS, self._start)

    def _start(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._worker is None:
            self._worker = self._spawn(self._work())
            self._worker.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[object]) -> None:
        self._worker = None

    async def _work(self) -> None:
        while self._waiting:
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            for body, keys in _pack(lines):
                await self._send_one(Message(self._topic, body, keys=keys))

    async def _send_one(self, message: Message) -> None:
        try:
            await self._send(message)
            self._failing = False
        except PenstockError as error:
            if not self._failing:
                log.warning(
                    "cannot send traces of group %s to topic %s: %s",
                    self._group,
                    self._topic,
                    error,
                )
            self._failing = True


def make_tracer(session: Session, group: str, send: SendTrace) -> Tracer | None:
    """A tracer if the options of the started session enable traces.

    `group` is without namespace.
    """
    topic = session.options.trace_topic
    return None if topic is None else Tracer(session, group, send, topic)


def _kind_of(message: Message) -> MessageKind:
    if message.delay_level or message.delay is not None or message.deliver_at is not None:
        return MessageKind.DELAY
    if message.properties and message.properties.get(PROPERTY_TRANSACTION_PREPARED) == "true":
        return MessageKind.HALF
    return MessageKind.NORMAL


def _pack(lines: Sequence[_EncodedRecord]) -> Iterator[tuple[bytes, list[str]]]:
    """Bodies and keys of messages within the limits; of one traced topic each, as RocketMQ's."""
    by_topic: dict[str, list[_EncodedRecord]] = {}
    for line in lines:
        by_topic.setdefault(line.topic, []).append(line)
    for group in by_topic.values():
        texts: list[str] = []
        keys: dict[str, None] = {}
        size = keys_size = 0
        for line in group:
            new_keys = sum(len(key) + 1 for key in line.keys if key not in keys)
            if texts and (
                size + len(line.text) > BODY_BYTES_MAX or keys_size + new_keys > KEYS_CHARS_MAX
            ):
                yield "".join(texts).encode(), list(keys)
                texts, keys, size, keys_size = [], {}, 0, 0
                new_keys = sum(len(key) + 1 for key in line.keys)
            texts.append(line.text)
            keys.update(dict.fromkeys(line.keys))
            size += len(line.text)
            keys_size += new_keys
        yield "".join(texts).encode(), list(keys)
