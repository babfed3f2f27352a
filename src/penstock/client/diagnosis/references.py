"""What a user has of a message: an id, a key, or its place as `topic/broker/queue@offset`."""

import re
from dataclasses import dataclass

from penstock.errors import HeaderError
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.java_numbers import LONG_MAX
from penstock.wire.message_ids import OffsetId, decode_offset_id, decode_unique_id

_PLACE = re.compile(r"(?P<topic>.+)/(?P<broker>[^/]+)/(?P<queue>\d{1,9})@(?P<offset>\d{1,19})")


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """An offset of a queue."""

    queue: MessageQueue
    offset: int


def read_place(text: str) -> QueuePlace | None:
    """The place in `topic/broker/queue@offset`; None if the text is something else."""
    match = _PLACE.fullmatch(text.strip())
    if match is None or int(match["offset"]) > LONG_MAX:
        return None
    queue = MessageQueue(match["topic"], match["broker"], int(match["queue"]))
    return QueuePlace(queue, int(match["offset"]))


def read_offset_id(text: str) -> OffsetId | None:
    """The fields of an offset id; None if the text can't be one. A unique id may look like one."""
    try:
        return decode_offset_id(text)
    except HeaderError:
        return None


def made_ms(unique_id: str, now_ms: int) -> int | None:
    """When a unique id was made, if it has RocketMQ's format and is younger than a month."""
    try:
        return decode_unique_id(unique_id).born_ms(now_ms)
    except HeaderError:
        return None
