"""What stands first in the report of pipeline `insight`: what most needs somebody's eye, in words.

Each line names the part of the page that has more. Dead letters and lag are always told of, the
others only where they stand out.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from penstock.spark.pipelines.insight.findings import STAGES, Findings, Row
from penstock.spark.pipelines.insight.plots import plain, span_text

DEAD: Final = "dead"
LAG: Final = "lag"
LATENCY: Final = "latency"
KEYS: Final = "keys"
QUEUES: Final = "queues"
RATES: Final = "rates"
LINES_EACH: Final = 2
MESSAGES_FEW: Final = 100
"""Shares of less say little: one message of two is half of them."""
HOT_SHARE: Final = 0.1
HOT_SKEW: Final = 10
FULL_LOAD: Final = 1.5
NAME_CHARS_MAX: Final = 80

Line = tuple[str, str]
"""The id of a part of the page, and a sentence."""


def headlines(findings: Findings) -> list[Line]:
    """The sentences, worst first."""
    parts = {
        DEAD: _dead,
        LAG: _lag,
        LATENCY: _latency,
        KEYS: _keys,
        QUEUES: _queues,
        RATES: _rates,
    }
    return [(part, text) for part, tell in parts.items() for text in tell(findings)]


def _dead(findings: Findings) -> Iterator[str]:
    counted: Counter[tuple[str, str, str]] = Counter()
    for row in findings.dead.rows:
        counted[row["group"], _topic(row["origin_topic"]), row["cause"]] += row["messages"]
    if not counted:
        yield "There are no dead letters."
    for (group, topic, cause), count in counted.most_common(LINES_EACH):
        were = "was" if count == 1 else "were"
        yield (
            f"{_messages(count)} of {topic} {were} given up by the group {_name(group)}; "
            f"the cause: {_name(cause)}."
        )


def _lag(findings: Findings) -> Iterator[str]:
    behind = [row for row in findings.lag.rows if row["lag"]]
    if findings.lag.rows and not behind:
        yield "No group is behind."
    for row in behind[:LINES_EACH]:
        waits = "" if row["lag_ms"] is None else f"; the oldest waits {span_text(row['lag_ms'])}"
        yield (
            f"The group {_name(row['group'])} is {_messages(row['lag'])} behind in "
            f"{_name(row['topic'])}{waits}."
        )


def _latency(findings: Findings) -> Iterator[str]:
    """The longest way that is known; the slowest of each stage comes first."""
    slowest = max(findings.latencies.rows, key=_place, default=None)
    if slowest is not None:
        group = "" if slowest["group"] is None else f" in the group {_name(slowest['group'])}"
        yield (
            f"{slowest['stage'].capitalize()}: 95 of 100 messages of {_topic(slowest['topic'])} "
            f"take up to {span_text(slowest['p95_ms'])}{group}; no others take longer."
        )
    below = sum(row["negative"] for row in findings.latencies.rows)
    if below:
        yield f"{below:,} times came out below 0: clocks of machines differ."


def _keys(findings: Findings) -> Iterator[str]:
    hot = [
        row
        for row in findings.skew.rows
        if row["messages"] >= MESSAGES_FEW
        and row["hottest_share"] >= HOT_SHARE
        and row["skew"] >= HOT_SKEW
    ]
    for row in sorted(hot, key=lambda row: -int(row["hottest_messages"]))[:LINES_EACH]:
        yield (
            f"The key {_name(row['hottest'])} has {row['hottest_share']:.0%} of the messages of "
            f"{_name(row['topic'])}, {row['skew']:,.0f} times as many as the average key."
        )


def _queues(findings: Findings) -> Iterator[str]:
    full = [
        row
        for row in findings.queues.rows
        if row["most"] >= FULL_LOAD and row["messages"] >= MESSAGES_FEW
    ]
    for row in full[:LINES_EACH]:
        yield (
            f"The queue {_name(row['fullest'])} of {_name(row['topic'])} has {row['most']:.1f} "
            "times its share of the messages."
        )


def _rates(findings: Findings) -> Iterator[str]:
    if not findings.sizes.rows:
        yield "No messages were found."
        return
    busiest = findings.sizes.rows[0]
    own = (row for row in findings.rates.rows if row["topic"] == busiest["topic"])
    most = max((row["per_minute"] for row in own), default=0)
    yield (
        f"{_name(busiest['topic'])} has most messages: {busiest['messages']:,}, at most "
        f"{most:,.0f} per minute."
    )


def _place(latency: Row) -> int:
    return STAGES.index(latency["stage"])


def _topic(name: str | None) -> str:
    return "a topic that is not known" if name is None else _name(name)


def _name(name: object) -> str:
    return plain(name, NAME_CHARS_MAX)


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"
