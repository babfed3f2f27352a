"""Pipeline `registration`: its functions on ordinary DataFrames, and the pipeline on streams."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Message
from penstock.errors import BadSetting, LakeDamaged, LakeRefused, NoRoute, PipelineFailed
from penstock.spark.pipelines.lake.batch_commits import BatchCommitter
from penstock.spark.pipelines.registration import event_tables as tables
from penstock.spark.pipelines.registration import events
from penstock.spark.pipelines.registration.events import RegistrationEvent, StepEvent, encode_event
from penstock.spark.pipelines.registration.plot import read_statistics
from penstock.spark.pipelines.registration.registration_pipeline import PIPELINE, table_path
from penstock.spark.pipelines.running import run_pipeline
from tests.spark.kit import create_topic, read_topic, send

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]

NOON = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
Event = RegistrationEvent | StepEvent | bytes


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def user(name: str, seconds: float, outcome: str = "ok", channel: str = "web") -> RegistrationEvent:
    return RegistrationEvent(name, channel, outcome, at(seconds))


def done(name: str, seconds: float, *steps: str, ok: bool = True) -> list[Event]:
    return [StepEvent(name, step, at(seconds), ok) for step in steps or events.STEP_NAMES]


def topic_of(event: Event) -> str:
    return events.REGISTRATIONS if isinstance(event, RegistrationEvent) else events.STEPS


def body(event: Event) -> bytes:
    return event if isinstance(event, bytes) else encode_event(event)


def table(spark: SparkSession, sent_events: Sequence[Event]) -> DataFrame:
    """Messages with the columns of the source."""
    rows = [
        (topic_of(event), "broker", 0, number, f"id-{number}", body(event), at(3600))
        for number, event in enumerate(sent_events)
    ]
    ddl = (
        "topic string, broker string, queue_id int, queue_offset long, message_id string, "
        "body binary, store_timestamp timestamp"
    )
    return spark.createDataFrame(rows, ddl)


def rows_of(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """The rows, sorted; times are seconds after noon."""
    return sorted(
        tuple(
            (value.astimezone(UTC) - NOON).total_seconds() if isinstance(value, datetime) else value
            for value in row
        )
        for row in frame.select(*columns).collect()
    )


def event_rows(spark: SparkSession, sent_events: Sequence[Event]) -> DataFrame:
    return events.events_of(table(spark, sent_events))


def journeys(spark: SparkSession, sent_events: Sequence[Event]) -> DataFrame:
    return tables.journeys(event_rows(spark, sent_events), stuck_after_ms=120_000, late_ms=30_000)


def test_each_id_is_counted_once_in_its_minute(spark: SparkSession) -> None:
    sent_events = [
        user("a", 10), user("a", 10), user("b", 59.999), user("c", 60, channel="app"),
        user("d", 61, outcome="rejected"), user("a", 10),
    ]  # fmt: skip
    counted = tables.counts(events.registrations_of(event_rows(spark, sent_events)), late_ms=1)
    assert rows_of(counted, "minute", "channel", "outcome", "registrations") == [
        (0.0, "web", "ok", 2),
        (60.0, "app", "ok", 1),
        (60.0, "web", "rejected", 1),
    ]


def test_a_journey_has_done_failed_and_missing_steps(spark: SparkSession) -> None:
    sent_events: list[Event] = [
        *done("early", 9, "sms"),  # the clock of the service is a second behind
        user("early", 10),
        *done("early", 11, "push", "coupon"),
        user("again", 20),
        *done("again", 21, "sms", ok=False),
        *done("again", 25, "sms"),
        *done("again", 24, "sms"),
        *done("again", 22, "push", "coupon"),
        user("stuck", 30),
        *done("stuck", 31, "push", "fax"),
        *done("stuck", 32, "coupon", ok=False),
        *done("stuck", 600, "sms"),  # far too late
        user("no", 40, outcome="rejected"),
        *done("unknown", 41),
    ]
    found = {row.id: row for row in journeys(spark, sent_events).collect()}
    assert found.keys() == {"early", "again", "stuck", "no"}
    assert found["early"].took == {"sms": 0, "push": 1000, "coupon": 1000}
    assert found["again"].took == {"sms": 4000, "push": 2000, "coupon": 2000}
    assert (found["again"].failed, found["again"].missing) == (["sms"], [])
    assert found["stuck"].took == {"sms": None, "push": 1000, "coupon": None}
    assert (found["stuck"].failed, found["stuck"].missing) == (["coupon"], ["sms", "coupon"])
    assert found["no"].missing == []


def test_steps_count_until_stuck_after_the_end_of_the_minute(spark: SparkSession) -> None:
    sent_events = [
        user("last", 0), *done("last", 179.999), user("next", 0), *done("next", 180.5),
        user("edge", 0), *done("edge", 180),
    ]  # fmt: skip
    found = journeys(spark, sent_events)
    stuck = {row.id: bool(row.missing) for row in found.collect()}
    assert stuck == {"last": False, "next": True, "edge": True}
    assert rows_of(found, "minute", "id") == [(0.0, "edge"), (0.0, "last"), (0.0, "next")]


def test_step_names_can_have_dots_and_differ_in_case(spark: SparkSession) -> None:
    sent_events = [user("a", 0), *done("a", 1, "sms.v2"), *done("a", 2, "SMS.v2")]
    found = tables.journeys(
        event_rows(spark, sent_events), stuck_after_ms=1000, late_ms=1000,
        names=("sms.v2", "SMS.v2", "a`b"),
    )  # fmt: skip
    row = found.first()
    assert row is not None
    assert row.took == {"sms.v2": 1000, "SMS.v2": 2000, "a`b": None}


def test_latencies_are_grouped_by_minute_and_step(spark: SparkSession) -> None:
    sent_events: list[Event] = []
    for number in range(100):
        sent_events += [
            user(f"u{number}", number / 2),
            *done(f"u{number}", number / 2 + number, "sms"),
        ]
    sent_events += [user("other", 70), *done("other", 71, "sms", ok=False)]
    found = tables.latencies(journeys(spark, sent_events))
    columns = ("minute", "step", "users", "done", "failed", "missing")
    assert rows_of(found, *columns) == [
        (0.0, "coupon", 100, 0, 0, 100),
        (0.0, "push", 100, 0, 0, 100),
        (0.0, "sms", 100, 100, 0, 0),
        (60.0, "coupon", 1, 0, 0, 1),
        (60.0, "push", 1, 0, 0, 1),
        (60.0, "sms", 1, 0, 1, 1),
    ]
    sms = found.where("step = 'sms' AND done > 0")
    assert rows_of(sms, *tables.PERCENTILES) == [(49_000, 94_000, 98_000)]


def test_an_alert_names_the_user_and_the_missing_steps(spark: SparkSession) -> None:
    sent_events: list[Event] = [
        user("one", 1), *done("one", 2, "sms", "push"), user("all", 3), user("good", 4),
        *done("good", 5), user("no", 6, outcome="rejected"),
    ]  # fmt: skip
    found = {row["keys"]: row for row in tables.alerts(journeys(spark, sent_events)).collect()}
    assert {name: row.tags for name, row in found.items()} == {
        "one": "coupon",
        "all": tables.SEVERAL,
    }
    assert json.loads(found["one"].body) == {
        "id": "one", "channel": "web", "registered_at": "2026-08-01T12:00:01.000Z",
        "missing": ["coupon"], "failed": [],
    }  # fmt: skip


def test_the_time_in_an_alert_is_right_when_daylight_saving_time_starts(
    spark: SparkSession,
) -> None:
    """On this day 02:30 does not exist in Berlin."""
    at_half_past_two = datetime(2026, 3, 29, 2, 30, tzinfo=UTC)
    zone = spark.conf.get("spark.sql.session.timeZone")
    assert zone is not None
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        sent_events = [RegistrationEvent("a", "web", "ok", at_half_past_two)]
        row = tables.alerts(journeys(spark, sent_events)).first()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert row is not None
    assert json.loads(row.body)["registered_at"] == "2026-03-29T02:30:00.000Z"


@pytest.mark.parametrize("name", ["", " ", "a\x01b", "a\nb", "x" * 300])
def test_an_id_that_is_not_a_valid_key_is_unreadable(spark: SparkSession, name: str) -> None:
    read = event_rows(spark, [user(name, 1), *done(name, 2, "sms")])
    reasons = [row.reason for row in events.unreadable(read).collect()]
    assert reasons == ["id is blank, longer than 255 characters, or has control characters"] * 2
    assert events.registrations_of(read).count() == 0


def test_invalid_events_are_stored_separately_with_the_reason(spark: SparkSession) -> None:
    sent_events: list[Event] = [
        user("good", 1), user("future", 3600 * 10), b"{nonsense", b'{"id": "x", "step": "sms"}',
        b'{"id": "x", "step": "sms", "done_at": "soon", "ok": true}',
    ]  # fmt: skip
    read = event_rows(spark, sent_events)
    found = {row.queue_offset: row for row in events.unreadable(read).collect()}
    assert found.keys() == {1, 2, 3, 4}
    assert "is in the future" in found[1].reason
    assert bytes(found[1].body) == body(sent_events[1])
    assert found[2].reason == "the body is not JSON"
    assert "done_at is missing" in found[3].reason
    assert "done_at is not of type timestamp" in found[4].reason
    assert [row.id for row in events.registrations_of(read).collect()] == ["good"]
    assert events.steps_of(read).count() == 0


def test_duplicate_rows_are_an_error(spark: SparkSession, tmp_path: Path) -> None:
    sent_events = [user("a", 0), *done("a", 1)]
    users = journeys(spark, sent_events)
    counted = tables.counts(events.registrations_of(event_rows(spark, sent_events)), late_ms=1)
    counted.write.parquet(table_path(str(tmp_path), "counts"))
    tables.latencies(users).write.parquet(table_path(str(tmp_path), "latencies"))
    assert sum(read_statistics(spark, str(tmp_path)).counts.values()) == 1
    for name, rows in (("latencies", tables.latencies(users)), ("counts", counted)):
        rows.write.mode("append").parquet(table_path(str(tmp_path), name))
        with pytest.raises(LakeDamaged, match=f"{name}.*duplicate"):
            read_statistics(spark, str(tmp_path))


class RegistrationFixture:
    """The topics of one test, and the pipeline that reads them."""

    def __init__(self, spark: SparkSession, cluster: Up, name: str, folder: Path) -> None:
        self.spark, self.cluster, self.output = spark, cluster, str(folder / "out")
        self.users, self.steps, self.alerts = (f"{name}-{kind}" for kind in ("u", "s", "a"))
        for topic in (self.users, self.steps, self.alerts):
            create_topic(cluster, topic, queues=2)

    def send(self, sent_events: Iterable[Event]) -> None:
        topics = {events.REGISTRATIONS: self.users, events.STEPS: self.steps}
        send(self.cluster, [Message(topics[topic_of(each)], body(each)) for each in sent_events])

    def run(self, **options: Any) -> None:
        given = {
            "output": self.output, "registrations": self.users, "steps": self.steps,
            "alerts": self.alerts, "late": "30s", "stuck_after": "2m", **options,
        }  # fmt: skip
        checkpoint = given.pop("checkpoint", None)
        run_pipeline(
            PIPELINE, given, spark=self.spark, connection={"nameserver": self.cluster.address},
            trigger="available-now", checkpoint=checkpoint,
        )  # fmt: skip

    def read(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        return rows_of(self.spark.read.parquet(table_path(self.output, name)), *columns)

    def alerted(self, count: int) -> Counter[str]:
        found = read_topic(self.cluster, self.alerts, count)
        return Counter(json.loads(message.body)["id"] for message in found)


@pytest.fixture
def fixture(spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path) -> RegistrationFixture:
    return RegistrationFixture(spark, cluster, fresh, tmp_path)


COUNTS = ("minute", "channel", "outcome", "registrations")


def test_minutes_are_written_once_across_restarts(fixture: RegistrationFixture) -> None:
    fixture.send([user("a", 10), user("a", 10), user("b", 20), b"nonsense", *done("a", 12)])
    fixture.run()
    fixture.send([*done("b", 50, "sms"), user("c", 70), *done("c", 75), user("a", 10)])
    fixture.run()
    assert list(Path(table_path(fixture.output, "latencies")).glob("*")) == []
    fixture.send([user("d", 300), user("late", 15), *done("d", 301)])
    fixture.run()
    assert fixture.read("counts", *COUNTS) == [(0.0, "web", "ok", 2), (60.0, "web", "ok", 1)]
    assert fixture.read("latencies", "minute", "step", "users", "done", "missing") == [
        (0.0, "coupon", 3, 1, 2),  # the late user is not counted, but has latencies
        (0.0, "push", 3, 1, 2),
        (0.0, "sms", 3, 2, 1),
        (60.0, "coupon", 1, 1, 0),
        (60.0, "push", 1, 1, 0),
        (60.0, "sms", 1, 1, 0),
    ]
    assert fixture.alerted(2) == {"b": 1, "late": 1}
    fixture.send([user("e", 900)])
    fixture.run()
    assert fixture.alerted(2) == {"b": 1, "late": 1}
    assert fixture.read("counts", *COUNTS)[2:] == [(300.0, "web", "ok", 1)]
    assert fixture.read("unreadable", "topic", "reason") == [
        (fixture.steps, "the body is not JSON")
    ]


@pytest.mark.proof
def test_a_crash_between_alerts_and_table_duplicates_nothing(
    fixture: RegistrationFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of the latencies fails after its alerts were sent, and is run again."""
    fixture.run(delivery="transactional")
    fixture.send([user("stuck", 1), user("good", 2), *done("good", 3), user("mover", 400)])
    commit = BatchCommitter.commit

    def fail(committer: BatchCommitter, query: str, batch: int, attempt: str, *rest: Any) -> Any:
        files = committer.files
        if "latencies" in files.url() and files.walk(attempt):  # type: ignore[attr-defined]
            raise PipelineFailed("the disk is full")
        return commit(committer, query, batch, attempt, *rest)

    monkeypatch.setattr(BatchCommitter, "commit", fail)
    with pytest.raises(PipelineFailed, match="the disk is full"):
        fixture.run(delivery="transactional")
    monkeypatch.undo()
    fixture.run(delivery="transactional")
    assert fixture.alerted(1) == {"stuck": 1}
    found = fixture.read("latencies", "minute", "step", "users", "missing")
    assert found == [(0.0, "coupon", 2, 1), (0.0, "push", 2, 1), (0.0, "sms", 2, 1)]


