"""What `topic create` and `group create` change if the topic or group exists, and the question.

Scripts declare with these commands what should be there, as often as they like. So the question
depends on the change:

| Change | At a terminal | Elsewhere |
|---|---|---|
| creates something, or only adds queues, rights or consumption | not asked | not asked |
| removes read queues, rights or consumption | asked | refused without an answer or `--yes` |
| anything else, such as the number of retries | asked | not asked |

The plan is printed whatever the answer is.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.confirmation.confirm import confirm
from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import (
        AsyncAdmin,
        GroupInfo,
        GroupSettings,
        TopicDescription,
        TopicSettings,
    )

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask before a change.")


def _fewer(before: int, after: int) -> bool:
    return after < before


def _less_rights(before: str, after: str) -> bool:
    return not set(before.strip("-")) <= set(after)


def _withdrawn(before: bool, after: bool) -> bool:
    return before and not after


_REMOVES: Mapping[str, Callable[[Any, Any], bool]] = {
    "read_queues": _fewer,
    "write_queues": _fewer,
    "perm_text": _less_rights,
    "consume_enabled": _withdrawn,
    "broadcast_enabled": _withdrawn,
}
"""The settings of which a change either adds or removes something."""
_NAMES = {"perm_text": "permission"}


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """What changes, as lines."""

    lines: tuple[str, ...] = ()
    removes: bool = False
    """Whether read queues, rights or consumption are removed."""
    only_adds: bool = True


def confirm_changes(what: str, plan: ChangePlan, *, yes: bool) -> None:
    """Show the plan on stderr, and ask if it is necessary; raises as `confirm` does."""
    if not plan.lines:
        return
    click.echo("\n".join(plan.lines), err=True)
    at_a_terminal = sys.stdin is not None and sys.stdin.isatty()
    if plan.removes or (at_a_terminal and not plan.only_adds):
        confirm(f"Change the {what}?", yes=yes)


async def topic_changes(
    admin: "AsyncAdmin",
    name: str,
    settings: Mapping[str, object],
    attributes: Mapping[str, str | None],
    *,
    cluster: str | None,
    brokers: Sequence[str],
) -> ChangePlan:
    """The settings that change on each broker, and the messages that can't be read any longer.

    `settings` are named as those of `TopicSettings`; an attribute that is None is removed.
    """
    plan = ChangePlan()
    before = await admin.topic_settings(name, cluster=cluster, brokers=brokers)
    for broker, old in before.items():
        plan = _joined(plan, _changes(f"topic {name}", broker, old, settings, attributes))
    if not plan.removes:
        return plan
    described = await admin.describe_topic(name)
    unread = [
        line for broker, old in before.items() for line in _unread(described, broker, old, settings)
    ]
    return ChangePlan((*plan.lines, *unread), removes=True, only_adds=False)


async def group_changes(
    admin: "AsyncAdmin",
    info: "GroupInfo | None",
    settings: Mapping[str, object],
    *,
    cluster: str | None,
    brokers: Sequence[str],
) -> ChangePlan:
    """The settings that change on each broker that has the group."""
    plan = ChangePlan()
    if info is None:
        return plan
    for master in await admin.masters(cluster, brokers):
        before = info.brokers.get(master.name)
        if before is not None:
            plan = _joined(plan, _changes(f"group {info.name}", master.name, before, settings, {}))
    return plan


def _joined(one: ChangePlan, other: ChangePlan) -> ChangePlan:
    return ChangePlan(
        one.lines + other.lines, one.removes or other.removes, one.only_adds and other.only_adds
    )


def _changes(
    what: str,
    broker: str,
    before: "TopicSettings | GroupSettings",
    settings: Mapping[str, object],
    attributes: Mapping[str, str | None],
) -> ChangePlan:
    """The changes on one broker."""
    changed = {
        setting: (getattr(before, setting), after)
        for setting, after in settings.items()
        if getattr(before, setting) != after
    }
    texts = [
        f"{_NAMES.get(setting, setting.replace('_', ' '))} {_text(old)} → {_text(new)}"
        for setting, (old, new) in changed.items()
    ]
    others = {
        name: (before.attributes.get(name), after)
        for name, after in attributes.items()
        if before.attributes.get(name) != after
    }
    texts += [f"{name} {_text(old)} → {_text(new)}" for name, (old, new) in others.items()]
    if not texts:
        return ChangePlan()
    removing = {
        name for name, pair in changed.items() if name in _REMOVES and _REMOVES[name](*pair)
    }
    return ChangePlan(
        (f"{what} on {broker}: {', '.join(texts)}",),
        removes=bool(removing - {"write_queues"}),
        only_adds=not others and not removing and changed.keys() <= _REMOVES.keys(),
    )


def _unread(
    described: "TopicDescription",
    broker: str,
    before: "TopicSettings",
    settings: Mapping[str, object],
) -> Iterator[str]:
    """The stored messages of a broker that nobody can read after the change."""
    queues = settings.get("read_queues", before.read_queues)
    assert isinstance(queues, int)
    if "r" not in str(settings.get("perm_text", before.perm_text)):
        queues = 0
    for state in described.queues:
        gone = state.queue.broker_name == broker and state.queue.queue_id >= queues
        if gone and state.count:
            messages = count_text(state.count, "message")
            yield f"{broker} queue {state.queue.queue_id}: {messages} can't be read"


def _text(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
