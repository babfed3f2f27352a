"""The tables of docs/benchmarks.md, and how the peers compare with Penstock in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.peers.loads import LOADS, Load
from benchmarks.peers.results import (
    Results,
    Run,
    Spread,
    broker_us,
    client_us,
    entries,
    per_second,
    quantity,
    spread,
)

OWN = "penstock"
NONE = "\u2013"
"""A dash, for a figure that was not measured."""
BY_NAME = {load.name: load for load in LOADS}


def label(peer: dict[str, Any]) -> str:
    return f"{peer['name']} {peer['version']}"


def number(value: float) -> str:
    """Three significant digits, or a whole number."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def with_spread(value: Spread | None, scale: float = 1.0) -> str:
    if value is None:
        return NONE
    low, middle, high = (number(one * scale) for one in (value.low, value.median, value.high))
    return middle if low == high else f"{middle} ({low}\u2013{high})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines.extend(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join(lines)


def throughput(results: Results, load: Load) -> str:
    """The section of a load that runs as fast as it can."""
    head = ["Broker", "Messages/s", "Broker CPU, µs/message", "Client CPU, µs/message"]
    closed = load.kind != "consume"
    if closed:
        head += ["p50, ms", "p99, ms"]
    rows = []
    for peer in results.measured(load.name):
        columns = [per_second, broker_us, client_us]
        cells = [with_spread(results.spread(load.name, peer["key"], of)) for of in columns]
        if closed:
            cells += [_ms(results, load, peer, name) for name in ("p50_us", "p99_us")]
        rows.append([label(peer), *cells, *_modes(results, load, peer)])
    compared = compare(
        results, load, (per_second, "messages per second"), (broker_us, "broker CPU per message")
    )
    return _section(
        load, table([*head, "Batching", "Flush", "Copies", "Failed sends"], rows), compared
    )


def end_to_end(results: Results, load: Load) -> str:
    """The section of a load with a fixed rate."""
    head = ["Broker", "p50, ms", "p90, ms", "p99, ms", "p99.9, ms", "Broker CPU, µs/message"]
    rows = []
    for peer in results.measured(load.name):
        names = ("p50_us", "p90_us", "p99_us", "p999_us")
        cells = [_ms(results, load, peer, name) for name in names]
        cells.append(with_spread(results.spread(load.name, peer["key"], broker_us)))
        rows.append([label(peer), *cells, *_modes(results, load, peer)])
    compared = compare(results, load, (quantity("p50_us"), "p50"), (quantity("p99_us"), "p99"))
    return _section(load, table([*head, "Batching", "Flush", "Copies", "Lost"], rows), compared)


def _ms(results: Results, load: Load, peer: dict[str, Any], name: str) -> str:
    return with_spread(results.spread(load.name, peer["key"], quantity(name)), 1e-3)


def _modes(results: Results, load: Load, peer: dict[str, Any]) -> list[str]:
    failed = sum(run["failed"] for run in results.of(load.name, peer["key"]))
    flush = peer["sync_flush"] if load.sync_flush else peer["flush"]
    return [load.batching[peer["protocol"]], flush, "1", str(failed)]


def _section(load: Load, rows: str, compared: str) -> str:
    return "\n\n".join(part for part in (f"### {load.title}", rows, compared, load.note) if part)


Measure = tuple[Callable[[Run], float], str]


def compare(results: Results, load: Load, *measures: Measure) -> str:
    """A sentence per peer, with its values as multiples of Penstock's."""
    lines = []
    for peer in results.measured(load.name):
        if peer["key"] == OWN:
            continue
        parts = []
        for of, what in measures:
            ours = results.spread(load.name, OWN, of)
            theirs = results.spread(load.name, peer["key"], of)
            if ours and theirs and ours.median:
                ratio = number(theirs.median / ours.median)
                same = " (within the spread)" if ours.overlaps(theirs) else ""
                parts.append(f"{ratio} times the {what}{same}")
        if parts:
            lines.append(f"- {label(peer)}: {', '.join(parts)}")
    return "Compared with Penstock:\n\n" + "\n".join(lines) if lines else ""


def faster(results: Results) -> str:
    """The loads in which a peer is faster than Penstock by more than the spread."""
    lines = []
    for load in LOADS:
        of, what = (quantity("p99_us"), "the p99") if load.rate else (per_second, "as fast")
        ours = results.spread(load.name, OWN, of)
        found = []
        for peer in results.measured(load.name):
            theirs = results.spread(load.name, peer["key"], of)
            if not ours or not theirs or ours.overlaps(theirs):
                continue
            if (theirs.median < ours.median) == bool(load.rate):
                found.append(f"{label(peer)} ({number(theirs.median / ours.median)} times {what})")
        if found:
            lines.append(f"- {load.title}: {', '.join(found)}")
    return "\n".join(lines) or "- none"


def startups(results: Results) -> str:
    """Times to start and memory."""
    head = ["Broker", "Start, s", "Private memory after the start, MiB", "… after all loads, MiB"]
    head.append("Mapped files after all loads, MiB")
    rows = []
    for peer in results.peers:
        found = entries(results.startups, peer=peer["key"])
        after = entries(results.about.get("memory_after", ()), peer=peer["key"])
        took, idle = (spread(run[name] for run in found) for name in ("seconds", "anon"))
        rows.append([
            label(peer), with_spread(took), with_spread(idle),
            *(with_spread(spread(run[name] for run in after)) for name in ("anon", "file")),
        ])  # fmt: skip
    return table(head, rows)


def failures(results: Results) -> str:
    names = {peer["key"]: label(peer) for peer in results.peers}
    rows = []
    for one in results.failures:
        load = BY_NAME.get(one["load"])
        said = one["error"].replace("|", "\\|")
        what = load.title if load else one["load"]
        rows.append([names[one["peer"]], what, str(one["round"] + 1), f"`{said}`"])
    return table(["Broker", "Load", "Round", "Error"], rows)
