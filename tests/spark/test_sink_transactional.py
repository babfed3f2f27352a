"""Each row is written once through Spark, with any failure and any kill of the driver."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.depth import DEPTH, rounds
from tests.spark import kit
from tests.spark.transactional_job import BATCH_ROWS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = 400
STEPS_MAX = 120
"""More than a batch has."""


def check(cluster: Up, topic: str, wanted: list[bytes]) -> None:
    """Each row once, and nothing else."""
    found = Counter(message.body for message in kit.read_topic(cluster, topic, len(wanted)))
    assert found == Counter(wanted)


def test_a_batch_write_is_written_once(spark: SparkSession, cluster: Up, fresh: str) -> None:
    from pyspark.errors import PySparkException

    topic = kit.create_topic(cluster, fresh)
    rows = spark.range(0, 1_000, 1, 2).selectExpr("cast(id as string) as body")

    def write(sink: str, batch: int) -> None:
        options = {"nameserver": cluster.address, "topic": topic, "delivery": "transactional"}
        options |= {"sinkId": sink, "batchId": str(batch)}
        rows.write.format("penstock").mode("append").options(**options).save()

    for _ in range(2):
        write(fresh, 0)
    check(cluster, topic, [str(n).encode() for n in range(1_000)])
    with pytest.raises(PySparkException, match="controlBroker"):
        write(f"{fresh}-2", 5)
    write(fresh, 1)
    with pytest.raises(PySparkException, match="comes after its batch 1"):
        write(fresh, 0)
    found = kit.read_topic(cluster, topic, 2_000)
    assert Counter(m.properties["PENSTOCK_BATCH"] for m in found) == {"0": 1_000, "1": 1_000}


def test_failing_tasks_commits_and_aborts_write_each_row_once(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    from tests.spark.flaky import FlakySource

    source, topic = kit.create_topic(cluster, f"{fresh}-1"), kit.create_topic(cluster, f"{fresh}-2")
    bodies = kit.send_numbers(cluster, source, ROWS)
    breaks = tmp_path / "breaks"
    breaks.mkdir()
    spark.dataSource.register(FlakySource)
    stream = kit.stream_reader(
        spark, cluster, source, startingOffsets="earliest", maxOffsetsPerTrigger=ROWS // 4
    )
    writer = (
        stream.load()
        .select("body")
        .writeStream.format("flaky")
        .options(nameserver=cluster.address, topic=topic, delivery="transactional")
        .options(breaks=str(breaks), breaksMax=rounds(ci=8, proof=60))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
    )
    failures = 0
    while True:
        try:
            writer.start().awaitTermination()
            break
        except StreamingQueryException:
            failures += 1
            assert len(list(breaks.iterdir())) >= failures, "it fails without a break"
    check(cluster, topic, bodies)


@pytest.mark.timeout(rounds(ci=300, proof=3600))
def test_a_driver_killed_at_any_step_writes_each_row_once(
    cluster: Up, fresh: str, tmp_path: Path
) -> None:
    """Each run finishes the batch that the one before was killed in, and is killed in the next
    one: at its first step, its second, and so on up to the last answer to a commit."""
    source, topic = kit.create_topic(cluster, f"{fresh}-1"), kit.create_topic(cluster, f"{fresh}-2")
    bodies = kit.send_numbers(cluster, source, rounds(ci=3, proof=STEPS_MAX) * BATCH_ROWS)

    def run(batch: int, step: int) -> int:
        command = [
            sys.executable, "-m", "tests.spark.transactional_job", cluster.address, source, topic,
            str(tmp_path / "checkpoint"), str(tmp_path / f"steps-{batch}"), str(batch), str(step),
        ]  # fmt: skip
        return subprocess.run(command, start_new_session=True).returncode

    chosen = range(1, STEPS_MAX) if DEPTH == "proof" else (30,)
    for batch, step in enumerate(chosen):
        if (ended := run(batch, step)) != -signal.SIGKILL:
            break  # the batch has fewer steps
    else:
        ended = run(len(chosen), STEPS_MAX)
    assert ended == 0
    check(cluster, topic, bodies)
    steps = [path.stat().st_size for path in tmp_path.glob("steps-*")]
    assert max(steps) > 2 * BATCH_ROWS, "half messages and commits are steps"
