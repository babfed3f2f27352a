"""The former name of `penstock.spark.pipelines.registration.event_tables`."""

import sys

from penstock.spark.pipelines.registration import event_tables

sys.modules[__name__] = event_tables
