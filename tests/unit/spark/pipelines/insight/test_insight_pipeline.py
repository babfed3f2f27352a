"""Pipeline `insight` without Spark: what is chosen, what is refused, plots and page."""

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

from penstock.cli.main import main
from penstock.client.trace.trace_records import ConsumeCode, decode_traces, encode_record
from penstock.errors import BadSetting
from penstock.spark.pipelines.insight.findings import POINTS_MAX, Findings, Listing, coarser
from penstock.spark.pipelines.insight.headlines import headlines
from penstock.spark.pipelines.insight.insight_pipeline import PIPELINE, TABLES, _bucket_ms, _choice
from penstock.spark.pipelines.insight.message_sources import Choice
from penstock.spark.pipelines.insight.plots import (
    draw_dead,
    draw_lag,
    draw_latencies,
    draw_rates,
    figure,
    plain,
)
from penstock.spark.pipelines.insight.report import report
from penstock.spark.pipelines.insight.trace_latency import _row
from penstock.spark.pipelines.running import PipelineJob
from penstock.spark.source.log_slices import LogScan

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


def test_times_are_moments_or_how_long_ago() -> None:
    choice = _choice(job(since="2026-08-01T12:00:00+00:00", until=str(NOON_MS + 5)))
    assert (choice.since_ms, choice.until_ms) == (NOON_MS, NOON_MS + 5)
    choice = _choice(job(since="2h", until="30m"))
    assert choice.since_ms is not None
    assert choice.until_ms is not None
    assert choice.until_ms - choice.since_ms == 90 * 60_000
    assert _bucket_ms(job(bucket="10s")) == 10_000


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topics": "a", "pattern": "b"}, "--topics and --pattern exclude"),
        ({"lake": "a", "log": "b"}, "--lake and --log exclude"),
        ({"pattern": "("}, "no regular expression"),
        ({"topics": " , "}, "has no name"),
        ({"since": "1h", "until": "2h"}, "is not before"),
        ({"since": "yesterday"}, "since"),
        ({"top": 0}, "--top"),
    ],
)
def test_options_that_can_not_be_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadSetting, match=re.escape(text)):
        _choice(job(**options))


def test_a_pattern_means_topics_of_applications() -> None:
    def choice(**given: Any) -> Choice:
        return _choice(job(**given))

    every = choice()
    assert every.includes("orders")
    others = ("%DLQ%g", "%RETRY%g", "RMQ_SYS_TRACE_TOPIC", "PENSTOCK_SINK_CONTROL")
    assert not any(map(every.includes, others))
    assert choice(pattern="ord.*").includes("orders")
    assert not choice(pattern="ord").includes("orders")
    assert choice(topics="a,%RETRY%g").includes("%RETRY%g")
    assert choice(pattern="%DLQ%g.*").includes("%DLQ%g1")
    assert not choice(pattern="%DLQ%g.*").includes("%DLQ%h")
    assert not choice(pattern="(%DLQ%)?g").includes("%DLQ%g")
    assert every.includes_dead("%DLQ%g")
    assert not every.includes_dead("g")
    assert not choice(groups="h").includes_dead("%DLQ%g")
    assert choice(skip_traces=True).trace_topic is None
    assert not choice(trace_topic="MyTraces").includes("MyTraces")


