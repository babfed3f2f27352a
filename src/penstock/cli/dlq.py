"""`penstock dlq …`: the dead letters of a group."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.answers import NO, NOT_KNOWN, YES, count_option, print_partial, time_options
from penstock.cli.message_text import (
    BODY_FORMATS,
    MESSAGE_HEADS,
    message_details,
    message_rows,
    stored_json,
)
from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    print_json,
    print_table,
    run,
)
from penstock.cli.resending import plan_and_send, resend_options

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin
    from penstock.client.diagnosis import SearchResult

F = TypeVar("F", bound=Callable[..., Any])


@click.group(no_args_is_help=True)
def dlq() -> None:
    """Dead letters of a group: messages that its consumers could not handle."""


def _selection(command: F) -> F:
    """Add the options that select dead letters."""
    for option in (
        count_option,
        click.option("-t", "--tags", default="*", help='Only with these tags: "a || b".'),
        time_options,
        click.option("-k", "--key", help="Only with this key."),
        click.option("--id", "ids", multiple=True, metavar="ID", help="This one. Can be repeated."),
    ):
        command = option(command)
    return command


@dlq.command(name="list")
@cluster_options
@click.argument("group")
@_selection
@json_option
def list_letters(
    cluster: ClusterOptions,
    group: str,
    ids: tuple[str, ...],
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    tags: str,
    count_max: int | None,
    as_json: bool,
) -> int:
    """List the dead letters of GROUP, oldest first."""
    found = run(_select(cluster, group, ids, key, since, until, tags, count_max))
    if as_json:
        print_json([stored_json(letter) for letter in found.messages])
    elif found.messages:
        print_table(MESSAGE_HEADS, message_rows(found.messages))
    else:
        print(f"the group {group} has no such dead letters")
    print_partial(found.partial)
    return 0


@dlq.command()
@cluster_options
@click.argument("group")
@click.argument("message_id", metavar="ID")
@click.option(
    "--body",
    "form",
    type=click.Choice(BODY_FORMATS),
    default="auto",
    show_default=True,
    help="How to print the body.",
)
@json_option
def show(cluster: ClusterOptions, group: str, message_id: str, form: str, as_json: bool) -> int:
    """Show one dead letter of GROUP with its properties and its body."""
    found = run(_select(cluster, group, (message_id,), None, None, None, "*", None))
    if not found.messages:
        print_partial(found.partial)
        return NOT_KNOWN if len(found.partial) > 1 else NO
    letter = found.messages[-1]
    if as_json:
        print_json(stored_json(letter))
    else:
        print(message_details(letter, form))
    return YES


@dlq.command()
@cluster_options
@click.argument("group")
@_selection
@click.option("--all", "everything", is_flag=True, help="All dead letters of the group.")
@click.option(
    "--to-topic", is_flag=True, help="Send to the original topic, where all groups receive them."
)
@resend_options
def resend(
    cluster: ClusterOptions,
    group: str,
    ids: tuple[str, ...],
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    tags: str,
    count_max: int | None,
    everything: bool,
    to_topic: bool,
    dry_run: bool,
    rate: float | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Send dead letters of GROUP again, to the group only or with --to-topic to their topic.

    The plan is printed first. The dead letters stay in their topic: a second run sends them again.
    """
    if not (ids or key or since or until or everything or tags != "*"):
        raise click.UsageError("give --id, --key, --since, --until, --tags or --all")

    async def select(admin: "AsyncAdmin") -> "SearchResult":
        return await _letters(admin, group, ids, key, since, until, tags, count_max)

    return plan_and_send(
        cluster,
        select,
        None if to_topic else group,
        dry_run=dry_run,
        rate=rate,
        yes=yes,
        as_json=as_json,
    )


@dlq.command()
@cluster_options
@click.argument("group")
@_selection
@click.option(
    "-o",
    "--output",
    type=click.File("w", encoding="utf-8"),
    default="-",
    metavar="FILE",
    help="Write to this file.  [default: stdout]",
)
def export(
    cluster: ClusterOptions,
    group: str,
    ids: tuple[str, ...],
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    tags: str,
    count_max: int | None,
    output: IO[str],
) -> int:
    """Write dead letters of GROUP as lines of JSON, oldest first."""
    found = run(_select(cluster, group, ids, key, since, until, tags, count_max))
    for letter in found.messages:
        output.write(json.dumps(stored_json(letter), ensure_ascii=False) + "\n")
    click.echo(f"exported {len(found.messages):,} dead letters of {group}", err=True)
    print_partial(found.partial)
    return 0


async def _select(cluster: ClusterOptions, *arguments: Any) -> "SearchResult":
    async with cluster.admin() as admin:
        return await _letters(admin, *arguments)


async def _letters(
    admin: "AsyncAdmin",
    group: str,
    ids: tuple[str, ...],
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    tags: str,
    count_max: int | None,
) -> "SearchResult":
    from penstock.client.diagnosis import select_dead_letters

    if ids and (key or since or until):
        raise click.UsageError("--id can't be used with --key, --since or --until")
    limit = {} if count_max is None else {"count_max": count_max}
    return await select_dead_letters(
        admin, group, ids=ids, key=key, since=since, until=until, tags=tags, **limit
    )
