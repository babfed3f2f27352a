"""Runs the suite: `python -m tests.run --depth ci|proof`. `make test` and `make proof` call this.

The unit tests run twice, compiled and with `PENSTOCK_PURE=1`; everything else once.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import penstock

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", choices=("ci", "proof"), default="ci")
    depth = parser.parse_args().depth
    compiled = "compiled" if penstock.compiled() else "pure"
    steps = [
        ("unit tests, " + ("compiled kernel" if compiled == "compiled" else "NO compiled kernel"),
         ["tests/unit"], {"PENSTOCK_EXPECT": compiled}),
        ("unit tests, pure Python kernel", ["tests/unit"],
         {"PENSTOCK_PURE": "1", "PENSTOCK_EXPECT": "pure"}),
        ("integration, faults, simulation, compatibility",
         ["tests", "--ignore=tests/unit"], {"PENSTOCK_EXPECT": compiled}),
    ]  # fmt: skip
    if compiled == "pure":
        steps.pop(1)
    for title, arguments, extra in steps:
        print(f"== {title} (depth: {depth})", flush=True)
        began = time.monotonic()
        env = {**os.environ, **extra, "PENSTOCK_DEPTH": depth}
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        result = subprocess.run(command, cwd=ROOT, env=env)
        print(f"== took {time.monotonic() - began:.0f} s", flush=True)
        if result.returncode:
            return result.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
