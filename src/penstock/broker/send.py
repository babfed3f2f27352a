"""Sending: a request's header and body become a record of the log (codes 10, 310 and 320).

The hot path makes no Python object per message: fields are read in place, the record is encoded
from the connection's buffer into the log, the response is written into the connection's output.
A queue that has not been sent to since its topic last changed is asked for at the gate first.

Under sync flush a response may leave only when the message is on the disk: it is written into
`waiting`, and its twin for the case that this takes too long into `late`.
"""

from typing import Protocol

from penstock.errors import HeaderError, MessageIllegal, NotWriteable, PenstockError
from penstock.rpc.answers import Answer, EncodedReply
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import ILLEGAL, PUT_OK, PutPath
from penstock.wire.codes import RETRY_TOPIC_PREFIX, V3_4_9
from penstock.wire.frame import Request
from penstock.wire.message import decode_properties, encode_properties
from penstock.wire.message_ids import UniqueIds
from penstock.wire.output import Output
from penstock.wire.record import (
    BATCH_BROKEN,
    BATCH_SPECIAL,
    BLANK_BYTES,
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
_PUT_OK = PUT_OK
_ONEWAY = 2
_PREPARED = 0x04
_TRANSACTION_MASK = 0x0C
_PERCENT = 37  # of %RETRY%
_MEND = "mend the message; sending it again does not help"

_FAULTS = {
    TOPIC_EMPTY: "the topic is empty",
    BATCH_BROKEN: "the batch is broken",
    BATCH_SPECIAL: "a message of a batch can't be delayed or transactional",
    PROPERTIES_WITH_ZERO: "the properties hold a zero byte",
}


class Gate(Protocol):
    """Who knows which queues may be sent to."""

    def admit(
        self, topic: str, queue_id: int, *, template: str, template_queues: int, now_ms: int
    ) -> ConsumeQueue: ...

    @property
    def creations(self) -> int:
        """How many topics were made because somebody sent to them."""

    def announced(self, topic: str, answer: EncodedReply, now_ms: int) -> Answer:
        """The answer to a send that made its topic: given when clients can find the topic."""


class Redirect(Protocol):
    """Where a message goes instead of the queue it was sent to."""

    @property
    def queue(self) -> ConsumeQueue: ...

    @property
    def sys_flag(self) -> int: ...

    @property
    def recall_handle(self) -> bytes: ...


class Redirects(Protocol):
    """Who knows of messages that are not stored in the queue they were sent to."""

    def place(
        self,
        topic: str,
        queue_id: int,
        properties: dict[str, str],
        *,
        sys_flag: int,
        reconsumed: int,
        times_max: int | None,
        now_ms: int,
    ) -> Redirect | None:
        """The detour, or None; what has to be known later goes into the properties."""

    def check_room(self, record_bytes: int, parked: int, topic: str) -> None:
        """Raise MessageIllegal for one that is too long to come back from its detour."""


class SendHandler:
    """Stores messages and answers in kind."""

    def __init__(
        self,
        path: PutPath,
        gate: Gate,
        redirects: Redirects,
        store_host: bytes,
        extra_properties: bytes,
        body_bytes_max: int = BODY_BYTES_MAX,
        unique_ids: UniqueIds | None = None,
    ) -> None:
        self.path: PutPath = path
        self.gate: Gate = gate
        self.redirects: Redirects = redirects
        self.store_host: bytes = store_host
        self.record: Record = Record(body_bytes_max)
        self.record.store_host = store_host
        self.extra: bytes = extra_properties
        self.region: bytes = b""
        self.trace_off: bool = False
        self.unique_ids: UniqueIds | None = unique_ids
        self.waits: bool = path.flusher.group_commit
        self.waiting: Output = Output(1024)
        self.late: Output = Output(1024)
        self.created: bool = False
        self.creations: int = 0
        self._created_topic: str = ""
        self.fresh: Output = Output(1024)
        self.fresh_late: Output = Output(1024)
        self.sent: int = 0
        self.refused: int = 0
        self._buffer: memoryview = memoryview(bytearray(1))
        self._moved: bool = False
        self._queue_id: int = 0
        self._wait: bool = True
        self._recall: bytes = b""

    def bind(self, buffer: memoryview, born_host: bytes) -> None:
        """Take a connection's buffer and the address its messages were born at."""
        self._buffer = buffer
        self.record.bind(buffer)
        self.record.born_host = born_host

    def come_from(self, born_host: bytes) -> None:
        """The bound buffer now holds requests of another connection."""
        self.record.born_host = born_host

    def release(self) -> None:
        self._buffer = memoryview(bytearray(1))
        self.record.release()

    def handle(self, request: Request, output: Output, now_ms: int) -> None:
        """Store what a send request holds and, unless it is one-way, answer.

        Raises a PenstockError where the message is refused.
        """
        record = self.record
        self.created = False
        if request.code == _SEND_MESSAGE:
            batch = self._read_names(request)
        else:
            batch = self._read_letters(request)
        queue = self.path.queues.find(
            record.source, record.topic_at, record.topic_length, record.queue_id
        )
        if queue is None or not queue.taking:
            queue = self._admit(request, now_ms)
        self._queue_id = record.queue_id  # the answer names it wherever the message is stored
        if batch:
            if record.sys_flag & _TRANSACTION_MASK:
                raise MessageIllegal(_FAULTS[BATCH_SPECIAL], hint=_MEND)
            if record.source[record.topic_at] == _PERCENT:
                self._refuse_retries()
            record.extra = b""  # as RocketMQ 5.4: each message has the properties it came with
            status = self.path.put_batch(record, now_ms)
        else:
            record.extra = self.extra
            status = self.path.check(record)
            if status == _PUT_OK and (
                record.marks.unique_length == 0
                or record.marks.special != 0
                or record.sys_flag & _PREPARED
                or record.source[record.topic_at] == _PERCENT
            ):
                queue = self._mend(request, queue, now_ms)
                status = self.path.check(record)
            if status == _PUT_OK:
                status = self.path.put_in(record, queue, now_ms)
        if status == _PUT_OK:
            self.sent += 1
            if request.flag & _ONEWAY == 0:
                self._wait = batch or record.marks.wait
                if self.created:
                    self._answer(request, self.fresh, _SUCCESS, batch)
                    self._answer(request, self.fresh_late, _FLUSH_DISK_TIMEOUT, batch)
                elif self.waits and self._wait:
                    self._answer(request, self.waiting, _SUCCESS, batch)
                    self._answer(request, self.late, _FLUSH_DISK_TIMEOUT, batch)
                else:
                    self._answer(request, output, _SUCCESS, batch)
            if self._moved:
                self._return()
        else:
            self._refuse(status)

    def _answer(self, request: Request, output: Output, code: int, batch: bool) -> None:
        record = self.record
        output.begin(request.encoding, code, request.opaque)
        if batch:
            output.field_offset_ids(
                b"msgId", self.store_host, self.path.batch_offsets, self.path.batch_count
            )
        else:
            output.field_offset_id(b"msgId", self.store_host, self.path.offset)
        output.field_number(b"queueId", self._queue_id)
        output.field_number(b"queueOffset", self.path.queue_offset)
        if not batch and record.marks.unique_length > 0:
            output.field_span(
                b"transactionId", record.source, record.marks.unique_at, record.marks.unique_length
            )
        if len(self._recall) > 0:
            output.field_plain(b"recallHandle", self._recall)
        if len(self.region) > 0:
            output.field_plain(b"MSG_REGION", self.region)
        if self.trace_off:  # a client that is told nothing may trace
            output.field_plain(b"TRACE_ON", b"false")
        output.end(0)

    def _read_letters(self, request: Request) -> bool:
        """The one-letter names of V2; the numbers are their character codes."""
        self._take(
            request,
            request.letter(98),
            request.letter(105),
            request.letter(101),
            request.letter(102),
            request.letter(103),
            request.letter(104),
            request.letter(106),
        )
        return request.truth(request.letter(109))

    def _read_names(self, request: Request) -> bool:
        self._take(
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

    def _take(
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
        """Point the record at the fields of these numbers; -1 for one that is not there."""
        if queue_id < 0 or sys_flag < 0 or born < 0 or flag < 0:
            raise HeaderError("queueId, sysFlag, bornTimestamp and flag are required to send")
        if self._moved:  # a message before this one was refused after it had been mended
            self._return()
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

    def _admit(self, request: Request, now_ms: int) -> ConsumeQueue:
        """Ask at the gate; raises a PenstockError if the queue may not be sent to."""
        record = self.record
        v1 = request.code == _SEND_MESSAGE
        names = (b"defaultTopic", b"defaultTopicQueueNums") if v1 else (b"c", b"d")
        creations = self.gate.creations
        name = self._named_topic()
        queue = self.gate.admit(
            name,
            record.queue_id,
            template=request.text(names[0]) or "",
            template_queues=request.i64_or(names[1], 0),
            now_ms=now_ms,
        )
        record.queue_id = queue.queue_id
        if self.gate.creations != creations:
            self.creations += 1
            self._created_topic = name
            self.created = not request.is_oneway()
        return queue

    def take_created(self, now_ms: int) -> Answer:
        """The answer to the send that has just made its topic."""
        offset = self.path.log.end if self.waits and self._wait else 0
        answer = EncodedReply(self.fresh.take(), self.fresh_late.take(), offset)
        return self.gate.announced(self._created_topic, answer, now_ms)

    def _named_topic(self) -> str:
        record = self.record
        topic = bytes(record.source[record.topic_at : record.topic_at + record.topic_length])
        return topic.decode("utf-8", "replace")

    def _refuse_retries(self) -> None:
        if self._named_topic().startswith(RETRY_TOPIC_PREFIX):
            raise MessageIllegal("messages can't be sent to a retry topic in a batch", hint=_MEND)

    def _mend(self, request: Request, queue: ConsumeQueue, now_ms: int) -> ConsumeQueue:
        """Give the message the id it lacks, take away what is never stored. Gives the queue where
        it is stored: its own, or that of its detour.

        Its parts move into a buffer of their own.
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
        topic = self._named_topic()
        redirect = self.redirects.place(
            topic,
            record.queue_id,
            properties,
            sys_flag=record.sys_flag,
            reconsumed=record.reconsume_times,
            times_max=_times_max(request),
            now_ms=now_ms,
        )
        self._moved = True  # from here on there is something to undo, whatever is refused below
        if redirect is not None:
            queue = redirect.queue
            record.sys_flag = redirect.sys_flag
            self._recall = redirect.recall_handle
        body = bytes(source[record.body_at : record.body_at + record.body_length])
        record.fill(queue.topic, body, encode_properties(properties))
        record.queue_id = queue.queue_id
        if redirect is not None and record.prepare() == 0:
            self.redirects.check_room(record.size, record.topic_length, topic)
        return queue

    def _return(self) -> None:
        self._moved = False
        self._recall = b""
        self.record.bind(self._buffer)

    def _refuse(self, status: int) -> None:
        self.refused += 1
        fault = self.path.fault
        if status == ILLEGAL:
            raise refuse_message(self.path.problem, self.record, self.path.log.row.size)
        if isinstance(fault, PenstockError):
            raise fault
        raise NotWriteable(f"the message can't be stored: {fault}", hint="look at the broker's log")


def _times_max(request: Request) -> int | None:
    """How often a message may be retried, where the client says so."""
    if request.version < V3_4_9:
        return None
    name = b"maxReconsumeTimes" if request.code == _SEND_MESSAGE else b"l"
    return request.i64_or(name, 0) if request.text(name) is not None else None


def refuse_message(problem: int, record: Record, segment_bytes: int) -> MessageIllegal:
    """What is wrong with a message, with the figure, the limit and the setting."""
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
    return MessageIllegal(_FAULTS[problem], hint=_MEND)
