"""The report of pipeline `insight`: one HTML page with all in it, no script and no other file.

Whatever comes from messages is escaped, and the page forbids itself to load or to run anything.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.insight import plots
from penstock.spark.pipelines.insight.findings import (
    KEYS_MAX,
    SERIES_MAX,
    STAGE_ROWS_MAX,
    Findings,
    Listing,
)
from penstock.spark.pipelines.insight.headlines import (
    DEAD,
    KEYS,
    LAG,
    LATENCY,
    QUEUES,
    RATES,
    headlines,
)
from penstock.spark.pipelines.insight.plots import span_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELL_CHARS_MAX: Final = 200
_LINE_CHARS_MAX: Final = 400
_NOTHING: Final = "-"
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


def report(findings: Findings, *, title: str = "Insight") -> str:
    """The page."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_CSS}</style></head><body>"
    )
    about = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in findings.about)
    notes = "".join(f"<li>{_text(note)}</li>" for note in findings.notes)
    parts = [
        head,
        f"<h1>{_text(title)}</h1>",
        _headlines(findings),
        f"<dl>{about}<dt>Times</dt><dd>UTC</dd></dl>",
        f'<ul class="notes">{notes}</ul>' if notes else "",
        _dead(findings),
        _lag(findings),
        _latencies(findings),
        _keys(findings),
        _queues(findings),
        _rates(findings),
        _sizes(findings),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _headlines(findings: Findings) -> str:
    items = "".join(
        f'<li><a href="#{part}">{escape(plots.plain(text, _LINE_CHARS_MAX))}</a></li>'
        for part, text in headlines(findings)
    )
    return f'<ul class="findings">{items}</ul>'


def _rates(findings: Findings) -> str:
    says = (
        f"Messages stored per minute, and bytes of their bodies, in spans of "
        f"{span_text(findings.bucket_ms)}: the {SERIES_MAX} topics with most messages."
    )
    return _section(
        RATES,
        "Rates",
        findings.rates,
        "No messages were found.",
        _plot("rates", findings.rates, plots.draw_rates(findings), says, height=4.8),
    )


def _sizes(findings: Findings) -> str:
    measured = any(row["p50_bytes"] is not None for row in findings.sizes.rows)
    says = (
        "Bytes of bodies as consumers get them: a bar from the median to the 99th percentile, "
        f"a mark for the largest. The {SERIES_MAX} topics with most messages."
    )
    return _section(
        "sizes",
        "Sizes",
        findings.sizes,
        "No messages were found.",
        _plot("sizes", findings.sizes, plots.draw_sizes(findings), says, names=SERIES_MAX)
        if measured
        else '<p class="none">There are no bodies whose size could be told.</p>',
        _table(
            findings.sizes,
            {
                "topic": ("Topic", _text),
                "messages": ("Messages", _count),
                "bytes": ("In all", _size),
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


def _queues(findings: Findings) -> str:
    says = (
        "How messages spread over the queues of a topic: 1 is an even share. A full queue holds up "
        "its consumer: no other one can help, since a queue has one at a time."
    )
    return _section(
        QUEUES,
        "Balance of queues",
        findings.queues,
        "No messages were found.",
        _plot("queues", findings.queues, plots.draw_balance(findings), says, names=SERIES_MAX),
        _table(
            findings.queues,
            {
                "topic": ("Topic", _text),
                "queues": ("Queues", _count),
                "empty": ("Empty", _count),
                "least": ("Least share", _times),
                "most": ("Most share", _times),
                "fullest": ("Fullest queue", _text),
            },
        ),
    )


def _keys(findings: Findings) -> str:
    says = (
        "The keys that most messages have, and their share of their topics; a topic's first "
        f"{KEYS_MAX} at most."
    )
    return _section(
        KEYS,
        "Hot keys",
        findings.keys,
        "No message has a key.",
        _plot("keys", findings.keys, plots.draw_keys(findings), says, names=15),
        "<h3>By topic</h3>",
        _table(
            findings.skew,
            {
                "topic": ("Topic", _text),
                "messages": ("Messages", _count),
                "with_key": ("With a key", _count),
                "keys": ("Keys", _count),
                "hottest": ("Hottest key", _text),
                "hottest_share": ("Its share", _percent),
                "skew": ("Times the average key", _times),
            },
        ),
        "<h3>By key</h3>",
        _table(
            findings.keys,
            {
                "topic": ("Topic", _text),
                "rank": ("Rank", _count),
                "key": ("Key", _text),
                "messages": ("Messages", _count),
                "share": ("Share", _percent),
            },
        ),
    )


def _latencies(findings: Findings) -> str:
    says = (
        f"95th percentile of each stage in spans of {span_text(findings.bucket_ms)}; each point "
        "is the worst of all topics and groups. Born to store comes from the messages, the others "
        "from traces. The table has the slowest "
        f"{STAGE_ROWS_MAX} of each stage."
    )
    return _section(
        LATENCY,
        "Latency",
        findings.latencies,
        "There are neither messages nor traces.",
        _plot("latencies", findings.latency_times, plots.draw_latencies(findings), says),
        _table(
            findings.latencies,
            {
                "stage": ("Stage", _text),
                "topic": ("Topic", _text),
                "group": ("Group", _text),
                "count": ("Count", _count),
                "p50_ms": ("p50 ms", _count),
                "p95_ms": ("p95 ms", _count),
                "p99_ms": ("p99 ms", _count),
                "max_ms": ("Longest ms", _count),
                "negative": ("Below 0", _count),
            },
        ),
    )


def _dead(findings: Findings) -> str:
    says = (
        "Messages that were given up, by the time at which they became dead letters and by cause: "
        f"the {SERIES_MAX} causes with most."
    )
    return _section(
        DEAD,
        "Dead letters",
        findings.dead,
        "There are none.",
        _plot("dead", findings.dead_times, plots.draw_dead(findings), says),
        _table(
            findings.dead,
            {
                "group": ("Group", _text),
                "origin_topic": ("Topic", _text),
                "tags": ("Tag", _text),
                "cause": ("Cause", _long),
                "messages": ("Messages", _count),
                "tries": ("Tries", _count),
                "first_hour": ("First hour", _when),
                "last_hour": ("Last hour", _when),
            },
        ),
        "<h3>Samples</h3>",
        _table(
            findings.samples,
            {
                "group": ("Group", _text),
                "origin_topic": ("Topic", _text),
                "cause": ("Cause", _long),
                "message_id": ("Id", _long),
                "keys": ("Keys", _text),
                "reconsume_times": ("Tries", _count),
                "store_timestamp": ("Given up", _when),
                "body_start": ("Body begins", _long),
            },
        ),
    )


def _lag(findings: Findings) -> str:
    says = (
        "Messages that groups had still to consume, a point for each run of this pipeline: the "
        f"{SERIES_MAX} groups that were furthest behind."
    )
    return _section(
        LAG,
        "Lag of groups",
        findings.lag,
        "No group was looked at so far.",
        _plot("lag", findings.lag_times, plots.draw_lag(findings), says),
        _table(
            findings.lag,
            {
                "group": ("Group", _text),
                "topic": ("Topic", _text),
                "queues": ("Queues", _count),
                "lag": ("Behind", _count),
                "lag_ms": ("Oldest waits", _duration),
                "unknown": ("Never committed", _count),
                "sampled": ("At", _when),
            },
        ),
    )


def _section(part: str, title: str, listing: Listing, nothing: str, *parts: str) -> str:
    body = "".join(parts) if listing.rows else f'<p class="none">{_text(nothing)}</p>'
    return f'<section id="{part}"><h2>{_text(title)}</h2>{body}</section>'


def _plot(
    name: str,
    listing: Listing,
    draw: "Callable[[Figure], None]",
    says: str,
    *,
    names: int = 0,
    height: float = 3.0,
) -> str:
    """A plot with its sentence; one with names on its side grows with them."""
    if not listing.rows:
        return ""
    if names:
        height = 1.1 + 0.3 * min(names, len(listing.rows))
    drawn = plots.svg(name, draw, height=height)
    return f"<figure>{drawn}<figcaption>{escape(says)}</figcaption></figure>"


def _table(listing: Listing, columns: Mapping[str, tuple[str, Format]]) -> str:
    kinds = {name: _KINDS.get(form, "") for name, (_, form) in columns.items()}
    head = "".join(f"<th{kinds[n]}>{_text(title)}</th>" for n, (title, _) in columns.items())
    body = "".join(
        "<tr>"
        + "".join(f"<td{kinds[name]}>{form(row[name])}</td>" for name, (_, form) in columns.items())
        + "</tr>"
        for row in listing.rows
    )
    left = listing.total - len(listing.rows)
    more = f'<p class="more">{left:,} more rows are in the Parquet table.</p>' if left > 0 else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>{more}'


def _text(value: object) -> str:
    return _NOTHING if value is None else escape(plots.plain(value, _CELL_CHARS_MAX))


def _long(value: object) -> str:
    """Text that may be broken anywhere; names are rather left whole."""
    return _text(value)


def _size(value: float | None) -> str:
    if value is None:
        return _NOTHING
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


def _count(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.0f}"


def _times(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.2f}"


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{100 * value:.2f} %"


def _when(ms: int | None) -> str:
    return _NOTHING if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _duration(ms: int | None) -> str:
    return _NOTHING if ms is None else span_text(ms)


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
