"""Received messages: one small object per message, decoded lazily.

A `ReceivedMessage` holds positions in the body of the response that contains it (`wire.layout` has
the layout). All lengths are checked once, when the response is scanned; after that each attribute
reads only its own bytes, so attributes that a handler does not use cost nothing. A message keeps
the bytes of its whole response alive.
"""

from typing import NamedTuple

from penstock.client.namespace import without_namespace
from penstock.errors import CompressionError, RecordError
from penstock.wire import layout, octets
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    KEY_SEPARATOR,
    RETRY_TOPIC_PREFIX,
    SYS_COMPRESSED,
    SYS_COMPRESSION_MASK,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
)
from penstock.wire.compression import decompress
from penstock.wire.message import decode_host, decode_properties

BODY_BYTES_MAX = 64 * 1024 * 1024
"""Longest decompressed body: four times the longest frame."""
OFFSET_MAX = 2**63 - 1

WAITING = 0
HANDLING = 1
FINISHED = 2
"""States of a message in its consumer: waiting for a handler, being handled, done."""

# C constants of the compiled module.
_COMPRESSED = SYS_COMPRESSED
_WRAPPED = SYS_INNER_BATCH | SYS_NEED_UNWRAP
_OK, _SHORT, _SIZE, _MAGIC, _LENGTHS, _PACKED, _CRC = range(7)
_PROBLEMS = (
    "",
    "the bytes end inside a record",
    "the size of the record is impossible",
    "the magic number is unknown",
    "the lengths of its parts do not match its size",
    "its batch cannot be decompressed",
    "its body does not match its CRC",
)


class BadRecord(NamedTuple):
    """A record that cannot be decoded. `skipped`: the records after it were decoded."""

    at: int
    queue_offset: int
    problem: str
    skipped: bool


class MessageSource:
    """The body of a response with messages, and what all of them have in common."""

    def __init__(
        self, data: bytes, broker_name: str, topic: str | None, namespace: str, received_ms: int
    ) -> None:
        self.data: bytes = data
        self.view: memoryview = memoryview(data)  # of data
        self.broker_name: str = broker_name
        self.topic: str | None = topic  # shown for all messages; None: each record has its own
        self.namespace: str = namespace  # removed from the topics of records
        self.received_ms: int = received_ms


