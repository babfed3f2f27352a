"""What is made of registrations and their steps: counts, latencies, and users who are stuck.

These functions work on streams and on ordinary DataFrames alike. The state of a stream is held by
Spark's own operators in the JVM: batches of 5,000 users took them 0.6 to 0.9 s where the quickest
keyed state in Python took 3.8 to 5.7 s (seen on two busy cores).

A *journey* is all that is known of a user when his time is up. It is a session: his registration
spans from the moment until just before `stuck_after` past the end of its minute, and each step lies
within, at a point. So all journeys of a minute end at the same instant, are closed by the same move
of the watermark, and come out in the same batch: figures of that minute need no further state.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.spark.pipelines.registration.events import ACCEPTED, STEP_NAMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MINUTE: Final = "1 minute"
EARLY_MS: Final = 5_000
"""A service's clock may be so far behind the one of the registration."""
PERCENTILES: Final = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
SEVERAL: Final = "several"
"""The tag of an alert for a user who misses more than one step."""
_ACCURACY: Final = 10_000
_MINUTE_US: Final = 60_000_000
_SHORT_US: Final = 500
"""So long before its time is up a journey ends. Steps go by whole milliseconds, as watermarks do:
none at the very end can touch the journey and draw it out past the others of its minute."""


def counts(registrations: "DataFrame", *, late_ms: int) -> "DataFrame":
    """Registrations for each minute, channel and outcome, each id once.

    As a stream: a minute comes out, once, when the watermark has passed it; events that are more
    than `late_ms` behind the newest one are left out.
    """
    from pyspark.sql import functions as f

    if registrations.isStreaming:
        timed = registrations.withWatermark("registered_at", f"{late_ms} milliseconds")
        once = timed.dropDuplicatesWithinWatermark(["id"])
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
    """One row for each user, when the minute of his registration is `stuck_after_ms` past.

    `events` are those of `events_of`. Columns: minute, id, channel, outcome, registered_at; `took`
    (step → milliseconds), `failed` and `missing` (steps). Only accepted users miss steps. One
    watermark goes by the events of both kinds, so that services that have all fallen silent are
    noticed.
    """
    from pyspark.sql import functions as f

    spans = _spans(events, names, stuck_after_ms)
    if events.isStreaming:
        spans = spans.withWatermark("at", f"{late_ms} milliseconds")
    users = spans.groupBy("id", f.session_window("at", f.col("span")))
    first = [f.min(f.when(f.col("name") == name, f.col("done_at"))) for name in names]
    grouped = users.agg(
        f.min("registration").alias("registration"),
        f.collect_set(f.when(~f.col("ok"), f.col("name"))).alias("tried"),
        *(column.alias(f"first_{place}") for place, column in enumerate(first)),
    )
    began = f.col("registration.registered_at")
    took = {name: _milliseconds(began, f.col(f"first_{place}")) for place, name in enumerate(names)}
    is_open = f.col("registration.outcome") == ACCEPTED
    lacking = [f.when(is_open & took[name].isNull(), f.lit(name)) for name in names]
    # By the end rather than by registered_at: if an id comes again minutes later with another time,
    # the journey ends with that minute.
    minute = _minute(f.unix_micros("session_window.end") - stuck_after_ms * 1000)
    return grouped.where(f.col("registration").isNotNull()).select(
        f.timestamp_micros(minute).alias("minute"),
        "id",
        f.col("registration.channel").alias("channel"),
        f.col("registration.outcome").alias("outcome"),
        began.alias("registered_at"),
        f.map_from_arrays(f.array(*(f.lit(name) for name in names)), f.array(*took.values())).alias(
            "took"
        ),
        f.array_sort("tried").alias("failed"),
        f.array_compact(f.array(*lacking)).alias("missing"),
    )


def latencies(users: "DataFrame") -> "DataFrame":
    """For each minute and step: accepted users, how many have it, and how long it took them.

    `users` are whole minutes of journeys: an ordinary DataFrame, as a batch of a stream is.
    """
    from pyspark.sql import functions as f

    each = users.where(f.col("outcome") == ACCEPTED).select(
        "minute", "failed", f.explode("took").alias("step", "took_ms")
    )
    found = f.percentile_approx("took_ms", list(PERCENTILES.values()), _ACCURACY)
    done = f.count("took_ms")
    figures = each.groupBy("minute", "step").agg(
        f.count(f.lit(1)).alias("users"),
        done.alias("done"),
        f.count_if(f.array_contains("failed", f.col("step"))).alias("failed"),
        (f.count(f.lit(1)) - done).alias("missing"),
        found.alias("found"),
    )
    return figures.select(
        "minute",
        "step",
        "users",
        "done",
        "failed",
        "missing",
        *(f.col("found")[place].alias(name) for place, name in enumerate(PERCENTILES)),
    )


def alerts(users: "DataFrame") -> "DataFrame":
    """A message for each journey that misses a step: body, tag (the step) and key (the user)."""
    from pyspark.sql import functions as f

    stuck = users.where(f.size("missing") > 0)
    tag = f.when(f.size("missing") == 1, f.col("missing")[0]).otherwise(SEVERAL)
    body = f.to_json(
        f.struct("id", "channel", "registered_at", "missing", "failed"),
        {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'", "timeZone": "UTC"},
    )
    return stuck.select(body.alias("body"), tag.alias("tags"), f.col("id").alias("keys"))


def _spans(events: "DataFrame", names: Sequence[str], stuck_after_ms: int) -> "DataFrame":
    """Registrations and steps as spans of time: `at` and how long, as session_window takes it."""
    from pyspark.sql import functions as f

    is_user = f.col("registration").isNotNull()
    registered = f.unix_micros("registration.registered_at")
    begin = registered - EARLY_MS * 1000
    length = _minute(registered) + _MINUTE_US + stuck_after_ms * 1000 - _SHORT_US - begin
    done_at = f.col("step.done_at")
    whole = f.timestamp_millis(f.unix_millis(done_at))
    return events.where(is_user | f.col("step.step").isin(*names)).select(
        f.when(is_user, f.col("registration.id")).otherwise(f.col("step.id")).alias("id"),
        f.when(is_user, f.timestamp_micros(begin)).otherwise(whole).alias("at"),
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
    """The beginning of the minute that a time in microseconds lies in."""
    from pyspark.sql import functions as f

    return us - f.pmod(us, f.lit(_MINUTE_US))


def _interval(us: "Column") -> "Column":
    from pyspark.sql import functions as f

    return f.make_interval(secs=(us / f.lit(1_000_000)).cast("decimal(18,6)"))


def _milliseconds(begin: "Column", end: "Column") -> "Column":
    """Between two times, not less than 0: clocks differ. Null if one of them is."""
    from pyspark.sql import functions as f

    took = f.floor((f.unix_micros(end) - f.unix_micros(begin)) / 1000)
    return f.when(took < 0, f.lit(0)).otherwise(took)
