"""`penstock tail`: prints the messages of a topic as they arrive."""

import asyncio
import contextlib
import os
import stat
import sys
from typing import TYPE_CHECKING

import click

from penstock.cli.messages.message_text import message_json, one_line
from penstock.cli.name_completion import topic_names
from penstock.cli.remote import ClusterOptions, cluster_options, json_option, json_text, run
from penstock.cli.times import read_moment

if TYPE_CHECKING:
    from penstock.client.admin.admin_follow import StartAt
    from penstock.client.received_message import ReceivedMessage


def _read_start(context: click.Context, option: click.Parameter, text: str) -> "StartAt":
    if text == "first":
        return "first"
    if text == "last":
        return "last"
    try:
        return read_moment(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}, or first or last") from None


@click.command(short_help="Print the messages of a topic as they arrive.")
@cluster_options
@click.argument("topic", shell_complete=topic_names)
@click.option(
    "--from",
    "start_at",
    default="last",
    show_default=True,
    callback=_read_start,
    metavar="first|last|TIME",
    help="Where to start. TIME is a time or an age such as 10m.",
)
@click.option("-t", "--tags", default="*", help='Only messages with these tags: "a || b".')
@click.option("--sql", help="Only messages that match this SQL92 expression.")
@click.option("--count", type=click.IntRange(1), help="Stop after this many messages.")
@click.option("--group", help="Consumer group in requests to brokers that check access rules.")
@json_option
def tail(
    cluster: ClusterOptions,
    topic: str,
    start_at: "StartAt",
    tags: str,
    sql: str | None,
    count: int | None,
    group: str | None,
    as_json: bool,
) -> int:
    """Print the messages of TOPIC as they arrive, until Ctrl-C.

    Consumer groups are not affected. The messages of one queue are printed in order. --json prints
    each message as a line of JSON.
    """
    work = _follow(cluster, topic, start_at, tags, sql, count, group, as_json=as_json)
    with contextlib.suppress(KeyboardInterrupt):
        run(work)
    return 0


async def _follow(
    cluster: ClusterOptions,
    topic: str,
    start_at: "StartAt",
    tags: str,
    sql: str | None,
    count: int | None,
    group: str | None,
    *,
    as_json: bool,
) -> None:
    from penstock.wire.codes import GROUP_TOOLS_CONSUMER

    show = _as_json if as_json else _as_text
    _end_with_reader()
    async with cluster.admin() as admin:
        following = admin.follow(
            topic, start_at=start_at, tags=tags, sql=sql, group=group or GROUP_TOOLS_CONSUMER
        )
        async with contextlib.aclosing(following) as messages:
            seen = 0
            async for message in messages:
                print(show(message), flush=True)
                seen += 1
                if seen == count:
                    return


def _end_with_reader() -> None:
    """Stop when the reader of the output pipe has gone, as in `tail … | head`."""
    task = asyncio.current_task()
    assert task is not None
    if stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
        asyncio.get_running_loop().add_reader(sys.stdout.fileno(), task.cancel)


def _as_text(message: "ReceivedMessage") -> str:
    from penstock.cli.terminal import time_text

    words = [time_text(message.store_ms), f"{message.broker_name}/{message.queue_id}"]
    words.append(f"@{message.queue_offset}")
    if message.tags:
        words.append(f"[{message.tags}]")
    if message.keys:
        words.append(f"({' '.join(message.keys)})")
    return one_line(" ".join([*words, message.body.decode("utf-8", "backslashreplace")]))


def _as_json(message: "ReceivedMessage") -> str:
    return json_text(message_json(message))
