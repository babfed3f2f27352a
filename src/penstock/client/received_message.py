"""Messages as consumers get them: one small object each, decoded when asked.

A `ReceivedMessage` holds positions in the answer that brought it (`wire.layout` has the layout).
Every length is checked when the answer is walked; after that each attribute reads its own bytes, so
that what a handler does not look at costs nothing. A message keeps the bytes of its whole answer
alive.
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
"""Most bytes that a compressed body may have unpacked: four times the longest frame."""
OFFSET_MAX = 2**63 - 1

WAITING = 0
WORKING = 1
FINISHED = 2
"""States of a message in its consumer: not begun, with a handler, settled."""

# Twins for the compiler, which keeps them to itself.
_COMPRESSED = SYS_COMPRESSED
_WRAPPED = SYS_INNER_BATCH | SYS_NEED_UNWRAP
_OK, _SHORT, _SIZE, _MAGIC, _LENGTHS, _PACKED = range(6)
_PROBLEMS = (
    "",
    "the bytes end inside a record",
    "a record's size can't be",
    "the magic number is unknown",
    "the lengths inside do not add up to the size",
    "the batch inside can't be unpacked",
)


class BadRecord(NamedTuple):
    """A record that can't be read: where it lies, and whether those after it could be read."""

    at: int
    queue_offset: int
    problem: str
    skipped: bool


class Source:
    """The answer that messages came in, and what they have in common."""

    def __init__(self, data: bytes, broker_name: str) -> None:
        self.data: bytes = data
        self.view: memoryview = memoryview(data)
        self.broker_name: str = broker_name
        self.topic: str | None = None
        self.namespace: str = ""
        self.received_ms: int = 0


class ReceivedMessage:
    """A message from a broker.

    Attributes are read-only for handlers. `topic` is the one that the message was sent to, also
    where it comes again by a retry topic (`stored_topic`), and without the namespace.
    """

    __slots__ = (
        "_body",
        "_properties",
        "again",
        "at",
        "body_at",
        "body_length",
        "local_retries",
        "owner",
        "properties_at",
        "properties_length",
        "queue_offset",
        "since_ms",
        "size",
        "source",
        "state",
        "topic_at",
        "topic_length",
    )

    def __init__(self) -> None:
        raise TypeError("messages are made by decode_records")

    def _place(self, source: Source, at: int, end: int) -> int:
        """Take the record at `at`; _OK, or what is wrong with it."""
        view = source.view
        self.source: Source = source
        self.at: int = at
        self._body: bytes | None = None
        self._properties: dict[str, str] | None = None
        self.owner: object = None
        self.again: int | None = None
        self.state: int = 0
        self.since_ms: int = 0
        self.local_retries: int = 0
        if end - at < layout.HEAD_BYTES:
            return _SHORT
        size = octets.get_i32(view, at + layout.SIZE_AT)
        self.size: int = size
        if size < layout.FIXED_BYTES or size > end - at:
            return _SIZE
        self.queue_offset: int = octets.get_i64(view, at + layout.QUEUE_OFFSET_AT)
        magic = octets.get_i32(view, at + layout.MAGIC_AT)
        if magic != layout.MAGIC_V1 and magic != layout.MAGIC_V2:
            return _MAGIC
        end = at + size
        sys_flag = octets.get_i32(view, at + layout.SYS_FLAG_AT)
        place = at + layout.body_at(sys_flag)
        if place > end:
            return _LENGTHS
        length = octets.get_i32(view, place - layout.BODY_LENGTH_BEFORE_BODY)
        self.body_at: int = place
        self.body_length: int = length
        prefix = layout.topic_length_bytes(magic)
        if length < 0 or length > end - place - prefix - layout.PROPERTIES_LENGTH_BYTES:
            return _LENGTHS
        place += length
        length = octets.get_i16(view, place) if prefix == 2 else view[place]
        place += prefix
        self.topic_at: int = place
        self.topic_length: int = length
        if length < 0 or length > end - place - layout.PROPERTIES_LENGTH_BYTES:
            return _LENGTHS
        place += length
        length = octets.get_i16(view, place)
        self.properties_at: int = place + layout.PROPERTIES_LENGTH_BYTES
        self.properties_length: int = length
        if length < 0 or self.properties_at + length != end:
            return _LENGTHS
        return 0

    # --- the message

    @property
    def topic(self) -> str:
        """The topic that it was sent to, as the application knows it."""
        if self.source.topic is not None:
            return self.source.topic
        name = self.stored_topic
        if name.startswith(RETRY_TOPIC_PREFIX):
            name = self._text(b"\x02RETRY_TOPIC\x01") or name
        return without_namespace(self.source.namespace, name)

    @property
    def stored_topic(self) -> str:
        """The topic that holds the message, as the broker knows it."""
        data = self.source.data
        return data[self.topic_at : self.topic_at + self.topic_length].decode("utf-8", "replace")

    @property
    def body(self) -> bytes:
        """What the producer sent; raises CompressionError where that can't be unpacked."""
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
        """The body as it travels: compressed, where `sys_flag` says so."""
        return self.source.data[self.body_at : self.body_at + self.body_length]

    @property
    def properties(self) -> dict[str, str]:
        """All properties, the application's and RocketMQ's."""
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

    # --- who and where

    @property
    def message_id(self) -> str:
        """The id that its producer knows, else the broker's."""
        return self.unique_id or self.offset_id

    @property
    def unique_id(self) -> str | None:
        """The id that its producer gave it."""
        return self._text(b"\x02UNIQ_KEY\x01")

    @property
    def offset_id(self) -> str:
        """The id that the broker gave it: the address and the place in the log."""
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
        """The queue that it was read from; a retry topic's, if it comes again."""
        topic = without_namespace(self.source.namespace, self.stored_topic)
        return MessageQueue(topic, self.source.broker_name, self.queue_id)

    @property
    def queue_id(self) -> int:
        return octets.get_i32(self.source.view, self.at + layout.QUEUE_ID_AT)

    @property
    def physical_offset(self) -> int:
        """Where it lies in the broker's log."""
        return octets.get_i64(self.source.view, self.at + layout.PHYSICAL_OFFSET_AT)

    @property
    def prepared_offset(self) -> int:
        """Where the half message of its transaction lies."""
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
        """When it was sent, by the producer's clock."""
        return octets.get_i64(self.source.view, self.at + layout.BORN_MS_AT)

    @property
    def born_host(self) -> str:
        """Who sent it, as the broker saw it: `ip:port`."""
        end = self.at + layout.store_ms_at(self.sys_flag)
        return decode_host(self.source.data[self.at + layout.BORN_HOST_AT : end])

    @property
    def store_ms(self) -> int:
        """When it was stored, by the broker's clock."""
        return octets.get_i64(self.source.view, self.at + layout.store_ms_at(self.sys_flag))

    @property
    def store_host(self) -> str:
        """The broker that stored it: `ip:port`."""
        at = self.at + layout.store_host_at(self.sys_flag)
        return decode_host(self.source.data[at : at + layout.store_host_length(self.sys_flag)])

    @property
    def reconsume_times(self) -> int:
        """How often handling it has failed before."""
        at = self.body_at - layout.RECONSUME_TIMES_BEFORE_BODY
        return octets.get_i32(self.source.view, at) + self.local_retries

    @property
    def received_ms(self) -> int:
        """When it came here, by this client's clock."""
        return self.source.received_ms

    @property
    def record(self) -> bytes:
        """The bytes of the whole record."""
        return self.source.data[self.at : self.at + self.size]

    # --- what its consumer does with it

    def retry(self, delay_level: int = 0) -> None:
        """Let it come again later: after RocketMQ's delay level, or as the broker sees fit (0).

        A level below 0 sends it to the dead letter topic.
        """
        self.again = delay_level

    def tagged(self, tags: frozenset[bytes]) -> bool:
        """Whether its tag is one of these."""
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

    # --- positions

    def _text(self, pattern: bytes) -> str | None:
        value = self._value(pattern)
        return None if value is None else value.decode("utf-8", "replace")

    def _value(self, pattern: bytes) -> bytes | None:
        """A property by `0x02 name 0x01`; the last with a value counts."""
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
        if data.startswith(first, begin, end):  # nothing separates the first from the length
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
) -> list[ReceivedMessage]:
    """The messages that lie one after another in an answer's body.

    `topic` is shown for all of them; None: what each record says, without `namespace`. With `tags`
    only messages with one of these. A record that can't be read raises RecordError, or goes to
    `bad` while those after it are read on, as long as its size can be believed.
    """
    source = Source(data, broker_name)
    source.topic = topic
    source.namespace = namespace
    source.received_ms = received_ms
    return _walk(source, tags, bad)


