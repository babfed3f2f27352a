"""Many small files of a closed date become few large ones, safely.

Files of one partition are read, written below staging as one file, and counted. Then a journal is
made, whole or not at all; the new file is renamed to where readers see it, the old ones are
deleted, and the journal goes. Whoever finds a journal finishes it: if the new file is not in place
yet and all old ones are, by going on; if old ones are missing before the new one is in place, then
another compaction was quicker, and this one is given up. There is one journal for a partition at a
time.

Who lists a partition between the rename and the deletions sees its messages twice, and then most
likely fails to open an old file: no plain directory can change many files at once. Dates that are
over are few and compacted once, so run it when nobody reads them.

Only files of batches that are committed are touched, and none that are not a lake's.
"""

import hashlib
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import LakeDamaged
from penstock.spark.pipelines.lake.lake_files import File, Files, HadoopFiles
from penstock.spark.pipelines.lake.publication import ROOM, STAGING, TABLES, Ledger, batch_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOURNALS: Final = f"{ROOM}/compaction"
LARGE_BYTES: Final = 128 << 20
"""What a file should come to: one of Spark's read tasks."""
_ABANDONED_SECONDS: Final = 24 * 3600
"""What a compaction has written and not swapped in by then is of one that was killed."""
_STAGED: Final = re.compile(rf"{STAGING}/compact-[0-9a-f]{{12}}-(\d+)")
_COMPACTED: Final = re.compile(r"compact-[0-9a-f]{12}\.parquet")
_PARTITION: Final = re.compile(rf"(?:{'|'.join(TABLES)})/date=(\d{{4}}-\d\d-\d\d)/topic=[^/]+")


