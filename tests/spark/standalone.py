"""Spark's own servers as child processes, from the pip package, on loopback ports that are free.

    with Master(tmp / "master") as master, Worker(tmp / "w1", master.url):
        ...
    with Connect(tmp / "connect") as connect:
        ... connect.url ...

`run_job` runs a program of these tests (`jobs.py`) as a driver of its own, because a process has
only one Spark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyspark

from penstock.spark.java import java_home
from tests.compat import apache

ROOT = Path(__file__).parents[2]
START_S = 120.0
JOB_S = 400.0


class Server(apache.Server):
    """One of Spark's servers."""

    arguments: tuple[str, ...] = ()
    _program = "spark-class"
    _memory = "256m"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        program = Path(pyspark.__file__).parent / "bin" / self._program
        environment = {**spark_environment(), "SPARK_DAEMON_MEMORY": self._memory}
        return [str(program), *self.arguments], environment


class Master(Server):
    """A standalone master; `url` is for drivers and workers."""

    _main_class = "org.apache.spark.deploy.master.Master"
    _announcement = "New state: ALIVE"

    def __init__(self, directory: Path) -> None:
        port = apache.free_port(above=1)
        super().__init__(directory, port, {}, START_S)
        self.url = f"spark://{self.address}"
        self.arguments = (
            self._main_class, "--host", "127.0.0.1", "--port", str(port),
            "--webui-port", str(port + 1),
        )  # fmt: skip


class Worker(Server):
    """A standalone worker with one core."""

    _main_class = "org.apache.spark.deploy.worker.Worker"
    _announcement = "Successfully registered with master"

    def __init__(self, directory: Path, master: str) -> None:
        port = apache.free_port(above=1)
        super().__init__(directory, port, {}, START_S)
        self.arguments = (
            self._main_class, "--host", "127.0.0.1", "--port", str(port),
            "--webui-port", str(port + 1), "--cores", "1", "--memory", "1g",
            "--work-dir", str(directory / "work"), master,
        )  # fmt: skip


class Connect(Server):
    """A Spark Connect server with a local Spark; `url` is for clients."""

    _main_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    _announcement = "Spark Connect server started"
    _program = "spark-submit"
    _memory = "1g"

    def __init__(self, directory: Path) -> None:
        port = apache.free_port()
        super().__init__(directory, port, {}, START_S)
        self.url = f"sc://{self.address}"
        conf = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": port,
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.shuffle.partitions": 2,
            "spark.sql.warehouse.dir": directory / "warehouse",
        }
        settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
        self.arguments = (
            "--master", "local[2]", *settings, "--class", self._main_class, "spark-internal",
        )  # fmt: skip


def run_job(job: str, *, environment: Mapping[str, str] | None = None, **given: object) -> Any:
    """Run a function of `jobs.py` with these arguments in a new process; returns its result."""
    command = [sys.executable, "-m", "tests.spark.jobs", job, json.dumps(given, default=str)]
    done = subprocess.run(
        command, cwd=ROOT, env={**spark_environment(), **(environment or {})},
        capture_output=True, text=True, timeout=JOB_S,
    )  # fmt: skip
    errors = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("\tat "))
    assert done.returncode == 0, f"{job} failed:\n{done.stdout[-3000:]}\n{errors[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def spark_environment() -> dict[str, str]:
    """The environment of a new Spark process: the Java that was found, this Python, loopback."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))}
    return {
        **mine,
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        # This port is fixed, and no test uses it.
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
    }