def _walk(
    source: Source, tags: frozenset[bytes] | None, bad: list[BadRecord] | None
) -> list[ReceivedMessage]:
    messages: list[ReceivedMessage] = []
    end = len(source.data)
    at = 0
    while at < end:
        message = ReceivedMessage.__new__(ReceivedMessage)
        problem = message._place(source, at, end)
        if problem != 0:
            _note_bad(message, problem, bad)
            if problem <= _SIZE:
                break
        elif octets.get_i32(source.view, at + layout.SYS_FLAG_AT) & _WRAPPED == _WRAPPED:
            messages += _unwrap(message, tags, bad)
        elif tags is None or message.tagged(tags):
            messages.append(message)
        at += message.size
    return messages


def _note_bad(message: ReceivedMessage, problem: int, bad: list[BadRecord] | None) -> None:
    text = _PROBLEMS[problem]
    if bad is None:
        raise RecordError(f"no message at byte {message.at}: {text}")
    skipped = problem > _SIZE
    offset = message.queue_offset if skipped else -1
    bad.append(BadRecord(message.at, offset, text, skipped))


def _unwrap(
    outer: ReceivedMessage, tags: frozenset[bytes] | None, bad: list[BadRecord] | None
) -> list[ReceivedMessage]:
    """The messages of a batch that is stored as one record (topics of type BatchCQ).

    Each is written out as a record of its own with the numbers of the batch, at the next offset.
    """
    data = outer.source.data
    try:
        body = outer.body
    except CompressionError:
        _note_bad(outer, _PACKED, bad)
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
        rest = body[body_at + length : at + total]  # the length of the properties, and they
        record = bytearray(head)
        octets.put_i32(record, layout.SIZE_AT, len(head) + 4 + length + len(topic) + len(rest))
        octets.put_i32(record, layout.FLAG_AT, flag)
        octets.put_i64(record, layout.QUEUE_OFFSET_AT, outer.queue_offset + number)
        octets.put_i32(record, layout.SYS_FLAG_AT, sys_flag)
        records += record + length.to_bytes(4, "big") + body[body_at : body_at + length]
        records += topic + rest
        at, number = at + total, number + 1
    if at != len(body):
        _note_bad(outer, _LENGTHS, bad)
    source = Source(bytes(records), outer.source.broker_name)
    source.topic = outer.source.topic
    source.namespace = outer.source.namespace
    source.received_ms = outer.source.received_ms
    return _walk(source, tags, bad)


def _rebuild(record: bytes, broker_name: str, topic: str | None, namespace: str) -> ReceivedMessage:
    return decode_records(record, broker_name, topic=topic, namespace=namespace)[0]
