"""The ownership of a lake, with kills and concurrent runs."""

import json
from collections.abc import Callable

import pytest

from penstock.errors import LakeDamaged, LakeRefused, PipelineFailed
from penstock.spark.pipelines.lake.batch_commits import BatchCommitter
from penstock.spark.pipelines.lake.lake_owner import OWNERS_KEPT, LakeOwner
from tests.unit.spark.pipelines.lake.lake_kit import (
    DAY,
    QUERY,
    Killed,
    MemoryFiles,
    commit,
    kills,
    lease,
    spark_ran,
    stage,
    used_lake,
    visible_files,
)


def test_a_new_lake_and_its_checkpoint_have_the_same_query_wherever_they_are_killed() -> None:
    lake, checkpoint = MemoryFiles(), MemoryFiles()
    owners: list[LakeOwner] = []
    for files in (checkpoint, lake):
        for _ in kills(lambda: owners.append(lease(lake, checkpoint).acquire(adopt=False)), files):
            pass
    assert len({owner.query for owner in owners}) == 1
    assert json.loads(checkpoint.files["metadata"])["id"] == owners[0].query


def test_the_same_checkpoint_continues() -> None:
    lake, checkpoint, owner = used_lake()
    for adopt in (False, True):
        again = lease(lake, checkpoint).acquire(adopt=adopt)
        assert (again.query, again.start) == (owner.query, owner.start)


def test_only_the_latest_owner_files_are_kept() -> None:
    lake, checkpoint, _ = used_lake()
    for _ in range(OWNERS_KEPT + 5):
        owner = lease(lake, checkpoint).acquire(adopt=False)
    assert len(lake.walk("_penstock/lake")) == OWNERS_KEPT
    lease(lake, checkpoint).check(owner)


def test_another_checkpoint_is_refused_or_adopts_the_lake_where_it_ends() -> None:
    lake, old, owner = used_lake()
    new = MemoryFiles()
    with pytest.raises(LakeRefused, match="belongs to the checkpoint the-checkpoint"):
        lease(lake, new).acquire(adopt=False)
    adopted = lease(lake, new).acquire(adopt=True)
    assert adopted.query != QUERY
    assert adopted.start == ("offsets-1",)
    again = lease(lake, new).acquire(adopt=False)  # before and after Spark has started
    assert (again.query, again.start) == (adopted.query, adopted.start)
    with pytest.raises(LakeRefused, match="taken over the lake"):
        lease(lake, old).check(owner)
    with pytest.raises(LakeRefused, match="belongs to"):
        lease(lake, old).acquire(adopt=False)
    with pytest.raises(LakeRefused, match="is not a new checkpoint"):
        lease(lake, old).acquire(adopt=True)


def test_a_half_committed_batch_is_finished_before_a_lake_is_adopted() -> None:
    lake, _, _ = used_lake()
    committer = BatchCommitter(lake)
    attempt = committer.new_attempt(QUERY, 2, 1)
    stage(lake, attempt, [b"three", b"four"])
    lake.changes_left = 2
    with pytest.raises(Killed):
        commit(lake, 2, attempt)
    lake.changes_left = -1
    assert lease(lake, MemoryFiles()).acquire(adopt=True).start == ("offsets-2",)
    assert visible_files(lake) == sorted([b"one", b"two", b"three", b"four"])


def test_a_killed_adoption_can_be_repeated() -> None:
    lake, _, _ = used_lake()
    new = MemoryFiles()
    for files in (new, lake):
        for _ in kills(lambda: lease(lake, new).acquire(adopt=True) and None, files):
            pass
    assert lease(lake, new).acquire(adopt=False).start == ("offsets-1",)


def test_a_deleted_lake_and_an_old_copy_are_refused() -> None:
    lake, checkpoint, _ = used_lake()
    with pytest.raises(LakeRefused, match="has completed batches up to 1"):
        lease(MemoryFiles(), checkpoint).acquire(adopt=False)
    spark_ran(checkpoint, 2)
    with pytest.raises(LakeRefused, match="older copy of the lake"):
        lease(lake, checkpoint).acquire(adopt=False)


def test_an_old_copy_of_the_checkpoint_is_refused() -> None:
    lake, checkpoint, _ = used_lake()
    for path in (
        "offsets/1",
        "commits/1",
    ):  # Spark would make another batch 1, which counts as committed
        del checkpoint.files[path]
    with pytest.raises(LakeRefused, match="is at batch 1, which the checkpoint"):
        lease(lake, checkpoint).acquire(adopt=False)
    checkpoint.files["offsets/1"] = b"v1\n{}\nelsewhere"
    with pytest.raises(LakeRefused, match="does not have: an older copy of the checkpoint"):
        lease(lake, checkpoint).acquire(adopt=False)


# --- concurrent runs -----------------------------------------------------------------------------


