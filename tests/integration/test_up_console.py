"""`penstock up` with the web console."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

LOOPBACK = "127.0.0.1"
PATIENCE_S = 30.0


@pytest.fixture
def ports() -> list[int]:
    """The ports of NameServer, broker and console."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        sockets = (one, two, three)
        for probe in sockets:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in sockets]


class Up:
    """`penstock up`, whose stderr is read in a thread."""

    def __init__(self, data: Path, ports: list[int], *more: str) -> None:
        command = [sys.executable, "-m", "penstock.cli.main", "up", "--data", str(data), *more]
        for name, port in zip(("nameserver", "broker", "console"), ports, strict=True):
            command += [f"--{name}-port", str(port)]
        env = {**os.environ, "PENSTOCK_BROKER_PROBE_PORT": "0", "PENSTOCK_BROKER_VIP_PORT": "0"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self.lines: Queue[str] = Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.put(line)

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def line(self, part: str) -> str:
        while True:
            line = self.lines.get(timeout=PATIENCE_S)
            if part in line:
                return line

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code


@pytest.fixture
def up(tmp_path: Path, ports: list[int]) -> Iterator[Up]:
    program = Up(tmp_path, ports)
    yield program
    program.stop()


def test_the_console_starts_after_the_ready_line_and_ends_with_the_servers(
    up: Up, ports: list[int]
) -> None:
    assert up.ready_line().startswith("penstock is up: NameServer")
    assert up.line("penstock console is up").strip().endswith(f"http://{LOOPBACK}:{ports[2]}/")
    with urllib.request.urlopen(f"http://{LOOPBACK}:{ports[2]}/api/overview") as answer:
        assert json.load(answer)["nameservers"] == [f"{LOOPBACK}:{ports[0]}"]
    children = up.children()
    assert len(children) == 2
    assert up.stop() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_port_in_use_is_said_and_the_servers_go_on(tmp_path: Path, ports: list[int]) -> None:
    with socket.create_server((LOOPBACK, ports[2])):
        program = Up(tmp_path, ports)
        assert program.ready_line().startswith("penstock is up")
        line = program.line("the web console can't listen")
        assert f"{LOOPBACK}:{ports[2]}: Address already in use" in line
        assert "--console-port" in line
        assert "the servers continue without it" in program.line("the web console ended")
        assert program.process.poll() is None
        assert program.stop() == 0


def test_a_console_on_another_address_prints_its_first_password(
    up: Up, tmp_path: Path, ports: list[int]
) -> None:
    up.ready_line()
    command = [sys.executable, "-m", "penstock.cli.main", "console", "--port", "0"]
    command += ["-n", f"{LOOPBACK}:{ports[0]}", "--host", "0.0.0.0", "--data"]
    for expected in ("the first account is admin", "penstock console is up"):
        console = subprocess.Popen(
            [*command, str(tmp_path / "guarded")], stdout=subprocess.PIPE, text=True
        )
        assert console.stdout is not None
        assert expected in console.stdout.readline()
        console.terminate()
        assert console.wait(PATIENCE_S) == 0
        console.stdout.close()