@pytest.mark.proof
def test_a_minute_is_written_once_if_the_watermark_stops_exactly_at_its_end(
    fixture: RegistrationFixture,
) -> None:
    fixture.send([user("a", 0), *done("a", 1), user("edge", 0), *done("edge", 180)])
    fixture.run()
    fixture.send([*done("mover", 210)])  # minus 30 s: the end of the first minute
    fixture.run()
    fixture.send([*done("mover", 400)])
    fixture.run()
    found = fixture.read("latencies", "minute", "step", "users", "done")
    assert found == [(0.0, "coupon", 2, 1), (0.0, "push", 2, 1), (0.0, "sms", 2, 1)]
    assert fixture.alerted(1) == {"edge": 1}


def test_unusual_events_do_not_stop_the_pipeline(fixture: RegistrationFixture) -> None:
    go_zero = datetime(1, 1, 1, tzinfo=UTC)
    fixture.send(
        [
            user("a\x01b", 1),
            RegistrationEvent("ancient", "web", "ok", go_zero),
            RegistrationEvent("x" * 40_000, "web", "ok", at(1)),
            user("ü 1", 2),
            b'{"id": 7, "step": "sms", "done_at": 9223372036854, "ok": true}',
            b'{"id": "n", "step": "sms", "done_at": -9223372036854, "ok": true}',
            user("mover", 400),
        ]
    )
    fixture.run()
    assert "ü 1" in fixture.alerted(1)


