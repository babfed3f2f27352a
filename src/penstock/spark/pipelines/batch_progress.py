"""The progress of streaming queries: one line for each batch, from what Spark reports."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.spark.source.queue_offsets import INITIAL

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch that is done."""

    query: str
    """The query's name, where several run."""
    number: int
    rows: int
    seconds: float
    lag: int | None
    """Messages that were there and not read yet; None if the source does not say."""

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
    seen: dict[str, int],
    *,
    named: bool = False,
    rows: Mapping[tuple[str, int], int] = MappingProxyType({}),
) -> Iterator[Batch]:
    """The batches that ended since the last call; `seen` has the last one of each query, and
    `rows` what is known better than Spark does of a query by name and a batch by number.

    While there is nothing to read Spark reports the last batch over and over.
    """
    last = query.lastProgress
    key = str(query.id)
    if last is None or last["batchId"] <= seen.get(key, -1):
        return
    for report in query.recentProgress:
        if report["batchId"] > seen.get(key, -1) and "addBatch" in report["durationMs"]:
            seen[key] = report["batchId"]
            batch = batch_of(report, (query.name or key[:8]) if named else "")
            known = rows.get((query.name or "", batch.number))
            yield batch if known is None else replace(batch, rows=known)


def batch_of(report: Mapping[str, Any], name: str = "") -> Batch:
    """One of Spark's progress reports."""
    lags = [lag_of(source) for source in report["sources"]]
    known = [lag for lag in lags if lag is not None]
    return Batch(
        query=name,
        number=report["batchId"],
        rows=sum(rows_of(source) for source in report["sources"]),
        seconds=report["durationMs"].get("triggerExecution", 0) / 1000,
        lag=sum(known) if known else None,
    )


def lag_of(source: Mapping[str, Any]) -> int | None:
    """How far a source is behind: its latest offsets less those where the batch ended."""
    latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
    if latest is None or end is None:
        return None
    return sum(max(offset - end.get(queue, 0), 0) for queue, offset in latest.items())


def rows_of(source: Mapping[str, Any]) -> int:
    """The rows of a batch. Spark counts them again each time that a batch is read, and where it is
    read twice its offsets tell how many there can be at most."""
    rows: int = source["numInputRows"]
    end = _offsets(source.get("endOffset"))
    if end is None:
        return rows
    first = {**(_offsets(source.get("startOffset")) or {}), **_initial(source["endOffset"])}
    return min(rows, sum(max(offset - first.get(q, 0), 0) for q, offset in end.items()))


def _initial(text: Any) -> dict[tuple[str, str, str], int]:
    """Where queues begin that are new in a batch."""
    topics = json.loads(text) if isinstance(text, str) else text
    return _offsets(topics.get(INITIAL)) or {}


def _offsets(text: Any) -> dict[tuple[str, str, str], int] | None:
    """Offsets by queue; None if they are not those of format `penstock`."""
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
