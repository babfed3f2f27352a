"""Groups as tables and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import click

from penstock.cli.remote import print_table
from penstock.cli.schemas.group_output import (
    Group,
    GroupDetails,
    GroupMemberList,
    GroupMemberOutput,
    GroupOnBroker,
    GroupRowOutput,
    GroupSubscription,
    QueueLag,
)
from penstock.client.admin.admin_values import (
    GroupInfo,
    GroupMembers,
    GroupProgress,
    GroupSettings,
)
from penstock.plurals import count_text

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Load:
    """Members and lag of a group; None is unknown."""

    members: int | None
    lag: int | None
    lag_ms: int | None


@dataclass(frozen=True, slots=True)
class GroupDeletion:
    """What goes with a group."""

    group: GroupInfo
    progress: GroupProgress
    topics: Mapping[str, int]
    """Its retry and dead letter topic, with their number of messages."""
    members: tuple[str, ...]


def seconds_text(ms: int | None) -> str:
    """A duration as text."""
    if ms is None:
        return UNKNOWN
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.1f} s" if ms else "0 s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"


def number_text(count: int | None) -> str:
    """A number as text."""
    return UNKNOWN if count is None else f"{count:,}"


def settings_text(settings: GroupSettings) -> str:
    """The settings of a group in one line."""
    parts = [
        count_text(settings.retries_max, "retry", "retries"),
        "orderly" if settings.orderly else "concurrent",
        "enabled" if settings.consume_enabled else "disabled",
    ]
    return ", ".join(parts)


# --- tables


def print_groups(groups: Sequence[GroupInfo], loads: Mapping[str, Load], *, with_lag: bool) -> None:
    """Print the list of groups."""
    rows = []
    for info in groups:
        settings = list(info.brokers.values())
        row = [
            info.name,
            _distinct("yes" if s.consume_enabled else "no" for s in settings),
            _distinct("yes" if s.orderly else "no" for s in settings),
            _distinct(str(s.retries_max) for s in settings),
        ]
        if with_lag:
            load = loads[info.name]
            row += [number_text(load.members), number_text(load.lag), seconds_text(load.lag_ms)]
        rows.append((*row, ", ".join(info.brokers)))
    more = ("MEMBERS", "LAG", "BEHIND") if with_lag else ()
    print_table(("GROUP", "ENABLED", "ORDERLY", "RETRIES", *more, "BROKERS"), rows)


def print_details(info: GroupInfo, members: GroupMembers, progress: GroupProgress) -> None:
    """Print settings, members and progress."""
    print(
        f"group {info.name}: lag {_messages(progress.lag)}, "
        f"behind {seconds_text(progress.lag_ms)}, {progress.tps:.1f} messages/s"
    )
    for broker in sorted({*progress.unreachable, *members.unreachable}):
        print(f"{broker} can't be reached; its queues are not listed")
    print()
    heads = ("BROKER", "ENABLED", "ORDERLY", "BROADCAST", "RETRIES", "TIMEOUT", "READS FROM")
    print_table(
        heads,
        [
            (
                broker,
                "yes" if settings.consume_enabled else "no",
                "yes" if settings.orderly else "no",
                "yes" if settings.broadcast_enabled else "no",
                str(settings.retries_max),
                f"{settings.consume_timeout_minutes} min",
                f"{settings.broker_id}, if slow {settings.broker_id_when_slow}",
            )
            for broker, settings in info.brokers.items()
        ],
    )
    print()
    print_members(members)
    if not progress.queues:
        print("\nno offsets: the group has not consumed anything")
        return
    print()
    print_table(
        ("TOPIC", "BROKER", "QUEUE", "COMMITTED", "END", "LAG", "BEHIND", "OWNER"),
        [
            (
                at.queue.topic,
                at.queue.broker_name,
                str(at.queue.queue_id),
                "-" if at.committed is None else str(at.committed),
                str(at.max_offset),
                number_text(at.lag),
                seconds_text(at.lag_ms),
                at.client_id or "-",
            )
            for at in progress.queues
        ],
    )


def print_members(found: GroupMembers) -> None:
    """Print the connected clients and their subscriptions."""
    if not found.members:
        print("no connected members")
        return
    print_table(
        ("CLIENT", "ADDRESS", "LANGUAGE", "VERSION", "BROKERS"),
        [
            (one.client_id, one.address, one.language, one.version_text, ", ".join(one.brokers))
            for one in found.members
        ],
    )
    for one in found.subscriptions:
        print(f"subscribes to {one.topic}: {one.expression or '*'} ({one.kind})")
    print(f"{found.model}, {found.consume_type}, new queues: {found.start_at}")


def print_deletion(plan: GroupDeletion, *, keep_offsets: bool) -> None:
    """Say what a deletion deletes, on stderr like the question."""
    lines = [f"group {plan.group.name} on {', '.join(plan.group.brokers)}"]
    if keep_offsets:
        lines.append("the offsets are kept")
    else:
        by_topic: dict[str, int] = {}
        for at in plan.progress.queues:
            by_topic[at.queue.topic] = by_topic.get(at.queue.topic, 0) + (at.committed is not None)
        lines += [
            f"offsets in {topic}: {count_text(count, 'queue')}" for topic, count in by_topic.items()
        ]
    lines += [
        f"topic {topic}: {count_text(count, 'message')}" for topic, count in plan.topics.items()
    ]
    if plan.members:
        clients = count_text(len(plan.members), "client")
        are = "is" if len(plan.members) == 1 else "are"
        lines.append(f"{clients} {are} connected: {', '.join(plan.members)}")
    lines += [
        f"{broker} can't be reached; it keeps the group" for broker in plan.progress.unreachable
    ]
    click.echo("\n".join(lines), err=True)


def _messages(count: int | None) -> str:
    return UNKNOWN if count is None else count_text(count, "message")


def _distinct(texts: Iterable[str]) -> str:
    """The distinct values, separated by slashes."""
    return "/".join(dict.fromkeys(texts))


# --- JSON


def group_json(info: GroupInfo) -> Group:
    """A group."""
    return Group(group=info.name, is_system=info.is_system, brokers=_brokers(info))


def row_json(info: GroupInfo, load: Load | None) -> GroupRowOutput:
    """A group in a list, with its lag if it was asked for."""
    row = GroupRowOutput(group=info.name, is_system=info.is_system, brokers=_brokers(info))
    if load is not None:
        row.members, row.lag, row.lag_ms = load.members, load.lag, load.lag_ms
    return row


def members_json(found: GroupMembers) -> GroupMemberList:
    """The members of a group."""
    return GroupMemberList(
        group=found.group,
        model=found.model,
        consume_type=found.consume_type,
        start_at=found.start_at,
        members=[
            GroupMemberOutput(
                client_id=one.client_id,
                address=one.address,
                language=one.language,
                version=one.version_text,
                brokers=list(one.brokers),
            )
            for one in found.members
        ],
        subscriptions=[
            GroupSubscription(topic=one.topic, expression=one.expression, kind=one.kind)
            for one in found.subscriptions
        ],
        unreachable=list(found.unreachable),
    )


def details_json(info: GroupInfo, members: GroupMembers, progress: GroupProgress) -> GroupDetails:
    """A group with members and progress."""
    return GroupDetails(
        group=info.name,
        is_system=info.is_system,
        brokers=_brokers(info),
        members=members_json(members),
        queues=[
            QueueLag(
                topic=at.queue.topic,
                broker=at.queue.broker_name,
                queue=at.queue.queue_id,
                committed=at.committed,
                max_offset=at.max_offset,
                lag=at.lag,
                lag_ms=at.lag_ms,
                consumed_ms=at.consumed_ms,
                client_id=at.client_id,
            )
            for at in progress.queues
        ],
        lag=progress.lag,
        lag_ms=progress.lag_ms,
        consume_tps=progress.tps,
        unreachable=list(progress.unreachable),
    )


def _brokers(info: GroupInfo) -> dict[str, GroupOnBroker]:
    return {
        broker: GroupOnBroker(
            consume_enabled=settings.consume_enabled,
            broadcast_enabled=settings.broadcast_enabled,
            orderly=settings.orderly,
            from_min_enabled=settings.from_min_enabled,
            retries_max=settings.retries_max,
            retry_queues=settings.retry_queues,
            consume_timeout_minutes=settings.consume_timeout_minutes,
            notify_enabled=settings.notify_enabled,
            broker_id=settings.broker_id,
            broker_id_when_slow=settings.broker_id_when_slow,
            attributes=dict(settings.attributes),
        )
        for broker, settings in info.brokers.items()
    }
