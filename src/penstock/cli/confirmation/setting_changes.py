"""What `topic create` and `group create` change if the topic or group exists, and the question.

Scripts declare with these commands what should be there, as often as they like. So only a person at
a terminal is asked.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from penstock.cli.confirmation.confirm import confirm

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import (
        AsyncAdmin,
        GroupInfo,
        GroupSettings,
        TopicDescription,
        TopicSettings,
    )

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask before a change.")


def somebody_is_there() -> bool:
    """Whether a person can answer the question."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirm_changes(what: str, lines: Sequence[str]) -> None:
    """Show the changes on stderr and ask, if there are any; raises click.Abort after No."""
    if lines:
        click.echo("\n".join(lines), err=True)
        confirm(f"Change the {what}?", yes=False)


async def topic_changes(
    admin: "AsyncAdmin",
    name: str,
    settings: Mapping[str, object],
    *,
    cluster: str | None,
    brokers: Sequence[str],
) -> list[str]:
    """The settings that change on each broker, and the messages that can't be read any longer.

    `settings` are named as those of `TopicSettings`.
    """
    from penstock.errors import NoRoute

    try:
        described = await admin.describe_topic(name)
    except NoRoute:
        return []
    lines: list[str] = []
    for master in await admin.masters(cluster, brokers):
        before = described.topic.brokers.get(master.name)
        if before is not None:
            lines += _changes(f"topic {name}", master.name, before, settings)
            lines += _unread(described, master.name, before, settings)
    return lines


async def group_changes(
    admin: "AsyncAdmin",
    info: "GroupInfo | None",
    settings: Mapping[str, object],
    *,
    cluster: str | None,
    brokers: Sequence[str],
) -> list[str]:
    """The settings that change on each broker that has the group."""
    if info is None:
        return []
    lines: list[str] = []
    for master in await admin.masters(cluster, brokers):
        before = info.brokers.get(master.name)
        if before is not None:
            lines += _changes(f"group {info.name}", master.name, before, settings)
    return lines


def _changes(
    what: str, broker: str, before: "TopicSettings | GroupSettings", settings: Mapping[str, object]
) -> Iterator[str]:
    changed = [
        f"{setting} {_text(getattr(before, setting))} → {_text(after)}"
        for setting, after in settings.items()
        if getattr(before, setting) != after
    ]
    if changed:
        yield f"{what} on {broker}: {', '.join(changed)}"


def _unread(
    described: "TopicDescription",
    broker: str,
    before: "TopicSettings",
    settings: Mapping[str, object],
) -> Iterator[str]:
    queues = settings.get("read_queues", before.read_queues)
    assert isinstance(queues, int)
    for state in described.queues:
        gone = state.queue.broker_name == broker and state.queue.queue_id >= queues
        if gone and state.count:
            yield f"{broker} queue {state.queue.queue_id}: {state.count:,} messages can't be read"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