class Swap(msgspec.Struct, frozen=True):
    """One new file in the place of many."""

    inputs: tuple[File, ...]
    staged: str
    final: str
    size: int


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction has done."""

    files_before: int = 0
    files_after: int = 0
    size: int = 0

    def __str__(self) -> str:
        return f"{self.files_before:,} files became {self.files_after:,} ({self.size:,} bytes)"


def compact_lake(
    spark: "SparkSession",
    lake: str,
    *,
    before: date | None = None,
    large_bytes: int = LARGE_BYTES,
    compression: str = "snappy",
) -> Compacted:
    """Compact all dates before this one (before today, UTC); a query may go on meanwhile."""
    files = HadoopFiles(spark, lake)
    settle_swaps(files)
    # The marks first: what is found later may be of batches that are not complete.
    newest = Ledger(files).newest()
    listed = [file for table in TABLES for file in files.walk(table)]
    before = before or datetime.now(UTC).date()
    session = spark.newSession()
    session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    session.conf.set("spark.sql.parquet.compression.codec", compression)
    done = Compacted()
    for group in groups(listed, newest, before=before, large_bytes=large_bytes):
        if swap := _merge(session, files, group):
            done = Compacted(
                done.files_before + len(group), done.files_after + 1, done.size + swap.size
            )
    return done


def groups(
    listed: Iterable[File], newest: Mapping[str, int], *, before: date, large_bytes: int
) -> Iterator[tuple[File, ...]]:
    """Small files that should become one: of one partition, closed, and committed."""
    partitions: dict[str, list[File]] = {}
    for file in listed:
        folder, _, name = file.path.rpartition("/")
        partition = _PARTITION.fullmatch(folder)
        if partition is None or not _is_before(partition[1], before):
            continue
        owner = batch_of(file)
        is_ours = _COMPACTED.fullmatch(name) or (owner and owner[1] <= newest.get(owner[0], -1))
        if is_ours and file.size <= large_bytes // 2:
            partitions.setdefault(folder, []).append(file)
    for small in partitions.values():
        yield from _packed(small, large_bytes)


def settle_swaps(files: Files) -> None:
    """Finish or give up what a compaction that was killed has left."""
    for path, _ in files.walk(JOURNALS):
        if path.endswith(".json"):
            try:
                swap = msgspec.json.decode(files.read(path), type=Swap)
            except msgspec.DecodeError as error:
                raise LakeDamaged(f"{path} can't be read: {error}") from None
            finish(files, swap)
    for folder in {"/".join(path.split("/")[:3]) for path, _ in files.walk(STAGING)}:
        staged = _STAGED.fullmatch(folder)
        if staged and time.time() - int(staged[1]) > _ABANDONED_SECONDS:
            files.remove(folder)


def swap_in(files: Files, swap: Swap) -> bool:
    """Put the new file in place of the old ones; False if somebody else is at this partition."""
    done = files.write_new(_journal(swap), msgspec.json.encode(swap)) and finish(files, swap)
    if not done:
        files.remove(swap.staged)
    return done


def finish(files: Files, swap: Swap) -> bool:
    """Carry out a swap whose journal stands, from wherever it was; False if it is given up."""
    final = files.size(swap.final)
    if final != swap.size:
        whole = all(files.size(old.path) == old.size for old in swap.inputs)
        if not whole or files.size(swap.staged) != swap.size:
            files.remove(swap.staged)
            files.remove(_journal(swap))
            return False
        if final is not None:  # a copy that was cut short, on stores that copy to rename
            files.remove(swap.final)
        files.move(swap.staged, swap.final)
    for old in swap.inputs:
        files.remove(old.path)
    files.remove(swap.staged)
    files.remove(_journal(swap))
    return True


def _merge(session: "SparkSession", files: HadoopFiles, group: tuple[File, ...]) -> Swap | None:
    """Write a group as one file and swap it in."""
    name = f"compact-{uuid.uuid4().hex[:12]}"
    folder = f"{STAGING}/{name}-{int(time.time())}"
    reader = session.read.option("mergeSchema", "true")
    old = reader.parquet(*(_literal(files.url(file.path)) for file in group))
    old.coalesce(1).write.parquet(files.url(folder))
    written = [file for file in files.walk(folder) if file.path.endswith(".parquet")]
    rows, there = _rows(old), reader.parquet(_literal(files.url(folder))).count()
    if len(written) != 1 or rows != there:
        raise LakeDamaged(
            f"{rows:,} rows of {group[0].path} and others became {there:,} in {len(written)} files",
            hint="nothing was changed; look at the files, and tell us",
        )
    final = group[0].path.rpartition("/")[0] + f"/{name}.parquet"
    swap = Swap(group, written[0].path, final, written[0].size)
    done = swap_in(files, swap)
    files.remove(folder)
    return swap if done else None


def _rows(old: "DataFrame") -> int:
    """How many rows the files have, from the place of the last one in each: a file that was read
    twice counts once."""
    from pyspark.sql import functions as f

    last = old.groupBy("_metadata.file_path").agg(f.max("_metadata.row_index").alias("last"))
    counted = last.agg(f.sum(f.col("last") + 1)).first()
    return int(counted[0] or 0) if counted else 0


def _literal(path: str) -> str:
    """Readers of Spark take names for patterns; a lake may have brackets in its own."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)


def _packed(small: list[File], large_bytes: int) -> Iterator[tuple[File, ...]]:
    """In the order of their names, up to the size of a large file; single ones stay as they are."""
    group: list[File] = []
    size = 0
    for file in sorted(small):
        if group and size + file.size > large_bytes:
            if len(group) > 1:
                yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file.size
    if len(group) > 1:
        yield tuple(group)


def _is_before(text: str, before: date) -> bool:
    try:
        return date.fromisoformat(text) < before
    except ValueError:
        return False


def _journal(swap: Swap) -> str:
    """One name for each partition, so that two compactions can't both have it."""
    partition = swap.final.rpartition("/")[0]
    return f"{JOURNALS}/{hashlib.sha256(partition.encode()).hexdigest()[:16]}.json"
