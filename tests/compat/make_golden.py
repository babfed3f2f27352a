"""Regenerate tests/fixtures/golden: ``python -m tests.compat.make_golden [version ...]``.

Run it after changing golden_inputs.py or the Java program Golden. Apart from ``unique_ids``
(made from the clock) the result is the same on every run.
"""

from __future__ import annotations

import json
import sys

from . import golden, golden_inputs, maven


def make(version: str) -> dict[str, object]:
    """The golden document of one RocketMQ version, made by its own classes."""
    printed = maven.run_java(
        version, "penstock.Golden", input=json.dumps(golden_inputs.inputs(version))
    )
    document: dict[str, object] = {"rocketmq": version, **json.loads(printed)}
    return document


def main(versions: list[str]) -> None:
    for version in versions or maven.VERSIONS:
        path = golden.path(version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make(version), indent=1) + "\n", encoding="ascii")
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
