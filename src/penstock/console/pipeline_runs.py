"""Records of pipeline runs: `penstock pipeline run` writes them, the console shows them.

A run is one JSON file, which is replaced after each batch. A run whose process has ended without
saying so has failed. The records contain no credentials.
"""

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from penstock.user_directories import user_directory

RUNS_MAX = 200
BATCHES_MAX = 60
DIRECTORY_VARIABLE = "PENSTOCK_PIPELINE_RUNS"


@dataclass(frozen=True, slots=True)
class RunBatch:
    """A completed batch."""

    at_ms: int
    query: str
    number: int
    rows: int
    seconds: float
    lag: int | None


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One run of a pipeline, and its last batches."""

    id: str
    pipeline: str
    options: Mapping[str, str]
    nameserver: str
    pid: int
    host: str
    started_ms: int
    updated_ms: int
    state: str = "running"
    """running, finished, stopped or failed."""
    problem: str = ""
    rows: int = 0
    batches: tuple[RunBatch, ...] = field(default_factory=tuple)


def default_directory() -> Path:
    """Where runs are recorded: the variable PENSTOCK_PIPELINE_RUNS, or the user's state."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return Path(given)
    return user_directory("XDG_STATE_HOME", ".local/state") / "penstock" / "pipelines"


class RunRecorder:
    """Writes the record of one run. A disk that refuses it does not stop the pipeline."""

    def __init__(self, directory: Path, run: PipelineRun) -> None:
        self._path = directory / f"{run.started_ms}-{run.id}.json"
        self.run = run
        self._write()
        _delete_old(directory)

    def batch(self, batch: RunBatch) -> None:
        """Add a completed batch."""
        batches = (*self.run.batches, batch)[-BATCHES_MAX:]
        self.run = replace(
            self.run, updated_ms=batch.at_ms, rows=self.run.rows + batch.rows, batches=batches
        )
        self._write()

    def end(self, state: str, now_ms: int, problem: str = "") -> None:
        """The run has ended."""
        self.run = replace(self.run, state=state, updated_ms=now_ms, problem=problem)
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(asdict(self.run)))
            new.replace(self._path)


def new_id() -> str:
    """A random id of a run."""
    return secrets.token_hex(4)


def read_runs(directory: Path, this_host: str) -> list[PipelineRun]:
    """The recorded runs, the newest first."""
    found = []
    for path in sorted(directory.glob("*.json"), reverse=True)[:RUNS_MAX]:
        try:
            run = msgspec.json.decode(path.read_bytes(), type=PipelineRun)
        except (OSError, msgspec.DecodeError):
            continue
        if run.state == "running" and run.host == this_host and not _is_alive(run.pid):
            run = replace(run, state="failed", problem="its process has ended")
        found.append(run)
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _delete_old(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for path in sorted(directory.glob("*.json"), reverse=True)[RUNS_MAX:]:
            path.unlink(missing_ok=True)
