"""Request-reply: forwards the reply of a consumer to the producer that sent the request.

The request contains the client id of its producer, the requester (REPLY_TO_CLIENT). The consumer
sends its reply with SEND_REPLY_MESSAGE. The broker stores it like any message and pushes it to the
newest connection of the requester, whose response becomes the response to the consumer.
"""

import logging
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.errors import Refused
from penstock.metrics import Registry
from penstock.rpc.answers import Answer, CallClient, EncodedReply, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import PUT_OK
from penstock.wire.codes import (
    PROPERTY_MSG_REGION,
    PROPERTY_PUSH_REPLY_TIME,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TRACE_ON,
    SYS_TRANSACTION_MASK,
    RequestCode,
    ResponseCode,
)
from penstock.wire.message import decode_host, decode_properties, encode_host, encode_properties
from penstock.wire.message_ids import encode_offset_id
from penstock.wire.output import response
from penstock.wire.record import Record

log = logging.getLogger(__name__)

PUSH_MS: Final = 10_000
"""How long the requester may take to accept the reply."""
_LETTERS: Final = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
}
_TEXTS: Final = ("producerGroup", "topic", "defaultTopic")
_NUMBERS: Final = ("defaultTopicQueueNums", "queueId", "sysFlag", "flag")
_OPTIONAL: Final = ("reconsumeTimes", "unitMode")


class Replies:
    """Forwards replies; `host` is the broker's address as stored in messages."""

    def __init__(self, context: BrokerContext, host: bytes) -> None:
        self._context = context
        self._host = host
        self._record = Record()
        self._warned = False
        self.received = 0
        self.forwarded = 0
        self.not_stored = 0

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.SEND_REPLY_MESSAGE, self.receive),
            Row(RequestCode.SEND_REPLY_MESSAGE_V2, self.receive),
        ]

    def add_metrics(self, registry: Registry) -> None:
        registry.counter(
            "penstock_replies_total", "Replies that consumers sent.", read=lambda: self.received
        )
        registry.counter(
            "penstock_replies_forwarded_total",
            "Replies that the requester accepted.",
            read=lambda: self.forwarded,
        )
        registry.counter(
            "penstock_replies_not_stored_total",
            "Replies that could not be stored.",
            read=lambda: self.not_stored,
        )

    def receive(self, command: Command) -> Answer:
        """Store a reply and push it to its requester."""
        header = _header(command)
        context, now_ms = self._context, command.now_ms
        queue = context.topics.writable_queue(
            header.text("topic"),
            header.i32("queueId"),
            template=header.text("defaultTopic"),
            template_queues=header.i32("defaultTopicQueueNums"),
            client=command.client,
            now_ms=now_ms,
        )
        properties = decode_properties(header.text_or("properties").encode())
        push = self._pushed_header(header, command, properties)
        self.received += 1
        answer = self._put(header, command, queue)
        requester = properties.get(PROPERTY_REPLY_TO_CLIENT)
        member = context.clients.find_producer(requester) if requester else None
        if member is None:
            raise Refused(
                f"the reply can't be forwarded: {_missing_requester(requester)}",
                hint="the requester is gone, or has not sent a heartbeat to this broker yet",
            )
        late = Reply(
            ResponseCode.SYSTEM_ERROR,
            remark=f"the reply can't be forwarded: {requester} did not accept it",
        )

        def then(response: Reply) -> Answer:
            if response.code != ResponseCode.SUCCESS:
                return late
            self.forwarded += 1
            return answer

        return CallClient(
            member.client,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            push,
            command.body,
            then,
            now_ms + PUSH_MS,
            late,
        )

    def _pushed_header(
        self, header: Command, command: Command, properties: dict[str, str]
    ) -> dict[str, str]:
        """The fields of the pushed reply, all of which the requester's client requires."""
        now = str(command.now_ms)
        ext = {name: header.text(name) for name in _TEXTS}
        ext |= {name: str(header.i32(name)) for name in _NUMBERS}
        ext |= {name: header.ext[name] for name in _OPTIONAL if name in header.ext}
        ext["bornTimestamp"] = str(header.i64("bornTimestamp"))
        ext["bornHost"] = command.peer
        ext["storeHost"] = decode_host(self._host)
        ext["storeTimestamp"] = now
        pushed = {**properties, PROPERTY_PUSH_REPLY_TIME: now}
        ext["properties"] = encode_properties(pushed).decode()
        return ext

    def _put(self, header: Command, command: Command, queue: ConsumeQueue) -> Answer:
        """Store the reply if `store_replies` is set; returns the answer for the consumer.

        A reply that can't be stored is forwarded too, because the requester is waiting.
        """
        settings = self._context.settings.current.broker
        ext = {
            "msgId": "0",
            "queueId": str(queue.queue_id),
            "queueOffset": "0",
            PROPERTY_MSG_REGION: settings.region,
            PROPERTY_TRACE_ON: str(settings.trace_on).lower(),
        }
        waits = False
        if settings.store_replies and self._store(header, command, queue):
            writer = self._context.store.writer
            port = int.from_bytes(self._host[-4:], "big")
            ext["msgId"] = encode_offset_id(self._host[:-4], port, writer.offset)
            ext["queueOffset"] = str(writer.queue_offset)
            waits = writer.flusher.group_commit and self._record.marks.wait
        if command.oneway:
            return None
        if not waits:
            return Reply(ext=ext)
        # The same response after a timeout: the requester has its reply, flushed or not.
        data = response(0, command.opaque, command.encoding, ext=ext)
        return EncodedReply(data, data, data, self._context.store.log.end)

    def _store(self, header: Command, command: Command, queue: ConsumeQueue) -> bool:
        record, context = self._record, self._context
        record.body_bytes_max = context.settings.current.store.body_bytes_max
        record.fill(queue.topic, command.body, header.text_or("properties").encode())
        record.queue_id = queue.queue_id
        record.flag = header.i32("flag")
        record.sys_flag = header.i32("sysFlag") & ~SYS_TRANSACTION_MASK
        record.born_ms = header.i64("bornTimestamp")
        record.born_host = encode_host(command.peer)
        record.store_host = self._host
        record.reconsume_times = header.i32_or("reconsumeTimes", 0)
        writer = context.store.writer
        status = writer.check(record)
        if status == PUT_OK:
            status = writer.put_in(record, queue, command.now_ms)
        record.release()
        stored = status == PUT_OK
        if not stored:
            self.not_stored += 1
            if not self._warned:  # once: a full disk would fill the log too
                log.warning(
                    "can't store replies to %s: %s",
                    header.text("topic"),
                    context.rewriter.fault(status),
                )
        self._warned = not stored
        return stored


def _header(command: Command) -> Command:
    """The fields by their full names."""
    if command.code == RequestCode.SEND_REPLY_MESSAGE_V2:
        ext = {_LETTERS[name]: text for name, text in command.ext.items() if name in _LETTERS}
        return Command(command.code, ext)
    return Command(command.code, dict(command.ext))


def _missing_requester(requester: str | None) -> str:
    if not requester:
        return f"its property {PROPERTY_REPLY_TO_CLIENT} is missing"
    return f"the client {requester} is not connected here"
