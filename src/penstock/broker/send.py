"""Sends: a request's header and body become a record of the log (codes 10, 310 and 320).

The hot path creates no Python object per message: fields are read in place, the record is encoded
from the connection's buffer into the log, the response is written into the connection's output.
The first send to a queue after its topic has changed asks `topics` whether the queue is writable.

Under sync flush a response is sent when the message is flushed, with synchronous replication when
enough slaves have it. Until then it is in `pending`; the responses for the cases that the flush or
the slaves take too long are in `flush_timeout` and `slave_timeout`.
"""

from typing import Protocol

from penstock.broker.delay.delay_redirect import Redirect
from penstock.broker.priority import take_priority
from penstock.errors import HeaderError, MessageIllegal, NotWriteable, PenstockError
from penstock.rpc.answers import Answer, EncodedReply
from penstock.rpc.router import InPlaceRow
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import ILLEGAL, PUT_OK, StoreWriter
from penstock.wire.codes import DEFAULT_REGION, POP_RETRY_PROPERTIES, RETRY_TOPIC_PREFIX, V3_4_9
from penstock.wire.frame import Request
from penstock.wire.layout import BLANK_BYTES
from penstock.wire.message import decode_properties, encode_properties
from penstock.wire.message_ids import UniqueIds
from penstock.wire.output import Output
from penstock.wire.record import (
    BATCH_BROKEN,
    BATCH_SPECIAL,
    BODY_BYTES_MAX,
    BODY_TOO_LONG,
    PROPERTIES_BYTES_MAX,
    PROPERTIES_TOO_LONG,
    PROPERTIES_WITH_ZERO,
    TOO_LONG_FOR_SEGMENT,
    TOPIC_BYTES_MAX,
    TOPIC_EMPTY,
    TOPIC_TOO_LONG,
    Record,
)

SEND_MESSAGE = 10
SEND_MESSAGE_V2 = 310
SEND_BATCH_MESSAGE = 320
_SEND_MESSAGE = SEND_MESSAGE

_SUCCESS = 0
_FLUSH_DISK_TIMEOUT = 10
_FLUSH_SLAVE_TIMEOUT = 12
_PUT_OK = PUT_OK
_ONEWAY = 2
_PREPARED = 0x04
_TRANSACTION_MASK = 0x0C
_PERCENT = 37  # of %RETRY%
_CORRECT_IT = "correct the message; sending it again does not help"

_PROBLEMS = {
    TOPIC_EMPTY: "the topic is empty",
    BATCH_BROKEN: "the batch can't be decoded",
    BATCH_SPECIAL: "a message of a batch can't be delayed or transactional",
    PROPERTIES_WITH_ZERO: "the properties contain a zero byte",
}


class SendTopics(Protocol):
    """Decides which queues may be sent to, and creates topics."""

    def writable_queue(
        self,
        topic: str,
        queue_id: int,
        *,
        template: str,
        template_queues: int,
        client: int,
        now_ms: int,
    ) -> ConsumeQueue:
        """The queue, marked as `writable`; raises a PenstockError if it may not be sent to."""

    def priority_queue(self, topic: str, priority: int, now_ms: int) -> ConsumeQueue:
        """The queue for messages of this priority."""

    @property
    def creations(self) -> int:
        """How many topics were created by a send."""

    def reply_when_registered(self, topic: str, reply: EncodedReply, now_ms: int) -> Answer:
        """The answer to a send that created its topic: sent when clients can find the topic."""


class SendRedirects(Protocol):
    """Decides which messages are stored in another queue than the one they were sent to."""

    def find_redirect(
        self,
        topic: str,
        queue_id: int,
        properties: dict[str, str],
        *,
        sys_flag: int,
        reconsume_times: int,
        reconsume_times_max: int | None,
        now_ms: int,
    ) -> Redirect | None:
        """The redirect of a message, or None. Adds to the properties what delivery needs later."""

    def check_length(self, record_bytes: int, topic_bytes: int, topic: str) -> None:
        """Raise MessageIllegal for a message that would be too long under its own topic."""


