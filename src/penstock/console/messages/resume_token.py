"""The place where a page of messages ended, as text for the next request."""

import msgspec

from penstock.errors import InvalidParameter
from penstock.wire.bodies.client_bodies import MessageQueue


def encode_resume(resume: dict[MessageQueue, int] | None) -> str | None:
    """The text; None if there are no more messages."""
    if not resume:
        return None
    rows = [[q.topic, q.broker_name, q.queue_id, offset] for q, offset in resume.items()]
    return msgspec.json.encode(rows).hex()


def decode_resume(text: str) -> dict[MessageQueue, int] | None:
    """The queues and offsets; None for an empty text."""
    if not text:
        return None
    try:
        rows = msgspec.json.decode(bytes.fromhex(text), type=list[tuple[str, str, int, int]])
    except (ValueError, msgspec.DecodeError):
        raise InvalidParameter("the resume token is not valid", hint="search again") from None
    return {MessageQueue(topic, broker, queue): offset for topic, broker, queue, offset in rows}
