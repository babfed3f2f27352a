"""Penstock's Spark source compared with Spark's source for Apache Kafka.

A Kafka broker and a Penstock broker have the same rows: keys and 128-byte bodies in eight
partitions or queues, with a header or a tag. Each source reads all rows, in alternating rounds of
one session on two cores, which both brokers share. The prepared source shows the upper limit of
Spark's Python Data Source API. `PENSTOCK_SPARK_ROWS` changes the number of rows.

Maven downloads the jars into its own repository. The source for Kafka is built for one version of
Spark, so this runs in an environment with PySpark 4.2.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from rich.console import Console
from rich.table import Table
from tests.compat import maven

from benchmarks.kafka_server import PARTITIONS, SERVER_JARS, CannotRunError, KafkaServer, jars
from benchmarks.spark import ROUNDS, ROWS, TOPIC, Bench, Work, alternate, bench, noop
from benchmarks.spark_prepared_source import BODY
from penstock import Admin
from penstock.spark.session import spark_session

SPARK = "4.2"
SPARK_JARS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    # For Kerberos only, but its classes are loaded; not every mirror has the version for 4.2.
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
"""Jars that the source needs and Spark does not include."""
FILLING = {
    # A few hundred messages per batch, as in Penstock: smaller batches are slower to read.
    "kafka.batch.size": "131072",
    "kafka.linger.ms": "100",
    # With it, a producer that starts while its topic is being created may retry without end.
    "kafka.enable.idempotence": "false",
}
READING = {"kafka.fetch.max.wait.ms": "10"}
"""By default every task waits half a second for new messages at the end of its partition."""
KAFKA = "Kafka"
THEIR_COLUMNS = "keys,body,topic,queue_id,queue_offset,store_timestamp"


def check_tools() -> None:
    if not pyspark.__version__.startswith(f"{SPARK}."):
        raise CannotRunError(
            f"Kafka's source is used with PySpark {SPARK} and this is {pyspark.__version__}: run "
            f"it in an environment with pyspark=={SPARK}.*"
        )
    if missing := maven.missing_tools():
        raise CannotRunError(f"{' and '.join(missing)} must be on the PATH")


# --- sources


class SparkComparison:
    """The same rows in two brokers."""

    def __init__(self, ours: Bench, kafka: KafkaServer) -> None:
        self.ours = ours
        self._kafka = kafka

    def fill(self) -> None:
        with Admin(self.ours.up.address) as admin:
            admin.create_topic(TOPIC, queues=PARTITIONS)
        load = [sys.executable, "-m", "benchmarks.spark_load", self.ours.up.address, TOPIC]
        subprocess.run([*load, str(ROWS)], check=True)
        tag = f.struct(f.lit("tags").alias("key"), f.lit(b"trial").alias("value"))
        rows = self.ours.spark.range(ROWS).select(
            f.col("id").cast("string").alias("key"), f.lit(BODY).alias("value"),
            f.array(tag).alias("headers"),
        )  # fmt: skip
        writer = rows.write.format("kafka").option("topic", TOPIC).options(**FILLING)
        writer.option("kafka.bootstrap.servers", self._kafka.address).save()

    def kafka(self, **options: str) -> DataFrame:
        reader = self.ours.spark.read.format("kafka").option("subscribe", TOPIC).options(**options)
        return reader.option("kafka.bootstrap.servers", self._kafka.address).load()

    def check(self) -> None:
        """Raises unless the brokers have the same keys and bodies."""
        theirs = checksum(self.kafka(), f.col("key").cast("string"), "value")
        assert theirs[0] == ROWS
        for frame in (self.ours.broker(), self.ours.log()):
            assert checksum(frame, f.col("keys"), "body") == theirs

    def works(self) -> dict[str, Work]:
        b = self.ours
        return {
            KAFKA: lambda: noop(self.kafka(**READING)),
            "Kafka with headers": lambda: noop(self.kafka(includeHeaders="true", **READING)),
            "Kafka by default": lambda: noop(self.kafka()),
            "broker": lambda: noop(b.broker()),
            "broker, Kafka's columns": lambda: noop(b.broker(columns=THEIR_COLUMNS)),
            "log scan": lambda: noop(b.log()),
            "prepared source": lambda: noop(b.prepared()),
        }


@contextmanager
def beside() -> Iterator[SparkComparison]:
    spark_jars, server_jars = jars(*SPARK_JARS, alone=True), jars(*SERVER_JARS)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-kafka-") as folder,
        KafkaServer(Path(folder), server_jars) as kafka,
    ):
        # The benchmark uses the active session and stops it.
        conf = {"spark.jars": ",".join(spark_jars)}
        session = spark_session("benchmarks", master="local[2]", conf=conf)
        session.sparkContext.setLogLevel("ERROR")  # Kafka's clients warn of errors that they retry
        with bench() as ours:
            yield SparkComparison(ours, kafka)


def checksum(frame: DataFrame, key: Column, body: str) -> tuple[object, ...]:
    """A checksum of the rows that does not depend on their order."""
    hashed = f.sum(f.xxhash64(key, body).cast("decimal(38,0)"))
    return tuple(frame.agg(f.count("*"), hashed).collect()[0])


def show(seconds: dict[str, float]) -> None:
    title = f"all columns of {ROWS:,} messages, Spark {pyspark.__version__}"
    table = Table("source", title=title)
    for column in ("thousand rows/s", "compared with Kafka", "compared with prepared"):
        table.add_column(column, justify="right")
    for name, took in seconds.items():
        ratios = (f"{seconds[base] / took:.2f}" for base in (KAFKA, "prepared source"))
        table.add_row(name, f"{ROWS / took / 1e3:,.0f}", *ratios)
    Console().print(table)


def main() -> None:
    try:
        check_tools()
        with beside() as b:
            b.fill()
            b.check()
            works = b.works()
            alternate(works, 1)  # warm up, especially the JVM
            show(alternate(works, ROUNDS))
    except CannotRunError as e:
        print(f"skipped: {e}")


if __name__ == "__main__":
    main()
