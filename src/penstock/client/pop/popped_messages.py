"""Decodes responses to POP_MESSAGE: messages with their receipt handles.

The response header has the offsets of the messages by queue (`wire.receipt_handle`). Messages from
retry topics have their receipt handle and their original topic as properties.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.client.received_message import BadRecord, ReceivedMessage, decode_records
from penstock.errors import HeaderError, NotInFlight
from penstock.transport.peer import Response
from penstock.wire.codes import PROPERTY_POP_CK
from penstock.wire.java_numbers import parse_nonnegative
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
"""Most messages in one response."""


class PopTarget(NamedTuple):
    """Where messages are popped: a topic (with namespace) at a broker."""

    topic: str
    broker_name: str


@dataclass(slots=True)
class PopReceipt:
    """A popped message in flight: its receipt handle and its invisible time."""

    topic: str
    """The topic of the request, with namespace."""
    handle: Receipt
    visible_ms: int
    """When the message becomes visible again, by our monotonic clock."""
    acked: bool = False


def read_popped(
    answer: Response,
    target: PopTarget,
    *,
    shown_topic: str,
    now_ms: int,
    popped_ms: int,
    check_crc: bool = False,
) -> list[ReceivedMessage]:
    """The messages of a response to POP_MESSAGE with their receipts; raises HeaderError.

    `now_ms` is the time of day for `received_ms`; `popped_ms` is the monotonic time at which the
    invisible time starts.
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
        target.broker_name,
        0,
    )
    bad: list[BadRecord] = []
    messages = decode_records(
        answer.body,
        target.broker_name,
        topic=shown_topic,
        received_ms=now_ms,
        bad=bad,
        check_crc=check_crc,
    )
    _log_bad(target, bad)
    for message in messages:
        text = message.properties.get(PROPERTY_POP_CK)
        offset = message.queue_offset
        if text is not None:
            handle = parse_receipt(text)
            if handle.queue_offset is None:
                handle = handle._replace(queue_offset=offset)
        else:
            key = QueueKey(kind_of(message.stored_topic), message.queue_id)
            if starts and offset not in offsets.get(key, ()):
                raise HeaderError(
                    f"the response to a pop does not list offset {offset} of queue {key.queue_id}"
                )
            handle = pop._replace(
                start_offset=starts.get(key, offset),
                kind=key.kind,
                queue_id=key.queue_id,
                queue_offset=offset,
            )
            message.local_retries = max(_times(counts, key, offset) - message.reconsume_times, 0)
        message.pop_receipt = PopReceipt(target.topic, handle, popped_ms + handle.invisible_ms)
    return messages


def _log_bad(target: PopTarget, bad: list[BadRecord]) -> None:
    for record in bad:
        log.warning(
            "cannot decode a popped message of topic %s at broker %s: %s",
            target.topic,
            target.broker_name,
            record.problem,
        )


def read_long(ext: Mapping[str, str], name: str) -> int:
    """A header field that is a number of at least 0; raises HeaderError."""
    text = ext.get(name, "")
    number = parse_nonnegative(text)
    if number is None:
        raise HeaderError(f"the field {name} of a response is {text[:40]!r}, not a number")
    return number


def _times(counts: OrderCounts, key: QueueKey, offset: int) -> int:
    """How often a message of an ordered pop was popped before."""
    return counts.messages.get((key, offset), counts.queues.get(key, 0))


def receipt_of(message: ReceivedMessage) -> PopReceipt:
    """The receipt of a popped message; raises NotInFlight for any other."""
    receipt = message.pop_receipt
    if not isinstance(receipt, PopReceipt):
        raise NotInFlight(f"message {message.message_id} was not popped")
    return receipt
