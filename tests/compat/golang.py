"""Apache's Go client: builds the program of the directory ``go`` and steers it.

    with GoClients(names, tmp / "go") as go:
        go.call("produce", name="p", group="g")
        go.call("send", name="p", how="sync", messages=[{"topic": "t", "body": encode(b"x")}])

The commands are the functions of the Go program.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .go_program import program

GO_DIR = Path(__file__).parent / "go"

STOP_S = 30.0

Fields = dict[str, Any]


def encode(body: bytes) -> str:
    """A body as the program's commands take it."""
    return base64.b64encode(body).decode()


def decode(message: Fields) -> bytes:
    """The body of a message that the program reported."""
    return base64.b64decode(message["body"])


class GoError(Exception):
    """A command of the program failed; the text is the Go client's."""


class GoClients:
    """The running program; a context manager.

    `names` is the name server's address. In `directory` the program keeps its log and what
    broadcast consumers remember.
    """

    def __init__(self, names: str, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._names = names
        self._home = directory
        self._log = directory / "log.txt"

    def __enter__(self) -> Self:
        command = [str(program(GO_DIR, "clients")), self._names]
        # Settings of a RocketMQ user on this machine must not reach the tests.
        kept = {k: v for k, v in os.environ.items() if "rocketmq" not in k.lower()}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**kept, "HOME": str(self._home)},
                text=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # The end of its input lets it shut its clients down.
            self._process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            if error is None:
                raise TimeoutError(f"the Go clients did not stop:\n{self.log_tail()}") from None

    def call(self, do: str, **arguments: Any) -> Any:
        """Carry out a command and return its answer; raises GoError where it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the Go program ended at {do!r}:\n{self.log_tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise GoError(answer["error"])
        return answer["answer"]

    def log_tail(self) -> str:
        """The last of what the Go client has logged."""
        return self._log.read_text(errors="replace")[-4000:]