def on_call(number: int, action: Callable[[], None]) -> Callable[[], None]:
    """A function that runs `action` when it is called for the given time, counted from 0."""
    calls_left = [number]

    def call() -> None:
        if calls_left[0] == 0:
            action()
        calls_left[0] -= 1

    return call


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("moment", range(6))
def test_a_run_that_has_lost_the_lake_commits_nothing(adopt: bool, moment: int) -> None:
    """Another run takes over the lake between any two steps of the first one."""
    lake, checkpoint, owner = used_lake()
    other = MemoryFiles() if adopt else checkpoint
    committer, rows = BatchCommitter(lake), [b"three", b"four"]
    taken: list[LakeOwner] = []

    def take_over() -> None:
        taken.append(lease(lake, other).acquire(adopt=adopt))
        committer.remove_leftovers(taken[0].query, taken[0].number)

    def check_owner() -> None:
        before()
        lease(lake, checkpoint).check(owner)
        after()

    before, after = on_call(moment - 2, take_over), on_call(moment - 4, take_over)
    spark_plans(checkpoint, 2)
    attempt = committer.new_attempt(QUERY, 2, owner.number)
    stage(lake, attempt, rows[:1] if moment == 0 else rows)
    if moment < 2:
        take_over()  # moment 0: the second file is written after the removal
        stage(lake, attempt, rows)
        if moment == 0:
            del lake.files[f"{attempt}/data/date=2026-08-01/topic=orders/part-0.parquet"]
    try:
        commit(lake, 2, attempt, check_owner)
    except (LakeRefused, PipelineFailed):  # the other run was faster
        assert taken
    if not taken:
        take_over()
    # The other run repeats the batch, or starts where the lake ends.
    if adopt:
        if taken[0].start != ("offsets-2",):
            assert taken[0].start == ("offsets-1",)
            new = committer.new_attempt(taken[0].query, 0, taken[0].number)
            stage(lake, new, rows)
            committer.commit(taken[0].query, 0, new, ("offsets-2",), lambda: None)
        lease(lake, other).check(taken[0])
    elif not committer.finish(QUERY, 2):
        new = committer.new_attempt(QUERY, 2, taken[0].number)
        stage(lake, new, rows)
        commit(lake, 2, new)
    assert visible_files(lake) == sorted([b"one", b"two", *rows])


def spark_plans(checkpoint: MemoryFiles, batch: int) -> None:
    checkpoint.files[f"offsets/{batch}"] = f"v1\n{{}}\noffsets-{batch}".encode()


def test_one_of_two_simultaneous_starts_owns_the_lake() -> None:
    lake, checkpoint, _ = used_lake()
    first = lease(lake, checkpoint).acquire(adopt=False)
    path = lake.walk("_penstock/lake")[-1].path
    del lake.files[path]  # the second run did not see it, and its rename replaces it
    second = lease(lake, checkpoint).acquire(adopt=False)
    assert first.number == second.number
    lease(lake, checkpoint).check(second)
    with pytest.raises(LakeRefused, match="another run"):
        lease(lake, checkpoint).check(first)


def test_a_refused_run_does_not_change_the_lake() -> None:
    lake, _, _ = used_lake()
    attempt = BatchCommitter(lake).new_attempt(QUERY, 2, 1)
    stage(lake, attempt, [b"three", b"four"])
    lake.changes_left = 2
    with pytest.raises(Killed):
        commit(lake, 2, attempt)
    lake.changes_left = -1
    before = dict(lake.files)
    with pytest.raises(LakeRefused, match="belongs to the checkpoint"):
        lease(lake, MemoryFiles()).acquire(adopt=False)
    assert lake.files == before


def test_offsets_of_topics_survive_a_query_that_does_not_read_them() -> None:
    lake, checkpoint = MemoryFiles(), MemoryFiles()
    ends = ['{"a": {"b": {"0": 5}}, "c": {"b": {"0": 7}}}', '{"a": {"b": {"0": 9}}}']
    for end in ends:
        owner = lease(lake, checkpoint).acquire(adopt=True)
        attempt = BatchCommitter(lake).new_attempt(owner.query, 0, owner.number)
        stage(lake, attempt, [end.encode()])
        BatchCommitter(lake).commit(owner.query, 0, attempt, (end,), lambda: None)
        checkpoint = MemoryFiles()
    [start] = lease(lake, checkpoint).acquire(adopt=True).start
    assert json.loads(start) == {"a": {"b": {"0": 9}}, "c": {"b": {"0": 7}}}


def test_a_directory_with_other_files_is_refused() -> None:
    lake = MemoryFiles()
    lake.files[f"{DAY}/mine.parquet"] = b"mine"
    with pytest.raises(LakeRefused, match=r"has not written.*mine\.parquet"):
        lease(lake, MemoryFiles()).acquire(adopt=False)


def test_columns_can_be_added_but_not_changed() -> None:
    lake, checkpoint, owner = used_lake()
    current = lease(lake, checkpoint)
    owner = current.add_columns(owner, {"topic": "string", "amount": "double"})
    assert current.add_columns(owner, {"topic": "string"}) == owner
    more = current.add_columns(owner, {"currency": "string"})
    assert more.columns == {"topic": "string", "amount": "double", "currency": "string"}
    assert current.owner() == more
    with pytest.raises(
        LakeRefused, match="amount double of the lake the-lake would become amount int"
    ):
        current.add_columns(more, {"amount": "int"})
    with pytest.raises(LakeRefused, match="would become Amount double"):
        current.add_columns(more, {"Amount": "double"})


def test_a_damaged_metadata_file_is_named_in_the_error() -> None:
    lake, checkpoint, _ = used_lake()
    checkpoint.files["metadata"] = b"{}"
    with pytest.raises(LakeDamaged, match="metadata is not a metadata file of Spark"):
        lease(lake, checkpoint).acquire(adopt=False)
    lake.files["_penstock/lake/000009.json"] = b"["
    with pytest.raises(LakeDamaged, match=r"000009\.json can't be read"):
        lease(lake, checkpoint).owner()


def test_the_owner_file_has_the_fields_of_earlier_versions() -> None:
    lake, _, _ = used_lake()
    lease(lake, MemoryFiles()).acquire(adopt=True)
    first, adopting, adopted = (
        json.loads(lake.files[f"_penstock/lake/{number:06}.json"]) for number in (1, 2, 3)
    )
    assert first.keys() == {
        "query", "checkpoint", "start", "columns", "number", "run", "heir_of",
    }  # fmt: skip
    assert (first["number"], first["heir_of"]) == (1, "")
    assert adopting["heir_of"] == QUERY
    assert (adopted["heir_of"], adopted["start"]) == ("", ["offsets-1"])
