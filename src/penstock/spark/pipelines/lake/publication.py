"""How the files of a batch get into a lake exactly once, whatever is killed when.

    data/date=2026-08-01/topic=orders/batch-0000000012-00003-<query>.parquet    what readers see
    bad/date=…/topic=…/…                                    rows whose body did not fit the schema
    _penstock/staging/<query>-<batch>/<run>-<attempt>/{data,bad}/…    written by Spark's tasks
    _penstock/staging/<query>-all/<run>-<attempt>/data/…    or by ours, which tell of each file
    _penstock/manifests/<query>-<batch>.json                the attempt that counts, file by file
    _penstock/commits/<query>-<batch>.json                  the same file, when all are in place

1. Spark writes a batch below staging. Each attempt has a directory of its own: tasks of a driver
   that was killed may go on writing for a while, where nobody looks. Only a later run removes it.
2. The manifest is made, whole or not at all: from here on this attempt is the batch.
3. Its files are renamed to where readers see them, under names that belong to query and batch.
4. The manifest is renamed to be the mark of the commit.

Before and after step 2 it is asked whether the lake is still ours. Whoever takes a lake first says
so and then looks for manifests: so a manifest of a run that has lost the lake is either finished by
the new one, or nobody moves its files.

A batch that Spark runs again finds the mark, and nothing is done; or the manifest, and steps 3 and
4 are finished without reading a message; or neither, and it starts clean. Readers ignore names that
begin with an underscore. Only the newest marks are kept: batches are committed one after another.
"""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.errors import LakeDamaged
from penstock.spark.pipelines.lake.lake_files import File, Files

ROOM: Final = "_penstock"
STAGING: Final = f"{ROOM}/staging"
MANIFESTS: Final = f"{ROOM}/manifests"
COMMITS: Final = f"{ROOM}/commits"
TABLES: Final = ("data", "bad")
MARKS_KEPT: Final = 20
"""One would do for Spark; the others tell people what happened lately."""

_BATCH_FILE: Final = re.compile(r"batch-(\d+)-\d+-([0-9a-f-]{36})\.parquet")
_STAGED: Final = re.compile(r"[0-9a-f-]{36}-(\d+|all)")
_BOOK_FILE: Final = re.compile(r"([0-9a-f-]{36})-(\d+)\.json")


class Move(msgspec.Struct, frozen=True):
    """A file's way from staging to its readers; paths are relative to the lake."""

    staged: str
    final: str
    size: int


