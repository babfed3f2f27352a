"""The former name of `penstock.spark.pipelines.insight.trace_latency`."""

import sys

from penstock.spark.pipelines.insight import trace_latency

sys.modules[__name__] = trace_latency
