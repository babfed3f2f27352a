"""The report of pipeline `insight`: a single HTML page without scripts or external resources.

Values from messages are escaped, and a content security policy forbids loading and scripts.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.insight import plots
from penstock.spark.pipelines.insight.headlines import (
    DEAD,
    KEYS,
    LAG,
    LATENCY,
    QUEUES,
    RATES,
    headlines,
)
from penstock.spark.pipelines.insight.plots import duration_text
from penstock.spark.pipelines.insight.report_data import (
    KEYS_MAX,
    SERIES_MAX,
    STAGE_ROWS_MAX,
    ReportData,
    TableExcerpt,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELL_CHARS_MAX: Final = 200
_LINE_CHARS_MAX: Final = 400
_EMPTY_CELL: Final = "-"
_CSS: Final = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5a6675;--line:#d7dde5;--page:#fff;--row:#f4f6f9;
--mark:#3b82c4}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9f0;--soft:#9aa7b6;--line:#36404d;--page:#151a21;
--row:#1c232c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:64rem;
margin:2rem auto;padding:0 1rem}
h1{margin-bottom:.2rem}h2{margin-top:2.5rem;border-bottom:1px solid var(--line)}
h3{margin-bottom:.3rem}
figure{margin:0}figcaption,p.none,p.more{color:var(--soft);margin:.3rem 0 1rem}
svg{width:100%;height:auto;color:var(--ink)}svg *{stroke-linejoin:round}
ul.findings{padding:.8rem 1rem .8rem 2.2rem;background:var(--row);border-left:4px solid var(--mark)}
ul.findings a{color:inherit;text-decoration:none}ul.findings a:hover{text-decoration:underline}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}
th{text-align:left;color:var(--soft);font-weight:600;white-space:nowrap}
td,th{padding:.25rem 1rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.w{overflow-wrap:anywhere;min-width:8rem}td.w:last-child{min-width:16rem}
tbody tr:nth-child(even){background:var(--row)}
ul.notes{padding-left:1.2rem}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}
dt{color:var(--soft)}dd{margin:0}
"""
Format = Callable[[Any], str]


