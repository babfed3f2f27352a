"""Records which query owns a lake, and decides whether a checkpoint may continue it.

A lake records the batches of one query, and a checkpoint the progress of one query. If they belong
to different queries, messages would be missing or duplicated, so this is refused. With `adopt`, a
new checkpoint takes over the lake and starts where the last batch of the lake ended.

The owners are files `_penstock/lake/000001.json`; the last one is valid, and no file is replaced.
Every start writes a file, so that an older run can see that it has lost the lake. After that, the
new owner looks for batches that the older run has left. Each batch that the older run commits in
the meantime is seen by one of the two, see `batch_commits.py`.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.errors import LakeDamaged, LakeRefused
from penstock.spark.pipelines.lake.batch_commits import METADATA_DIR, TABLES, BatchCommitter
from penstock.spark.pipelines.lake.lake_files import LakeFiles

OWNERS: Final = f"{METADATA_DIR}/lake"
OWNERS_KEPT: Final = 20


class LakeOwner(msgspec.Struct, frozen=True):
    """The query that owns a lake, and the columns of the lake; a file in the lake."""

    query: str
    checkpoint: str
    start: tuple[str, ...] = ()
    """The start offsets in each source, if the query has taken over the lake."""
    columns: Mapping[str, str] = {}
    number: int = 0
    run: str = ""
    """Identifies one start of the query."""
    previous_query: str = msgspec.field(default="", name="heir_of")
    """The previous query, until it is known where that query ended."""


@dataclass(frozen=True, slots=True)
class LakeLease:
    """The right of a checkpoint to write to a lake."""

    lake: LakeFiles
    checkpoint: LakeFiles
    lake_name: str
    checkpoint_name: str

    def acquire(self, *, adopt: bool) -> LakeOwner:
        """Become the owner of the lake; raises LakeRefused.

        The id of a new query is written here, before Spark starts it. If everything is killed in
        between, the next start finds a lake and a checkpoint of the same query.
        """
        committer = BatchCommitter(self.lake)
        last, query = self.owner(), self._checkpoint_query()
        run = uuid.uuid4().hex
        if last is None:
            self._check_empty()
            return self._write(LakeOwner(query or self._new_query(), self.checkpoint_name, run=run))
        if query != last.query:
            self._check_adoption(last, committer, adopt=adopt)
            last = msgspec.structs.replace(
                last,
                query=query or self._new_query(),
                checkpoint=self.checkpoint_name,
                previous_query=last.previous_query or last.query,
            )
        owner = self._write(msgspec.structs.replace(last, run=run))
        if owner.previous_query:
            committer.finish_all(owner.previous_query)
            batch = committer.last_batch(owner.previous_query)
            start = owner.start if batch is None else _merge_offsets(owner.start, batch.offsets)
            return self._write(msgspec.structs.replace(owner, start=start, previous_query=""))
        committer.finish_all(owner.query)
        self._check_consistent(owner, committer)
        return owner

    def check(self, owner: LakeOwner) -> None:
        """Raise LakeRefused if another run has taken over the lake."""
        path = _path(owner.number)
        is_last = self.lake.size(_path(owner.number + 1)) is None
        # Two runs that start at once may write the same file; on some disks the second one wins.
        if is_last and self.lake.size(path) is not None and self._read(path).run == owner.run:
            return
        raise LakeRefused(
            f"another run has taken over the lake {self.lake_name}; this run ends",
            hint="the other run continues after the last batch; use another lake to run both",
        )

    def owner(self) -> LakeOwner | None:
        """The current owner; None if the lake is new."""
        paths = [path for path, _ in self.lake.walk(OWNERS) if path.endswith(".json")]
        if not paths:
            return None
        return self._read(paths[-1])

    def add_columns(self, owner: LakeOwner, columns: Mapping[str, str]) -> LakeOwner:
        """Record the columns and types of new batches; raises LakeRefused if one has changed."""
        existing = {name.lower(): (name, kind) for name, kind in owner.columns.items()}
        for name, kind in sorted(columns.items()):
            # Many readers take `Id` and `id` for the same column.
            before = existing.get(name.lower(), (name, kind))
            if before != (name, kind):
                raise LakeRefused(
                    f"the column {' '.join(before)} of the lake {self.lake_name} would become "
                    f"{name} {kind}",
                    hint="rename the new column, or choose another lake",
                )
        if columns.items() <= owner.columns.items():
            return owner
        return self._write(msgspec.structs.replace(owner, columns={**owner.columns, **columns}))

    def offsets(self, batch: int) -> tuple[str, ...]:
        """The end offsets of a batch in each source; empty if the checkpoint does not have it."""
        path = f"offsets/{batch}"
        if self.checkpoint.size(path) is None:
            return ()
        # Spark writes a version and its own metadata in the first two lines.
        return tuple(self.checkpoint.read(path).decode().split("\n")[2:])

    def _read(self, path: str) -> LakeOwner:
        try:
            return msgspec.json.decode(self.lake.read(path), type=LakeOwner)
        except msgspec.DecodeError as error:
            raise LakeDamaged(f"{self.lake_name}/{path} can't be read: {error}") from None

    def _checkpoint_query(self) -> str | None:
        """The query id of the checkpoint; None if the checkpoint is new."""
        if self.checkpoint.size("metadata") is None:
            return None
        try:
            return str(uuid.UUID(json.loads(self.checkpoint.read("metadata"))["id"]))
        except (ValueError, KeyError, TypeError):
            raise LakeDamaged(
                f"{self.checkpoint_name}/metadata is not a metadata file of Spark",
                hint="use another checkpoint with --adopt",
            ) from None

    def _new_query(self) -> str:
        query = str(uuid.uuid4())
        self.checkpoint.write_new("metadata", json.dumps({"id": query}).encode())
        return query

    def _last_completed_batch(self) -> int | None:
        """The last batch that the checkpoint records as completed."""
        names = [path.rpartition("/")[2] for path, _ in self.checkpoint.walk("commits")]
        return max((int(name) for name in names if name.isdigit()), default=None)

    def _check_empty(self) -> None:
        """Raise LakeRefused if a new lake has files or its checkpoint has batches."""
        for table in TABLES:
            if found := self.lake.walk(table):
                raise LakeRefused(
                    f"{self.lake_name} contains files that the pipeline has not written, such as "
                    f"{found[0].path}",
                    hint="choose another directory for the lake",
                )
        last = self._last_completed_batch()
        if last is not None:
            raise LakeRefused(
                f"the checkpoint {self.checkpoint_name} has completed batches up to {last}, but "
                f"the lake {self.lake_name} is empty",
                hint="choose a new checkpoint, which starts with the messages that still exist",
            )

    def _check_consistent(self, owner: LakeOwner, committer: BatchCommitter) -> None:
        """Raise LakeRefused if an older copy of the lake or of the checkpoint was restored.

        Spark writes the offsets of a batch before it runs, and completes it after its commit.
        """
        last, batch = self._last_completed_batch(), committer.last_batch(owner.query)
        committed = -1 if batch is None else batch.batch
        hint = "continue with a new checkpoint and --adopt; it starts where the lake ends"
        if last is not None and committed < last:
            raise LakeRefused(
                f"the checkpoint {self.checkpoint_name} is at batch {last}, but the lake "
                f"{self.lake_name} only at batch {committed}: an older copy of the lake was "
                "restored",
                hint=hint,
            )
        if batch is not None and batch.offsets and self.offsets(committed) != batch.offsets:
            raise LakeRefused(
                f"the lake {self.lake_name} is at batch {committed}, which the checkpoint "
                f"{self.checkpoint_name} does not have: an older copy of the checkpoint was "
                "restored",
                hint=hint,
            )

    def _check_adoption(self, last: LakeOwner, committer: BatchCommitter, *, adopt: bool) -> None:
        """Raise LakeRefused if a query may not take over the lake of another one."""
        is_used = bool(self.checkpoint.walk("offsets"))
        has_batches = committer.has_batches(last.previous_query or last.query)
        if not last.start and not has_batches and not is_used:
            return  # nothing was ever written
        message = f"the lake {self.lake_name} belongs to the checkpoint {last.checkpoint}"
        if not adopt:
            raise LakeRefused(
                f"{message}, not to {self.checkpoint_name}",
                hint="use that checkpoint, choose another lake, or continue where the lake ends "
                "with a new checkpoint and --adopt",
            )
        if is_used:
            raise LakeRefused(
                f"{message}, and {self.checkpoint_name} is not a new checkpoint",
                hint="--adopt needs a new checkpoint; choose a directory that does not exist",
            )

    def _write(self, owner: LakeOwner) -> LakeOwner:
        owner = msgspec.structs.replace(owner, number=owner.number + 1)
        if not self.lake.write_new(_path(owner.number), msgspec.json.encode(owner)):
            raise LakeRefused(f"another run has just taken over the lake {self.lake_name}")
        if owner.number > OWNERS_KEPT:
            self.lake.remove(_path(owner.number - OWNERS_KEPT))
        return owner


def _path(number: int) -> str:
    return f"{OWNERS}/{number:06}.json"


def _merge_offsets(before: tuple[str, ...], end: tuple[str, ...]) -> tuple[str, ...]:
    """The end of a query, and the end of earlier queries in topics that it did not read."""
    if len(before) != 1 or len(end) != 1:
        return end
    earlier, ended = json.loads(before[0]), json.loads(end[0])
    if not isinstance(earlier, dict) or not isinstance(ended, dict):  # of another format
        return end
    return (json.dumps({**earlier, **ended}),)
