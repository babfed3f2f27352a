"""Options, triggers, progress, errors and signals of pipelines, without Spark."""

import json
import os
import signal
import threading
import uuid
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.errors import BadSetting, DataLost, NoRoute, PipelineFailed
from penstock.spark.pipelines.batch_progress import BatchProgress, lag_of, parse_progress
from penstock.spark.pipelines.query_errors import as_penstock_error
from penstock.spark.pipelines.running import (
    PIPELINES,
    Option,
    Pipeline,
    PipelineJob,
    Trigger,
    find_pipeline,
    follow,
    run_pipeline,
    stop_signals,
)

# --- options and triggers ------------------------------------------------------------------------


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_can_be_described(name: str) -> None:
    found = find_pipeline(name)
    assert found.name == name
    assert found.summary.endswith(".")
    assert found.outputs
    assert all(option.help.endswith(".") for option in found.options)
    Trigger.parse(found.trigger)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_option_is_documented(name: str) -> None:
    page = Path(__file__).parents[4] / "docs" / "pipelines.md"
    section = page.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for option in find_pipeline(name).options:
        assert f"`{option.flag}`" in section


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("compaction", "lake.lake_compaction"),
        ("insight_dead", "insight.dead_letters"),
        ("insight_profiles", "insight.profiles"),
        ("insight_traces", "insight.trace_latency"),
        ("registration_events", "registration.events"),
        ("registration_tables", "registration.event_tables"),
        ("replay_pace", "replay.pace"),
        ("replay_rows", "replay.selection"),
    ],
)
def test_an_old_module_name_imports_the_new_module(old: str, new: str) -> None:
    package = "penstock.spark.pipelines"
    assert import_module(f"{package}.{old}") is import_module(f"{package}.{new}")


def test_an_unknown_pipeline_is_refused_with_a_list_of_pipelines() -> None:
    with pytest.raises(BadSetting, match="there is no pipeline 'nonsense'") as refused:
        find_pipeline("nonsense")
    assert "lake" in refused.value.hint


def test_options_are_checked_and_completed_with_defaults() -> None:
    pipeline = Pipeline(
        "p", "Nothing.",
        (
            Option("needed", "Needed.", required=True),
            Option("some_count", "A count.", kind=int, default=7),
            Option("share", "A share.", kind=float),
            Option("codec", "A codec.", default="a", choices=("a", "b")),
        ),
        (), lambda spark, job: [],
    )  # fmt: skip
    assert pipeline.check({"needed": "x", "share": 1}) == {
        "needed": "x", "some_count": 7, "share": 1.0, "codec": "a",
    }  # fmt: skip
    for values, text in (
        ({}, "--needed is missing"),
        ({"needed": 1}, "--needed: 1 is not a string"),
        ({"needed": "x", "some_count": "7"}, "--some-count: '7' is not an integer"),
        ({"needed": "x", "some_count": True}, "--some-count: True is not an integer"),
        ({"needed": "x", "codec": "c"}, "--codec: 'c' is not one of a, b"),
        ({"needed": "x", "other": 1}, "has no option 'other'"),
    ):
        with pytest.raises(BadSetting, match=text):
            pipeline.check(values)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("once", "once", True),
        ("available-now", "availableNow", True),
        ("10 seconds", "processingTime", "10 seconds"),
        ("1 minute", "processingTime", "1 minute"),
        ("500ms", "processingTime", "500 milliseconds"),
        ("2h", "processingTime", "2 hours"),
    ],
)
def test_triggers_are_parsed(text: str, kind: str, value: str | bool) -> None:
    trigger = Trigger.parse(text)
    assert (trigger.kind, trigger.value) == (kind, value)


