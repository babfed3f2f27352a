"""Runs the test suite: `python -m tests.run --depth check|ci|proof`.

`make check`, `make test` and `make proof` call this. `check` runs the fast unit tests. `ci` and
`proof` run everything: unit tests twice, compiled and with `PENSTOCK_PURE=1`, everything else once.
Their steps run in parallel lanes, because tests with real Java clients and Spark often wait.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import penstock

ROOT = Path(__file__).parent.parent
PROGRESS_S = 60.0
"""How often the progress of the lanes is printed."""
OWN_STEP = ("unit", "client", "compat", "spark", "browser")
"""Test folders that have a step of their own."""
PARALLEL = ("-n", "2", "--dist", "worksteal")
SLOWEST = ("--durations=12", "--durations-min=3")
LANES = 3
"""For two cores: steps with Java clients and Spark spend a third of their time waiting."""
SERVERS = (
    "tests/compat/test_replication*.py",
    "tests/compat/test_store_*.py",
    "tests/compat/test_metadata_of_apache.py",
    "tests/compat/test_mixed_clusters.py",
    "tests/compat/test_moving_over.py",
    "tests/compat/test_controller*.py",
)
"""Tests with Apache's servers that have a step of their own, so that no step is much longer than
the others."""
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 4 << 30
"""A tmpfs, and the space that the stores of the fast tests need there, with a reserve."""
HISTORIES = "tests/compat/histories"
REPEATED_MAX = 3
"""Failed tests of a step that are repeated."""


@dataclass(frozen=True)
class Step:
    """One run of pytest."""

    title: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False
    """With other processes, such as Apache's servers, Spark, etcd and brokers that are killed, on
    whose timing a busy machine has an influence.

    At depth `ci` a few failed tests are repeated once, and reported in any case.
    """


@dataclass
class Lane:
    """Runs one step after another, as long as there are any."""

    steps: SimpleQueue[Step]
    depth: str
    failed: int = 0
    current: str = ""
    cpu_s: float = 0.0
    """CPU time of the last run of pytest and of the processes that it started and waited for."""
    output: IO[bytes] | None = None

    def run(self) -> None:
        while True:
            try:
                step = self.steps.get_nowait()
            except Empty:
                return
            self.failed = self._run_step(step) or self.failed

    def _run_step(self, step: Step) -> int:
        """The exit code of pytest."""
        self.current = step.title
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as cache:
            stores = tempfile.mkdtemp(prefix="penstock-tests-", dir=_folder_for_stores(self.depth))
            command = (*step.arguments, "-o", f"cache_dir={cache}", f"--basetemp={stores}/tests")
            code, text = self._pytest(step, command)
            used = self.cpu_s
            failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*)$", text, re.MULTILINE)
            repeatable = step.foreign and self.depth == "ci"
            if code and repeatable and 0 < len(failed) <= REPEATED_MAX:
                code, again = self._pytest(step, (*command, "--last-failed"))
                text += f"== REPEATED, because they failed: {'; '.join(failed)}\n{again}"
            if code:
                text += f"== the files of these tests are in {stores}\n"
            else:
                # Much faster than pytest, which would delete the files of earlier runs one by one.
                subprocess.run(["rm", "-rf", stores], check=True)
        took = time.monotonic() - began
        print(
            f"{text}== {step.title} (depth: {self.depth}): {took:.0f} s, CPU {used:.0f} s",
            flush=True,
        )
        return code

    def _pytest(self, step: Step, arguments: Sequence[str]) -> tuple[int, str]:
        """Run pytest; its exit code and its output."""
        environment = {**os.environ, "PENSTOCK_DEPTH": self.depth, **step.environment}
        # Without stored bytecode each process compiles Penstock and the tests again, for seconds.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "pytest", "-q", *arguments, *SLOWEST]
        with tempfile.TemporaryFile() as output:
            self.output = output
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = code = os.waitstatus_to_exitcode(status)
            self.cpu_s = usage.ru_utime + usage.ru_stime
            self.output = None
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def progress(self) -> str:
        """The current step and pytest's percentage."""
        percentage = ""
        if (output := self.output) is not None:
            size = os.fstat(output.fileno()).st_size
            tail = os.pread(output.fileno(), 200, max(size - 200, 0)).decode(errors="replace")
            percentage = (re.findall(r"\[ *\d+%\]", tail) or [""])[-1]
        return f"{self.current} {percentage}".strip()


def _folder_for_stores(depth: str) -> str | None:
    """Where the tests create their stores: for the fast tests in memory, if there is space."""
    if depth == "check" and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
        return str(MEMORY)
    return None


def steps(depth: str) -> list[Step]:
    """The steps of a run at this depth, the longest first."""
    compiled = penstock.compiled()
    as_built = {"PENSTOCK_EXPECT": "compiled" if compiled else "pure"}
    core = "compiled core" if compiled else "NO compiled core"
    if depth == "check":
        fast = ["tests/unit", "tests/test_tidy.py", "tests/test_docs.py", "-m", "not slow"]
        return [Step(f"fast tests, {core}", [*fast, *PARALLEL], as_built)]
    servers = sorted(str(path) for pattern in SERVERS for path in ROOT.glob(pattern))
    others = ["tests", *(f"--ignore=tests/{folder}" for folder in OWN_STEP)]
    found = [
        Step(
            "compatibility with Apache clients",
            ["tests/compat", *(f"--ignore={path}" for path in (*servers, HISTORIES))],
            as_built,
            foreign=True,
        ),
        Step("Spark, local and on a cluster", ["tests/spark"], as_built, foreign=True),
        Step("documentation, integration, faults, simulation", others, as_built, foreign=True),
        Step("replication and stores with Apache servers", servers, as_built, foreign=True),
        Step("Python client on Penstock and Apache servers", ["tests/client"], as_built, True),
        Step("the web console in Chromium", ["tests/browser"], as_built, foreign=True),
    ]
    if compiled:
        # The compiled core has the same code and gets more rounds: fewer are enough here.
        lower = {"ci": "check", "proof": "ci"}[depth]
        pure = {"PENSTOCK_PURE": "1", "PENSTOCK_EXPECT": "pure", "PENSTOCK_DEPTH": lower}
        found.append(Step("unit tests, uncompiled", ["tests/unit"], pure))
    found.append(Step(f"unit tests, {core}", ["tests/unit"], as_built))
    return [*found, Step("histories of failovers", [HISTORIES], as_built, foreign=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", choices=("check", "ci", "proof"), default="ci")
    depth = parser.parse_args().depth
    # A shell lets its background commands ignore SIGINT, and tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waiting: SimpleQueue[Step] = SimpleQueue()
    for step in steps(depth):
        waiting.put(step)
    running = [Lane(waiting, depth) for _ in range(min(LANES, waiting.qsize()))]
    began = time.monotonic()
    threads = [threading.Thread(target=lane.run) for lane in running]
    for thread in threads:
        thread.start()
    while alive := [thread for thread in threads if thread.is_alive()]:
        alive[0].join(PROGRESS_S)
        busy = [
            lane.progress()
            for lane, thread in zip(running, threads, strict=True)
            if thread.is_alive()
        ]
        if busy:
            print(f"-- {time.monotonic() - began:.0f} s: {'; '.join(busy)}", flush=True)
    print(f"== total: {time.monotonic() - began:.0f} s", flush=True)
    return next((lane.failed for lane in running if lane.failed), 0)


if __name__ == "__main__":
    sys.exit(main())
