"""The former name of `penstock.spark.pipelines.lake.lake_compaction`."""

import sys

from penstock.spark.pipelines.lake import lake_compaction

sys.modules[__name__] = lake_compaction
