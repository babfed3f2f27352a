"""SEND_MESSAGE in its two spellings: a request's header and body become a record of the log.

The hot path makes no Python object per message: fields are read in place, the record is encoded
from the connection's buffer into the log, the response is written into the connection's output.
"""

from penstock.errors import HeaderError, MessageIllegal, PenstockError
from penstock.store.put import ILLEGAL, NO_QUEUE, PUT_OK, PutPath
from penstock.wire.frame import Request
from penstock.wire.output import Output, response
from penstock.wire.record import (
    BATCH_BROKEN,
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
_SEND_MESSAGE_V2 = SEND_MESSAGE_V2

_SUCCESS = 0
_TOPIC_NOT_EXIST = 17
_SERVICE_NOT_AVAILABLE = 14
_PUT_OK = PUT_OK

_FAULTS = {
    TOPIC_EMPTY: "the topic is empty",
    BATCH_BROKEN: "the batch is broken",
    PROPERTIES_WITH_ZERO: "the properties hold a zero byte",
}


class SendHandler:
    """Stores single messages and answers in kind."""

    def __init__(
        self, path: PutPath, store_host: bytes, extra_properties: bytes,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:  # fmt: skip
        self.path: PutPath = path
        self.store_host: bytes = store_host
        self.record: Record = Record(body_bytes_max)
        self.record.store_host = store_host
        self.record.extra = extra_properties
        self.sent: int = 0
        self.refused: int = 0

    def bind(self, buffer: memoryview, born_host: bytes) -> None:
        """Take a connection's buffer and the address its messages were born at."""
        self.record.bind(buffer)
        self.record.born_host = born_host

    def release(self) -> None:
        self.record.release()

    def handle(self, request: Request, output: Output, now_ms: int) -> None:
        """Store the message of a send request and, unless it is one-way, append the response."""
        if request.code == _SEND_MESSAGE_V2:
            self._read_letters(request)
        else:
            self._read_names(request)
        status = self.path.put(self.record, now_ms)
        if status == _PUT_OK:
            self.sent += 1
            if request.flag & 2 == 0:
                self._answer(request, output)
        else:
            self.refused += 1
            if request.flag & 2 == 0:
                output.append(self._refusal(request, status))

    def _answer(self, request: Request, output: Output) -> None:
        output.begin(request.encoding, _SUCCESS, request.opaque)
        output.field_offset_id(b"msgId", self.store_host, self.path.offset)
        output.field_number(b"queueId", self.record.queue_id)
        output.field_number(b"queueOffset", self.path.queue_offset)
        output.end(0)

    def _read_letters(self, request: Request) -> None:
        """The one-letter names of V2; the numbers are their character codes."""
        self._take(
            request, request.letter(98), request.letter(105), request.letter(101),
            request.letter(102), request.letter(103), request.letter(104), request.letter(106),
        )  # fmt: skip

    def _read_names(self, request: Request) -> None:
        self._take(
            request, request.find(b"topic"), request.find(b"properties"), request.find(b"queueId"),
            request.find(b"sysFlag"), request.find(b"bornTimestamp"), request.find(b"flag"),
            request.find(b"reconsumeTimes"),
        )  # fmt: skip

    def _take(
        self, request: Request, topic: int, properties: int, queue_id: int, sys_flag: int,
        born: int, flag: int, reconsumed: int,
    ) -> None:  # fmt: skip
        """Point the record at the fields of these numbers; -1 for one that is not there."""
        if queue_id < 0 or sys_flag < 0 or born < 0 or flag < 0:
            raise HeaderError("queueId, sysFlag, bornTimestamp and flag are required to send")
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

    def _refusal(self, request: Request, status: int) -> bytes:
        path = self.path
        if status == NO_QUEUE:
            code, remark = _TOPIC_NOT_EXIST, "the topic has no such queue here"
        elif status == ILLEGAL:
            illegal = refuse_message(path.problem, self.record, path.log.row.size)
            code, remark = illegal.code, illegal.remark()
        elif isinstance(path.fault, PenstockError):
            code, remark = path.fault.code, path.fault.remark()
        else:
            code, remark = _SERVICE_NOT_AVAILABLE, str(path.fault)
        return response(code, request.opaque, request.encoding, remark=remark)


def refuse_message(problem: int, record: Record, segment_bytes: int) -> MessageIllegal:
    """What is wrong with a message, with the figure, the limit and the setting."""
    if problem == BODY_TOO_LONG:
        return MessageIllegal.over(
            "the body is too long", figure=record.body_length, limit=record.body_bytes_max,
            setting="body_bytes_max",
        )  # fmt: skip
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
            "the message is too long", figure=record.size, limit=segment_bytes - BLANK_BYTES,
            setting="segment_bytes",
        )  # fmt: skip
    return MessageIllegal(_FAULTS[problem], hint="mend the message; sending it again does not help")
