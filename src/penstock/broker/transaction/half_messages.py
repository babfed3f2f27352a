"""Open half messages: messages of transactions that wait for their commit or rollback.

A half message is appended when it is sent, and appended again when a check has been counted. Its
first append identifies it. The newest append is the valid one: it holds the message, and the op
message that resolves the half message names it.

    first_offset, first_log_offset   queue offset and log offset of the first append
    queue_offset, log_offset         queue offset and log offset of the newest append

    WAITING → READY → CHECKING → WAITING …   a check is due, a producer was asked, it did not know
                    └ DISCARDING             too many checks, or no producer for too long
    RESOLVED                                 committed or rolled back

Cost model: an open half message is one object of about 420 bytes, table entries included; 100,000
of them cost 42 MB. Half messages that are resolved before the queue is followed up to them (within
about a second) are never read.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from sys import intern
from typing import Final, NamedTuple

from penstock.config import Settings
from penstock.wire.codes import (
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
    PROPERTY_UNIQ_KEY,
    TOPIC_TRANS_HALF,
)
from penstock.wire.java_numbers import parse_nonnegative
from penstock.wire.message import decode_properties
from penstock.wire.record import PROPERTIES_BYTES_MAX, RECORD, StoredRecord

WAITING, READY, CHECKING, DISCARDING, RESOLVED = range(5)
COMMITTED, ROLLED_BACK = 1, 2

OUTCOMES_MAX: Final = 65_536
"""Half messages whose outcome is kept in memory; older outcomes are looked up in the index."""
UNKNOWN_OFFSET: Final = -1
"""Log offset of a first append that another broker wrote and that can't be determined."""

_HALF: Final = TOPIC_TRANS_HALF.encode()
STALE_ENTRIES_MIN: Final = 1024
"""Stale entries that a table may hold before it is compacted."""


class HalfRecord(NamedTuple):
    """One append of a half message, without its body."""

    queue_offset: int
    log_offset: int
    size: int
    store_ms: int
    born_ms: int
    prepared_offset: int
    properties: dict[str, str]

    @property
    def group(self) -> str:
        return self.properties.get(PROPERTY_PRODUCER_GROUP, "")

    @property
    def topic(self) -> str:
        return self.properties.get(PROPERTY_REAL_TOPIC, "")

    @property
    def key(self) -> str:
        return self.properties.get(PROPERTY_UNIQ_KEY, "")

    @property
    def checks(self) -> int:
        """The number of checks that had been counted when it was appended."""
        return parse_number(self.properties.get(PROPERTY_TRANSACTION_CHECK_TIMES), 0)

    @property
    def first_offset(self) -> int:
        """Queue offset of the first append if the record names it, else its own."""
        first_offset = parse_number(
            self.properties.get(PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET), UNKNOWN_OFFSET
        )
        return first_offset if 0 <= first_offset < self.queue_offset else self.queue_offset

    @property
    def first_store_ms(self) -> int:
        """When the first append was stored, as far as the record tells."""
        again = self.checks > 0 or self.first_offset != self.queue_offset
        return min(self.born_ms, self.store_ms) if again else self.store_ms

    def immunity_ms(self, settings: Settings) -> int:
        """How long after the send it is not checked: at most the retention time, because open half
        messages keep the log from being deleted."""
        seconds = parse_number(self.properties.get(PROPERTY_CHECK_IMMUNITY_SECONDS), 0)
        asked_ms = min(seconds * 1000, settings.store.retain_hours * 3_600_000)
        return max(asked_ms, settings.broker.transaction_timeout_ms)


def parse_number(text: str | None, default: int) -> int:
    """The unsigned number in a property, or the default if it holds none."""
    number = parse_nonnegative(text or "")
    return default if number is None else number


def with_checks(properties: dict[str, str], checks: int) -> dict[str, str]:
    """The properties with the number of checks, if they stay within the size limit."""
    more = {**properties, PROPERTY_TRANSACTION_CHECK_TIMES: str(checks)}
    return more if properties_fit(more) else properties