def report(data: ReportData, *, title: str = "Insight") -> str:
    """The report as an HTML page."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_CSS}</style></head><body>"
    )
    about = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in data.about)
    notes = "".join(f"<li>{_text(note)}</li>" for note in data.notes)
    parts = [
        head,
        f"<h1>{_text(title)}</h1>",
        _headlines(data),
        f"<dl>{about}<dt>Times</dt><dd>UTC</dd></dl>",
        f'<ul class="notes">{notes}</ul>' if notes else "",
        _dead(data),
        _lag(data),
        _latencies(data),
        _keys(data),
        _queues(data),
        _rates(data),
        _sizes(data),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _headlines(data: ReportData) -> str:
    items = "".join(
        f'<li><a href="#{part}">{escape(plots.one_line(text, _LINE_CHARS_MAX))}</a></li>'
        for part, text in headlines(data)
    )
    return f'<ul class="findings">{items}</ul>'


def _rates(data: ReportData) -> str:
    caption = (
        f"Messages stored per minute and bytes of their bodies, by "
        f"{duration_text(data.bucket_ms)}, for the {SERIES_MAX} topics with the most messages."
    )
    return _section(
        RATES,
        "Rates",
        data.rates,
        "No messages were found.",
        _plot("rates", data.rates, plots.draw_rates(data), caption, height=4.8),
    )


def _sizes(data: ReportData) -> str:
    measured = any(row["p50_bytes"] is not None for row in data.sizes.rows)
    caption = (
        "Sizes of uncompressed bodies: a bar from the median to the 99th percentile, and a mark "
        f"for the largest, for the {SERIES_MAX} topics with the most messages."
    )
    return _section(
        "sizes",
        "Sizes",
        data.sizes,
        "No messages were found.",
        _plot("sizes", data.sizes, plots.draw_sizes(data), caption, names=SERIES_MAX)
        if measured
        else '<p class="none">The input has no bodies.</p>',
        _table(
            data.sizes,
            {
                "topic": ("Topic", _text),
                "messages": ("Messages", _count),
                "bytes": ("Total", _size),
                "mean_bytes": ("Mean", _size),
                "p50_bytes": ("p50", _size),
                "p95_bytes": ("p95", _size),
                "p99_bytes": ("p99", _size),
                "max_bytes": ("Largest", _size),
                "first": ("First", _when),
                "last": ("Last", _when),
            },
        ),
    )


def _queues(data: ReportData) -> str:
    caption = (
        "How messages are distributed over the queues of a topic; 1 is an even share. Only one "
        "consumer of a group reads a queue, so a group is as slow as its fullest queue."
    )
    return _section(
        QUEUES,
        "Queue balance",
        data.queues,
        "No messages were found.",
        _plot("queues", data.queues, plots.draw_balance(data), caption, names=SERIES_MAX),
        _table(
            data.queues,
            {
                "topic": ("Topic", _text),
                "queues": ("Queues", _count),
                "empty": ("Empty", _count),
                "least": ("Smallest share", _times),
                "most": ("Largest share", _times),
                "fullest": ("Fullest queue", _text),
            },
        ),
    )


def _keys(data: ReportData) -> str:
    caption = (
        f"The most frequent keys, at most {KEYS_MAX} per topic, and their share of the topic's "
        "messages."
    )
    return _section(
        KEYS,
        "Hot keys",
        data.keys,
        "No message has a key.",
        _plot("keys", data.keys, plots.draw_keys(data), caption, names=15),
        "<h3>By topic</h3>",
        _table(
            data.skew,
            {
                "topic": ("Topic", _text),
                "messages": ("Messages", _count),
                "with_key": ("With a key", _count),
                "keys": ("Keys", _count),
                "hottest": ("Hottest key", _text),
                "hottest_share": ("Its share", _percent),
                "skew": ("Relative to average", _times),
            },
        ),
        "<h3>By key</h3>",
        _table(
            data.keys,
            {
                "topic": ("Topic", _text),
                "rank": ("Rank", _count),
                "key": ("Key", _text),
                "messages": ("Messages", _count),
                "share": ("Share", _percent),
            },
        ),
    )


def _latencies(data: ReportData) -> str:
    caption = (
        f"The 95th percentile of each stage by {duration_text(data.bucket_ms)}; each point is the "
        "largest of all topics and groups. 'Born to store' comes from messages, the other stages "
        f"from traces. The table shows the {STAGE_ROWS_MAX} slowest rows of each stage."
    )
    return _section(
        LATENCY,
        "Latency",
        data.latencies,
        "There are no messages and no traces.",
        _plot("latencies", data.latency_times, plots.draw_latencies(data), caption),
        _table(
            data.latencies,
            {
                "stage": ("Stage", _text),
                "topic": ("Topic", _text),
                "group": ("Group", _text),
                "count": ("Count", _count),
                "p50_ms": ("p50 ms", _count),
                "p95_ms": ("p95 ms", _count),
                "p99_ms": ("p99 ms", _count),
                "max_ms": ("Max ms", _count),
                "negative": ("Negative", _count),
            },
        ),
    )


def _dead(data: ReportData) -> str:
    caption = (
        "Messages by the time at which they became dead letters, for the "
        f"{SERIES_MAX} most frequent causes."
    )
    return _section(
        DEAD,
        "Dead letters",
        data.dead,
        "There are no dead letters.",
        _plot("dead", data.dead_times, plots.draw_dead(data), caption),
        _table(
            data.dead,
            {
                "group": ("Group", _text),
                "origin_topic": ("Topic", _text),
                "tags": ("Tag", _text),
                "cause": ("Cause", _long),
                "messages": ("Messages", _count),
                "tries": ("Attempts", _count),
                "first_hour": ("First hour", _when),
                "last_hour": ("Last hour", _when),
            },
        ),
        "<h3>Samples</h3>",
        _table(
            data.samples,
            {
                "group": ("Group", _text),
                "origin_topic": ("Topic", _text),
                "cause": ("Cause", _long),
                "message_id": ("Id", _long),
                "keys": ("Keys", _text),
                "reconsume_times": ("Attempts", _count),
                "store_timestamp": ("Dead since", _when),
                "body_start": ("Start of body", _long),
            },
        ),
    )


def _lag(data: ReportData) -> str:
    caption = (
        "Messages not yet consumed, one point per run of this pipeline, for the "
        f"{SERIES_MAX} groups with the largest lag."
    )
    return _section(
        LAG,
        "Consumer lag",
        data.lag,
        "The lag has not been measured yet.",
        _plot("lag", data.lag_times, plots.draw_lag(data), caption),
        _table(
            data.lag,
            {
                "group": ("Group", _text),
                "topic": ("Topic", _text),
                "queues": ("Queues", _count),
                "lag": ("Lag", _count),
                "lag_ms": ("Age of oldest", _duration),
                "unknown": ("Never committed", _count),
                "sampled": ("Measured", _when),
            },
        ),
    )


def _section(part: str, title: str, excerpt: TableExcerpt, if_empty: str, *parts: str) -> str:
    body = "".join(parts) if excerpt.rows else f'<p class="none">{_text(if_empty)}</p>'
    return f'<section id="{part}"><h2>{_text(title)}</h2>{body}</section>'


def _plot(
    name: str,
    excerpt: TableExcerpt,
    draw: "Callable[[Figure], None]",
    caption: str,
    *,
    names: int = 0,
    height: float = 3.0,
) -> str:
    """A chart with its caption; the height depends on the number of names on its axis."""
    if not excerpt.rows:
        return ""
    if names:
        height = 1.1 + 0.3 * min(names, len(excerpt.rows))
    drawn = plots.svg(name, draw, height=height)
    return f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(excerpt: TableExcerpt, columns: Mapping[str, tuple[str, Format]]) -> str:
    kinds = {name: _KINDS.get(form, "") for name, (_, form) in columns.items()}
    head = "".join(f"<th{kinds[n]}>{_text(title)}</th>" for n, (title, _) in columns.items())
    body = "".join(
        "<tr>"
        + "".join(f"<td{kinds[name]}>{form(row[name])}</td>" for name, (_, form) in columns.items())
        + "</tr>"
        for row in excerpt.rows
    )
    left = excerpt.total - len(excerpt.rows)
    more = f'<p class="more">{left:,} more rows are in the Parquet table.</p>' if left > 0 else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>{more}'


def _text(value: object) -> str:
    return _EMPTY_CELL if value is None else escape(plots.one_line(value, _CELL_CHARS_MAX))


def _long(value: object) -> str:
    """Text that may be wrapped anywhere; names are kept in one line."""
    return _text(value)


def _size(value: float | None) -> str:
    if value is None:
        return _EMPTY_CELL
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


def _count(value: float | None) -> str:
    return _EMPTY_CELL if value is None else f"{value:,.0f}"


def _times(value: float | None) -> str:
    return _EMPTY_CELL if value is None else f"{value:,.2f}"


def _percent(value: float | None) -> str:
    return _EMPTY_CELL if value is None else f"{100 * value:.2f} %"


def _when(ms: int | None) -> str:
    return (
        _EMPTY_CELL if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    )


def _duration(ms: int | None) -> str:
    return _EMPTY_CELL if ms is None else duration_text(ms)


_NUMBER: Final = ' class="n"'
_KINDS: Final[Mapping[Format, str]] = {
    _count: _NUMBER,
    _size: _NUMBER,
    _times: _NUMBER,
    _percent: _NUMBER,
    _when: _NUMBER,
    _duration: _NUMBER,
    _long: ' class="w"',
}
