"""The former name of `penstock.spark.pipelines.replay.selection`."""

import sys

from penstock.spark.pipelines.replay import selection

sys.modules[__name__] = selection
