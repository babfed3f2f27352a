"""`penstock demo pipeline` with few users: the output is complete, and no files are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_the_demo_processes_each_message_once_and_draws_a_chart(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    picture = tmp_path / "chart.svg"
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
    assert rows["lake"] == f"{sent} rows, {sent} distinct messages"
    assert rows["minutes counted"].endswith(", 0 wrong")
    assert rows["alerts"].endswith(", 0 wrong")
    assert picture.stat().st_size > 10_000
    assert f"chart: {picture}" in result.stdout
    assert rows["unreadable"] == "5 stored separately, 5 sent"
    assert list(place.iterdir()) == []


@pytest.mark.proof
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_demo_leaves_no_files(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ctrl-C is sent to all processes of a terminal, SIGTERM only to the first one."""
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
    with demo, demo.stdout as lines_printed:
        assert any(line.startswith("== sending") for line in lines_printed), output.read_text()
        if number == signal.SIGINT:
            os.killpg(demo.pid, number)
        else:
            demo.send_signal(number)
        lines_printed.read()  # ends when no process is left that could write
    assert demo.returncode == code, output.read_text()
    assert list(place.iterdir()) == []
    assert "Traceback" not in output.read_text()
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(place) not in commands.stdout
