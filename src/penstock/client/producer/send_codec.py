"""Encodes send requests and decodes their responses: everything that runs once per message.

A request is written straight into the connection's output, with RocketMQ's binary header and the
one-letter field names of SEND_MESSAGE_V2:

    a group · b topic · c template topic · d its queues · e queue · n broker   `SendTarget.encoded`
    f sysFlag · g bornTimestamp · h flag · i properties                        per message
    m batch · j, l reconsume times                                 `PendingSend.extra_fields`

A response is read in place; the only objects created are those of the receipt.
"""

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeAlias

from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.errors import HeaderError, MessageIllegal, PenstockError, refusal
from penstock.transport.pending_calls import Call
from penstock.wire import layout, octets
from penstock.wire.codes import PROPERTIES_BYTES_MAX, RESERVED_PROPERTIES
from penstock.wire.frame import Request
from penstock.wire.output import LANGUAGE, VERSION, Output

if TYPE_CHECKING:
    from penstock.client.producer.fast_path import FlushGroup
    from penstock.client.producer.outgoing import MessageBatch
    from penstock.client.producer.publish_info import TargetSelector
    from penstock.transport.peer import Peer

SEND_MESSAGE_V2 = 310
SEND_BATCH_MESSAGE = 320
SEND_REPLY_MESSAGE_V2 = 325
_SEND_MESSAGE_V2 = SEND_MESSAGE_V2

INLINE_BODY_BYTES_MAX = 32 * 1024
"""Bodies up to this length are copied behind their header; longer ones are written separately."""
_INLINE_BODY_BYTES_MAX = INLINE_BODY_BYTES_MAX

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

SendResult: TypeAlias = SendReceipt | list[SendReceipt]
"""The receipt of a message, or the receipts of a batch."""


class SendTarget:
    """A queue that messages are sent to, with everything that all requests to it share.

    Valid as long as the route that it was made from; a new route makes new targets.
    """

    def __init__(self, queue: MessageQueue, fields: dict[str, str], peer: "Peer | None") -> None:
        self.queue: MessageQueue = queue  # as the application knows it, for receipts
        self.broker_name: str = queue.broker_name
        self.queue_id: int = queue.queue_id
        self.fields: dict[str, str] = fields  # header fields, for signed requests
        self.encoded: bytes = encode_fields(fields)  # the same, for the fast path
        self.peer: Peer | None = peer  # None: the broker has no known address
        self.signs: bool = peer is not None and peer.signs


class SendOwner(Protocol):
    """Receives the outcome of each attempt."""

    def send_succeeded(
        self, pending: "PendingSend", result: SendResult, status: SendStatus
    ) -> None:
        """A broker has stored the message or the batch."""

    def send_failed(self, pending: "PendingSend", error: PenstockError) -> None:
        """This attempt has failed."""