@pytest.mark.parametrize("text", ["", "now", "seconds", "-1 seconds", "10 parsecs", "1.5 s"])
def test_an_invalid_trigger_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="is not a trigger"):
        Trigger.parse(text)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--topics", "a", "--pattern", "b"), "can't be combined"),
        ((), "no topics are given"),
        (("--topics", "a", "--prefix", "x"), "--prefix needs --schema"),
        (("--topics", "a", "--columns", "nonsense"), "a message has no column"),
        (("--topics", "a", "--max-rows", "0"), "less than 1"),
        (("--topics", "a", "--start", "yesterday"), "startingOffsets"),
        (("--topics", "a", "--trigger", "soon"), "is not a trigger"),
        (("--topics", "a", "--conf", "x"), "must be KEY=VALUE"),
    ],
)
def test_invalid_options_are_refused_before_spark_starts(
    args: tuple[str, ...],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def session(*args: Any, **options: Any) -> Any:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("penstock.spark.session.spark_session", session)
    code = main(["pipeline", "run", "lake", "--lake", "/nowhere", *args])
    printed = capsys.readouterr().err
    assert (code, "starting Spark" in printed) == (2, False)
    assert text in printed


# --- progress ------------------------------------------------------------------------------------


def report(number: int, rows: int = 10, **source: Any) -> dict[str, Any]:
    return {
        "batchId": number, "numInputRows": rows,
        "durationMs": {"addBatch": 100, "triggerExecution": 500},
        "sources": [{"numInputRows": rows, **source}],
    }  # fmt: skip


def test_a_batch_is_shown_as_one_line() -> None:
    end = {"$initial": {"orders": {"a": {"0": 0}}}, "orders": {"a": {"0": 1000, "1": 5}}}
    latest = {"orders": {"a": {"0": 2200, "1": 5}, "b": {"0": 3}}}
    batch = parse_progress(
        report(12, 1000, endOffset=json.dumps(end), latestOffset=json.dumps(latest))
    )
    assert str(batch) == "batch 12: 1,000 rows, 2,000 rows/s, lag 1,203, 0.50 s"
    assert str(parse_progress(report(3), "lake")) == "lake, batch 3: 10 rows, 20 rows/s, 0.50 s"


def test_rows_of_a_batch_that_is_read_twice_are_counted_once() -> None:
    end = {"$initial": {"orders": {"b": {"0": 20}}}, "orders": {"a": {"0": 30}, "b": {"0": 24}}}
    first = {"$initial": {"orders": {"a": {"0": 5}}}, "orders": {"a": {"0": 30}}}
    start = {"orders": {"a": {"0": 10}}}
    for rows, counted in ((48, 24), (24, 24), (20, 20)):  # tags filter some messages out
        batch = parse_progress(
            report(1, rows, startOffset=json.dumps(start), endOffset=json.dumps(end))
        )
        assert batch.rows == counted
    assert parse_progress(report(0, 50, startOffset=None, endOffset=json.dumps(first))).rows == 25
    assert parse_progress(report(0, 50, startOffset="1", endOffset="2")).rows == 50


@pytest.mark.parametrize("offset", [None, "", "7", "[1]", '{"a": 1}', '{"a": {"b": {"0": "x"}}}'])
def test_the_lag_of_other_sources_is_unknown(offset: str | None) -> None:
    assert lag_of({"endOffset": offset, "latestOffset": offset}) is None


class FakeQuery:
    """A query that reports one of its batches per poll."""

    def __init__(self, *batches: dict[str, Any], error: Exception | None = None) -> None:
        self.id, self.name = uuid.uuid4(), "q"
        self.recentProgress: list[dict[str, Any]] = []
        self.stopped = False
        self._left = list(batches)
        self._error = error

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        return self.recentProgress[-1] if self.recentProgress else None

    @property
    def isActive(self) -> bool:  # noqa: N802
        return bool(self._left) and not self.stopped

    def awaitTermination(self, seconds: float) -> bool:  # noqa: N802
        self.recentProgress.append(self._left.pop(0))
        return not self._left

    def stop(self) -> None:
        self.stopped = True

    def exception(self) -> Exception | None:
        return None if self.isActive else self._error


def test_each_batch_is_reported_once() -> None:
    idle = {**report(1), "durationMs": {"latestOffset": 3}}
    query = FakeQuery(report(0), report(0), report(1), idle, report(2))
    reported: list[BatchProgress] = []
    assert follow([query], reported.append, threading.Event())  # type: ignore[list-item]
    assert [batch.number for batch in reported] == [0, 1, 2]
    assert reported[0].query == ""


def test_a_failed_query_stops_the_others() -> None:
    error = RuntimeError("broken")
    failing, other = FakeQuery(error=error), FakeQuery()
    with pytest.raises(RuntimeError, match="broken"):
        follow([other, failing], lambda batch: None, threading.Event())  # type: ignore[list-item]
    assert other.stopped


def test_a_signal_stops_the_queries() -> None:
    query = FakeQuery(*(report(i) for i in range(1000)), error=RuntimeError("interrupted"))

    def start(spark: Any, job: PipelineJob) -> Any:
        return [query]

    def on_batch(batch: BatchProgress) -> None:
        if batch.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    pipeline = Pipeline("p", "Nothing.", (), (), start)
    ended = run_pipeline(pipeline, {}, spark=None, on_batch=on_batch)  # type: ignore[arg-type]
    assert not ended
    assert query.stopped
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_sigint_raises_keyboard_interrupt() -> None:
    with stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_do_not_handle_signals() -> None:
    found = []

    def work() -> None:
        with stop_signals() as stop:
            found.append(stop.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


# --- errors --------------------------------------------------------------------------------------

FROM_A_WORKER = """[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted
Traceback (most recent call last):
  File "x.py", line 1, in main
penstock.errors.DataLost: orders, queue 0 at broker-a: offsets 3 to 9 are not there
What to do: keep them longer

During handling of the above exception, another exception occurred:
UnboundLocalError: reader

JVM stacktrace:
org.apache.spark.SparkException: penstock.errors.NoRoute: not this one
"""


def test_penstock_errors_of_workers_are_restored() -> None:
    error = as_penstock_error(FROM_A_WORKER)
    assert isinstance(error, DataLost)
    assert error.message == "orders, queue 0 at broker-a: offsets 3 to 9 are not there"
    assert error.hint == "keep them longer"


def test_errors_without_a_hint_have_the_hint_of_their_class() -> None:
    error = as_penstock_error("x\npenstock.errors.NoRoute: no broker has it\n at java.lang.X")
    assert isinstance(error, NoRoute)
    assert error.hint == NoRoute.hint
    assert "docs/spark.md" in as_penstock_error("penstock.errors.BadSetting: no").hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[STREAM_FAILED] Query ended\n[PATH_NOT_FOUND] Path does not exist: x. SQLSTATE: 42K03",
         "Spark: Path does not exist: x.", "check the path"),
        ("[SOME_NEW_CONDITION.SUB] It is so. SQLSTATE: 1\n\nJVM stacktrace:\n[OTHER] no",
         "Spark: It is so.", "--debug"),
        ("An error occurred\n\tat org.apache.X", "Spark: An error occurred", "--debug"),
        ("penstock.errors.Nonsense: hm", "hm", "--debug"),
        ("\tat org.apache.X", "Spark: no reason was given", "--debug"),
    ],
)  # fmt: skip
def test_errors_of_spark_are_shown_without_their_stack(text: str, message: str, hint: str) -> None:
    error = as_penstock_error(text)
    assert isinstance(error, PipelineFailed)
    assert error.message == message
    assert hint in error.hint
