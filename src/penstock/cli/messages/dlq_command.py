"""`penstock dlq …`: the dead letters of a group."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import wraps
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import click

from penstock.cli.known_names import find_group
from penstock.cli.messages.message_text import (
    BODY_FORMATS,
    MESSAGE_HEADS,
    message_details,
    message_rows,
    stored_json,
)
from penstock.cli.messages.resend_dialog import plan_and_send, resend_options
from penstock.cli.query_options import NO, NOT_KNOWN, YES, count_option, print_partial, time_options
from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    json_text,
    print_json,
    print_table,
    run,
)
from penstock.cli.terminal import progress_bars
from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin
    from penstock.client.diagnosis import SearchResult

F = TypeVar("F", bound=Callable[..., Any])


@click.group(no_args_is_help=True)
def dlq() -> None:
    """Dead letters of a group: messages that its consumers could not handle."""


@dataclass(frozen=True)
class DeadLetterSelection:
    """Which dead letters of a group a command is about."""

    ids: tuple[str, ...] = ()
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    tags: str = "*"
    count_max: int | None = None

    async def read(
        self, admin: "AsyncAdmin", group: str, progress: "Callable[[int], None] | None" = None
    ) -> "SearchResult":
        from penstock.client.diagnosis import select_dead_letters

        if self.ids and (self.key or self.since or self.until):
            raise click.UsageError("--id can't be used with --key, --since or --until")
        given = {name: value for name, value in asdict(self).items() if value is not None}
        found = await select_dead_letters(admin, group, **given, progress=progress)
        if not found.messages and not found.is_incomplete:
            await _check_group(admin, group)
        return found


def _selection(command: F) -> F:
    """Add the options that select dead letters; the command gets a `selection`."""

    @wraps(command)
    def with_selection(*arguments: Any, **given: Any) -> Any:
        chosen = {field.name: given.pop(field.name) for field in fields(DeadLetterSelection)}
        return command(*arguments, selection=DeadLetterSelection(**chosen), **given)

    for option in (
        count_option,
        click.option("-t", "--tags", default="*", help='Only with these tags: "a || b".'),
        time_options,
        click.option("-k", "--key", help="Only with this key."),
        click.option(
            "--id",
            "ids",
            multiple=True,
            metavar="ID",
            help="Only this dead letter. Can be repeated.",
        ),
    ):
        with_selection = option(with_selection)
    return cast(F, with_selection)


@dlq.command(name="list")
@cluster_options
@click.argument("group")
@_selection
@json_option
def list_letters(
    cluster: ClusterOptions,
    group: str,
    selection: DeadLetterSelection,
    as_json: bool,
) -> int:
    """List the dead letters of GROUP, oldest first."""
    found = run(_select(cluster, group, selection))
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
    found = run(_select(cluster, group, DeadLetterSelection(ids=(message_id,))))
    if not found.messages:
        print_partial(found.partial)
        return NOT_KNOWN if found.is_incomplete else NO
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
    selection: DeadLetterSelection,
    everything: bool,
    to_topic: bool,
    dry_run: bool,
    rate: float | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Send dead letters of GROUP again, to the group, or with --to-topic to their topic.

    The plan is printed first. The dead letters stay in their topic: a second run sends them again.
    """
    if not everything and selection == DeadLetterSelection(count_max=selection.count_max):
        raise click.UsageError("give --id, --key, --since, --until, --tags or --all")

    async def select(admin: "AsyncAdmin") -> "SearchResult":
        return await selection.read(admin, group)

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
    selection: DeadLetterSelection,
    output: IO[str],
) -> int:
    """Write dead letters of GROUP as lines of JSON, oldest first."""
    found = run(_select(cluster, group, selection))
    for letter in found.messages:
        output.write(json_text(stored_json(letter)) + "\n")
    click.echo(f"exported {count_text(len(found.messages), 'dead letter')} of {group}", err=True)
    print_partial(found.partial)
    return 0


async def _check_group(admin: "AsyncAdmin", group: str) -> None:
    """Exit with the code of "not found" if there is no such group."""
    from penstock.errors import GroupNotExist

    try:
        await find_group(admin, group)
    except GroupNotExist as error:
        click.echo(f"penstock: {error.remark()}", err=True)
        raise click.exceptions.Exit(NO) from None


async def _select(
    cluster: ClusterOptions, group: str, selection: DeadLetterSelection
) -> "SearchResult":
    """The dead letters; on a terminal with a progress bar."""
    from penstock.client.diagnosis.resending import SELECTED_MAX

    async with cluster.admin() as admin:
        if not sys.stderr.isatty():
            return await selection.read(admin, group)
        total = min(selection.count_max or SELECTED_MAX, await _stored(admin, group))
        with progress_bars() as tell:
            return await selection.read(admin, group, lambda done: tell("reading", done, total))


async def _stored(admin: "AsyncAdmin", group: str) -> int:
    """The number of dead letters of a group; 0 if there is no topic of them."""
    from penstock.errors import NoRoute
    from penstock.wire.codes import DLQ_TOPIC_PREFIX

    try:
        described = await admin.describe_topic(DLQ_TOPIC_PREFIX + group)
    except NoRoute:
        return 0
    return sum(state.count for state in described.queues)
