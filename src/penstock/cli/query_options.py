"""Exit codes of commands that answer a question, and selections of messages by options."""

import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from penstock.cli.remote import ClusterOptions
from penstock.cli.times import to_moment

F = TypeVar("F", bound=Callable[..., Any])

YES, NO, NOT_KNOWN = 0, 3, 4
"""Exit codes: the answer is yes (found, consumed, healthy), no, or not known."""

count_option = click.option(
    "--count",
    "count_max",
    type=click.IntRange(1),
    help="Maximum number of messages.",
)


def time_options(command: F) -> F:
    """Add --since and --until."""
    until, since = ("--until", "Stored up to this time."), ("--since", "Stored from this time on.")
    for name, text in (until, since):
        command = click.option(
            name, callback=to_moment, metavar="TIME", help=f"{text} A time, or an age such as 10m."
        )(command)
    return command


def with_servers(cluster: ClusterOptions, command: str | None) -> str | None:
    """A command line for the same servers as those of the options."""
    if command is None:
        return None
    more: list[str] = []
    if cluster.nameserver is not None and cluster.nameserver != os.environ.get("NAMESRV_ADDR"):
        more += ["-n", cluster.nameserver]
    if cluster.namespace:
        more += ["--namespace", cluster.namespace]
    return " ".join([command, shlex.join(more)]) if more else command


def print_partial(partial: Sequence[str]) -> None:
    """Say on stderr what could not be searched."""
    for text in partial:
        click.echo(f"penstock: incomplete: {text}", err=True)
