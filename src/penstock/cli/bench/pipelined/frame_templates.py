"""Request frames that are encoded once and copied for each request.

What differs between requests has a fixed width and is found by its placeholder: the opaque, a
number that is written with leading zeros (which Java's parseLong accepts), and the last half of
each unique id.
"""

import os
from array import array
from collections.abc import Mapping, Sequence

from penstock.client.producer.send_codec import encode_batched
from penstock.wire.codes import (
    PULL_SUBSCRIPTION,
    TOPIC_AUTO_CREATE,
    RequestCode,
)
from penstock.wire.frame import BINARY, JSON
from penstock.wire.message import encode_properties
from penstock.wire.output import encode

HEADERS = {"json": JSON, "binary": BINARY}
"""Header encodings by their option."""

OPAQUE_FIRST = 1_000_000_000
"""The opaque of slot 0. All opaques have ten digits, so that they can be replaced in JSON."""

ROW = 5
"""Numbers per template in `rows`: start, length, position of the opaque, of the number, and of the
first of its unique ids in `id_places`. Positions count from the start of the frame."""
ID_DIGITS = 16
"""Digits of a unique id that differ between messages: its last half."""

_OPAQUE_MARK = 1_234_567_890
_BINARY_OPAQUE_AT = 13
_NUMBER_DIGITS = "9876543210123456789"
_ID_MARK = "F0E1D2C3B4A59687"


class FrameTemplates:
    """The templates of one connection, one for each queue."""

    def __init__(self, *, encoding: int, number_width: int, ids: int) -> None:
        self.data = bytearray()
        self.rows = array("i")
        self.id_places = array("i")
        self.is_json = encoding == JSON
        self.number_width = number_width
        self.ids = ids
        """Unique ids in each template."""

    @property
    def count(self) -> int:
        return len(self.rows) // ROW

    def add(self, frame: bytes) -> None:
        """Add a frame, which contains the placeholders."""
        header_end = 8 + (int.from_bytes(frame[4:8], "big") & 0xFFFFFF)
        header = frame[:header_end]
        opaque_at = _BINARY_OPAQUE_AT
        if self.is_json:
            opaque_at = _only(header, b'"opaque":%d' % _OPAQUE_MARK) + len(b'"opaque":')
        number_at = _only(header, _NUMBER_DIGITS[: self.number_width].encode())
        places = _all(frame, _ID_MARK.encode())
        assert len(places) == self.ids
        start = len(self.data)
        self.rows.extend((start, len(frame), opaque_at, number_at, len(self.id_places)))
        self.id_places.extend(places)
        self.data += frame


def send_templates(
    topic: str,
    queues: Sequence[tuple[str, int]],
    *,
    body: bytes,
    batch: int,
    tags: str | None,
    encoding: int,
) -> FrameTemplates:
    """Requests that send to each of these queues, given by broker name and queue id.

    The number is the time of birth.
    """
    templates = FrameTemplates(encoding=encoding, number_width=13, ids=batch)
    properties = encode_properties(
        {"UNIQ_KEY": os.urandom(8).hex().upper() + _ID_MARK, "WAIT": "true", "TAGS": tags}
    )
    code, payload = RequestCode.SEND_MESSAGE_V2, body
    header_properties = properties
    if batch > 1:
        code, payload = RequestCode.SEND_BATCH_MESSAGE, encode_batched(body, 0, properties) * batch
        header_properties = encode_properties({"WAIT": "true"})
    for broker_name, queue_id in queues:
        fields = {
            "a": "penstock-bench", "b": topic, "c": TOPIC_AUTO_CREATE, "d": "4",
            "e": str(queue_id), "f": "0", "g": _NUMBER_DIGITS[:13], "h": "0",
            "i": header_properties.decode(), "j": "0", "k": "false", "l": "0",
            "m": "true" if batch > 1 else "false", "n": broker_name,
        }  # fmt: skip
        templates.add(_frame(code, fields, payload, encoding))
    return templates


def pull_templates(
    group: str,
    topic: str,
    queues: Sequence[tuple[str, int]],
    *,
    count_max: int,
    tags: str | None,
    encoding: int,
) -> FrameTemplates:
    """Requests that pull up to `count_max` messages from each of these queues.

    The number is the queue offset. The pulls do not wait for messages.
    """
    templates = FrameTemplates(encoding=encoding, number_width=18, ids=0)
    for broker_name, queue_id in queues:
        fields = {
            "consumerGroup": group, "topic": topic, "queueId": str(queue_id),
            "queueOffset": _NUMBER_DIGITS[:18], "maxMsgNums": str(count_max),
            "sysFlag": str(PULL_SUBSCRIPTION), "commitOffset": "0", "suspendTimeoutMillis": "0",
            "subscription": tags or "*", "subVersion": "1", "expressionType": "TAG",
            "bname": broker_name,
        }  # fmt: skip
        templates.add(_frame(RequestCode.PULL_MESSAGE, fields, b"", encoding))
    return templates


def _frame(code: int, fields: Mapping[str, str], body: bytes, encoding: int) -> bytes:
    return encode(code, fields, body, opaque=_OPAQUE_MARK, encoding=encoding)


def _only(data: bytes, mark: bytes) -> int:
    """The position of a placeholder."""
    (place,) = _all(data, mark)
    return place


def _all(data: bytes, mark: bytes) -> list[int]:
    places = []
    at = data.find(mark)
    while at >= 0:
        places.append(at)
        at = data.find(mark, at + len(mark))
    return places
