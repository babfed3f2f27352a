"""Commits the files of a batch to a lake exactly once, even if the process is killed.

    data/date=2026-08-01/topic=orders/batch-0000000012-00003-<query>.parquet    what readers see
    bad/date=…/topic=…/…                                  rows whose body does not match the schema
    _penstock/staging/<query>-<batch>/<run>-<attempt>/{data,bad}/…    written by Spark's tasks
    _penstock/staging/<query>-all/<run>-<attempt>/data/…  written by our tasks, for all batches
    _penstock/manifests/<query>-<batch>.json              the files of the batch
    _penstock/commits/<query>-<batch>.json                the same file, after the commit

1. Spark writes a batch to the staging directory. Each attempt has a directory of its own, because
   tasks of a killed driver may continue to write for a while. A later run removes the directory.
2. The manifest is created by one rename. From then on this attempt is the batch.
3. The files are renamed to their final paths, which contain the query id and the batch number.
4. The manifest is renamed to the commit marker.

Before and after step 2 the run checks that it still owns the lake. A run that takes over a lake
first records its ownership and then looks for manifests. So the manifest of a run that has lost the
lake is either finished by the new owner, or its files are not moved at all.

A batch that Spark runs again does nothing if the commit marker exists. If the manifest exists, it
finishes steps 3 and 4 without reading messages. Otherwise it starts from the beginning. Readers
ignore names that begin with an underscore. Batches are committed one after another, so only the
latest commit markers are kept.
"""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.errors import LakeDamaged
from penstock.spark.pipelines.lake.lake_files import File, LakeFiles

METADATA_DIR: Final = "_penstock"
STAGING: Final = f"{METADATA_DIR}/staging"
MANIFESTS: Final = f"{METADATA_DIR}/manifests"
COMMITS: Final = f"{METADATA_DIR}/commits"
TABLES: Final = ("data", "bad")
COMMITS_KEPT: Final = 20
"""One is enough for Spark; the others help to find out what happened."""

_DATA_FILE: Final = re.compile(r"batch-(\d+)-\d+-([0-9a-f-]{36})\.parquet")
_STAGED_BATCH: Final = re.compile(r"[0-9a-f-]{36}-(\d+|all)")
_MANIFEST_FILE: Final = re.compile(r"([0-9a-f-]{36})-(\d+)\.json")


class FileMove(msgspec.Struct, frozen=True):
    """The rename of a staged file to its final path; paths are relative to the lake."""

    staged: str
    final: str
    size: int


class Manifest(msgspec.Struct, frozen=True):
    """What one batch of one query adds to a lake."""

    query: str
    batch: int
    moves: tuple[FileMove, ...]
    offsets: tuple[str, ...] = ()
    """The end of the batch in each source, as in Spark's checkpoint."""