class PendingSend(Call):
    """A message (or a batch) that is not acknowledged yet: a call pending on a connection.

    It lives from `submit` until its future is done, over all attempts.
    """

    def __init__(
        self,
        owner: SendOwner,
        future: "asyncio.Future[SendResult]",
        message: "Message | MessageBatch",
        topic: _str,
        born_ms: _int,
        timeout_ms: _int,
        deadline_ms: _int,
    ) -> None:
        # Of `Call`; sent_ms, answered_ms and reads are of the attempt in flight.
        self.code: int = _SEND_MESSAGE_V2
        self.timeout_ms: int = timeout_ms
        self.deadline_ms: int = deadline_ms
        self.sent_ms: int = 0
        self.answered_ms: int = 0
        self.reads: int = 0
        self.owner: SendOwner = owner
        self.future: asyncio.Future[SendResult] = future  # done when the send is over
        self.message: Message | MessageBatch = message  # for selectors and traces
        self.topic: str = topic  # as the application knows it
        self.born_ms: int = born_ms  # bornTimestamp: time of day of the submit
        # The encoded request; the same in all attempts.
        self.body: bytes = b""
        self.properties: bytes = b""
        self.extra_fields: bytes = b""
        self.flag: int = 0
        self.sys_flag: int = 0
        self.message_id: str = ""  # the unique id; of a batch see batch_ids
        self.batch_ids: list[str] | None = None
        self.target: SendTarget | None = None  # of the attempt in flight, or reserved for the next
        self.select: TargetSelector | None = None  # binds the message to a queue; None: round robin
        self.deferred: bool = False  # could not be written at once
        self.uncompressed: bool = False  # a thread has to compress the body first
        self.failures: list[PenstockError] | None = None  # of the attempts so far
        self.fallback: SendResult | None = None  # receipt with a status other than SEND_OK
        self.flush_group: FlushGroup | None = None  # None until it counts as in flight
        self.traced: bool = False
        self.trace_on: bool = True  # False: the broker's response says TRACE_ON=false

    def fields(self, target: SendTarget) -> dict[str, str]:
        """The header fields that `put_send` writes, for requests that are encoded otherwise."""
        return {
            **target.fields,
            "f": str(self.sys_flag),
            "g": str(self.born_ms),
            "h": str(self.flag),
            "i": self.properties.decode(),
            **decode_fields(self.extra_fields),
        }

    def answered(self, request: Request) -> None:
        """Turn the broker's response into a receipt or an error."""
        status = _STATUSES.get(request.code)
        target = self.target
        assert target is not None
        if status is None:
            assert target.peer is not None
            error = refusal(request.code, request.remark(), target.peer.address)
            self.owner.send_failed(self, error)
            return
        if self.traced:
            self.trace_on = request.raw(b"TRACE_ON") != b"false"
        result: SendResult
        try:
            if self.batch_ids is None:
                result = _receipt(request, target, self.message_id, status)
            else:
                result = _receipts(request, target, self.batch_ids, status)
        except HeaderError as error:
            self.owner.send_failed(self, error)
            return
        self.owner.send_succeeded(self, result, status)

    def failed(self, error: PenstockError) -> None:
        """This attempt gets no response."""
        self.owner.send_failed(self, error)


def put_send(
    output: Output, pending: PendingSend, target: SendTarget, opaque: _int, command_flag: _int
) -> _bool:
    """Write a send request; False if the caller has to write the long body after it."""
    encoded = target.encoded
    properties = pending.properties
    extra_fields = pending.extra_fields
    body = pending.body
    body_length = len(body)
    inline_body = body_length <= _INLINE_BODY_BYTES_MAX
    output.reserve(
        _HEAD_BYTES
        + _NUMBERS_BYTES
        + len(encoded)
        + len(properties)
        + len(extra_fields)
        + (body_length if inline_body else 0)
    )
    view = output.view
    start = output.length
    octets.put_i16(view, start + 8, pending.code)
    view[start + 10] = _LANGUAGE
    octets.put_i16(view, start + 11, _VERSION)
    octets.put_i32(view, start + 13, opaque)
    octets.put_i32(view, start + 17, command_flag)
    octets.put_i32(view, start + 21, 0)
    at = start + _HEAD_BYTES
    at += octets.put_bytes(view, at, encoded)
    at = _put_number_field(view, at, 102, pending.sys_flag)
    at = _put_number_field(view, at, 103, pending.born_ms)
    at = _put_number_field(view, at, 104, pending.flag)
    octets.put_i16(view, at, 1)
    view[at + 2] = 105
    octets.put_i32(view, at + 3, len(properties))
    at += 7 + octets.put_bytes(view, at + 7, properties)
    at += octets.put_bytes(view, at, extra_fields)
    octets.put_i32(view, start + 25, at - start - _HEAD_BYTES)
    octets.put_i32(view, start, at - start - 4 + body_length)
    octets.put_i32(view, start + 4, _BINARY_MARK | (at - start - 8))
    if inline_body:
        at += octets.put_bytes(view, at, body)
    output.length = at
    return inline_body


def _put_number_field(view: memoryview, at: _int, letter: _int, value: _int) -> _int:
    octets.put_i16(view, at, 1)
    view[at + 2] = letter
    length = octets.put_decimal(view, at + 7, value)
    octets.put_i32(view, at + 3, length)
    return at + 7 + length


def encode_fields(fields: dict[str, str]) -> bytes:
    """Fields in the encoding of the binary header; empty ones are left out."""
    pieces = []
    for key, value in fields.items():
        if value:
            name, text = key.encode(), value.encode()
            pieces += [len(name).to_bytes(2, "big"), name, len(text).to_bytes(4, "big"), text]
    return b"".join(pieces)


