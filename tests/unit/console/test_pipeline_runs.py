"""Records of pipeline runs."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.console.pipeline_runs import (
    BATCHES_MAX,
    PipelineRun,
    RunBatch,
    RunRecorder,
    default_directory,
    read_runs,
)

RUN = PipelineRun("ab12", "lake", {"topics": "orders"}, "n:1", os.getpid(), "here", 1_000, 1_000)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, RUN)
    for number in range(BATCHES_MAX + 5):
        recorder.batch(RunBatch(2_000 + number, "", number, 10, 0.5, None))
    [run] = read_runs(tmp_path, "here")
    assert run == recorder.run
    assert (run.rows, len(run.batches)) == (10 * (BATCHES_MAX + 5), BATCHES_MAX)
    recorder.end("finished", 9_000)
    assert read_runs(tmp_path, "here")[0].state == "finished"


def test_a_run_whose_process_is_gone_has_failed(tmp_path: Path) -> None:
    gone = replace(RUN, pid=2**22 + 1)
    RunRecorder(tmp_path, gone)
    [run] = read_runs(tmp_path, "here")
    assert (run.state, run.problem) == ("failed", "its process has ended")
    [elsewhere] = read_runs(tmp_path, "another machine")
    assert elsewhere.state == "running"


def test_other_files_and_a_missing_directory_do_not_matter(tmp_path: Path) -> None:
    assert read_runs(tmp_path / "missing", "here") == []
    (tmp_path / "x.json").write_text("{}")
    assert read_runs(tmp_path, "here") == []


def test_a_directory_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    RunRecorder(blocked / "runs", RUN).end("finished", 1)


def test_the_directory_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "penstock" / "pipelines"
    monkeypatch.setenv("PENSTOCK_PIPELINE_RUNS", "/elsewhere")
    assert default_directory() == Path("/elsewhere")
