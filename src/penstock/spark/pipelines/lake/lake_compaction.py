"""Compacts a lake: merges the small files of past dates into large ones.

Files of one partition are merged into one file in the staging directory, and their rows are
counted. Then a journal is created by one rename, the new file is renamed to its final path, the old
files are deleted, and the journal is deleted. A compaction that finds a journal finishes it: if all
old files exist, it continues. If old files are missing before the new file is in place, another
compaction has replaced them, and this one is abandoned. A partition has one journal at a time.

A reader that lists a partition between the rename and the deletions sees its messages twice, and
then probably fails to open an old file, because a directory can't change several files at once.
Past dates are compacted once, so run a compaction when they are not read.

Only files of committed batches are merged. Files that the lake has not written are left alone.
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
from penstock.spark.pipelines.lake.batch_commits import (
    METADATA_DIR,
    STAGING,
    TABLES,
    BatchCommitter,
    batch_of,
)
from penstock.spark.pipelines.lake.lake_files import File, HadoopFiles, LakeFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOURNALS: Final = f"{METADATA_DIR}/compaction"
LARGE_BYTES: Final = 128 << 20
"""The target size of a file: the input of one of Spark's read tasks."""
_ABANDONED_SECONDS: Final = 24 * 3600
"""After this time the staged file of an unfinished compaction is removed."""
_STAGED: Final = re.compile(rf"{STAGING}/compact-[0-9a-f]{{12}}-(\d+)")
_COMPACTED: Final = re.compile(r"compact-[0-9a-f]{12}\.parquet")
_PARTITION: Final = re.compile(rf"(?:{'|'.join(TABLES)})/date=(\d{{4}}-\d\d-\d\d)/topic=[^/]+")