@pytest.mark.proof
def test_settings_of_the_state_cannot_be_changed(fixture: RegistrationFixture) -> None:
    fixture.send([user("a", 0), *done("a", 1, "sms")])
    fixture.run()
    for change in (
        {"delivery": "transactional"}, {"names": "push,sms,coupon"}, {"stuck_after": "10m"},
    ):  # fmt: skip
        with pytest.raises(LakeRefused, match=next(iter(change)).replace("_", "-")):
            fixture.run(**change)
    fixture.send([user("mover", 400)])
    fixture.run(stuck_after="120s", late="20s")
    assert fixture.alerted(1) == {"a": 1}


def test_invalid_options_are_refused_at_the_start(
    fixture: RegistrationFixture, tmp_path: Path
) -> None:
    with pytest.raises(NoRoute, match="NoSuchAlerts"):
        fixture.run(alerts="NoSuchAlerts")
    with pytest.raises(BadSetting, match="different topics"):
        fixture.run(alerts=fixture.steps)
    with pytest.raises(BadSetting, match="late"):
        fixture.run(late="soon")
    with pytest.raises(BadSetting, match="names"):
        fixture.run(names="sms,,push")
    fixture.send([user("a", 1)])
    fixture.run()
    with pytest.raises(LakeRefused, match="belongs to the checkpoint"):
        fixture.run(checkpoint=str(tmp_path / "elsewhere"))
