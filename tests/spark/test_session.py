"""The session of pipelines and tests, and the modules that Spark's Python workers load."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from penstock.spark.session import spark_session
from tests.spark import kit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_session_counts_and_keeps_state_in_rocksdb(spark: SparkSession) -> None:
    assert spark.range(10).count() == 10
    provider = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    assert provider is not None
    assert provider.endswith(".RocksDBStateStoreProvider")
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"


def test_the_kit_sends_and_reads(cluster: Up, fresh: str) -> None:
    topic = kit.create_topic(cluster, fresh)
    bodies = kit.send_numbers(cluster, topic, 100)
    read = kit.read_topic(cluster, topic, 100)
    assert sorted(message.body for message in read) == sorted(bodies)


def test_workers_load_no_broker_no_store_and_no_pandas() -> None:
    """Each Python worker of Spark imports the source before its first row."""
    heavy = (
        "penstock.broker", "penstock.cli", "penstock.store", "penstock.config",
        "penstock.spark.sink.data_writer", "penstock.spark.pipelines",
        "rich", "click", "pandas", "matplotlib",
    )  # fmt: skip
    look = f"import sys, pyspark_penstock; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_running_session_is_used_unchanged(spark: SparkSession) -> None:
    again = spark_session("another", master="local[7]", conf={"spark.sql.ansi.enabled": "true"})
    assert again.sparkContext.applicationId == spark.sparkContext.applicationId
    assert again.sparkContext.master == "local[2]"
