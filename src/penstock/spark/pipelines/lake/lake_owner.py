"""Which query a lake belongs to: the deeds, and whether a checkpoint may go on with the lake.

A lake knows the batches of one query, a checkpoint how far one query has come. If the two are of
different queries, messages would be missing or twice without a word, so that is refused.
With `adopt` a new checkpoint takes the lake over: it begins where the lake's last batch ended.

The deeds are files `_penstock/lake/000001.json`, of which the last one counts: nothing is replaced.
Every start writes one, so that a run that is still there finds out that it has lost the lake; then
it looks what the one before has left. What that one publishes in the meantime is seen by one of the
two, see `publication.py`.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.errors import LakeDamaged, LakeRefused
from penstock.spark.pipelines.lake.lake_files import Files
from penstock.spark.pipelines.lake.publication import ROOM, TABLES, Ledger

DEEDS: Final = f"{ROOM}/lake"
DEEDS_KEPT: Final = 20


class Deed(msgspec.Struct, frozen=True):
    """To whom a lake belongs since when, and what is in its columns."""

    query: str
    checkpoint: str
    start: tuple[str, ...] = ()
    """Where the query began, if it took over from another: the offsets of each source."""
    columns: Mapping[str, str] = {}
    number: int = 0
    run: str = ""
    """One start of the query."""
    heir_of: str = ""
    """The query before, as long as it is not settled where that one ended."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A lake and a checkpoint that want to go together."""

    lake: Files
    checkpoint: Files
    lake_name: str
    checkpoint_name: str

    def take(self, *, adopt: bool) -> Deed:
        """The deed of the query that may write now; raises LakeRefused.

        The id of a new query is fixed here, before Spark starts it: if everything is killed in
        between, the next start finds a lake and a checkpoint that know each other.
        """
        ledger = Ledger(self.lake)
        last, query = self.last(), self._query()
        run = uuid.uuid4().hex
        if last is None:
            self._check_empty()
            return self._write(Deed(query or self._new_query(), self.checkpoint_name, run=run))
        if query != last.query:
            self._check_heir(last, ledger, adopt=adopt)
            heir_of = last.heir_of or last.query
            query = query or self._new_query()
            last = msgspec.structs.replace(
                last, query=query, checkpoint=self.checkpoint_name, heir_of=heir_of
            )
        deed = self._write(msgspec.structs.replace(last, run=run))
        if deed.heir_of:
            ledger.settle_all(deed.heir_of)
            batch = ledger.last(deed.heir_of)
            start = deed.start if batch is None else _joined(deed.start, batch.offsets)
            return self._write(msgspec.structs.replace(deed, start=start, heir_of=""))
        ledger.settle_all(deed.query)
        self._check_complete(deed, ledger)
        return deed

    def offsets(self, batch: int) -> tuple[str, ...]:
        """Where a batch ends in each source; none if the checkpoint does not have it. Spark's log
        has a line for the version and one of its own before them."""
        path = f"offsets/{batch}"
        if self.checkpoint.size(path) is None:
            return ()
        return tuple(self.checkpoint.read(path).decode().split("\n")[2:])

    def describe(self, deed: Deed, columns: Mapping[str, str]) -> Deed:
        """Say what is in the columns from now on; raises LakeRefused if that contradicts."""
        had = {name.lower(): (name, kind) for name, kind in deed.columns.items()}
        for name, kind in sorted(columns.items()):
            before = had.get(name.lower(), (name, kind))  # many readers take `Id` and `id` for one
            if before != (name, kind):
                raise LakeRefused(
                    f"the column {' '.join(before)} of the lake {self.lake_name} would be "
                    f"{name} {kind} now",
                    hint="give the new column another name, or choose another lake",
                )
        if columns.items() <= deed.columns.items():
            return deed
        return self._write(msgspec.structs.replace(deed, columns={**deed.columns, **columns}))

    def last(self) -> Deed | None:
        """The deed that counts."""
        paths = [path for path, _ in self.lake.walk(DEEDS) if path.endswith(".json")]
        if not paths:
            return None
        return self._read(paths[-1])

    def check_held(self, deed: Deed) -> None:
        """Raise LakeRefused if the lake was taken over since."""
        path = _path(deed.number)
        is_last = self.lake.size(_path(deed.number + 1)) is None
        # Two that start at once may write the same deed, and on some disks the second one wins.
        if is_last and self.lake.size(path) is not None and self._read(path).run == deed.run:
            return
        raise LakeRefused(
            f"another run has taken the lake {self.lake_name} over, this one has to end",
            hint="it goes on where this one has come to; begin another lake for two of them",
        )

    def _read(self, path: str) -> Deed:
        try:
            return msgspec.json.decode(self.lake.read(path), type=Deed)
        except msgspec.DecodeError as error:
            raise LakeDamaged(f"{self.lake_name}/{path} can't be read: {error}") from None

    def _query(self) -> str | None:
        """The id of the checkpoint's query; None if it is a new checkpoint."""
        if self.checkpoint.size("metadata") is None:
            return None
        try:
            return str(uuid.UUID(json.loads(self.checkpoint.read("metadata"))["id"]))
        except (ValueError, KeyError, TypeError):
            raise LakeDamaged(
                f"{self.checkpoint_name}/metadata is not as Spark writes it",
                hint="use another checkpoint with --adopt",
            ) from None

    def _new_query(self) -> str:
        query = str(uuid.uuid4())
        self.checkpoint.write_new("metadata", json.dumps({"id": query}).encode())
        return query

    def _done(self) -> int | None:
        """The newest batch that the checkpoint takes for done."""
        names = [path.rpartition("/")[2] for path, _ in self.checkpoint.walk("commits")]
        return max((int(name) for name in names if name.isdigit()), default=None)

    def _check_empty(self) -> None:
        for table in TABLES:
            if found := self.lake.walk(table):
                raise LakeRefused(
                    f"{self.lake_name} has files that no lake has written, such as {found[0].path}",
                    hint="choose another directory for the lake",
                )
        done = self._done()
        if done is not None:
            raise LakeRefused(
                f"the checkpoint {self.checkpoint_name} has batches up to {done} behind it, and "
                f"the lake {self.lake_name} has none of them",
                hint="choose a new checkpoint, which begins with what the topics still have",
            )

    def _check_complete(self, deed: Deed, ledger: Ledger) -> None:
        """Spark takes a batch for done only after the lake has it, and notes where it ends before:
        what is not so comes of copies that were put back."""
        done, batch = self._done(), ledger.last(deed.query)
        there = -1 if batch is None else batch.batch
        hint = "go on with a new checkpoint and --adopt: it begins where this lake ends"
        if done is not None and there < done:
            raise LakeRefused(
                f"the checkpoint {self.checkpoint_name} has come to batch {done}, the lake "
                f"{self.lake_name} only to {there}: it was replaced by an older copy",
                hint=hint,
            )
        if batch is not None and batch.offsets and self.offsets(there) != batch.offsets:
            raise LakeRefused(
                f"the lake {self.lake_name} has come to batch {there}, and the checkpoint "
                f"{self.checkpoint_name} does not know it: it was replaced by an older copy",
                hint=hint,
            )

    def _check_heir(self, last: Deed, ledger: Ledger, *, adopt: bool) -> None:
        """Raise LakeRefused if another query than the one before may not go on with the lake."""
        has_past = bool(self.checkpoint.walk("offsets"))
        is_begun = bool(last.start) or ledger.is_begun(last.heir_of or last.query)
        if not is_begun and not has_past:
            return  # nothing was ever written
        where = f"the lake {self.lake_name} belongs to the query with checkpoint {last.checkpoint}"
        if not adopt:
            raise LakeRefused(
                f"{where}, and {self.checkpoint_name} is another",
                hint="use that checkpoint, choose another lake, or go on where the lake ends with "
                "a new checkpoint and --adopt",
            )
        if has_past:
            raise LakeRefused(
                f"{where}, and {self.checkpoint_name} has a past of its own",
                hint="--adopt needs a new checkpoint: choose a directory that is not there yet",
            )

    def _write(self, deed: Deed) -> Deed:
        deed = msgspec.structs.replace(deed, number=deed.number + 1)
        if not self.lake.write_new(_path(deed.number), msgspec.json.encode(deed)):
            raise LakeRefused(f"somebody else has just taken the lake {self.lake_name}")
        if deed.number > DEEDS_KEPT:
            self.lake.remove(_path(deed.number - DEEDS_KEPT))
        return deed


def _path(number: int) -> str:
    return f"{DEEDS}/{number:06}.json"


def _joined(before: tuple[str, ...], end: tuple[str, ...]) -> tuple[str, ...]:
    """Where a query ended, and where those before it ended in topics that it did not read."""
    if len(before) != 1 or len(end) != 1:
        return end
    had, ended = json.loads(before[0]), json.loads(end[0])
    if not isinstance(had, dict) or not isinstance(ended, dict):  # of another source than ours
        return end
    return (json.dumps({**had, **ended}),)
