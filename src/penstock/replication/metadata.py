"""The tables that a slave copies from its master: requests, pages, and when they may be used.

| Request | Table | May be used |
|---|---|---|
| GET_ALL_TOPIC_CONFIG, in pages | topics | at once |
| GET_ALL_SUBSCRIPTIONGROUP_CONFIG, in pages | groups | at once |
| GET_ALL_MESSAGE_REQUEST_MODE | request modes | at once |
| GET_ALL_CONSUMER_OFFSET | consumer offsets | when the log has arrived |
| GET_ALL_DELAY_OFFSET | offsets of the delay levels | when the log has arrived |
| GET_TIMER_CHECK_POINT | progress of the timer | when the log has arrived |

Offsets say what was delivered, and what was delivered is in the log. A slave that had the offsets
without the log would, as the new master, never deliver the messages in between. So it keeps them
aside until its log reaches the end that the master's log had after the offsets were read.

The functions do no I/O.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from penstock.errors import BodyError
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion, SubscriptionGroupConfig, TopicConfig
from penstock.wire.bodies.table_bodies import (
    ConsumerOffsetSerializeWrapper,
    DelayOffsetSerializeWrapper,
    SubscriptionGroupWrapper,
    TimerCheckpoint,
    TopicConfigSerializeWrapper,
)
from penstock.wire.codes import RequestCode
from penstock.wire.java_numbers import parse_int

PAGE_MAX: Final = 2_000
"""Entries of a page, as RocketMQ's slaves request them."""
BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Longest table in RocketMQ's JSON."""

DELIVERED_MS: Final = 15_000
"""What was delivered this long ago is in the master's saved offsets."""
LOG_ENDS_MS: Final = 150_000
"""How long past ends of the log are kept; an idle timer saves its progress every 60 s."""

OffsetKey = tuple[str, str, int]
"""Group, topic and queue id of a consumer offset."""

C = TypeVar("C", TopicConfig, SubscriptionGroupConfig)

_NUMBER_KEY: Final = re.compile(rb"([{,])(\d+):")


@dataclass(frozen=True, slots=True)
class PageFields:
    """A request with pages: its code and the names of its header fields."""

    code: int
    first: str
    count: str
    total: str


TOPIC_PAGES: Final = PageFields(
    RequestCode.GET_ALL_TOPIC_CONFIG, "topicSeq", "maxTopicNum", "totalTopicNum"
)
GROUP_PAGES: Final = PageFields(
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "groupSeq", "maxGroupNum", "totalGroupNum"
)


class TablePages(Generic[C]):
    """Collects the pages of a table. All of them have the same version: if the table changes, the
    master begins again with the first one."""

    def __init__(self, fields: PageFields, known: DataVersion) -> None:
        """`known` is the version of the slave's table."""
        self.fields = fields
        self.version: DataVersion | None = None
        self.unchanged = False
        """The slave has this version already; `entries` is not complete."""
        self.entries: dict[str, C] = {}
        self._known = known

    def request(self) -> dict[str, str]:
        """The header fields of the next request."""
        version = b"" if self.version is None else fastjson.encode(self.version)
        return {
            self.fields.first: str(len(self.entries)),
            self.fields.count: str(PAGE_MAX),
            "dataVersion": version.decode(),
        }

    def take(self, ext: Mapping[str, str], page: Mapping[str, C], version: DataVersion) -> bool:
        """Add a page; whether the table is complete. Raises BodyError if it never will be."""
        if version != self.version:
            self.entries.clear()
        self.version = version
        before = len(self.entries)
        self.entries.update(page)
        if version == self._known:
            self.unchanged = True
            return True
        total = parse_int(ext.get(self.fields.total, ""))
        if total is None or len(self.entries) >= total:
            return True
        if len(self.entries) == before:
            raise BodyError(f"the master has {total} entries but sent only {before}")
        return False


@dataclass(slots=True)
class HeldTables:
    """Tables that may be used when the slave's log reaches `log_end`."""

    offsets: ConsumerOffsetSerializeWrapper
    log_end: int = 0
    delivered_from: int = 0
    """What is not in the offsets was delivered behind this log offset."""
    delay: DelayOffsetSerializeWrapper | None = None
    timer: TimerCheckpoint | None = None
    ordered_pops: bytes | None = None
    sent: dict[OffsetKey, int] = field(default_factory=dict)
    """Offsets that consumers committed at the slave, and that the master has now."""


class LogEnds:
    """Past ends of a slave's log."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int, int]] = deque()

    def add(self, monotonic_ms: int, store_ms: int, offset: int) -> None:
        """Note the end of the log; `store_ms` is the store time of its last message."""
        self._ends.append((monotonic_ms, store_ms, offset))
        while self._ends[0][0] <= monotonic_ms - LOG_ENDS_MS:
            self._ends.popleft()

    def before(self, monotonic_ms: int, timer_ms: int) -> int:
        """A log offset; what the master's offsets lack was delivered behind it. 0 if unknown.

        `timer_ms` is the progress of the master's timer, by its clock; 0 if it has none.
        """
        for noted_ms, store_ms, offset in reversed(self._ends):
            old = noted_ms <= monotonic_ms - DELIVERED_MS
            if old and (timer_ms <= 0 or store_ms <= timer_ms - DELIVERED_MS):
                return offset
        return 0


def decode_topics(body: bytes) -> TopicConfigSerializeWrapper:
    """A page of GET_ALL_TOPIC_CONFIG."""
    return fastjson.decode(body, TopicConfigSerializeWrapper, loose_bytes_max=BODY_BYTES_MAX)


def decode_groups(body: bytes) -> SubscriptionGroupWrapper:
    """A page of GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
    return fastjson.decode(body, SubscriptionGroupWrapper, loose_bytes_max=BODY_BYTES_MAX)


def decode_offsets(body: bytes) -> ConsumerOffsetSerializeWrapper:
    """The body of GET_ALL_CONSUMER_OFFSET, whose queue ids are bare numbers.

    With quotes around them it is strict JSON, which is decoded 25 times as fast.
    """
    limits = {"bytes_max": BODY_BYTES_MAX, "loose_bytes_max": BODY_BYTES_MAX}
    try:
        strict = _NUMBER_KEY.sub(rb'\1"\2":', body)
        return fastjson.decode(
            strict, ConsumerOffsetSerializeWrapper, bytes_max=BODY_BYTES_MAX, loose_bytes_max=0
        )
    except BodyError:
        return fastjson.decode(body, ConsumerOffsetSerializeWrapper, **limits)


def commits_to_send(
    commits: Mapping[OffsetKey, int], offsets: ConsumerOffsetSerializeWrapper
) -> dict[OffsetKey, int]:
    """The commits at a slave that are ahead of the master's offsets.

    A smaller one is outdated: the consumer has committed more at the master since, or its offset
    was reset there.
    """
    ahead = {}
    for (group, topic, queue_id), offset in commits.items():
        known = offsets.offset_table.get(f"{topic}@{group}", {}).get(queue_id)
        if known is None or offset > known:
            ahead[group, topic, queue_id] = offset
    return ahead


def with_commits(offsets: ConsumerOffsetSerializeWrapper, commits: Mapping[OffsetKey, int]) -> None:
    """Add commits that are ahead to the master's offsets."""
    for (group, topic, queue_id), offset in commits_to_send(commits, offsets).items():
        offsets.offset_table.setdefault(f"{topic}@{group}", {})[queue_id] = offset
