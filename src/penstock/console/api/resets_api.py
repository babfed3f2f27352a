"""Resets of a group's offsets: preview, apply, undo."""

from collections.abc import Iterable
from typing import Any

from penstock.client.admin.async_admin import QueueMove, ResetResult, ResetTo
from penstock.console.endpoints import ApiCall, endpoint, parse_time
from penstock.console.group_names import need_group
from penstock.console.security.accounts import Role
from penstock.errors import InvalidParameter
from penstock.wire.bodies.client_bodies import MessageQueue


@endpoint(
    "POST",
    "/groups/{name}/reset/preview",
    Role.OPERATE,
    body={
        "topic": "the topic",
        "to": "first, last, time, shift, offsets or group",
        "time": "for time: as in a search",
        "shift": "for shift: messages forward; negative: back",
        "offsets": "for offsets: list of {broker, queue, offset}",
        "group": "for group: the group whose offsets are copied",
    },
)
async def preview(call: ApiCall) -> object:
    """What a reset would change in each queue. Nothing changes yet.

    The group must exist; an offset of an unknown group would create one.
    """
    group, topic = call.path("name"), call.given("topic", str)
    kind = call.given("to", str)
    if kind == "group":
        source = call.given("group", str)
        await need_group(call.admin, group)
        await need_group(call.admin, source)
        plan = await call.admin.plan_clone(source, group, topic)
    else:
        target = _target(call, kind, topic)
        await need_group(call.admin, group)
        plan = await call.admin.plan_reset(group, topic, target)
    return {
        "token": call.console.resets.keep(plan),
        "group": plan.group,
        "topic": plan.topic,
        "skipped": plan.skipped,
        "repeated": plan.repeated,
        "moves": _moves(plan.moves),
    }


@endpoint(
    "POST", "/groups/{name}/reset/apply", Role.OPERATE, body={"token": "the token of the preview"}
)
async def apply(call: ApiCall) -> object:
    """Apply exactly the changes of a preview. The response has the token that undoes them."""
    plan = call.console.resets.take(call.given("token", str))
    if plan.group != call.path("name"):
        raise InvalidParameter("the preview is of another group", hint="make a new preview")
    result = await call.admin.apply_reset(plan)
    token = await call.console.resets.applied(result.undo, call.login.name, call.console.now_ms())
    return {**_result(result), "undo": token}


@endpoint(
    "POST", "/groups/{name}/reset/undo", Role.OPERATE, body={"token": "the `undo` of a reset"}
)
async def undo(call: ApiCall) -> object:
    """Restore the offsets before a reset. Queues that had no offset keep the new one."""
    plan = await call.console.resets.undo(call.path("name"), call.given("token", str))
    if not plan.moves:
        raise InvalidParameter(
            "no queue had an offset before this reset, so there is none to restore"
        )
    return _result(await call.admin.apply_reset(plan))


@endpoint("GET", "/groups/{name}/resets", Role.VIEW)
async def recent(call: ApiCall) -> object:
    """The last resets of a group by this console."""
    return {"rows": await call.console.resets.recent(call.path("name"))}


def _target(call: ApiCall, kind: str, topic: str) -> ResetTo:
    if kind == "first":
        return "first"
    if kind == "last":
        return "last"
    if kind == "shift":
        return call.given("shift", int)
    if kind == "time":
        time = parse_time("time", call.given("time", str), call.console.now_ms())
        if time is None:
            raise InvalidParameter("the time is missing")
        return time
    if kind == "offsets":
        return {
            MessageQueue(topic, str(row["broker"]), int(row["queue"])): int(row["offset"])
            for row in _rows(call.given("offsets", list))
        }
    raise InvalidParameter(
        f"{kind[:40]!r} is not a target of a reset",
        hint="use first, last, time, shift, offsets or group",
    )


def _rows(rows: list[Any]) -> Iterable[dict[str, Any]]:
    for row in rows:
        if not isinstance(row, dict) or not {"broker", "queue", "offset"} <= set(row):
            raise InvalidParameter("offsets must be a list of {broker, queue, offset}")
        yield row


def _result(result: ResetResult) -> dict[str, object]:
    return {
        "moves": _moves(result.moves),
        "live": list(result.live),
        "failed": [
            {**_moves([move])[0], "problem": error.remark()} for move, error in result.failed
        ],
    }


def _moves(moves: Iterable[QueueMove]) -> list[dict[str, object]]:
    return [
        {
            "broker": move.queue.broker_name,
            "queue": move.queue.queue_id,
            "old": move.old,
            "new": move.new,
            "skipped": move.skipped,
        }
        for move in moves
    ]
