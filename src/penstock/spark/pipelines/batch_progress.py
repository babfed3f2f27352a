"""The progress of streaming queries, batch by batch, from Spark's progress reports."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.arrow.queue_offsets import INITIAL

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """A completed batch of a streaming query; its text is one line of progress."""

    query: str
    """The name of the query; empty if only one query runs."""
    number: int
    rows: int
    seconds: float
    lag: int | None
    """Messages that were available and not yet read; None if the source does not report it."""

    @property
    def rate(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        name = f"{self.query}, " if self.query else ""
        lag = "" if self.lag is None else f", lag {self.lag:,}"
        return (
            f"{name}batch {self.number}: {self.rows:,} rows, {self.rate:,.0f} rows/s{lag}, "
            f"{self.seconds:.2f} s"
        )


def new_batches(
    query: "StreamingQuery",
    last_batches: dict[str, int],
    *,
    named: bool = False,
    rows: Mapping[tuple[str, int], int] = MappingProxyType({}),
) -> Iterator[BatchProgress]:
    """Yield the batches that were completed since the last call.

    `last_batches` maps query ids to the last batch returned, and is updated. `rows` maps query name
    and batch number to the number of rows where Spark itself does not see them.
    """
    last = query.lastProgress
    key = str(query.id)
    # An idle query reports its last batch again and again.
    if last is None or last["batchId"] <= last_batches.get(key, -1):
        return
    for report in query.recentProgress:
        if report["batchId"] > last_batches.get(key, -1) and "addBatch" in report["durationMs"]:
            last_batches[key] = report["batchId"]
            batch = parse_progress(report, (query.name or key[:8]) if named else "")
            known = rows.get((query.name or "", batch.number))
            yield batch if known is None else replace(batch, rows=known)


def parse_progress(report: Mapping[str, Any], name: str = "") -> BatchProgress:
    """The batch of one of Spark's progress reports."""
    lags = [lag_of(source) for source in report["sources"]]
    known = [lag for lag in lags if lag is not None]
    return BatchProgress(
        query=name,
        number=report["batchId"],
        rows=sum(rows_of(source) for source in report["sources"]),
        seconds=report["durationMs"].get("triggerExecution", 0) / 1000,
        lag=sum(known) if known else None,
    )


def lag_of(source: Mapping[str, Any]) -> int | None:
    """The messages between the end of a batch and the latest offsets; None if not known."""
    latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
    if latest is None or end is None:
        return None
    return sum(max(offset - end.get(queue, 0), 0) for queue, offset in latest.items())


def rows_of(source: Mapping[str, Any]) -> int:
    """The number of rows of a batch.

    Spark counts a batch that is read twice two times, so the offsets limit the number.
    """
    rows: int = source["numInputRows"]
    end = _offsets(source.get("endOffset"))
    if end is None:
        return rows
    first = {**(_offsets(source.get("startOffset")) or {}), **_initial(source["endOffset"])}
    return min(rows, sum(max(offset - first.get(q, 0), 0) for q, offset in end.items()))


def _initial(text: Any) -> dict[tuple[str, str, str], int]:
    """The start offsets of queues that are new in a batch."""
    topics = json.loads(text) if isinstance(text, str) else text
    return _offsets(topics.get(INITIAL)) or {}


def _offsets(text: Any) -> dict[tuple[str, str, str], int] | None:
    """Offsets by queue; None if they are not in the form of format `penstock`."""
    try:
        topics = json.loads(text) if isinstance(text, str) else text
        return {
            (topic, broker, queue): int(offset)
            for topic, brokers in topics.items()
            if topic != INITIAL
            for broker, queues in brokers.items()
            for queue, offset in queues.items()
        }
    except (ValueError, TypeError, AttributeError):
        return None
