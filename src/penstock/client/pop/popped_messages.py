"""A pop's answer: its messages, each with what gives it back.

Offsets come beside the messages, by queue (wire/receipt_handle.py). Messages from retry topics
carry their receipt handle and their original topic as properties.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.client.received_message import BadRecord, ReceivedMessage, decode_records
from penstock.errors import HeaderError
from penstock.transport.peer import Response
from penstock.wire.codes import PROPERTY_POP_CK
from penstock.wire.receipt_handle import (
    OrderCounts,
    QueueKey,
    Receipt,
    RetryKind,
    kind_of,
    parse_message_offsets,
    parse_order_counts,
    parse_receipt,
    parse_start_offsets,
)

log = logging.getLogger(__name__)

MESSAGES_MAX = 32
"""Most messages that a broker lends at a time."""
_LONG_MAX = 2**63 - 1


class Place(NamedTuple):
    """Where messages are asked for: a topic, as servers know it, at a broker."""

    topic: str
    broker_name: str


@dataclass(slots=True)
class Loan:
    """A message that is lent to us: what to say to give it back, and until when it is ours."""

    topic: str
    """The topic that was asked for, as servers know it."""
    receipt: Receipt
    ends_ms: int
    """By our own clock that never steps; the broker's clock may be another."""
    returned: bool = False


def read_popped(
    answer: Response, place: Place, *, shown_topic: str, now_ms: int, began_ms: int
) -> list[ReceivedMessage]:
    """The messages of an answer to POP_MESSAGE, each owned by its loan; raises HeaderError.

    `now_ms` is the time of day for `received_ms`; `began_ms`, from when the loan counts, is not.
    """
    ext = answer.ext
    starts = parse_start_offsets(ext.get("startOffsetInfo") or "")
    offsets = parse_message_offsets(ext.get("msgOffsetInfo") or "")
    counts = parse_order_counts(ext.get("orderCountInfo") or "")
    pop = Receipt(
        0,
        read_long(ext, "popTime"),
        read_long(ext, "invisibleTime"),
        read_long(ext, "reviveQid"),
        RetryKind.NORMAL,
        place.broker_name,
        0,
    )
    bad: list[BadRecord] = []
    messages = decode_records(
        answer.body, place.broker_name, topic=shown_topic, received_ms=now_ms, bad=bad
    )
    for record in bad:
        log.warning("%s lends a message that can't be read: %s", place.broker_name, record)
    for message in messages:
        text = message.properties.get(PROPERTY_POP_CK)
        offset = message.queue_offset
        if text is not None:
            receipt = parse_receipt(text)
            if receipt.queue_offset is None:
                receipt = receipt._replace(queue_offset=offset)
        else:
            key = QueueKey(kind_of(message.stored_topic), message.queue_id)
            if starts and offset not in offsets.get(key, ()):
                raise HeaderError(f"a pop's answer lends no {offset} of queue {key.queue_id}")
            receipt = pop._replace(
                start_offset=starts.get(key, offset),
                kind=key.kind,
                queue_id=key.queue_id,
                queue_offset=offset,
            )
            message.local_retries = max(_times(counts, key, offset) - message.reconsume_times, 0)
        message.owner = Loan(place.topic, receipt, began_ms + receipt.invisible_ms)
    return messages


def read_long(ext: Mapping[str, str], name: str) -> int:
    """A number of an answer that can't be negative."""
    text = ext.get(name, "")
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= _LONG_MAX:
        return int(text)
    raise HeaderError(f"the answer has {text[:40]!r} for {name}, where a number is expected")


def _times(counts: OrderCounts, key: QueueKey, offset: int) -> int:
    """How often a message that is popped in order was lent before."""
    return counts.messages.get((key, offset), counts.queues.get(key, 0))
