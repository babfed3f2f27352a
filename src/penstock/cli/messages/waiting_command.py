"""`penstock scheduled …` and `penstock transaction …`: messages that wait at the broker."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.confirmation.confirm import confirm, yes_option
from penstock.cli.name_completion import topic_names
from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    print_json,
    print_table,
    run,
)

if TYPE_CHECKING:
    from penstock.cli.schemas.message_output import WaitingMessages
    from penstock.client.admin.async_admin import OpenTransactions, ScheduledMessages

F = TypeVar("F", bound=Callable[..., Any])


def _list_options(command: F) -> F:
    """Add the options of the commands that list waiting messages."""
    for option in (
        json_option,
        click.option(
            "--scan", "scan_max", type=click.IntRange(1), default=2_000, show_default=True,
            help="Read at most this many records on each broker.",
        ),
        click.option(
            "--count", "count_max", type=click.IntRange(1), default=1_000, show_default=True,
            help="Show at most this many messages.",
        ),
        click.option(
            "-t", "--topic", shell_complete=topic_names, help="Only messages of this topic."
        ),
        click.option("-c", "--cluster", "in_cluster", help="Only brokers of this cluster."),
        cluster_options,
    ):  # fmt: skip
        command = option(command)
    return command


@click.group(no_args_is_help=True)
def scheduled() -> None:
    """Show and recall delayed messages and timer messages that wait for their delivery."""


@scheduled.command(name="list")
@_list_options
def list_scheduled(
    cluster: ClusterOptions,
    in_cluster: str | None,
    topic: str | None,
    count_max: int,
    scan_max: int,
    as_json: bool,
) -> None:
    """List messages that wait, by delivery time.

    Reads the records of the broker's internal topics. With access control this needs the
    permission Get on these topics and on the topics of the messages.
    """

    async def work() -> "ScheduledMessages":
        async with cluster.admin() as admin:
            return await admin.scheduled(
                topic=topic, cluster=in_cluster, count_max=count_max, scan_max=scan_max
            )

    found = run(work())
    if as_json:
        print_json(_scheduled_json(found))
        return
    from penstock.cli.terminal import time_text

    rows = [
        (
            time_text(one.deliver_ms),
            one.topic,
            one.broker_name,
            "timer" if one.level is None else f"level {one.level}",
            one.message_id,
            " ".join(one.keys) or "-",
        )
        for one in found.messages
    ]
    if not rows:
        print("no message waits" + ("" if topic is None else f" for its delivery to {topic}"))
    else:
        print_table(("DELIVERY", "TOPIC", "BROKER", "KIND", "MESSAGE", "KEYS"), rows)
    _print_gaps(found.partial, found.unreachable)
    levels = ", ".join(f"level {level}: {count:,}" for level, count in found.by_level.items())
    topics = ", ".join(f"{name}: {count:,}" for name, count in found.by_topic.items())
    print(f"waiting by delay level: {levels or 'none'}")
    print(f"waiting timer messages by topic: {topics or 'none'}")


@scheduled.command()
@cluster_options
@click.argument("handles", metavar="HANDLE...", nargs=-1, required=True)
@yes_option
@json_option
def recall(cluster: ClusterOptions, handles: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Cancel timer messages by their recall handles.

    A handle is in the receipt of a message, and in the JSON of `penstock scheduled list`.
    """
    from penstock.client.admin.admin_waiting import read_recall_handle

    async def work() -> list[str]:
        async with cluster.admin() as admin:
            return [await admin.recall(handle) for handle in handles]

    places = [read_recall_handle(handle) for handle in handles]
    if not yes:
        for place in places:
            click.echo(
                f"message {place.message_id} of {place.topic} at {place.broker_name}", err=True
            )
        confirm("Recall it?" if len(places) == 1 else "Recall them?", yes=yes)
    done = run(work())
    if as_json:
        from penstock.cli.schemas.message_output import RecalledMessage

        print_json([RecalledMessage(message_id=one) for one in done])
        return
    for message_id in done:
        print(f"recalled {message_id}")


@click.group(no_args_is_help=True)
def transaction() -> None:
    """Show transactions that are neither committed nor rolled back."""


@transaction.command(name="list")
@_list_options
def list_transactions(
    cluster: ClusterOptions,
    in_cluster: str | None,
    topic: str | None,
    count_max: int,
    scan_max: int,
    as_json: bool,
) -> None:
    """List open half messages, oldest first, with their number of checks.

    Brokers do not report when the next check is due.
    """

    async def work() -> "OpenTransactions":
        async with cluster.admin() as admin:
            return await admin.open_transactions(
                topic=topic, cluster=in_cluster, count_max=count_max, scan_max=scan_max
            )

    found = run(work())
    if as_json:
        from penstock.cli.schemas.message_output import HalfMessageList, HalfMessageRow

        rows = [
            HalfMessageRow(
                topic=one.topic,
                group=one.group,
                broker=one.broker_name,
                message_id=one.message_id,
                keys=list(one.keys),
                tags=one.tags,
                born_ms=one.born_ms,
                store_ms=one.store_ms,
                checks=one.checks,
                queue_offset=one.queue_offset,
            )
            for one in found.messages
        ]
        gaps, away = list(found.partial), list(found.unreachable)
        print_json(HalfMessageList(messages=rows, partial=gaps, unreachable=away))
        return
    from penstock.cli.terminal import time_text

    if not found.messages:
        print("no transaction is open" + ("" if topic is None else f" in {topic}"))
    else:
        print_table(
            ("SENT", "TOPIC", "GROUP", "BROKER", "CHECKS", "MESSAGE", "KEYS"),
            [
                (
                    time_text(one.born_ms),
                    one.topic,
                    one.group,
                    one.broker_name,
                    str(one.checks),
                    one.message_id,
                    " ".join(one.keys) or "-",
                )
                for one in found.messages
            ],
        )
    _print_gaps(found.partial, found.unreachable)


def _print_gaps(partial: Iterable[str], unreachable: Iterable[str]) -> None:
    for text in partial:
        print(f"partial: {text}")
    for broker in unreachable:
        print(f"partial: {broker} can't be reached")


def _scheduled_json(found: "ScheduledMessages") -> "WaitingMessages":
    from penstock.cli.schemas.message_output import WaitingMessage, WaitingMessages

    return WaitingMessages(
        messages=[
            WaitingMessage(
                topic=one.topic,
                broker=one.broker_name,
                queue=one.queue_id,
                message_id=one.message_id,
                keys=list(one.keys),
                tags=one.tags,
                deliver_ms=one.deliver_ms,
                store_ms=one.store_ms,
                level=one.level,
                recall_handle=one.recall_handle,
            )
            for one in found.messages
        ],
        by_level={str(level): count for level, count in found.by_level.items()},
        by_topic=found.by_topic,
        partial=list(found.partial),
        unreachable=list(found.unreachable),
    )
