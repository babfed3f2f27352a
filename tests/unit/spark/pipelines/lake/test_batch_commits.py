"""The commit of a batch, with a kill before each change of a file."""

import pytest

from penstock.errors import LakeDamaged
from penstock.spark.pipelines.lake.batch_commits import COMMITS_KEPT, STAGING, BatchCommitter
from tests.unit.spark.pipelines.lake.lake_kit import (
    QUERY,
    Killed,
    MemoryFiles,
    commit,
    kills,
    run_batch,
    stage,
    visible_files,
)


@pytest.mark.parametrize("copies", [False, True])
def test_a_batch_is_committed_once_wherever_it_is_killed(copies: bool) -> None:
    rows = [b"one", b"two", b"three"]
    moment = 0
    while True:
        files = MemoryFiles(copies=copies)
        run_batch(files, 6, [b"before"])
        files.changes_left = moment
        try:
            run_batch(files, 7, rows)
            break
        except Killed:
            files.changes_left = -1
        assert set(visible_files(files)) <= {b"before", *rows}
        run_batch(files, 7, rows)
        assert visible_files(files) == sorted([b"before", *rows])
        assert files.walk(STAGING) == []
        assert BatchCommitter(files).last_batches() == {QUERY: 7}
        moment += 1
    assert moment >= 8


@pytest.mark.parametrize("copies", [False, True])
def test_a_batch_is_committed_once_after_repeated_kills(copies: bool) -> None:
    files = MemoryFiles(copies=copies)
    rows = [b"one", b"two", b"three"]
    for _ in kills(lambda: run_batch(files, 0, rows), files):
        assert len(visible_files(files)) == len(set(visible_files(files)))
    assert visible_files(files) == sorted(rows)


def test_a_committed_batch_is_not_written_again() -> None:
    files = MemoryFiles()
    run_batch(files, 0, [b"one"])
    run_batch(files, 0, [b"never written"])
    assert visible_files(files) == [b"one"]


def test_files_of_a_killed_driver_are_not_committed_later() -> None:
    files = MemoryFiles()
    committer = BatchCommitter(files)
    killed = committer.new_attempt(QUERY, 0, 1)
    stage(files, killed, [b"one"])
    assert not committer.finish(QUERY, 0)
    attempt = committer.new_attempt(QUERY, 0, 2)
    stage(files, attempt, [b"one"])
    stage(files, killed, [b"one"])
    commit(files, 0, attempt)
    assert visible_files(files) == [b"one"]
    stage(files, killed, [b"one"])
    others = [
        f"{STAGING}/{QUERY}-1/000003-0123456789ab/data/date=2026-08-01/topic=x/part-0.parquet",
        f"{STAGING}/compact-0123456789ab-1785600000/part-0.parquet",
    ]
    files.files |= dict.fromkeys(others, b"other")
    committer.remove_leftovers(QUERY, 3)
    assert [path for path, _ in files.walk(STAGING)] == others


def test_a_missing_staged_file_is_reported_as_damage() -> None:
    files = MemoryFiles()
    committer = BatchCommitter(files)
    attempt = committer.new_attempt(QUERY, 0, 1)
    stage(files, attempt, [b"one", b"two"])
    files.changes_left = 2
    with pytest.raises(Killed):
        commit(files, 0, attempt)
    files.changes_left = -1
    for path, _ in files.walk(attempt):
        del files.files[path]
    with pytest.raises(LakeDamaged, match="should be renamed"):
        committer.finish(QUERY, 0)


def test_a_batch_that_another_run_commits_is_refused() -> None:
    files = MemoryFiles()
    committer = BatchCommitter(files)
    attempt = committer.new_attempt(QUERY, 0, 1)
    stage(files, attempt, [b"one"])
    files.files[f"_penstock/manifests/{QUERY}-0.json"] = b"{}"
    with pytest.raises(LakeDamaged, match="another run is committing"):
        commit(files, 0, attempt)
    with pytest.raises(LakeDamaged, match="can't be read"):
        committer.finish(QUERY, 0)


def test_only_the_latest_commit_markers_are_kept() -> None:
    files = MemoryFiles()
    for number in range(COMMITS_KEPT + 5):
        run_batch(files, number, [str(number).encode()])
    assert len(files.walk("_penstock/commits")) == COMMITS_KEPT
    last = BatchCommitter(files).last_batch(QUERY)
    assert last is not None
    assert last.offsets == (f"offsets-{COMMITS_KEPT + 4}",)
