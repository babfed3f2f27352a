"""golden"""

from __future__ import annotations

from pathlib import Path


def path(version: str) -> Path:
    return Path(__file__).parents[1] / "fixtures" / "golden" / f"{version}.json"
