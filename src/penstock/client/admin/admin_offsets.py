"""Offsets of groups, changed in two steps: a plan that shows the changes, and its execution.

The offsets of a group with connected consumers are reset by INVOKE_BROKER_TO_RESET_OFFSET: the
broker stores the new offset, ignores commits until the next pull, and that pull continues at the
new offset. For a group without consumers the offset is just stored. A broker that leaves the reset
to its consumers (RocketMQ 4, or `useServerSideResetOffset=false`) can only reset to a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from penstock.client.admin.admin_browse import QueueView
from penstock.client.admin.admin_core import timestamp_ms
from penstock.client.admin.admin_groups import GroupAdmin
from penstock.client.admin.admin_values import BrokerAddress, QueueMove, ResetPlan, ResetResult
from penstock.errors import InvalidParameter, PenstockError, Refused
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ResetOffsetBody, TopicOffset, TopicStatsTable
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import RequestCode
from penstock.wire.java_properties import parse_properties

FIRST_MS = 0
LAST_MS = -1
_BROADCASTING = "BROADCASTING"

ResetTo: TypeAlias = datetime | Literal["first", "last"] | int | Mapping[MessageQueue, int]
"""A time; the first or last message; a number of messages forward (negative: back); offsets by
queue."""


class OffsetAdmin(GroupAdmin):
    """The part of `AsyncAdmin` about offsets of groups."""

    async def plan_reset(self, group: str, topic: str, to: ResetTo) -> ResetPlan:
        """The changes of a reset in each queue; changes nothing yet.

        `to` is a time (the first message that was stored then or later), "first", "last", a number
        of messages to move forward (negative: back), or an offset for each queue to change. A move
        by a number skips queues without an offset.
        """
        name = self.session.with_namespace(topic)
        ends = await self._ends(name)
        if isinstance(to, Mapping):
            targets = {self.full_queue(queue): offset for queue, offset in to.items()}
            self._check_targets(topic, targets, ends)
            return await self._plan(group, topic, targets)
        if to == "first":
            first = {queue: end.min_offset for queue, end in ends.items()}
            return await self._plan(group, topic, first, at_ms=FIRST_MS)
        if to == "last":
            last = {queue: end.max_offset for queue, end in ends.items()}
            return await self._plan(group, topic, last, at_ms=LAST_MS)
        if isinstance(to, datetime):
            at_ms = timestamp_ms(to)
            queues = sorted(ends)
            view = QueueView(self)
            found = await self.for_each(queues, lambda queue: view.offset_at(queue, at_ms))
            then = dict(zip(queues, found, strict=True))
            return await self._plan(group, topic, then, at_ms=at_ms)
        if isinstance(to, bool) or not isinstance(to, int):
            raise InvalidParameter(
                f"{to!r} is not a target of a reset",
                hint='pass a datetime, "first", "last", a number of messages, or offsets by queue',
            )
        old = await self._committed_offsets(group, sorted(ends))
        moved = {
            queue: min(max(at + to, ends[queue].min_offset), ends[queue].max_offset)
            for queue, at in old.items()
            if at is not None
        }
        return await self._plan(group, topic, moved)

    async def plan_clone(self, source: str, group: str, topic: str) -> ResetPlan:
        """The changes if a group gets the offsets of the group `source`; changes nothing yet."""
        queues = sorted(await self._ends(self.session.with_namespace(topic)))
        committed = await self._committed_offsets(source, queues)
        targets = {queue: offset for queue, offset in committed.items() if offset is not None}
        if not targets:
            raise InvalidParameter(
                f"the group {source!r} has no offsets in the topic {topic!r}",
                hint="check the names of group and topic; topics_of_group() lists its topics",
            )
        return await self._plan(group, topic, targets)

    async def apply_reset(self, plan: ResetPlan) -> ResetResult:
        """Execute a plan. Raises if all of it failed; the result contains partial failures."""
        outcomes = [
            await self._apply_at(name, plan)
            for name in sorted({move.queue.broker_name for move in plan.moves})
        ]
        done = tuple(move for outcome in outcomes for move in outcome.done)
        failed = tuple(failure for outcome in outcomes for failure in outcome.failed)
        if failed and not done:
            raise failed[0][1]
        back = [QueueMove(move.queue, move.new, move.old) for move in done if move.old is not None]
        return ResetResult(
            moves=done,
            live=tuple(outcome.broker_name for outcome in outcomes if outcome.is_live),
            failed=failed,
            undo=ResetPlan(plan.group, plan.topic, tuple(back)),
        )

    async def clone_offsets(self, source: str, group: str, topic: str) -> ResetResult:
        """Give a group the offsets of the group `source`."""
        return await self.apply_reset(await self.plan_clone(source, group, topic))

    # --- planning

    async def _ends(self, name: str) -> dict[MessageQueue, TopicOffset]:
        """The first and last offset of all queues; all brokers of the topic must respond."""
        masters = await self.masters()
        known = await self._settings_at(masters, name)
        if not known:
            raise await self.session.nameservers.no_route(name)
        ends: dict[MessageQueue, TopicOffset] = {}
        for broker in masters:
            config = known.get(broker.name)
            if config is None:
                continue
            answer = await self.ask(
                broker.address, RequestCode.GET_TOPIC_STATS_INFO, {"topic": name}
            )
            table = fastjson.decode(answer.body, TopicStatsTable).offset_table
            ends |= {q: end for q, end in table.items() if q.queue_id < config.read_queue_nums}
        return ends

    async def _committed_offsets(
        self, group: str, queues: Iterable[MessageQueue]
    ) -> dict[MessageQueue, int | None]:
        brokers = {broker.name: broker for broker in await self.masters()}
        name = self.session.with_namespace(group)
        wanted = list(queues)
        found = await self.for_each(
            wanted, lambda queue: self._committed(brokers[queue.broker_name], name, queue)
        )
        return dict(zip(wanted, found, strict=True))

    async def _plan(
        self, group: str, topic: str, targets: Mapping[MessageQueue, int], at_ms: int | None = None
    ) -> ResetPlan:
        committed = await self._committed_offsets(group, sorted(targets))
        moves = tuple(
            QueueMove(self.bare_queue(queue), old, targets[queue])
            for queue, old in committed.items()
        )
        return ResetPlan(group, topic, moves, at_ms)

    def _check_targets(
        self,
        topic: str,
        targets: Mapping[MessageQueue, int],
        ends: Mapping[MessageQueue, TopicOffset],
    ) -> None:
        for queue, offset in targets.items():
            end = ends.get(queue)
            where = f"queue {queue.queue_id} of {topic} at {queue.broker_name}"
            if end is None:
                raise InvalidParameter(
                    f"there is no {where}", hint="describe_topic() lists the queues"
                )
            if not end.min_offset <= offset <= end.max_offset:
                raise InvalidParameter(
                    f"{where} has the offsets {end.min_offset} to {end.max_offset}, not {offset}",
                    hint="choose an offset in this range",
                )

    # --- applying

    async def _apply_at(self, broker_name: str, plan: ResetPlan) -> "_Outcome":
        moves = [move for move in plan.moves if move.queue.broker_name == broker_name]
        group = self.session.with_namespace(plan.group)
        try:
            broker = await self.broker(broker_name)
            is_live = await self._is_live(broker, group)
            if is_live and not await self._moves_consumers(broker):
                done = await self._reset_by_time(broker, group, plan, moves)
                return _Outcome(broker_name, True, done)
        except PenstockError as error:
            return _Outcome(broker_name, False, [], [(move, error) for move in moves])
        outcome = _Outcome(broker_name, is_live)
        for move in moves:
            try:
                outcome.done.append(await self._move(broker, group, move, is_live=is_live))
            except PenstockError as error:
                outcome.failed.append((move, error))
        return outcome

    async def _is_live(self, broker: BrokerAddress, group: str) -> bool:
        """Whether consumers of the group are connected to a broker."""
        found = await self._connections([broker], group)
        table = found.items[0][1]
        if table is not None and table.message_model == _BROADCASTING and table.connection_set:
            raise Refused(
                f"the consumers of {group} at {broker.name} broadcast: each keeps its own offsets",
                hint="start them with another start_at instead",
            )
        return table is not None and bool(table.connection_set)

    async def _moves_consumers(self, broker: BrokerAddress) -> bool:
        """Whether the broker resets the offsets; if not, its consumers do."""
        answer = await self.ask(broker.address, RequestCode.GET_BROKER_CONFIG)
        return parse_properties(answer.body).get("useServerSideResetOffset") == "true"

    async def _move(
        self, broker: BrokerAddress, group: str, move: QueueMove, *, is_live: bool
    ) -> QueueMove:
        """Change the offset of one queue; it may have changed since the plan was made."""
        queue = self.full_queue(move.queue)
        old = await self._committed(broker, group, queue)
        if not is_live:
            fields = {
                "consumerGroup": group,
                "topic": queue.topic,
                "queueId": str(queue.queue_id),
                "commitOffset": str(move.new),
            }
            await self.ask(broker.address, RequestCode.UPDATE_CONSUMER_OFFSET, fields)
            if await self._committed(broker, group, queue) == move.new:
                return QueueMove(move.queue, old, move.new)
        # Also if an earlier reset still waits for a consumer: it would replace the stored offset.
        fields = _reset_fields(group, queue.topic, FIRST_MS)
        fields |= {"queueId": str(queue.queue_id), "offset": str(move.new)}
        await self.ask(broker.address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
        return QueueMove(move.queue, old, move.new)

    async def _reset_by_time(
        self, broker: BrokerAddress, group: str, plan: ResetPlan, moves: list[QueueMove]
    ) -> list[QueueMove]:
        if plan.at_ms is None:
            raise Refused(
                f"{broker.name} ({broker.address}) leaves a reset to its connected consumers, "
                "which can only reset to a time",
                hint="stop the consumers first, reset to a time, or set useServerSideResetOffset",
            )
        topic = self.session.with_namespace(plan.topic)
        old = {move.queue: move.old for move in moves}
        fields = _reset_fields(group, topic, plan.at_ms)
        answer = await self.ask(broker.address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
        table = fastjson.decode(answer.body, ResetOffsetBody).offset_table
        return [
            QueueMove(queue, old.get(queue), offset)
            for queue, offset in sorted((self.bare_queue(q), n) for q, n in table.items())
        ]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result at one broker."""

    broker_name: str
    is_live: bool
    done: list[QueueMove] = field(default_factory=list)
    failed: list[tuple[QueueMove, PenstockError]] = field(default_factory=list)


def _reset_fields(group: str, topic: str, at_ms: int) -> dict[str, str]:
    return {"topic": topic, "group": group, "timestamp": str(at_ms), "isForce": "true"}
