"""`penstock group reset | clone | undo`: the offsets of a group, with a plan and a way back."""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.confirmation.confirm import confirm, yes_option
from penstock.cli.known_names import check_topic, find_group
from penstock.cli.name_completion import group_names, topic_names
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
    from penstock.cli.group.undo_plans import UndoPlan
    from penstock.cli.schemas.group_output import OffsetChange
    from penstock.client.admin.async_admin import AsyncAdmin, ResetPlan, ResetResult

F = TypeVar("F", bound=Callable[..., Any])

_topic_option = click.option(
    "-t", "--topic", required=True, shell_complete=topic_names, help="Topic whose offsets change."
)


def _change_options(command: F) -> F:
    """Add the options of commands that change offsets."""
    dry = click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
    return yes_option(dry(json_option(command)))


@click.command()
@cluster_options
@click.argument("name", shell_complete=group_names)
@_topic_option
@click.option(
    "--to",
    metavar="TARGET",
    help="first, last, +N or -N (messages per queue), a time, or an age such as 10m.",
)
@click.option(
    "--offset",
    "offsets",
    multiple=True,
    metavar="BROKER/QUEUE=OFFSET",
    help="Set the offset of one queue. Can be repeated.",
)
@_change_options
def reset(
    cluster: ClusterOptions,
    name: str,
    topic: str,
    to: str | None,
    offsets: tuple[str, ...],
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Move the offsets of a group in a topic.

    Prints the plan: the offsets before and after, and how many messages are skipped or consumed
    again. Running consumers continue at the new offset. The old offsets are saved for
    `penstock group undo`.
    """
    from penstock.cli.group.reset_target import read_target

    target = read_target(to, offsets, topic)

    async def plan(admin: "AsyncAdmin") -> "ResetPlan":
        await check_topic(admin, topic)
        await find_group(admin, name)
        return await admin.plan_reset(name, topic, target)

    return _change(cluster, plan, yes=yes, dry_run=dry_run, as_json=as_json)


@click.command()
@cluster_options
@click.argument("source", shell_complete=group_names)
@click.argument("name", shell_complete=group_names)
@_topic_option
@_change_options
def clone(
    cluster: ClusterOptions,
    source: str,
    name: str,
    topic: str,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Give the group NAME the offsets of the group SOURCE in a topic."""

    async def plan(admin: "AsyncAdmin") -> "ResetPlan":
        await check_topic(admin, topic)
        for group in (source, name):
            await find_group(admin, group)
        return await admin.plan_clone(source, name, topic)

    return _change(cluster, plan, yes=yes, dry_run=dry_run, as_json=as_json)


@click.command()
@cluster_options
@click.argument("plan_name", metavar="[PLAN]", required=False)
@click.option("--list", "listing", is_flag=True, help="List the saved plans.")
@_change_options
def undo(
    cluster: ClusterOptions,
    plan_name: str | None,
    listing: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Restore the offsets before the last reset or clone, or those of PLAN.

    An offset whose messages were deleted in the meantime becomes the first one that exists.
    """
    from penstock.cli.group.undo_plans import find_undo, read_undos, remove_undo

    if listing:
        _list_undos(read_undos(), as_json=as_json)
        return 0
    saved = find_undo(plan_name)

    async def plan(admin: "AsyncAdmin") -> "ResetPlan":
        here = (list(admin.nameservers()), cluster.namespace)
        if here != (saved.nameservers, saved.namespace):
            of = f" --namespace {saved.namespace}" if saved.namespace else ""
            raise click.UsageError(
                f"the plan {saved.name} belongs to another cluster; add "
                f"-n '{';'.join(saved.nameservers)}'{of}"
            )
        ends = {end.queue: end for end in (await admin.describe_topic(saved.topic)).queues}
        targets = {
            queue: min(max(offset, ends[queue].min_offset), ends[queue].max_offset)
            if queue in ends
            else offset
            for queue, offset in saved.targets().items()
        }
        return await admin.plan_reset(saved.group, saved.topic, targets)

    code = _change(cluster, plan, yes=yes, dry_run=dry_run, as_json=as_json, keep_undo=False)
    if code == 0 and not dry_run:
        remove_undo(saved.name)
    return code


def _change(
    cluster: ClusterOptions,
    make_plan: "Callable[[AsyncAdmin], Awaitable[ResetPlan]]",
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    keep_undo: bool = True,
) -> int:
    """Plan, print the plan, ask, apply it, and print the result; returns the exit code."""

    async def plan() -> "ResetPlan":
        async with cluster.admin() as admin:
            return await make_plan(admin)

    async def apply(planned: "ResetPlan") -> "tuple[ResetResult, str | None]":
        async with cluster.admin() as admin:
            return await _apply(admin, planned, cluster.namespace, keep_undo=keep_undo)

    planned = run(plan())
    if dry_run and as_json:
        print_json(_report(planned))
        return 0
    _print_plan(planned, err=as_json)
    if dry_run or not planned.moves:
        return 0
    confirm(f"Change the offsets of the group {planned.group}?", yes=yes)
    result, saved = run(apply(planned))
    if as_json:
        print_json(_report(planned, result, saved))
    else:
        _print_result(planned, result, saved)
    return 1 if result.failed else 0


async def _apply(
    admin: "AsyncAdmin", planned: "ResetPlan", namespace: str, *, keep_undo: bool
) -> "tuple[ResetResult, str | None]":
    from penstock.cli.group.undo_plans import save_undo
    from penstock.client.admin.async_admin import QueueMove, ResetPlan

    if not keep_undo:
        return await admin.apply_reset(planned), None
    now_ms = time.time_ns() // 1_000_000
    names = admin.nameservers()
    back = [QueueMove(m.queue, m.new, m.old) for m in planned.moves if m.old is not None]
    # Saved first: it is needed most if this process is killed in the middle.
    saved = save_undo(
        ResetPlan(planned.group, planned.topic, tuple(back)), names, namespace, now_ms
    )
    result = await admin.apply_reset(planned)
    if result.undo.moves:
        saved = save_undo(result.undo, names, namespace, now_ms, saved or "")
    return result, saved


def _print_plan(plan: "ResetPlan", *, err: bool) -> None:
    rows = [
        (
            move.queue.broker_name,
            str(move.queue.queue_id),
            "-" if move.old is None else str(move.old),
            str(move.new),
            "-" if move.skipped is None else f"{move.skipped:+}" if move.skipped else "0",
        )
        for move in plan.moves
    ]
    click.echo(f"group {plan.group}, topic {plan.topic}", err=err)
    print_table(("BROKER", "QUEUE", "BEFORE", "AFTER", "CHANGE"), rows, err=err)
    click.echo(_effect(plan), err=err)


def _effect(plan: "ResetPlan") -> str:
    """What the changes mean for the group, as text."""
    if not plan.moves:
        return "nothing changes"
    skipped = count_text(plan.skipped, "message")
    lines = []
    if plan.unknown < len(plan.moves):
        lines.append(f"{skipped} will be skipped, {plan.repeated:,} will be consumed again")
    if plan.unknown:
        queues = count_text(plan.unknown, "queue")
        has = "has" if plan.unknown == 1 else "have"
        lines.append(
            f"{queues} {has} no offset yet: how many messages will be skipped or consumed again "
            "there is unknown, and the change there can't be undone"
        )
    return "\n".join(lines)


def _print_result(plan: "ResetPlan", result: "ResetResult", saved: str | None) -> None:
    print(
        f"changed the offsets of {count_text(len(result.moves), 'queue')} of the group {plan.group}"
    )
    if result.live:
        print(f"consumers at {', '.join(result.live)} continue there with their next pull")
    for move, error in result.failed:
        click.echo(
            f"penstock: {move.queue.broker_name} queue {move.queue.queue_id} is unchanged: {error}",
            err=True,
        )
    if saved is not None:
        print(f"to undo: penstock group undo {saved}")


def _report(
    plan: "ResetPlan", result: "ResetResult | None" = None, saved: str | None = None
) -> "OffsetChange":
    from penstock.cli.schemas.group_output import OffsetChange, OffsetFailure, OffsetMove

    moves = plan.moves if result is None else result.moves
    return OffsetChange(
        group=plan.group,
        topic=plan.topic,
        applied=result is not None,
        moves=[
            OffsetMove(
                broker=move.queue.broker_name,
                queue=move.queue.queue_id,
                before=move.old,
                after=move.new,
                skipped=move.skipped,
            )
            for move in moves
        ],
        skipped=sum(max(move.skipped or 0, 0) for move in moves),
        repeated=sum(max(-(move.skipped or 0), 0) for move in moves),
        unknown_queues=sum(move.old is None for move in moves),
        live=[] if result is None else list(result.live),
        failed=[
            OffsetFailure(
                broker=move.queue.broker_name, queue=move.queue.queue_id, error=str(error)
            )
            for move, error in (() if result is None else result.failed)
        ],
        undo=saved,
    )


def _list_undos(plans: "list[UndoPlan]", *, as_json: bool) -> None:
    from penstock.cli.schemas.group_output import UndoRow
    from penstock.cli.terminal import time_text

    if as_json:
        print_json(
            [
                UndoRow(
                    name=plan.name,
                    saved_ms=plan.saved_ms,
                    group=plan.group,
                    topic=plan.topic,
                    nameservers=plan.nameservers,
                    namespace=plan.namespace,
                    queues=len(plan.offsets),
                )
                for plan in plans
            ]
        )
        return
    rows = [
        (
            plan.name,
            time_text(plan.saved_ms),
            plan.group,
            plan.topic,
            str(len(plan.offsets)),
            ";".join(plan.nameservers),
        )
        for plan in plans
    ]
    print_table(("PLAN", "SAVED", "GROUP", "TOPIC", "QUEUES", "NAMESERVERS"), rows)