def properties_fit(properties: dict[str, str], spare: int = 0) -> bool:
    """Whether these properties and `spare` more bytes are within the size limit of a record."""
    length = sum(len(name.encode()) + len(value.encode()) + 2 for name, value in properties.items())
    return length + spare <= PROPERTIES_BYTES_MAX


def read_half(data: bytes) -> HalfRecord | None:
    """The fields of a half message's record; None if it is another record."""
    stored = StoredRecord()
    stored.bind(memoryview(bytearray(data or b"\0")))
    if stored.read(0, len(data)) != RECORD or stored.queue_id != 0:
        return None
    if data[stored.topic_at : stored.topic_at + stored.topic_length] != _HALF:
        return None
    text = data[stored.properties_at : stored.properties_at + stored.properties_length]
    return HalfRecord(
        stored.queue_offset,
        stored.physical_offset,
        stored.size,
        stored.store_ms,
        stored.born_ms,
        stored.prepared_offset,
        decode_properties(text),
    )


@dataclass(slots=True, eq=False)
class ProducerGroup:
    """A producer group that has open half messages; with access lists, those of one topic, because
    not every producer of the group may be asked about every topic."""

    name: str
    topic: str = ""
    open_count: int = 0
    in_flight: int = 0  # checks that wait for an answer
    round_robin: int = 0
    resume_at: int = -1  # send more checks when `in_flight` has fallen to this; -1: none are held
    ready: deque["HalfMessage"] = field(default_factory=deque)  # to be checked; and stale entries


@dataclass(slots=True, eq=False)
class HalfMessage:
    """One open half message."""

    first_offset: int
    first_log_offset: int
    queue_offset: int
    log_offset: int
    size: int
    group: ProducerGroup
    topic: str
    first_store_ms: int
    checks: int  # counted so far
    stored_checks: int  # the number in the newest append
    state: int = WAITING
    due_ms: int = 0  # when the next step of its state is due
    asked_client: int = 0  # the connection that was asked last
    unmovable: bool = False  # its record can't be appended again
    key: str = ""  # unique id, if older appends can only be found by it

    @property
    def prepared_offset(self) -> int:
        """The log offset by which the committed message refers to its half message."""
        return self.first_log_offset if self.first_log_offset >= 0 else self.log_offset


