"""SEND_MESSAGE in its two spellings: a request's header and body become a record of the log.

The hot path makes no Python object per message: fields are read in place, the record is encoded
from the connection's buffer into the log, the response is written into the connection's output.
"""

from penstock.store.put import NO_QUEUE, PUT_OK, PutPath
from penstock.wire.frame import Request
from penstock.wire.output import Output, response
from penstock.wire.record import Record

SEND_MESSAGE = 10
SEND_MESSAGE_V2 = 310
_SEND_MESSAGE_V2 = SEND_MESSAGE_V2

_SUCCESS = 0
_TOPIC_NOT_EXIST = 17
_MESSAGE_ILLEGAL = 13
_SERVICE_NOT_AVAILABLE = 14
_PUT_OK = PUT_OK

_PROBLEMS = (
    "", "the body is longer than body_bytes_max", "the properties are longer than 32,767 bytes",
    "the topic is longer than 255 bytes", "the topic is empty", "the batch is broken",
    "the message is longer than segment_bytes allows",
)  # fmt: skip


class SendHandler:
    """Stores single messages and answers in kind."""

    def __init__(self, path: PutPath, store_host: bytes, extra_properties: bytes) -> None:
        self.path: PutPath = path
        self.store_host: bytes = store_host
        self.record: Record = Record()
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
        record = self.record
        topic = request.letter(98)
        properties = request.letter(105)
        record.topic_length = 0
        if topic >= 0:
            record.topic_at = request.value_at(topic)
            record.topic_length = request.value_length(topic)
        record.properties_length = 0
        if properties >= 0:
            record.properties_at = request.value_at(properties)
            record.properties_length = request.value_length(properties)
        record.queue_id = request.number(request.letter(101))
        record.sys_flag = request.number(request.letter(102))
        record.born_ms = request.number(request.letter(103))
        record.flag = request.number(request.letter(104))
        reconsumed = request.letter(106)
        record.reconsume_times = request.number(reconsumed) if reconsumed >= 0 else 0
        record.body_at = request.body_at
        record.body_length = request.body_length

    def _read_names(self, request: Request) -> None:
        record = self.record
        topic = request.find(b"topic")
        properties = request.find(b"properties")
        record.topic_length = 0
        if topic >= 0:
            record.topic_at = request.value_at(topic)
            record.topic_length = request.value_length(topic)
        record.properties_length = 0
        if properties >= 0:
            record.properties_at = request.value_at(properties)
            record.properties_length = request.value_length(properties)
        record.queue_id = request.i32(b"queueId")
        record.sys_flag = request.i32(b"sysFlag")
        record.born_ms = request.i64(b"bornTimestamp")
        record.flag = request.i32(b"flag")
        record.reconsume_times = request.i64_or(b"reconsumeTimes", 0)
        record.body_at = request.body_at
        record.body_length = request.body_length

    def _refusal(self, request: Request, status: int) -> bytes:
        path = self.path
        if status == NO_QUEUE:
            code, remark = _TOPIC_NOT_EXIST, "the topic has no such queue here"
        elif path.refusal is not None:
            code, remark = _SERVICE_NOT_AVAILABLE, str(path.refusal)
        else:
            code, remark = _MESSAGE_ILLEGAL, _PROBLEMS[path.problem]
        return response(code, request.opaque, request.encoding, remark=remark)
