"""The former name of `penstock.spark.pipelines.replay.pace`."""

import sys

from penstock.spark.pipelines.replay import pace

sys.modules[__name__] = pace
