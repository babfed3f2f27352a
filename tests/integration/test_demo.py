"""`penstock demo broker` and `penstock demo failover`: nothing is lost, and no files are left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_demo(*arguments: str) -> tuple[str, dict[str, str]]:
    """The output of a demo, and the rows of its summary."""
    command = [sys.executable, "-m", "penstock.cli.main", "demo", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in result.stdout.splitlines()
        if len(cells := line.split("│")) == 4
    }
    return result.stdout, rows


@pytest.mark.parametrize("flush", [[], ["--sync-flush"]])
def test_the_demo_loses_nothing_and_cleans_up(tmp_path: Path, flush: list[str]) -> None:
    output, rows = run_demo(
        "broker", "--messages", "20000", "--dir", str(tmp_path), "--seed", "7", *flush
    )
    assert rows["lost"] == "0"
    assert int(rows["acknowledged before the kill"].split()[0].replace(",", "")) >= 20000
    assert rows["verified"].endswith("damage: 0")
    assert "killed the broker (SIGKILL)" in output
    assert list(tmp_path.iterdir()) == []


def test_sending_goes_on_when_the_master_is_killed(tmp_path: Path) -> None:
    output, rows = run_demo("failover", "--dir", str(tmp_path))
    assert "killed the master (SIGKILL)" in output
    assert rows["lost"] == "0"
    before, after = (
        int(rows[name].split()[0].replace(",", ""))
        for name in ("acknowledged before the kill", "acknowledged after it")
    )
    assert before > 0
    assert after > 0
    assert int(rows["read"].split()[0].replace(",", "")) >= before + after
    assert "epoch 2" in rows["election"]
    assert list(tmp_path.iterdir()) == []