class ReceivedMessage:
    """A message from a broker.

    Handlers must not change attributes. `topic` is the topic that the message was sent to, without
    the namespace, also if it is redelivered through a retry topic (`stored_topic`).
    """

    __slots__ = (
        "_body",
        "_properties",
        "at",
        "body_at",
        "body_length",
        "handling_since_ms",
        "local_retries",
        "pop_receipt",
        "process_queue",
        "properties_at",
        "properties_length",
        "queue_offset",
        "retry_level",
        "size",
        "source",
        "state",
        "topic_at",
        "topic_length",
    )

    def __init__(self) -> None:
        raise TypeError("messages are created by decode_records")

    def _locate(self, source: MessageSource, start: int, end: int) -> int:
        """Locate the record that starts at `start`; returns _OK or what is wrong with it."""
        view = source.view
        # Positions of the record in `source`, fixed for the life of the message.
        self.source: MessageSource = source
        self.at: int = start
        # Decoded on first use.
        self._body: bytes | None = None
        self._properties: dict[str, str] | None = None
        # State in its consumer, from the response until it is done or redelivered.
        self.process_queue: object = None  # push and pull consumers: `process_queue_of`
        self.pop_receipt: object = None  # POP consumers: `receipt_of`
        self.state: int = 0  # WAITING, HANDLING, FINISHED or a state of the dispatch
        self.handling_since_ms: int = 0  # monotonic, valid while HANDLING
        self.retry_level: int | None = None  # set by retry(): redeliver with this delay level
        self.local_retries: int = 0  # redeliveries that the record does not count
        if end - start < layout.HEAD_BYTES:
            return _SHORT
        size = octets.get_i32(view, start + layout.SIZE_AT)
        self.size: int = size
        if size < layout.FIXED_BYTES or size > end - start:
            return _SIZE
        self.queue_offset: int = octets.get_i64(view, start + layout.QUEUE_OFFSET_AT)
        magic = octets.get_i32(view, start + layout.MAGIC_AT)
        if magic != layout.MAGIC_V1 and magic != layout.MAGIC_V2:
            return _MAGIC
        end = start + size
        sys_flag = octets.get_i32(view, start + layout.SYS_FLAG_AT)
        at = start + layout.body_at(sys_flag)
        if at > end:
            return _LENGTHS
        length = octets.get_i32(view, at - layout.BODY_LENGTH_BEFORE_BODY)
        self.body_at: int = at
        self.body_length: int = length
        prefix = layout.topic_length_bytes(magic)
        if length < 0 or length > end - at - prefix - layout.PROPERTIES_LENGTH_BYTES:
            return _LENGTHS
        at += length
        length = octets.get_i16(view, at) if prefix == 2 else view[at]
        at += prefix
        self.topic_at: int = at
        self.topic_length: int = length
        if length < 0 or length > end - at - layout.PROPERTIES_LENGTH_BYTES:
            return _LENGTHS
        at += length
        length = octets.get_i16(view, at)
        self.properties_at: int = at + layout.PROPERTIES_LENGTH_BYTES
        self.properties_length: int = length
        if length < 0 or self.properties_at + length != end:
            return _LENGTHS
        return 0

    # --- the message

    @property
    def topic(self) -> str:
        """The topic that the message was sent to, without the namespace."""
        if self.source.topic is not None:
            return self.source.topic
        name = self.stored_topic
        if name.startswith(RETRY_TOPIC_PREFIX):
            name = self._text(b"\x02RETRY_TOPIC\x01") or name
        return without_namespace(self.source.namespace, name)

    @property
    def stored_topic(self) -> str:
        """The topic that the message is stored in, with the namespace."""
        data = self.source.data
        return data[self.topic_at : self.topic_at + self.topic_length].decode("utf-8", "replace")

    @property
    def body(self) -> bytes:
        """The body, decompressed; raises CompressionError."""
        body = self._body
        if body is None:
            body = self.source.data[self.body_at : self.body_at + self.body_length]
            sys_flag = self.sys_flag
            if sys_flag & _COMPRESSED:
                body = decompress(body, sys_flag, limit=BODY_BYTES_MAX)
            self._body = body
        return body

    @property
    def stored_body(self) -> bytes:
        """The stored body, compressed if `sys_flag` says so."""
        return self.source.data[self.body_at : self.body_at + self.body_length]

    @property
    def properties(self) -> dict[str, str]:
        """All properties: the application's and RocketMQ's."""
        properties = self._properties
        if properties is None:
            end = self.properties_at + self.properties_length
            properties = decode_properties(self.source.data[self.properties_at : end])
            self._properties = properties
        return properties

    @property
    def tags(self) -> str | None:
        return self._text(b"\x02TAGS\x01")

    @property
    def keys(self) -> list[str]:
        text = self._text(b"\x02KEYS\x01")
        return [] if text is None else [key for key in text.split(KEY_SEPARATOR) if key]

    # --- ids, hosts and positions

    @property
    def message_id(self) -> str:
        """The producer's id of the message, else the broker's."""
        return self.unique_id or self.offset_id

    @property
    def unique_id(self) -> str | None:
        """The id given by the producer."""
        return self._text(b"\x02UNIQ_KEY\x01")

    @property
    def offset_id(self) -> str:
        """The id given by the broker: its address and the physical offset."""
        data, at = self.source.data, self.at + layout.store_host_at(self.sys_flag)
        host = data[at : at + layout.store_host_length(self.sys_flag)]
        at = self.at + layout.PHYSICAL_OFFSET_AT
        return (host + data[at : at + 8]).hex().upper()

    @property
    def transaction_id(self) -> str | None:
        return self._text(b"\x02__transactionId__\x01") or self.unique_id

    @property
    def broker_name(self) -> str:
        return self.source.broker_name

    @property
    def queue(self) -> MessageQueue:
        """The queue of the message; a queue of the retry topic if it is redelivered."""
        topic = without_namespace(self.source.namespace, self.stored_topic)
        return MessageQueue(topic, self.source.broker_name, self.queue_id)

    @property
    def queue_id(self) -> int:
        return octets.get_i32(self.source.view, self.at + layout.QUEUE_ID_AT)

    @property
    def physical_offset(self) -> int:
        """The offset in the broker's CommitLog."""
        return octets.get_i64(self.source.view, self.at + layout.PHYSICAL_OFFSET_AT)

    @property
    def prepared_offset(self) -> int:
        """The CommitLog offset of the half message of its transaction."""
        at = self.body_at - layout.PREPARED_OFFSET_BEFORE_BODY
        return octets.get_i64(self.source.view, at)

    @property
    def flag(self) -> int:
        return octets.get_i32(self.source.view, self.at + layout.FLAG_AT)

    @property
    def sys_flag(self) -> int:
        return octets.get_i32(self.source.view, self.at + layout.SYS_FLAG_AT)

    @property
    def born_ms(self) -> int:
        """When the message was sent, by the producer's clock."""
        return octets.get_i64(self.source.view, self.at + layout.BORN_MS_AT)

    @property
    def born_host(self) -> str:
        """The producer's address as the broker saw it: `ip:port`."""
        end = self.at + layout.store_ms_at(self.sys_flag)
        return decode_host(self.source.data[self.at + layout.BORN_HOST_AT : end])

    @property
    def store_ms(self) -> int:
        """When the message was stored, by the broker's clock."""
        return octets.get_i64(self.source.view, self.at + layout.store_ms_at(self.sys_flag))

    @property
    def store_host(self) -> str:
        """The address of the broker that stored the message: `ip:port`."""
        at = self.at + layout.store_host_at(self.sys_flag)
        return decode_host(self.source.data[at : at + layout.store_host_length(self.sys_flag)])

    @property
    def reconsume_times(self) -> int:
        """The number of redeliveries so far."""
        at = self.body_at - layout.RECONSUME_TIMES_BEFORE_BODY
        return octets.get_i32(self.source.view, at) + self.local_retries

    @property
    def received_ms(self) -> int:
        """When the message was received, by this client's clock."""
        return self.source.received_ms

    @property
    def record(self) -> bytes:
        """The bytes of the whole record."""
        return self.source.data[self.at : self.at + self.size]

    # --- for consumers

    def retry(self, delay_level: int = 0) -> None:
        """Let the broker redeliver the message after a delay level; 0: the broker's choice.

        A level below 0 sends the message to the dead letter topic.
        """
        self.retry_level = delay_level

    def has_tag(self, tags: frozenset[bytes]) -> bool:
        """Whether the tag of the message is one of these."""
        return self._value(b"\x02TAGS\x01") in tags

    def __repr__(self) -> str:
        queue = self.queue
        return (
            f"<ReceivedMessage {self.message_id} of {self.topic}:"
            f" {queue.topic}/{queue.broker_name}/{queue.queue_id} at {self.queue_offset},"
            f" {self.body_length} bytes>"
        )

    def __reduce__(self) -> tuple[object, ...]:
        source = self.source
        return _rebuild, (self.record, source.broker_name, source.topic, source.namespace)

    def _text(self, pattern: bytes) -> str | None:
        value = self._value(pattern)
        return None if value is None else value.decode("utf-8", "replace")

    def _value(self, pattern: bytes) -> bytes | None:
        """The value of a property, by `0x02 name 0x01`; the last one that is not empty counts."""
        data = self.source.data
        begin = self.properties_at
        end = begin + self.properties_length
        at = data.rfind(pattern, begin, end)
        while at >= 0:
            stop = data.find(b"\x02", at + len(pattern), end)
            if stop < 0:
                stop = end
            if stop > at + len(pattern):
                return data[at + len(pattern) : stop]
            at = data.rfind(pattern, begin, at + 1)
        first = pattern[1:]
        if data.startswith(first, begin, end):  # there is no separator before the first property
            stop = data.find(b"\x02", begin, end)
            if stop < 0:
                stop = end
            if stop > begin + len(first):
                return data[begin + len(first) : stop]
        return None


