"""Runs the test suite: `python -m tests.run --depth check|ci|proof`.

`make check`, `make test` and `make proof` call this. `check` runs the fast unit tests. `ci` and
`proof` run everything: unit tests twice, compiled and with `PENSTOCK_PURE=1`, everything else once.
Their steps run in parallel lanes, because tests with real Java clients and Spark mostly wait.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import penstock

ROOT = Path(__file__).parent.parent
PROGRESS_S = 60.0
"""How often the progress of the lanes is printed."""
OWN_STEP = ("unit", "client", "compat", "spark")
"""Test folders that have a step of their own."""
PARALLEL = ("-n", "2", "--dist", "worksteal")
REPEATED_MAX = 3
"""Failed tests of a step that are repeated."""


@dataclass(frozen=True)
class Step:
    """One run of pytest."""

    title: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    foreign: bool = False
    """With Apache's servers or Spark, on whose timing we have no influence.

    At depth `ci` a few failed tests are repeated once, and reported in any case.
    """


@dataclass
class Lane:
    """Steps that run one after another; the first failure ends the lane."""

    steps: Sequence[Step]
    depth: str
    failed: int = 0
    current: str = ""
    output: IO[bytes] | None = None

    def run(self) -> None:
        for step in self.steps:
            self.current = step.title
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as cache:
                command = (*step.arguments, "-o", f"cache_dir={cache}")
                self.failed, text = self._pytest(step, command)
                failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", text, re.MULTILINE)
                repeatable = step.foreign and self.depth == "ci"
                if self.failed and repeatable and 0 < len(failed) <= REPEATED_MAX:
                    self.failed, again = self._pytest(step, (*command, "--last-failed"))
                    text += f"== REPEATED, because they failed: {'; '.join(failed)}\n{again}"
            took = time.monotonic() - began
            print(f"{text}== {step.title} (depth: {self.depth}): {took:.0f} s", flush=True)
            if self.failed:
                return

    def _pytest(self, step: Step, arguments: Sequence[str]) -> tuple[int, str]:
        """Run pytest; its exit code and its output."""
        environment = {**os.environ, **step.environment, "PENSTOCK_DEPTH": self.depth}
        # Without stored bytecode each process compiles Penstock and the tests again, for seconds.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        with tempfile.TemporaryFile() as output:
            self.output = output
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            ).returncode
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


def lanes(depth: str) -> list[Lane]:
    """The lanes of a run at this depth."""
    compiled = penstock.compiled()
    as_built = {"PENSTOCK_EXPECT": "compiled" if compiled else "pure"}
    core = "compiled core" if compiled else "NO compiled core"
    if depth == "check":
        fast = ["tests/unit", "tests/test_tidy.py", "tests/test_docs.py", "-m", "not slow"]
        return [Lane([Step(f"fast tests, {core}", [*fast, *PARALLEL], as_built)], depth)]
    unit = Step(f"unit tests, {core}", ["tests/unit"], as_built)
    pure = Step(
        "unit tests, uncompiled",
        ["tests/unit"],
        {"PENSTOCK_PURE": "1", "PENSTOCK_EXPECT": "pure"},
    )
    others = ["tests", *(f"--ignore=tests/{folder}" for folder in OWN_STEP)]
    rest = Step("documentation, integration, faults, simulation", others, as_built)
    client = Step(
        "Python client on Penstock and Apache servers", ["tests/client"], as_built, foreign=True
    )
    compat = Step(
        "compatibility with Apache clients and servers", ["tests/compat"], as_built, foreign=True
    )
    spark = Step("Spark, local and on a cluster", ["tests/spark"], as_built, foreign=True)
    # Three for two cores: a third of the time of the second and the third lane is spent waiting.
    first = [unit, *([pure] if compiled else []), rest]
    return [Lane(first, depth), Lane([compat], depth), Lane([client, spark], depth)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", choices=("check", "ci", "proof"), default="ci")
    depth = parser.parse_args().depth
    # A shell lets its background commands ignore SIGINT, and tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    running = lanes(depth)
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