class Manifest(msgspec.Struct, frozen=True):
    """What one batch of one query adds to a lake."""

    query: str
    batch: int
    moves: tuple[Move, ...]
    offsets: tuple[str, ...] = ()
    """Where the batch ended in each source, as in Spark's checkpoint."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The batches of a lake: which are in it, and how one gets in."""

    files: Files

    def settle(self, query: str, batch: int) -> bool:
        """Whether this batch is in the lake, finishing it if its manifest stands."""
        done = self.files.size(_commit(query, batch)) is not None
        if not done and self.files.size(_manifest(query, batch)) is not None:
            done = self._finish(self._read(_manifest(query, batch)))
        if done:  # a rename that copies leaves the manifest behind where it was cut short
            self.files.remove(_manifest(query, batch))
            self.files.remove(_staging(query, batch))
        return done

    def settle_all(self, query: str) -> None:
        """Finish every batch of a query whose manifest stands."""
        for path in self._manifests():
            manifest = self._read(path)
            if manifest.query == query:
                self.settle(query, manifest.batch)

    def sweep(self, query: str, run: int) -> None:
        """Remove what runs before this one have left; whoever calls it has the lake.

        What a later run writes stays: this one may have slept since it had the lake.
        """
        for folder in {"/".join(path.split("/")[:4]) for path, _ in self.files.walk(STAGING)}:
            batch, _, attempt = folder.removeprefix(STAGING + "/").partition("/")
            number = attempt.partition("-")[0]
            if _STAGED.fullmatch(batch) and not (number.isdigit() and int(number) >= run):
                self.files.remove(folder)
        for path in self._manifests():
            if not path.startswith(f"{MANIFESTS}/{query}-"):  # it came too late, see above
                self.files.remove(path)

    def attempt(self, query: str, batch: int, run: int = 0) -> str:
        """A new directory for Spark to write to."""
        return f"{_staging(query, batch)}/{run:06}-{uuid.uuid4().hex[:12]}"

    def attempt_of_all(self, query: str, run: int) -> str:
        """The same for all batches of a run, whose tasks tell which files are of a batch."""
        return f"{STAGING}/{query}-all/{run:06}-{uuid.uuid4().hex[:12]}"

    def publish(
        self,
        query: str,
        batch: int,
        attempt: str,
        offsets: tuple[str, ...] = (),
        check_held: Callable[[], None] = lambda: None,
        written: Sequence[File] | None = None,
    ) -> Manifest:
        """Put files in the directory of an attempt into the lake, all of them if it is not said
        which were `written`.

        `check_held` raises where the lake is somebody else's by now.
        """
        if written is None:
            written = [f for f in self.files.walk(attempt) if _is_data(f.path, attempt)]
        moves = tuple(
            Move(
                file.path,
                _place(file.path, attempt, f"batch-{batch:010}-{i:05}-{query}"),
                file.size,
            )
            for i, file in enumerate(written)
        )
        manifest = Manifest(query, batch, moves, offsets)
        check_held()  # a later run may have swept some of the files before they were listed
        if not self.files.write_new(_manifest(query, batch), msgspec.json.encode(manifest)):
            raise LakeDamaged(
                f"batch {batch} of query {query} is being published by somebody else",
                hint="one query may run once at a time: stop the other one, and start again",
            )
        check_held()  # whoever took it before the manifest stood may not have seen it
        for move in moves:
            self.files.move(move.staged, move.final)
        self._commit(manifest)
        self.files.remove(_staging(query, batch))
        return manifest

    def is_begun(self, query: str) -> bool:
        """Whether the lake has a batch of this query, or is about to."""
        begun = [*(path for path, _ in self.files.walk(COMMITS)), *self._manifests()]
        return any(path.rpartition("/")[2].startswith(f"{query}-") for path in begun)

    def last(self, query: str) -> Manifest | None:
        """The newest batch of a query that is in the lake."""
        newest = self.newest().get(query)
        return None if newest is None else self._read(_commit(query, newest))

    def newest(self) -> dict[str, int]:
        """The newest batch in the lake of each query."""
        found: dict[str, int] = {}
        for path, _ in self.files.walk(COMMITS):
            if name := _BOOK_FILE.fullmatch(path.rpartition("/")[2]):
                found[name[1]] = max(found.get(name[1], -1), int(name[2]))
        return found

    def _manifests(self) -> list[str]:
        paths = [path for path, _ in self.files.walk(MANIFESTS)]
        return [path for path in paths if _BOOK_FILE.fullmatch(path.rpartition("/")[2])]

    def _finish(self, manifest: Manifest) -> bool:
        """False for the manifest of a run that lost the lake, and whose files were swept."""
        if not any(self._is_whole(move.final, move) for move in manifest.moves) and any(
            not self._is_whole(move.staged, move) for move in manifest.moves
        ):
            self.files.remove(_manifest(manifest.query, manifest.batch))
            return False
        for move in manifest.moves:
            self._finish_move(move)
        self._commit(manifest)
        return True

    def _is_whole(self, path: str, move: Move) -> bool:
        return self.files.size(path) == move.size

    def _finish_move(self, move: Move) -> None:
        """On object stores a rename is a copy and a deletion, so both files may be there."""
        if self._is_whole(move.final, move):
            self.files.remove(move.staged)
            return
        if not self._is_whole(move.staged, move):
            raise LakeDamaged(
                f"{move.staged} should have {move.size:,} bytes and be renamed to {move.final}, "
                "and neither is there as it should be"
            )
        self.files.remove(move.final)
        self.files.move(move.staged, move.final)

    def _commit(self, manifest: Manifest) -> None:
        query, batch = manifest.query, manifest.batch
        self.files.move(_manifest(query, batch), _commit(query, batch))
        if batch >= MARKS_KEPT:
            self.files.remove(_commit(query, batch - MARKS_KEPT))

    def _read(self, path: str) -> Manifest:
        try:
            return msgspec.json.decode(self.files.read(path), type=Manifest)
        except msgspec.DecodeError as error:
            raise LakeDamaged(f"{path} can't be read: {error}") from None


def batch_of(file: File) -> tuple[str, int] | None:
    """Query and batch that brought a file of data; None for other files."""
    name = _BATCH_FILE.fullmatch(file.path.rpartition("/")[2])
    return None if name is None else (name[2], int(name[1]))


def _is_data(path: str, attempt: str) -> bool:
    """Whether Spark's committer has put this file where finished ones go."""
    inside = path.removeprefix(attempt + "/").split("/")
    return (
        inside[0] in TABLES
        and path.endswith(".parquet")
        and not any(part.startswith(("_", ".")) for part in inside)
    )


def _place(staged: str, attempt: str, name: str) -> str:
    """Where readers find a staged file: the same table and partition, under a name of its own."""
    folder = staged.removeprefix(attempt + "/").rpartition("/")[0]
    return f"{folder}/{name}.parquet"


def _staging(query: str, batch: int) -> str:
    return f"{STAGING}/{query}-{batch}"


def _manifest(query: str, batch: int) -> str:
    return f"{MANIFESTS}/{query}-{batch}.json"


def _commit(query: str, batch: int) -> str:
    return f"{COMMITS}/{query}-{batch}.json"
