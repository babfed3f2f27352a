"""Topics: list, describe, create, change, delete."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from penstock.client.admin.async_admin import TopicInfo
from penstock.console.api.overview_api import first_snapshot
from penstock.console.change_preview import need_confirmation, preview_json, topic_preview
from penstock.console.endpoints import ApiCall, endpoint
from penstock.console.monitoring.cluster_snapshot import ClusterSnapshot
from penstock.console.monitoring.cluster_watch import measure_topic
from penstock.console.paging import PARAMETERS, page_of
from penstock.console.security.accounts import Role
from penstock.errors import InvalidParameter

PERMS = ("rw", "r", "w", "-")
_CHANGES = {
    "queues": "read and write queues per broker",
    "read_queues": "read queues per broker",
    "write_queues": "write queues per broker",
    "perm": "rw, r, w or -",
    "order": "whether the queues are registered as ordered",
    "message_type": "NORMAL, FIFO, DELAY, TRANSACTION, PRIORITY or MIXED",
}


@endpoint(
    "GET",
    "/topics",
    parameters={**PARAMETERS, "kind": "normal (default), retry, dlq, system or all"},
)
async def list_topics(call: ApiCall) -> object:
    """One page of the topics. Figures that were not measured yet are null.

    `type` and `perm` are those of the first broker; `differs` are the settings of which the brokers
    have different values.
    """
    await first_snapshot(call)
    at = call.console.watch.snapshot
    kind, query = call.text("kind", "normal"), call.text("query").lower()
    found = [
        info
        for info in at.topics.values()
        if kind in ("all", info.kind.value) and query in info.name.lower()
    ]
    kinds = Counter(info.kind.value for info in at.topics.values())
    page = page_of(call, found, _keys(at), lambda info: _row(at, info))
    measured = sum(info.name in at.topic_figures for info in found)
    return {
        **page,
        "at_ms": at.at_ms or None,
        "ready": call.console.watch.updated.is_set(),
        "problem": at.problem or None,
        "kinds": kinds,
        "measured": measured,
    }


@endpoint("GET", "/topics/{name}")
async def describe(call: ApiCall) -> object:
    """A topic with its queues, settings on each broker, and groups."""
    console, name = call.console, call.path("name")
    described = await call.admin.describe_topic(name)
    at = console.watch.snapshot
    figures = await measure_topic(console.admin, at, described.topic, console.now_ms())
    if figures is not None and not figures.partial:
        old = at.topic_figures.get(name)
        if old is None or figures.at_ms - old.at_ms >= 1000:
            console.watch.measured_topic(name, figures)
    known = console.watch.snapshot.topic_figures.get(name)
    return {
        "name": name,
        "kind": described.topic.kind.value,
        "brokers": {
            broker: {
                "read_queues": settings.read_queues,
                "write_queues": settings.write_queues,
                "perm": settings.perm_text,
                "order": settings.order,
                "message_type": settings.message_type,
                "attributes": dict(settings.attributes),
            }
            for broker, settings in described.topic.brokers.items()
        },
        "addresses": {
            broker: {str(number): address for number, address in ids.items()}
            for broker, ids in described.addresses.items()
        },
        "queues": [
            {
                "broker": state.queue.broker_name,
                "queue": state.queue.queue_id,
                "min_offset": state.min_offset,
                "max_offset": state.max_offset,
                "messages": state.count,
                "updated_ms": state.updated_ms,
            }
            for state in described.queues
        ],
        "groups": [
            {
                "name": group,
                "lag": f.lag if (f := at.group_figures.get(group)) else None,
                "lag_ms": f.lag_ms if f else None,
                "members": f.members if f else None,
            }
            for group in described.groups
        ],
        "messages": None if described.unreachable else sum(q.count for q in described.queues),
        "rate_in": known.rate_in if known else described.put_tps,
        "unreachable": list(described.unreachable),
    }


@endpoint("POST", "/topics", Role.OPERATE, body={"name": "name of the topic", **_CHANGES})
async def create(call: ApiCall) -> object:
    """Create a topic on all masters."""
    name = call.given("name", str)
    if name in call.console.watch.snapshot.topics:
        raise InvalidParameter(
            f"the topic {name} exists already", hint="change its settings instead"
        )
    await call.admin.create_topic(name, **_changes(call))
    call.console.watch.refresh()
    return {"name": name}


@endpoint("POST", "/topics/{name}/preview", Role.OPERATE, body=_CHANGES)
async def preview(call: ApiCall) -> object:
    """What a change would do on each broker. Nothing changes yet.

    `changes` are the settings before and after; `losses` say what nobody can read or send
    afterwards; `unreadable` are queues with messages that can't be read afterwards. `removes` is
    whether there are any losses.
    """
    described = await call.admin.describe_topic(call.path("name"))
    return preview_json(topic_preview(described, _changes(call)), described.unreachable)


@endpoint(
    "PUT",
    "/topics/{name}",
    Role.OPERATE,
    body={**_CHANGES, "confirm": "true: also make a change that removes something"},
)
async def change(call: ApiCall) -> object:
    """Change the given settings of a topic on all brokers that have it, and keep the others.

    A change with losses (see the preview) is refused without `confirm`.
    """
    name, changes = call.path("name"), _changes(call)
    if not changes:
        raise InvalidParameter("no setting is given", hint="give the settings to change")
    described = await call.admin.describe_topic(name)
    need_confirmation(topic_preview(described, changes), call.given("confirm", bool, False))
    await call.admin.update_topic(name, **changes)
    call.console.watch.refresh()
    return {"name": call.path("name")}


@endpoint("DELETE", "/topics/{name}", Role.OPERATE, body={"confirm": "the name of the topic again"})
async def delete(call: ApiCall) -> object:
    """Delete a topic with its messages."""
    name = call.path("name")
    if call.given("confirm", str, "") != name:
        raise InvalidParameter(
            f"deleting {name} deletes its messages", hint="repeat its name as confirm"
        )
    brokers = await call.admin.delete_topic(name)
    call.console.watch.refresh()
    return {"deleted": name, "brokers": brokers}


def _changes(call: ApiCall) -> dict[str, Any]:
    changes = {
        name: call.given(name, kind)
        for name, kind in (
            ("queues", int),
            ("read_queues", int),
            ("write_queues", int),
            ("perm", str),
            ("order", bool),
        )
        if call.body.get(name) is not None
    }
    if changes.get("perm", "rw") not in PERMS:
        raise InvalidParameter("perm is not valid", hint=f"use {', '.join(PERMS)}")
    if call.body.get("message_type"):
        changes["attributes"] = {"message.type": call.given("message_type", str)}
    return changes


def _keys(at: ClusterSnapshot) -> Mapping[str, Callable[[TopicInfo], Any]]:
    figures = at.topic_figures
    return {
        "name": lambda info: info.name,
        "queues": _queues,
        "messages": lambda info: f.messages if (f := figures.get(info.name)) else None,
        "rate_in": lambda info: f.rate_in if (f := figures.get(info.name)) else None,
        "last_ms": lambda info: f.last_ms if (f := figures.get(info.name)) else None,
        "type": lambda info: next(iter(info.brokers.values())).message_type,
    }


def _queues(info: TopicInfo) -> int:
    return sum(settings.write_queues for settings in info.brokers.values())


def _differing(info: TopicInfo) -> list[str]:
    names = ("read_queues", "write_queues", "perm_text", "order", "message_type")
    return [
        name.removesuffix("_text")
        for name in names
        if len({getattr(settings, name) for settings in info.brokers.values()}) > 1
    ]


def _row(at: ClusterSnapshot, info: TopicInfo) -> dict[str, object]:
    settings = next(iter(info.brokers.values()))
    figures = at.topic_figures.get(info.name)
    return {
        "name": info.name,
        "kind": info.kind.value,
        "type": settings.message_type,
        "perm": settings.perm_text,
        "differs": _differing(info),
        "queues": _queues(info),
        "brokers": sorted(info.brokers),
        "messages": figures.messages if figures else None,
        "rate_in": figures.rate_in if figures else None,
        "last_ms": figures.last_ms if figures else None,
        "measured_ms": figures.at_ms if figures else None,
        "partial": figures.partial if figures else False,
    }