def decode_records(
    data: bytes,
    broker_name: str,
    *,
    topic: str | None = None,
    namespace: str = "",
    received_ms: int = 0,
    tags: frozenset[bytes] | None = None,
    bad: list[BadRecord] | None = None,
    check_crc: bool = False,
) -> list[ReceivedMessage]:
    """The messages in the body of a response.

    `topic` is shown for all of them; None: the topic of each record, without `namespace`. With
    `tags`, only messages with one of these tags. A record that cannot be decoded raises
    RecordError; with `bad` it is added there, and decoding continues after it if its size is
    plausible.
    """
    source = MessageSource(data, broker_name, topic, namespace, received_ms)
    return _scan(source, tags, bad, check_crc)


def _scan(
    source: MessageSource,
    tags: frozenset[bytes] | None,
    bad: list[BadRecord] | None,
    check_crc: bool,
) -> list[ReceivedMessage]:
    messages: list[ReceivedMessage] = []
    end = len(source.data)
    at = 0
    while at < end:
        message = ReceivedMessage.__new__(ReceivedMessage)
        problem = message._locate(source, at, end)
        if problem == 0 and check_crc:
            crc = octets.crc31(source.view, message.body_at, message.body_length)
            if crc != octets.get_i32(source.view, at + layout.BODY_CRC_AT):
                problem = _CRC
        if problem != 0:
            _report_bad(message, problem, bad)
            if problem <= _SIZE:
                break
        elif octets.get_i32(source.view, at + layout.SYS_FLAG_AT) & _WRAPPED == _WRAPPED:
            messages += _unwrap(message, tags, bad)
        elif tags is None or message.has_tag(tags):
            messages.append(message)
        at += message.size
    return messages


