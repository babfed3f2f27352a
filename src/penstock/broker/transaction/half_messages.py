"""Open halves: messages of transactions that wait for their commit or rollback.

A half is appended when it is sent, and again when a check of it has been counted. What is known of
it as one is its first append; the newest append is the one that counts in the store: it holds the
message, and an op message that names it ends the half.

    first    queue offset of the first append, with its log offset `origin`
    newest   queue offset of the newest one, with its log offset `place`

    RESTING → READY → ASKED → RESTING …   a check is due, a producer was asked, it does not know
                    └ DOOMED              checked too often, or nobody could be asked for too long
    CLOSED                                committed or rolled back

Cost model: an open half is one object of a few numbers, about 420 bytes with its places in the
tables; 100,000 of them cost 42 MB. Those that end before the half queue is followed up to them
(within a second or so) are never read at all.
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
from penstock.wire.message import decode_properties
from penstock.wire.record import PROPERTIES_BYTES_MAX, RECORD, StoredRecord

RESTING, READY, ASKED, DOOMED, CLOSED = range(5)
COMMITTED, ROLLED_BACK = 1, 2

ENDED_MAX: Final = 65_536
"""Halves whose outcome is remembered; of older ones the index tells."""
NOWHERE: Final = -1
"""Log offset of a first append that another broker made and that is not known."""

_HALF: Final = TOPIC_TRANS_HALF.encode()
_DIGITS_MAX: Final = 18
_STALE_LEAST: Final = 1024
"""Outdated entries that are not worth to be cleared away."""


class HalfRecord(NamedTuple):
    """One append of a half, without its body."""

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
        """How many checks were counted when it was appended."""
        return number(self.properties.get(PROPERTY_TRANSACTION_CHECK_TIMES), 0)

    @property
    def first(self) -> int:
        """Queue offset of its first append, as far as it tells: else its own."""
        first = number(self.properties.get(PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET), NOWHERE)
        return first if 0 <= first < self.queue_offset else self.queue_offset

    @property
    def since_ms(self) -> int:
        """When its first append was stored, as far as it tells."""
        again = self.checks > 0 or self.first != self.queue_offset
        return min(self.born_ms, self.store_ms) if again else self.store_ms

    def immunity_ms(self, settings: Settings) -> int:
        """How long it is left in peace after it was sent: never longer than messages are kept, as
        the log is kept for it."""
        seconds = number(self.properties.get(PROPERTY_CHECK_IMMUNITY_SECONDS), 0)
        asked_ms = min(seconds * 1000, settings.store.retain_hours * 3_600_000)
        return max(asked_ms, settings.broker.transaction_timeout_ms)


def number(text: str | None, default: int) -> int:
    """A number without sign that a property holds; the default if it does not."""
    if text and text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
        return int(text)
    return default


def with_checks(properties: dict[str, str], checks: int) -> dict[str, str]:
    """Properties that tell how many checks there were, if there is room for that."""
    more = {**properties, PROPERTY_TRANSACTION_CHECK_TIMES: str(checks)}
    return more if fits(more) else properties


def fits(properties: dict[str, str], spare: int = 0) -> bool:
    """Whether a message can have these properties and so many bytes more."""
    length = sum(len(name.encode()) + len(value.encode()) + 2 for name, value in properties.items())
    return length + spare <= PROPERTIES_BYTES_MAX


def read_half(data: bytes) -> HalfRecord | None:
    """What a record says as a half; None if it is none."""
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
    """A group of producers that has open halves."""

    name: str
    halves: int = 0
    asked: int = 0  # that wait for an answer
    turn: int = 0
    goes_on_at: int = -1  # there are more to be asked when only so many wait for an answer
    ready: deque["Half"] = field(default_factory=deque)  # to be asked; may hold others too


@dataclass(slots=True, eq=False)
class Half:
    """One open half."""

    first: int
    origin: int
    newest: int
    place: int
    size: int
    group: ProducerGroup
    topic: str
    since_ms: int
    checks: int  # counted
    noted: int  # counted as its newest append says
    state: int = RESTING
    due_ms: int = 0  # when something becomes of it by itself
    asked: int = 0  # the connection that was asked last
    fixed: bool = False  # can't be appended again
    key: str = ""  # unique id, where only that leads from an older append to it

    @property
    def prepared(self) -> int:
        """The log offset by which a message that was committed names its half."""
        return self.origin if self.origin >= 0 else self.place


class Halves:
    """The open halves of a broker, and the outcomes of those that ended lately."""

    def __init__(self) -> None:
        self.open: dict[int, Half] = {}  # by newest append
        self.position = 0  # the half queue was followed up to here
        self.groups: dict[str, ProducerGroup] = {}
        self.topics: Counter[str] = Counter()
        self._moved: dict[int, Half] = {}  # by first append, where there are several
        self._strays: dict[str, Half] = {}  # by unique id, where the first append is unknown
        self._ended: dict[int, int] = {}  # outcome by first append, and by newest
        self._line: deque[int] = deque()  # newest appends below `position`, and outdated ones

    def find(self, first: int) -> Half | None:
        """The open half whose first append this is."""
        return self._moved.get(first) or self.open.get(first)

    def find_like(self, record: HalfRecord) -> Half | None:
        """The open half that a record is an append of."""
        half = self.find(record.first)
        if half is None and self._strays:
            half = self._strays.get(record.key)
            if half is not None and half.group.name != record.group:
                return None
        return half

    def outcome(self, queue_offset: int) -> int | None:
        """What became of a half lately, by its first or newest append."""
        return self._ended.get(queue_offset)

    def is_known(self, queue_offset: int) -> bool:
        """Whether nothing has to be read to know what an entry of the half queue is."""
        return queue_offset in self.open or queue_offset in self._ended

    def admit(self, record: HalfRecord, origin: int, older: Half | None = None) -> Half | None:
        """Take up a half that was read; None if it was known, or is outdated.

        `older` is a half that it is known to be another append of.
        """
        known = older or self.find(record.first)
        if record.first in self._ended:
            return None
        if known is not None:
            if record.queue_offset > known.newest:
                self.move(known, record.queue_offset, record.log_offset, record.size)
                known.checks = known.noted = record.checks
                return known
            return None
        group = self.groups.get(record.group)
        if group is None:
            name = intern(record.group)
            group = self.groups[name] = ProducerGroup(name)
        half = Half(
            record.first,
            origin,
            record.queue_offset,
            record.log_offset,
            record.size,
            group,
            intern(record.topic),
            record.since_ms,
            record.checks,
            record.checks,
        )
        group.halves += 1
        self.topics[half.topic] += 1
        self.open[half.newest] = half
        if half.first != half.newest:
            self._moved[half.first] = half
        elif record.checks > 0 and record.key:  # appended again by a broker that does not say more
            half.key = record.key
            half.origin = NOWHERE
            self._strays[half.key] = half
        return half

    def move(self, half: Half, newest: int, place: int, size: int) -> None:
        """A half was appended once more."""
        del self.open[half.newest]
        half.newest, half.place, half.size = newest, place, size
        self.open[newest] = half
        self._moved[half.first] = half

    def close(self, half: Half, outcome: int) -> None:
        """A half has ended."""
        if half.state == ASKED:
            half.group.asked -= 1
        half.state = CLOSED
        del self.open[half.newest]
        self._moved.pop(half.first, None)
        if half.key and self._strays.get(half.key) is half:
            del self._strays[half.key]
        group = half.group
        group.halves -= 1
        if group.halves == 0:
            del self.groups[group.name]
        self.topics[half.topic] -= 1
        if self.topics[half.topic] == 0:
            del self.topics[half.topic]
        self._ended[half.newest] = outcome  # this one first: `forget` relies on it
        self._ended[half.first] = outcome

    def passed(self, queue_offset: int) -> None:
        """The half queue was followed beyond this entry."""
        if queue_offset in self.open:
            self._line.append(queue_offset)
            if len(self._line) > 2 * len(self.open) + _STALE_LEAST:
                self._line = deque(newest for newest in self._line if newest in self.open)
        self.position = queue_offset + 1

    def forget(self) -> None:
        """Forget old outcomes, but none of which an append is still to be followed."""
        ended = self._ended
        for queue_offset in list(islice(ended, max(len(ended) - ENDED_MAX, 0))):
            if queue_offset >= self.position:
                return
            del ended[queue_offset]

    def oldest_ones(self, count: int) -> list[Half]:
        """The halves whose newest appends are the oldest."""
        self.oldest()
        return [self.open[newest] for newest in islice(self._line, count) if newest in self.open]

    def oldest(self) -> Half | None:
        """The half whose newest append is the oldest, of those that were followed."""
        line = self._line
        while line and line[0] not in self.open:
            line.popleft()
        return self.open[line[0]] if line else None
