"""`penstock pipeline …`: ready-made Spark pipelines."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.pipeline_record import recorded
from penstock.cli.remote import (
    ClusterOptions,
    cluster_options,
    json_option,
    print_json,
    print_table,
)
from penstock.errors import BadSetting
from penstock.extras import how_to_install

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.pipelines.batch_progress import BatchProgress
    from penstock.spark.pipelines.running import Option, Pipeline

F = TypeVar("F", bound=Callable[..., Any])
ReportBatch = Callable[["BatchProgress"], None]


@click.group(no_args_is_help=True)
def pipeline() -> None:
    """Run ready-made Spark pipelines. Needs the extra spark."""


@pipeline.command(name="list")
@json_option
def list_pipelines(as_json: bool) -> None:
    """List pipelines."""
    found = [_find(name) for name in _names()]
    if as_json:
        print_json({each.name: each.summary for each in found})
        return
    print_table(("PIPELINE", "DESCRIPTION"), [(each.name, each.summary) for each in found])


@pipeline.command()
@click.argument("name")
@json_option
def describe(name: str, as_json: bool) -> None:
    """Show what a pipeline does, its options and its output."""
    found = _find(name)
    if as_json:
        print_json(_description(found))
        return
    print(f"{found.name}: {found.summary}\n")
    rows = [(option.flag, _kind(option), _default(option), option.help) for option in found.options]
    rows.append(("--trigger", "text", found.trigger, "When batches start."))
    print_table(("OPTION", "KIND", "DEFAULT", ""), rows)
    print()
    print_table(("WRITES", ""), [(output.where, output.text) for output in found.outputs])


class _RunGroup(click.Group):
    """A group with one command per pipeline."""

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


@pipeline.group(cls=_RunGroup, no_args_is_help=True)
def run() -> None:
    """Run a pipeline until it ends, or until Ctrl-C or SIGTERM.

    A stopped pipeline continues where it left off when it is run again.
    """


def _command(found: "Pipeline") -> click.Command:
    def call(
        cluster: ClusterOptions,
        master: str | None,
        checkpoint: str | None,
        trigger: str | None,
        conf: tuple[str, ...],
        **options: Any,
    ) -> None:
        """Start Spark and run the pipeline."""
        from penstock.spark.pipelines.running import run_pipeline

        settings = _settings(conf)
        with _usage():  # check the options first: Spark takes ten seconds to start
            found.job(
                options,
                connection=_connection(cluster),
                checkpoint=checkpoint,
                trigger=trigger,
                local_files=_has_local_files(settings),
            )
        with (
            _session(found.name, master, settings) as spark,
            _progress() as show_batch,
            recorded(found.name, options, cluster.nameserver or "", show_batch) as run,
            _usage(),
        ):
            ended = run_pipeline(
                found,
                options,
                spark=spark,
                connection=_connection(cluster),
                checkpoint=checkpoint,
                trigger=trigger,
                say=_say,
                on_batch=run.on_batch,
            )
            run.ended = ended
        if not ended:
            _say("stopped; run the command again to continue")

    full: Any = _run_options(cluster_options(call))
    for option in reversed(found.options):
        full = _click_option(option)(full)
    made = click.command(found.name, help=found.summary)(full)
    assert isinstance(made, click.Command)
    return made


def _run_options(command: F) -> F:
    """Add the options that every pipeline has."""
    result: Any = command
    for option in reversed(
        (
            click.option(
                "--master",
                help="Spark master: local[2], spark://…, yarn or k8s://….  [default: local[*]]",
            ),
            click.option("--checkpoint", metavar="PATH", help="Directory of Spark's checkpoint."),
            click.option(
                "--trigger",
                help="When batches start: once, available-now (all available messages, then stop), "
                'or an interval such as "10 seconds".',
            ),
            click.option(
                "--conf",
                multiple=True,
                metavar="KEY=VALUE",
                help="Spark setting. Can be repeated.",
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
    """A Spark session that is stopped after the command."""
    from penstock.spark.pipelines.query_errors import translate_errors
    from penstock.spark.pipelines.running import stop_signals
    from penstock.spark.session import spark_session

    _say("starting Spark")
    # A JVM whose parent ends before they have connected never ends, so signals wait until then.
    with translate_errors(), stop_signals() as stop:
        spark = spark_session(f"penstock {name}", master=master, conf=conf)
    if not _debug():  # errors are raised as exceptions; Spark's log would repeat them
        spark.sparkContext.setLogLevel("OFF")
    try:
        if stop.is_set():
            _say("stopped before the pipeline started")
            raise click.exceptions.Exit(0)
        yield spark
    finally:
        spark.stop()


@contextmanager
def _usage() -> Iterator[None]:
    """Report invalid options as wrong usage (exit code 2)."""
    try:
        yield
    except BadSetting as error:
        if _debug():
            raise
        raise click.UsageError(error.remark()) from None


@contextmanager
def _progress() -> Iterator[ReportBatch]:
    """Print a line per batch on stdout, or show a bar if stdout is a terminal."""
    if not sys.stdout.isatty():
        yield lambda batch: print(batch, flush=True)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns) as bars:
        tasks: dict[str, Any] = {}
        rows: dict[str, int] = {}

        def on_batch(batch: "BatchProgress") -> None:
            name = batch.query
            if name not in tasks:
                tasks[name] = bars.add_task("")
            rows[name] = rows.get(name, 0) + batch.rows
            bars.update(
                tasks[name],
                completed=rows[name],
                total=rows[name] + (batch.lag or 0),
                description=f"{batch}, {rows[name]:,} in total",
            )

        yield on_batch


def _say(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)


def _connection(cluster: ClusterOptions) -> dict[str, str]:
    """The cluster options as options of Spark's format `penstock`."""
    options = {
        "nameserver": cluster.nameserver,
        "namespace": cluster.namespace,
        "accessKey": cluster.access_key,
        "secretKey": cluster.secret_key,
        "strictSigning": "true" if cluster.strict_signing else None,
        "tls": "true" if cluster.tls else None,
        "tlsCa": cluster.tls_ca,
        "requestTimeout": str(cluster.timeout_ms),
    }
    return {name: value for name, value in options.items() if value}


def _settings(conf: tuple[str, ...]) -> dict[str, str]:
    for text in conf:
        if not text.partition("=")[1]:
            raise click.UsageError(f"--conf must be KEY=VALUE, not {text!r}")
    return dict(text.split("=", 1) for text in conf)


def _has_local_files(settings: dict[str, str]) -> bool:
    """Whether Spark takes paths without a scheme as paths of this machine."""
    return "HADOOP_CONF_DIR" not in os.environ and not any("fs.default" in key for key in settings)


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
            f"pipelines need Spark, but {error.name} is not installed: {how_to_install('spark')}"
        ) from None


def _kind(option: "Option") -> str:
    return "|".join(option.choices) or {str: "text", int: "number", float: "number"}.get(
        option.kind, "switch"
    )


def _default(option: "Option") -> str:
    if option.required:
        return "required"
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
        "writes": [{"where": output.where, "what": output.text} for output in found.outputs],
    }
