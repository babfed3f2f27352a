"""A server of a cluster as a child process, on a machine of the network."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.compat.replication_machines import penstock_environment

STOP_S = 45.0
"""A master that stops forwards requests for up to 35 s, until clients know the next one."""


class ServerProcess:
    """One server that can be killed, stopped and started again. Starting does not wait for it."""

    def __init__(
        self,
        name: str,
        address: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`address` is that of its port."""
        self.name = name
        self.address = address
        self.log = log
        self._command = list(command)
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, unless it is running."""
        if self.running:
            return
        self.kill()
        environment = {**penstock_environment(), **self._environment}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def kill(self) -> None:
        """kill -9, unless it is not running."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()

    def terminate(self) -> int | None:
        """SIGTERM; returns the exit code, or None if it was not running. Waits for the end."""
        process, self._process = self._process, None
        if process is None:
            return None
        with process:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                return process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise TimeoutError(f"{self.name} did not stop within {STOP_S} s") from None

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.running:
            assert self._process is not None
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        if self.running:
            assert self._process is not None
            self._process.send_signal(signal.SIGCONT)

    def last_lines(self, size: int = 2_000) -> str:
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""
