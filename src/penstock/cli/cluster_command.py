"""`penstock cluster …`: the replicas of a cluster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

import click

from penstock.cli.confirmation.confirm import confirm, yes_option
from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    print_json,
    print_table,
    run,
)
from penstock.errors import Refused

if TYPE_CHECKING:
    from penstock.cli.schemas.cluster_output import PromotionOutput
    from penstock.client.admin.async_admin import (
        Election,
        ElectionHistory,
        PromotionPlan,
        ReplicaStatus,
    )

T = TypeVar("T")

UNKNOWN = "unknown"
NOT_APPLICABLE = "-"

ELECTIONS_OF_STATUS = 5
"""The elections of each broker below the table of `cluster status`; `cluster elections` has all."""


@click.group(no_args_is_help=True)
def cluster() -> None:
    """Inspect the replicas of running brokers, Penstock's or Apache's, and change the master."""


@cluster.command()
@cluster_options
@click.option("-c", "--cluster", "in_cluster", help="Only brokers of this cluster.")
@json_option
def status(cluster: ClusterOptions, in_cluster: str | None, as_json: bool) -> None:
    """Show the role, epoch, log end and lag of each replica, and the last elections."""

    async def work() -> "tuple[tuple[ReplicaStatus, ...], tuple[ElectionHistory, ...]]":
        async with cluster.admin() as admin:
            replicas = await admin.replicas(in_cluster)
            return replicas, await admin.election_histories(replicas)

    replicas, histories = run(work())
    if as_json:
        by_name = {history.broker: history for history in histories}
        print_json([_json(replica, by_name.get(replica.broker.name)) for replica in replicas])
        return
    heads = ("BROKER", "ID", "ADDRESS", "ROLE", "EPOCH", "LOG END", "BEHIND", "IN SYNC")
    print_table(heads, [_row(replica) for replica in replicas])
    for replica in replicas:
        broker = replica.broker
        why = str(replica.problem or replica.error)
        if why:
            print(f"{broker.name} {broker.id} ({broker.address}): {why}")
    named = {replica.broker.name for replica in replicas}
    for name in sorted(named - {r.broker.name for r in replicas if r.broker.is_master}):
        print(f"{name} has no master")
    newest = [one for each in histories for one in each.elections[-ELECTIONS_OF_STATUS:]]
    if newest:
        print("\nLast elections:")
        _print_elections(newest)
    for history in histories:
        if history.problem is not None:
            print(f"the elections of {history.broker} are unknown: {history.problem}")


@cluster.command()
@cluster_options
@click.option("-c", "--cluster", "in_cluster", help="Only brokers of this cluster.")
@json_option
def elections(cluster: ClusterOptions, in_cluster: str | None, as_json: bool) -> None:
    """Show the last elections of masters by controllers, the newest last."""

    async def work() -> "tuple[Election, ...]":
        async with cluster.admin() as admin:
            return await admin.elections(in_cluster)

    found = run(work())
    if as_json:
        print_json([asdict(election) for election in found])
        return
    _print_elections(found)


@cluster.command()
@cluster_options
@click.argument("broker")
@click.argument("broker_id", metavar="ID", type=click.IntRange(1))
@click.option("-c", "--cluster", "in_cluster", help="The cluster of the broker.")
@click.option(
    "--role",
    type=click.Choice(["sync_master", "async_master"]),
    help="Role of the new master.  [default: that of the present one, or sync_master]",
)
@click.option(
    "--force", is_flag=True, help="Promote even if no master answers. Make sure that none runs."
)
@yes_option
@json_option
def promote(
    cluster: ClusterOptions,
    broker: str,
    broker_id: int,
    in_cluster: str | None,
    role: str | None,
    force: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Make the slave with this ID the master of its broker.

    The current master stops accepting messages, waits until the slave has all of them, and becomes
    the slave with this ID. Sends fail in the meantime. Both keep their roles when they restart.

    If controllers elect the master, they elect this slave, which must be in sync.
    """

    async def plan() -> "PromotionPlan":
        async with cluster.admin() as admin:
            return await admin.plan_promotion(
                broker, broker_id, cluster=in_cluster, role=role, force=force
            )

    async def work(plan: "PromotionPlan") -> tuple[str, ...]:
        async with cluster.admin() as admin:
            return await admin.promote(plan)

    planned = run(plan())
    for line in _plan_lines(planned):
        click.echo(line, err=as_json)
    if not yes:
        confirm(yes=yes)
        before, planned = planned, run(plan())  # the question may have waited for long
        if list(_plan_lines(before)) != list(_plan_lines(planned)):
            raise Refused(
                "the state of the replicas has changed in the meantime",
                hint="run the command again and look at the new plan",
            )
    problems = run(work(planned))
    if as_json:
        print_json(_promotion_json(planned, problems))
        return
    epoch = f", epoch {planned.epoch}" if planned.epoch else ""
    print(f"{planned.slave.broker.address} is the master of {broker} ({planned.role}{epoch})")
    if planned.master is None and not planned.controllers:
        print("the old master could not be asked to step down; if it still runs, stop it now")
    for problem in problems:
        print(problem)


