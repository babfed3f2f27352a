"""Pipeline `insight` without Spark: selection, options, charts and report."""

import os
import re
import signal
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest

from penstock.arrow.log_slices import LogSelection
from penstock.cli.main import main
from penstock.client.trace.trace_records import ConsumeCode, decode_traces, encode_record
from penstock.errors import BadSetting
from penstock.spark.pipelines.insight.headlines import headlines
from penstock.spark.pipelines.insight.insight_pipeline import (
    PIPELINE,
    TABLES,
    _bucket_ms,
    _selection,
)
from penstock.spark.pipelines.insight.message_sources import InsightSelection
from penstock.spark.pipelines.insight.plots import (
    draw_dead,
    draw_lag,
    draw_latencies,
    draw_rates,
    figure,
    one_line,
)
from penstock.spark.pipelines.insight.report import report
from penstock.spark.pipelines.insight.report_data import (
    POINTS_MAX,
    ReportData,
    TableExcerpt,
    coarser_bucket_ms,
)
from penstock.spark.pipelines.insight.trace_latency import _row
from penstock.spark.pipelines.running import PipelineJob

NOON_MS = 1_785_585_600_000
HOSTILE = '<script>alert("1")</script> & $x_{2$ \x00\x1b\u202e'


def job(**options: Any) -> PipelineJob:
    return PipelineJob(options=PIPELINE.check({"output": "/out", **options}))


# --- options -------------------------------------------------------------------------------------


def test_every_table_is_documented() -> None:
    page = Path(__file__).parents[5] / "docs" / "pipelines.md"
    section = page.read_text().partition("\n## insight\n")[2].partition("\n## ")[0]
    for table in TABLES:
        assert f"| `{table}` |" in section
        assert any(each.where == f"{{output}}/{table}" for each in PIPELINE.outputs)


def test_times_are_given_as_times_or_ages() -> None:
    selection = _selection(job(since="2026-08-01T12:00:00+00:00", until=str(NOON_MS + 5)))
    assert (selection.since_ms, selection.until_ms) == (NOON_MS, NOON_MS + 5)
    selection = _selection(job(since="2h", until="30m"))
    assert selection.since_ms is not None
    assert selection.until_ms is not None
    assert selection.until_ms - selection.since_ms == 90 * 60_000
    assert _bucket_ms(job(bucket="10s")) == 10_000


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topics": "a", "pattern": "b"}, "--topics and --pattern can't be combined"),
        ({"lake": "a", "log": "b"}, "--lake and --log can't be combined"),
        ({"pattern": "("}, "not a regular expression"),
        ({"topics": " , "}, "contains no name"),
        ({"since": "1h", "until": "2h"}, "is not before"),
        ({"since": "yesterday"}, "since"),
        ({"top": 0}, "--top"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadSetting, match=re.escape(text)):
        _selection(job(**options))


def test_a_pattern_matches_application_topics() -> None:
    def selection(**given: Any) -> InsightSelection:
        return _selection(job(**given))

    every = selection()
    assert every.includes("orders")
    others = ("%DLQ%g", "%RETRY%g", "RMQ_SYS_TRACE_TOPIC", "PENSTOCK_SINK_CONTROL")
    assert not any(map(every.includes, others))
    assert selection(pattern="ord.*").includes("orders")
    assert not selection(pattern="ord").includes("orders")
    assert selection(topics="a,%RETRY%g").includes("%RETRY%g")
    assert selection(pattern="%DLQ%g.*").includes("%DLQ%g1")
    assert not selection(pattern="%DLQ%g.*").includes("%DLQ%h")
    assert not selection(pattern="(%DLQ%)?g").includes("%DLQ%g")
    assert every.includes_dead_letters("%DLQ%g")
    assert not every.includes_dead_letters("g")
    assert not selection(groups="h").includes_dead_letters("%DLQ%g")
    assert selection(skip_traces=True).trace_topic is None
    assert not selection(trace_topic="MyTraces").includes("MyTraces")


