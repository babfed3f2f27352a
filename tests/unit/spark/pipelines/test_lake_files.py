"""The steps of a lake on a file system in memory that is killed before any of its changes."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import date

import pytest

from penstock.errors import LakeDamaged, LakeRefused, PipelineFailed
from penstock.spark.pipelines.lake.lake_compaction import (
    JOURNALS,
    Swap,
    finish,
    groups,
    settle_swaps,
    swap_in,
)
from penstock.spark.pipelines.lake.lake_files import File
from penstock.spark.pipelines.lake.lake_owner import DEEDS_KEPT, Claim, Deed
from penstock.spark.pipelines.lake.publication import MARKS_KEPT, STAGING, Ledger

QUERY = "6f2b7a34-0000-4000-8000-000000000001"
OTHER = "6f2b7a34-0000-4000-8000-000000000002"
DAY = "data/date=2026-08-01/topic=orders"


class Killed(BaseException):
    """The process is gone: no handler of ours may see it."""


class MemoryFiles:
    """Files in a dict. `fuse` changes later the process is killed before the next one.

    A rename that copies, as object stores do it, is two changes.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self.files: dict[str, bytes] = {}
        self.fuse = -1
        self.copies = copies

    def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None

    def walk(self, path: str) -> list[File]:
        below = path + "/" if path else ""
        return sorted(File(p, len(d)) for p, d in self.files.items() if p.startswith(below))

    def read(self, path: str) -> bytes:
        return self.files[path]

    def write_new(self, path: str, data: bytes) -> bool:
        if path in self.files:
            return False
        self._step(lambda: self.files.update({path: data}))
        return True

    def move(self, source: str, target: str) -> None:
        if source not in self.files:
            raise PipelineFailed(f"{source} could not be renamed")
        data = self.files[source]
        assert target not in self.files, f"{target} is overwritten"
        if self.copies:
            self._step(lambda: self.files.update({target: data}))
            self._step(lambda: self.files.pop(source))
        else:
            self._step(lambda: self.files.update({target: self.files.pop(source)}))

    def remove(self, path: str) -> None:
        for each in [p for p in self.files if p == path or p.startswith(path + "/")]:
            self._step(lambda each=each: self.files.pop(each))  # type: ignore[misc]

    def _step(self, change: Callable[[], object]) -> None:
        if self.fuse == 0:
            raise Killed
        self.fuse -= 1
        change()


def seen(files: MemoryFiles, table: str = "data") -> list[bytes]:
    """What a reader of Parquet finds: names without underscores and dots before them."""
    return sorted(files.files[path] for path, _ in files.walk(table))


def stage(files: MemoryFiles, attempt: str, rows: list[bytes]) -> None:
    """What Spark's tasks leave: files of data, and things of its own."""
    for i, row in enumerate(rows):
        files.files[f"{attempt}/data/date=2026-08-01/topic=orders/part-{i}.parquet"] = row
    files.files[f"{attempt}/data/_SUCCESS"] = b""
    files.files[f"{attempt}/data/_temporary/0/date=2026-08-01/topic=x/p.parquet"] = b"half"
    files.files[f"{attempt}/data/date=2026-08-01/topic=orders/.part-0.parquet.crc"] = b"crc"


def run_batch(files: MemoryFiles, number: int, rows: list[bytes]) -> None:
    """As the writer does for each batch, and again after it was killed."""
    ledger = Ledger(files)
    if not ledger.settle(QUERY, number):
        attempt = ledger.attempt(QUERY, number, 1)
        stage(files, attempt, rows)
        publish(files, number, attempt)


def publish(
    files: MemoryFiles, number: int, attempt: str, check_held: Callable[[], None] = lambda: None
) -> None:
    Ledger(files).publish(QUERY, number, attempt, (f"offsets-{number}",), check_held)


def kills(work: Callable[[], None], files: MemoryFiles) -> Iterator[int]:
    """Run `work` killed at its first moment, then at its second…, until it comes to its end."""
    for moment in range(1000):
        files.fuse = moment
        try:
            work()
        except Killed:
            yield moment
            continue
        finally:
            files.fuse = -1
        return
    raise AssertionError("it never ends")


