"""`penstock group list | create | describe | members | delete`."""

from typing import TYPE_CHECKING, Any

import click

from penstock.cli.confirmation import setting_changes
from penstock.cli.confirmation.confirm import confirm, yes_option
from penstock.cli.group import group_text
from penstock.cli.group.group_reset import clone, reset, undo
from penstock.cli.known_names import find_group
from penstock.cli.name_completion import group_names, topic_names
from penstock.cli.remote import ClusterOptions, cluster_options, json_option, print_json, run

if TYPE_CHECKING:
    from penstock.cli.group.group_text import GroupDeletion, Load
    from penstock.client.admin.async_admin import (
        AsyncAdmin,
        GroupInfo,
        GroupMembers,
        GroupProgress,
    )

_COUNT = click.IntRange(0, 1 << 30)


@click.group(no_args_is_help=True)
def group() -> None:
    """Manage the consumer groups of running brokers, Penstock's or Apache's."""


for _command in (reset, clone, undo):
    group.add_command(_command)


@group.command(name="list")
@cluster_options
@click.option("-a", "--all", "everything", is_flag=True, help="Include RocketMQ's own groups.")
@click.option("-c", "--cluster", "in_cluster", help="Only groups of this cluster.")
@click.option(
    "--lag", "with_lag", is_flag=True, help="Also show members and lag: several requests per group."
)
@json_option
def list_groups(
    cluster: ClusterOptions,
    everything: bool,
    in_cluster: str | None,
    with_lag: bool,
    as_json: bool,
) -> None:
    """List groups."""

    async def work() -> "tuple[list[GroupInfo], dict[str, Load]]":
        async with cluster.admin() as admin:
            groups = await admin.groups(system=everything, cluster=in_cluster)
            return groups, await _loads(admin, groups) if with_lag else {}

    groups, loads = run(work())
    if as_json:
        print_json([group_text.row_json(info, loads.get(info.name)) for info in groups])
    elif not groups:
        print("there is no group" + ("" if in_cluster is None else f" in the cluster {in_cluster}"))
        print("a consumer creates its group when it starts; or: penstock group create NAME")
    else:
        group_text.print_groups(groups, loads, with_lag=with_lag)


