"""The records of the revive log, as JSON: POP checkpoints and acknowledgements.

    tag ck     PopCheckPoint   messages of one queue that one pop has taken
    tag ack    AckMsg          one of them is acknowledged
    tag bAck   BatchAckMsg     several of them are acknowledged
    tag order  OrderedPop      an ordered pop in flight (Penstock's own: RocketMQ ignores it)

A checkpoint and its acknowledgements have the same topic, group, queue, start offset, pop time and
broker. Requests and responses of POP are in `client_bodies`, receipt handles in `receipt_handle`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

from msgspec import Meta, field

from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, Int, Long
from penstock.wire.bodies.table_bodies import OrderInfo
from penstock.wire.java_numbers import parse_nonnegative

Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=127)]


class PopCheckPoint(Body):
    """Messages that one pop has taken: `offset_diffs` are their distances from `start_offset`.

    Bit k of `bit_map` says that the k-th of them is acknowledged. Very old checkpoints have no
    distances: then their offsets are consecutive.
    """

    start_offset: Offset = field(default=0, name="so")
    pop_time: Long = field(default=0, name="pt")
    invisible_time: Long = field(default=0, name="it")
    bit_map: Int = field(default=0, name="bm")
    num: Count = field(default=0, name="n")
    queue_id: Int = field(default=0, name="q")
    topic: str = field(default="", name="t")
    consumer_group: str = field(default="", name="c")
    revive_offset: Long = field(default=0, name="ro")
    offset_diffs: tuple[Int, ...] | None = field(default=None, name="d")
    broker_name: str | None = field(default=None, name="bn")
    re_put_times: str | None = field(default=None, name="rp")

    @property
    def revive_ms(self) -> int:
        """When the messages that are not acknowledged are revived."""
        return self.pop_time + self.invisible_time

    def offsets(self) -> Iterator[int]:
        """The offsets of the messages, in the order of the bits."""
        for diff in self.offset_diffs or range(self.num):
            yield self.start_offset + diff

    def index_of(self, offset: int) -> int:
        """The bit of an offset; -1 if the checkpoint does not contain it."""
        for index, taken in enumerate(self.offsets()):
            if taken == offset:
                return index
        return -1

    def tries(self) -> int:
        """How often it was written again because its messages could not be revived."""
        if self.re_put_times is None:
            return 0
        tries = parse_nonnegative(self.re_put_times)
        return 127 if tries is None else tries


class AckMsg(Body):
    """One message of a checkpoint is acknowledged."""

    ack_offset: Offset = field(default=0, name="ao")
    start_offset: Offset = field(default=0, name="so")
    consumer_group: str = field(default="", name="c")
    topic: str = field(default="", name="t")
    queue_id: Int = field(default=0, name="q")
    pop_time: Long = field(default=0, name="pt")
    broker_name: str | None = field(default=None, name="bn")


class BatchAckMsg(AckMsg):
    """Several messages of a checkpoint are acknowledged."""

    ack_offsets: tuple[Offset, ...] = field(default=(), name="aol")


class OrderedPop(Body):
    """A group's ordered pop of a queue that is in flight, and its next offset."""

    topic: str = field(default="", name="t")
    consumer_group: str = field(default="", name="c")
    queue_id: Int = field(default=0, name="q")
    next_offset: Offset = field(default=0, name="n")
    open_pop: OrderInfo | None = field(default=None, name="o")


_LONG_NAMES: Final = {
    "ackOffset": "ao",
    "startOffset": "so",
    "consumerGroup": "c",
    "topic": "t",
    "queueId": "q",
    "popTime": "pt",
    "brokerName": "bn",
    "ackOffsetList": "aol",
}


def decode_check_point(data: bytes) -> PopCheckPoint:
    """A record with the tag ck; raises BodyError."""
    return fastjson.decode(data, PopCheckPoint)


def decode_ack(data: bytes) -> AckMsg:
    """A record with the tag ack, in short or long names; raises BodyError."""
    if b'"ao"' in data:
        return fastjson.decode(data, AckMsg)
    return fastjson.build(_short_names(data), AckMsg)


def decode_acks(data: bytes) -> BatchAckMsg:
    """A record with the tag bAck, in short or long names; raises BodyError."""
    if b'"aol"' in data:
        return fastjson.decode(data, BatchAckMsg)
    return fastjson.build(_short_names(data), BatchAckMsg)


def decode_ordered_pop(data: bytes) -> OrderedPop:
    """A record with the tag order; raises BodyError."""
    return fastjson.decode(data, OrderedPop)


def _short_names(data: bytes) -> dict[str, Any]:
    members: dict[str, Any] = fastjson.decode(data, dict[str, Any])
    return {_LONG_NAMES.get(name, name): value for name, value in members.items()}