# --- publication ---------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [False, True])
def test_a_batch_is_there_once_wherever_it_is_killed(copies: bool) -> None:
    rows = [b"one", b"two", b"three"]
    moment = 0
    while True:
        files = MemoryFiles(copies=copies)
        run_batch(files, 6, [b"before"])
        files.fuse = moment
        try:
            run_batch(files, 7, rows)
            break
        except Killed:
            files.fuse = -1
        assert set(seen(files)) <= {b"before", *rows}
        run_batch(files, 7, rows)
        assert seen(files) == sorted([b"before", *rows])
        assert files.walk(STAGING) == []
        assert Ledger(files).newest() == {QUERY: 7}
        moment += 1
    assert moment >= 8


@pytest.mark.parametrize("copies", [False, True])
def test_a_batch_is_there_once_if_it_is_killed_time_and_again(copies: bool) -> None:
    files = MemoryFiles(copies=copies)
    rows = [b"one", b"two", b"three"]
    for _ in kills(lambda: run_batch(files, 0, rows), files):
        assert len(seen(files)) == len(set(seen(files)))
    assert seen(files) == sorted(rows)


def test_a_batch_that_is_there_is_left_alone() -> None:
    files = MemoryFiles()
    run_batch(files, 0, [b"one"])
    run_batch(files, 0, [b"never written"])
    assert seen(files) == [b"one"]


def test_what_tasks_of_a_killed_driver_write_later_is_not_published() -> None:
    files = MemoryFiles()
    ledger = Ledger(files)
    zombie = ledger.attempt(QUERY, 0, 1)
    stage(files, zombie, [b"one"])
    assert not ledger.settle(QUERY, 0)
    attempt = ledger.attempt(QUERY, 0, 2)
    stage(files, attempt, [b"one"])
    stage(files, zombie, [b"one"])
    publish(files, 0, attempt)
    assert seen(files) == [b"one"]
    stage(files, zombie, [b"one"])
    others = [
        f"{STAGING}/{QUERY}-1/000003-0123456789ab/data/date=2026-08-01/topic=x/part-0.parquet",
        f"{STAGING}/compact-0123456789ab-1785600000/part-0.parquet",
    ]
    files.files |= dict.fromkeys(others, b"another's")
    ledger.sweep(QUERY, 3)
    assert [path for path, _ in files.walk(STAGING)] == others


def test_a_file_that_is_gone_before_it_is_published_is_damage() -> None:
    files = MemoryFiles()
    ledger = Ledger(files)
    attempt = ledger.attempt(QUERY, 0, 1)
    stage(files, attempt, [b"one", b"two"])
    files.fuse = 2
    with pytest.raises(Killed):
        publish(files, 0, attempt)
    files.fuse = -1
    for path, _ in files.walk(attempt):
        del files.files[path]
    with pytest.raises(LakeDamaged, match="bytes and be renamed"):
        ledger.settle(QUERY, 0)


def test_a_batch_that_somebody_else_publishes_is_refused() -> None:
    files = MemoryFiles()
    ledger = Ledger(files)
    attempt = ledger.attempt(QUERY, 0, 1)
    stage(files, attempt, [b"one"])
    files.files[f"_penstock/manifests/{QUERY}-0.json"] = b"{}"
    with pytest.raises(LakeDamaged, match="somebody else"):
        publish(files, 0, attempt)
    with pytest.raises(LakeDamaged, match="can't be read"):
        ledger.settle(QUERY, 0)


def test_only_the_newest_marks_are_kept() -> None:
    files = MemoryFiles()
    for number in range(MARKS_KEPT + 5):
        run_batch(files, number, [str(number).encode()])
    assert len(files.walk("_penstock/commits")) == MARKS_KEPT
    last = Ledger(files).last(QUERY)
    assert last is not None
    assert last.offsets == (f"offsets-{MARKS_KEPT + 4}",)


# --- ownership -----------------------------------------------------------------------------------


def claim(lake: MemoryFiles, checkpoint: MemoryFiles) -> Claim:
    return Claim(lake, checkpoint, "the-lake", "the-checkpoint")


