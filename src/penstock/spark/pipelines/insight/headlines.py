"""The findings at the top of the report of pipeline `insight`, problems first.

Each finding is a sentence that links to a section of the page. Dead letters and lag are always
mentioned, other subjects only if they are remarkable.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from penstock.spark.pipelines.insight.plots import duration_text, one_line
from penstock.spark.pipelines.insight.report_data import STAGES, ReportData, Row

DEAD: Final = "dead"
LAG: Final = "lag"
LATENCY: Final = "latency"
KEYS: Final = "keys"
QUEUES: Final = "queues"
RATES: Final = "rates"
HEADLINES_EACH: Final = 2
MESSAGES_MIN: Final = 100
"""Shares and percentiles of fewer messages mean little: one of two messages is half of them."""
HOT_SHARE: Final = 0.1
HOT_SKEW: Final = 10
HIGH_LOAD: Final = 1.5
NAME_CHARS_MAX: Final = 80

Headline = tuple[str, str]
"""The id of a section of the page, and a sentence."""


def headlines(data: ReportData) -> list[Headline]:
    """The findings, problems first."""
    parts = {
        DEAD: _dead,
        LAG: _lag,
        LATENCY: _latency,
        KEYS: _keys,
        QUEUES: _queues,
        RATES: _rates,
    }
    return [(part, text) for part, sentences in parts.items() for text in sentences(data)]


def _dead(data: ReportData) -> Iterator[str]:
    counted: Counter[tuple[str, str, str]] = Counter()
    for row in data.dead.rows:
        counted[row["group"], _topic(row["origin_topic"]), row["cause"]] += row["messages"]
    if not counted:
        yield "There are no dead letters."
    for (group, topic, cause), count in counted.most_common(HEADLINES_EACH):
        yield (
            f"{_dead_letters(count)} of the group {_name(group)} from {topic}; "
            f"cause: {_name(cause)}."
        )


def _lag(data: ReportData) -> Iterator[str]:
    lagging = [row for row in data.lag.rows if row["lag"]]
    if data.lag.rows and not lagging:
        yield "No group has a lag."
    for row in lagging[:HEADLINES_EACH]:
        age = "" if row["lag_ms"] is None else f"; the oldest is {duration_text(row['lag_ms'])} old"
        yield (
            f"The group {_name(row['group'])} has a lag of {_messages(row['lag'])} in "
            f"{_name(row['topic'])}{age}."
        )


def _latency(data: ReportData) -> Iterator[str]:
    """The slowest topic of the last stage that was measured.

    A few messages make no finding: a single delayed one would be the slowest topic.
    """
    measured = (row for row in data.latencies.rows if row["count"] >= MESSAGES_MIN)
    slowest = max(measured, key=_stage_number, default=None)
    if slowest is not None:
        group = "" if slowest["group"] is None else f" in the group {_name(slowest['group'])}"
        yield (
            f"The slowest topic for '{slowest['stage']}' is {_topic(slowest['topic'])}{group}: "
            f"95% of its messages take at most {duration_text(slowest['p95_ms'])}."
        )
    negative = sum(row["negative"] for row in data.latencies.rows)
    if negative:
        yield f"{negative:,} latencies are negative, because the clocks of machines differ."


def _keys(data: ReportData) -> Iterator[str]:
    hot = [
        row
        for row in data.skew.rows
        if row["messages"] >= MESSAGES_MIN
        and row["hottest_share"] >= HOT_SHARE
        and row["skew"] >= HOT_SKEW
    ]
    for row in sorted(hot, key=lambda row: -int(row["hottest_messages"]))[:HEADLINES_EACH]:
        yield (
            f"The key {_name(row['hottest'])} has {row['hottest_share']:.0%} of the messages of "
            f"{_name(row['topic'])}, {row['skew']:,.0f} times as many as the average key."
        )


def _queues(data: ReportData) -> Iterator[str]:
    full = [
        row
        for row in data.queues.rows
        if row["most"] >= HIGH_LOAD and row["messages"] >= MESSAGES_MIN
    ]
    for row in full[:HEADLINES_EACH]:
        yield (
            f"The queue {_name(row['fullest'])} of {_name(row['topic'])} has {row['most']:.1f} "
            "times its even share of the messages."
        )


def _rates(data: ReportData) -> Iterator[str]:
    if not data.sizes.rows:
        yield "No messages were found."
        return
    busiest = data.sizes.rows[0]
    rates = (row for row in data.rates.rows if row["topic"] == busiest["topic"])
    most = max((row["per_minute"] for row in rates), default=0)
    yield (
        f"{_name(busiest['topic'])} has the most messages: {busiest['messages']:,}, at most "
        f"{most:,.0f} per minute."
    )


def _stage_number(latency: Row) -> int:
    return STAGES.index(latency["stage"])


def _topic(name: str | None) -> str:
    return "an unknown topic" if name is None else _name(name)


def _name(name: object) -> str:
    return one_line(name, NAME_CHARS_MAX)


def _dead_letters(count: int) -> str:
    return "1 dead letter" if count == 1 else f"{count:,} dead letters"


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"
