"""`penstock demo pipeline`: a story of registrations, and what two pipelines on Spark make of it.

A broker runs in a process of its own. Registrations come, twenty times as many for a while, and
three services follow at their own pace. Meanwhile the pipelines `registration` and `lake` read the
topics on a local Spark. Then all that they have written is compared with what was sent.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.cli.demo.story import Story
    from penstock.spark.pipelines.batch_progress import Batch

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


@click.command()
@click.option(
    "--users",
    "usual",
    type=click.IntRange(min=10),
    default=USUAL_PER_MINUTE,
    show_default=True,
    help="Registrations in a usual minute of the story.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=5),
    default=SECONDS,
    show_default=True,
    help="How long the story takes.",
)
@click.option("--seed", type=int, default=7, show_default=True, help="Of the story.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    default=PICTURE,
    show_default=True,
    help="Where the picture goes: .png, .svg or .pdf.",
)
@click.option(
    "--dir",
    "parent",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where the temporary files go (default: the system's place).",
)
def pipeline(usual: int, seconds: float, seed: int, picture: Path, parent: Path | None) -> int:
    """Tell a story of registrations with a spike, and follow it with pipelines on Spark."""
    from penstock.cli.demo.story import write_story
    from penstock.cli.terminal import say_if_uncompiled

    if picture.suffix not in PICTURE_ENDINGS or not picture.absolute().parent.is_dir():
        raise click.UsageError(f"--picture {picture}: no .png, .svg or .pdf in a directory")
    say_if_uncompiled()
    began = time.monotonic()
    story = write_story(seed, usual)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-", dir=parent) as name:
        folder = Path(name)
        print("== starting a broker in a process of its own, and Spark in this one", flush=True)
        with _broker(folder) as address, _spark(folder) as spark:
            demonstration = Demonstration(folder, address, story, spark)
            demonstration.tell(seconds)
            return demonstration.report(picture, began)


class Demonstration:
    """The story, the pipelines over its topics, and what comes of both."""

    def __init__(self, folder: Path, address: str, story: "Story", spark: "SparkSession") -> None:
        self._output, self._lake = str(folder / "registration"), str(folder / "lake")
        self._address = address
        self._story = story
        self._spark = spark
        self._seen: dict[str, int] = {}
        self._rows: dict[tuple[str, int], int] = {}
        self._batches = 0
        self._told_s = 0.0

    def tell(self, seconds: float) -> None:
        """Send the story while the pipelines run, until they have it all."""
        from penstock import Admin, Producer
        from penstock.cli.demo.story import tell_story
        from penstock.cli.terminal import progress_bars
        from penstock.spark.pipelines.query_errors import for_people
        from penstock.spark.pipelines.registration.events import ALERTS, REGISTRATIONS, STEPS

        with Admin(self._address) as admin:
            for topic in (REGISTRATIONS, STEPS, ALERTS):
                admin.create_topic(topic, queues=4)
        queries = self._start()
        count = len(self._story.messages)
        print(f"== telling {count:,} messages; pipelines: registration, lake", flush=True)
        looked = time.monotonic()
        with (
            Producer(self._address, group="demo", batching=True) as producer,
            progress_bars() as bars,
        ):

            def told(done: int, of: int) -> None:
                nonlocal looked
                bars("story", done, of)
                if time.monotonic() > looked + 1:
                    looked = time.monotonic()
                    self._look(queries)

            self._told_s = tell_story(self._story, producer, seconds=seconds, tell=told)
        print("== the story is told; the pipelines catch up", flush=True)
        for query in queries:
            with for_people():
                query.processAllAvailable()
            self._look(queries)
        for query in queries:
            query.stop()

    def report(self, picture: Path, began: float) -> int:
        """Compare and show; the exit code."""
        from penstock.cli.demo.demo_report import Findings
        from penstock.spark.pipelines.query_errors import for_people
        from penstock.spark.pipelines.registration.plot import draw

        print("== comparing with what was sent", flush=True)
        with for_people():
            findings = Findings.gather(
                self._spark,
                self._story,
                output=self._output,
                lake=self._lake,
                address=self._address,
            )
        findings.show(told_s=self._told_s, batches=self._batches, seconds=time.monotonic() - began)
        title = f"{sum(self._story.counts.values()):,} registrations, a spike, three services"
        draw(findings.figures, picture, title=title)
        print(f"the picture: {picture.absolute()}")
        return 0 if findings.good else 1

    def _start(self) -> "list[StreamingQuery]":
        from penstock.cli.demo.story import LATE_S, STUCK_AFTER_S
        from penstock.spark.pipelines.query_errors import for_people
        from penstock.spark.pipelines.registration.events import REGISTRATIONS, STEPS
        from penstock.spark.pipelines.running import Job, Trigger, find_pipeline

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
        with for_people():
            for name, given in options.items():
                found = find_pipeline(name)
                job = Job(
                    options=found.check(given),
                    connection={"nameserver": self._address},
                    trigger=Trigger.parse(LIVE),
                    say=print,
                    rows=self._rows,
                )
                queries += found.start(self._spark, job)
        return queries

    def _look(self, queries: "Sequence[StreamingQuery]") -> None:
        """Say which batches are done; raise where a query has failed."""
        from penstock.spark.pipelines.batch_progress import new_batches
        from penstock.spark.pipelines.query_errors import for_people

        with for_people():
            for query in queries:
                for batch in new_batches(query, self._seen, named=True, rows=self._rows):
                    self._say(batch)
                if (error := query.exception()) is not None:
                    raise error

    def _say(self, batch: "Batch") -> None:
        self._batches += 1
        if batch.rows:
            print(f"   {batch}", flush=True)


@contextlib.contextmanager
def _spark(folder: Path) -> "Iterator[SparkSession]":
    from penstock.spark.session import spark_session

    conf = {"spark.driver.memory": MEMORY, "spark.sql.warehouse.dir": str(folder / "warehouse")}
    spark = spark_session("penstock-demo", conf=conf)
    # A batch that takes longer than its interval is no news here.
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        # Whoever has stopped the demo need not read what its queries say to that.
        spark.sparkContext.setLogLevel("OFF")
        spark.stop()


@contextlib.contextmanager
def _broker(folder: Path) -> Iterator[str]:
    """`penstock up` in a process of its own; the NameServer's address."""
    ports = [_free_port(), _free_port()]
    (folder / "penstock.toml").write_text(_CONFIG)
    command = [sys.executable, "-m", "penstock.cli.main", "up", "-c", str(folder / "penstock.toml")]
    command += ["--data", str(folder / "up"), "--no-console"]
    command += ["--nameserver-port", str(ports[0]), "--broker-port", str(ports[1])]
    log = folder / "up.log"
    with log.open("wb") as lines:
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines)
    assert up.stdout is not None
    try:
        if not up.stdout.readline():
            raise click.ClickException(f"no broker started: {log.read_text()[-1000:]}")
        yield f"127.0.0.1:{ports[0]}"
    finally:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            up.kill()
            up.wait()
        up.stdout.close()  # only now: it says more than its first line


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
