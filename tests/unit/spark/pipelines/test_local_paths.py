"""Paths of this machine are checked before Spark is started."""

from pathlib import Path

import pytest

from penstock.cli.pipeline_command import _has_local_files
from penstock.errors import BadSetting
from penstock.spark.pipelines.insight.insight_pipeline import PIPELINE as INSIGHT
from penstock.spark.pipelines.local_paths import local_path
from penstock.spark.pipelines.replay.replay_pipeline import PIPELINE as REPLAY
from penstock.spark.pipelines.running import PipelineJob


def test_only_paths_of_this_machine_are_local() -> None:
    here, elsewhere = PipelineJob({}, local_files=True), PipelineJob({})
    assert local_path(here, "lake") == local_path(elsewhere, "file:lake") == Path("lake")
    assert local_path(elsewhere, "lake") is None
    assert local_path(here, "hdfs://names/lake") is None


def test_spark_settings_tell_whether_paths_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    assert _has_local_files({"spark.ui.enabled": "true"})
    assert not _has_local_files({"spark.hadoop.fs.defaultFS": "hdfs://names"})
    monkeypatch.setenv("HADOOP_CONF_DIR", "conf")
    assert not _has_local_files({})


def test_replay_and_insight_refuse_a_directory_that_is_not_a_lake(tmp_path: Path) -> None:
    given = {"lake": str(tmp_path), "output": str(tmp_path / "report")}
    with pytest.raises(BadSetting, match="is not a lake: it has no directory data"):
        INSIGHT.job(given, local_files=True)
    again = {"lake": str(tmp_path), "same_topic": True, "dry_run": True}
    with pytest.raises(BadSetting, match="is not a lake: it has no directory data"):
        REPLAY.job(again, local_files=True)
    (tmp_path / "data").mkdir()
    REPLAY.job(again, local_files=True)


def test_insight_refuses_an_output_with_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "lake" / "data").mkdir(parents=True)
    output = tmp_path / "report"
    output.mkdir()
    given = {"lake": str(tmp_path / "lake"), "output": str(output)}
    INSIGHT.job(given, local_files=True)
    (output / "thesis.txt").write_text("important")
    with pytest.raises(BadSetting, match="contains files of other programs"):
        INSIGHT.job(given, local_files=True)