class OpenHalfMessages:
    """The open half messages of a broker, and the latest outcomes."""

    def __init__(self, *, by_topic: bool = False) -> None:
        """With `by_topic` the half messages of a group are checked topic by topic."""
        self._by_topic = by_topic
        self.open: dict[int, HalfMessage] = {}  # by queue offset of the newest append
        self.position = 0  # the half queue has been followed up to this queue offset
        self.groups: dict[tuple[str, str], ProducerGroup] = {}
        self.topics: Counter[str] = Counter()
        self._by_first_offset: dict[int, HalfMessage] = {}  # those that were appended again
        self._by_key: dict[str, HalfMessage] = {}  # by unique id, if the first append is unknown
        self._outcomes: dict[int, int] = {}  # by queue offset of the first and the newest append
        self._in_order: deque[int] = deque()  # newest appends below `position`; and stale entries

    def find(self, first_offset: int) -> HalfMessage | None:
        """The open half message with this first append."""
        return self._by_first_offset.get(first_offset) or self.open.get(first_offset)

    def find_by_record(self, record: HalfRecord) -> HalfMessage | None:
        """The open half message that a record is an append of."""
        half = self.find(record.first_offset)
        if half is None and self._by_key:
            half = self._by_key.get(record.key)
            if half is not None and half.group.name != record.group:
                return None
        return half

    def outcome(self, queue_offset: int) -> int | None:
        """The outcome of a recently resolved half message, by its first or newest append."""
        return self._outcomes.get(queue_offset)

    def is_known(self, queue_offset: int) -> bool:
        """Whether an entry of the half queue is known without reading its record."""
        return queue_offset in self.open or queue_offset in self._outcomes

    def add(
        self, record: HalfRecord, first_log_offset: int, older: HalfMessage | None = None
    ) -> HalfMessage | None:
        """Add a half message that was read; None if it is known already, or outdated.

        `older` is the half message that the record is another append of, if that is known.
        """
        known = older or self.find(record.first_offset)
        if record.first_offset in self._outcomes:
            return None
        if known is not None:
            if record.queue_offset > known.queue_offset:
                self.move(known, record.queue_offset, record.log_offset, record.size)
                known.checks = known.stored_checks = record.checks
                return known
            return None
        key = (record.group, record.topic if self._by_topic else "")
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = ProducerGroup(intern(record.group), intern(key[1]))
        half = HalfMessage(
            record.first_offset,
            first_log_offset,
            record.queue_offset,
            record.log_offset,
            record.size,
            group,
            intern(record.topic),
            record.first_store_ms,
            record.checks,
            record.checks,
        )
        group.open_count += 1
        self.topics[half.topic] += 1
        self.open[half.queue_offset] = half
        if half.first_offset != half.queue_offset:
            self._by_first_offset[half.first_offset] = half
        elif record.checks > 0 and record.key:  # appended again without naming its first append
            half.key = record.key
            half.first_log_offset = UNKNOWN_OFFSET
            self._by_key[half.key] = half
        return half

    def move(self, half: HalfMessage, queue_offset: int, log_offset: int, size: int) -> None:
        """Record that a half message was appended again."""
        del self.open[half.queue_offset]
        half.queue_offset, half.log_offset, half.size = queue_offset, log_offset, size
        self.open[queue_offset] = half
        self._by_first_offset[half.first_offset] = half

    def resolve(self, half: HalfMessage, outcome: int) -> None:
        """Remove a half message that was committed or rolled back."""
        if half.state == CHECKING:
            half.group.in_flight -= 1
        half.state = RESOLVED
        del self.open[half.queue_offset]
        self._by_first_offset.pop(half.first_offset, None)
        if half.key and self._by_key.get(half.key) is half:
            del self._by_key[half.key]
        group = half.group
        group.open_count -= 1
        if group.open_count == 0:
            del self.groups[group.name, group.topic]
        self.topics[half.topic] -= 1
        if self.topics[half.topic] == 0:
            del self.topics[half.topic]
        self._outcomes[half.queue_offset] = (
            outcome  # before the other: `forget_outcomes` relies on it
        )
        self._outcomes[half.first_offset] = outcome

    def advance_past(self, queue_offset: int) -> None:
        """Record that the half queue has been followed past this entry."""
        if queue_offset in self.open:
            self._in_order.append(queue_offset)
            if len(self._in_order) > 2 * len(self.open) + STALE_ENTRIES_MIN:
                self._in_order = deque(offset for offset in self._in_order if offset in self.open)
        self.position = queue_offset + 1

    def forget_outcomes(self) -> None:
        """Drop the oldest outcomes, except those of entries that have not been followed yet."""
        outcomes = self._outcomes
        for queue_offset in list(islice(outcomes, max(len(outcomes) - OUTCOMES_MAX, 0))):
            if queue_offset >= self.position:
                return
            del outcomes[queue_offset]

    def oldest_first(self, count: int) -> list[HalfMessage]:
        """Up to `count` half messages, in the order of their newest appends."""
        self.oldest()
        return [
            self.open[offset] for offset in islice(self._in_order, count) if offset in self.open
        ]

    def oldest(self) -> HalfMessage | None:
        """The half message with the oldest newest append, of those that have been followed."""
        in_order = self._in_order
        while in_order and in_order[0] not in self.open:
            in_order.popleft()
        return self.open[in_order[0]] if in_order else None
