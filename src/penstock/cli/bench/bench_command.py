"""`penstock bench …`: the options of the benchmarks."""

import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.core import ParameterSource

from penstock.cli.remote import ClusterOptions, cluster_options, json_option, print_json, run
from penstock.cli.times import to_duration

if TYPE_CHECKING:
    from penstock.cli.bench.bench_report import BenchReport
    from penstock.cli.bench.bench_runs import BenchPlan

F = TypeVar("F", bound=Callable[..., Any])
CONCURRENCY_DEFAULT = 16
PULL_SIZE_DEFAULT = 1_024
INTERRUPTED = 130
_BODY_BYTES_MAX = 4 * 1024 * 1024
_HEAD_BYTES = 24  # of end-to-end messages: bench/stamped_body.py

_COMMON = (
    click.option("--topic", help="The topic.  [default with --create-topic: a new name]"),
    click.option(
        "--create-topic",
        is_flag=True,
        help="Create the topic if it does not exist, and delete it at the end.",
    ),
    click.option(
        "--queues", type=click.IntRange(1, 65_536), help="Queues of a created topic on each broker."
    ),
    click.option(
        "--duration",
        default="10s",
        show_default=True,
        metavar="DURATION",
        callback=to_duration,
        help="How long to measure: 10s, 5m.",
    ),
    click.option(
        "--warmup",
        default="2s",
        show_default=True,
        metavar="DURATION",
        callback=to_duration,
        help="How long to run before the measurement.",
    ),
    click.option(
        "--size",
        type=click.IntRange(1, _BODY_BYTES_MAX),
        default=128,
        show_default=True,
        help="Bytes of a body.",
    ),
    click.option("-t", "--tags", help="Tag of the messages."),
)
_SENDING = (
    click.option(
        "--rate",
        type=click.FloatRange(0, min_open=True),
        metavar="N",
        help="Open loop: send N messages per second; latency counts from the intended send time.",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1, 1_000_000),
        metavar="N",
        help="Closed loop: keep N requests in flight.  "
        f"[default: {CONCURRENCY_DEFAULT}, without --rate]",
    ),
    click.option(
        "--batch",
        type=click.IntRange(1, 10_000),
        default=1,
        show_default=True,
        help="Messages per request.",
    ),
    click.option(
        "--producers",
        type=click.IntRange(1, 1_000),
        default=1,
        show_default=True,
        help="Producers, each with its own connections.",
    ),
)
_PIPELINE = (
    click.option(
        "--pipeline",
        type=click.IntRange(1, 65_536),
        metavar="N",
        help="Use the compiled generator instead of the Python client, with N requests in flight "
        "on each connection.",
    ),
    click.option(
        "--header",
        type=click.Choice(["binary", "json"]),
        default="binary",
        show_default=True,
        help="With --pipeline: encoding of the request headers.",
    ),
    click.option(
        "--broker",
        metavar="HOST:PORT",
        help="With --pipeline: only this broker, without a NameServer. The topic has to exist.",
    ),
)
_CONSUMING = (
    click.option(
        "--consumers",
        type=click.IntRange(1, 1_000),
        default=1,
        show_default=True,
        help="Consumers of the group.",
    ),
    click.option(
        "--group",
        help="Consumer group.  [default: a new group, which is deleted at the end]",
    ),
)


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(no_args_is_help=True)
def bench() -> None:
    """Measure a running cluster, Penstock's or Apache's.

    The generator is one process with one thread. For more load, run several at the same time.
    """


@bench.command()
@cluster_options
@_options(*_COMMON, *_SENDING, *_PIPELINE)
@json_option
def send(cluster: ClusterOptions, as_json: bool, **options: Any) -> int:
    """Measure the time from a send to its acknowledgement."""
    return _run(cluster, _plan("send", **options), as_json=as_json)


@bench.command()
@cluster_options
@_options(*_COMMON, *_SENDING, *_CONSUMING)
@click.option(
    "--drain",
    default="10s",
    show_default=True,
    metavar="DURATION",
    callback=to_duration,
    help="How long to wait for the last messages.",
)
@json_option
def e2e(cluster: ClusterOptions, as_json: bool, **options: Any) -> int:
    """Measure the time from a send to the arrival at a consumer.

    The generator sends and receives, so both times come from the same clock.
    """
    if options["size"] < _HEAD_BYTES:
        raise click.BadParameter(f"{_HEAD_BYTES} or more are needed", param_hint="--size")
    return _run(cluster, _plan("e2e", **options), as_json=as_json)


