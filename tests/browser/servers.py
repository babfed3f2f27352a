"""The servers of the browser tests: `penstock up`, and consoles, as processes on free ports."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue

START_S = 40.0
STOP_S = 30.0
SETTINGS = {
    "PENSTOCK_STORE_DELAY_LEVELS": "1s 1s 1s 2s 2s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h",
    "PENSTOCK_STORE_SEGMENT_BYTES": str(16 << 20),
    "PENSTOCK_BROKER_TRACE_TOPIC": "true",
    "PENSTOCK_BROKER_TRANSACTION_CHECKS_MAX": "1000",
    "PENSTOCK_BROKER_PROBE_PORT": "0",
    "PENSTOCK_BROKER_VIP_PORT": "0",
}

ACCESS = {
    "PENSTOCK_ACCESS_AUTHENTICATION": "true",
    "PENSTOCK_ACCESS_AUTHORIZATION": "true",
    "PENSTOCK_ACCESS_INITIAL_USER": "root:root-password",
    "PENSTOCK_ACCESS_INTERNAL_USER": "inner:inner-password",
}
"""Access control at the brokers."""
SUPER = {
    "PENSTOCK_CLIENT_ACCESS_KEY": "inner",
    "PENSTOCK_CLIENT_SECRET_KEY": "inner-password",
}
"""The user of a console's own requests there."""


def free_ports(count: int) -> int:
    """The first of some free ports in a row, below those that Linux gives to clients."""
    for first in range(22_000 + os.getpid() % 100 * 64, 32_000, count):
        if not any(_is_open(first + more) for more in range(count)):
            return first
    raise AssertionError("no free ports")


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Program:
    """A penstock process. `line` waits for a line of its output."""

    def __init__(self, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.heard: list[str] = []
        self._lines: Queue[str] = Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def line(self, pattern: str) -> str:
        """The next line that matches."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                text = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except Empty:
                raise AssertionError(f"no {pattern!r} in:\n{''.join(self.heard)}") from None
            if re.search(pattern, text):
                return text
            assert text, f"ended without {pattern!r}:\n{''.join(self.heard)}"

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.returncode

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.heard.append(text)
            self._lines.put(text)
        self._lines.put("")


def start_cluster(
    data: Path, *more: object, env: Mapping[str, str] | None = None
) -> tuple[Program, str]:
    """Start a NameServer and brokers; returns the process and the NameServer's address."""
    port = free_ports(64)
    program = Program(
        *("up", "--data", data, "--no-console", "--nameserver-port", port),
        *("--broker-port", port + 10, *more),
        env={**SETTINGS, **(env or {})},
    )
    program.line("^penstock is up")
    return program, f"127.0.0.1:{port}"


def start_console(
    nameserver: str, data: Path, *more: object, env: Mapping[str, str] | None = None
) -> tuple[Program, str]:
    """Start a console on a free port; returns the process and its URL without the last slash."""
    program = Program(
        *("console", "--nameserver", nameserver, "--port", 0, "--data", data),
        *("--interval", "0.5", *more),
        env=env,
    )
    line = program.line("^penstock console is up")
    return program, line.split(": ", 1)[1].strip().rstrip("/")


def kill_broker(servers: Program, port: int) -> None:
    """End the broker on a port with SIGKILL."""
    parent = servers.process.pid
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"--port" in words and words[words.index(b"--port") + 1] == b"%d" % port:
            os.kill(int(child), signal.SIGKILL)
            return
    raise AssertionError(f"no broker on port {port}")


@contextmanager
def taken_port(port: int) -> Iterator[None]:
    """Keeps a port in use, so that the broker can't start again."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            with suppress(OSError):  # the killed process still has it
                holder.bind(("127.0.0.1", port))
                break
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield
