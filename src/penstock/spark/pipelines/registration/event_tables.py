"""Tables from registrations and their steps: counts, latencies, and users who are stuck.

These functions work on streams and on ordinary DataFrames. The state of a stream is kept by Spark's
built-in operators in the JVM: batches of 5,000 users took 0.6 to 0.9 s, with the fastest keyed
state in Python 3.8 to 5.7 s (on two busy cores).

A *journey* is a user's registration with the steps that were done in time. It is a session window:
the registration lasts until just before `stuck_after` past the end of its minute, and each step is
a point inside. So all journeys of a minute end at the same time, are closed by the same watermark,
and are in the same batch. The latencies of a minute therefore need no further state.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.spark.pipelines.registration.events import ACCEPTED, STEP_NAMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MINUTE: Final = "1 minute"
EARLY_MS: Final = 5_000
"""How far the clock of a service may be behind the clock of the registration."""
PERCENTILES: Final = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
SEVERAL: Final = "several"
"""The tag of an alert about a user with more than one missing step."""
_ACCURACY: Final = 10_000
_MINUTE_US: Final = 60_000_000
_END_MARGIN_US: Final = 500
"""A journey ends this long before its time limit. Steps and watermarks have whole milliseconds, so
that no step at the very end can extend the journey beyond the others of its minute."""


def counts(registrations: "DataFrame", *, late_ms: int) -> "DataFrame":
    """The number of distinct ids for each minute, channel and outcome.

    In a stream, a minute is output once, when the watermark has passed it. Events that are more
    than `late_ms` behind the newest event are dropped.
    """
    from pyspark.sql import functions as f

    if registrations.isStreaming:
        with_watermark = registrations.withWatermark("registered_at", f"{late_ms} milliseconds")
        once = with_watermark.dropDuplicatesWithinWatermark(["id"])
    else:
        once = registrations.dropDuplicates(["id"])
    minutes = once.groupBy(f.window("registered_at", MINUTE), "channel", "outcome")
    return minutes.agg(f.count(f.lit(1)).alias("registrations")).select(
        f.col("window.start").alias("minute"), "channel", "outcome", "registrations"
    )


def journeys(
    events: "DataFrame",
    *,
    stuck_after_ms: int,
    late_ms: int,
    names: Sequence[str] = STEP_NAMES,
) -> "DataFrame":
    """One row per user, `stuck_after_ms` after the minute of the registration has ended.

    `events` come from `events_of`. Columns: minute, id, channel, outcome, registered_at, `took`
    (step to milliseconds), `failed` and `missing` (lists of steps). Only accepted users have
    missing steps. Events of both topics advance the watermark, so that users are reported even if
    all services have stopped.
    """
    from pyspark.sql import functions as f

    spans = _spans(events, names, stuck_after_ms)
    if events.isStreaming:
        spans = spans.withWatermark("at", f"{late_ms} milliseconds")
    users = spans.groupBy("id", f.session_window("at", f.col("span")))
    first = [f.min(f.when(f.col("name") == name, f.col("done_at"))) for name in names]
    grouped = users.agg(
        f.min("registration").alias("registration"),
        f.collect_set(f.when(~f.col("ok"), f.col("name"))).alias("failed_steps"),
        *(column.alias(f"first_{number}") for number, column in enumerate(first)),
    )
    registered_at = f.col("registration.registered_at")
    took = {
        name: _milliseconds(registered_at, f.col(f"first_{number}"))
        for number, name in enumerate(names)
    }
    is_accepted = f.col("registration.outcome") == ACCEPTED
    missing = [f.when(is_accepted & took[name].isNull(), f.lit(name)) for name in names]
    # From the end, not from registered_at: if an id is registered again minutes later, its journey
    # ends with the later minute.
    minute = _minute(f.unix_micros("session_window.end") - stuck_after_ms * 1000)
    return grouped.where(f.col("registration").isNotNull()).select(
        f.timestamp_micros(minute).alias("minute"),
        "id",
        f.col("registration.channel").alias("channel"),
        f.col("registration.outcome").alias("outcome"),
        registered_at.alias("registered_at"),
        f.map_from_arrays(f.array(*(f.lit(name) for name in names)), f.array(*took.values())).alias(
            "took"
        ),
        f.array_sort("failed_steps").alias("failed"),
        f.array_compact(f.array(*missing)).alias("missing"),
    )


def latencies(users: "DataFrame") -> "DataFrame":
    """For each minute and step: accepted users, users with the step, and percentiles of its time.

    `users` are journeys of complete minutes in an ordinary DataFrame, such as a batch of a stream.
    """
    from pyspark.sql import functions as f

    each = users.where(f.col("outcome") == ACCEPTED).select(
        "minute", "failed", f.explode("took").alias("step", "took_ms")
    )
    found = f.percentile_approx("took_ms", list(PERCENTILES.values()), _ACCURACY)
    done = f.count("took_ms")
    grouped = each.groupBy("minute", "step").agg(
        f.count(f.lit(1)).alias("users"),
        done.alias("done"),
        f.count_if(f.array_contains("failed", f.col("step"))).alias("failed"),
        (f.count(f.lit(1)) - done).alias("missing"),
        found.alias("found"),
    )
    return grouped.select(
        "minute",
        "step",
        "users",
        "done",
        "failed",
        "missing",
        *(f.col("found")[number].alias(name) for number, name in enumerate(PERCENTILES)),
    )


def alerts(users: "DataFrame") -> "DataFrame":
    """A message for each journey with a missing step: body, tag (the step) and key (the user)."""
    from pyspark.sql import functions as f

    stuck = users.where(f.size("missing") > 0)
    tag = f.when(f.size("missing") == 1, f.col("missing")[0]).otherwise(SEVERAL)
    body = f.to_json(
        f.struct("id", "channel", "registered_at", "missing", "failed"),
        {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'", "timeZone": "UTC"},
    )
    return stuck.select(body.alias("body"), tag.alias("tags"), f.col("id").alias("keys"))


def _spans(events: "DataFrame", names: Sequence[str], stuck_after_ms: int) -> "DataFrame":
    """Registrations and steps with start and length, as session_window needs them."""
    from pyspark.sql import functions as f

    is_user = f.col("registration").isNotNull()
    registered = f.unix_micros("registration.registered_at")
    begin = registered - EARLY_MS * 1000
    length = _minute(registered) + _MINUTE_US + stuck_after_ms * 1000 - _END_MARGIN_US - begin
    done_at = f.col("step.done_at")
    done_at_ms = f.timestamp_millis(f.unix_millis(done_at))
    return events.where(is_user | f.col("step.step").isin(*names)).select(
        f.when(is_user, f.col("registration.id")).otherwise(f.col("step.id")).alias("id"),
        f.when(is_user, f.timestamp_micros(begin)).otherwise(done_at_ms).alias("at"),
        _interval(f.when(is_user, length).otherwise(1)).alias("span"),
        f.when(
            is_user,
            f.struct("registration.registered_at", "registration.channel", "registration.outcome"),
        ).alias("registration"),
        f.col("step.step").alias("name"),
        f.col("step.ok").alias("ok"),
        f.when(f.col("step.ok"), done_at).alias("done_at"),
    )


def _minute(us: "Column") -> "Column":
    """The start of the minute of a time in microseconds."""
    from pyspark.sql import functions as f

    return us - f.pmod(us, f.lit(_MINUTE_US))


def _interval(us: "Column") -> "Column":
    from pyspark.sql import functions as f

    return f.make_interval(secs=(us / f.lit(1_000_000)).cast("decimal(18,6)"))


def _milliseconds(begin: "Column", end: "Column") -> "Column":
    """The time between two timestamps, at least 0 because clocks differ; null if one is null."""
    from pyspark.sql import functions as f

    took = f.floor((f.unix_micros(end) - f.unix_micros(begin)) / 1000)
    return f.when(took < 0, f.lit(0)).otherwise(took)
