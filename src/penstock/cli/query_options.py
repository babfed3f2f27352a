"""Exit codes of commands that answer a question, and selections of messages by options."""

import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from penstock.cli.remote import CONTEXT_OPTION, ClusterOptions
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
    """A command line for the same servers: with the options that were given on this one.

    What comes from the environment or from the current context applies to the next command too.
    Credentials of the command line are not repeated.
    """
    if command is None:
        return None
    context = click.get_current_context()
    values = {
        "context": context.meta.get(CONTEXT_OPTION),
        "nameserver": cluster.nameserver,
        "namespace": cluster.namespace,
        "strict_signing": cluster.strict_signing,
        "tls": cluster.tls,
        "tls_ca": cluster.tls_ca,
    }
    more: list[str] = []
    for name, value in values.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "-n" if name == "nameserver" else f"--{name.replace('_', '-')}"
            more += [option] if value is True else [option, str(value)]
    return " ".join([command, shlex.join(more)]) if more else command


def print_partial(partial: Sequence[str]) -> None:
    """Say on stderr what could not be searched."""
    for text in partial:
        click.echo(f"penstock: incomplete: {text}", err=True)
