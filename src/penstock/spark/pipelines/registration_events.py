"""The former name of `penstock.spark.pipelines.registration.events`."""

import sys

from penstock.spark.pipelines.registration import events

sys.modules[__name__] = events
