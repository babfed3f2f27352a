"""The lag of all groups, in messages and in time, for metrics.

The offsets are collected in the event loop, step by step. Store times of messages are read in the
thread pool, because they may be on the disk only. A store time never changes, so that of a message
that a group has not consumed since the last time is not read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from penstock.broker.admin.statistics import stored_ms

if TYPE_CHECKING:
    from penstock.broker.context import BrokerContext
    from penstock.store.consumequeue.consumequeue import ConsumeQueue

STEP_QUEUES = 1_000
"""Queues whose offsets are collected in one step: about 2 ms."""


First: TypeAlias = "tuple[ConsumeQueue, int]"
"""A queue and the offset of the first message that is missing."""


class GroupTopicLag(msgspec.Struct, gc=False):
    """A group in one topic. Times are those of the oldest message, None if there is none."""

    group: str
    topic: str
    lag: int
    """Messages that it has not committed."""
    ready: int
    """Messages that it has not pulled."""
    uncommitted: tuple[First, ...]
    unpulled: tuple[First, ...]
    uncommitted_ms: int | None = None
    unpulled_ms: int | None = None


class GroupLags:
    """The lags at the last `take`."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self.rows: list[GroupTopicLag] = []
        self.taken_ms = 0
        self.earliest_ms = -1
        """Store time of the first message of the log; -1: there is none."""
        # Queue and offset → store time, of the messages that were asked for the last time.
        self._known: dict[First, int] = {}
        self._asked: dict[First, int] = {}

    def collect(self) -> Iterator[list[GroupTopicLag]]:
        """The lags without times, in steps. In the event loop; `read` each step, then `take`."""
        context = self._context
        table = context.offsets.table.wrapper().offset_table
        self._asked = {}
        step: list[GroupTopicLag] = []
        queues = 0
        for key, offsets in list(table.items()):
            topic, _, group = key.rpartition("@")
            step.append(self._lag_of(group, topic, offsets))
            queues += len(offsets) + 1
            if queues >= STEP_QUEUES:
                yield step
                step, queues = [], 0
        yield step

    def _lag_of(self, group: str, topic: str, offsets: dict[int, int]) -> GroupTopicLag:
        context = self._context
        known = context.store.queues.topics.get(topic.encode(), {})
        pulled = context.offsets.pulled_in(group, topic)
        confirmed = context.store.confirm_offset
        lag = ready = 0
        uncommitted: list[First] = []
        unpulled: list[First] = []
        for queue_id, offset in offsets.items():
            queue = known.get(queue_id)
            if queue is None:
                continue
            first, end = queue.min_offset, queue.visible_max(confirmed)
            committed = offset if offset > first else first
            if end <= committed:
                continue
            lag += end - committed
            uncommitted.append((queue, committed))
            next_pull = max(pulled.get(queue_id, committed), committed)
            if end > next_pull:
                ready += end - next_pull
                unpulled.append((queue, next_pull))
        return GroupTopicLag(group, topic, lag, ready, tuple(uncommitted), tuple(unpulled))

    def read(self, step: list[GroupTopicLag]) -> None:
        """Read the store times of a step; may wait for the disk."""
        for one in step:
            one.uncommitted_ms = self._oldest(one.uncommitted)
            one.unpulled_ms = self._oldest(one.unpulled)

    def read_earliest(self, confirm_offset: int) -> None:
        """Read the store time of the first message of the log; may wait for the disk."""
        store = self._context.store
        begin = store.log.begin()
        self.earliest_ms = store.lookup.store_ms(begin) if begin < confirm_offset else -1

    def take(self, rows: list[GroupTopicLag], now_ms: int) -> None:
        """Show these from now on."""
        self.rows = rows
        self.taken_ms = now_ms
        self._known, self._asked = self._asked, {}

    def _oldest(self, messages: tuple[First, ...]) -> int | None:
        oldest = None
        for key in messages:
            time_ms = self._known.get(key) or self._asked.get(key)
            if time_ms is None:
                time_ms = stored_ms(self._context.store, *key)
            if time_ms > 0:  # a message that is not readable has no time
                self._asked[key] = time_ms
                if oldest is None or time_ms < oldest:
                    oldest = time_ms
        return oldest
