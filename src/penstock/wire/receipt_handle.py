"""Receipt handles of popped messages, the offset fields of a pop response, and POP's retry topics.

A receipt handle (the header field `extraInfo`, the property POP_CK) consists of words:

    startOffset popTime invisibleTime reviveQueueId kind broker queueId queueOffset

`startOffset` identifies the pop, `queueOffset` the message. A pop response has three fields. Their
items are joined by `;`, the words of an item by blanks:

    startOffsetInfo   kind queueId startOffset                  one item per queue
    msgOffsetInfo     kind queueId offset,offset,…              in the order of the messages
    orderCountInfo    kind queueId times                        how often a queue was popped before
                      kind qo<queueId>%<offset> times           and one of its messages

`kind` says which topic a queue belongs to: the requested one, or the retry topic of the group and
that topic, whose name has two forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar

from penstock.errors import HeaderError
from penstock.wire.codes import (
    POP_ORDER_REVIVE_QUEUE,
    POP_RETRY_SEPARATOR_V1,
    POP_RETRY_SEPARATOR_V2,
    RETRY_TOPIC_PREFIX,
)
from penstock.wire.java_numbers import INT_MAX, LONG_MAX, parse_nonnegative

INFO_CHARS_MAX: Final = 1024 * 1024
"""Longest offset field that is parsed: 32 messages from each of a thousand queues."""

_OFFSET_KEY: Final = "qo"

K = TypeVar("K")
V = TypeVar("V")


class RetryKind(StrEnum):
    """Which topic a popped message comes from."""

    NORMAL = "0"
    V1 = "1"  # %RETRY%group_topic
    V2 = "2"  # %RETRY%group+topic


class Receipt(NamedTuple):
    """A receipt handle: it acknowledges a popped message, or changes its invisible time."""

    start_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue_id: int
    kind: RetryKind
    broker_name: str
    queue_id: int
    queue_offset: int | None = None  # old clients leave it out: the header has it too

    @property
    def ordered(self) -> bool:
        """Whether it was popped in order: such pops are not in the revive log."""
        return self.revive_queue_id == POP_ORDER_REVIVE_QUEUE

    @property
    def visible_ms(self) -> int:
        """When the message is visible again if it is not acknowledged."""
        return self.pop_ms + self.invisible_ms

    def format(self) -> str:
        """The receipt handle as text."""
        words = [*self] if self.queue_offset is not None else [*self[:-1]]
        return " ".join(map(str, words))


def parse_receipt(text: str) -> Receipt:
    """Parse a receipt handle; words behind the eighth are ignored."""
    words = text[:1024].split(" ")
    if len(words) < 7:
        raise HeaderError(
            f"the receipt handle {text[:80]!r} has {len(words)} words instead of at least 7"
        )
    return Receipt(
        _number(text, words[0], LONG_MAX),
        _number(text, words[1], LONG_MAX),
        _number(text, words[2], LONG_MAX),
        _number(text, words[3], INT_MAX),
        _kind(text, words[4]),
        words[5],
        _number(text, words[6], INT_MAX),
        _number(text, words[7], LONG_MAX) if len(words) > 7 else None,
    )


# --- retry topics --------------------------------------------------------------------------------


def retry_topic(topic: str, group: str, kind: RetryKind = RetryKind.V1) -> str:
    """The topic that a receipt handle of this kind refers to, for the requested topic."""
    if kind is RetryKind.NORMAL:
        return topic
    separator = POP_RETRY_SEPARATOR_V2 if kind is RetryKind.V2 else POP_RETRY_SEPARATOR_V1
    return f"{RETRY_TOPIC_PREFIX}{group}{separator}{topic}"


def kind_of(topic: str) -> RetryKind:
    """The kind of a topic in receipt handles and responses."""
    if not topic.startswith(RETRY_TOPIC_PREFIX):
        return RetryKind.NORMAL
    return RetryKind.V2 if POP_RETRY_SEPARATOR_V2 in topic else RetryKind.V1


def plain_topic(topic: str, group: str) -> str:
    """The topic of one of the group's POP retry topics; any other topic is returned as is."""
    for separator in (POP_RETRY_SEPARATOR_V2, POP_RETRY_SEPARATOR_V1):
        prefix = f"{RETRY_TOPIC_PREFIX}{group}{separator}"
        if topic.startswith(prefix) and len(topic) > len(prefix):
            return topic[len(prefix) :]
    return topic


