"""The program `penstock`: finds the command, runs it, turns what went wrong into one clear line.

Each noun is a module of its own and is imported only when it is called, and each command imports
what it needs when it runs: `penstock --help` costs little more than starting Python.

Exit codes: 0 good, 1 could not be done, 2 wrong usage or (from the store tools) damage found.
"""

import importlib
import os
import sys

import click

from penstock import __version__
from penstock.errors import PenstockError

# name → (module:attribute, the line in the list of commands)
COMMANDS = {
    "acl": ("penstock.cli.acl:acl", "Say what users may do: grant, deny, list, get, delete."),
    "broker": ("penstock.cli.broker_command:broker", "Run a broker."),
    "demo": (
        "penstock.cli.demo.demo_command:demo",
        "See it work: a killed broker, a pipeline on Spark.",
    ),
    "nameserver": ("penstock.cli.nameserver:nameserver", "Run a NameServer."),
    "pipeline": ("penstock.cli.pipeline:pipeline", "Run pipelines on Spark: list, describe, run."),
    "send": ("penstock.cli.send_command:send", "Send messages to a topic."),
    "store": ("penstock.cli.store_command:store", "Look into a store's files: stat, verify, dump."),
    "tail": ("penstock.cli.tail:tail", "Follow a topic without being one of its consumers."),
    "topic": ("penstock.cli.topic:topic", "Topics of brokers: list, create, describe, delete."),
    "up": ("penstock.cli.up:up", "Run a NameServer and brokers, ready to be used."),
    "user": ("penstock.cli.user:user", "Users of brokers: create, update, list, get, delete."),
}
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """A message broker that speaks Apache RocketMQ's protocol and stores its files."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments or os.environ.get("PENSTOCK_DEBUG") == "1"
    try:
        # --debug may stand anywhere: who has just seen an error appends it to the same line.
        rest = ["--debug"] * debug + [a for a in arguments if a != "--debug"]
        code = cli.main(rest, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("penstock: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `penstock store dump … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        print(f"penstock: {_one_line(error)}", file=sys.stderr)
        return 1


def _one_line(error: Exception) -> str:
    if isinstance(error, PenstockError):
        text = error.remark()
    elif isinstance(error, OSError):
        text = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    else:
        text = f"a bug of Penstock: {type(error).__name__}: {error}; --debug shows where"
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
