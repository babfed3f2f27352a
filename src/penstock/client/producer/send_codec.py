"""Messages → send requests, answers → receipts: what happens once for every message.

A request is written straight into the connection's output, with RocketMQ's binary header and the
one-letter names of SEND_MESSAGE_V2:

    a group · b topic · c template topic · d its queues · e queue · n broker      `Line.fixed`
    f sysFlag · g born · h flag · i properties                                    per message
    m batch · j, l reconsume times                                                `Flight.extra`

An answer is read where it lies; the only objects made are those of the receipt.
"""

from typing import Any, Protocol

from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.errors import HeaderError, MessageIllegal, PenstockError, refusal
from penstock.transport.pending_calls import Call
from penstock.wire import layout, octets
from penstock.wire.codes import PROPERTIES_BYTES_MAX, RESERVED_PROPERTIES
from penstock.wire.frame import Request
from penstock.wire.output import LANGUAGE, VERSION, Output

SEND_MESSAGE_V2 = 310
SEND_BATCH_MESSAGE = 320
SEND_REPLY_MESSAGE_V2 = 325
_SEND_MESSAGE_V2 = SEND_MESSAGE_V2

JOIN_BYTES_MAX = 32 * 1024
"""Bodies up to this length are copied behind their header; longer ones are written on their own."""
_JOIN_BYTES_MAX = JOIN_BYTES_MAX

_int = int  # hides annotations from the compiler, keeps them for mypy
_bytes = bytes
_str = str
_bool = bool

_LANGUAGE = LANGUAGE
_VERSION = VERSION
_BINARY_MARK = 1 << 24
_HEAD_BYTES = 8 + 21  # both length words and the fixed part of the header
_NUMBERS_BYTES = 4 * (7 + 20)  # f, g, h and the head of i

_STATUSES = {int(status): status for status in SendStatus}
_OK = SendStatus.SEND_OK
_RESERVED = RESERVED_PROPERTIES
_PROPERTIES_BYTES_MAX = PROPERTIES_BYTES_MAX


class Line:
    """A queue as sends see it: what is the same in each request to it."""

    def __init__(self, queue: MessageQueue, fields: dict[str, str], peer: Any) -> None:
        self.queue: MessageQueue = queue
        self.broker_name: str = queue.broker_name
        self.queue_id: int = queue.queue_id
        self.fields: dict[str, str] = fields
        self.fixed: bytes = encode_fields(fields)
        self.peer: Any = peer
        self.signs: bool = peer is not None and peer.signs


class Owner(Protocol):
    """Who looks after messages on their way."""

    def landed(self, flight: "Flight", result: Any, status: SendStatus) -> None:
        """A broker has taken it: `result` is the receipt, or those of a batch."""

    def crashed(self, flight: "Flight", error: PenstockError) -> None:
        """This attempt has failed."""


class Flight(Call):
    """A message (or a batch) on its way: a call that waits on a connection.

    `message_id` is the unique id, `ids` are those of a batch. `line` is the queue of the attempt
    under way, `choice` what binds the message to one queue.
    `late` ones could not leave at once.
    """

    def __init__(
        self,
        owner: Owner,
        future: Any,
        message: Any,
        topic: _str,
        began_ms: _int,
        timeout_ms: _int,
        deadline_ms: _int,
    ) -> None:
        self.code: int = _SEND_MESSAGE_V2
        self.timeout_ms: int = timeout_ms
        self.deadline_ms: int = deadline_ms
        self.sent_ms: int = 0
        self.answered_ms: int = 0
        self.reads: int = 0
        self.owner: Owner = owner
        self.future: Any = future
        self.message: Any = message
        self.topic: str = topic
        self.began_ms: int = began_ms
        self.body: bytes = b""
        self.properties: bytes = b""
        self.extra: bytes = b""
        self.flag: int = 0
        self.sys_flag: int = 0
        self.message_id: str = ""
        self.ids: list[str] | None = None
        self.line: Line | None = None
        self.choice: Any = None
        self.late: bool = False
        self.attempts: list[PenstockError] | None = None
        self.fallback: Any = None
        self.wave: Any = None
        self.traced: bool = False
        self.trace_on: bool = True

    def fields(self, line: Line) -> dict[str, str]:
        """What `put_send` writes, for requests that are encoded another way."""
        return {
            **line.fields,
            "f": str(self.sys_flag),
            "g": str(self.began_ms),
            "h": str(self.flag),
            "i": self.properties.decode(),
            **decode_fields(self.extra),
        }

    def answered(self, request: Request) -> None:
        """Take the broker's answer: a receipt, or a refusal."""
        status = _STATUSES.get(request.code)
        line = self.line
        assert line is not None
        if status is None:
            error = refusal(request.code, request.remark(), line.peer.address)
            self.owner.crashed(self, error)
            return
        if self.traced:
            self.trace_on = request.raw(b"TRACE_ON") != b"false"
        result: Any
        try:
            if self.ids is None:
                result = _receipt(request, line, self.message_id, status)
            else:
                result = _receipts(request, line, self.ids, status)
        except HeaderError as error:
            self.owner.crashed(self, error)
            return
        self.owner.landed(self, result, status)

    def failed(self, error: PenstockError) -> None:
        """No answer will come to this attempt."""
        self.owner.crashed(self, error)


