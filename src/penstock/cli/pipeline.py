"""`penstock pipeline …`: ready pipelines on Spark."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.remote import Cluster, json_option, on_cluster, print_rows
from penstock.errors import BadSetting

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.pipelines.batch_progress import Batch
    from penstock.spark.pipelines.running import Option, Pipeline

F = TypeVar("F", bound=Callable[..., Any])
Tell = Callable[["Batch"], None]


@click.group(no_args_is_help=True)
def pipeline() -> None:
    """Ready pipelines on Spark: list, describe, run. They need penstock[spark]."""


@pipeline.command(name="list")
@json_option
def list_pipelines(as_json: bool) -> None:
    """List pipelines."""
    found = [_find(name) for name in _names()]
    if as_json:
        print(json.dumps({each.name: each.summary for each in found}, indent=2))
        return
    print_rows(("PIPELINE", "WHAT IT DOES"), [(each.name, each.summary) for each in found])


@pipeline.command()
@click.argument("name")
@json_option
def describe(name: str, as_json: bool) -> None:
    """Show what a pipeline does, its options, and what it writes."""
    found = _find(name)
    if as_json:
        print(json.dumps(_description(found), indent=2, ensure_ascii=False))
        return
    print(f"{found.name}: {found.summary}\n")
    rows = [(option.flag, _kind(option), _default(option), option.help) for option in found.options]
    rows.append(("--trigger", "text", found.trigger, "When batches begin."))
    print_rows(("OPTION", "KIND", "DEFAULT", ""), rows)
    print()
    print_rows(("WRITES", ""), [(table.where, table.text) for table in found.tables])


class _Runs(click.Group):
    """A command for each pipeline, with its options."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return _names()

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return _command(_find(name)) if name in _names() else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _names() and not args[0].startswith("-"):
            _find(args[0])
        return super().resolve_command(ctx, args)


@pipeline.group(cls=_Runs, no_args_is_help=True)
def run() -> None:
    """Run a pipeline until it ends, or until Ctrl-C or SIGTERM; started again it goes on."""


def _command(found: "Pipeline") -> click.Command:
    def call(
        cluster: Cluster,
        master: str | None,
        checkpoint: str | None,
        trigger: str | None,
        conf: tuple[str, ...],
        **options: Any,
    ) -> None:
        """Set up and run."""
        from penstock.spark.pipelines.running import run_pipeline

        settings = _settings(conf)
        with _usage():  # Spark takes ten seconds to start
            found.job(
                options, connection=_connection(cluster), checkpoint=checkpoint, trigger=trigger
            )
        with _session(found.name, master, settings) as spark, _progress() as tell, _usage():
            ended = run_pipeline(
                found,
                options,
                spark=spark,
                connection=_connection(cluster),
                checkpoint=checkpoint,
                trigger=trigger,
                say=_say,
                tell=tell,
            )
        if not ended:
            _say("stopped; started again it goes on where it was")

    full: Any = _with_running(on_cluster(call))
    for option in reversed(found.options):
        full = _click_option(option)(full)
    made = click.command(found.name, help=found.summary)(full)
    assert isinstance(made, click.Command)
    return made


def _with_running(command: F) -> F:
    """The options that every pipeline has."""
    result: Any = command
    for option in reversed(
        (
            click.option(
                "--master",
                help="Spark's master: local[2], spark://…, yarn, k8s://….  [default: local[*]]",
            ),
            click.option(
                "--checkpoint", metavar="PATH", help="Where Spark keeps how far it has come."
            ),
            click.option(
                "--trigger",
                help="once, available-now (all that is there, then end), or "
                'an interval: "10 seconds".',
            ),
            click.option(
                "--conf",
                multiple=True,
                metavar="KEY=VALUE",
                help="A setting of Spark's; may be given several times.",
            ),
        )
    ):
        result = option(result)
    return result  # type: ignore[no-any-return]


