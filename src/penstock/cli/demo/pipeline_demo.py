"""`penstock demo pipeline`: simulated registrations, processed by two Spark pipelines.

The broker runs in a child process. Users register, for one minute at twenty times the usual rate,
and three services process them at their own pace. Meanwhile the pipelines `registration` and `lake`
read the topics with a local Spark. Then their output is compared with what was sent.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.terminal import free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.cli.demo.scenario import Scenario
    from penstock.spark.pipelines.batch_progress import BatchProgress

USUAL_PER_MINUTE: Final = 300
SECONDS: Final = 20.0
PICTURE: Final = "penstock-demo.png"
PICTURE_ENDINGS: Final = (".png", ".svg", ".pdf")
MEMORY: Final = "1g"
LIVE: Final = "2 seconds"
_STOP_S: Final = 20
_CONFIG: Final = """\
[broker]
vip_port = 0
probe_port = 0
[store]
segment_bytes = 67108864
index_slots = 100000
index_entries = 400000
disk_clean_percent = 100
disk_force_percent = 100
disk_refuse_percent = 100
"""


@click.command(short_help="Process a load spike with two Spark pipelines.")
@click.option(
    "--users",
    "per_minute",
    type=click.IntRange(min=10),
    default=USUAL_PER_MINUTE,
    show_default=True,
    help="Registrations per simulated minute.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=5),
    default=SECONDS,
    show_default=True,
    help="Duration of the simulation.",
)
@click.option("--seed", type=int, default=7, show_default=True, help="Seed of the simulation.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    default=PICTURE,
    show_default=True,
    help="Output file of the chart: .png, .svg or .pdf.",
)
@click.option(
    "--dir",
    "parent",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Parent of the temporary files.  [default: the system's temporary directory]",
)
def pipeline(per_minute: int, seconds: float, seed: int, picture: Path, parent: Path | None) -> int:
    """Simulate registrations with a load spike, and process them with Spark pipelines."""
    from penstock.cli.demo.scenario import generate_scenario
    from penstock.cli.terminal import say_if_uncompiled

    if picture.suffix not in PICTURE_ENDINGS or not picture.absolute().parent.is_dir():
        raise click.UsageError(
            f"--picture must be a .png, .svg or .pdf file in an existing directory, not {picture}"
        )
    say_if_uncompiled()
    started = time.monotonic()
    scenario = generate_scenario(seed, per_minute)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-", dir=parent) as name:
        directory = Path(name)
        print("== starting a broker in a child process, and Spark in this process", flush=True)
        with _broker(directory) as address, _spark(directory) as spark:
            demo_run = PipelineDemo(directory, address, scenario, spark)
            demo_run.run(seconds)
            return demo_run.report(picture, started)


class PipelineDemo:
    """Sends the scenario, runs the pipelines, and reports the result."""

    def __init__(
        self, directory: Path, address: str, scenario: "Scenario", spark: "SparkSession"
    ) -> None:
        self._output, self._lake = str(directory / "registration"), str(directory / "lake")
        self._address = address
        self._scenario = scenario
        self._spark = spark
        self._seen: dict[str, int] = {}
        self._rows: dict[tuple[str, int], int] = {}
        self._batches = 0
        self._sent_s = 0.0

    def run(self, seconds: float) -> None:
        """Send the scenario while the pipelines run, and wait until they have processed it."""
        from penstock import Admin, Producer
        from penstock.cli.demo.scenario import send_scenario
        from penstock.cli.terminal import progress_bars
        from penstock.spark.pipelines.query_errors import translate_errors
        from penstock.spark.pipelines.registration.events import ALERTS, REGISTRATIONS, STEPS

        with Admin(self._address) as admin:
            for topic in (REGISTRATIONS, STEPS, ALERTS):
                admin.create_topic(topic, queues=4)
        queries = self._start()
        count = len(self._scenario.messages)
        print(f"== sending {count:,} messages; pipelines: registration, lake", flush=True)
        reported_at = time.monotonic()
        with (
            Producer(self._address, group="demo", batching=True) as producer,
            progress_bars() as bars,
        ):

            def on_progress(done: int, of: int) -> None:
                nonlocal reported_at
                bars("send", done, of)
                if time.monotonic() > reported_at + 1:
                    reported_at = time.monotonic()
                    self._report_batches(queries)

            self._sent_s = send_scenario(
                self._scenario, producer, seconds=seconds, progress=on_progress
            )
        print("== all messages are sent; waiting for the pipelines", flush=True)
        for query in queries:
            with translate_errors():
                query.processAllAvailable()
            self._report_batches(queries)
        for query in queries:
            query.stop()

    def report(self, picture: Path, started: float) -> int:
        """Compare the output with the scenario and print it; returns the exit code."""
        from penstock.cli.demo.demo_report import ScenarioResult
        from penstock.spark.pipelines.query_errors import translate_errors
        from penstock.spark.pipelines.registration.plot import draw

        print("== comparing with what was sent", flush=True)
        with translate_errors():
            result = ScenarioResult.gather(
                self._spark,
                self._scenario,
                output=self._output,
                lake=self._lake,
                address=self._address,
            )
        result.show(sent_s=self._sent_s, batches=self._batches, seconds=time.monotonic() - started)
        title = f"{sum(self._scenario.counts.values()):,} registrations, a spike, three services"
        draw(result.statistics, picture, title=title)
        print(f"chart: {picture.absolute()}")
        return 0 if result.good else 1

    def _start(self) -> "list[StreamingQuery]":
        from penstock.cli.demo.scenario import LATE_S, STUCK_AFTER_S
        from penstock.spark.pipelines.query_errors import translate_errors
        from penstock.spark.pipelines.registration.events import REGISTRATIONS, STEPS
        from penstock.spark.pipelines.running import PipelineJob, Trigger, find_pipeline

        options = {
            "registration": {
                "output": self._output,
                "late": f"{LATE_S}s",
                "stuck_after": f"{STUCK_AFTER_S}s",
                "group": "registration",
                "delivery": "transactional",
            },
            "lake": {"lake": self._lake, "topics": f"{REGISTRATIONS},{STEPS}", "group": "lake"},
        }
        queries: list[StreamingQuery] = []
        with translate_errors():
            for name, given in options.items():
                found = find_pipeline(name)
                job = PipelineJob(
                    options=found.check(given),
                    connection={"nameserver": self._address},
                    trigger=Trigger.parse(LIVE),
                    say=print,
                    rows=self._rows,
                )
                queries += found.start(self._spark, job)
        return queries

    def _report_batches(self, queries: "Sequence[StreamingQuery]") -> None:
        """Print the batches that are done; raise the error of a query that has failed."""
        from penstock.spark.pipelines.batch_progress import new_batches
        from penstock.spark.pipelines.query_errors import translate_errors

        with translate_errors():
            for query in queries:
                for batch in new_batches(query, self._seen, named=True, rows=self._rows):
                    self._print_batch(batch)
                if (error := query.exception()) is not None:
                    raise error

    def _print_batch(self, batch: "BatchProgress") -> None:
        self._batches += 1
        if batch.rows:
            print(f"   {batch}", flush=True)


@contextlib.contextmanager
def _spark(directory: Path) -> "Iterator[SparkSession]":
    from penstock.spark.session import spark_session

    conf = {"spark.driver.memory": MEMORY, "spark.sql.warehouse.dir": str(directory / "warehouse")}
    spark = spark_session("penstock-demo", conf=conf)
    # Do not log warnings about batches that take longer than their interval.
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        # Do not log the errors of queries that are interrupted by Ctrl-C.
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()


@contextlib.contextmanager
def _broker(directory: Path) -> Iterator[str]:
    """Run `penstock up` in a child process; yields the NameServer's address."""
    ports = [free_port(), free_port()]
    (directory / "penstock.toml").write_text(_CONFIG)
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "up",
        "-c",
        str(directory / "penstock.toml"),
    ]
    command += ["--data", str(directory / "up"), "--no-console"]
    command += ["--nameserver-port", str(ports[0]), "--broker-port", str(ports[1])]
    log = directory / "up.log"
    with log.open("wb") as lines:
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines)
    assert up.stdout is not None
    try:
        if not up.stdout.readline():
            raise click.ClickException(f"the broker did not start: {log.read_text()[-1000:]}")
        yield f"127.0.0.1:{ports[0]}"
    finally:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            up.kill()
            up.wait()
        up.stdout.close()  # only now: it writes more than its first line