def spark_ran(checkpoint: MemoryFiles, *batches: int) -> None:
    for number in batches:
        checkpoint.files[f"offsets/{number}"] = f"v1\n{{}}\noffsets-{number}".encode()
        checkpoint.files[f"commits/{number}"] = b"v1"


def test_a_new_lake_and_a_new_checkpoint_know_each_other_wherever_they_are_killed() -> None:
    lake, checkpoint = MemoryFiles(), MemoryFiles()
    deeds: list[Deed] = []
    for files in (checkpoint, lake):
        for _ in kills(lambda: deeds.append(claim(lake, checkpoint).take(adopt=False)), files):
            pass
    assert len({deed.query for deed in deeds}) == 1
    assert json.loads(checkpoint.files["metadata"])["id"] == deeds[0].query


def used_lake() -> tuple[MemoryFiles, MemoryFiles, Deed]:
    lake, checkpoint = MemoryFiles(), MemoryFiles()
    checkpoint.files["metadata"] = json.dumps({"id": QUERY}).encode()
    deed = claim(lake, checkpoint).take(adopt=False)
    run_batch(lake, 0, [b"one"])
    run_batch(lake, 1, [b"two"])
    spark_ran(checkpoint, 0, 1)
    return lake, checkpoint, deed


def test_the_same_checkpoint_goes_on() -> None:
    lake, checkpoint, deed = used_lake()
    for adopt in (False, True):
        again = claim(lake, checkpoint).take(adopt=adopt)
        assert (again.query, again.start) == (deed.query, deed.start)


def test_only_the_newest_deeds_are_kept() -> None:
    lake, checkpoint, _ = used_lake()
    for _ in range(DEEDS_KEPT + 5):
        deed = claim(lake, checkpoint).take(adopt=False)
    assert len(lake.walk("_penstock/lake")) == DEEDS_KEPT
    claim(lake, checkpoint).check_held(deed)


def test_another_checkpoint_is_refused_and_adopts_where_the_lake_ends() -> None:
    lake, old, deed = used_lake()
    new = MemoryFiles()
    with pytest.raises(LakeRefused, match="belongs to the query with checkpoint the-checkpoint"):
        claim(lake, new).take(adopt=False)
    adopted = claim(lake, new).take(adopt=True)
    assert adopted.query != QUERY
    assert adopted.start == ("offsets-1",)
    again = claim(lake, new).take(adopt=False)  # until Spark has begun, and after it
    assert (again.query, again.start) == (adopted.query, adopted.start)
    with pytest.raises(LakeRefused, match="taken the lake"):
        claim(lake, old).check_held(deed)
    with pytest.raises(LakeRefused, match="belongs to"):
        claim(lake, old).take(adopt=False)
    with pytest.raises(LakeRefused, match="past of its own"):
        claim(lake, old).take(adopt=True)


def test_a_batch_half_published_is_finished_before_a_lake_is_adopted() -> None:
    lake, _, _ = used_lake()
    ledger = Ledger(lake)
    attempt = ledger.attempt(QUERY, 2, 1)
    stage(lake, attempt, [b"three", b"four"])
    lake.fuse = 2
    with pytest.raises(Killed):
        publish(lake, 2, attempt)
    lake.fuse = -1
    assert claim(lake, MemoryFiles()).take(adopt=True).start == ("offsets-2",)
    assert seen(lake) == sorted([b"one", b"two", b"three", b"four"])


def test_an_adoption_that_is_killed_can_be_done_again() -> None:
    lake, _, _ = used_lake()
    new = MemoryFiles()
    for files in (new, lake):
        for _ in kills(lambda: claim(lake, new).take(adopt=True) and None, files):
            pass
    assert claim(lake, new).take(adopt=False).start == ("offsets-1",)


def test_a_lake_that_was_deleted_or_is_an_old_copy_is_refused() -> None:
    lake, checkpoint, _ = used_lake()
    with pytest.raises(LakeRefused, match="has batches up to 1 behind it"):
        claim(MemoryFiles(), checkpoint).take(adopt=False)
    spark_ran(checkpoint, 2)
    with pytest.raises(LakeRefused, match="older copy"):
        claim(lake, checkpoint).take(adopt=False)