def put_send(output: Output, flight: Flight, line: Line, opaque: _int, command_flag: _int) -> _bool:
    """Write a send request; False if its body is long, and still has to follow."""
    fixed = line.fixed
    properties = flight.properties
    extra = flight.extra
    body = flight.body
    body_length = len(body)
    joins = body_length <= _JOIN_BYTES_MAX
    output.reserve(
        _HEAD_BYTES
        + _NUMBERS_BYTES
        + len(fixed)
        + len(properties)
        + len(extra)
        + (body_length if joins else 0)
    )
    view = output.view
    start = output.length
    octets.put_i16(view, start + 8, flight.code)
    view[start + 10] = _LANGUAGE
    octets.put_i16(view, start + 11, _VERSION)
    octets.put_i32(view, start + 13, opaque)
    octets.put_i32(view, start + 17, command_flag)
    octets.put_i32(view, start + 21, 0)
    at = start + _HEAD_BYTES
    at += octets.put_bytes(view, at, fixed)
    at = _put_number(view, at, 102, flight.sys_flag)
    at = _put_number(view, at, 103, flight.began_ms)
    at = _put_number(view, at, 104, flight.flag)
    octets.put_i16(view, at, 1)
    view[at + 2] = 105
    octets.put_i32(view, at + 3, len(properties))
    at += 7 + octets.put_bytes(view, at + 7, properties)
    at += octets.put_bytes(view, at, extra)
    octets.put_i32(view, start + 25, at - start - _HEAD_BYTES)
    octets.put_i32(view, start, at - start - 4 + body_length)
    octets.put_i32(view, start + 4, _BINARY_MARK | (at - start - 8))
    if joins:
        at += octets.put_bytes(view, at, body)
    output.length = at
    return joins


def _put_number(view: memoryview, at: _int, letter: _int, value: _int) -> _int:
    octets.put_i16(view, at, 1)
    view[at + 2] = letter
    length = octets.put_decimal(view, at + 7, value)
    octets.put_i32(view, at + 3, length)
    return at + 7 + length


def encode_fields(fields: dict[str, str]) -> bytes:
    """Named fields as the binary header has them; empty ones are not sent."""
    pieces = []
    for key, value in fields.items():
        if value:
            name, text = key.encode(), value.encode()
            pieces += [len(name).to_bytes(2, "big"), name, len(text).to_bytes(4, "big"), text]
    return b"".join(pieces)


def decode_fields(data: bytes) -> dict[str, str]:
    """What `encode_fields` was given."""
    fields = {}
    at = 0
    while at < len(data):
        end = at + 2 + octets.get_i16(data, at)
        name = data[at + 2 : end].decode()
        at = end + 4 + octets.get_i32(data, end)
        fields[name] = data[end + 4 : at].decode()
    return fields


def encode_batched(body: _bytes, flag: _int, properties: _bytes) -> _bytes:
    """One message of a batch: size, magic, CRC (both 0), flag, body, properties."""
    size = layout.BATCH_FIXED_BYTES + len(body) + len(properties)
    data = bytearray(size)
    view = memoryview(data)
    octets.put_i32(view, layout.SIZE_AT, size)
    octets.put_i32(view, layout.BATCH_FLAG_AT, flag)
    octets.put_i32(view, layout.BATCH_BODY_LENGTH_AT, len(body))
    at = layout.BATCH_BODY_AT + octets.put_bytes(view, layout.BATCH_BODY_AT, body)
    octets.put_i16(view, at, len(properties))
    octets.put_bytes(view, at + 2, properties)
    return bytes(data)


