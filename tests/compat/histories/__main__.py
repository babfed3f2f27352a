"""Runs histories: `python -m tests.compat.histories SEED|FIRST-LAST … [--keep FOLDER] [--file]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.compat.go_program import go_missing
from tests.compat.histories.cluster import MACHINES
from tests.compat.histories.machines_network import MachinesNetwork
from tests.compat.histories.one_history import FAULTS, run_history


def seeds_of(texts: list[str]) -> Iterator[int]:
    for text in texts:
        first, _, last = text.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="+")
    parser.add_argument("--keep", type=Path, help="where failing histories are kept")
    parser.add_argument("--all", action="store_true", help="keep all histories")
    parser.add_argument("--file", action="store_true", help="controllers on a file only")
    parser.add_argument("--faults", type=int, default=FAULTS, help="faults of one history")
    given = parser.parse_args()
    keep = given.keep or Path(tempfile.gettempdir()) / "penstock-histories"
    network = MachinesNetwork(MACHINES)
    found: Counter[str] = Counter()
    count = 0
    try:
        for seed in seeds_of(given.seeds):
            result = run_history(
                seed,
                network,
                keep / f"seed-{seed}",
                etcd=not given.file and not go_missing(),
                faults_max=given.faults,
                keep=given.all,
            )
            count += 1
            found.update(one.kind for one in result.violations)
            print(result, flush=True)
            if result.violations:
                print(f"  history and logs: {result.folder}", flush=True)
    finally:
        network.close()
    print(f"{count} histories, violations: {dict(found) or 'none'}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
