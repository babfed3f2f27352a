"""Pipeline `lake`: writes topics to Parquet files by date and topic."""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.spark.pipelines.lake.lake_compaction import compact_lake
    from penstock.spark.pipelines.lake.lake_writer import LakeSettings, write_lake

__all__ = ["LakeSettings", "compact_lake", "write_lake"]

__getattr__ = lazy_exports(
    __name__,
    {
        "LakeSettings": "lake_writer",
        "compact_lake": "lake_compaction",
        "write_lake": "lake_writer",
    },
)