def _report_bad(message: ReceivedMessage, problem: int, bad: list[BadRecord] | None) -> None:
    text = _PROBLEMS[problem]
    if bad is None:
        raise RecordError(f"bad record at byte {message.at}: {text}")
    skipped = problem > _SIZE
    offset = message.queue_offset if skipped else -1
    bad.append(BadRecord(message.at, offset, text, skipped))


def _unwrap(
    outer: ReceivedMessage, tags: frozenset[bytes] | None, bad: list[BadRecord] | None
) -> list[ReceivedMessage]:
    """The messages of a batch that is stored as one record (topics with a BatchConsumeQueue).

    Each becomes a record with the header of the batch and its own queue offset.
    """
    data = outer.source.data
    try:
        body = outer.body
    except CompressionError:
        _report_bad(outer, _PACKED, bad)
        return []
    head = data[outer.at : outer.body_at - layout.BODY_LENGTH_BEFORE_BODY]
    sys_flag = outer.sys_flag & ~(_WRAPPED | _COMPRESSED | SYS_COMPRESSION_MASK)
    topic = data[outer.body_at + outer.body_length : outer.topic_at + outer.topic_length]
    records = bytearray()
    at = number = 0
    while len(body) - at >= layout.BATCH_FIXED_BYTES:
        total = octets.get_i32(body, at + layout.SIZE_AT)
        flag = octets.get_i32(body, at + layout.BATCH_FLAG_AT)
        length = octets.get_i32(body, at + layout.BATCH_BODY_LENGTH_AT)
        if not 0 <= length <= total - layout.BATCH_FIXED_BYTES or total > len(body) - at:
            break
        if outer.queue_offset + number > OFFSET_MAX or len(records) > BODY_BYTES_MAX:
            break
        body_at = at + layout.BATCH_BODY_AT
        rest = body[body_at + length : at + total]  # length of the properties, properties
        record = bytearray(head)
        octets.put_i32(record, layout.SIZE_AT, len(head) + 4 + length + len(topic) + len(rest))
        octets.put_i32(record, layout.FLAG_AT, flag)
        octets.put_i64(record, layout.QUEUE_OFFSET_AT, outer.queue_offset + number)
        octets.put_i32(record, layout.SYS_FLAG_AT, sys_flag)
        records += record + length.to_bytes(4, "big") + body[body_at : body_at + length]
        records += topic + rest
        at, number = at + total, number + 1
    if at != len(body):
        _report_bad(outer, _LENGTHS, bad)
    of = outer.source
    source = MessageSource(bytes(records), of.broker_name, of.topic, of.namespace, of.received_ms)
    return _scan(source, tags, bad, False)


def _rebuild(record: bytes, broker_name: str, topic: str | None, namespace: str) -> ReceivedMessage:
    return decode_records(record, broker_name, topic=topic, namespace=namespace)[0]
