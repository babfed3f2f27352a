"""Recall: a producer takes back a timer message, by the handle in the response to its send.

A recall is stored as a message in the same slot of the timer, with the unique key of the message to
recall (TIMER_DEL_UNIQKEY). So it is seen before the first message of the slot is delivered, also
after a restart.
"""

from typing import Final

from penstock.broker.delay.delivery_time import recalled_key
from penstock.broker.delay.recall_handle import RecallHandle, read_recall_handle
from penstock.broker.delay.timers import Timers
from penstock.broker.topics import Topics
from penstock.config import LiveSettings
from penstock.errors import NoPermission, NotWriteable, PenstockError, RecordError, SystemBusy
from penstock.rpc.answers import Answer, EncodedReply, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.codes import (
    PERM_WRITE,
    PROPERTY_BORN_TIMESTAMP,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
    RequestCode,
    ResponseCode,
)
from penstock.wire.message import encode_host, encode_properties
from penstock.wire.output import response
from penstock.wire.record import Record

TAG: Final = "_RECALL_TAG_"
PENDING_RECALLS_MAX: Final = 100_000
"""Recalls that are stored but not yet in the timer's files."""
_NO_HOST: Final = bytes(8)


class Recall:
    """RECALL_MESSAGE."""

    def __init__(
        self,
        settings: LiveSettings,
        store: MessageStore,
        topics: Topics,
        timers: Timers,
        address: str,
    ) -> None:
        self._settings = settings
        self._store = store
        self._topics = topics
        self._store_host = _host(address)
        self._timers = timers

    def rows(self) -> list[Row]:
        return [Row(RequestCode.RECALL_MESSAGE, self.recall)]

    def recall(self, command: Command) -> Answer:
        """Store the recall of a message; the response has its unique key."""
        broker = self._settings.current.broker
        if not broker.recall_enabled:
            raise NoPermission(
                "recall failed, operation is forbidden",
                hint="enable the setting recall_enabled (recallMessageEnable)",
            )
        if not broker.permission & PERM_WRITE:
            raise NotWriteable(
                f"recall failed, broker service not available: {broker.name} may not be written to",
                hint="its setting permission (brokerPermission) has no write permission",
            )
        topic = command.text("topic")
        self._topics.need(topic)
        handle = read_recall_handle(command.text_or("recallHandle"))
        refusal = self._refusal(topic, handle, command.now_ms)
        if refusal:
            return Reply(ResponseCode.ILLEGAL_OPERATION, remark=refusal)
        assert handle is not None
        if len(self._timers.enqueue.pending_recalls) >= PENDING_RECALLS_MAX:
            raise SystemBusy.over(
                "too many recalls are not yet in the timer",
                figure=PENDING_RECALLS_MAX,
                limit=PENDING_RECALLS_MAX,
                unit="",
            )
        self._put(handle, command)
        return self._answer(handle, command)

    def _refusal(self, topic: str, handle: RecallHandle | None, now_ms: int) -> str:
        """Why a handle is refused; empty if it is accepted."""
        if handle is None:
            return "recall handle is invalid"
        if handle.topic != topic:
            return "recall failed, topic not match"
        broker = self._settings.current.broker.name
        if handle.broker != broker:
            return f"recall failed, broker service not available: the message is at {handle.broker}"
        left_ms = handle.time_ms - now_ms
        most_ms = self._store.config.timer_delay_s_max * 1000
        if left_ms <= 0:
            return "recall failed, timestamp invalid: the message is due within a second, or was"
        if left_ms >= most_ms:
            return "recall failed, timestamp invalid: it is later than timer_delay_s_max allows"
        return ""

    def _put(self, handle: RecallHandle, command: Command) -> None:
        timers, writer, now_ms = self._timers, self._store.writer, command.now_ms
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
        queue = timers.redirect(handle.topic, 0, properties, now_ms)
        assert queue is not None, "its delivery time is in the future"
        record = Record()
        record.fill(queue.topic, b"0", encode_properties(properties))
        record.queue_id = queue.queue_id
        record.born_ms = now_ms
        record.born_host = _host(command.peer)
        record.store_host = self._store_host
        status = writer.check(record)
        if status == PUT_OK:
            status = writer.put_in(record, queue, now_ms)
        if status != PUT_OK:
            fault = writer.fault
            raise (
                fault
                if isinstance(fault, PenstockError)
                else NotWriteable(f"recall failed, execute error: {fault or writer.problem}")
            )
        pending_recalls = timers.enqueue.pending_recalls
        key = recalled_key(properties)
        assert key is not None
        pending_recalls[key] = pending_recalls.get(key, 0) + 1

    def _answer(self, handle: RecallHandle, command: Command) -> Answer:
        """The response; under sync flush it is sent when the log has been flushed."""
        broker, store = self._settings.current.broker, self._store
        ext = {"msgId": handle.key, "MSG_REGION": broker.region}
        if not store.flusher.group_commit or command.oneway:
            return Reply(ext=ext)
        data = response(0, command.opaque, command.encoding, ext=ext)
        return EncodedReply(data, data, data, store.log.end)


def _host(text: str) -> bytes:
    try:
        host = encode_host(text)
    except RecordError:
        return _NO_HOST
    return host if len(host) == len(_NO_HOST) else _NO_HOST
