"""Programs that tests run as Spark drivers of their own: `python -m tests.spark.jobs NAME JSON`.

Each is a function; its keywords come as JSON, and what it returns is the last line printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def pipe(
    *, master: str, conf: dict[str, str], source: dict[str, str], sink: dict[str, str],
    checkpoint: str,
) -> dict[str, Any]:  # fmt: skip
    """A batch count and a stateful stream from topic to topic, and what the workers were."""
    spark = spark_session("pipe", master=master, conf=conf)
    rows = spark.read.format("penstock").options(**source).load()
    facts = rows.selectExpr(
        "count(*) count", "sum(int(string(body))) sum", "count(DISTINCT queue_id) queues"
    )
    workers = rows.select("body").mapInPandas(_worker, "python string, compiled boolean").distinct()
    found: dict[str, Any] = {
        **facts.collect()[0].asDict(),
        "workers": [list(row) for row in workers.collect()],
    }
    stream = (
        spark.readStream.format("penstock").options(**source, startingOffsets="earliest").load()
    )
    found["rows"] = _distinct_to_topic(stream, sink, checkpoint)
    if not master.startswith("sc://"):
        found["executors"] = _executors(spark)
    spark.stop()
    return found


def count_with_a_loss(
    *, master: str, conf: dict[str, str], source: dict[str, str], mark: str
) -> dict[str, Any]:
    """The first task kills its executor; the count is still complete."""
    spark = spark_session("count_with_a_loss", master=master, conf=conf)
    rows = spark.read.format("penstock").options(**source).load().select("body")

    def kill_once(batches: Iterator[Any]) -> Iterator[Any]:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            yield from batches
        else:
            _kill_executor()

    found = rows.mapInPandas(kill_once, "body binary").count()
    spark.stop()
    return {"count": found, "lost": os.path.exists(mark)}


def _kill_executor() -> None:
    """End the JVM that this Python worker works for: the parent of the daemon it is forked from."""
    with open(f"/proc/{os.getppid()}/stat") as stat_file:
        executor = int(stat_file.read().rpartition(")")[2].split()[1])
    os.kill(executor, signal.SIGKILL)


def _distinct_to_topic(stream: DataFrame, sink: dict[str, str], checkpoint: str) -> int:
    """Each body once into a topic, by a state in RocksDB; how many rows were read.

    (0 through Connect, whose progress does not say.)
    """
    query = (
        stream.select("body").dropDuplicates(["body"])
        .writeStream.format("penstock").options(**sink)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    return sum(int(progress["numInputRows"] or 0) for progress in query.recentProgress)


def _worker(batches: Iterator[Any]) -> Iterator[Any]:
    """The Python of a task, and whether it ran the compiled core."""
    import penstock

    for batch in batches:
        yield type(batch)({"python": [sys.executable], "compiled": [penstock.compiled()]})


def _executors(spark: SparkSession) -> int:
    """How many executors there are, besides the driver."""
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    return len(tracker.getExecutorInfos()) - 1


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