def test_a_checkpoint_that_is_an_old_copy_is_refused() -> None:
    lake, checkpoint, _ = used_lake()
    for path in ("offsets/1", "commits/1"):  # Spark would make another batch 1, and it is "there"
        del checkpoint.files[path]
    with pytest.raises(LakeRefused, match="come to batch 1, and the checkpoint"):
        claim(lake, checkpoint).take(adopt=False)
    checkpoint.files["offsets/1"] = b"v1\n{}\nelsewhere"
    with pytest.raises(LakeRefused, match="does not know it"):
        claim(lake, checkpoint).take(adopt=False)


# --- two at once ---------------------------------------------------------------------------------


def at(moment: int, deed: Callable[[], None]) -> Callable[[], None]:
    """A question that somebody acts before, the so-manieth time that it is asked."""
    left = [moment]

    def ask() -> None:
        if left[0] == 0:
            deed()
        left[0] -= 1

    return ask


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("moment", range(6))
def test_a_run_that_has_lost_the_lake_publishes_nothing(adopt: bool, moment: int) -> None:
    """Another run takes the lake between any two steps of the first one."""
    lake, checkpoint, deed = used_lake()
    other = MemoryFiles() if adopt else checkpoint
    ledger, rows = Ledger(lake), [b"three", b"four"]
    taken: list[Deed] = []

    def take() -> None:
        taken.append(claim(lake, other).take(adopt=adopt))
        ledger.sweep(taken[0].query, taken[0].number)

    def check_held() -> None:
        before()
        claim(lake, checkpoint).check_held(deed)
        after()

    before, after = at(moment - 2, take), at(moment - 4, take)
    spark_plans(checkpoint, 2)
    attempt = ledger.attempt(QUERY, 2, deed.number)
    stage(lake, attempt, rows[:1] if moment == 0 else rows)
    if moment < 2:
        take()  # moment 0: the second half is written after the sweep
        stage(lake, attempt, rows)
        if moment == 0:
            del lake.files[f"{attempt}/data/date=2026-08-01/topic=orders/part-0.parquet"]
    try:
        publish(lake, 2, attempt, check_held)
    except (LakeRefused, PipelineFailed):  # the other one was quicker
        assert taken
    if not taken:
        take()
    # The other run comes to the batch, or begins where the lake ends.
    if adopt:
        if taken[0].start != ("offsets-2",):
            assert taken[0].start == ("offsets-1",)
            new = ledger.attempt(taken[0].query, 0, taken[0].number)
            stage(lake, new, rows)
            ledger.publish(taken[0].query, 0, new, ("offsets-2",), lambda: None)
        claim(lake, other).check_held(taken[0])
    elif not ledger.settle(QUERY, 2):
        new = ledger.attempt(QUERY, 2, taken[0].number)
        stage(lake, new, rows)
        publish(lake, 2, new)
    assert seen(lake) == sorted([b"one", b"two", *rows])


def spark_plans(checkpoint: MemoryFiles, batch: int) -> None:
    checkpoint.files[f"offsets/{batch}"] = f"v1\n{{}}\noffsets-{batch}".encode()


def test_of_two_that_start_at_once_one_holds_the_lake() -> None:
    lake, checkpoint, _ = used_lake()
    first = claim(lake, checkpoint).take(adopt=False)
    path = lake.walk("_penstock/lake")[-1].path
    del lake.files[path]  # the second one looked before it was there, and its rename replaces it
    second = claim(lake, checkpoint).take(adopt=False)
    assert first.number == second.number
    claim(lake, checkpoint).check_held(second)
    with pytest.raises(LakeRefused, match="another run"):
        claim(lake, checkpoint).check_held(first)


