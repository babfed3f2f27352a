"""Reads the messages of a lake, for other pipelines."""

from typing import TYPE_CHECKING

from penstock.errors import BadSetting, PipelineFailed
from penstock.spark.pipelines.lake.lake_files import HadoopFiles
from penstock.spark.pipelines.local_paths import local_path
from penstock.spark.pipelines.running import PipelineJob

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def check_lake(job: PipelineJob, lake: str) -> None:
    """Raise BadSetting if this is certainly not a lake."""
    path = local_path(job, lake)
    if path is not None and not (path / "data").is_dir():
        raise _no_lake(lake)


def _no_lake(lake: str) -> BadSetting:
    return BadSetting(
        f"{lake} is not a lake: it has no directory data",
        hint="use the directory that --lake of the pipeline `lake` names",
    )


def lake_rows(spark: "SparkSession", lake: str) -> "DataFrame":
    """All messages of a lake; raises BadSetting or, if it is empty, PipelineFailed."""
    from pyspark.errors import AnalysisException
    from pyspark.sql.types import StringType, StructField, StructType

    files = HadoopFiles(spark, lake)
    if files.size("data") is None:
        raise _no_lake(lake)
    url = files.url("data")
    try:  # later files may have more columns
        found = spark.read.option("mergeSchema", "true").parquet(url).schema
    except AnalysisException as error:
        if error.getCondition() != "UNABLE_TO_INFER_SCHEMA":
            raise
        raise PipelineFailed(
            f"the lake {lake} has no messages yet", hint="run the pipeline `lake` first"
        ) from error
    # Spark would infer from the directory names that a topic `007` is a number.
    fields = [
        StructField(each.name, StringType() if each.name == "topic" else each.dataType)
        for each in found.fields
    ]
    return spark.read.schema(StructType(fields)).parquet(url)
