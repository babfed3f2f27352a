"""The former name of `penstock.spark.pipelines.insight.dead_letters`."""

import sys

from penstock.spark.pipelines.insight import dead_letters

sys.modules[__name__] = dead_letters
