"""Recall: a message that waits for its time is called back, by the handle its send was answered.

    handle = base64url("v1 topic broker time key")

The time is a millisecond of the message's slot. What is stored is a message that waits in the same
slot, with the key of the one to recall (TIMER_DEL_UNIQKEY): whenever that slot is looked at, after
a restart too, the recall is seen before the first message of the slot is delivered.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.context import BrokerContext
from penstock.broker.delay.delivery_time import number_of, recalled_key
from penstock.errors import NoPermission, NotWriteable, PenstockError, RecordError, SystemBusy
from penstock.rpc.answers import Answer, EncodedReply, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.put import PUT_OK
from penstock.wire.codes import (
    PERM_WRITE,
    PROPERTY_BORN_TIMESTAMP,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQ_KEY,
    RequestCode,
    ResponseCode,
)
from penstock.wire.message import encode_host, encode_properties
from penstock.wire.output import response
from penstock.wire.record import Record

if TYPE_CHECKING:
    from penstock.broker.delay.timers import Timers

TAG: Final = "_RECALL_TAG_"
EXPECTED_MAX: Final = 100_000
"""Recalls that are stored and not in the timer's files yet."""
_VERSION: Final = "v1"
_HANDLE_MAX: Final = 4_096
_NOWHERE: Final = bytes(8)


class Handle(NamedTuple):
    """What a recall handle says."""

    topic: str
    broker: str
    time_ms: int
    key: str


def recall_handle(topic: str, broker: str, properties: dict[str, str]) -> bytes:
    """The handle of a parked message."""
    time_ms = int(properties[PROPERTY_TIMER_OUT_MS]) + 1  # within the slot, whose begin is not
    key = properties.get(PROPERTY_UNIQ_KEY, "")
    text = " ".join((_VERSION, topic, broker, str(time_ms), key))
    return base64.urlsafe_b64encode(text.encode())


def read_handle(text: str) -> Handle | None:
    """A handle as it was given out; None if it can't be one."""
    if len(text) > _HANDLE_MAX:
        return None
    try:
        data = text.encode("ascii")
        plain = base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True)
        version, topic, broker, time, key, *_ = plain.decode().split(" ")
    except (ValueError, binascii.Error):
        return None
    number = number_of(time)
    if version != _VERSION or not key:  # without a key it would be a message like any other
        return None
    return Handle(topic, broker, -1 if number is None else number, key)


class Recall:
    """RECALL_MESSAGE."""

    def __init__(self, context: BrokerContext, timers: Timers) -> None:
        self._context = context
        self._timers = timers

    def rows(self) -> list[Row]:
        return [Row(RequestCode.RECALL_MESSAGE, self.recall)]

    def recall(self, command: Command) -> Answer:
        """Store the recall of a message; its unique key is the answer."""
        context = self._context
        broker = context.settings.current.broker
        if not broker.recall_enabled:
            raise NoPermission(
                "recall failed, operation is forbidden",
                hint="set recall_enabled (recallMessageEnable)",
            )
        if not broker.permission & PERM_WRITE:
            raise NotWriteable(
                f"recall failed, broker service not available: {broker.name} takes no messages",
                hint="its permission is set so (brokerPermission)",
            )
        topic = command.text("topic")
        context.topics.need(topic)
        handle = read_handle(command.text_or("recallHandle"))
        refusal = self._object(topic, handle, command.now_ms)
        if refusal:
            return Reply(ResponseCode.ILLEGAL_OPERATION, remark=refusal)
        assert handle is not None
        if len(self._timers.feed.expected) >= EXPECTED_MAX:
            raise SystemBusy.over(
                "recalls wait for the timer", figure=EXPECTED_MAX, limit=EXPECTED_MAX, unit=""
            )
        self._put(handle, command)
        return self._answer(handle, command)

    def _object(self, topic: str, handle: Handle | None, now_ms: int) -> str:
        """Why a handle is not taken; empty: it is."""
        if handle is None:
            return "recall handle is invalid"
        if handle.topic != topic:
            return "recall failed, topic not match"
        broker = self._context.settings.current.broker.name
        if handle.broker != broker:
            return f"recall failed, broker service not available: the message is at {handle.broker}"
        left_ms = handle.time_ms - now_ms
        most_ms = self._context.store.config.timer_delay_s_max * 1000
        if left_ms <= 0:
            return "recall failed, timestamp invalid: the message was due, or is within a second"
        if left_ms >= most_ms:
            return "recall failed, timestamp invalid: it is further ahead than any message may be"
        return ""

    def _put(self, handle: Handle, command: Command) -> None:
        timers, path, now_ms = self._timers, self._context.store.path, command.now_ms
        properties = {
            PROPERTY_TAGS: TAG,
            PROPERTY_TIMER_DEL_UNIQKEY: handle.key,
            PROPERTY_UNIQ_KEY: handle.key,
            PROPERTY_TIMER_DELIVER_MS: str(handle.time_ms),
            PROPERTY_BORN_TIMESTAMP: str(now_ms),
        }
        group = command.text_or("producerGroup")
        if group:
            properties[PROPERTY_PRODUCER_GROUP] = group
        queue = timers.park(handle.topic, 0, properties, now_ms)
        assert queue is not None, "its time is to come"
        record = Record()
        record.fill(queue.topic, b"0", encode_properties(properties))
        record.queue_id = queue.queue_id
        record.born_ms = now_ms
        record.born_host = _host(command.peer)
        record.store_host = _host(self._context.address)
        status = path.check(record)
        if status == PUT_OK:
            status = path.put_in(record, queue, now_ms)
        if status != PUT_OK:
            fault = path.fault
            raise (
                fault
                if isinstance(fault, PenstockError)
                else NotWriteable(f"recall failed, execute error: {fault or path.problem}")
            )
        expected = timers.feed.expected
        key = recalled_key(properties)
        assert key is not None
        expected[key] = expected.get(key, 0) + 1

    def _answer(self, handle: Handle, command: Command) -> Answer:
        """Success, with the key of the message; under sync flush when the recall is on the disk."""
        broker, store = self._context.settings.current.broker, self._context.store
        ext = {"msgId": handle.key, "MSG_REGION": broker.region}
        if not store.flusher.group_commit or command.oneway:
            return Reply(ext=ext)
        data = response(0, command.opaque, command.encoding, ext=ext)
        return EncodedReply(data, data, store.log.end)


def _host(text: str) -> bytes:
    try:
        host = encode_host(text)
    except RecordError:
        return _NOWHERE
    return host if len(host) == len(_NOWHERE) else _NOWHERE
