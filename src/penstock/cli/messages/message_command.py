"""`penstock message …`: find messages, show them, send them again."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import click

from penstock.cli.known_names import check_topic
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
    print_json,
    print_table,
    run,
)
from penstock.cli.terminal import progress_bars
from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin
    from penstock.client.diagnosis import SearchResult
    from penstock.client.received_message import ReceivedMessage

FOUND_MAX = 64

topic_option = click.option(
    "--topic", help="The topic. Without it, the indexes of up to --topics-max topics are searched."
)
filter_options = (
    click.option("-t", "--tags", default="*", help='Only messages with these tags: "a || b".'),
    click.option("--sql", help="Only messages that match this SQL92 expression."),
)


@click.group(no_args_is_help=True)
def message() -> None:
    """Find messages, show them, and send them again."""


@message.command()
@cluster_options
@click.argument("what", required=False)
@topic_option
@click.option("-k", "--key", help="Search only keys.")
@time_options
@filter_options[0]
@filter_options[1]
@click.option("--newest", is_flag=True, help="List the newest messages of a topic first.")
@count_option
@click.option(
    "--topics-max",
    type=click.IntRange(1),
    default=1_000,
    show_default=True,
    help="Maximum number of topics to search if no topic is given.",
)
@json_option
def find(
    cluster: ClusterOptions,
    what: str | None,
    topic: str | None,
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    tags: str,
    sql: str | None,
    newest: bool,
    count_max: int | None,
    topics_max: int,
    as_json: bool,
) -> int:
    """Find messages by id, key, place or time.

    WHAT is a unique id, an offset id, a key, or a place such as orders/broker-a/3@1042. Without
    WHAT and --key, the messages of --topic in the time range are listed.
    """
    if what is None and key is None and topic is None:
        raise click.UsageError("give WHAT, --key or --topic")
    if what is not None and key is not None:
        raise click.UsageError("WHAT and --key can't be used together")

    async def work() -> "SearchResult":
        from penstock.client.diagnosis import find_messages

        async with cluster.admin() as admin:
            await check_topic(admin, topic)
            with progress_bars() as tell:
                return await find_messages(
                    admin,
                    what,
                    topic=topic,
                    key=key,
                    since=since,
                    until=until,
                    tags=tags,
                    sql=sql,
                    newest_first=newest,
                    count_max=count_max or FOUND_MAX,
                    topics_max=topics_max,
                    progress=partial(tell, "topics"),
                )

    found = run(work())
    if as_json:
        print_json(
            {
                "how": found.how,
                "partial": list(found.partial),
                "messages": [stored_json(one) for one in found.messages],
            }
        )
    elif found.messages:
        print_table(MESSAGE_HEADS, message_rows(found.messages))
    else:
        print(f"no message was found; {found.how}")
    if not as_json:
        print_partial(found.partial)
    return YES if found.messages else NOT_KNOWN if found.is_partial else NO


@message.command()
@cluster_options
@click.argument("what")
@click.option("--topic", help="The topic. Without it, all topics are searched.")
@click.option(
    "--body",
    "form",
    type=click.Choice(BODY_FORMATS),
    default="auto",
    show_default=True,
    help="How to print the body; auto: JSON, text or MessagePack if it is that, or hex.",
)
@json_option
def show(cluster: ClusterOptions, what: str, topic: str | None, form: str, as_json: bool) -> int:
    """Show a message with its properties and its body.

    WHAT is a unique id, an offset id, a key, or a place such as orders/broker-a/3@1042. If several
    messages match, the newest is shown.
    """
    found = run(_find_one(cluster, what, topic))
    if not found.messages:
        print_partial(found.partial)
        click.echo(f"penstock: no message was found; {found.how}", err=True)
        return NOT_KNOWN if found.is_partial else NO
    newest = found.messages[-1]
    if as_json:
        print_json(stored_json(newest))
    else:
        print(message_details(newest, form))
        if len(found.messages) > 1:
            click.echo(
                f"penstock: {len(found.messages)} messages match; this is the newest", err=True
            )
    return YES


@message.command()
@cluster_options
@click.argument("what", nargs=-1)
@click.option("--topic", help="The topic of the messages.")
@click.option("-k", "--key", help="Messages of --topic with this key.")
@time_options
@filter_options[0]
@filter_options[1]
@count_option
@click.option(
    "--to-group", metavar="GROUP", help="Send to this group only, through its retry topic."
)
@resend_options
def resend(
    cluster: ClusterOptions,
    what: tuple[str, ...],
    topic: str | None,
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    tags: str,
    sql: str | None,
    count_max: int | None,
    to_group: str | None,
    dry_run: bool,
    rate: float | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Send messages again: those given by WHAT, or a selection of --topic.

    If several messages match an id, the newest is sent; if they match a key, all of them are.
    The copies go to the original topic, where all groups receive them, or with --to-group to one
    group. The plan is printed first. A failed send may have stored its copy.
    """
    selects = topic is not None and (key or since or until or sql)
    if bool(what) == bool(selects):
        raise click.UsageError("give either WHAT, or --topic with --key, --since, --until or --sql")

    async def select(admin: "AsyncAdmin") -> "SearchResult":
        from penstock.client.diagnosis import select_messages

        await check_topic(admin, topic)
        if what:
            return await _find_all(admin, what, topic, count_max or FOUND_MAX)
        assert topic is not None
        return await select_messages(
            admin,
            topic,
            key=key,
            since=since,
            until=until,
            tags=tags,
            sql=sql,
            **({} if count_max is None else {"count_max": count_max}),
        )

    return plan_and_send(
        cluster, select, to_group, dry_run=dry_run, rate=rate, yes=yes, as_json=as_json
    )


async def _find_one(cluster: ClusterOptions, what: str, topic: str | None) -> "SearchResult":
    from penstock.client.diagnosis import find_messages

    async with cluster.admin() as admin:
        await check_topic(admin, topic)
        return await find_messages(admin, what, topic=topic)


async def _find_all(
    admin: "AsyncAdmin", wanted: tuple[str, ...], topic: str | None, count_max: int
) -> "SearchResult":
    """All messages with one of these ids, keys or places: of those with one id, the newest."""
    from penstock.client.diagnosis import SearchResult, find_messages

    messages: list[ReceivedMessage] = []
    gaps: list[str] = []
    missing: list[str] = []
    for text in wanted:
        found = await find_messages(admin, text, topic=topic, count_max=count_max)
        matching = _newest_of_each(found.messages)
        if not matching:
            missing.append(f"{text} was not found")
        if len(matching) > 1:
            click.echo(
                f"penstock: {text} is a key of {count_text(len(matching), 'message')}", err=True
            )
        gaps += found.partial
        messages += matching
    how = "searched each of them"
    return SearchResult(tuple(messages), how, (), (*gaps, *missing), tuple(missing))


def _newest_of_each(messages: "Sequence[ReceivedMessage]") -> "list[ReceivedMessage]":
    """The newest message with each id, without internal copies if there are others."""
    from penstock.client.admin.admin_resend import origin_topic

    visible = [message for message in messages if origin_topic(message) is not None]
    return list({message.message_id: message for message in visible or messages}.values())
