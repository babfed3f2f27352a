"""The program `penstock`: finds the command, runs it, and prints an error as one line.

Each noun has its own module, which is imported when the command is called. A command imports what
it needs when it runs, so that `penstock --help` takes little longer than starting Python.

Exit codes: 0 success, 1 failure, 2 wrong usage or (from the store tools) corruption, 3 the answer
is no (nothing found, not consumed, not healthy), 4 the answer is not known, 130 interrupted.
"""

import importlib
import io
import os
import sys

import click

from penstock.cli.confirmation.confirm import Declined
from penstock.errors import PenstockError
from penstock.version import VERSION

# name → (module:attribute, short help)
COMMANDS = {
    "acl": (
        "penstock.cli.access.acl_command:acl",
        "Manage access rules: grant, deny, list, get, delete.",
    ),
    "bench": ("penstock.cli.bench.bench_command:bench", "Measure a cluster: send, consume, e2e."),
    "broker": ("penstock.cli.servers.broker_command:broker", "Run a broker."),
    "check": (
        "penstock.cli.health.check_command:check",
        "Check a cluster, for Nagios and Kubernetes.",
    ),
    "cluster": (
        "penstock.cli.cluster_command:cluster",
        "Inspect masters and slaves: status, elections, promote.",
    ),
    "completion": (
        "penstock.cli.completion_command:completion",
        "Print the completion script for bash, zsh or fish.",
    ),
    "console": (
        "penstock.cli.servers.console_command:console",
        "Run the web console of a cluster.",
    ),
    "context": (
        "penstock.cli.context_command:context",
        "Manage named contexts: servers and credentials of clusters.",
    ),
    "controller": ("penstock.cli.servers.controller_command:controller", "Run a controller."),
    "demo": (
        "penstock.cli.demo.demo_command:demo",
        "Kill a broker under load and recover it, then run Spark pipelines.",
    ),
    "dlq": (
        "penstock.cli.messages.dlq_command:dlq",
        "Dead letters of a group: list, show, resend, export.",
    ),
    "doctor": (
        "penstock.cli.health.doctor_command:doctor",
        "Look for mistakes in the configuration of a cluster.",
    ),
    "explain": (
        "penstock.cli.messages.explain_command:explain",
        "Explain why a message was not consumed, or the state of a group.",
    ),
    "export": (
        "penstock.cli.definitions.definitions_command:export_definitions",
        "Write the definitions of a cluster to a file: topics, groups, users, rules.",
    ),
    "group": (
        "penstock.cli.group.group_command:group",
        "Manage consumer groups: settings, members, lag, offsets.",
    ),
    "import": (
        "penstock.cli.definitions.definitions_command:import_definitions",
        "Create or change what a file of definitions contains.",
    ),
    "message": (
        "penstock.cli.messages.message_command:message",
        "Find messages: find, show, resend.",
    ),
    "nameserver": ("penstock.cli.servers.nameserver_command:nameserver", "Run a NameServer."),
    "pipeline": (
        "penstock.cli.pipeline_command:pipeline",
        "Run Spark pipelines: list, describe, run.",
    ),
    "scheduled": (
        "penstock.cli.messages.waiting_command:scheduled",
        "Show and recall messages that wait for their delivery.",
    ),
    "send": ("penstock.cli.messages.send_command:send", "Send messages to a topic."),
    "store": (
        "penstock.cli.store_command:store",
        "Inspect store files: stat, verify, scrub, dump.",
    ),
    "tail": (
        "penstock.cli.messages.tail_command:tail",
        "Print the messages of a topic as they arrive.",
    ),
    "top": (
        "penstock.cli.top.top_command:top",
        "Show a live view of brokers, topics and groups.",
    ),
    "topic": ("penstock.cli.topic_command:topic", "Manage topics: list, create, describe, delete."),
    "transaction": (
        "penstock.cli.messages.waiting_command:transaction",
        "Show open transactions.",
    ),
    "up": ("penstock.cli.servers.up_command:up", "Run a NameServer and brokers on this machine."),
    "user": (
        "penstock.cli.access.user_command:user",
        "Manage users: create, update, list, get, delete.",
    ),
}
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that imports a command when it is called, not when it is listed."""

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
@click.version_option(VERSION, prog_name="penstock")
@click.option("--debug", is_flag=True, help="Log more, and print the traceback of an error.")
def cli(debug: bool) -> None:
    """A message broker that is compatible with Apache RocketMQ's protocol and store."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments or os.environ.get("PENSTOCK_DEBUG") == "1"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # where the locale lacks a character, it is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        # --debug may be anywhere: after an error users append it to the same command line.
        rest = ["--debug"] * debug + [a for a in arguments if a != "--debug"]
        code = cli.main(rest, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Declined as declined:
        print(f"penstock: {declined}", file=sys.stderr)
        return INTERRUPTED
    except (KeyboardInterrupt, click.Abort):
        print("penstock: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as in `penstock store dump … | head`
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
        text = (
            f"internal error, probably a bug in Penstock: {type(error).__name__}: {error}; "
            "run the command again with --debug for the traceback"
        )
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
