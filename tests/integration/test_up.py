"""`penstock up`, `penstock nameserver` and `penstock broker` as processes."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import pytest

from penstock.transport.peer import Peer
from penstock.wire.codes import RequestCode

PATIENCE_S = 30.0
LOOPBACK = "127.0.0.1"
PROBLEM = "^penstock: (?!running uncompiled)"


class Program:
    """A penstock process; `line` waits for a line of its output."""

    def __init__(self, *arguments: object, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.out: Queue[str] = Queue()
        self.err: Queue[str] = Queue()
        self.heard: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        pipes = ((self.process.stdout, self.out), (self.process.stderr, self.err))
        self._threads = [
            threading.Thread(target=self._read, args=pipe, daemon=True) for pipe in pipes
        ]
        for thread in self._threads:
            thread.start()

    def line(self, pattern: str, queue: "Queue[str] | None" = None) -> str:
        """The next matching line, of stdout by default."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            text = (queue or self.out).get(timeout=max(deadline - time.monotonic(), 0.01))
            if re.search(pattern, text):
                return text
            assert text, f"ended without {pattern!r}: {''.join(self.heard)}"

    def children(self) -> list[int]:
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in task.read_text().split()]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def finish(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _read(self, pipe: Iterator[str], queue: "Queue[str]") -> None:
        for text in pipe:
            self.heard.append(text)
            queue.put(text)
        queue.put("")


Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Program] = []

    def run(*arguments: object, env: dict[str, str] | None = None) -> Program:
        programs.append(Program(*arguments, env=env))
        return programs[-1]

    yield run
    for program in programs:
        program.finish()


@pytest.fixture
def port() -> int:
    """The first of 24 free ports."""
    for first in range(20_000 + os.getpid() % 1000 * 10, 60_000, 24):
        if not any(is_open(first + more) for more in range(24)):
            return first
    raise AssertionError("no free ports")


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def registered(port: int) -> str:
    """The cluster information of a NameServer."""

    async def ask() -> bytes:
        peer = Peer(f"{LOOPBACK}:{port}")
        try:
            answer = await peer.call(RequestCode.GET_BROKER_CLUSTER_INFO, timeout_ms=10_000)
        finally:
            await peer.close()
        return answer.body

    return asyncio.run(ask()).decode()


def up(start: Start, port: int, data: Path, *more: object) -> Program:
    return start(
        "up", "--data", data, "--nameserver-port", port, "--broker-port", port + 1,
        "--no-console", *more,
    )  # fmt: skip


def test_up_starts_all_servers_and_sigterm_stops_them(
    start: Start, port: int, tmp_path: Path
) -> None:
    program = up(start, port, tmp_path / "d", "--brokers", 2)
    ready = program.line("")
    assert ready.startswith("penstock is up")
    for part in (f"{LOOPBACK}:{port}", f"broker-a {LOOPBACK}:{port + 1}",
                 f"broker-b {LOOPBACK}:{port + 11}", str(tmp_path / "d")):  # fmt: skip
        assert part in ready
    assert f'"{LOOPBACK}:{port}"' in program.line(r"with Producer\(")
    assert f"-n {LOOPBACK}:{port}" in program.line("penstock send")
    assert f"-n {LOOPBACK}:{port}" in program.line("mqadmin updateTopic")
    known = registered(port)
    for name, its_port in (("broker-a", port + 1), ("broker-b", port + 11)):
        assert name in known
        assert f"{LOOPBACK}:{its_port}" in known
        assert is_open(its_port)
    children = program.children()
    assert len(children) == 2
    assert program.stop() == 0
    assert not any(map(is_running, children))
    assert not any(map(is_open, (port, port + 1, port + 11)))


def cluster_status(port: int) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "penstock.cli.main", "cluster", "status", "--json"]
    shown = subprocess.run(
        [*command, "-n", f"{LOOPBACK}:{port}"], capture_output=True, check=True, timeout=PATIENCE_S
    )
    found: list[dict[str, object]] = json.loads(shown.stdout)
    return found


def test_up_runs_slaves_and_sigterm_stops_them(start: Start, port: int, tmp_path: Path) -> None:
    program = up(start, port, tmp_path / "d", "--replicas", 2)
    ready = program.line("^penstock is up")
    assert f"broker-a {LOOPBACK}:{port + 1}, broker-a-slave-1 {LOOPBACK}:{port + 11};" in ready
    sent = start("send", "-n", f"{LOOPBACK}:{port}", "Greetings", "hello", "--json")
    assert json.loads(sent.line("status"))["status"] == "SEND_OK"
    wait_until(lambda: cluster_status(port)[1]["in_sync"] is True)
    master, slave = cluster_status(port)
    assert (master["role"], master["id"], master["epoch"]) == ("sync_master", 0, 1)
    assert (slave["role"], slave["id"], slave["epoch"]) == ("slave", 1, 1)
    assert slave["address"] == f"{LOOPBACK}:{port + 11}"
    assert slave["log_end"] == master["log_end"] != 0
    assert slave["behind"] == 0
    assert all(is_open(base + more) for base in (port + 1, port + 11) for more in (0, 2))
    assert {path.name for path in (tmp_path / "d").iterdir()} == {
        "nameserver",
        "broker-a",
        "broker-a-slave-1",
    }
    children = program.children()
    assert len(children) == 2
    assert program.stop() == 0
    assert not any(map(is_running, children))
    assert "Traceback" not in "".join(program.heard)


