"""The results of a run: what docs/benchmarks.json holds, and medians and spread of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "docs" / "benchmarks.json"

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, and the lowest and highest."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the difference is within the spread."""
        return self.low <= other.high and other.low <= self.high


def spread(values: Iterable[float]) -> Spread | None:
    """None without values."""
    found = sorted(values)
    return Spread(median(found), found[0], found[-1]) if found else None


def per_second(run: Run) -> float:
    return float(run["messages"] / run["seconds"])


def broker_us(run: Run) -> float:
    """Broker CPU per message in microseconds."""
    return float(run["broker_cpu_s"] * 1e6 / run["messages"])


def client_us(run: Run) -> float:
    return float(run["client_cpu_s"] * 1e6 / run["messages"])


def quantity(name: str) -> Callable[[Run], float]:
    """A number that runs have by this name."""
    return lambda run: float(run[name])


@dataclass
class Results:
    """A run of the benchmark."""

    about: dict[str, Any] = field(default_factory=dict)
    """The machine, the versions, the length of a round, when and how long."""
    peers: list[dict[str, Any]] = field(default_factory=list)
    startups: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def of(self, load: str, peer: str) -> list[Run]:
        return [run for run in self.runs if run["load"] == load and run["peer"] == peer]

    def spread(self, load: str, peer: str, of: Callable[[Run], float]) -> Spread | None:
        return spread(of(run) for run in self.of(load, peer))

    def measured(self, load: str) -> list[dict[str, Any]]:
        """The peers with a result, in the order of the tables."""
        return [peer for peer in self.peers if self.of(load, peer["key"])]

    def write(self, path: Path) -> None:
        """One line for each entry, so that a change is readable."""
        parts = [f'"about": {json.dumps(self.about, indent=2)}']
        for name in ("peers", "startups", "runs", "failures"):
            lines = ",\n".join(json.dumps(entry) for entry in getattr(self, name))
            parts.append(f'"{name}": [\n{lines}\n]' if lines else f'"{name}": []')
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls(**json.loads(path.read_text()))


def entries(rows: Sequence[Run], **equal: Any) -> list[Run]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in equal.items())]
