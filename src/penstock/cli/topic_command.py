"""`penstock topic …`: topics of a cluster."""

from typing import TYPE_CHECKING, Any

import click

from penstock.cli.confirmation import setting_changes
from penstock.cli.confirmation.confirm import confirm, yes_option
from penstock.cli.confirmation.topic_deletion import (
    TopicDeletion,
    plan_deletion,
    print_deletion,
)
from penstock.cli.name_completion import topic_names
from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    print_json,
    print_table,
    run,
)
from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import TopicDescription, TopicInfo

_TYPES = click.Choice(
    ["NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED", "UNSPECIFIED"],
    case_sensitive=False,
)
_COUNT = click.IntRange(1, 65_536)


@click.group(no_args_is_help=True)
def topic() -> None:
    """Manage the topics of running brokers, Penstock's or Apache's."""


@topic.command(name="list")
@cluster_options
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Include retry, dead letter and system topics."
)
@click.option("-c", "--cluster", "in_cluster", help="Only topics of this cluster.")
@json_option
def list_topics(
    cluster: ClusterOptions, everything: bool, in_cluster: str | None, as_json: bool
) -> None:
    """List topics."""
    topics = run(_list(cluster, everything, in_cluster))
    if as_json:
        print_json([_topic_json(info) for info in topics])
        return
    rows = [
        (
            info.name,
            info.kind.value,
            _distinct(s.message_type for s in info.brokers.values()),
            _distinct(str(s.read_queues) for s in info.brokers.values()),
            _distinct(str(s.write_queues) for s in info.brokers.values()),
            _distinct(s.perm_text for s in info.brokers.values()),
            ", ".join(info.brokers),
        )
        for info in topics
    ]
    if not rows:
        print("there is no topic" + ("" if in_cluster is None else f" in the cluster {in_cluster}"))
        print("next: penstock topic create NAME")
        return
    print_table(("TOPIC", "KIND", "TYPE", "READ", "WRITE", "PERM", "BROKERS"), rows)


