"""What the screen shows: brokers, topics and groups at one time. An unknown value is None."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BrokerRow:
    """A master or a slave."""

    cluster: str
    name: str
    id: int
    address: str
    version: str | None
    role: str | None
    in_per_second: float | None
    """Messages, as the broker reports them: averages over 10 s."""
    out_per_second: float | None
    in_today: int | None
    out_today: int | None
    disk_used: float | None
    """The used share of the log's disk, 0 to 1."""
    log_bytes: int | None
    memory_bytes: int | None
    started_ms: int | None
    behind_bytes: int | None
    """Slave: bytes of the master's log that it lacks."""
    in_sync: bool | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic, summed over all brokers that answered."""

    name: str
    in_per_second: float | None
    """Between the last two times at which the topic was queried."""
    out_per_second: float | None
    """To all groups, as brokers report it: an average over 1 min."""
    next_offsets: int | None
    """The sum of the queues' next offsets: the messages that were ever stored."""
    groups: int | None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A consumer group, summed over its topics."""

    name: str
    lag: int | None
    lag_seconds: float | None
    """The age of the oldest message that it has not consumed; only known for the largest lags."""
    out_per_second: float | None
    topics: int


@dataclass(frozen=True, slots=True)
class ScreenSnapshot:
    """The state of a cluster at one time."""

    time_ms: int
    nameservers: tuple[str, ...]
    brokers: tuple[BrokerRow, ...]
    topics: tuple[TopicRow, ...]
    groups: tuple[GroupRow, ...]
    topic_count: int | None
    """All topics; `topics` has those that were queried so far."""
    group_seconds: float | None
    """How old the figures of groups are. Reading them takes long in large clusters."""
    notes: tuple[str, ...]
    """What is missing, and why."""

    def as_json(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "time_ms": self.time_ms,
            "nameservers": list(self.nameservers),
            "brokers": [asdict(row) for row in self.brokers],
            "topics": [asdict(row) for row in self.topics],
            "groups": [asdict(row) for row in self.groups],
            "topic_count": self.topic_count,
            "groups_age_seconds": self.group_seconds,
            "notes": list(self.notes),
        }


class CounterRates:
    """Rates of counters by name, between the last two readings of each."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}
        self._rates: dict[str, float] = {}

    def read(self, name: str, value: int, now_s: float) -> None:
        """A counter has this value now. If it has decreased, it started again."""
        before = self._last.get(name)
        self._last[name] = value, now_s
        if before is None or now_s <= before[1]:
            return
        if value < before[0]:
            self._rates.pop(name, None)
        else:
            self._rates[name] = (value - before[0]) / (now_s - before[1])

    def rate(self, name: str) -> float | None:
        """Per second; None before the second reading."""
        return self._rates.get(name)

    def keep(self, names: Mapping[str, object]) -> None:
        """Forget all other names."""
        for gone in self._last.keys() - names.keys():
            del self._last[gone]
            self._rates.pop(gone, None)


# --- sorting -------------------------------------------------------------------------------------

SORTS: Mapping[str, Sequence[str]] = {
    "brokers": ("name", "in_per_second", "out_per_second", "disk_used"),
    "topics": ("in_per_second", "out_per_second", "next_offsets", "name"),
    "groups": ("lag", "lag_seconds", "out_per_second", "name"),
}
"""The columns by which each table can be sorted; the first is the default."""


def sorted_rows(rows: Sequence[Any], column: str, *, reverse: bool = False) -> list[Any]:
    """Numbers from the largest, names from A; rows without a value are last in any order."""
    known = [row for row in rows if getattr(row, column) is not None]
    unknown = [row for row in rows if getattr(row, column) is None]
    by_name = sorted(known, key=lambda row: str(row.name))
    is_text = column == "name"
    ordered = sorted(
        by_name, key=lambda row: getattr(row, column), reverse=(not is_text) is not reverse
    )
    return ordered + sorted(unknown, key=lambda row: str(row.name))
