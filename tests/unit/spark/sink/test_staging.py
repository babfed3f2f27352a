"""Parquet files that tasks write themselves."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.arrow.message_schema import arrow_schema
from penstock.spark.sink import staging
from penstock.spark.sink.staging import StagedFiles, escaped, files_of

COLUMNS = ("date", "topic", "queue_offset", "body", "properties", "store_timestamp")


def batch(topic: str, *days: int) -> pa.RecordBatch:
    """A message of each day of August."""
    rows = [
        {
            "date": date(2026, 8, day), "topic": topic, "queue_offset": number,
            "body": f"{topic}-{number}".encode(), "properties": [("KEYS", "k")],
            "store_timestamp": datetime(2026, 8, day, tzinfo=UTC),
        }
        for number, day in enumerate(days)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema(COLUMNS))


def read(folder: Path) -> dict[str, list[int]]:
    """The offsets in each directory."""
    found: dict[str, list[int]] = {}
    for path in sorted((folder / "data").rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        assert table.schema.names == ["queue_offset", "body", "properties", "store_timestamp"]
        place = str(path.parent.relative_to(folder / "data"))
        found.setdefault(place, []).extend(table["queue_offset"].to_pylist())
    return found


def test_files_are_split_by_date_and_topic(tmp_path: Path) -> None:
    with StagedFiles(str(tmp_path), "snappy") as files:
        files.add(batch("orders", 1, 1))
        files.add(batch("orders", 1, 2, 1))
        files.add(batch("%DLQ%a", 2))
        told = files.finish()
    assert read(tmp_path) == {
        "date=2026-08-01/topic=orders": [0, 1, 0, 2],
        "date=2026-08-02/topic=orders": [1],
        "date=2026-08-02/topic=%25DLQ%25a": [0],
    }
    rows = files_of(told.to_pylist(), str(tmp_path))
    assert sorted(count for _, _, count in rows) == [1, 1, 4]
    for path, size, _ in rows:
        assert path.startswith("data/date=2026-08-0")
        assert (tmp_path / path).stat().st_size == size


def test_row_group_is_written_when_it_is_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = batch("orders", 1, 1, 1)
    monkeypatch.setattr(staging, "GROUP_BYTES", 2 * one.nbytes - 200)
    with StagedFiles(str(tmp_path), "zstd") as files:
        for _ in range(5):
            files.add(one)
        files.finish()
    (path,) = tmp_path.rglob("*.parquet")
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(n).num_rows for n in range(3)] == [6, 6, 3]
    offset, body = (file.metadata.row_group(0).column(n) for n in (0, 1))
    assert offset.statistics.max == 2
    assert body.statistics is None
    assert body.compression == "ZSTD"


def test_number_of_open_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "FILES_OPEN_MAX", 3)
    with StagedFiles(str(tmp_path), "none") as files:
        for _ in range(2):
            files.add(batch("orders", 1, 2, 3, 4))
            assert len(files._open) <= 3
        told = files.finish()
    assert sum(told.column("rows").to_pylist()) == 8
    assert sum(map(len, read(tmp_path).values())) == 8


def test_task_without_rows_writes_no_file(tmp_path: Path) -> None:
    with StagedFiles(str(tmp_path), "snappy") as files:
        assert files.finish().num_rows == 0
    assert list(tmp_path.iterdir()) == []


def test_failed_task_closes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "GROUP_BYTES", 1)
    with StagedFiles(str(tmp_path), "snappy") as files:
        files.add(batch("orders", 1))
        file = files._open[date(2026, 8, 1), "orders"]
    assert not file._writer.is_open
    assert len(list(tmp_path.rglob("*.parquet"))) == 1


@pytest.mark.parametrize(
    ("topic", "path"),
    [
        ("orders", "orders"),
        ("%RETRY%g", "%25RETRY%25g"),
        ("a/b=c", "a%2Fb%3Dc"),
        ("a-b_c|", "a-b_c|"),
    ],
)
def test_topics_are_escaped_in_paths(topic: str, path: str) -> None:
    assert escaped(topic) == path