@group.command()
@cluster_options
@click.argument("name", shell_complete=group_names)
@click.option("--retries-max", type=_COUNT, help="Retries before a message becomes a dead letter.")
@click.option("--retry-queues", type=_COUNT, help="Queues of the retry topic on each broker.")
@click.option(
    "--orderly/--no-orderly", default=None, help="Consume the messages of a queue in order."
)
@click.option(
    "--enable/--disable", "consume_enabled", default=None, help="Allow the group to consume."
)
@click.option(
    "--broadcast/--no-broadcast", "broadcast_enabled", default=None, help="Allow broadcasting."
)
@click.option(
    "--from-min/--no-from-min",
    "from_min_enabled",
    default=None,
    help="Start at the first message of a queue if the group has no offset there.",
)
@click.option(
    "--notify/--no-notify",
    "notify_enabled",
    default=None,
    help="Notify members when others join or leave.",
)
@click.option(
    "--consume-timeout-minutes", type=_COUNT, help="How long consuming a message may take."
)
@click.option("--broker-id", type=_COUNT, help="Id of the broker that consumers read from.")
@click.option(
    "--broker-id-when-slow",
    type=_COUNT,
    help="Id of the broker that consumers far behind read from.",
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
    in_cluster: str | None,
    brokers: tuple[str, ...],
    yes: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Create the group NAME. If it exists, change the given settings."""
    changes: Any = {key: value for key, value in given.items() if value is not None}

    async def work() -> "GroupInfo":
        async with cluster.admin() as admin:
            return await admin.create_group(name, cluster=in_cluster, brokers=brokers, **changes)

    async def plan() -> "setting_changes.ChangePlan":
        async with cluster.admin() as admin:
            groups = {one.name: one for one in await admin.groups(system=True)}
            return await setting_changes.group_changes(
                admin, groups.get(name), changes, cluster=in_cluster, brokers=brokers
            )

    setting_changes.confirm_changes(f"group {name}", run(plan()), yes=yes)
    info = run(work())
    if as_json:
        print_json(group_text.group_json(info))
        return
    for broker, settings in info.brokers.items():
        print(f"group {name} is on {broker}: {group_text.settings_text(settings)}")


@group.command()
@cluster_options
@click.argument("name", shell_complete=group_names)
@click.option("-t", "--topic", shell_complete=topic_names, help="Only the progress in this topic.")
@json_option
def describe(cluster: ClusterOptions, name: str, topic: str | None, as_json: bool) -> None:
    """Show the settings, members and progress of a group."""

    async def work() -> "tuple[GroupInfo, GroupMembers, GroupProgress]":
        async with cluster.admin() as admin:
            info = await find_group(admin, name)
            members = await admin.members(name)
            owners = bool(members.members)
            return info, members, await admin.progress(name, topic, owners=owners)

    info, members, progress = run(work())
    if as_json:
        print_json(group_text.details_json(info, members, progress))
    else:
        group_text.print_details(info, members, progress)


@group.command()
@cluster_options
@click.argument("name", shell_complete=group_names)
@json_option
def members(cluster: ClusterOptions, name: str, as_json: bool) -> None:
    """Show the connected clients of a group and their subscriptions."""

    async def work() -> "GroupMembers":
        async with cluster.admin() as admin:
            found = await admin.members(name)
            if not found.members and not found.unreachable:
                await find_group(admin, name)
            return found

    found = run(work())
    if as_json:
        print_json(group_text.members_json(found))
    else:
        group_text.print_members(found)


@group.command()
@cluster_options
@click.argument("name", shell_complete=group_names)
@click.option("--keep-offsets", is_flag=True, help="Keep the offsets of the group.")
@click.option("-c", "--cluster", "in_cluster", help="Only on brokers of this cluster.")
@yes_option
@json_option
def delete(
    cluster: ClusterOptions,
    name: str,
    keep_offsets: bool,
    in_cluster: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete a group with its offsets, its retry topic and its dead letters."""

    async def plan() -> "GroupDeletion":
        async with cluster.admin() as admin:
            return await _deletion(admin, name)

    async def work() -> list[str]:
        async with cluster.admin() as admin:
            return await admin.delete_group(name, keep_offsets=keep_offsets, cluster=in_cluster)

    if not yes:
        group_text.print_deletion(run(plan()), keep_offsets=keep_offsets)
        confirm(f"Delete the group {name}?", yes=yes)
    deleted = run(work())
    if as_json:
        from penstock.cli.schemas.group_output import DeletedGroup

        print_json(DeletedGroup(group=name, brokers=deleted, offsets_kept=keep_offsets))
        return
    print(f"deleted group {name} on {', '.join(deleted)}")


async def _loads(admin: "AsyncAdmin", groups: "list[GroupInfo]") -> "dict[str, Load]":
    """Members and lag of each group; unknown where a broker refuses."""
    from penstock.cli.group.group_text import Load
    from penstock.cli.terminal import progress_bars
    from penstock.errors import PenstockError

    with progress_bars() as tell:
        loads: dict[str, Load] = {}

        async def load(info: "GroupInfo") -> None:
            try:
                found = await admin.members(info.name)
                progress = await admin.progress(info.name)
                known = None if found.unreachable else len(found.members)
                loads[info.name] = Load(known, progress.lag, progress.lag_ms)
            except PenstockError as error:
                click.echo(f"penstock: group {info.name}: {error}", err=True)
                loads[info.name] = Load(None, None, None)
            tell("groups", len(loads), len(groups))

        await admin.for_each(groups, load)
        return loads


async def _deletion(admin: "AsyncAdmin", name: str) -> "GroupDeletion":
    """What a deletion of the group deletes."""
    from penstock.cli.group.group_text import GroupDeletion
    from penstock.errors import NoRoute
    from penstock.wire.codes import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

    info = await find_group(admin, name)
    counts: dict[str, int] = {}
    for prefix in (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX):
        try:
            described = await admin.describe_topic(prefix + name)
            counts[prefix + name] = sum(state.count for state in described.queues)
        except NoRoute:
            continue
    members = await admin.members(name)
    progress = await admin.progress(name)
    return GroupDeletion(info, progress, counts, tuple(one.client_id for one in members.members))
