"""Regenerate tests/fixtures/golden: ``python -m tests.compat.make_golden [version ...]``.

Run it after changing golden_inputs.py or the Java class Golden. Apart from ``unique_ids`` (made
from the clock) the result is the same on every run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from . import golden, golden_inputs, maven
from .java_session import JavaSession


def make(java: JavaSession) -> dict[str, object]:
    """The golden document of the session's release, made by its own classes."""
    made = java.do("golden.make", document=golden_inputs.inputs(java.version))
    return {"rocketmq": java.version, **made}


def main(versions: list[str]) -> None:
    for version in versions or maven.VERSIONS:
        with (
            tempfile.TemporaryDirectory() as directory,
            JavaSession(Path(directory), version) as java,
        ):
            document = make(java)
        path = golden.path(version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
