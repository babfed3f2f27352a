"""The pipeline `replay` without Spark: options, paces, slices, and the books of a run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.errors import BadSetting, PipelineFailed
from penstock.spark.pipelines.replay.options import (
    about,
    check_run,
    directory,
    pace_of,
    selection,
    source_options,
)
from penstock.spark.pipelines.replay.pace import Pace, Pacer, Slice, time_text
from penstock.spark.pipelines.replay.replay_pipeline import PIPELINE, check_routes
from penstock.spark.pipelines.replay.replay_run import DONE, PLAN, Book, Plan, slices_of
from penstock.spark.pipelines.replay.selection import Group, Selection, Survey
from penstock.spark.pipelines.running import PipelineJob, Trigger
from tests.unit.spark.pipelines.lake.lake_kit import MemoryFiles


def job(checkpoint: str | None = None, **options: Any) -> PipelineJob:
    return PipelineJob(
        PIPELINE.check(options), checkpoint=checkpoint, trigger=Trigger.parse("once")
    )


def at(first_ms: int, *, rows: int = 10, number: int = 0) -> Slice:
    return Slice(number, "part-0", rows, rows, first_ms, first_ms)


# --- options -------------------------------------------------------------------------------------


LAKE = ("--lake", "/nowhere")
TO = (*LAKE, "--target", "b")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (LAKE, "no target is named"),
        (("--target", "b", "--checkpoint", "/c"), "not said where messages come from"),
        (("--topics", "a", "--target", "b"), "--checkpoint is missing"),
        ((*TO, "--log", "/log"), "--lake and --log exclude each other"),
        ((*LAKE, "--topics", "a,b", "--target", "b"), "messages of b would go to the topic"),
        ((*TO, "--from", "yesterday"), "the option from is 'yesterday'"),
        ((*TO, "--from", "2000", "--until", "2000"), "the range is empty"),
        ((*TO, "--keys", "a,,b"), "--keys: 'a,,b' has an empty name"),
        ((*TO, "--tags", "a ||"), "--tags: 'a ||' has an empty name"),
        ((*TO, "--limit", "0"), "less than 1"),
        ((*TO, "--rate", "0"), "rate is 0"),
        ((*TO, "--speed", "-1"), "the speed is -1.0"),
        ((*TO, "--pace", "fast", "--speed", "2"), "--pace fast has no --speed"),
        ((*TO, "--step", "soon"), "the option step is 'soon'"),
        ((*TO, "--slice-rows", "0"), "slice_rows is 0"),
        ((*TO, "--deliver"), "ahead of their time"),
        ((*TO, "--deliver", "--speed", "2", "--delivery", "transactional"), "ahead of their time"),
        ((*TO, "--run", "a/b"), "'a/b' is no name of a run"),
        ((*TO, "--trigger", "10 seconds"), "replay has no --trigger"),
        ((*LAKE, "--target", "no topic"), "the option topic: "),
        (("--log", "/nowhere", "--target", "b", "--checkpoint", "/c"), "/nowhere does not exist"),
    ],
)
def test_options_are_wrong_before_spark_starts(
    args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "run", "replay", "-n", "127.0.0.1:1", *args]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_options_make_a_selection_and_what_the_source_is_asked_for() -> None:
    given = job(
        topics="a, b", keys="k1,k2", tags="x || y", until="2000", target="t", checkpoint="/c",
        **{"from": "1970-01-01T00:00:01+00:00"},
    )  # fmt: skip
    chosen = selection(given)
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
    assert source_options(born, selection(born)) == {
        "mode": "log", "path": "/store", "columns": "*",
    }  # fmt: skip
    with pytest.raises(BadSetting, match="the time is 'read'"):
        Selection(by="read")


def test_a_run_has_a_directory_of_its_own() -> None:
    assert directory(job(lake="/lake/", target="t"), "r1") == "/lake/_penstock/replays/r1"
    assert directory(job("/books/", lake="/lake", target="t"), "r1") == "/books/r1"
    for name in ("", ".x", "a b", "x" * 65, "ä"):
        with pytest.raises(BadSetting, match="no name of a run"):
            check_run(name)


def test_a_second_start_may_change_the_pace_and_nothing_else() -> None:
    slow = job(lake="/l", target="t", speed=2)
    assert about(slow) == about(job(lake="/l", target="t", rate=7, step="5s", run="x"))
    assert about(slow) != about(job(lake="/l", target="u"))
    assert about(slow) != about(job(lake="/l", target="t", same_topic=True))


def test_topics_do_not_feed_themselves_by_accident() -> None:
    routes = [("a", "t"), ("t", "t")]
    with pytest.raises(BadSetting, match="messages of t would go to the topic that they came from"):
        check_routes(routes, same_topic=False)
    check_routes(routes, same_topic=True)
    check_routes(routes[:1], same_topic=False)


# --- pace ----------------------------------------------------------------------------------------


def test_paces() -> None:
    assert pace_of(job()) == Pace()
    assert pace_of(job(pace="original")).speed == 1
    assert pace_of(job(speed=10)).speed == 10
    assert pace_of(job(pace="original", speed=0.5, rate=5)) == Pace(speed=0.5, rate=5)
    assert str(Pace()) == "as fast as it goes"
    assert str(Pace(speed=1)) == "with the gaps as they were"
    assert str(Pace(speed=2.5, rate=1000)) == ("2.5 times as fast as it was, at most 1,000 rows/s")


def test_slices_are_as_large_as_the_pace_allows() -> None:
    assert (Pace().rows_max, Pace().window_ms) == (100_000, None)
    assert Pace(rate=50, step_ms=2000).rows_max == 100
    assert Pace(rate=1, step_ms=10).rows_max == 1
    assert Pace(rate=10**9).rows_max == 100_000
    assert Pace(speed=10, step_ms=500).window_ms == 5_000
    assert Pace(speed=0.0001, step_ms=1).window_ms == 1


def test_how_long_a_replay_takes_at_least() -> None:
    assert Pace().takes_ms(rows=1000, span_ms=60_000) == 0
    assert Pace(rate=100).takes_ms(rows=1000, span_ms=60_000) == 10_000
    assert Pace(speed=2).takes_ms(rows=1000, span_ms=60_000) == 30_000
    assert Pace(speed=20, rate=100).takes_ms(rows=1000, span_ms=60_000) == 10_000
    assert [time_text(ms) for ms in (900, 90_000, 7_200_000)] == ["0.9 s", "1.5 min", "2.0 h"]


def test_gaps_begin_where_the_replay_begins_and_are_caught_up_with() -> None:
    pacer = Pacer(Pace(speed=2), at(50_000), now_ms=7)
    assert pacer.wait_ms(at(50_000), 7) == 0
    pacer.began(at(50_000), 7)
    assert pacer.wait_ms(at(54_000), 107) == 1900
    assert pacer.wait_ms(at(54_000), 5007) == -3000, "it is late by so much"
    assert pacer.wait_ms(at(60_000), 5007) == 0


def test_a_rate_is_never_exceeded_to_catch_up() -> None:
    pacer = Pacer(Pace(rate=10), at(0), now_ms=0)
    assert pacer.wait_ms(at(0, rows=10), 0) == 0
    pacer.began(at(0, rows=10), 0)
    assert pacer.wait_ms(at(0), 400) == 600
    pacer.began(at(0, rows=10), 5000)
    assert pacer.wait_ms(at(0), 5001) == 999
    fast = Pacer(Pace(), at(0), now_ms=0)
    fast.began(at(0), 0)
    assert fast.wait_ms(at(10**9), 0) == 0


@given(
    times=st.lists(st.integers(0, 10**6), min_size=1, max_size=20).map(sorted),
    speed=st.floats(0.1, 100),
    took=st.lists(st.integers(0, 5000), min_size=20, max_size=20),
)
def test_no_message_comes_before_its_time(times: list[int], speed: float, took: list[int]) -> None:
    now = 0.0
    pacer = Pacer(Pace(speed=speed), at(times[0]), now)
    for first_ms, each_took in zip(times, took, strict=False):
        now += max(0, pacer.wait_ms(at(first_ms), now))
        assert now >= (first_ms - times[0]) / speed - 1e-6
        pacer.began(at(first_ms), now)
        now += each_took


# --- slices and books ----------------------------------------------------------------------------


def test_slices_are_numbered_in_order_and_know_their_window() -> None:
    found: list[Any] = [
        {"file": "a", "window": 0, "rows": 2, "bytes": 20, "first": 1000, "last": 1400},
        {"file": "b", "window": 3, "rows": 1, "bytes": None, "first": 2600, "last": 2600},
    ]
    first, second = slices_of(found, origin_ms=1000, window_ms=500)
    assert first == Slice(0, "a", 2, 20, 1000, 1400, 1000, 1500)
    assert second == Slice(1, "b", 1, 0, 2600, 2600, 2500, 3000)
    assert slices_of(found, origin_ms=1000, window_ms=None)[1].begin_ms is None


def test_a_run_goes_on_with_its_plan_after_the_last_slice_that_was_sent() -> None:
    files = MemoryFiles()
    book = Book(files, "r1")
    assert book.plan({}) is None
    plan = Plan("x", 5, {"--target": "t"}, [("a", "t")], [at(n, number=n) for n in range(12)])
    book.keep(plan)
    assert book.plan({"--target": "t"}) == plan
    assert plan.rows == 120
    assert book.done() == 0
    for number in range(11):
        book.mark(number)
        assert book.done() == number + 1
    assert [file.path for file in files.walk(DONE)] == [f"{DONE}/00000010"], "one file is enough"
    files.files[f"{DONE}/.00000011.abcd"] = b""  # left by a crash before the rename
    assert book.done() == 11


def test_a_run_is_not_gone_on_with_for_something_else() -> None:
    files = MemoryFiles()
    book = Book(files, "r1")
    book.keep(Plan("x", 5, {"--target": "t", "--limit": "3"}, [], []))
    with pytest.raises(BadSetting, match="begun with --target t, this is u"):
        book.plan({"--target": "u", "--limit": "3"})
    with pytest.raises(BadSetting, match="begun with --limit 3, this is without"):
        book.plan({"--target": "t"})
    with pytest.raises(BadSetting, match="begun with --keys not given, this is k"):
        book.plan({"--target": "t", "--limit": "3", "--keys": "k"})
    files.files[PLAN] = b"{"
    with pytest.raises(PipelineFailed, match="plan of the run r1 can't be read"):
        book.plan({})


def test_a_run_that_is_started_twice_notices() -> None:
    files = MemoryFiles()
    first, second = Book(files, "r1"), Book(files, "r1")
    first.keep(Plan("x", 5, {}, [], []))
    with pytest.raises(PipelineFailed, match="started twice"):
        second.keep(Plan("y", 6, {}, [], []))
    first.mark(0)
    with pytest.raises(PipelineFailed, match="started twice"):
        second.mark(0)


def test_a_survey_for_people() -> None:
    groups = (Group("a", "2026-08-01", None, 2), Group("a", "2026-08-01", "x", 1000))
    text = "\n".join(Survey(1002, 4000, 0, 60_000, ("a",), groups, 3, ("one",)).lines())
    assert "1,002 messages, 4,000 bytes, from 1970-01-01T00:00:00.000+00:00 to " in text
    assert "(1.0 min)" in text
    assert "a  2026-08-01  (no tag)  2 rows" in text
    assert "and 1 smaller groups" in text


def test_servers_that_do_not_answer_are_an_error_before_spark_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["pipeline", "run", "replay", "-n", "127.0.0.1:1", *TO]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
