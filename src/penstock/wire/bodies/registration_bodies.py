"""REGISTER_BROKER: a broker's registration with a NameServer, as JSON or in a packed form.

The packed form is one zlib stream; the length in bytes precedes each text:

    i32 + DataVersion JSON
    i32 count, each: i32 + "topic readQueues writeQueues perm filterType [{attributes}]"
    i32 + JSON list of filter servers
    i32 count, each: i32 + TopicQueueMappingInfo JSON      (brokers from 5.0.0 on)

The packed form has no fields for a topic's order and system flag.
"""

import struct
import zlib
from typing import Final

from penstock.errors import BodyError, CompressionError
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, DataVersion, TopicConfig, TopicQueueMappingInfo
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import SYS_COMPRESSED, SYS_COMPRESSION_ZLIB, V5_0_0
from penstock.wire.compression import decompress

INFLATED_BYTES_MAX: Final = 64 * 1024 * 1024  # about 500,000 topics

_I32: Final = struct.Struct(">i")
_BEST: Final = 9


class RegisterBrokerBody(Body):
    """A broker's topics and filter servers."""

    topic_config_serialize_wrapper: TopicConfigAndMappingSerializeWrapper = (
        TopicConfigAndMappingSerializeWrapper()
    )
    filter_server_list: list[str] = []


def body_crc32(body: bytes) -> int:
    """The field `bodyCrc32` of a request with this body: 31 bits."""
    return zlib.crc32(body) & 0x7FFFFFFF


def encode_register(body: RegisterBrokerBody, *, compressed: bool) -> bytes:
    """The body as JSON, or packed."""
    if not compressed:
        return fastjson.encode(body)
    table = body.topic_config_serialize_wrapper
    parts = bytearray(_sized(fastjson.encode(table.data_version)))
    parts += _I32.pack(len(table.topic_config_table))
    for topic in table.topic_config_table.values():
        parts += _sized(_topic_text(topic))
    parts += _sized(fastjson.encode(body.filter_server_list))
    parts += _I32.pack(len(table.topic_queue_mapping_info_map))
    for mapping in table.topic_queue_mapping_info_map.values():
        parts += _sized(fastjson.encode(mapping))
    return zlib.compress(parts, _BEST)


def decode_register(
    data: bytes, *, compressed: bool, version: int, inflated_bytes_max: int = INFLATED_BYTES_MAX
) -> RegisterBrokerBody:
    """The registration of a broker of release `version`, a field of its request."""
    if not compressed:
        return fastjson.decode(data, RegisterBrokerBody)
    try:
        flag = SYS_COMPRESSED | SYS_COMPRESSION_ZLIB
        inflated = decompress(data, flag, limit=inflated_bytes_max)
    except CompressionError as error:
        raise BodyError(f"registration: {error}") from None
    texts = _Texts(inflated)
    data_version = fastjson.decode(texts.text(), DataVersion)
    topics = [_topic(texts.text()) for _ in range(texts.count())]
    filter_servers = fastjson.decode(texts.text(), list[str])
    mappings: list[TopicQueueMappingInfo] = []
    if version >= V5_0_0:
        count = texts.count()
        mappings = [fastjson.decode(texts.text(), TopicQueueMappingInfo) for _ in range(count)]
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=data_version,
            topic_config_table={topic.topic_name: topic for topic in topics},
            topic_queue_mapping_info_map={item.topic: item for item in mappings if item.topic},
        ),
        filter_server_list=filter_servers,
    )


class _Texts:
    """Reads texts that are preceded by their length."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def count(self) -> int:
        """The next number, which is not negative."""
        if self._at + _I32.size > len(self._data):
            raise BodyError(f"registration ends too early, after {len(self._data)} bytes")
        number: int = _I32.unpack_from(self._data, self._at)[0]
        if number < 0:
            raise BodyError(f"registration: {number} at byte {self._at} is not a count")
        self._at += _I32.size
        return number

    def text(self) -> bytes:
        """The next text."""
        size = self.count()
        if size > len(self._data) - self._at:
            raise BodyError(f"registration: a text of {size} bytes at {self._at} is truncated")
        self._at += size
        return self._data[self._at - size : self._at]


def _sized(text: bytes) -> bytes:
    return _I32.pack(len(text)) + text


def _topic_text(topic: TopicConfig) -> bytes:
    head = (
        f"{topic.topic_name} {topic.read_queue_nums} {topic.write_queue_nums} {topic.perm} "
        f"{topic.topic_filter_type}"
    ).encode()
    # A NameServer of 4.x accepts exactly five words; one of 5.x accepts both.
    return head + b" " + fastjson.encode(topic.attributes) if topic.attributes else head


def _topic(text: bytes) -> TopicConfig:
    try:
        name, read, write, perm, kind, *rest = text.decode().split(" ", 5)
        values = {
            "topicName": name,
            "readQueueNums": int(read),
            "writeQueueNums": int(write),
            "perm": int(perm),
            "topicFilterType": kind,
            "attributes": fastjson.decode(rest[0].encode(), dict[str, str]) if any(rest) else {},
        }
    except ValueError:
        raise BodyError(f"registration: {text[:80]!r} is not a topic") from None
    return fastjson.build(values, TopicConfig)
