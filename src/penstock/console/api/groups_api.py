"""Consumer groups: list, describe, create, change, delete."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.client.admin.admin_values import QueueProgress
from penstock.client.admin.async_admin import GroupInfo
from penstock.client.diagnosis.explain import explain_group
from penstock.console.api.overview_api import first_snapshot
from penstock.console.change_preview import group_preview, need_confirmation, preview_json
from penstock.console.endpoints import ApiCall, endpoint
from penstock.console.group_names import find_group, no_group
from penstock.console.messages.facts import facts_json
from penstock.console.monitoring.cluster_snapshot import ClusterSnapshot
from penstock.console.monitoring.group_work import GroupWork, OldestInWork, read_group_work
from penstock.console.monitoring.lag import group_lag, group_lag_ms, queue_lag, queue_lag_ms
from penstock.console.paging import PARAMETERS, page_of
from penstock.console.security.accounts import Role
from penstock.errors import InvalidParameter
from penstock.wire.codes import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

BEHIND_MS = 10_000
"""A group whose oldest waiting message is younger is up to date."""

_CHANGES: Mapping[str, tuple[type, str]] = {
    "consume_enabled": (bool, "whether members may consume"),
    "broadcast_enabled": (bool, "whether members may broadcast"),
    "orderly": (bool, "whether the group consumes in order"),
    "retries_max": (int, "attempts before a message becomes a dead letter"),
    "retry_queues": (int, "queues of the retry topic"),
    "consume_timeout_minutes": (int, "time limit of a handler"),
}


@endpoint(
    "GET",
    "/groups",
    parameters={**PARAMETERS, "state": "all (default), behind, offline or current"},
)
async def list_groups(call: ApiCall) -> object:
    """One page of the groups. Figures that were not measured yet are null.

    `lag` is a number of messages that are not consumed yet; `lag_ms` is the age of the oldest.
    """
    await first_snapshot(call)
    at = call.console.watch.snapshot
    query, state = call.text("query").lower(), call.text("state", "all")
    named = [
        info for info in at.groups.values() if not info.is_system and query in info.name.lower()
    ]
    found = [info for info in named if state == "all" or _state(at, info) == state]
    return {
        **page_of(call, found, _keys(at), lambda info: _row(at, info)),
        "at_ms": at.at_ms or None,
        "ready": call.console.watch.updated.is_set(),
        "problem": at.problem or None,
        "measured": sum(info.name in at.group_figures for info in found),
    }


@endpoint("GET", "/groups/{name}")
async def describe(call: ApiCall) -> object:
    """A group: its members, its progress in each queue, its subscriptions and settings.

    `lag` is a number of messages that are not consumed yet; `lag_ms` is the age of the oldest.

    `oldest_in_work` is the oldest message that a member has received and not acknowledged, with its
    store time, and with the time since when it is in work if the member tells it. It is null if
    nothing is in work, or if it is unknown; then `oldest_in_work_problem` says why.
    """
    name, admin = call.path("name"), call.admin
    infos = {info.name: info for info in await admin.groups(system=True)}
    members = await admin.members(name)
    info = infos.get(name)
    if info is None and not members.members:
        raise no_group(name, infos)
    progress = await admin.progress(name)
    work = await read_group_work(admin, name, [member.client_id for member in members.members])
    dead = call.console.watch.snapshot.topic_figures.get(DLQ_TOPIC_PREFIX + name)
    return {
        "name": name,
        "lag": group_lag(progress),
        "lag_ms": group_lag_ms(progress),
        "rate_out": progress.tps,
        "model": members.model,
        "consume_type": members.consume_type,
        "start_at": members.start_at,
        "dead_letters": dead.messages if dead is not None else None,
        "has_dead_letters": DLQ_TOPIC_PREFIX + name in call.console.watch.snapshot.topics,
        "unreachable": sorted({*progress.unreachable, *members.unreachable}),
        "silent_members": list(work.silent),
        "oldest_in_work": _oldest_row(work.oldest),
        "oldest_in_work_problem": work.problem,
        "members": [
            {
                "client_id": member.client_id,
                "address": member.address,
                "language": member.language,
                "version": member.version_text,
                "brokers": list(member.brokers),
                "queues": sum(one.client_id == member.client_id for one in work.queues.values()),
            }
            for member in members.members
        ],
        "subscriptions": [
            {"topic": one.topic, "expression": one.expression, "type": one.kind}
            for one in members.subscriptions
        ],
        "topics": sorted({one.queue.topic for one in progress.queues}),
        "queues": [_queue_row(one, work) for one in progress.queues],
        "settings": {
            broker: {field: getattr(settings, field) for field in _CHANGES}
            for broker, settings in (info.brokers if info is not None else {}).items()
        },
    }


def _queue_row(one: QueueProgress, work: GroupWork) -> dict[str, object]:
    """The progress in a queue, and which member has it."""
    queue = one.queue
    owner = work.queues.get(queue)
    return {
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "max_offset": one.max_offset,
        "committed": one.committed,
        "pulled": one.pulled,
        "lag": queue_lag(one),
        "lag_ms": queue_lag_ms(one),
        "consumed_ms": one.consumed_ms,
        "client_id": owner.client_id if owner else None,
        "in_work": owner.count if owner else None,
        "oldest_offset": owner.oldest_offset if owner else None,
        "last_consume_ms": owner.last_consume_ms if owner else None,
    }


def _oldest_row(oldest: OldestInWork | None) -> dict[str, object] | None:
    if oldest is None:
        return None
    return {
        "topic": oldest.queue.topic,
        "broker": oldest.queue.broker_name,
        "queue": oldest.queue.queue_id,
        "offset": oldest.offset,
        "store_ms": oldest.store_ms,
        "since_ms": oldest.work.since_ms,
        "client_id": oldest.work.client_id,
    }


@endpoint("GET", "/groups/{name}/explain")
async def explain(call: ApiCall) -> object:
    """The state of a group: the facts, the verdict, the next command."""
    found = await explain_group(call.admin, call.path("name"))
    return {
        "group": found.group,
        "verdict": found.verdict.value,
        "healthy": found.is_healthy,
        "text": found.text,
        "command": found.command,
        "partial": list(found.partial),
        "facts": facts_json(found.facts),
    }


@endpoint(
    "POST",
    "/groups",
    Role.OPERATE,
    body={"name": "name of the group", **{name: text for name, (_, text) in _CHANGES.items()}},
)
async def create(call: ApiCall) -> object:
    """Create a group on all masters."""
    name = call.given("name", str)
    if name in call.console.watch.snapshot.groups:
        raise InvalidParameter(
            f"the group {name} exists already", hint="change its settings instead"
        )
    await call.admin.create_group(name, **_changes(call))
    call.console.watch.refresh()
    return {"name": name}


@endpoint(
    "POST",
    "/groups/{name}/preview",
    Role.OPERATE,
    body={name: text for name, (_, text) in _CHANGES.items()},
)
async def preview(call: ApiCall) -> object:
    """What a change would do on each broker, as the preview of a topic. Nothing changes yet."""
    info = await find_group(call.admin, call.path("name"))
    return preview_json(group_preview(info, _changes(call)), ())


@endpoint(
    "PUT",
    "/groups/{name}",
    Role.OPERATE,
    body={
        **{name: text for name, (_, text) in _CHANGES.items()},
        "confirm": "true: also make a change that removes something",
    },
)
async def change(call: ApiCall) -> object:
    """Change the given settings of a group on all brokers that have it, and keep the others.

    A change with losses (see the preview) is refused without `confirm`.
    """
    name, changes = call.path("name"), _changes(call)
    if not changes:
        raise InvalidParameter("no setting is given", hint="give the settings to change")
    info = await find_group(call.admin, name)
    need_confirmation(group_preview(info, changes), call.given("confirm", bool, False))
    await call.admin.update_group(name, **changes)
    call.console.watch.refresh()
    return {"name": call.path("name")}


@endpoint("DELETE", "/groups/{name}", Role.OPERATE, body={"confirm": "the name of the group again"})
async def delete(call: ApiCall) -> object:
    """Delete a group with its offsets, its retry topic and its dead letters."""
    name = call.path("name")
    if call.given("confirm", str, "") != name:
        raise InvalidParameter(
            f"deleting {name} deletes its offsets and dead letters",
            hint="repeat its name as confirm",
        )
    brokers = await call.admin.delete_group(name)
    call.console.watch.refresh()
    return {"deleted": name, "brokers": brokers}


def _changes(call: ApiCall) -> dict[str, Any]:
    return {
        name: call.given(name, kind)
        for name, (kind, _) in _CHANGES.items()
        if call.body.get(name) is not None
    }


def _state(at: ClusterSnapshot, info: GroupInfo) -> str:
    figures = at.group_figures.get(info.name)
    if figures is not None and figures.members == 0 and figures.lag != 0:
        return "offline"
    if figures is None or figures.lag is None:
        return "unknown"
    if figures.lag and (figures.lag_ms is None or figures.lag_ms >= BEHIND_MS):
        return "behind"
    return "current"


def _keys(at: ClusterSnapshot) -> Mapping[str, Callable[[GroupInfo], Any]]:
    figures = at.group_figures
    return {
        "name": lambda info: info.name,
        "lag": lambda info: f.lag if (f := figures.get(info.name)) else None,
        "lag_ms": lambda info: f.lag_ms if (f := figures.get(info.name)) else None,
        "rate_out": lambda info: f.rate_out if (f := figures.get(info.name)) else None,
        "members": lambda info: f.members if (f := figures.get(info.name)) else None,
        "dead_letters": lambda info: _dead_letters(at, info.name),
    }


def _row(at: ClusterSnapshot, info: GroupInfo) -> dict[str, object]:
    figures = at.group_figures.get(info.name)
    return {
        "name": info.name,
        "state": _state(at, info),
        "lag": figures.lag if figures else None,
        "lag_ms": figures.lag_ms if figures else None,
        "rate_out": figures.rate_out if figures else None,
        "members": figures.members if figures else None,
        "model": figures.model if figures else None,
        "topics": [
            topic
            for topic in (figures.topics if figures else ())
            if not topic.startswith(RETRY_TOPIC_PREFIX)
        ],
        "dead_letters": _dead_letters(at, info.name),
        "measured_ms": figures.at_ms if figures else None,
        "partial": figures.partial if figures else False,
        "problem": figures.problem if figures else "",
    }


def _dead_letters(at: ClusterSnapshot, group: str) -> int | None:
    """The number of dead letters; 0 if the group has no such topic."""
    topic = DLQ_TOPIC_PREFIX + group
    if topic not in at.topics:
        return 0 if at.topics else None
    figures = at.topic_figures.get(topic)
    return figures.messages if figures else None
