"""One JVM that runs real RocketMQ clients by commands: the program Session of tests/compat/java.

    with Java(tmp, maven.V5_4, binary=True) as java:
        java.do("producer.start", producer="p", namesrv=address)
        java.do("producer.send", producer="p", messages=[{"topic": "t", "body": "x"}])

The commands are described in the Java sources (Producers, PushConsumers, ...). A JVM starts in
about a second and a client in it in milliseconds; so one JVM serves many tests.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from . import maven

T = TypeVar("T")

PRODUCERS = ("producer", "request", "tx")
"""The kinds of producers, which are started by the command KIND.start."""
ANSWER_S = 120.0
"""Longer than any command waits by itself."""


class ClientError(Exception):
    """What a Java client threw; `code` is the response code where a server refused."""

    def __init__(self, name: str, code: int | None, message: str) -> None:
        super().__init__(f"{name} ({code}): {message}")
        self.name = name
        self.code = code
        self.message = message


class JavaSession:
    """A running JVM with the clients of one release and one serialization."""

    def __init__(
        self,
        directory: Path,
        version: str = maven.V5_4,
        *,
        binary: bool = False,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.version = version
        self.producers: dict[tuple[str, str], None] = {}
        """The kind and name of all running producers, oldest first."""
        self.log = directory / "java.txt"
        system = {
            "user.home": str(directory),
            "user.timezone": "UTC",
            "rocketmq.client.localOffsetStoreDir": str(directory / "offsets"),
            "rocketmq.serialize.type": "ROCKETMQ" if binary else "JSON",
            **(properties or {}),
        }
        flags = [f"-D{key}={value}" for key, value in system.items()]
        command = maven.java_command("penstock.Session", jvm=(*maven.JVM_FLAGS, *flags))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=maven.java_environment(version),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def do(self, command: str, **arguments: Any) -> Any:
        """Carry out a command and return its result. Raises ClientError if the client threw."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            line = ""
        if not line:
            raise RuntimeError(f"no answer to {command}:\n{self.log.read_text()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer["error"], answer["code"], answer["message"])
        kind, _, what = command.partition(".")
        if kind in PRODUCERS and what == "start":
            self.producers[kind, arguments["producer"]] = None
        elif kind in PRODUCERS and what == "stop":
            self.producers.pop((kind, arguments["producer"]), None)
        return answer["result"]

    def stop_producers(self, *, but: Collection[tuple[str, str]]) -> None:
        """Stop all producers but these: each has threads that wake up every few milliseconds."""
        for kind, name in [one for one in self.producers if one not in but]:
            self.do(f"{kind}.stop", producer=name)

    def kill(self) -> None:
        """End the JVM at once, as a crash would (SIGKILL); a JVM has nothing here to save."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def eventually(look: Callable[[], T], *, within_s: float = 30.0) -> T:
    """What `look` gives once that is true; after `within_s`, whatever it gives then."""
    deadline = time.monotonic() + within_s
    while not (seen := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return seen