@topic.command()
@cluster_options
@click.argument("name", shell_complete=topic_names)
@click.option("-q", "--queues", type=_COUNT, help="Number of queues on each broker.  [default: 8]")
@click.option("--read-queues", type=_COUNT, help="Number of read queues on each broker.")
@click.option("--write-queues", type=_COUNT, help="Number of write queues on each broker.")
@click.option(
    "--perm",
    type=click.Choice(["rw", "r", "w", "-"]),
    help="Permission: read, write, both or none.",
)
@click.option(
    "--type", "message_type", type=_TYPES, help="Type of messages that the topic accepts."
)
@click.option(
    "--attribute",
    "attributes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set another topic attribute; without VALUE, remove it. Can be repeated.",
)
@click.option(
    "--order/--no-order",
    default=None,
    help="Keep the queues of a broker in the route while it is down.",
)
@click.option("-c", "--cluster", "in_cluster", help="Only on brokers of this cluster.")
@click.option(
    "-b",
    "--broker",
    "brokers",
    multiple=True,
    metavar="NAME",
    help="Only on this broker. Can be repeated.",
)
@setting_changes.yes_option
@json_option
def create(
    cluster: ClusterOptions,
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str | None,
    message_type: str | None,
    attributes: tuple[str, ...],
    order: bool | None,
    in_cluster: str | None,
    brokers: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> None:
    """Create the topic NAME. If it exists, change the given settings."""
    changes: dict[str, str | None] = {}
    for text in attributes:
        attribute, _, value = text.partition("=")
        changes[attribute] = value or None
    if message_type is not None:
        changes["message.type"] = message_type

    async def work() -> "TopicInfo":
        async with cluster.admin() as admin:
            return await admin.create_topic(
                name,
                queues=queues,
                read_queues=read_queues,
                write_queues=write_queues,
                perm=perm,
                order=order,
                attributes=changes,
                cluster=in_cluster,
                brokers=brokers,
            )

    async def plan() -> "setting_changes.ChangePlan":
        wanted = {
            "read_queues": queues if read_queues is None else read_queues,
            "write_queues": queues if write_queues is None else write_queues,
            "perm_text": perm,
            "order": order,
        }
        given = {setting: value for setting, value in wanted.items() if value is not None}
        async with cluster.admin() as admin:
            return await setting_changes.topic_changes(
                admin, name, given, changes, cluster=in_cluster, brokers=brokers
            )

    setting_changes.confirm_changes(f"topic {name}", run(plan()), yes=yes)
    info = run(work())
    if as_json:
        print_json(_topic_json(info))
        return
    for broker, settings in info.brokers.items():
        print(
            f"topic {name} is on {broker}: {count_text(settings.write_queues, 'queue')} to write, "
            f"{settings.read_queues} to read, {settings.perm_text}, {settings.message_type}"
        )


@topic.command()
@cluster_options
@click.argument("name", shell_complete=topic_names)
@json_option
def describe(cluster: ClusterOptions, name: str, as_json: bool) -> None:
    """Show the brokers, queues and consumer groups of a topic."""

    async def work() -> "TopicDescription":
        async with cluster.admin() as admin:
            return await admin.describe_topic(name)

    found = run(work())
    if as_json:
        print_json(_description_json(found))
    else:
        _print_description(found)


@topic.command()
@cluster_options
@click.argument("name", shell_complete=topic_names)
@click.option("-c", "--cluster", "in_cluster", help="Only on brokers of this cluster.")
@yes_option
@json_option
def delete(
    cluster: ClusterOptions, name: str, in_cluster: str | None, yes: bool, as_json: bool
) -> None:
    """Delete a topic and its messages from brokers and NameServers.

    Without --cluster it is deleted in all clusters. The confirmation names the brokers.
    """

    async def plan() -> TopicDeletion:
        async with cluster.admin() as admin:
            return await plan_deletion(admin, name, in_cluster)

    async def work() -> list[str]:
        async with cluster.admin() as admin:
            return await admin.delete_topic(name, cluster=in_cluster)

    if not yes:
        planned = run(plan())
        print_deletion(planned)
        brokers = ", ".join(planned.brokers) or "the NameServers"
        confirm(f"Delete the topic {name} with all its messages on {brokers}?", yes=yes)
    deleted = run(work())
    if as_json:
        from penstock.cli.schemas.topic_output import DeletedTopic

        print_json(DeletedTopic(topic=name, brokers=deleted))
        return
    print(f"deleted topic {name} on {', '.join(deleted) or 'the NameServers'}")


async def _list(
    cluster: ClusterOptions, everything: bool, in_cluster: str | None
) -> "list[TopicInfo]":
    from penstock.client.admin.async_admin import TopicKind

    async with cluster.admin() as admin:
        kind = None if everything else TopicKind.NORMAL
        return await admin.topics(kind=kind, cluster=in_cluster)


def _distinct(texts: Any) -> str:
    """The distinct values, separated by slashes."""
    return "/".join(dict.fromkeys(texts))


def _print_description(found: "TopicDescription") -> None:
    from penstock.cli.terminal import time_text

    info = found.topic
    total = count_text(sum(state.count for state in found.queues), "message")
    queues = count_text(len(found.queues), "queue")
    print(f"topic {info.name} ({info.kind.value}): {total} in {queues}")
    for broker in found.unreachable:
        print(f"{broker} can't be reached; its queues are not listed")
    print()
    print_table(
        ("BROKER", "ADDRESS", "READ", "WRITE", "PERM", "TYPE", "ORDER"),
        [
            (
                broker,
                " ".join(found.addresses.get(broker, {}).values()) or "-",
                str(settings.read_queues),
                str(settings.write_queues),
                settings.perm_text,
                settings.message_type,
                "yes" if settings.order else "no",
            )
            for broker, settings in info.brokers.items()
        ],
    )
    print()
    print_table(
        ("BROKER", "QUEUE", "FIRST", "NEXT", "MESSAGES", "LAST STORED"),
        [
            (
                state.queue.broker_name,
                str(state.queue.queue_id),
                str(state.min_offset),
                str(state.max_offset),
                str(state.count),
                time_text(state.updated_ms or 0),
            )
            for state in found.queues
        ],
    )
    print()
    print("consumed by: " + (", ".join(found.groups) or "none"))


def _topic_json(info: "TopicInfo") -> dict[str, object]:
    return {
        "topic": info.name,
        "kind": info.kind.value,
        "brokers": {
            broker: {
                "read_queues": settings.read_queues,
                "write_queues": settings.write_queues,
                "perm": settings.perm_text,
                "order": settings.order,
                "type": settings.message_type,
                "attributes": dict(settings.attributes),
            }
            for broker, settings in info.brokers.items()
        },
    }


def _description_json(found: "TopicDescription") -> dict[str, object]:
    return {
        **_topic_json(found.topic),
        "addresses": found.addresses,
        "queues": [
            {
                "broker": state.queue.broker_name,
                "queue": state.queue.queue_id,
                "min_offset": state.min_offset,
                "max_offset": state.max_offset,
                "updated_ms": state.updated_ms,
            }
            for state in found.queues
        ],
        "groups": list(found.groups),
        "put_tps": found.put_tps,
        "unreachable": list(found.unreachable),
    }
