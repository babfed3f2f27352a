"""The compaction of a lake, with a kill before each change of a file."""

import time
from datetime import date

import pytest

from penstock.errors import LakeDamaged
from penstock.spark.pipelines.lake.batch_commits import STAGING
from penstock.spark.pipelines.lake.lake_compaction import (
    JOURNALS,
    FileMerge,
    finish_merge,
    merge_groups,
    recover_merges,
    replace_files,
)
from penstock.spark.pipelines.lake.lake_files import File
from tests.unit.spark.pipelines.lake.lake_kit import (
    DAY,
    QUERY,
    Killed,
    MemoryFiles,
    kills,
    visible_files,
)

OTHER = "6f2b7a34-0000-4000-8000-000000000002"


def staged_merge(
    files: MemoryFiles, name: str = "compact-0123456789ab", since: int = 0
) -> FileMerge:
    """A merge of three files that Spark has written to the staging directory."""
    inputs = []
    for i, row in enumerate((b"one", b"two", b"three")):
        path = f"{DAY}/batch-{i:010}-00000-{QUERY}.parquet"
        files.files[path] = row
        inputs.append(File(path, len(row)))
    staged = f"{STAGING}/{name}-{since}/part-0.parquet"
    files.files[staged] = b"one,two,three"
    return FileMerge(tuple(inputs), staged, f"{DAY}/{name}.parquet", len(b"one,two,three"))


def rows_of(files: MemoryFiles) -> list[bytes]:
    return sorted(row for data in visible_files(files) for row in data.split(b","))


@pytest.mark.parametrize("copies", [False, True])
def test_a_compaction_loses_no_rows_wherever_it_is_killed(copies: bool) -> None:
    moment = 0
    while True:
        files = MemoryFiles(copies=copies)
        merge = staged_merge(files)
        files.changes_left = moment
        try:
            assert replace_files(files, merge)
            break
        except Killed:
            files.changes_left = -1
        assert set(rows_of(files)) == {b"one", b"two", b"three"}
        recover_merges(files)
        assert rows_of(files) == [b"one", b"three", b"two"]
        assert files.walk("_penstock") == []
        moment += 1
    assert moment >= 6
    assert visible_files(files) == [b"one,two,three"]


def test_a_compaction_is_completed_after_repeated_kills() -> None:
    files = MemoryFiles()
    merge = staged_merge(files)
    for _ in kills(lambda: recover_merges(files) or merge_again(files, merge), files):
        assert set(rows_of(files)) == {b"one", b"two", b"three"}
    assert rows_of(files) == [b"one", b"three", b"two"]


def merge_again(files: MemoryFiles, merge: FileMerge) -> None:
    if merge.staged in files.files:
        replace_files(files, merge)


def test_one_of_two_compactions_of_a_partition_is_abandoned() -> None:
    files = MemoryFiles()
    first, second = staged_merge(files), staged_merge(files, "compact-ba9876543210")
    files.changes_left = 1  # after its journal is written
    with pytest.raises(Killed):
        replace_files(files, first)
    files.changes_left = -1
    assert not replace_files(files, second), "another compaction has the partition"
    recover_merges(files)
    third = second  # its files were read before the first one was finished
    files.files[third.staged] = b"one,two,three"
    assert not replace_files(files, third), "its input files are deleted"
    assert visible_files(files) == [b"one,two,three"]
    assert files.walk(JOURNALS) == []


def test_a_compaction_does_not_disturb_a_running_one() -> None:
    files = MemoryFiles()
    merge = staged_merge(files, since=int(time.time()))
    recover_merges(files)
    assert replace_files(files, merge)
    assert visible_files(files) == [b"one,two,three"]


def test_a_compaction_without_its_staged_file_is_abandoned() -> None:
    files = MemoryFiles()
    merge = staged_merge(files)
    del files.files[merge.staged]
    assert not finish_merge(files, merge)
    assert rows_of(files) == [b"one", b"three", b"two"]


def test_a_damaged_journal_is_named_in_the_error() -> None:
    files = MemoryFiles()
    files.files[f"{JOURNALS}/x.json"] = b"{"
    with pytest.raises(LakeDamaged, match=r"x\.json can't be read"):
        recover_merges(files)


def batch_file(day: str, batch: int, size: int, query: str = QUERY) -> File:
    return File(f"data/date={day}/topic=orders/batch-{batch:010}-00000-{query}.parquet", size)


def grouped(*listed: File, before: date = date(2026, 8, 3)) -> list[tuple[int, ...]]:
    found = merge_groups(listed, {QUERY: 5}, before=before, large_bytes=100)
    return [tuple(file.size for file in group) for group in found]


def test_small_files_of_closed_dates_and_committed_batches_are_compacted() -> None:
    assert grouped(batch_file("2026-08-01", 0, 10), batch_file("2026-08-01", 1, 11)) == [(10, 11)]
    assert grouped(batch_file("2026-08-03", 0, 10), batch_file("2026-08-03", 1, 11)) == []
    assert grouped(batch_file("2026-08-01", 5, 10), batch_file("2026-08-01", 6, 11)) == []
    assert grouped(batch_file("2026-08-01", 0, 10), batch_file("2026-08-01", 0, 11, OTHER)) == []
    assert grouped(batch_file("2026-08-01", 0, 10), batch_file("2026-08-02", 1, 11)) == []
    assert grouped(batch_file("2026-13-01", 0, 10), batch_file("2026-13-01", 1, 11)) == []


def test_large_files_and_foreign_files_are_not_compacted() -> None:
    assert grouped(batch_file("2026-08-01", 0, 51), batch_file("2026-08-01", 1, 10)) == []
    foreign = [File("data/date=2026-08-01/topic=orders/mine.parquet", 1),
               File("data/date=2026-08-01/topic=orders/yours.parquet", 1),
               File("data/README", 1)]  # fmt: skip
    assert grouped(*foreign) == []


def test_groups_are_limited_to_the_target_size() -> None:
    assert grouped(*(batch_file("2026-08-01", i, 40) for i in range(6))) == [(40, 40)] * 3
    compacted = File("data/date=2026-08-01/topic=orders/compact-0123456789ab.parquet", 45)
    assert grouped(compacted, batch_file("2026-08-01", 0, 10)) == [(10, 45)]