def _promotion_json(planned: "PromotionPlan", problems: Sequence[str]) -> "PromotionOutput":
    from penstock.cli.schemas.cluster_output import PromotionOutput

    broker = planned.slave.broker
    return PromotionOutput(
        broker=broker.name,
        id=broker.id,
        address=broker.address,
        role=planned.role,
        epoch=planned.epoch or None,
        stepped_down=None if planned.master is None else planned.master.broker.address,
        problems=list(problems),
    )


def _plan_lines(plan: "PromotionPlan") -> Iterator[str]:
    slave, master = plan.slave, plan.master
    yield (
        f"{slave.broker.name} {slave.broker.id} ({slave.broker.address}) becomes the master "
        f"({plan.role})"
    )
    if plan.controllers:
        yield f"the controllers {';'.join(plan.controllers)} elect it; the other replicas follow"
        return
    if master is not None:
        yield f"the current master {master.broker.address} becomes slave {slave.broker.id}"
    else:
        yield f"no master answers: messages beyond log offset {slave.log_end} are lost"
    for other in plan.others:
        yield f"slave {other.broker.id} ({other.broker.address}) follows it"
    for other in plan.unknown:
        lost = "" if master is not None else "; what only it has is lost"
        yield f"slave {other.broker.id} ({other.broker.address}) does not answer{lost}"


def _print_elections(elections: "Sequence[Election]") -> None:
    rows = [
        (
            one.broker,
            str(one.epoch),
            str(one.master_id),
            datetime.fromtimestamp(one.time_ms / 1000).isoformat(" ", "milliseconds"),
            one.reason,
        )
        for one in elections
    ]
    print_table(("BROKER", "EPOCH", "MASTER", "TIME", "REASON"), rows)


def _row(replica: "ReplicaStatus") -> tuple[str, ...]:
    broker = replica.broker
    no_epochs = UNKNOWN if replica.problem is not None else NOT_APPLICABLE
    return (
        broker.name,
        str(broker.id),
        broker.address,
        replica.role or UNKNOWN,
        no_epochs if replica.epoch is None else str(replica.epoch),
        _text(replica.log_end, str),
        NOT_APPLICABLE if broker.is_master else _text(replica.behind, str),
        NOT_APPLICABLE
        if broker.is_master
        else _text(replica.in_sync, lambda true: "yes" if true else "no"),
    )


def _text(value: T | None, form: Callable[[T], str]) -> str:
    return UNKNOWN if value is None else form(value)


def _json(replica: "ReplicaStatus", history: "ElectionHistory | None") -> dict[str, object]:
    broker = replica.broker
    elections = None
    if history is not None and history.problem is None:
        elections = [asdict(election) for election in history.elections]
    return {
        "cluster": broker.cluster,
        "broker": broker.name,
        "id": broker.id,
        "address": broker.address,
        "role": replica.role,
        "epoch": replica.epoch,
        "log_end": replica.log_end,
        "behind": replica.behind,
        "in_sync": replica.in_sync,
        "error": str(replica.problem or replica.error) or None,
        "elections": elections,
    }