def test_a_killed_broker_is_restarted_and_logged(start: Start, port: int, tmp_path: Path) -> None:
    program = up(start, port, tmp_path)
    program.line("^penstock is up")
    (child,) = program.children()
    os.kill(child, signal.SIGKILL)
    assert "broker-a was killed by SIGKILL" in program.line("restarting in", program.err)
    program.line("broker-a is ready again", program.err)
    assert is_open(port + 1)
    (heir,) = program.children()
    assert heir != child
    assert program.stop(signal.SIGINT) == 0
    assert not is_running(heir)


def test_a_killed_supervisor_leaves_no_process(start: Start, port: int, tmp_path: Path) -> None:
    program = up(start, port, tmp_path, "--brokers", 2)
    program.line("^penstock is up")
    children = program.children()
    program.stop(signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, children)))
    again = up(start, port, tmp_path, "--brokers", 2)
    again.line("^penstock is up")
    assert again.stop() == 0


@pytest.mark.parametrize("more", [0, 1])
def test_a_port_in_use_is_reported_in_one_line(
    start: Start, port: int, tmp_path: Path, more: int
) -> None:
    with socket.create_server((LOOPBACK, port + more)):
        program = up(start, port, tmp_path)
        assert program.process.wait(PATIENCE_S) == 1
    line = program.line(PROBLEM, program.err)
    assert f"{port + more}" in line
    assert "choose another port" in line
    assert "Traceback" not in "".join(program.heard)
    assert not is_open(port)


def test_nameserver_and_broker_report_that_they_are_ready(
    start: Start, port: int, tmp_path: Path
) -> None:
    nameserver = start("nameserver", "--port", port)
    assert nameserver.line("").startswith(f"penstock nameserver is ready on {LOOPBACK}:{port}")
    broker = start(
        "broker", "-n", f"{LOOPBACK}:{port}", "--port", port + 1, "--name", "b7", "--data", tmp_path
    )
    ready = broker.line("")
    assert ready.startswith(f"penstock broker b7 is ready on {LOOPBACK}:{port + 1}")
    assert ready.rstrip().endswith(f"registered with {LOOPBACK}:{port}")
    assert '"b7"' in registered(port)
    assert broker.stop() == 0
    assert nameserver.stop(signal.SIGINT) == 0


def test_the_ready_line_names_nameservers_that_a_broker_is_not_registered_with(
    start: Start, port: int, tmp_path: Path
) -> None:
    nowhere = f"{LOOPBACK}:{port + 5}"
    broker = start("broker", "-n", nowhere, "--port", port, "--data", tmp_path)
    ready = broker.line("")
    assert f"not registered yet with {nowhere}: " in ready
    assert ", registered with" not in ready
    assert broker.stop() == 0


def test_a_broker_reads_broker_conf_and_logs_ignored_settings(
    start: Start, port: int, tmp_path: Path
) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text(
        f"brokerName=old\nlistenPort={port}\nbindAddress={LOOPBACK}\nstorePathRootDir={tmp_path}\n"
        "sendMessageThreadPoolNums=1\nbrokerNam=x\n"
    )
    broker = start("broker", "-c", conf, "--log", "json")
    assert broker.line("").startswith(f"penstock broker old is ready on {LOOPBACK}:{port}")
    unknown = json.loads(broker.line("brokerNam;", broker.err))
    assert unknown["level"] == "warning"
    assert unknown["process"] == "old"
    assert "did you mean brokerName?" in unknown["message"]
    ignored = json.loads(broker.line("sendMessageThreadPoolNums", broker.err))
    assert "no effect in Penstock" in ignored["message"]
    assert broker.stop() == 0


def test_two_brokers_can_not_share_a_store(start: Start, port: int, tmp_path: Path) -> None:
    start("broker", "--port", port, "--data", tmp_path).line("is ready")
    second = start("broker", "--port", port + 5, "--data", tmp_path)
    assert second.process.wait(PATIENCE_S) == 1
    assert "different store directory" in second.line(PROBLEM, second.err)


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (("broker", "--data", "FILE/below"), {}, "File exists; set --data to another directory"),
        (("broker", "-c", "missing.toml"), {}, "No such file or directory: missing.toml"),
        (("broker", "--nameservers", "nowhere"), {}, "--nameservers must be a list of host:port"),
        (("nameserver",), {"PENSTOCK_NAMESERVER_PORT": "x"}, "PENSTOCK_NAMESERVER_PORT must be"),
        (("broker",), {"PENSTOCK_STORE_SEGMENT_BYTES": "9000000000000"}, "at most 2147483647"),
        (("up", "--brokers", "3", "--broker-port", "65520"), {}, "choose a lower --broker-port"),
    ],
)
def test_a_failed_start_is_explained_in_one_line(
    start: Start, port: int, tmp_path: Path,
    arguments: tuple[str, ...], env: dict[str, str], message: str,
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    given = [part.replace("FILE", str(tmp_path / "file")) for part in arguments]
    program = start(*given, env={"PENSTOCK_BROKER_PORT": str(port), **env})
    assert program.process.wait(PATIENCE_S) == 1
    assert message in program.line(PROBLEM, program.err)
    assert "Traceback" not in "".join(program.heard)


def test_the_limit_of_open_files_is_raised(start: Start, port: int, tmp_path: Path) -> None:
    program = start("broker", "--port", port, "--data", tmp_path)
    program.line("is ready")
    limits = Path(f"/proc/{program.process.pid}/limits").read_text()
    found = re.search(r"Max open files +(\d+) +(\d+)", limits)
    assert found is not None
    assert found[1] == found[2]
    assert program.stop() == 0