def test_who_is_refused_leaves_the_batch_of_another_alone() -> None:
    lake, _, _ = used_lake()
    attempt = Ledger(lake).attempt(QUERY, 2, 1)
    stage(lake, attempt, [b"three", b"four"])
    lake.fuse = 2
    with pytest.raises(Killed):
        publish(lake, 2, attempt)
    lake.fuse = -1
    before = dict(lake.files)
    with pytest.raises(LakeRefused, match="is another"):
        claim(lake, MemoryFiles()).take(adopt=False)
    assert lake.files == before


def test_topics_that_a_query_in_between_did_not_read_are_not_forgotten() -> None:
    lake, checkpoint = MemoryFiles(), MemoryFiles()
    ends = ['{"a": {"b": {"0": 5}}, "c": {"b": {"0": 7}}}', '{"a": {"b": {"0": 9}}}']
    for end in ends:
        deed = claim(lake, checkpoint).take(adopt=True)
        attempt = Ledger(lake).attempt(deed.query, 0, deed.number)
        stage(lake, attempt, [end.encode()])
        Ledger(lake).publish(deed.query, 0, attempt, (end,), lambda: None)
        checkpoint = MemoryFiles()
    [start] = claim(lake, checkpoint).take(adopt=True).start
    assert json.loads(start) == {"a": {"b": {"0": 9}}, "c": {"b": {"0": 7}}}


def test_a_directory_with_other_files_is_no_lake() -> None:
    lake = MemoryFiles()
    lake.files[f"{DAY}/mine.parquet"] = b"mine"
    with pytest.raises(LakeRefused, match=r"no lake has written.*mine\.parquet"):
        claim(lake, MemoryFiles()).take(adopt=False)


def test_columns_may_come_and_may_not_change() -> None:
    lake, checkpoint, deed = used_lake()
    books = claim(lake, checkpoint)
    deed = books.describe(deed, {"topic": "string", "amount": "double"})
    assert books.describe(deed, {"topic": "string"}) == deed
    more = books.describe(deed, {"currency": "string"})
    assert more.columns == {"topic": "string", "amount": "double", "currency": "string"}
    assert books.last() == more
    with pytest.raises(LakeRefused, match="amount double of the lake the-lake would be amount int"):
        books.describe(more, {"amount": "int"})
    with pytest.raises(LakeRefused, match="would be Amount double"):
        books.describe(more, {"Amount": "double"})


def test_a_broken_book_is_named() -> None:
    lake, checkpoint, _ = used_lake()
    checkpoint.files["metadata"] = b"{}"
    with pytest.raises(LakeDamaged, match="metadata is not as Spark writes it"):
        claim(lake, checkpoint).take(adopt=False)
    lake.files["_penstock/lake/000009.json"] = b"["
    with pytest.raises(LakeDamaged, match=r"000009\.json can't be read"):
        claim(lake, checkpoint).last()


# --- compaction ----------------------------------------------------------------------------------


def swap_of(files: MemoryFiles, name: str = "compact-0123456789ab", since: int = 0) -> Swap:
    """Three files that become one: what Spark has written, before it is swapped in."""
    inputs = []
    for i, row in enumerate((b"one", b"two", b"three")):
        path = f"{DAY}/batch-{i:010}-00000-{QUERY}.parquet"
        files.files[path] = row
        inputs.append(File(path, len(row)))
    staged = f"{STAGING}/{name}-{since}/part-0.parquet"
    files.files[staged] = b"one,two,three"
    return Swap(tuple(inputs), staged, f"{DAY}/{name}.parquet", len(b"one,two,three"))


def rows_of(files: MemoryFiles) -> list[bytes]:
    return sorted(row for data in seen(files) for row in data.split(b","))


@pytest.mark.parametrize("copies", [False, True])
def test_a_compaction_loses_nothing_wherever_it_is_killed(copies: bool) -> None:
    moment = 0
    while True:
        files = MemoryFiles(copies=copies)
        swap = swap_of(files)
        files.fuse = moment
        try:
            assert swap_in(files, swap)
            break
        except Killed:
            files.fuse = -1
        assert set(rows_of(files)) == {b"one", b"two", b"three"}
        settle_swaps(files)
        assert rows_of(files) == [b"one", b"three", b"two"]
        assert files.walk("_penstock") == []
        moment += 1
    assert moment >= 6
    assert seen(files) == [b"one,two,three"]


