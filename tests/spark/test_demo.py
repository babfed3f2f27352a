"""`penstock demo pipeline`, small: what the pipelines write is what was sent; nothing is left."""

from __future__ import annotations

import os
import signal
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
    assert rows["unreadable"] == "5 kept apart, 5 sent"
    assert list(place.iterdir()) == []


@pytest.mark.proof
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_demo_that_is_stopped_leaves_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C goes to all processes of a terminal, SIGTERM to the one that was started."""
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "pipeline", "--users", "20"]
    command += ["--dir", str(place), "--picture", str(tmp_path / "none.svg")]
    output = tmp_path / "output"
    with output.open("wb") as lines:
        demo = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=lines, start_new_session=True, text=True
        )
    assert demo.stdout is not None
    with demo, demo.stdout as lines_told:
        assert any(line.startswith("== telling") for line in lines_told), output.read_text()
        if number == signal.SIGINT:
            os.killpg(demo.pid, number)
        else:
            demo.send_signal(number)
        lines_told.read()  # ends when no process is left that could write
    assert demo.returncode == code, output.read_text()
    assert list(place.iterdir()) == []
    assert "Traceback" not in output.read_text()
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(place) not in commands.stdout
