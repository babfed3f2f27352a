"""Keeps the snapshot of a cluster up to date, with a fixed number of requests per interval.

In each interval the brokers are asked for their runtime information and their replication. The
tables of topics and groups are read less often. The figures of topics and groups are measured in
turn, the oldest first, up to a number per interval. While nobody uses the console, only the runtime
information is read, and once a minute the lag of some groups, for the charts: of those that were
furthest behind, and of others in turn.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from penstock.client.admin.admin_values import TopicKind
from penstock.client.admin.async_admin import AsyncAdmin, ElectionHistory, GroupInfo, TopicInfo
from penstock.console.monitoring.cluster_snapshot import (
    ClusterSnapshot,
    MeasuredGroup,
    TopicFigures,
)
from penstock.console.monitoring.history import History, Sample
from penstock.console.monitoring.lag import group_lag, group_lag_ms
from penstock.console.monitoring.lost_replicas import remember
from penstock.errors import PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import TopicStatsTable
from penstock.wire.codes import RequestCode

log = logging.getLogger(__name__)

TABLES_EVERY = 6
"""Intervals between two reads of the tables of topics and groups."""
TOPICS_PER_INTERVAL = 200
GROUPS_PER_INTERVAL = 50
CONCURRENT = 8
"""Requests at a time, so that measuring does not disturb the brokers."""
IDLE_S = 60.0
"""So long after its last use, nobody uses the console."""
IDLE_EVERY_S = 60.0
"""How often some groups are measured while nobody uses the console."""
IDLE_GROUPS = 50
"""Groups that are measured then, in turn."""
IDLE_BEHIND = 10
"""Groups that are measured then in addition: those that are furthest behind."""
RATE_SPAN_MS = 600_000
"""A rate is computed from two measurements that are at most this far apart."""

T = TypeVar("T")


class ClusterWatch:
    """The snapshot of a cluster, and the history of its figures."""

    def __init__(self, admin: AsyncAdmin, interval_s: float) -> None:
        self._admin = admin
        self._interval_s = interval_s
        self._clock = admin.session.clock
        self.snapshot = ClusterSnapshot()
        self.history = History()
        self.updated = asyncio.Event()
        """Set once there is a first snapshot."""
        self._wake = asyncio.Event()
        self._used_s = float("-inf")
        self._measured_s = float("-inf")
        self._tick = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def use(self) -> None:
        """Somebody looks at the console: measure topics and groups again."""
        now = _now_s()
        if now - self._used_s > IDLE_S:
            self._wake.set()
        self._used_s = now

    def refresh(self) -> None:
        """Something has changed: read the tables again now."""
        self._tick = 0
        self._wake.set()

    def lag_rounds_s(self) -> tuple[float, float]:
        """How long it takes to measure the lag of all groups: while somebody uses the console, and
        while nobody does."""
        count = sum(not info.is_system for info in self.snapshot.groups.values())
        return (
            -(-count // GROUPS_PER_INTERVAL) * self._interval_s,
            -(-count // IDLE_GROUPS) * IDLE_EVERY_S,
        )

    def measured_topic(self, name: str, figures: TopicFigures) -> None:
        """Add figures that a page has read."""
        self.snapshot = replace(
            self.snapshot, topic_figures={**self.snapshot.topic_figures, name: figures}
        )

    async def update(self) -> None:
        """Take one snapshot."""
        with_tables = self._tick % TABLES_EVERY == 0
        self._tick += 1
        now_ms = self._clock.now_ms()
        try:
            cluster = await self._admin.cluster()
            changed = replace(self.snapshot, at_ms=now_ms, cluster=cluster, problem="")
            if with_tables:
                topics, groups = await asyncio.gather(
                    self._admin.topics(), self._admin.groups(system=True)
                )
                changed = _with_tables(changed, topics, groups)
            if with_tables or self._is_used():
                changed = await self._with_replicas(changed)
            self.snapshot = changed
            if self._is_used():
                await self._measure(self._oldest_topics(), self._oldest_groups(GROUPS_PER_INTERVAL))
            elif _now_s() - self._measured_s >= IDLE_EVERY_S:
                behind = self._furthest_behind()
                others = self._oldest_groups(IDLE_GROUPS, without=behind)
                await self._measure([], [*behind, *others])
        except PenstockError as error:
            self._tick = 0  # read the tables as soon as the servers answer again
            self.snapshot = replace(self.snapshot, problem=error.remark())
        self._sample(now_ms)
        self.updated.set()

    # --- private

    async def _with_replicas(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """The state of replication, and the elections."""
        replicas = await self._admin.replicas()
        seen = remember(snapshot.seen, snapshot.cluster.brokers, replicas, snapshot.at_ms)
        # If no replica of a broker is registered, only earlier answers name its controllers.
        earlier = [one.status for one in seen.values() if one.status is not None]
        histories = await self._admin.election_histories([*earlier, *replicas])
        known = {history.broker: history for history in snapshot.histories}
        return replace(
            snapshot,
            replicas=replicas,
            seen=seen,
            histories=tuple(_not_forgotten(known.get(one.broker), one) for one in histories),
        )

    def _is_used(self) -> bool:
        return _now_s() - self._used_s < IDLE_S

    def _sample(self, now_ms: int) -> None:
        at = self.snapshot
        known = not at.problem
        measured = known and _now_s() - self._measured_s < 1.5 * IDLE_EVERY_S
        self.history.add(
            Sample(
                now_ms,
                rate_in=at.rate_in if known else None,
                rate_out=at.rate_out if known else None,
                lag=at.lag if measured else None,
                lag_ms=at.lag_ms if measured else None,
                disk_used=at.disk_used if known else None,
            )
        )

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.update()
            except Exception:  # a bug here must not end the updates of all pages
                log.exception("the snapshot of the cluster failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._interval_s)

    def _oldest_topics(self) -> list[str]:
        """The topics whose figures are the oldest."""
        at = self.snapshot
        return _oldest(
            (name for name, info in at.topics.items() if info.kind is not TopicKind.SYSTEM),
            lambda name: f.at_ms if (f := at.topic_figures.get(name)) else 0,
            TOPICS_PER_INTERVAL,
        )

    def _oldest_groups(self, count_max: int, without: Sequence[str] = ()) -> list[str]:
        """The groups whose figures are the oldest."""
        at = self.snapshot
        return _oldest(
            (
                name
                for name, info in at.groups.items()
                if not info.is_system and name not in without
            ),
            lambda name: f.at_ms if (f := at.group_figures.get(name)) else 0,
            count_max,
        )

    def _furthest_behind(self) -> list[str]:
        """The groups that determine the largest lag."""
        known = [(f.lag_ms, name) for name, f in self.snapshot.lags() if f.lag_ms]
        return [name for _, name in sorted(known, reverse=True)[:IDLE_BEHIND]]

    async def _measure(self, topics: Sequence[str], groups: Sequence[str]) -> None:
        """Measure these topics and groups."""
        self._measured_s = _now_s()
        limit = asyncio.Semaphore(CONCURRENT)
        of_topics = await asyncio.gather(*(self._topic(name, limit) for name in topics))
        of_groups = await asyncio.gather(*(self._group(name, limit) for name in groups))
        self.snapshot = replace(
            self.snapshot,
            topic_figures={**self.snapshot.topic_figures, **_found(topics, of_topics)},
            group_figures={**self.snapshot.group_figures, **_found(groups, of_groups)},
        )

    async def _topic(self, name: str, limit: asyncio.Semaphore) -> TopicFigures | None:
        info = self.snapshot.topics[name]
        async with limit:
            try:
                return await measure_topic(self._admin, self.snapshot, info, self._clock.now_ms())
            except PenstockError as error:
                log.debug("the figures of the topic %s are unknown: %s", name, error)
                return None

    async def _group(self, name: str, limit: asyncio.Semaphore) -> MeasuredGroup | None:
        async with limit:
            now_ms = self._clock.now_ms()
            try:
                progress = await self._admin.progress(name)
                members = await self._admin.members(name)
            except PenstockError as error:
                return MeasuredGroup(now_ms, None, None, None, None, (), problem=error.remark())
            partial = bool(progress.unreachable or members.unreachable)
            return MeasuredGroup(
                at_ms=now_ms,
                lag=group_lag(progress),
                lag_ms=group_lag_ms(progress),
                rate_out=None if partial else progress.tps,
                members=None if members.unreachable else len(members.members),
                topics=tuple(sorted({queue.queue.topic for queue in progress.queues})),
                model=members.model,
                partial=partial,
            )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def measure_topic(
    admin: AsyncAdmin, snapshot: ClusterSnapshot, info: TopicInfo, now_ms: int
) -> TopicFigures | None:
    """The figures of a topic: one request per broker that has it. None if none answers."""
    name = admin.session.with_namespace(info.name)
    masters = {state.broker.name: state.broker for state in snapshot.masters}
    known = [masters[broker] for broker in info.brokers if broker in masters]
    if not known:
        return None
    found = await admin.ask_each(known, RequestCode.GET_TOPIC_STATS_INFO, {"topic": name})
    offsets = [
        offset
        for _, answer in found.items
        for offset in fastjson.decode(answer.body, TopicStatsTable).offset_table.values()
    ]
    partial = bool(found.unreachable) or len(known) < len(info.brokers)
    stored = sum(offset.max_offset for offset in offsets)
    last_ms = max((offset.last_update_timestamp for offset in offsets), default=0)
    old = snapshot.topic_figures.get(info.name)
    return TopicFigures(
        at_ms=now_ms,
        stored=stored,
        messages=sum(offset.max_offset - offset.min_offset for offset in offsets),
        last_ms=last_ms if last_ms > 0 else None,
        rate_in=None if partial else _rate(old, stored, now_ms),
        partial=partial,
    )


def _rate(old: TopicFigures | None, stored: int, now_ms: int) -> float | None:
    """Messages per second since the last measurement."""
    if old is None or old.partial or not 0 < now_ms - old.at_ms <= RATE_SPAN_MS:
        return None
    if stored < old.stored:  # deleted and created again
        return None
    return (stored - old.stored) * 1000 / (now_ms - old.at_ms)


def _with_tables(
    snapshot: ClusterSnapshot, topics: Iterable[TopicInfo], groups: Iterable[GroupInfo]
) -> ClusterSnapshot:
    topic_table = {info.name: info for info in topics}
    group_table = {info.name: info for info in groups}
    return replace(
        snapshot,
        topics=topic_table,
        groups=group_table,
        topic_figures=_only(snapshot.topic_figures, topic_table),
        group_figures=_only(snapshot.group_figures, group_table),
    )


def _not_forgotten(old: ElectionHistory | None, new: ElectionHistory) -> ElectionHistory:
    """What was known, while no controller answers."""
    return new if new.problem is None or old is None else replace(old, problem=new.problem)


def _only(values: Mapping[str, T], names: Mapping[str, object]) -> dict[str, T]:
    return {name: value for name, value in values.items() if name in names}


def _oldest(names: Iterable[str], age: Callable[[str], int], count_max: int) -> list[str]:
    return sorted(names, key=age)[:count_max]


def _found(names: Iterable[str], values: Iterable[T | None]) -> dict[str, T]:
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}