def test_a_log_has_topics_of_groups_for_a_pattern_that_begins_as_their_names_do() -> None:
    def wanted(pattern: str, *topics: str) -> list[str]:
        chosen = LogScan(columns=("body",), pattern=pattern).filter().topics
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
def test_options_are_wrong_before_spark_starts(
    args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pipeline", "run", "insight", "-n", "127.0.0.1:1", "--output", "/tmp/out", *args]
    assert main(command) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert text in said
    assert "starting Spark" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_spark_starts_does_not_leave_it_behind(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = MagicMock()

    def start(*args: object, **keywords: object) -> MagicMock:
        os.kill(os.getpid(), number)
        return session

    monkeypatch.setattr("penstock.spark.session.spark_session", start)
    command = ["pipeline", "run", "insight", "--output", "/tmp/out", "--lake", "/nowhere"]
    assert main(command) == 0
    assert "stopped before the pipeline started" in capsys.readouterr().err
    session.stop.assert_called_once_with()


def test_buckets_of_plots_are_whole_ones_of_the_tables() -> None:
    assert coarser(60_000, 0) == 60_000
    for span_ms in (1, 3_600_000, 86_400_000, 86_400_000 * 365):
        wide = coarser(60_000, span_ms)
        assert wide % 60_000 == 0
        assert span_ms <= wide * POINTS_MAX


# --- traces --------------------------------------------------------------------------------------


def test_numbers_of_traces_that_no_clock_shows_are_left_out() -> None:
    body = encode_record(
        "SubAfter", "r", "id", 10**30, True, "k", ConsumeCode.TIMEOUT, -(10**25), "g"
    )
    (record,) = decode_traces(body.encode())
    row = _row(record)
    assert (row["cost_ms"], row["time_ms"], row["outcome"]) == (None, None, "timeout")


# --- page ----------------------------------------------------------------------------------------


def listing(*rows: dict[str, Any], total: int | None = None) -> Listing:
    return Listing(rows, len(rows) if total is None else total)


def findings(name: str = HOSTILE) -> Findings:
    """Something of all."""
    at, later = NOON_MS, NOON_MS + 3 * 60_000
    return Findings(
        about=(("Made", "today"), ("From", name)),
        notes=(name,),
        rates=listing(
            {"topic": name, "time": at, "per_minute": 5.0, "bytes_per_minute": 50.0},
            {"topic": name, "time": later, "per_minute": 7.0, "bytes_per_minute": 50.0},
            {"topic": "_hidden", "time": at, "per_minute": 1.0, "bytes_per_minute": None},
        ),
        sizes=listing(
            {
                "topic": name, "messages": 12, "bytes": 120, "mean_bytes": 10.0, "p50_bytes": 0,
                "p95_bytes": 20, "p99_bytes": 30, "min_bytes": 0, "max_bytes": 31, "first": at,
                "last": later,
            },
            total=1234,
        ),
        queues=listing(
            {
                "topic": name, "queues": 4, "messages": 12, "empty": 1, "least": 0.0, "most": 2.5,
                "fullest": "broker-a 3",
            }
        ),
        skew=listing(
            {
                "topic": name, "messages": 12, "with_key": 11, "keys": 3, "hottest": name,
                "hottest_messages": 9, "hottest_share": 0.75, "skew": 2.4,
            }
        ),
        keys=listing({"topic": name, "rank": 1, "key": name, "messages": 9, "share": 0.75}),
        latencies=listing(
            {
                "stage": "send", "topic": name, "group": None, "count": 5, "p50_ms": 1,
                "p95_ms": 2, "p99_ms": 3, "max_ms": 4, "negative": 0,
            }
        ),
        latency_times=listing({"stage": "send", "time": at, "p95_ms": 0}),
        dead=listing(
            {
                "group": name, "origin_topic": None, "tags": name, "cause": name, "messages": 2,
                "tries": 3, "first_hour": at, "last_hour": at,
            }
        ),
        dead_times=listing({"time": at, "cause": name, "messages": 2}),
        samples=listing(
            {
                "group": name, "origin_topic": name, "cause": name, "message_id": name,
                "keys": None, "reconsume_times": 3, "store_timestamp": at, "body_start": name,
            }
        ),
        lag=listing(
            {
                "group": name, "topic": name, "queues": 4, "lag": None, "lag_ms": 90_000,
                "unknown": 4, "sampled": at,
            }
        ),
        lag_times=listing(
            {"group": name, "time": at, "lag": None, "lag_ms": None},
            {"group": name, "time": later, "lag": 5, "lag_ms": 10},
        ),
    )  # fmt: skip


class Page(HTMLParser):
    """Tags and ids that a browser would see."""

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


def test_nothing_from_messages_becomes_markup() -> None:
    text = report(findings())
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


def test_a_page_without_anything_says_so() -> None:
    text = report(Findings(), title="Nothing & more")
    assert Page(text).tags.count("svg") == 0
    assert text.count('<p class="none">') == 7
    assert "<h1>Nothing &amp; more</h1>" in text


def test_a_lake_without_bodies_has_no_sizes() -> None:
    row = dict(findings("t").sizes.rows[0])
    for column in row.keys() - {"topic", "messages", "first", "last"}:
        row[column] = None
    text = report(Findings(sizes=listing(row)))
    assert "no bodies whose size" in text


def test_values_are_one_short_line() -> None:
    assert plain("a\n\t b\x00") == "a b\N{REPLACEMENT CHARACTER}"
    assert len(plain("x" * 1000)) == 36


def test_headlines_tell_what_stands_out() -> None:
    found = findings("t")
    few = [text for _, text in headlines(found)]
    assert few == [
        "2 messages of a topic that is not known were given up by the group t; the cause: t.",
        "No group is behind.",
        "Send: 95 of 100 messages of t take up to 2 ms; no others take longer.",
        "t has most messages: 12, at most 7 per minute.",
    ]
    skew = {**found.skew.rows[0], "messages": 1000, "hottest_messages": 750, "skew": 242.1}
    many = replace(
        found,
        dead=listing(
            *({**found.dead.rows[0], "origin_topic": "a", "tags": tag} for tag in ("x", "y"))
        ),
        lag=listing({**found.lag.rows[0], "lag": 1234, "unknown": 0}),
        latencies=listing(
            *({**found.latencies.rows[0], "stage": stage, "group": "g", "negative": 3}
              for stage in ("send", "send to done"))
        ),
        skew=listing(skew),
        queues=listing({**found.queues.rows[0], "messages": 1000}),
    )  # fmt: skip
    assert headlines(many)[:-1] == [
        ("dead", "4 messages of a were given up by the group t; the cause: t."),
        ("lag", "The group t is 1,234 messages behind in t; the oldest waits 1.5 min."),
        ("latency", "Send to done: 95 of 100 messages of t take up to 2 ms in the group g; "
         "no others take longer."),
        ("latency", "6 times came out below 0: clocks of machines differ."),
        ("keys", "The key t has 75% of the messages of t, 242 times as many as the average key."),
        ("queues", "The queue broker-a 3 of t has 2.5 times its share of the messages."),
    ]  # fmt: skip
    assert headlines(Findings()) == [
        ("dead", "There are no dead letters."), ("rates", "No messages were found.")
    ]  # fmt: skip


def test_an_axis_of_time_is_as_long_as_what_it_shows() -> None:
    one = findings("t")
    alone = replace(one, lag_times=listing(dict(one.lag_times.rows[1])))
    for draw in (draw_dead(one), draw_lag(alone), draw_latencies(one), draw_rates(one)):
        with figure(draw) as made:
            begin, end = made.axes[0].get_xlim()
            assert 0 < end - begin < 1, "less than a day"
