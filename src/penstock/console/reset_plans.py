"""Reset plans that were shown, and those that undo what was applied.

A preview is kept in memory: what is applied is exactly what was shown. The plan that restores the
old offsets is stored in the database, so that an undo is possible after a restart.
"""

import secrets
from collections import OrderedDict

import msgspec

from penstock.client.admin.async_admin import QueueMove, ResetPlan
from penstock.console.security.database import Database
from penstock.errors import InvalidParameter
from penstock.wire.bodies.client_bodies import MessageQueue

PREVIEWS_MAX = 1_000
RECENT = 10
_Row = tuple[str, int, int, int]


class ResetPlans:
    """Previews and undo plans by token."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._previews: OrderedDict[str, ResetPlan] = OrderedDict()

    def keep(self, plan: ResetPlan) -> str:
        """Remember a preview; returns its token."""
        token = secrets.token_urlsafe(12)
        self._previews[token] = plan
        while len(self._previews) > PREVIEWS_MAX:
            self._previews.popitem(last=False)
        return token

    def take(self, token: str) -> ResetPlan:
        """The preview with this token, once."""
        plan = self._previews.pop(token, None)
        if plan is None:
            raise InvalidParameter(
                "this plan was applied already, or the console was restarted",
                hint="make a new preview",
            )
        return plan

    async def applied(self, undo: ResetPlan, user: str, now_ms: int) -> str:
        """Store the plan that undoes a reset; returns its token."""
        token = secrets.token_urlsafe(12)
        rows = [
            (move.queue.broker_name, move.queue.queue_id, move.old, move.new) for move in undo.moves
        ]
        await self._database.change(
            "insert into reset (token, at_ms, user, consumer_group, topic, undo, undone) "
            "values (?, ?, ?, ?, ?, ?, 0)",
            *(token, now_ms, user, undo.group, undo.topic, msgspec.json.encode(rows).decode()),
        )
        return token

    async def undo(self, group: str, token: str) -> ResetPlan:
        """The plan that restores the offsets before a reset, once."""
        rows = await self._database.rows(
            "update reset set undone = 1 where token = ? and consumer_group = ? and undone = 0 "
            "returning topic, undo",
            *(token, group),
        )
        if not rows:
            raise InvalidParameter("this reset is unknown, or was undone already")
        topic, text = rows[0]
        moves = msgspec.json.decode(text, type=list[_Row])
        return ResetPlan(
            group,
            topic,
            tuple(
                QueueMove(MessageQueue(topic, broker, queue), old, new)
                for broker, queue, old, new in moves
            ),
        )

    async def recent(self, group: str) -> list[dict[str, object]]:
        """The last resets of a group."""
        rows = await self._database.rows(
            "select token, at_ms, user, topic, undo, undone from reset where consumer_group = ? "
            "order by at_ms desc limit ?",
            *(group, RECENT),
        )
        return [
            {
                "token": token,
                "at_ms": at_ms,
                "user": user,
                "topic": topic,
                "queues": len(msgspec.json.decode(undo)),
                "undone": bool(undone),
            }
            for token, at_ms, user, topic, undo, undone in rows
        ]
