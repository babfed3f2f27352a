"""The events of a registration: their topics, their fields, and how messages become rows.

    UserRegistered       {"id": "u17", "channel": "web", "outcome": "ok",
                          "registered_at": "2026-08-01T12:00:00.123Z"}
    RegistrationSteps    {"id": "u17", "step": "sms", "done_at": "2026-08-01T12:00:01.500Z",
                          "ok": true}                                        tagged with the step
    RegistrationAlerts   {"id": "u17", "channel": "web", "registered_at": "…",
                          "missing": ["sms"], "failed": []}                 what the pipeline sends

A message that is not like that, or that claims to come from the future, is unreadable. One event
from next year would otherwise move the watermark there, and all real ones would be too late. So is
one whose id can't be the key of a message: its alert would be refused, and end the query each time.
"""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.spark.pipelines.lake.json_bodies import BAD, REASON, BodySchema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REGISTRATIONS: Final = "UserRegistered"
STEPS: Final = "RegistrationSteps"
ALERTS: Final = "RegistrationAlerts"
STEP_NAMES: Final = ("sms", "push", "coupon")
ACCEPTED: Final = "ok"
"""The outcome after which a user waits for the steps."""

REGISTRATION_FIELDS: Final = (
    "id STRING NOT NULL, channel STRING NOT NULL, outcome STRING NOT NULL, "
    "registered_at TIMESTAMP NOT NULL"
)
STEP_FIELDS: Final = (
    "id STRING NOT NULL, step STRING NOT NULL, done_at TIMESTAMP NOT NULL, ok BOOLEAN NOT NULL"
)
MESSAGE_COLUMNS: Final = "topic,broker,queue_id,queue_offset,message_id,body,store_timestamp"
"""What the functions here need of a message, and what tells where an unreadable one is."""
AHEAD_SECONDS_MAX: Final = 600
"""So far an event may be ahead of the time at which the broker stored it."""
_ID: Final = r"\A(?=.*\S)\P{Cntrl}{1,255}\z"
_NO_ID: Final = "id is blank, longer than 255 characters, or has control characters"


class RegistrationEvent(msgspec.Struct, frozen=True):
    """A user has registered, or was rejected."""

    id: str
    channel: str
    outcome: str
    registered_at: datetime


class StepEvent(msgspec.Struct, frozen=True):
    """A service has done its part for a user, or has failed at it."""

    id: str
    step: str
    done_at: datetime
    ok: bool = True


def encode_event(event: RegistrationEvent | StepEvent) -> bytes:
    """The body of the message that tells of it."""
    return msgspec.json.encode(event)


def event_time(seconds: float) -> datetime:
    """A time as events have it, in UTC and whole milliseconds."""
    return datetime.fromtimestamp(round(seconds * 1000) / 1000, UTC)


def registrations_of(events: "DataFrame") -> "DataFrame":
    """The registrations among events, with the columns of `REGISTRATION_FIELDS`."""
    return events.where("registration IS NOT NULL").select("registration.*")


def steps_of(events: "DataFrame") -> "DataFrame":
    """The steps among events, with the columns of `STEP_FIELDS`."""
    return events.where("step IS NOT NULL").select("step.*")


def unreadable(events: "DataFrame") -> "DataFrame":
    """Messages of both topics that are no events, as they came, with the reason."""
    return events.where(f"{REASON} IS NOT NULL").drop("registration", "step")


def events_of(
    messages: "DataFrame", registrations: str = REGISTRATIONS, steps: str = STEPS
) -> "DataFrame":
    """The messages with three more columns, of which one is not null: `registration` and `step`
    with the fields of one, and the `reason` why it is neither.

    All in one pass: a stream is read once, whatever is taken from it.
    """
    from pyspark.sql import functions as f

    kinds = {
        "registration": (registrations, REGISTRATION_FIELDS, "registered_at"),
        "step": (steps, STEP_FIELDS, "done_at"),
    }
    rows = messages
    for kind, (topic, fields, time) in kinds.items():
        schema = BodySchema.parse(fields)
        is_one = f.col("topic") == topic
        values = {field.name: schema.value(field) for field in schema.fields}
        told = f.unix_micros(values[time])
        ahead = told > f.unix_micros("store_timestamp") + AHEAD_SECONDS_MAX * 1_000_000
        is_named = values["id"].rlike(_ID)
        reason = (
            f.when(f.col(BAD), schema.reason())
            .when(~is_named, f.lit(_NO_ID))
            .when(ahead, f.concat(f.lit(f"{time} lies ahead: "), values[time].cast("string")))
        )
        fits = is_one & ~f.col(BAD) & is_named & ~ahead
        rows = schema.parsed(rows).withColumns(
            {
                kind: f.when(fits, f.struct(*(v.alias(name) for name, v in values.items()))),
                f"{REASON}_{kind}": f.when(is_one, reason),
            }
        )
    reasons = [f.col(f"{REASON}_{kind}") for kind in kinds]
    return rows.select(*messages.columns, *kinds, f.coalesce(*reasons).alias(REASON))