def split_retry_topic(topic: str) -> tuple[str, str] | None:
    """Group and topic of a retry topic of kind V2; None for any other topic.

    V1 can't be split: names contain its separator too.
    """
    if kind_of(topic) is not RetryKind.V2:
        return None
    group, _, plain = topic[len(RETRY_TOPIC_PREFIX) :].partition(POP_RETRY_SEPARATOR_V2)
    return (group, plain) if group and plain and POP_RETRY_SEPARATOR_V2 not in plain else None


# --- offset fields of a pop response -------------------------------------------------------------


class QueueKey(NamedTuple):
    """A queue in a pop response."""

    kind: RetryKind
    queue_id: int


class OrderCounts(NamedTuple):
    """How often queues, and messages by offset, were popped before."""

    queues: dict[QueueKey, int]
    messages: dict[tuple[QueueKey, int], int]


def format_start_offsets(starts: Mapping[QueueKey, int]) -> str:
    """The field startOffsetInfo."""
    return ";".join(f"{key.kind} {key.queue_id} {start}" for key, start in starts.items())


def format_message_offsets(offsets: Mapping[QueueKey, Sequence[int]]) -> str:
    """The field msgOffsetInfo."""
    return ";".join(
        f"{key.kind} {key.queue_id} {','.join(map(str, those))}" for key, those in offsets.items()
    )


def format_order_counts(
    key: QueueKey, queue_times: int, message_times: Iterable[tuple[int, int]]
) -> str:
    """The items of one queue in orderCountInfo; `message_times` are offsets with their counts."""
    items = [f"{key.kind} qo{key.queue_id}%{offset} {times}" for offset, times in message_times]
    return ";".join([*items, f"{key.kind} {key.queue_id} {queue_times}"])


def parse_start_offsets(text: str) -> dict[QueueKey, int]:
    """startOffsetInfo by queue."""
    found: dict[QueueKey, int] = {}
    for kind, place, value in _items(text):
        _put(text, found, _queue(text, kind, place), _number(text, value, LONG_MAX))
    return found


def parse_message_offsets(text: str) -> dict[QueueKey, list[int]]:
    """msgOffsetInfo by queue."""
    found: dict[QueueKey, list[int]] = {}
    for kind, place, value in _items(text):
        offsets = [_number(text, offset, LONG_MAX) for offset in value.split(",")]
        _put(text, found, _queue(text, kind, place), offsets)
    return found


def parse_order_counts(text: str) -> OrderCounts:
    """orderCountInfo, by queue and by message."""
    counts = OrderCounts({}, {})
    for kind, place, value in _items(text):
        times = _number(text, value, INT_MAX)
        if place.startswith(_OFFSET_KEY):
            queue_id, _, offset = place.removeprefix(_OFFSET_KEY).partition("%")
            key = _queue(text, kind, queue_id)
            _put(text, counts.messages, (key, _number(text, offset, LONG_MAX)), times)
        else:
            _put(text, counts.queues, _queue(text, kind, place), times)
    return counts


def _items(text: str) -> Iterator[tuple[str, str, str]]:
    if len(text) > INFO_CHARS_MAX:
        raise HeaderError.over(
            "offsets of a pop response", figure=len(text), limit=INFO_CHARS_MAX, unit="characters"
        )
    for item in text.split(";") if text else ():
        words = item.split(" ")
        if len(words) != 3:
            raise HeaderError(f"an item of {text[:80]!r} has {len(words)} words instead of 3")
        yield words[0], words[1], words[2]


def _queue(text: str, kind: str, queue_id: str) -> QueueKey:
    return QueueKey(_kind(text, kind), _number(text, queue_id, INT_MAX))


def _put(text: str, found: dict[K, V], key: K, value: V) -> None:
    if key in found:
        raise HeaderError(f"a queue or message occurs twice in {text[:80]!r}")
    found[key] = value


def _kind(text: str, word: str) -> RetryKind:
    try:
        return RetryKind(word)
    except ValueError:
        raise HeaderError(
            f"{text[:80]!r} contains the topic kind {word[:20]!r}, which is not 0 to 2"
        ) from None


def _number(text: str, word: str, most: int) -> int:
    number = parse_nonnegative(word)
    if number is None or number > most:
        raise HeaderError(f"{text[:80]!r} contains {word[:20]!r} instead of a number")
    return number