class SendHandler:
    """Stores messages and writes the responses."""

    def __init__(
        self,
        writer: StoreWriter,
        topics: SendTopics,
        redirects: SendRedirects,
        store_host: bytes,
        *,
        unique_ids: UniqueIds | None = None,
        region: bytes = DEFAULT_REGION.encode(),
    ) -> None:
        """`region` is named in every response."""
        self.writer: StoreWriter = writer
        self.topics: SendTopics = topics
        self.redirects: SendRedirects = redirects
        self.store_host: bytes = store_host
        self.unique_ids: UniqueIds | None = unique_ids
        self.region: bytes = region
        # The message of the current request. It refers to `_buffer` until the next request.
        self.record: Record = Record(BODY_BYTES_MAX)
        self.record.store_host = store_host
        # Properties that the broker adds to each message, encoded. By the live settings.
        self.extra_properties: bytes = b""
        # Whether clients shall trace, as responses say it. By the live settings.
        self.trace_on: bytes = b"true"
        # Whether responses wait for the flush. Fixed.
        self.sync_flush: bool = writer.flusher.group_commit
        # Responses of this read that wait; the server takes all three after the read.
        self.pending: Output = Output(1024)
        self.flush_timeout: Output = Output(1024)
        self.slave_timeout: Output = Output(1024)
        # Whether the current request created its topic, and which.
        self.created: bool = False
        self._created_topic: str = ""
        # Its responses; taken before the next request.
        self.creation_reply: Output = Output(1024)
        self.creation_timeout: Output = Output(1024)
        self.creation_unreplicated: Output = Output(1024)
        # Counters since the start.
        self.creations: int = 0
        self.sent: int = 0
        self.refused: int = 0
        # The connection's buffer, valid until the next `bind`.
        self._buffer: memoryview = memoryview(bytearray(1))
        # Of the current request: its record refers to a copy and not to the buffer; the queue that
        # the response names; whether its response waits; the handle in its response.
        self._rewritten: bool = False
        self._queue_id: int = 0
        self._waits: bool = True
        self._recall_handle: bytes = b""

    def rows(self) -> list[InPlaceRow]:
        return [
            InPlaceRow(SEND_MESSAGE, self),
            InPlaceRow(SEND_MESSAGE_V2, self),
            InPlaceRow(SEND_BATCH_MESSAGE, self),
        ]

    def configure(self, extra_properties: bytes, body_bytes_max: int, *, trace_on: bool) -> None:
        """Apply live settings."""
        self.extra_properties = extra_properties
        self.record.body_bytes_max = body_bytes_max
        self.trace_on = b"true" if trace_on else b"false"

    def bind(self, buffer: memoryview, born_host: bytes) -> None:
        """Read from this buffer; `born_host` is the client's address, encoded."""
        self._buffer = buffer
        self.record.bind(buffer)
        self.record.born_host = born_host

    def set_born_host(self, born_host: bytes) -> None:
        """The buffer now has requests of the client with this address."""
        self.record.born_host = born_host

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer:
        """Store the message or batch and, unless the request is one-way, write the response.

        Returns an answer only if the topic was created. Raises a PenstockError if the message is
        refused.
        """
        record = self.record
        self.created = False
        if request.code == _SEND_MESSAGE:
            batch = self._read_v1(request)
        else:
            batch = self._read_v2(request)
        queue = self.writer.queues.find(
            record.source, record.topic_at, record.topic_length, record.queue_id
        )
        if queue is None or not queue.writable:
            queue = self._writable_queue(request, client, now_ms)
        self._queue_id = record.queue_id  # the response names it even if the message is redirected
        if batch:
            if record.sys_flag & _TRANSACTION_MASK:
                raise MessageIllegal(_PROBLEMS[BATCH_SPECIAL], hint=_CORRECT_IT)
            if record.source[record.topic_at] == _PERCENT:
                self._refuse_retry_topic()
            record.extra = b""  # as in RocketMQ 5.4: each message keeps its own properties
            status = self.writer.put_batch(record, now_ms)
        else:
            record.extra = self.extra_properties
            status = self.writer.check(record)
            if status == _PUT_OK and (
                record.marks.unique_length == 0
                or record.marks.special != 0
                or record.sys_flag & _PREPARED
                or record.source[record.topic_at] == _PERCENT
            ):
                queue = self._rewrite(request, queue, now_ms)
                status = self.writer.check(record)
            if status == _PUT_OK:
                status = self.writer.put_in(record, queue, now_ms)
        if status == _PUT_OK:
            self.sent += 1
            if request.flag & _ONEWAY == 0:
                self._waits = batch or record.marks.wait
                if self.created:
                    self._answer(request, self.creation_reply, _SUCCESS, batch)
                    self._answer(request, self.creation_timeout, _FLUSH_DISK_TIMEOUT, batch)
                    self._answer(request, self.creation_unreplicated, _FLUSH_SLAVE_TIMEOUT, batch)
                elif self._waits and (self.sync_flush or self.writer.replicated):
                    self._answer(request, self.pending, _SUCCESS, batch)
                    self._answer(request, self.flush_timeout, _FLUSH_DISK_TIMEOUT, batch)
                    if self.writer.replicated:
                        self._answer(request, self.slave_timeout, _FLUSH_SLAVE_TIMEOUT, batch)
                else:
                    self._answer(request, output, _SUCCESS, batch)
            if self._rewritten:
                self._restore_source()
            if self.created:
                return self._creation_answer(now_ms)
        else:
            self._refuse(status)
        return None

    def _answer(self, request: Request, output: Output, code: int, batch: bool) -> None:
        record = self.record
        output.begin(request.encoding, code, request.opaque)
        if batch:
            output.field_offset_ids(
                b"msgId", self.store_host, self.writer.batch_offsets, self.writer.batch_count
            )
        else:
            output.field_offset_id(b"msgId", self.store_host, self.writer.offset)
        output.field_number(b"queueId", self._queue_id)
        output.field_number(b"queueOffset", self.writer.queue_offset)
        if not batch and record.marks.unique_length > 0:
            output.field_span(
                b"transactionId", record.source, record.marks.unique_at, record.marks.unique_length
            )
        if len(self._recall_handle) > 0:
            output.field_plain(b"recallHandle", self._recall_handle)
        # Go's client writes no traces without both; Java's assumes the defaults.
        output.field_plain(b"MSG_REGION", self.region)
        output.field_plain(b"TRACE_ON", self.trace_on)
        output.end(0)

    def _read_v2(self, request: Request) -> bool:
        """Fill the record from one-letter field names, given by their character codes."""
        self._fill_record(
            request,
            request.letter(98),  # b: topic
            request.letter(105),  # i: properties
            request.letter(101),  # e: queueId
            request.letter(102),  # f: sysFlag
            request.letter(103),  # g: bornTimestamp
            request.letter(104),  # h: flag
            request.letter(106),  # j: reconsumeTimes
        )
        return request.truth(request.letter(109))  # m: batch

    def _read_v1(self, request: Request) -> bool:
        """Fill the record from full field names."""
        self._fill_record(
            request,
            request.find(b"topic"),
            request.find(b"properties"),
            request.find(b"queueId"),
            request.find(b"sysFlag"),
            request.find(b"bornTimestamp"),
            request.find(b"flag"),
            request.find(b"reconsumeTimes"),
        )
        return request.truth(request.find(b"batch"))

    def _fill_record(
        self,
        request: Request,
        topic: int,
        properties: int,
        queue_id: int,
        sys_flag: int,
        born: int,
        flag: int,
        reconsumed: int,
    ) -> None:
        """Make the record refer to the fields with these numbers; -1 is a missing field."""
        if queue_id < 0 or sys_flag < 0 or born < 0 or flag < 0:
            raise HeaderError("queueId, sysFlag, bornTimestamp and flag are required to send")
        if self._rewritten:  # the message before was rewritten and then refused
            self._restore_source()
        record = self.record
        record.topic_length = 0
        if topic >= 0:
            record.topic_at = request.value_at(topic)
            record.topic_length = request.value_length(topic)
        record.properties_length = 0
        if properties >= 0:
            record.properties_at = request.value_at(properties)
            record.properties_length = request.value_length(properties)
        record.queue_id = request.number32(queue_id)
        record.sys_flag = request.number32(sys_flag)
        record.born_ms = request.number(born)
        record.flag = request.number32(flag)
        record.reconsume_times = request.number32(reconsumed) if reconsumed >= 0 else 0
        record.body_at = request.body_at
        record.body_length = request.body_length

    def _writable_queue(self, request: Request, client: int, now_ms: int) -> ConsumeQueue:
        """The queue, if it may be sent to; else raises a PenstockError."""
        record = self.record
        v1 = request.code == _SEND_MESSAGE
        names = (b"defaultTopic", b"defaultTopicQueueNums") if v1 else (b"c", b"d")
        creations = self.topics.creations
        name = self._topic_name()
        queue = self.topics.writable_queue(
            name,
            record.queue_id,
            template=request.text(names[0]) or "",
            template_queues=request.i64_or(names[1], 0),
            client=client,
            now_ms=now_ms,
        )
        record.queue_id = queue.queue_id
        if self.topics.creations != creations:
            self.creations += 1
            self._created_topic = name
            self.created = not request.is_oneway()
        return queue

    def _creation_answer(self, now_ms: int) -> Answer:
        waits = self._waits and (self.sync_flush or self.writer.replicated)
        reply = EncodedReply(
            self.creation_reply.take(),
            self.creation_timeout.take(),
            self.creation_unreplicated.take(),
            self.writer.log.end if waits else 0,
        )
        return self.topics.reply_when_registered(self._created_topic, reply, now_ms)

    def _topic_name(self) -> str:
        record = self.record
        topic = bytes(record.source[record.topic_at : record.topic_at + record.topic_length])
        return topic.decode("utf-8", "replace")

    def _refuse_retry_topic(self) -> None:
        if self._topic_name().startswith(RETRY_TOPIC_PREFIX):
            raise MessageIllegal("a batch can't be sent to a retry topic", hint=_CORRECT_IT)

    def _rewrite(self, request: Request, queue: ConsumeQueue, now_ms: int) -> ConsumeQueue:
        """Add a missing unique id, remove properties that are never stored, apply the redirect.

        Returns the queue to store in. The record refers to a copy of the message afterwards.
        """
        record = self.record
        source = record.source
        text = bytes(source[record.properties_at : record.properties_at + record.properties_length])
        properties = decode_properties(text)
        properties.pop("POP_CK", None)
        for name in [name for name in properties if name.startswith("__RMQ.TRANSIENT.")]:
            del properties[name]
        if "UNIQ_KEY" not in properties and self.unique_ids is not None:
            properties["UNIQ_KEY"] = self.unique_ids.next(now_ms)
        topic = self._topic_name()
        if topic.startswith(RETRY_TOPIC_PREFIX):
            for name in POP_RETRY_PROPERTIES:
                properties.pop(name, None)
            properties.setdefault("RETRY_TOPIC", topic)
        priority = take_priority(properties)
        if priority is not None:
            queue = self.topics.priority_queue(topic, priority, now_ms)
            self._queue_id = record.queue_id = queue.queue_id
        redirect = self.redirects.find_redirect(
            topic,
            record.queue_id,
            properties,
            sys_flag=record.sys_flag,
            reconsume_times=record.reconsume_times,
            reconsume_times_max=_reconsume_times_max(request),
            now_ms=now_ms,
        )
        self._rewritten = True  # to be undone even if the message is refused below
        if redirect is not None:
            queue = redirect.queue
            record.sys_flag = redirect.sys_flag
            self._recall_handle = redirect.recall_handle
        body = bytes(source[record.body_at : record.body_at + record.body_length])
        record.fill(queue.topic, body, encode_properties(properties))
        record.queue_id = queue.queue_id
        if redirect is not None and record.prepare() == 0:
            self.redirects.check_length(record.size, record.topic_length, topic)
        return queue

    def _restore_source(self) -> None:
        """Make the record refer to the connection's buffer again."""
        self._rewritten = False
        self._recall_handle = b""
        self.record.bind(self._buffer)

    def _refuse(self, status: int) -> None:
        self.refused += 1
        fault = self.writer.fault
        if status == ILLEGAL:
            raise illegal_message(
                self.writer.problem, self.record, self.writer.log.segments.segment_bytes
            )
        if isinstance(fault, PenstockError):
            raise fault
        raise NotWriteable(f"the message can't be stored: {fault}", hint="see the broker's log")


