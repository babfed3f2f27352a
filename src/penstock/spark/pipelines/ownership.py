"""Which query a lake belongs to: the deeds, and whether a checkpoint may go on with the lake.

A lake knows the batches of one query, a checkpoint how far one query has come. If the two are of
different queries, messages would be missing or twice without a word, so that is refused.
With `adopt` a new checkpoint takes the lake over: it begins where the lake's last batch ended.

The deeds are files `_penstock/lake/000001.json`, of which the last one counts: nothing is replaced.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.errors import LakeDamaged, LakeRefused
from penstock.spark.pipelines.files import Files
from penstock.spark.pipelines.publication import ROOM, TABLES, Ledger

DEEDS: Final = f"{ROOM}/lake"


class Deed(msgspec.Struct, frozen=True):
    """To whom a lake belongs since when, and what is in its columns."""

    query: str
    checkpoint: str
    start: tuple[str, ...] = ()
    """Where the query began, if it took over from another: the offsets of each source."""
    columns: Mapping[str, str] = {}
    number: int = 0


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
        ledger.settle_all()
        last = self.last()
        query = self._query()
        if last is None:
            self._check_empty()
            return self._write(Deed(query or self._new_query(), self.checkpoint_name))
        if query == last.query:
            self._check_complete(last, ledger)
            return last
        start = self._end(last, ledger, adopt=adopt)
        return self._write(
            Deed(query or self._new_query(), self.checkpoint_name, start, last.columns, last.number)
        )

    def describe(self, deed: Deed, columns: Mapping[str, str]) -> Deed:
        """Say what is in the columns from now on; raises LakeRefused if that contradicts."""
        for name in sorted(deed.columns.keys() & columns.keys()):
            if deed.columns[name] != columns[name]:
                raise LakeRefused(
                    f"the column {name} of the lake {self.lake_name} is {deed.columns[name]}, and "
                    f"now it would be {columns[name]}",
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
        try:
            return msgspec.json.decode(self.lake.read(paths[-1]), type=Deed)
        except msgspec.DecodeError as error:
            raise LakeDamaged(f"{self.lake_name}/{paths[-1]} can't be read: {error}") from None

    def check_held(self, deed: Deed) -> None:
        """Raise LakeRefused if the lake was taken over since."""
        if self.lake.size(_path(deed.number + 1)) is not None:
            raise LakeRefused(
                f"another query has taken the lake {self.lake_name} over, this one has to end",
                hint="it goes on where this one has come to; begin another lake for two of them",
            )

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
        """Spark takes a batch for done only after the lake has it."""
        done, there = self._done(), ledger.newest().get(deed.query, -1)
        if done is not None and there < done:
            raise LakeRefused(
                f"the checkpoint {self.checkpoint_name} has come to batch {done}, the lake "
                f"{self.lake_name} only to {there}: it was replaced by an older copy",
                hint="go on with a new checkpoint and --adopt: it begins where this lake ends",
            )

    def _end(self, last: Deed, ledger: Ledger, *, adopt: bool) -> tuple[str, ...]:
        """Where another query has to begin; raises LakeRefused if it may not."""
        batch = ledger.last(last.query)
        end = last.start if batch is None else batch.offsets
        has_past = bool(self.checkpoint.walk("offsets"))
        if batch is None and not end and not has_past:
            return ()  # nothing was ever written
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
        if not end:
            raise LakeRefused(
                f"{where}, and it does not know where its last batch ended",
                hint="use that checkpoint, or choose another lake",
            )
        return end

    def _write(self, deed: Deed) -> Deed:
        deed = msgspec.structs.replace(deed, number=deed.number + 1)
        if not self.lake.write_new(_path(deed.number), msgspec.json.encode(deed)):
            raise LakeRefused(f"somebody else has just taken the lake {self.lake_name}")
        return deed


def _path(number: int) -> str:
    return f"{DEEDS}/{number:06}.json"
