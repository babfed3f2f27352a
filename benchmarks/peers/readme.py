"""What README.md says of the results: a section, and two of its reasons for Penstock."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.peers import tables
from benchmarks.peers.results import (
    Results,
    Run,
    Spread,
    broker_us,
    entries,
    per_second,
    quantity,
    spread,
)

APACHE = "apache-5.4.0"
LESS_CPU = """\
- **It needs less CPU and memory.** With the same Java producer, Penstock uses {ours} µs of broker
  CPU per message and Apache RocketMQ 5.4.0 uses {theirs} µs. After the same loads, Penstock uses
  {our_memory} MiB of private memory and Apache {their_memory} MiB ([benchmarks](#benchmarks)).
"""
SECTION = """## Benchmarks

`make bench` compares Penstock with other brokers in one run: the same work in {rounds} alternating
rounds, with 128-byte messages, on {cores} cores that broker and client share. There is one copy of
each message, and flush is asynchronous, except in the row with sync flush. The best figure of a row
is bold, with those within its spread. [docs/benchmarks.md](docs/benchmarks.md) has all loads,
settings, percentiles and plots.

{table}

Measurements of [the Python client](docs/client.md#performance), [Spark](docs/spark.md#performance)
and [stores with many queues](docs/store.md#many-queues) are on their own pages.

"""


_ROWS: tuple[tuple[str, str, Callable[[Run], float], float, bool], ...] = (
    ("broker CPU per message, µs: 64 threads, synchronous", "sync-64", broker_us, 1, False),
    ("messages/s: 64 threads, synchronous", "sync-64", per_second, 1, True),
    ("messages/s: 1,000 in flight, not batched", "pipelined", per_second, 1, True),
    ("messages/s: batched", "batched", per_second, 1, True),
    ("messages/s: catching up, pulls of 32", "consume-32", per_second, 1, True),
    ("messages/s: 64 threads, sync flush", "sync-64-flush", per_second, 1, True),
    ("end to end at 1,000/s: p50, ms", "rate-1000", quantity("p50_us"), 1e-3, False),
    ("end to end at 10,000/s: p99, ms", "rate-10000", quantity("p99_us"), 1e-3, False),
)


def text(old: str, results: Results) -> str:
    """README.md with the figures of these results."""
    new = re.sub(r"(?ms)^## Benchmarks\n.*?(?=^## )", lambda _: _section(results), old, count=1)
    if reason := _less_cpu(results):
        bullet = r"(?ms)^- \*\*It needs less CPU and memory\.\*\*.*?(?=^- )"
        new = re.sub(bullet, lambda _: reason, new, count=1)
    if start := _start_of(results, tables.OWN):
        said = f"**It starts in {tables.number(start.median)} s**"
        new = re.sub(r"\*\*It starts in [\d.]+ s\*\*", said, new, count=1)
    return new


def _less_cpu(results: Results) -> str | None:
    """The first reason, if Penstock does need less than Apache RocketMQ."""
    costs = [results.spread("sync-64", key, broker_us) for key in (tables.OWN, APACHE)]
    after = results.about.get("memory_after", ())
    private = [entries(after, peer=key) for key in (tables.OWN, APACHE)]
    ours, theirs = costs
    if not (ours and theirs and all(private) and ours.median < theirs.median):
        return None
    memory = [tables.number(found[0]["anon"]) for found in private]
    return LESS_CPU.format(
        ours=tables.number(ours.median), theirs=tables.number(theirs.median),
        our_memory=memory[0], their_memory=memory[1],
    )  # fmt: skip


def _section(results: Results) -> str:
    keys = [peer["key"] for peer in results.peers]
    head = ["", *(tables.label(peer) for peer in results.peers)]
    rows = []
    for title, load, of, scale, more_is_better in _ROWS:
        found = [results.spread(load, key, of) for key in keys]
        if any(found):
            rows.append([title, *_cells(found, scale, more_is_better)])
    starts = [_start_of(results, key) for key in keys]
    rows.append(["start with an empty store, s", *_cells(starts, 1, False)])
    return SECTION.format(table=tables.table(head, rows), **results.about)


def _cells(found: list[Spread | None], scale: float, more_is_better: bool) -> list[str]:
    """The medians; the best one is bold, and those within its spread."""
    choose = max if more_is_better else min
    best = choose((one for one in found if one), key=lambda one: one.median, default=None)
    shown = [tables.NONE if one is None else tables.number(one.median * scale) for one in found]
    return [
        f"**{cell}**" if one and best and one.overlaps(best) else cell
        for one, cell in zip(found, shown, strict=True)
    ]


def _start_of(results: Results, key: str) -> Spread | None:
    return spread(one["seconds"] for one in results.startups if one["peer"] == key)
