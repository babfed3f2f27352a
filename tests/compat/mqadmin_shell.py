"""Many commands of Apache's admin tool in one process, and live clients for them to look at."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from . import maven

LIMIT_S = 40.0
# Into a file: on the error stream a complaint of a client's own threads looks like the command's.
_LOGBACK = "org.apache.rocketmq.logging.ch.qos.logback.core"
_LOGGING = f"""<configuration>
  <statusListener class="{_LOGBACK}.status.NopStatusListener"/>
  <appender name="file" class="{_LOGBACK}.FileAppender">
    <file>FILE</file>
    <encoder><pattern>%d{{HH:mm:ss.SSS}} %p %c{{0}} - %m%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="file"/></root>
</configuration>
"""


class Printed(NamedTuple):
    """What a command printed, by stream."""

    out: str
    err: str


class AdminShell:
    """A context manager around the Java program of that name; see there.

    `home` becomes the tool's ROCKETMQ_HOME, where its conf/tools.yml, if there is one, names the
    user to sign as. Files that some commands write go there too.
    """

    def __init__(self, names: str, home: Path, version: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.version = version
        self._log = home / "shell.txt"
        logging = home / "logback.xml"
        logging.write_text(_LOGGING.replace("FILE", str(home / "clients.txt")))
        flags = (
            f"-Duser.home={home}",
            f"-Drocketmq.home.dir={home}",
            "-Duser.timezone=UTC",
            f"-Drmq.logback.configurationFile={logging}",
        )
        self._command = maven.java_command(
            "penstock.server.AdminShell", names, jvm=(*maven.JVM_FLAGS, *flags)
        )

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.home,
                env=maven.java_environment(self.version),
                text=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, *words: str, enough: str = "") -> Printed:
        """Carry out one command; one that does not end by itself when `enough` is printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([int(LIMIT_S * 1000), enough, *words]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the shell ended at {words}:\n{self._log.read_text()[-4000:]}")
        answer = json.loads(line)
        printed = Printed(answer["out"], answer["err"])
        if answer["late"]:
            raise TimeoutError(f"{words} took longer than {LIMIT_S} s: {printed}")
        return printed