# --- properties ----------------------------------------------------------------------------------


def encode_properties(message: Message, message_id: _str, more: _bytes, internal: _bool) -> _bytes:
    """The properties of a message, `more` (encoded) behind them. Raises MessageIllegal.

    `internal` messages may set properties that have a meaning of their own.
    """
    text = b"UNIQ_KEY\x01" + message_id.encode()
    text += b"\x02WAIT\x01true\x02" if message.wait_stored else b"\x02WAIT\x01false\x02"
    tags = message.tags
    if tags:
        text += _property(b"TAGS", tags if type(tags) is str else plain_text("tags", tags))
    keys = message.keys
    if keys:
        text += _property(b"KEYS", " ".join(keys))
    properties = message.properties
    if properties:
        for name, value in properties.items():
            text += _own_property(name, value, internal)
    text += more
    if len(text) > _PROPERTIES_BYTES_MAX:
        raise MessageIllegal.over(
            "the properties of the message are too long",
            figure=len(text),
            limit=PROPERTIES_BYTES_MAX,
            hint="send fewer or shorter keys and properties",
        )
    return text


def _own_property(name: _str, value: _str, internal: _bool) -> _bytes:
    if not isinstance(name, str) or not isinstance(value, str):
        raise MessageIllegal(f"property {name!r}: names and values are text", hint="use str()")
    if not internal and name in _RESERVED:
        raise MessageIllegal(
            f"the property name {name!r} belongs to RocketMQ",
            hint="use another name; tags, keys and delays have fields of their own in Message",
        )
    if not name or not value:
        raise MessageIllegal(
            f"the property {name!r} has no {'value' if name else 'name'}",
            hint="leave it out: consumers don't see empty properties",
        )
    encoded = name.encode("utf-8", "replace")
    if 1 in encoded or 2 in encoded:
        raise _separator(name)
    return _property(encoded, value if type(value) is str else plain_text("a value", value))


def plain_text(what: _str, value: object) -> _str:
    """Text without a class of its own, such as a member of an enum; raises MessageIllegal."""
    if not isinstance(value, str):
        raise MessageIllegal(f"{what} of type {type(value).__name__}", hint="give text (str)")
    return str.__str__(value)


def _property(name: _bytes, value: _str) -> _bytes:
    encoded = value.encode("utf-8", "replace")
    if 2 in encoded or 1 in encoded:
        raise _separator(name.decode())
    return name + b"\x01" + encoded + b"\x02"


def _separator(name: _str) -> MessageIllegal:
    return MessageIllegal(
        f"property {name[:40]!r} contains \\x01 or \\x02, which separate properties",
        hint="use other characters",
    )


# --- receipts ------------------------------------------------------------------------------------


def _receipt(request: Request, line: Line, message_id: _str, status: SendStatus) -> SendReceipt:
    queue = line.queue
    queue_id = request.number32(request.find(b"queueId"))
    if queue_id != line.queue_id:
        queue = MessageQueue(queue.topic, queue.broker_name, queue_id)
    return SendReceipt(
        status,
        message_id,
        _text(request, b"msgId"),
        queue,
        request.number(request.find(b"queueOffset")),
        request.text(b"transactionId"),
        request.text(b"recallHandle"),
        request.text(b"MSG_REGION"),
    )


def _receipts(
    request: Request, line: Line, ids: list[str], status: SendStatus
) -> list[SendReceipt]:
    """One for each message of a batch; those of a batch stored as one have one offset id."""
    queue = line.queue
    queue_id = request.number32(request.find(b"queueId"))
    if queue_id != line.queue_id:
        queue = MessageQueue(queue.topic, queue.broker_name, queue_id)
    first = request.number(request.find(b"queueOffset"))
    offset_ids = _text(request, b"msgId").split(",")
    if len(offset_ids) == 1:
        offset_ids *= len(ids)
    if len(offset_ids) != len(ids):
        raise HeaderError(f"{len(offset_ids)} ids answer a batch of {len(ids)} messages")
    region = request.text(b"MSG_REGION")
    return [
        SendReceipt(status, own, offset_id, queue, first + i, None, None, region)
        for i, (own, offset_id) in enumerate(zip(ids, offset_ids, strict=True))
    ]


def _text(request: Request, name: _bytes) -> _str:
    text = request.text(name)
    if text is None:
        raise HeaderError(f"the answer to a send has no {name.decode()}")
    return text
