"""The page Pipelines shows what `penstock pipeline run` records of Spark's progress reports."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.pipeline_record import recorded
from penstock.console.pipeline_runs import DIRECTORY_VARIABLE
from penstock.errors import BadSetting
from penstock.spark.pipelines.batch_progress import BatchProgress, new_batches
from tests.unit.console.console_kit import TestedConsole

OPTIONS = {"topics": "orders", "lake": "/data/lake", "partitions": None}


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestedConsole]:
    """A console that reads the directory where the command records."""
    directory = tmp_path / "runs"
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    with TestedConsole(tmp_path / "console", pipelines=directory) as found:
        yield found


def offsets(value: int) -> str:
    return json.dumps({"orders": {"broker-a": {"0": value}}})


def query(*ends: int) -> Any:
    """A streaming query whose batches ended at these offsets; 1,000 messages are available."""
    reports = [
        {
            "batchId": number,
            "durationMs": {"addBatch": 900, "triggerExecution": 2_000},
            "sources": [
                {
                    "numInputRows": end - start,
                    "startOffset": offsets(start),
                    "endOffset": offsets(end),
                    "latestOffset": offsets(1_000),
                }
            ],
        }
        for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False))
    ]
    return SimpleNamespace(id="q1", name=None, lastProgress=reports[-1], recentProgress=reports)


def shown(console: TestedConsole) -> dict[str, Any]:
    [run] = console.get("/pipelines").json()["rows"]
    return dict(run)


def test_batches_of_spark_are_shown_while_the_pipeline_runs(console: TestedConsole) -> None:
    printed: list[BatchProgress] = []
    last: dict[str, int] = {}
    with recorded("lake", OPTIONS, "10.0.0.1:9876", printed.append) as run:
        assert (shown(console)["state"], shown(console)["batches"]) == ("running", [])
        for ends in ((400,), (400, 950)):
            for batch in new_batches(query(*ends), last):
                run.on_batch(batch)
        now = shown(console)
        run.ended = True
    assert now["options"] == {"topics": "orders", "lake": "/data/lake"}
    assert (now["pipeline"], now["nameserver"]) == ("lake", "10.0.0.1:9876")
    assert (now["state"], now["rows"]) == ("running", 950)
    assert [(b["number"], b["rows"], b["seconds"], b["lag"]) for b in now["batches"]] == [
        (0, 400, 2.0, 600),
        (1, 550, 2.0, 50),
    ]
    assert [batch.number for batch in printed] == [0, 1]
    assert shown(console)["state"] == "finished"


def test_a_pipeline_that_was_stopped_or_has_failed_says_so(console: TestedConsole) -> None:
    with recorded("lake", OPTIONS, "n:1", print):
        pass
    assert shown(console)["state"] == "stopped"
    with pytest.raises(BadSetting), recorded("sink", {}, "n:1", print):
        raise BadSetting("the lake can't be written", hint="check the path")
    states = {
        run["pipeline"]: (run["state"], run["problem"])
        for run in console.get("/pipelines").json()["rows"]
    }
    assert states["sink"][0] == "failed"
    assert "the lake can't be written" in states["sink"][1]
