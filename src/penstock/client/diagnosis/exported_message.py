"""A message with its body and properties as JSON, for programs.

Commands print it with --json, and the console exports it.
"""

import base64
from typing import TYPE_CHECKING

from penstock.client.diagnosis.values import MessagePlace
from penstock.errors import CompressionError

if TYPE_CHECKING:
    from penstock.client.received_message import ReceivedMessage

UNREADABLE = "(the body can't be decompressed)"


def exported_message(message: "ReceivedMessage") -> dict[str, object]:
    """All fields; a body that is not text is in `body_base64`."""
    values: dict[str, object] = {
        "topic": message.topic,
        "message_id": message.message_id,
        "offset_id": message.offset_id,
        "broker": message.broker_name,
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "born_ms": message.born_ms,
        "born_host": message.born_host,
        "store_ms": message.store_ms,
        "reconsume_times": message.reconsume_times,
        "tags": message.tags,
        "keys": message.keys,
        "properties": message.properties,
    }
    try:
        body = message.body
    except CompressionError:
        return {**values, "body_base64": _base64(message.stored_body), "problem": UNREADABLE}
    try:
        values["body"] = body.decode()
    except UnicodeDecodeError:
        values["body_base64"] = _base64(body)
    return values


def exported_with_topics(message: "ReceivedMessage") -> dict[str, object]:
    """With the topic that the message was sent to and the one that it is stored in."""
    place = MessagePlace.of(message)
    return {**exported_message(message), "topic": place.origin, "stored_topic": place.topic}


def _base64(body: bytes) -> str:
    return base64.b64encode(body).decode()