@bench.command()
@cluster_options
@_options(*_COMMON, *_CONSUMING, *_PIPELINE)
@click.option(
    "--pull-size",
    type=click.IntRange(1, 65_536),
    default=PULL_SIZE_DEFAULT,
    show_default=True,
    help="With --pipeline: most messages of a pull. The broker has limits of its own.",
)
@click.option(
    "--verify", is_flag=True, help="With --pipeline: compare each body with its checksum."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="Handlers of a consumer that run at the same time.",
)
@click.option(
    "--from",
    "start",
    type=click.Choice(["first", "last"]),
    default="first",
    show_default=True,
    help="Where a new group starts: with stored messages, or with new ones.",
)
@click.option(
    "--fill",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Send N messages before the measurement.",
)
@json_option
def consume(cluster: ClusterOptions, as_json: bool, **options: Any) -> int:
    """Measure how fast consumers receive the messages of a topic.

    With --from first, stored messages are consumed until there are no more or the time has passed.
    With --from last, new messages of other producers are consumed, and their age on arrival is
    measured; it compares the clocks of the broker and of this machine.
    """
    return _run(cluster, _plan("consume", **options), as_json=as_json)


def _plan(
    mode: str,
    *,
    topic: str | None,
    create_topic: bool,
    queues: int | None,
    duration: timedelta,
    warmup: timedelta,
    size: int,
    tags: str | None,
    rate: float | None = None,
    concurrency: int | None = None,
    batch: int = 1,
    producers: int = 1,
    consumers: int = 0,
    group: str | None = None,
    start: Literal["first", "last"] = "last",
    fill: int = 0,
    drain: timedelta = timedelta(seconds=10),
    pipeline: int | None = None,
    **more: Any,
) -> "BenchPlan":
    from penstock.cli.bench.bench_report import Workload
    from penstock.cli.bench.bench_runs import BenchPlan

    pipelined = _pipelined(mode, pipeline, group=group, start=start, **more)
    if topic is None and not create_topic:
        raise click.UsageError("give --topic, or --create-topic for a topic of its own")
    if not duration:
        raise click.BadParameter("it must be longer than 0", param_hint="--duration")
    if mode == "consume" and start == "first":
        _refuse_warmup(warmup)
        warmup = timedelta()
    run_name = f"penstock-bench-{secrets.token_hex(4)}"
    workload = Workload(
        mode=mode,
        topic=topic or run_name,
        rate=rate,
        concurrency=_concurrency(concurrency, rate, pipeline),
        size=size,
        batch=batch,
        producers=producers,
        consumers=consumers,
        warmup_s=warmup.total_seconds(),
        duration_s=duration.total_seconds(),
        tags=tags,
        group=None if mode == "send" else group or run_name,
        **pipelined,
    )
    return BenchPlan(
        workload,
        create_topic=create_topic,
        queues=queues,
        create_group=mode != "send" and group is None,
        start_at=start,
        fill=fill,
        drain_s=drain.total_seconds(),
    )


def _concurrency(concurrency: int | None, rate: float | None, pipeline: int | None) -> int | None:
    """Requests in flight, or handlers; None in an open loop and with --pipeline."""
    if rate is not None and concurrency is not None:
        raise click.UsageError("--rate and --concurrency can't be used together")
    if pipeline is not None:
        return None
    return CONCURRENCY_DEFAULT if rate is None and concurrency is None else concurrency


def _pipelined(
    mode: str,
    pipeline: int | None,
    *,
    group: str | None,
    start: str,
    header: str = "binary",
    broker: str | None = None,
    pull_size: int = PULL_SIZE_DEFAULT,
    verify: bool = False,
) -> dict[str, Any]:
    """What a Workload has of the options of --pipeline; refuses those that do not go together."""
    if pipeline is None:
        _refuse_options("needs --pipeline", "header", "broker", "pull_size", "verify")
        return {}
    _refuse_options("can't be used with --pipeline", "concurrency")
    if mode == "consume" and start == "last":
        raise click.UsageError("--from last can't be used with --pipeline")
    if broker is not None:
        _refuse_options("can't be used with --broker", "create_topic", "queues")
        if mode == "consume" and group is None:
            raise click.UsageError("--broker needs --group")
    return {
        "pipeline": pipeline,
        "header": header,
        "broker": broker,
        "pull_size": pull_size if mode == "consume" else None,
        "verify": verify,
    }


def _refuse_warmup(warmup: timedelta) -> None:
    if warmup:
        _refuse_options(
            "can't be used with --from first: the messages of the warm-up would be missing in the "
            "result",
            "warmup",
        )


def _refuse_options(why: str, *names: str) -> None:
    """Refuse these options if they are on the command line."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


def _run(cluster: ClusterOptions, plan: "BenchPlan", *, as_json: bool) -> int:
    from penstock.cli.bench.bench_runs import run_bench
    from penstock.cli.terminal import say_if_uncompiled

    say_if_uncompiled()
    if plan.workload.pipeline is not None and cluster.access_key:
        raise click.UsageError("--pipeline can't sign requests: give no --access-key")
    report = run(run_bench(cluster, plan), loop_factory=_fast_loop())
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    return INTERRUPTED if report.interrupted else 0


def _print(report: "BenchReport") -> None:
    rows = list(report.rows())
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name.ljust(width)}  {text}")
    for warning in report.warnings():
        click.echo(f"penstock: {warning}", err=True)


def _fast_loop() -> Callable[[], Any] | None:
    """uvloop's event loop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