def decode_fields(data: bytes) -> dict[str, str]:
    """The inverse of `encode_fields`."""
    fields = {}
    at = 0
    while at < len(data):
        end = at + 2 + octets.get_i16(data, at)
        name = data[at + 2 : end].decode()
        at = end + 4 + octets.get_i32(data, end)
        fields[name] = data[end + 4 : at].decode()
    return fields


def encode_batched(body: _bytes, flag: _int, properties: _bytes) -> _bytes:
    """One message of a batch: size, magic and CRC (both 0), flag, body, properties."""
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
    """The encoded properties of a message, followed by `more`. Raises MessageIllegal.

    `internal` messages may set reserved properties.
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
            text += _application_property(name, value, internal)
    text += more
    if len(text) > _PROPERTIES_BYTES_MAX:
        raise MessageIllegal.over(
            "the properties of the message are too long",
            figure=len(text),
            limit=PROPERTIES_BYTES_MAX,
            hint="send fewer or shorter keys and properties",
        )
    return text


def _application_property(name: _str, value: _str, internal: _bool) -> _bytes:
    if not isinstance(name, str) or not isinstance(value, str):
        raise MessageIllegal(
            f"property {name!r}: names and values must be strings", hint="convert it with str()"
        )
    if not internal and name in _RESERVED:
        raise MessageIllegal(
            f"the property name {name!r} is reserved by RocketMQ",
            hint="use another name; Message has fields for tags, keys and delays",
        )
    if not name or not value:
        raise MessageIllegal(
            f"the property {name!r} has no {'value' if name else 'name'}",
            hint="leave it out: consumers do not see empty properties",
        )
    encoded = name.encode("utf-8", "replace")
    if 1 in encoded or 2 in encoded:
        raise _separator_error(name)
    return _property(
        encoded, value if type(value) is str else plain_text(f"property {name!r}", value)
    )


def plain_text(what: _str, value: object) -> _str:
    """A plain str, also for a member of a string enum; raises MessageIllegal."""
    if not isinstance(value, str):
        raise MessageIllegal(
            f"{what} must be a string, not {type(value).__name__}", hint="give a str"
        )
    return str.__str__(value)


def _property(name: _bytes, value: _str) -> _bytes:
    encoded = value.encode("utf-8", "replace")
    if 2 in encoded or 1 in encoded:
        raise _separator_error(name.decode())
    return name + b"\x01" + encoded + b"\x02"


def _separator_error(name: _str) -> MessageIllegal:
    return MessageIllegal(
        f"property {name[:40]!r} contains \\x01 or \\x02, which separate properties",
        hint="use other characters",
    )


# --- receipts ------------------------------------------------------------------------------------


def _receipt(
    request: Request, target: SendTarget, message_id: _str, status: SendStatus
) -> SendReceipt:
    queue = target.queue
    queue_id = request.number32(request.find(b"queueId"))
    if queue_id != target.queue_id:
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
    request: Request, target: SendTarget, ids: list[str], status: SendStatus
) -> list[SendReceipt]:
    """One per message of a batch; a batch that is stored as one record has one offset id."""
    queue = target.queue
    queue_id = request.number32(request.find(b"queueId"))
    if queue_id != target.queue_id:
        queue = MessageQueue(queue.topic, queue.broker_name, queue_id)
    first = request.number(request.find(b"queueOffset"))
    offset_ids = _text(request, b"msgId").split(",")
    if len(offset_ids) == 1:
        offset_ids *= len(ids)
    if len(offset_ids) != len(ids):
        raise HeaderError(
            f"the response has {len(offset_ids)} message ids for a batch of {len(ids)}"
        )
    region = request.text(b"MSG_REGION")
    return [
        SendReceipt(status, own, offset_id, queue, first + i, None, None, region)
        for i, (own, offset_id) in enumerate(zip(ids, offset_ids, strict=True))
    ]


def _text(request: Request, name: _bytes) -> _str:
    text = request.text(name)
    if text is None:
        raise HeaderError(f"the response to a send has no field {name.decode()}")
    return text
