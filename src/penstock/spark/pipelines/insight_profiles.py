"""The former name of `penstock.spark.pipelines.insight.profiles`."""

import sys

from penstock.spark.pipelines.insight import profiles

sys.modules[__name__] = profiles