def test_a_pattern_with_their_prefix_matches_topics_of_groups_in_a_log() -> None:
    def wanted(pattern: str, *topics: str) -> list[str]:
        chosen = LogSelection(columns=("body",), pattern=pattern).filter().topics
        assert chosen is not None
        return [topic for topic in topics if chosen(topic.encode())]

    every = ("g", "%DLQ%g", "%RETRY%g", "SCHEDULE_TOPIC_XXXX")
    assert wanted(".*", *every) == ["g"]
    assert wanted("%DLQ%.*", *every) == ["%DLQ%g"]
    assert wanted("%RETRY%(g|h)", *every) == ["%RETRY%g"]
    assert wanted("%DLQ%h", *every) == []


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--trigger", "10 seconds"), "insight has neither --trigger nor --checkpoint"),
        (("--checkpoint", "/tmp/x"), "insight has neither --trigger nor --checkpoint"),
        (("--log", "/nowhere"), "/nowhere does not exist"),
    ],
)
def test_invalid_options_are_refused_before_spark_starts(
    args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pipeline", "run", "insight", "-n", "127.0.0.1:1", "--output", "/tmp/out", *args]
    assert main(command) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert text in printed
    assert "starting Spark" not in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_stops_spark(
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    session = MagicMock()
    (tmp_path / "lake" / "data").mkdir(parents=True)

    def start(*args: object, **keywords: object) -> MagicMock:
        os.kill(os.getpid(), number)
        return session

    monkeypatch.setattr("penstock.spark.session.spark_session", start)
    paths = ("--output", str(tmp_path / "out"), "--lake", str(tmp_path / "lake"))
    assert main(["pipeline", "run", "insight", *paths]) == 0
    assert "stopped before the pipeline started" in capsys.readouterr().err
    session.stop.assert_called_once_with()


def test_buckets_of_charts_are_multiples_of_those_of_the_tables() -> None:
    assert coarser_bucket_ms(60_000, 0) == 60_000
    for span_ms in (1, 3_600_000, 86_400_000, 86_400_000 * 365):
        wide = coarser_bucket_ms(60_000, span_ms)
        assert wide % 60_000 == 0
        assert span_ms <= wide * POINTS_MAX


# --- traces --------------------------------------------------------------------------------------


def test_impossible_numbers_in_traces_are_dropped() -> None:
    body = encode_record(
        "SubAfter", "r", "id", 10**30, True, "k", ConsumeCode.TIMEOUT, -(10**25), "g"
    )
    (record,) = decode_traces(body.encode())
    row = _row(record)
    assert (row["cost_ms"], row["time_ms"], row["outcome"]) == (None, None, "timeout")


# --- report --------------------------------------------------------------------------------------


def excerpt(*rows: dict[str, Any], total: int | None = None) -> TableExcerpt:
    return TableExcerpt(rows, len(rows) if total is None else total)


def data(name: str = HOSTILE) -> ReportData:
    """Report data with rows for each section."""
    return ReportData(
        about=(("Created", "today"), ("Source", name)),
        notes=(name,),
        **topic_tables(name),
        **group_tables(name),
    )


def topic_tables(name: str) -> dict[str, TableExcerpt]:
    """Rates, sizes, queues and keys of topics."""
    at, later = NOON_MS, NOON_MS + 3 * 60_000
    return {
        "rates": excerpt(
            {"topic": name, "time": at, "per_minute": 5.0, "bytes_per_minute": 50.0},
            {"topic": name, "time": later, "per_minute": 7.0, "bytes_per_minute": 50.0},
            {"topic": "_hidden", "time": at, "per_minute": 1.0, "bytes_per_minute": None},
        ),
        "sizes": excerpt(
            {
                "topic": name, "messages": 12, "bytes": 120, "mean_bytes": 10.0, "p50_bytes": 0,
                "p95_bytes": 20, "p99_bytes": 30, "min_bytes": 0, "max_bytes": 31, "first": at,
                "last": later,
            },
            total=1234,
        ),
        "queues": excerpt(
            {
                "topic": name, "queues": 4, "messages": 12, "empty": 1, "least": 0.0, "most": 2.5,
                "fullest": "broker-a 3",
            }
        ),
        "skew": excerpt(
            {
                "topic": name, "messages": 12, "with_key": 11, "keys": 3, "hottest": name,
                "hottest_messages": 9, "hottest_share": 0.75, "skew": 2.4,
            }
        ),
        "keys": excerpt({"topic": name, "rank": 1, "key": name, "messages": 9, "share": 0.75}),
    }  # fmt: skip


def group_tables(name: str) -> dict[str, TableExcerpt]:
    """Latencies, dead letters and lag of groups."""
    at, later = NOON_MS, NOON_MS + 3 * 60_000
    return {
        "latencies": excerpt(
            {
                "stage": "send", "topic": name, "group": None, "count": 5, "p50_ms": 1,
                "p95_ms": 2, "p99_ms": 3, "max_ms": 4, "negative": 0,
            }
        ),
        "latency_times": excerpt({"stage": "send", "time": at, "p95_ms": 0}),
        "dead": excerpt(
            {
                "group": name, "origin_topic": None, "tags": name, "cause": name, "messages": 2,
                "tries": 3, "first_hour": at, "last_hour": at,
            }
        ),
        "dead_times": excerpt({"time": at, "cause": name, "messages": 2}),
        "samples": excerpt(
            {
                "group": name, "origin_topic": name, "cause": name, "message_id": name,
                "keys": None, "reconsume_times": 3, "store_timestamp": at, "body_start": name,
            }
        ),
        "lag": excerpt(
            {
                "group": name, "topic": name, "queues": 4, "lag": None, "lag_ms": 90_000,
                "unknown": 4, "sampled": at,
            }
        ),
        "lag_times": excerpt(
            {"group": name, "time": at, "lag": None, "lag_ms": None},
            {"group": name, "time": later, "lag": 5, "lag_ms": 10},
        ),
    }  # fmt: skip


class Page(HTMLParser):
    """Tags, ids and links of a page, as a browser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name.endswith(("href", "src")):
                self.links.append(value or "")
            assert not name.startswith("on")


@pytest.mark.slow
def test_values_from_messages_are_escaped() -> None:
    text = report(data())
    page = Page(text)
    assert "script" not in page.tags
    assert page.tags.count("svg") == 7
    assert page.tags.count("figcaption") == 7
    assert len(page.ids) == len(set(page.ids))
    assert text.index('<ul class="findings">') < text.index("<dl>") < text.index("<section")
    for drawn in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(drawn)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)
    assert "&lt;script&gt;" in text
    assert "1,233 more rows" in text
    assert "_hidden" in text
    assert "currentColor" in text
    assert "#010203" not in text
    assert "mathdefault" not in text


def test_empty_sections_have_a_text() -> None:
    text = report(ReportData(), title="Nothing & more")
    assert Page(text).tags.count("svg") == 0
    assert text.count('<p class="none">') == 7
    assert "<h1>Nothing &amp; more</h1>" in text


def test_input_without_bodies_has_no_sizes() -> None:
    row = dict(data("t").sizes.rows[0])
    for column in row.keys() - {"topic", "messages", "first", "last"}:
        row[column] = None
    text = report(ReportData(sizes=excerpt(row)))
    assert "The input has no bodies." in text


def test_values_are_shown_as_one_short_line() -> None:
    assert one_line("a\n\t b\x00") == "a b\N{REPLACEMENT CHARACTER}"
    assert len(one_line("x" * 1000)) == 36


def test_headlines_name_problems_first() -> None:
    found = data("t")
    few = [text for _, text in headlines(found)]
    assert few == [
        "2 dead letters of the group t from an unknown topic; cause: t.",
        "No group has a lag.",
        "t has the most messages: 12, at most 7 per minute.",
    ]
    skew = {**found.skew.rows[0], "messages": 1000, "hottest_messages": 750, "skew": 242.1}
    many = replace(
        found,
        dead=excerpt(
            *({**found.dead.rows[0], "origin_topic": "a", "tags": tag} for tag in ("x", "y"))
        ),
        lag=excerpt({**found.lag.rows[0], "lag": 1234, "unknown": 0}),
        latencies=excerpt(
            *({**found.latencies.rows[0], "stage": stage, "group": "g", "count": 1000,
               "negative": 3}
              for stage in ("send", "send to done"))
        ),
        skew=excerpt(skew),
        queues=excerpt({**found.queues.rows[0], "messages": 1000}),
    )  # fmt: skip
    assert headlines(many)[:-1] == [
        ("dead", "4 dead letters of the group t from a; cause: t."),
        ("lag", "The group t has a lag of 1,234 messages in t; the oldest is 1.5 min old."),
        ("latency", "The slowest topic for 'send to done' is t in the group g: 95% of its "
         "messages take at most 2 ms."),
        ("latency", "6 latencies are negative, because the clocks of machines differ."),
        ("keys", "The key t has 75% of the messages of t, 242 times as many as the average key."),
        ("queues", "The queue broker-a 3 of t has 2.5 times its even share of the messages."),
    ]  # fmt: skip
    assert headlines(ReportData()) == [
        ("dead", "There are no dead letters."), ("rates", "No messages were found.")
    ]  # fmt: skip


def test_the_time_axis_has_the_range_of_the_rows() -> None:
    one = data("t")
    alone = replace(one, lag_times=excerpt(dict(one.lag_times.rows[1])))
    for draw in (draw_dead(one), draw_lag(alone), draw_latencies(one), draw_rates(one)):
        with figure(draw) as chart:
            begin, end = chart.axes[0].get_xlim()
            assert 0 < end - begin < 1, "less than a day"