def _click_option(option: "Option") -> Callable[[Any], Any]:
    if option.kind is bool:
        return click.option(option.flag, option.name, is_flag=True, help=option.help)
    kind: Any = click.Choice(option.choices) if option.choices else option.kind
    return click.option(
        option.flag,
        option.name,
        type=kind,
        required=option.required,
        default=option.default,
        show_default=option.default not in (None, ""),
        help=option.help,
    )


@contextmanager
def _session(name: str, master: str | None, conf: dict[str, str]) -> "Iterator[SparkSession]":
    """A session that ends with the command."""
    from penstock.spark.pipelines.query_errors import for_people
    from penstock.spark.pipelines.running import stop_signals
    from penstock.spark.session import spark_session

    _say("starting Spark")
    # A JVM whose starter is gone before they have met stays for ever: so a signal waits that long.
    with for_people(), stop_signals() as stop:
        spark = spark_session(f"penstock {name}", master=master, conf=conf)
    if not _debug():  # what goes wrong comes as an exception, without its Java stack
        spark.sparkContext.setLogLevel("OFF")
    try:
        if stop.is_set():
            _say("stopped before anything was done")
            raise click.exceptions.Exit(0)
        yield spark
    finally:
        spark.stop()


@contextmanager
def _usage() -> Iterator[None]:
    """Options that can't be are wrong usage: exit code 2."""
    try:
        yield
    except BadSetting as error:
        if _debug():
            raise
        raise click.UsageError(error.remark()) from None


@contextmanager
def _progress() -> Iterator[Tell]:
    """A line for each batch on stdout, or a bar where stdout is a terminal."""
    if not sys.stdout.isatty():
        yield lambda batch: print(batch, flush=True)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns) as bars:
        tasks: dict[str, Any] = {}
        rows: dict[str, int] = {}

        def tell(batch: "Batch") -> None:
            name = batch.query
            if name not in tasks:
                tasks[name] = bars.add_task("")
            rows[name] = rows.get(name, 0) + batch.rows
            bars.update(
                tasks[name],
                completed=rows[name],
                total=rows[name] + (batch.lag or 0),
                description=f"{batch}, {rows[name]:,} in all",
            )

        yield tell


def _say(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)


def _connection(cluster: Cluster) -> dict[str, str]:
    """The same servers as options of format `penstock`."""
    options = {
        "nameserver": cluster.nameserver,
        "namespace": cluster.namespace,
        "accessKey": cluster.access_key,
        "secretKey": cluster.secret_key,
        "tls": "true" if cluster.tls else None,
        "tlsCa": cluster.tls_ca,
        "requestTimeout": str(cluster.timeout_ms),
    }
    return {name: value for name, value in options.items() if value}


def _settings(conf: tuple[str, ...]) -> dict[str, str]:
    for text in conf:
        if not text.partition("=")[1]:
            raise click.UsageError(f"--conf {text}: not as KEY=VALUE")
    return dict(text.split("=", 1) for text in conf)


def _debug() -> bool:
    context = click.get_current_context(silent=True)
    return bool(context and context.find_root().params.get("debug"))


def _names() -> list[str]:
    from penstock.spark.pipelines.running import PIPELINES

    return list(PIPELINES)


def _find(name: str) -> "Pipeline":
    try:
        from penstock.spark.pipelines.running import find_pipeline

        with _usage():
            return find_pipeline(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("penstock"):
            raise
        raise click.ClickException(
            f"pipelines need Spark, and {error.name} is not installed: pip install penstock[spark]"
        ) from None


def _kind(option: "Option") -> str:
    return "|".join(option.choices) or {str: "text", int: "number", float: "number"}.get(
        option.kind, "switch"
    )


def _default(option: "Option") -> str:
    if option.required:
        return "needed"
    return "-" if option.default in (None, "", False) else str(option.default)


def _description(found: "Pipeline") -> dict[str, Any]:
    return {
        "name": found.name,
        "summary": found.summary,
        "trigger": found.trigger,
        "options": [
            {
                "name": option.name,
                "flag": option.flag,
                "kind": _kind(option),
                "default": option.default,
                "needed": option.required,
                "help": option.help,
            }
            for option in found.options
        ],
        "writes": [{"where": table.where, "what": table.text} for table in found.tables],
    }
