"""The pipeline `replay` without Spark: options, pace, slices, and the state of a run."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.errors import BadSetting, PipelineFailed
from penstock.spark.pipelines.replay.options import (
    check_run,
    fixed_options,
    pace_of,
    run_directory,
    selection_of,
    source_options,
)
from penstock.spark.pipelines.replay.pace import Pace, Pacer, ReplaySlice, duration_text
from penstock.spark.pipelines.replay.replay_pipeline import PIPELINE, check_routes
from penstock.spark.pipelines.replay.replay_run import DONE, PLAN, ReplayPlan, RunState, slices_of
from penstock.spark.pipelines.replay.selection import MessageGroup, Selection, Survey
from penstock.spark.pipelines.running import PipelineJob, Trigger
from tests.unit.spark.pipelines.lake.lake_kit import MemoryFiles


def job(checkpoint: str | None = None, **options: Any) -> PipelineJob:
    return PipelineJob(
        PIPELINE.check(options), checkpoint=checkpoint, trigger=Trigger.parse("once")
    )


def at(first_ms: int, *, rows: int = 10, number: int = 0) -> ReplaySlice:
    return ReplaySlice(number, "part-0", rows, rows, first_ms, first_ms)


# --- options -------------------------------------------------------------------------------------


LAKE = ("--lake", "/nowhere")
TO = (*LAKE, "--target", "b")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (LAKE, "no target is given"),
        (("--target", "b", "--checkpoint", "/c"), "no source is given"),
        (("--topics", "a", "--target", "b"), "--checkpoint is missing"),
        ((*TO, "--log", "/log"), "--lake and --log can't be combined"),
        ((*LAKE, "--topics", "a,b", "--target", "b"), "messages of b would be sent to the topic"),
        ((*TO, "--from", "yesterday"), "the option from is 'yesterday'"),
        ((*TO, "--from", "2000", "--until", "2000"), "is empty"),
        ((*TO, "--keys", "a,,b"), "--keys: 'a,,b' has an empty name"),
        ((*TO, "--tags", "a ||"), "--tags: 'a ||' has an empty name"),
        ((*TO, "--limit", "0"), "less than 1"),
        ((*TO, "--rate", "0"), "rate is 0"),
        ((*TO, "--speed", "-1"), "the speed -1.0 is out of range"),
        ((*TO, "--pace", "fast", "--speed", "2"), "--pace fast and --speed can't be combined"),
        ((*TO, "--step", "soon"), "the option step is 'soon'"),
        ((*TO, "--slice-rows", "0"), "slice_rows is 0"),
        ((*TO, "--deliver"), "--deliver needs"),
        ((*TO, "--deliver", "--speed", "2", "--delivery", "transactional"), "--deliver needs"),
        ((*TO, "--run", "a/b"), "'a/b' is not a valid name of a run"),
        ((*TO, "--trigger", "10 seconds"), "replay has no --trigger"),
        ((*LAKE, "--target", "no topic"), "the option topic: "),
        (("--log", "/nowhere", "--target", "b", "--checkpoint", "/c"), "/nowhere does not exist"),
    ],
)
def test_invalid_options_are_refused_before_spark_starts(
    args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "run", "replay", "-n", "127.0.0.1:1", *args]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_options_become_a_selection_and_source_options() -> None:
    given = job(
        topics="a, b", keys="k1,k2", tags="x || y", until="2000", target="t", checkpoint="/c",
        **{"from": "1970-01-01T00:00:01+00:00"},
    )  # fmt: skip
    chosen = selection_of(given)
    assert chosen == Selection(
        topics=("a", "b"), from_ms=1000, until_ms=2000, keys=("k1", "k2"), tags=("x", "y")
    )
    asked = source_options(given, chosen)
    assert asked.pop("columns").endswith(",deliver_timestamp,flag")
    assert asked == {
        "subscribe": "a,b", "tags": "x || y", "startingTimestamp": "1000",
        "endingTimestamp": "2000",
    }  # fmt: skip
    born = job(log="/store", by="born", where="flag = 1", until="2000", target="t")
    assert source_options(born, selection_of(born)) == {
        "mode": "log", "path": "/store", "columns": "*",
    }  # fmt: skip
    with pytest.raises(BadSetting, match="'read' is not a time"):
        Selection(by="read")


def test_each_run_has_its_own_directory() -> None:
    assert run_directory(job(lake="/lake/", target="t"), "r1") == "/lake/_penstock/replays/r1"
    assert run_directory(job("/states/", lake="/lake", target="t"), "r1") == "/states/r1"
    for name in ("", ".x", "a b", "x" * 65, "ä"):
        with pytest.raises(BadSetting, match="not a valid name of a run"):
            check_run(name)


def test_only_the_pace_can_change_when_a_run_is_continued() -> None:
    slow = job(lake="/l", target="t", speed=2)
    assert fixed_options(slow) == fixed_options(
        job(lake="/l", target="t", rate=7, step="5s", run="x")
    )
    assert fixed_options(slow) != fixed_options(job(lake="/l", target="u"))
    assert fixed_options(slow) != fixed_options(job(lake="/l", target="t", same_topic=True))


def test_sending_to_the_own_topic_needs_same_topic() -> None:
    routes = [("a", "t"), ("t", "t")]
    with pytest.raises(BadSetting, match="messages of t would be sent to the topic they came from"):
        check_routes(routes, same_topic=False)
    check_routes(routes, same_topic=True)
    check_routes(routes[:1], same_topic=False)


# --- pace ----------------------------------------------------------------------------------------


def test_options_become_a_pace() -> None:
    assert pace_of(job()) == Pace()
    assert pace_of(job(pace="original")).speed == 1
    assert pace_of(job(speed=10)).speed == 10
    assert pace_of(job(pace="original", speed=0.5, rate=5)) == Pace(speed=0.5, rate=5)
    assert str(Pace()) == "as fast as possible"
    assert str(Pace(speed=1)) == "at the original pace"
    assert str(Pace(speed=2.5, rate=1000)) == (
        "at 2.5 times the original pace, at most 1,000 rows/s"
    )


def test_the_pace_limits_the_size_of_slices() -> None:
    assert (Pace().rows_max, Pace().window_ms) == (100_000, None)
    assert Pace(rate=50, step_ms=2000).rows_max == 100
    assert Pace(rate=1, step_ms=10).rows_max == 1
    assert Pace(rate=10**9).rows_max == 100_000
    assert Pace(speed=10, step_ms=500).window_ms == 5_000
    assert Pace(speed=0.0001, step_ms=1).window_ms == 1


def test_the_minimum_duration_of_a_replay() -> None:
    assert Pace().duration_min_ms(rows=1000, span_ms=60_000) == 0
    assert Pace(rate=100).duration_min_ms(rows=1000, span_ms=60_000) == 10_000
    assert Pace(speed=2).duration_min_ms(rows=1000, span_ms=60_000) == 30_000
    assert Pace(speed=20, rate=100).duration_min_ms(rows=1000, span_ms=60_000) == 10_000
    assert [duration_text(ms) for ms in (900, 90_000, 7_200_000)] == ["0.9 s", "1.5 min", "2.0 h"]


def test_the_original_pace_starts_with_the_replay_and_is_caught_up() -> None:
    pacer = Pacer(Pace(speed=2), at(50_000), now_ms=7)
    assert pacer.wait_ms(at(50_000), 7) == 0
    pacer.slice_started(at(50_000), 7)
    assert pacer.wait_ms(at(54_000), 107) == 1900
    assert pacer.wait_ms(at(54_000), 5007) == -3000, "late by three seconds"
    assert pacer.wait_ms(at(60_000), 5007) == 0


def test_the_rate_is_not_exceeded_to_catch_up() -> None:
    pacer = Pacer(Pace(rate=10), at(0), now_ms=0)
    assert pacer.wait_ms(at(0, rows=10), 0) == 0
    pacer.slice_started(at(0, rows=10), 0)
    assert pacer.wait_ms(at(0), 400) == 600
    pacer.slice_started(at(0, rows=10), 5000)
    assert pacer.wait_ms(at(0), 5001) == 999
    fast = Pacer(Pace(), at(0), now_ms=0)
    fast.slice_started(at(0), 0)
    assert fast.wait_ms(at(10**9), 0) == 0


@given(
    times=st.lists(st.integers(0, 10**6), min_size=1, max_size=20).map(sorted),
    speed=st.floats(0.1, 100),
    took=st.lists(st.integers(0, 5000), min_size=20, max_size=20),
)
def test_no_slice_is_sent_before_it_is_due(times: list[int], speed: float, took: list[int]) -> None:
    now = 0.0
    pacer = Pacer(Pace(speed=speed), at(times[0]), now)
    for first_ms, each_took in zip(times, took, strict=False):
        now += max(0, pacer.wait_ms(at(first_ms), now))
        assert now >= (first_ms - times[0]) / speed - 1e-6
        pacer.slice_started(at(first_ms), now)
        now += each_took


# --- slices and run state ------------------------------------------------------------------------


def test_slices_are_numbered_in_order_and_have_a_time_window() -> None:
    found: list[Any] = [
        {"file": "a", "window": 0, "rows": 2, "bytes": 20, "first": 1000, "last": 1400},
        {"file": "b", "window": 3, "rows": 1, "bytes": None, "first": 2600, "last": 2600},
    ]
    first, second = slices_of(found, origin_ms=1000, window_ms=500)
    assert first == ReplaySlice(0, "a", 2, 20, 1000, 1400, 1000, 1500)
    assert second == ReplaySlice(1, "b", 1, 0, 2600, 2600, 2500, 3000)
    assert slices_of(found, origin_ms=1000, window_ms=None)[1].begin_ms is None


def test_a_run_continues_its_plan_after_the_last_slice_that_was_sent() -> None:
    files = MemoryFiles()
    state = RunState(files, "r1")
    assert state.plan({}) is None
    plan = ReplayPlan("x", 5, {"--target": "t"}, [("a", "t")], [at(n, number=n) for n in range(12)])
    state.save_plan(plan)
    assert state.plan({"--target": "t"}) == plan
    assert plan.rows == 120
    assert state.slices_sent() == 0
    for number in range(11):
        state.mark_sent(number)
        assert state.slices_sent() == number + 1
    assert [file.path for file in files.walk(DONE)] == [f"{DONE}/00000010"], (
        "only the last file is kept"
    )
    files.files[f"{DONE}/.00000011.abcd"] = b""  # a crash before the rename
    assert state.slices_sent() == 11


def test_the_plan_file_has_the_fields_of_earlier_versions() -> None:
    files = MemoryFiles()
    RunState(files, "r1").save_plan(ReplayPlan("x", 5, {"--target": "t"}, [("a", "t")], [at(7)]))
    assert json.loads(files.files["plan.json"]) == {
        "token": "x", "begun_ms": 5, "about": {"--target": "t"}, "routes": [["a", "t"]],
        "slices": [
            {
                "number": 0, "file": "part-0", "rows": 10, "bytes": 10, "first_ms": 7,
                "last_ms": 7, "begin_ms": None, "end_ms": None,
            }
        ],
    }  # fmt: skip


def test_a_run_is_not_continued_with_other_options() -> None:
    files = MemoryFiles()
    state = RunState(files, "r1")
    state.save_plan(ReplayPlan("x", 5, {"--target": "t", "--limit": "3"}, [], []))
    with pytest.raises(BadSetting, match="with --target t, but is continued with --target u"):
        state.plan({"--target": "u", "--limit": "3"})
    with pytest.raises(BadSetting, match="with --limit 3, but is continued without --limit"):
        state.plan({"--target": "t"})
    with pytest.raises(BadSetting, match="started without --keys, but is continued with --keys k"):
        state.plan({"--target": "t", "--limit": "3", "--keys": "k"})
    files.files[PLAN] = b"{"
    with pytest.raises(PipelineFailed, match="plan of run r1 can't be read"):
        state.plan({})


def test_a_run_that_is_started_twice_is_detected() -> None:
    files = MemoryFiles()
    first, second = RunState(files, "r1"), RunState(files, "r1")
    first.save_plan(ReplayPlan("x", 5, {}, [], []))
    with pytest.raises(PipelineFailed, match="started twice"):
        second.save_plan(ReplayPlan("y", 6, {}, [], []))
    first.mark_sent(0)
    with pytest.raises(PipelineFailed, match="started twice"):
        second.mark_sent(0)


def test_a_survey_is_shown_as_lines() -> None:
    groups = (MessageGroup("a", "2026-08-01", None, 2), MessageGroup("a", "2026-08-01", "x", 1000))
    text = "\n".join(Survey(1002, 4000, 0, 60_000, ("a",), groups, 3, ("one",)).lines())
    assert "1,002 messages, 4,000 bytes, from 1970-01-01T00:00:00.000+00:00 to " in text
    assert "(1.0 min)" in text
    assert "a  2026-08-01  (no tag)  2 rows" in text
    assert "and 1 smaller groups" in text


def test_unreachable_servers_are_reported_before_spark_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["pipeline", "run", "replay", "-n", "127.0.0.1:1", *TO]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
