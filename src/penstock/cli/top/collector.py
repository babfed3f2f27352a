"""Reads the state of a cluster for `penstock top`.

The number of requests of a refresh does not depend on the number of topics:

| request | to | how often |
|---|---|---|
| GET_BROKER_CLUSTER_INFO | a NameServer | each refresh |
| GET_BROKER_RUNTIME_INFO | each broker | each refresh |
| GET_BROKER_HA_STATUS, GET_BROKER_EPOCH_CACHE | each broker | each refresh, if there are slaves |
| GET_BROKER_CONSUME_STATS | each master | each refresh, but at most a tenth of the time |
| QUERY_CONSUME_TIME_SPAN | masters | for the largest lags, AGES_MAX topics at most |
| GET_ALL_TOPIC_LIST_FROM_NAMESERVER | a NameServer | every TOPICS_EVERY_S |
| GET_TOPIC_STATS_INFO | masters | TOPIC_QUERIES_MAX topics without a group, in turn |
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cli.top.group_figures import GroupFigures, TopicOfGroup, largest, sum_up
from penstock.cli.top.screen_snapshot import (
    BrokerRow,
    CounterRates,
    GroupRow,
    ScreenSnapshot,
    TopicRow,
)
from penstock.errors import PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumeStatsList, TopicStatsTable
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    RequestCode,
    ResponseCode,
    is_system_group,
    is_system_topic,
)

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import (
        AsyncAdmin,
        BrokerAddress,
        BrokerState,
        ReplicaStatus,
    )

TOPICS_EVERY_S = 30.0
TOPIC_QUERIES_MAX = 32
AGES_MAX = 60
LOAD_SHARE = 10
"""A request that takes a second is repeated after ten."""


class Collector:
    """Reads one snapshot after another and keeps what rates need."""

    def __init__(self, admin: "AsyncAdmin", cluster: str | None, *, system: bool) -> None:
        self._admin = admin
        self._cluster = cluster
        self._system = system
        self._rates = CounterRates()
        self._figures: GroupFigures | None = None
        self._figures_s = 0.0
        self._figures_due_s = 0.0
        self._names: list[str] | None = None
        self._names_s = 0.0
        self._ends: dict[str, int] = {}
        """Topics without a group: the sums of their next offsets."""
        self._turn = 0
        self._group_notes: tuple[str, ...] = ()

    async def read(self, *, all_groups: bool = False) -> ScreenSnapshot:
        """Read the present state; raises if no NameServer answers.

        With `all_groups` the figures of groups are read also if the last time was just now.
        """
        state = await self._admin.cluster(self._cluster)
        masters = [
            one.broker for one in state.brokers if one.broker.is_master and one.problem is None
        ]
        replicas: Iterable[ReplicaStatus] = ()
        if any(not one.broker.is_master for one in state.brokers):
            replicas = await self._admin.replicas(self._cluster)
        await self._read_groups(masters, now=all_groups)
        await self._read_topics(masters)
        ages = await self._read_ages(masters)
        now_s = time.monotonic()
        return ScreenSnapshot(
            time_ms=time.time_ns() // 1_000_000,
            nameservers=tuple(state.nameservers),
            brokers=tuple(_broker_rows(state.brokers, replicas)),
            topics=tuple(self._topic_rows()),
            groups=tuple(self._group_rows(ages)),
            topic_count=None if self._names is None else len(self._names),
            group_seconds=None if self._figures is None else round(now_s - self._figures_s, 1),
            notes=(*_broker_notes(state.brokers), *self._group_notes, *self._topic_notes()),
        )

    # --- groups

    async def _read_groups(self, masters: "list[BrokerAddress]", *, now: bool) -> None:
        began_s = time.monotonic()
        if began_s < self._figures_due_s and not now:
            return
        answers, notes = [], []
        results = await asyncio.gather(
            *(self._consume_stats(broker) for broker in masters), return_exceptions=True
        )
        for broker, result in zip(masters, results, strict=True):
            if isinstance(result, ConsumeStatsList):
                answers.append(result)
            elif isinstance(result, PenstockError):
                notes.append(f"groups of {broker.name} are unknown: {result.message}")
            else:
                raise result
        self._group_notes = tuple(notes)
        plain = self._admin.session.without_namespace
        self._figures = sum_up(answers, self._is_wanted, plain) if answers else None
        self._figures_s = time.monotonic()
        self._figures_due_s = began_s + LOAD_SHARE * (self._figures_s - began_s)
        if self._figures is not None:
            for topic, end in self._figures.next_offsets.items():
                self._rates.read(topic, end, self._figures_s)

    async def _consume_stats(self, broker: "BrokerAddress") -> ConsumeStatsList:
        answer = await self._admin.ask(
            broker.address, RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}
        )
        return fastjson.decode(answer.body, ConsumeStatsList)

    def _is_wanted(self, group: str, topic: str) -> bool:
        if not (self._admin.is_ours(group) and (self._admin.is_ours(topic) or "%" in topic)):
            return False
        return self._system or not (is_system_group(group) or is_system_topic(topic))

    async def _read_ages(self, masters: "list[BrokerAddress]") -> dict[str, float]:
        """Group → age in seconds of its oldest message, for the largest lags."""
        figures = self._figures
        if figures is None:
            return {}
        asked = largest(figures.lagging, AGES_MAX)
        results = await asyncio.gather(*(self._age_of(key, masters) for key in asked))
        # A group's age is known if all of its topics with a lag were asked and answered.
        known: dict[str, float] = {
            name: 0.0 for name, lag in figures.lags.items() if not lag and not self._group_notes
        }
        complete = {group for group, _ in asked} - {
            group for group, topic in figures.lagging if (group, topic) not in asked
        }
        failed = {group for (group, _), age in zip(asked, results, strict=True) if age is None}
        plain = self._admin.session.without_namespace
        for (group, _), age in zip(asked, results, strict=True):
            if age is not None and group in complete - failed:
                known[plain(group)] = max(known.get(plain(group), 0.0), age)
        return known

    async def _age_of(self, key: TopicOfGroup, masters: "list[BrokerAddress]") -> float | None:
        group, topic = key
        oldest = None
        for broker in masters:
            try:
                ages = await self._admin.oldest_ages(broker, group, topic)
            except PenstockError:  # a broker without this topic, or that is gone
                continue
            if ages:
                oldest = max(oldest or 0, *ages.values())
        return None if oldest is None else oldest / 1000

    def _group_rows(self, ages: dict[str, float]) -> Iterable[GroupRow]:
        figures = self._figures
        if figures is None:
            return
        for name, topics in figures.topics_of.items():
            yield GroupRow(
                name,
                lag=figures.lags[name],
                lag_seconds=ages.get(name),
                out_per_second=figures.rates[name],
                topics=len(topics),
            )

    # --- topics

    async def _read_topics(self, masters: "list[BrokerAddress]") -> None:
        now_s = time.monotonic()
        if self._names is None or now_s - self._names_s >= TOPICS_EVERY_S:
            names = await self._admin.topic_names()
            own = {name for broker in masters for name in (broker.name, broker.cluster)}
            self._names = [name for name in names if self._system or _is_users(name, own)]
            self._names_s = now_s
            self._rates.keep(dict.fromkeys(names))
            self._ends = {name: end for name, end in self._ends.items() if name in set(names)}
        consumed = self._figures.next_offsets if self._figures is not None else {}
        idle = [name for name in self._names if name not in consumed]
        queried = _in_turn(idle, self._turn, TOPIC_QUERIES_MAX)
        self._turn = (self._turn + len(queried)) % max(len(idle), 1)
        await asyncio.gather(*(self._read_topic(name, masters) for name in queried))

    async def _read_topic(self, name: str, masters: "list[BrokerAddress]") -> None:
        full = self._admin.session.with_namespace(name)
        total = 0
        for broker in masters:
            try:
                answer = await self._admin.ask(
                    broker.address,
                    RequestCode.GET_TOPIC_STATS_INFO,
                    {"topic": full},
                    good=(ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST),
                )
            except PenstockError:  # it is unknown until the next turn
                return
            if answer.code == ResponseCode.SUCCESS:
                table = fastjson.decode(answer.body, TopicStatsTable).offset_table
                total += sum(at.max_offset for at in table.values())
        self._ends[name] = total
        self._rates.read(name, total, time.monotonic())

    def _topic_rows(self) -> Iterable[TopicRow]:
        figures = self._figures
        consumed = {} if figures is None else figures.next_offsets
        for name in self._names or ():
            if figures is not None and name in consumed:
                yield TopicRow(
                    name,
                    in_per_second=self._rates.rate(name),
                    out_per_second=figures.topic_rates[name],
                    next_offsets=consumed[name],
                    groups=len(figures.groups_of[name]),
                )
            elif name in self._ends:
                unknown = bool(self._group_notes) or figures is None
                yield TopicRow(
                    name,
                    in_per_second=self._rates.rate(name),
                    out_per_second=None if unknown else 0.0,
                    next_offsets=self._ends[name],
                    groups=None if unknown else 0,
                )

    def _topic_notes(self) -> Iterable[str]:
        rated = sum(1 for name in self._names or () if self._rates.rate(name) is not None)
        if self._names and rated < len(self._names):
            yield (
                f"the rates of {rated:,} of {len(self._names):,} topics are known so far; "
                "a rate needs two readings"
            )


# --- pure --------------------------------------------------------------------------------------


def _is_users(topic: str, own: set[str]) -> bool:
    """Whether it is neither a system topic nor one that brokers register for themselves."""
    return not (
        is_system_topic(topic)
        or topic in own
        or topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
        or topic.endswith("_REPLY_TOPIC")
    )


def _in_turn(names: list[str], first: int, count: int) -> list[str]:
    """Some of the names, starting with this index and continuing at the start."""
    if len(names) <= count:
        return names
    first %= len(names)
    return (names[first:] + names[:first])[:count]


def _broker_rows(
    states: "Iterable[BrokerState]", replicas: "Iterable[ReplicaStatus]"
) -> Iterable[BrokerRow]:
    status = {replica.broker: replica for replica in replicas}
    for state in sorted(states, key=lambda state: state.broker):
        row = _broker_row(state)
        replica = status.get(state.broker)
        if replica is not None:
            row = replace(
                row,
                role=replica.role or row.role,
                behind_bytes=replica.behind,
                in_sync=replica.in_sync,
                problem=row.problem or replica.error or None,
            )
        yield row


def _broker_row(state: "BrokerState") -> BrokerRow:
    broker, info = state.broker, state.runtime_info
    raw = {} if info is None else info.raw
    log_bytes = None
    if info is not None and info.log_end is not None and info.log_begin is not None:
        log_bytes = info.log_end - info.log_begin
    memory = raw.get("penstockMemoryBytes", "")
    return BrokerRow(
        cluster=broker.cluster,
        name=broker.name,
        id=broker.id,
        address=broker.address,
        version=None
        if info is None
        else f"penstock {info.penstock_version}"
        if info.penstock_version
        else info.version,
        role=raw.get("penstockRole") or (None if info is None else _role(broker.id)),
        in_per_second=None if info is None else info.put_tps,
        out_per_second=None if info is None else info.get_tps,
        in_today=None if info is None else info.put_today,
        out_today=None if info is None else info.get_today,
        disk_used=None if info is None else info.disk_used,
        log_bytes=log_bytes,
        memory_bytes=int(memory) if memory.isdecimal() else None,
        started_ms=None if info is None else info.started_ms,
        behind_bytes=None,
        in_sync=None,
        problem=None if state.problem is None else str(state.problem),
    )


def _role(broker_id: int) -> str:
    return "master" if broker_id == 0 else "slave"


def _broker_notes(states: "Iterable[BrokerState]") -> Iterable[str]:
    for state in states:
        if state.problem is not None:
            yield f"{state.broker.name} {state.broker.id} does not answer: {state.problem.message}"
