"""`penstock demo`: brokers that lose nothing when they are killed, then Spark pipelines."""

import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from penstock.cli.demo.failover_demo import failover
from penstock.cli.demo.kill_demo import broker
from penstock.cli.demo.pipeline_demo import pipeline
from penstock.extras import how_to_install


@click.group(invoke_without_command=True)
@click.pass_context
def demo(context: click.Context) -> int:
    """Show what Penstock does. Without a command, run all demos."""
    context.with_resource(_sigterm_ends())
    if context.invoked_subcommand is not None:
        return 0
    for part in (broker, failover):
        code = int(context.invoke(part))
        if code:
            return code
        print()
    if importlib.util.find_spec("pyspark") is None:
        print(f"the pipeline demo needs Spark: {how_to_install('spark')}")
        return 0
    return int(context.invoke(pipeline))


@contextmanager
def _sigterm_ends() -> Iterator[None]:
    """On SIGTERM stop the broker and remove temporary files, as on Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


demo.add_command(broker)
demo.add_command(failover)
demo.add_command(pipeline)
