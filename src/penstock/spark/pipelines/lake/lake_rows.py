"""The messages of a lake, for the pipelines that read one."""

from typing import TYPE_CHECKING

from penstock.errors import BadSetting, PipelineFailed
from penstock.spark.pipelines.lake.lake_files import HadoopFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def lake_rows(spark: "SparkSession", lake: str) -> "DataFrame":
    """All of them; raises BadSetting where there is no lake, PipelineFailed where it is empty."""
    from pyspark.errors import AnalysisException
    from pyspark.sql.types import StringType, StructField, StructType

    files = HadoopFiles(spark, lake)
    if files.size("data") is None:
        raise BadSetting(
            f"{lake} is no lake: it has no directory data", hint="give what --lake was of `lake`"
        )
    url = files.url("data")
    try:  # columns may have been added later
        found = spark.read.option("mergeSchema", "true").parquet(url).schema
    except AnalysisException as error:
        if error.getCondition() != "UNABLE_TO_INFER_SCHEMA":
            raise
        raise PipelineFailed(
            f"the lake {lake} has no messages yet", hint="fill it by pipeline `lake` first"
        ) from error
    # A topic called 007 is no number, whatever Spark guesses from the names of directories.
    fields = [
        StructField(each.name, StringType() if each.name == "topic" else each.dataType)
        for each in found.fields
    ]
    return spark.read.schema(StructType(fields)).parquet(url)
