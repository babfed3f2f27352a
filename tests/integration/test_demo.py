"""`penstock demo broker` with few messages: nothing is lost, and no files are left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("flush", [[], ["--sync-flush"]])
def test_the_demo_loses_nothing_and_cleans_up(tmp_path: Path, flush: list[str]) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "broker", "--messages", "20000"]
    command += ["--dir", str(tmp_path), "--seed", "7", *flush]
    environment = {**os.environ, "COLUMNS": "120"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in result.stdout.splitlines()
        if len(cells := line.split("│")) == 4
    }
    assert rows["lost"] == "0"
    assert int(rows["acknowledged before the kill"].split()[0].replace(",", "")) >= 20000
    assert rows["verified"].endswith("damage: 0")
    assert "killed the broker (SIGKILL)" in result.stdout
    assert list(tmp_path.iterdir()) == []