class FileMerge(msgspec.Struct, frozen=True):
    """The replacement of several files by one; the content of a journal."""

    inputs: tuple[File, ...]
    staged: str
    final: str
    size: int


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The number and the size of the merged files."""

    files_before: int = 0
    files_after: int = 0
    size: int = 0

    def __str__(self) -> str:
        return f"{self.files_before:,} files merged into {self.files_after:,} ({self.size:,} bytes)"


def compact_lake(
    spark: "SparkSession",
    lake: str,
    *,
    before: date | None = None,
    large_bytes: int = LARGE_BYTES,
    compression: str = "snappy",
) -> CompactionResult:
    """Compact all dates before `before` (default: today, UTC); queries may continue to write."""
    files = HadoopFiles(spark, lake)
    recover_merges(files)
    # List the commits first: files that appear later may belong to unfinished batches.
    last_batches = BatchCommitter(files).last_batches()
    listed = [file for table in TABLES for file in files.walk(table)]
    before = before or datetime.now(UTC).date()
    session = spark.newSession()
    session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    session.conf.set("spark.sql.parquet.compression.codec", compression)
    result = CompactionResult()
    for group in merge_groups(listed, last_batches, before=before, large_bytes=large_bytes):
        if merge := _merge(session, files, group):
            result = CompactionResult(
                result.files_before + len(group), result.files_after + 1, result.size + merge.size
            )
    return result


def merge_groups(
    listed: Iterable[File], last_batches: Mapping[str, int], *, before: date, large_bytes: int
) -> Iterator[tuple[File, ...]]:
    """Groups of small committed files, each of one partition of a past date."""
    partitions: dict[str, list[File]] = {}
    for file in listed:
        folder, _, name = file.path.rpartition("/")
        partition = _PARTITION.fullmatch(folder)
        if partition is None or not _is_before(partition[1], before):
            continue
        batch = batch_of(file)
        is_committed = batch is not None and batch[1] <= last_batches.get(batch[0], -1)
        if (is_committed or _COMPACTED.fullmatch(name)) and file.size <= large_bytes // 2:
            partitions.setdefault(folder, []).append(file)
    for small in partitions.values():
        yield from _pack(small, large_bytes)


def recover_merges(files: LakeFiles) -> None:
    """Finish or abandon merges that a killed compaction has left."""
    for path, _ in files.walk(JOURNALS):
        if path.endswith(".json"):
            try:
                merge = msgspec.json.decode(files.read(path), type=FileMerge)
            except msgspec.DecodeError as error:
                raise LakeDamaged(f"{path} can't be read: {error}") from None
            finish_merge(files, merge)
    for folder in {"/".join(path.split("/")[:3]) for path, _ in files.walk(STAGING)}:
        staged = _STAGED.fullmatch(folder)
        if staged and time.time() - int(staged[1]) > _ABANDONED_SECONDS:
            files.remove(folder)


def replace_files(files: LakeFiles, merge: FileMerge) -> bool:
    """Replace the old files by the new one; False if another compaction has the partition."""
    journal = msgspec.json.encode(merge)
    done = files.write_new(_journal_path(merge), journal) and finish_merge(files, merge)
    if not done:
        files.remove(merge.staged)
    return done


def finish_merge(files: LakeFiles, merge: FileMerge) -> bool:
    """Continue a merge that has a journal, from any step; False if it is abandoned."""
    final = files.size(merge.final)
    if final != merge.size:
        have_inputs = all(files.size(old.path) == old.size for old in merge.inputs)
        if not have_inputs or files.size(merge.staged) != merge.size:
            files.remove(merge.staged)
            files.remove(_journal_path(merge))
            return False
        if final is not None:  # an interrupted copy, on stores that copy to rename
            files.remove(merge.final)
        files.move(merge.staged, merge.final)
    for old in merge.inputs:
        files.remove(old.path)
    files.remove(merge.staged)
    files.remove(_journal_path(merge))
    return True


def _merge(
    session: "SparkSession", files: HadoopFiles, group: tuple[File, ...]
) -> FileMerge | None:
    """Write the rows of a group to one file, and replace the group by it."""
    name = f"compact-{uuid.uuid4().hex[:12]}"
    folder = f"{STAGING}/{name}-{int(time.time())}"
    reader = session.read.option("mergeSchema", "true")
    old = reader.parquet(*(_literal(files.url(file.path)) for file in group))
    old.coalesce(1).write.parquet(files.url(folder))
    written = [file for file in files.walk(folder) if file.path.endswith(".parquet")]
    rows, merged = _count_rows(old), reader.parquet(_literal(files.url(folder))).count()
    if len(written) != 1 or rows != merged:
        raise LakeDamaged(
            f"{rows:,} rows of {group[0].path} and other files became {merged:,} rows in "
            f"{len(written)} files",
            hint="nothing was changed; check the files and report this as a bug",
        )
    final = group[0].path.rpartition("/")[0] + f"/{name}.parquet"
    merge = FileMerge(group, written[0].path, final, written[0].size)
    done = replace_files(files, merge)
    files.remove(folder)
    return merge if done else None


def _count_rows(old: "DataFrame") -> int:
    """The number of rows, from the last row index of each file: no file is counted twice."""
    from pyspark.sql import functions as f

    last = old.groupBy("_metadata.file_path").agg(f.max("_metadata.row_index").alias("last"))
    counted = last.agg(f.sum(f.col("last") + 1)).first()
    return int(counted[0] or 0) if counted else 0


def _literal(path: str) -> str:
    """Escape a path, because Spark's readers take paths for patterns."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)


def _pack(small: list[File], large_bytes: int) -> Iterator[tuple[File, ...]]:
    """Group files by name up to the target size; single files are left out."""
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


def _journal_path(merge: FileMerge) -> str:
    """One path per partition, so that two compactions can't change the same partition."""
    partition = merge.final.rpartition("/")[0]
    return f"{JOURNALS}/{hashlib.sha256(partition.encode()).hexdigest()[:16]}.json"