def _reconsume_times_max(request: Request) -> int | None:
    """How often the message may be consumed again, if the client says so."""
    if request.version < V3_4_9:
        return None
    name = b"maxReconsumeTimes" if request.code == _SEND_MESSAGE else b"l"
    return request.i64_or(name, 0) if request.text(name) is not None else None


def illegal_message(problem: int, record: Record, segment_bytes: int) -> MessageIllegal:
    """The error for a problem that `Record.prepare` found."""
    if problem == BODY_TOO_LONG:
        return MessageIllegal.over(
            "the body is too long",
            figure=record.body_length,
            limit=record.body_bytes_max,
            setting="body_bytes_max",
        )
    if problem == PROPERTIES_TOO_LONG:
        length = record.properties_length + len(record.extra)
        return MessageIllegal.over(
            "the properties are too long", figure=length, limit=PROPERTIES_BYTES_MAX
        )
    if problem == TOPIC_TOO_LONG:
        return MessageIllegal.over(
            "the topic is too long", figure=record.topic_length, limit=TOPIC_BYTES_MAX
        )
    if problem == TOO_LONG_FOR_SEGMENT:
        return MessageIllegal.over(
            "the message is too long",
            figure=record.size,
            limit=segment_bytes - BLANK_BYTES,
            setting="segment_bytes",
        )
    return MessageIllegal(_PROBLEMS[problem], hint=_CORRECT_IT)
