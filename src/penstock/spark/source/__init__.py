"""The Spark source: batch and streaming reads of topics and of log files."""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.spark.source.data_source import DefaultSource

__all__ = ["DefaultSource"]

__getattr__ = lazy_exports(
    __name__,
    {"DefaultSource": "data_source"},
)
