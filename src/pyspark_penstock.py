"""What Spark looks for: it imports every top-level module named `pyspark_*` and takes its
`DefaultSource`. With Penstock installed, `format("penstock")` works without a line of set-up."""

from penstock.spark.source.data_source import DefaultSource

__all__ = ["DefaultSource"]
