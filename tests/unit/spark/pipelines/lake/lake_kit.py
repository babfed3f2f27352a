"""Files of a lake in memory that kill the process at a chosen change, and steps of batches."""

import json
from collections.abc import Callable, Iterator

from penstock.errors import PipelineFailed
from penstock.spark.pipelines.lake.batch_commits import BatchCommitter
from penstock.spark.pipelines.lake.lake_files import File
from penstock.spark.pipelines.lake.lake_owner import LakeLease, LakeOwner

QUERY = "6f2b7a34-0000-4000-8000-000000000001"
DAY = "data/date=2026-08-01/topic=orders"


class Killed(BaseException):
    """The process is killed; a BaseException, so that no handler catches it."""


class MemoryFiles:
    """Files in memory; the process is killed before a change when `changes_left` is 0.

    With `copies` a rename is two changes, as on object stores.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self.files: dict[str, bytes] = {}
        self.changes_left = -1
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
        self._change(lambda: self.files.update({path: data}))
        return True

    def move(self, source: str, target: str) -> None:
        if source not in self.files:
            raise PipelineFailed(f"{source} could not be renamed")
        data = self.files[source]
        assert target not in self.files, f"{target} is overwritten"
        if self.copies:
            self._change(lambda: self.files.update({target: data}))
            self._change(lambda: self.files.pop(source))
        else:
            self._change(lambda: self.files.update({target: self.files.pop(source)}))

    def remove(self, path: str) -> None:
        for each in [p for p in self.files if p == path or p.startswith(path + "/")]:
            self._change(lambda each=each: self.files.pop(each))  # type: ignore[misc]

    def _change(self, change: Callable[[], object]) -> None:
        if self.changes_left == 0:
            raise Killed
        self.changes_left -= 1
        change()


def visible_files(files: MemoryFiles, table: str = "data") -> list[bytes]:
    """The content of the files of a table."""
    return sorted(files.files[path] for path, _ in files.walk(table))


def stage(files: MemoryFiles, attempt: str, rows: list[bytes]) -> None:
    """Write data files and temporary files as Spark's tasks do."""
    for i, row in enumerate(rows):
        files.files[f"{attempt}/data/date=2026-08-01/topic=orders/part-{i}.parquet"] = row
    files.files[f"{attempt}/data/_SUCCESS"] = b""
    files.files[f"{attempt}/data/_temporary/0/date=2026-08-01/topic=x/p.parquet"] = b"half"
    files.files[f"{attempt}/data/date=2026-08-01/topic=orders/.part-0.parquet.crc"] = b"crc"


def run_batch(files: MemoryFiles, number: int, rows: list[bytes]) -> None:
    """Write and commit a batch as the writer does, also after it was killed."""
    committer = BatchCommitter(files)
    if not committer.finish(QUERY, number):
        attempt = committer.new_attempt(QUERY, number, 1)
        stage(files, attempt, rows)
        commit(files, number, attempt)


def commit(
    files: MemoryFiles, number: int, attempt: str, check_owner: Callable[[], None] = lambda: None
) -> None:
    BatchCommitter(files).commit(QUERY, number, attempt, (f"offsets-{number}",), check_owner)


def kills(work: Callable[[], None], files: MemoryFiles) -> Iterator[int]:
    """Run `work` and kill it before its first change, its second and so on, until it ends."""
    for moment in range(1000):
        files.changes_left = moment
        try:
            work()
        except Killed:
            yield moment
            continue
        finally:
            files.changes_left = -1
        return
    raise AssertionError("the work does not end")


def lease(lake: MemoryFiles, checkpoint: MemoryFiles) -> LakeLease:
    return LakeLease(lake, checkpoint, "the-lake", "the-checkpoint")


def spark_ran(checkpoint: MemoryFiles, *batches: int) -> None:
    for number in batches:
        checkpoint.files[f"offsets/{number}"] = f"v1\n{{}}\noffsets-{number}".encode()
        checkpoint.files[f"commits/{number}"] = b"v1"


def used_lake() -> tuple[MemoryFiles, MemoryFiles, LakeOwner]:
    lake, checkpoint = MemoryFiles(), MemoryFiles()
    checkpoint.files["metadata"] = json.dumps({"id": QUERY}).encode()
    owner = lease(lake, checkpoint).acquire(adopt=False)
    run_batch(lake, 0, [b"one"])
    run_batch(lake, 1, [b"two"])
    spark_ran(checkpoint, 0, 1)
    return lake, checkpoint, owner
