"""The events of registrations: topics, fields, and the conversion of messages to rows.

    UserRegistered       {"id": "u17", "channel": "web", "outcome": "ok",
                          "registered_at": "2026-08-01T12:00:00.123Z"}
    RegistrationSteps    {"id": "u17", "step": "sms", "done_at": "2026-08-01T12:00:01.500Z",
                          "ok": true}                                      the tag is the step
    RegistrationAlerts   {"id": "u17", "channel": "web", "registered_at": "…",
                          "missing": ["sms"], "failed": []}               sent by the pipeline

Other messages are unreadable, and so are events from the future: one event from next year would
advance the watermark, and all other events would be too late. An event whose id can't be the key of
a message is unreadable as well, because its alert would be refused and the query would fail.
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
"""The outcome of a registration that expects the steps."""

REGISTRATION_FIELDS: Final = (
    "id STRING NOT NULL, channel STRING NOT NULL, outcome STRING NOT NULL, "
    "registered_at TIMESTAMP NOT NULL"
)
STEP_FIELDS: Final = (
    "id STRING NOT NULL, step STRING NOT NULL, done_at TIMESTAMP NOT NULL, ok BOOLEAN NOT NULL"
)
MESSAGE_COLUMNS: Final = "topic,broker,queue_id,queue_offset,message_id,body,store_timestamp"
"""The columns that are needed, and those that locate an unreadable message."""
AHEAD_SECONDS_MAX: Final = 600
"""How far the time of an event may be ahead of its store time."""
_ID: Final = r"\A(?=.*\S)\P{Cntrl}{1,255}\z"
_INVALID_ID: Final = "id is blank, longer than 255 characters, or has control characters"


class RegistrationEvent(msgspec.Struct, frozen=True):
    """A user has registered or was rejected."""

    id: str
    channel: str
    outcome: str
    registered_at: datetime


class StepEvent(msgspec.Struct, frozen=True):
    """A service has completed a step for a user, or has failed."""

    id: str
    step: str
    done_at: datetime
    ok: bool = True


def encode_event(event: RegistrationEvent | StepEvent) -> bytes:
    """The body of the message for an event."""
    return msgspec.json.encode(event)


def event_time(seconds: float) -> datetime:
    """A time for an event, in UTC and whole milliseconds."""
    return datetime.fromtimestamp(round(seconds * 1000) / 1000, UTC)


def registrations_of(events: "DataFrame") -> "DataFrame":
    """The registrations, with the columns of `REGISTRATION_FIELDS`."""
    return events.where("registration IS NOT NULL").select("registration.*")


def steps_of(events: "DataFrame") -> "DataFrame":
    """The steps, with the columns of `STEP_FIELDS`."""
    return events.where("step IS NOT NULL").select("step.*")


def unreadable(events: "DataFrame") -> "DataFrame":
    """The messages that are not valid events, unchanged, with the reason."""
    return events.where(f"{REASON} IS NOT NULL").drop("registration", "step")


def events_of(
    messages: "DataFrame", registrations: str = REGISTRATIONS, steps: str = STEPS
) -> "DataFrame":
    """The messages with the columns `registration`, `step` and `reason`; one of them is not null.

    `registration` and `step` contain the fields of the event, `reason` says why a message is
    neither. A single DataFrame for all three, so that a stream is read once.
    """
    from pyspark.sql import functions as f

    kinds = {
        "registration": (registrations, REGISTRATION_FIELDS, "registered_at"),
        "step": (steps, STEP_FIELDS, "done_at"),
    }
    rows = messages
    for kind, (topic, fields, time) in kinds.items():
        schema = BodySchema.parse(fields)
        is_kind = f.col("topic") == topic
        values = {field.name: schema.value(field) for field in schema.fields}
        ahead = (
            f.unix_micros(values[time])
            > f.unix_micros("store_timestamp") + AHEAD_SECONDS_MAX * 1_000_000
        )
        has_valid_id = values["id"].rlike(_ID)
        reason = (
            f.when(f.col(BAD), schema.reason())
            .when(~has_valid_id, f.lit(_INVALID_ID))
            .when(ahead, f.concat(f.lit(f"{time} is in the future: "), values[time].cast("string")))
        )
        is_valid = is_kind & ~f.col(BAD) & has_valid_id & ~ahead
        rows = schema.parsed(rows).withColumns(
            {
                kind: f.when(is_valid, f.struct(*(v.alias(name) for name, v in values.items()))),
                f"{REASON}_{kind}": f.when(is_kind, reason),
            }
        )
    reasons = [f.col(f"{REASON}_{kind}") for kind in kinds]
    return rows.select(*messages.columns, *kinds, f.coalesce(*reasons).alias(REASON))
