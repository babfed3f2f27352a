"""Runs the suite: `python -m tests.run --depth ci|proof`. `make test` and `make proof` call this.

The unit tests run twice, compiled and with `PENSTOCK_PURE=1`; everything else once. Two lanes run
beside each other, because the tests with real Java clients mostly wait for these.
"""

import argparse
import os
import re
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
NEWS_S = 60.0
"""How often the lanes say how far they are."""
APART = ("unit", "client", "compat", "spark")
"""Folders of tests that have a step of their own."""


@dataclass(frozen=True)
class Step:
    """One run of pytest."""

    title: str
    paths: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Lane:
    """Steps one after another; the first that fails ends it."""

    steps: Sequence[Step]
    depth: str
    failed: int = 0
    doing: str = ""
    output: IO[bytes] | None = None

    def run(self) -> None:
        for step in self.steps:
            self.doing = step.title
            began = time.monotonic()
            with tempfile.TemporaryFile() as output:
                self.output = output
                environment = {**os.environ, **step.environment, "PENSTOCK_DEPTH": self.depth}
                command = [sys.executable, "-m", "pytest", "-q", *step.paths]
                self.failed = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
                ).returncode
                output.seek(0)
                text = output.read().decode(errors="replace")
                self.output = None
            took = time.monotonic() - began
            print(f"{text}== {step.title} (depth: {self.depth}): {took:.0f} s", flush=True)
            if self.failed:
                return

    def news(self) -> str:
        """What it does, and how far pytest says it is."""
        done = ""
        if (output := self.output) is not None:
            size = os.fstat(output.fileno()).st_size
            tail = os.pread(output.fileno(), 200, max(size - 200, 0)).decode(errors="replace")
            done = (re.findall(r"\[ *\d+%\]", tail) or [""])[-1]
        return f"{self.doing} {done}".strip()


def lanes(depth: str) -> list[Lane]:
    """What runs beside what."""
    compiled = "compiled" if penstock.compiled() else "pure"
    as_built = {"PENSTOCK_EXPECT": compiled}
    kernel = "compiled kernel" if compiled == "compiled" else "NO compiled kernel"
    unit = Step(f"unit tests, {kernel}", ["tests/unit"], as_built)
    pure = Step(
        "unit tests, pure Python kernel", ["tests/unit"],
        {"PENSTOCK_PURE": "1", "PENSTOCK_EXPECT": "pure"},
    )  # fmt: skip
    rest = Step(
        "documents, integration, faults, simulation",
        ["tests", *(f"--ignore=tests/{other}" for other in APART)], as_built,
    )  # fmt: skip
    client = Step("the client, on our servers and on Apache's", ["tests/client"], as_built)
    compat = Step("compatibility with real clients and servers", ["tests/compat"], as_built)
    spark = Step("Spark, on this machine and on a cluster", ["tests/spark"], as_built)
    first = [unit, rest, client, spark]  # Spark minds a busy machine most: when others have ended
    second = [compat] if compiled == "pure" else [pure, compat]
    return [Lane(first, depth), Lane(second, depth)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", choices=("ci", "proof"), default="ci")
    depth = parser.parse_args().depth
    both = lanes(depth)
    began = time.monotonic()
    threads = [threading.Thread(target=lane.run) for lane in both]
    for thread in threads:
        thread.start()
    while running := [t for t in threads if t.is_alive()]:
        running[0].join(NEWS_S)
        busy = [
            lane.news() for lane, thread in zip(both, threads, strict=True) if thread.is_alive()
        ]
        if busy:
            print(f"-- {time.monotonic() - began:.0f} s: {'; '.join(busy)}", flush=True)
    print(f"== all took {time.monotonic() - began:.0f} s", flush=True)
    return next((lane.failed for lane in both if lane.failed), 0)


if __name__ == "__main__":
    sys.exit(main())