@dataclass(frozen=True, slots=True)
class BatchCommitter:
    """Commits batches to a lake and knows which ones are committed."""

    files: LakeFiles

    def finish(self, query: str, batch: int) -> bool:
        """Whether this batch is committed; finishes its commit if the manifest exists."""
        done = self.files.size(_commit_path(query, batch)) is not None
        if not done and self.files.size(_manifest_path(query, batch)) is not None:
            done = self._finish_manifest(self._read(_manifest_path(query, batch)))
        if done:  # an interrupted rename by copying leaves the manifest behind
            self.files.remove(_manifest_path(query, batch))
            self.files.remove(_staging_path(query, batch))
        return done

    def finish_all(self, query: str) -> None:
        """Finish the commit of all batches of a query that have a manifest."""
        for path in self._manifests():
            manifest = self._read(path)
            if manifest.query == query:
                self.finish(query, manifest.batch)

    def remove_leftovers(self, query: str, run: int) -> None:
        """Remove staged files and manifests of earlier runs; only the owner may call this.

        Files of later runs stay, because this run may have lost the lake in the meantime.
        """
        for folder in {"/".join(path.split("/")[:4]) for path, _ in self.files.walk(STAGING)}:
            batch, _, attempt = folder.removeprefix(STAGING + "/").partition("/")
            number = attempt.partition("-")[0]
            if _STAGED_BATCH.fullmatch(batch) and not (number.isdigit() and int(number) >= run):
                self.files.remove(folder)
        for path in self._manifests():
            if not path.startswith(f"{MANIFESTS}/{query}-"):  # created after its run lost the lake
                self.files.remove(path)

    def new_attempt(self, query: str, batch: int, run: int = 0) -> str:
        """A new staging directory for one batch."""
        return f"{_staging_path(query, batch)}/{run:06}-{uuid.uuid4().hex[:12]}"

    def new_run_attempt(self, query: str, run: int) -> str:
        """A new staging directory for all batches of a run, whose tasks report their files."""
        return f"{STAGING}/{query}-all/{run:06}-{uuid.uuid4().hex[:12]}"

    def commit(
        self,
        query: str,
        batch: int,
        attempt: str,
        offsets: tuple[str, ...] = (),
        check_owner: Callable[[], None] = lambda: None,
        written: Sequence[File] | None = None,
    ) -> Manifest:
        """Commit files of a staging directory: those in `written`, or all data files.

        `check_owner` raises if another run owns the lake now.
        """
        if written is None:
            written = [f for f in self.files.walk(attempt) if _is_data(f.path, attempt)]
        moves = tuple(
            FileMove(
                file.path,
                _final_path(file.path, attempt, f"batch-{batch:010}-{i:05}-{query}"),
                file.size,
            )
            for i, file in enumerate(written)
        )
        manifest = Manifest(query, batch, moves, offsets)
        check_owner()  # a later run may have removed some of the files before they were listed
        if not self.files.write_new(_manifest_path(query, batch), msgspec.json.encode(manifest)):
            raise LakeDamaged(
                f"another run is committing batch {batch} of query {query}",
                hint="a query can run only once at a time; stop the other run and start again",
            )
        check_owner()  # a run that took over before the manifest existed may not have seen it
        for move in moves:
            self.files.move(move.staged, move.final)
        self._write_marker(manifest)
        self.files.remove(_staging_path(query, batch))
        return manifest

    def has_batches(self, query: str) -> bool:
        """Whether a batch of this query is committed or has a manifest."""
        paths = [*(path for path, _ in self.files.walk(COMMITS)), *self._manifests()]
        return any(path.rpartition("/")[2].startswith(f"{query}-") for path in paths)

    def last_batch(self, query: str) -> Manifest | None:
        """The last committed batch of a query."""
        last = self.last_batches().get(query)
        return None if last is None else self._read(_commit_path(query, last))

    def last_batches(self) -> dict[str, int]:
        """The number of the last committed batch of each query."""
        found: dict[str, int] = {}
        for path, _ in self.files.walk(COMMITS):
            if name := _MANIFEST_FILE.fullmatch(path.rpartition("/")[2]):
                found[name[1]] = max(found.get(name[1], -1), int(name[2]))
        return found

    def _manifests(self) -> list[str]:
        paths = [path for path, _ in self.files.walk(MANIFESTS)]
        return [path for path in paths if _MANIFEST_FILE.fullmatch(path.rpartition("/")[2])]

    def _finish_manifest(self, manifest: Manifest) -> bool:
        """False if the manifest is of a run that lost the lake and whose files were removed."""
        if not any(self._is_complete(move.final, move) for move in manifest.moves) and any(
            not self._is_complete(move.staged, move) for move in manifest.moves
        ):
            self.files.remove(_manifest_path(manifest.query, manifest.batch))
            return False
        for move in manifest.moves:
            self._finish_move(move)
        self._write_marker(manifest)
        return True

    def _is_complete(self, path: str, move: FileMove) -> bool:
        return self.files.size(path) == move.size

    def _finish_move(self, move: FileMove) -> None:
        """Rename a file unless that is done; object stores copy, so both files may exist."""
        if self._is_complete(move.final, move):
            self.files.remove(move.staged)
            return
        if not self._is_complete(move.staged, move):
            raise LakeDamaged(
                f"{move.staged} ({move.size:,} bytes) should be renamed to {move.final}, but "
                "neither file exists with this size"
            )
        self.files.remove(move.final)
        self.files.move(move.staged, move.final)

    def _write_marker(self, manifest: Manifest) -> None:
        query, batch = manifest.query, manifest.batch
        self.files.move(_manifest_path(query, batch), _commit_path(query, batch))
        if batch >= COMMITS_KEPT:
            self.files.remove(_commit_path(query, batch - COMMITS_KEPT))

    def _read(self, path: str) -> Manifest:
        try:
            return msgspec.json.decode(self.files.read(path), type=Manifest)
        except msgspec.DecodeError as error:
            raise LakeDamaged(f"{path} can't be read: {error}") from None


def batch_of(file: File) -> tuple[str, int] | None:
    """The query and the batch that wrote a data file; None for other files."""
    name = _DATA_FILE.fullmatch(file.path.rpartition("/")[2])
    return None if name is None else (name[2], int(name[1]))


def _is_data(path: str, attempt: str) -> bool:
    """Whether a staged file is a finished data file, according to Spark's committer."""
    inside = path.removeprefix(attempt + "/").split("/")
    return (
        inside[0] in TABLES
        and path.endswith(".parquet")
        and not any(part.startswith(("_", ".")) for part in inside)
    )


def _final_path(staged: str, attempt: str, name: str) -> str:
    """The path of a staged file for readers: the same table and partition, and a new name."""
    folder = staged.removeprefix(attempt + "/").rpartition("/")[0]
    return f"{folder}/{name}.parquet"


def _staging_path(query: str, batch: int) -> str:
    return f"{STAGING}/{query}-{batch}"


def _manifest_path(query: str, batch: int) -> str:
    return f"{MANIFESTS}/{query}-{batch}.json"


def _commit_path(query: str, batch: int) -> str:
    return f"{COMMITS}/{query}-{batch}.json"
