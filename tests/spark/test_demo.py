"""`penstock demo pipeline`, small: what the pipelines write is what was sent; nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_the_demo_finds_each_message_once_and_leaves_a_picture(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    picture = tmp_path / "story.svg"
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "pipeline", "--users", "20"]
    command += ["--seconds", "8", "--dir", str(place), "--picture", str(picture)]
    environment = {**os.environ, "COLUMNS": "120"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in result.stdout.splitlines()
        if len(cells := line.split("│")) == 4
    }
    sent = rows["sent"].split()[0]
    assert rows["lake"] == f"{sent} rows, {sent} different messages"
    assert rows["minutes counted"].endswith(", 0 wrong")
    assert rows["alerts"].endswith(", 0 wrong")
    assert picture.stat().st_size > 10_000
    assert f"the picture: {picture}" in result.stdout
    assert list(place.iterdir()) == []
