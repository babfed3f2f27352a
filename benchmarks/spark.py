"""Penstock's Spark source compared with a source that returns prepared Arrow batches.

The prepared source has the same columns and rows without any work: it is the upper limit of Spark's
Python Data Source API on this machine. Rounds alternate in one session on two cores, which the
broker shares. The results are ratios. `PENSTOCK_SPARK_ROWS` changes the number of rows.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.compat import penstock

from benchmarks.spark_prepared_source import PreparedSource
from penstock import Admin
from penstock.spark.pipelines.running import find_pipeline, run_pipeline
from penstock.spark.session import spark_session

ROWS = int(os.environ.get("PENSTOCK_SPARK_ROWS", "5000000"))
ROUNDS = 3
BATCHES = 40
"""Micro-batches of two rows; the result is the median."""
TASKS = (1, 2, 4)
TOPIC = "Load"
WARM_ROWS = 200_000
GOALS = {
    "log scan": 0.9,
    "broker": 0.5,
    "lake": 0.9,
}
MICRO_GOAL = 1.15

Work = Callable[[], object]


class Bench:
    """The sources, which read the same messages."""

    def __init__(self, spark: SparkSession, up: penstock.Up, folder: Path) -> None:
        self.spark = spark
        self.up = up
        self.folder = folder
        self.store = next(path.parent for path in folder.rglob("commitlog"))
        self._lakes = 0
        spark.dataSource.register(PreparedSource)

    def fill(self) -> None:
        with Admin(self.up.address) as admin:
            admin.create_topic(TOPIC, queues=2)
        command = [sys.executable, "-m", "benchmarks.spark_load", self.up.address, TOPIC, str(ROWS)]
        subprocess.run(command, check=True)

    # --- sources

    def prepared(self, rows: int = ROWS) -> DataFrame:
        return self.spark.read.format("prepared").option("rows", rows).load()

    def broker(self, **options: str) -> DataFrame:
        reader = self.spark.read.format("penstock").option("nameserver", self.up.address)
        return reader.option("subscribe", TOPIC).options(**options).load()

    def log(self, **options: str) -> DataFrame:
        reader = self.spark.read.format("penstock").option("mode", "log").options(**options)
        return reader.option("path", str(self.store)).option("subscribe", TOPIC).load()

    def parquet(self) -> DataFrame:
        return self.spark.read.parquet(str(self.folder / "prepared"))

    # --- queries

    def prepared_to_parquet(self) -> None:
        self.prepared().write.mode("overwrite").parquet(str(self.folder / "prepared"))

    def lake(self) -> None:
        self._lakes += 1
        lake = self.folder / f"lake-{self._lakes}"
        run_pipeline(
            find_pipeline("lake"), {"topics": TOPIC, "lake": str(lake)},
            spark=self.spark, connection={"nameserver": self.up.address}, trigger="available-now",
        )  # fmt: skip
        shutil.rmtree(lake)

    def windows(self) -> None:
        """Counts by second and tag; open windows are state in RocksDB, with a changelog."""
        rows = self.spark.readStream.format("penstock").options(
            nameserver=self.up.address, subscribe=TOPIC, columns="store_timestamp,tags",
            startingOffsets="earliest",
            maxOffsetsPerTrigger=str(max(ROWS // 5, 1)),
        )  # fmt: skip
        late = rows.load().withWatermark("store_timestamp", "1 minute")
        counts = late.groupBy(f.window("store_timestamp", "1 second"), "tags").count()
        with tempfile.TemporaryDirectory(dir=self.folder) as checkpoint:
            writer = counts.writeStream.format("noop").option("checkpointLocation", checkpoint)
            query = writer.outputMode("update").trigger(availableNow=True).start()
            query.awaitTermination()

    def micro_batches(self, kind: str) -> list[int]:
        """The duration of each micro-batch in ms, without the first ones."""
        reader = self.spark.readStream.format(kind)
        if kind == "prepared":
            reader = reader.option("rows", 2)
        else:
            reader = reader.options(
                nameserver=self.up.address, subscribe=TOPIC, startingOffsets="earliest",
                maxOffsetsPerTrigger="2",
            )  # fmt: skip
        with tempfile.TemporaryDirectory(dir=self.folder) as checkpoint:
            writer = reader.load().writeStream.format("noop")
            query = writer.option("checkpointLocation", checkpoint).start()
            while len(query.recentProgress) < BATCHES and query.isActive:
                time.sleep(0.2)
            query.stop()
            if (error := query.exception()) is not None:
                raise error
        took = [progress["durationMs"]["triggerExecution"] for progress in query.recentProgress]
        return took[BATCHES // 4 :]


def noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def in_tasks(read: Callable[..., DataFrame], tasks: int) -> None:
    noop(read(minPartitions=str(tasks)).coalesce(tasks))


def alternate(named: dict[str, Work], rounds: int) -> dict[str, float]:
    """The median duration of each in seconds."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in track(range(rounds), f"{', '.join(named)}"):
        for name, work in named.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    return {name: median(values) for name, values in seconds.items()}


@contextmanager
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="penstock-spark-") as folder:
        session = spark_session("benchmarks", master="local[2]")
        try:
            with penstock.Up(Path(folder) / "up") as up:
                yield Bench(session, up, Path(folder))
        finally:
            session.stop()


def show(title: str, rows: list[tuple[str, str, str, str]]) -> None:
    table = Table("", "result", "ratio", "goal", title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def ratios(seconds: dict[str, float], ceiling: str) -> list[tuple[str, str, str, str]]:
    return [
        (
            name,
            f"{ROWS / took / 1e3:,.0f} thousand rows/s",
            f"{seconds[ceiling] / took:.2f}",
            f"≥ {GOALS[name]}" if name in GOALS else "",
        )
        for name, took in seconds.items()
    ]


def main() -> None:
    with bench() as b:
        b.fill()
        for frame in (b.prepared(WARM_ROWS), b.broker(), b.log()):
            noop(frame)
        assert b.broker().count() == b.log().count() == ROWS
        seconds = alternate(
            {
                "prepared source": lambda: noop(b.prepared()),
                "log scan": lambda: noop(b.log()),
                "broker": lambda: noop(b.broker()),
            },
            ROUNDS,
        )
        show(f"all columns of {ROWS:,} messages", ratios(seconds, "prepared source"))
        seconds = alternate({"prepared to Parquet": b.prepared_to_parquet, "lake": b.lake}, ROUNDS)
        show("to Parquet", ratios(seconds, "prepared to Parquet"))
        counted: dict[str, Work] = {
            f"{name}, {tasks} tasks": partial(in_tasks, read, tasks)
            for name, read in (("broker", b.broker), ("log", b.log))
            for tasks in TASKS
        }
        show("tasks on two cores", ratios(alternate(counted, 1), "log, 2 tasks"))
        show("counts by window", ratios(alternate({"RocksDB": b.windows}, ROUNDS), "RocksDB"))
        seconds = alternate({"Spark's Parquet reader": lambda: noop(b.parquet())}, ROUNDS)
        show("the same rows by Spark's own reader", ratios(seconds, "Spark's Parquet reader"))
        floor, ours = (median(b.micro_batches(kind)) for kind in ("prepared", "penstock"))
        show(
            "a micro-batch of two rows",
            [
                ("prepared source", f"{floor:.0f} ms", "", ""),
                ("penstock", f"{ours:.0f} ms", f"{ours / floor:.2f}", f"≤ {MICRO_GOAL}"),
            ],
        )


if __name__ == "__main__":
    main()