def test_a_compaction_may_be_finished_time_and_again() -> None:
    files = MemoryFiles()
    swap = swap_of(files)
    for _ in kills(lambda: settle_swaps(files) or swap_again(files, swap), files):
        assert set(rows_of(files)) == {b"one", b"two", b"three"}
    assert rows_of(files) == [b"one", b"three", b"two"]


def swap_again(files: MemoryFiles, swap: Swap) -> None:
    if swap.staged in files.files:
        swap_in(files, swap)


def test_of_two_compactions_one_gives_up() -> None:
    files = MemoryFiles()
    first, second = swap_of(files), swap_of(files, "compact-ba9876543210")
    files.fuse = 1  # its journal stands
    with pytest.raises(Killed):
        swap_in(files, first)
    files.fuse = -1
    assert not swap_in(files, second), "the partition is taken"
    settle_swaps(files)
    third = second  # read before the first was finished, journalled after it
    files.files[third.staged] = b"one,two,three"
    assert not swap_in(files, third), "the files it has read are gone"
    assert seen(files) == [b"one,two,three"]
    assert files.walk(JOURNALS) == []


def test_a_compaction_leaves_one_that_is_under_way_alone() -> None:
    files = MemoryFiles()
    swap = swap_of(files, since=int(time.time()))
    settle_swaps(files)
    assert swap_in(files, swap)
    assert seen(files) == [b"one,two,three"]


def test_a_compaction_whose_file_is_gone_is_given_up() -> None:
    files = MemoryFiles()
    swap = swap_of(files)
    del files.files[swap.staged]
    assert not finish(files, swap)
    assert rows_of(files) == [b"one", b"three", b"two"]


def test_a_journal_that_cannot_be_read_is_named() -> None:
    files = MemoryFiles()
    files.files[f"{JOURNALS}/x.json"] = b"{"
    with pytest.raises(LakeDamaged, match=r"x\.json can't be read"):
        settle_swaps(files)


def batch_file(day: str, batch: int, size: int, query: str = QUERY) -> File:
    return File(f"data/date={day}/topic=orders/batch-{batch:010}-00000-{query}.parquet", size)


def grouped(*listed: File, before: date = date(2026, 8, 3)) -> list[tuple[int, ...]]:
    found = groups(listed, {QUERY: 5}, before=before, large_bytes=100)
    return [tuple(file.size for file in group) for group in found]


def test_small_files_of_closed_dates_and_committed_batches_are_compacted() -> None:
    assert grouped(batch_file("2026-08-01", 0, 10), batch_file("2026-08-01", 1, 11)) == [(10, 11)]
    assert grouped(batch_file("2026-08-03", 0, 10), batch_file("2026-08-03", 1, 11)) == []
    assert grouped(batch_file("2026-08-01", 5, 10), batch_file("2026-08-01", 6, 11)) == []
    assert grouped(batch_file("2026-08-01", 0, 10), batch_file("2026-08-01", 0, 11, OTHER)) == []
    assert grouped(batch_file("2026-08-01", 0, 10), batch_file("2026-08-02", 1, 11)) == []
    assert grouped(batch_file("2026-13-01", 0, 10), batch_file("2026-13-01", 1, 11)) == []


def test_large_files_and_those_of_others_stay() -> None:
    assert grouped(batch_file("2026-08-01", 0, 51), batch_file("2026-08-01", 1, 10)) == []
    foreign = [File("data/date=2026-08-01/topic=orders/mine.parquet", 1),
               File("data/date=2026-08-01/topic=orders/yours.parquet", 1),
               File("data/README", 1)]  # fmt: skip
    assert grouped(*foreign) == []


def test_groups_come_up_to_the_size_of_a_large_file() -> None:
    assert grouped(*(batch_file("2026-08-01", i, 40) for i in range(6))) == [(40, 40)] * 3
    compacted = File("data/date=2026-08-01/topic=orders/compact-0123456789ab.parquet", 45)
    assert grouped(compacted, batch_file("2026-08-01", 0, 10)) == [(10, 45)]
