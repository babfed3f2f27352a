"""`penstock cluster …`: the replicas of a cluster."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    print_json,
    print_table,
    run,
)

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import ReplicaStatus

T = TypeVar("T")

UNKNOWN = "unknown"
NOT_APPLICABLE = "-"


@click.group(no_args_is_help=True)
def cluster() -> None:
    """Inspect the replicas of running brokers, Penstock's or Apache's."""


@cluster.command()
@cluster_options
@click.option("-c", "--cluster", "in_cluster", help="Only brokers of this cluster.")
@json_option
def status(cluster: ClusterOptions, in_cluster: str | None, as_json: bool) -> None:
    """Show the role, epoch, log end and lag of each master and slave."""

    async def work() -> "tuple[ReplicaStatus, ...]":
        async with cluster.admin() as admin:
            return await admin.replicas(in_cluster)

    replicas = run(work())
    if as_json:
        print_json([_json(replica) for replica in replicas])
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


def _json(replica: "ReplicaStatus") -> dict[str, object]:
    broker = replica.broker
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
    }
