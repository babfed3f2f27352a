"""When to delete, when to refuse writes, when to resume: a pure decision.

| use of the disk | what happens |
|---|---|
| below `disk_clean_percent` | expired segments are deleted in the hours of `delete_hours` |
| above it | expired segments are deleted at any hour |
| above `disk_force_percent` | as many of the oldest as needed are deleted whatever their age |
| above `disk_refuse_percent` | and writes are refused until use is below `disk_force_percent` |

The last segment is never deleted, nor one that holds bytes from `pinned_from` on (messages that
timers, delays, transactions or POP still need). One that holds bytes from `kept_from` on (another
replica still needs them) is deleted only if the use of the disk forces it.

Ages are measured by a clock that does not jump (`SteadyClock`): setting the system's clock forward
must not delete messages that nobody had time to read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.config import StoreConfig
from penstock.errors import DiskNearlyFull
from penstock.store.disk import Space

STEP_MS = 600_000
"""The store ticks every second. If this much time passes between two ticks, the clock was set, or
the process did not run."""


class SteadyClock:
    """The system's time without the steps that it made forward: never later than the system's."""

    def __init__(self, now_ms: int, last_ms: int) -> None:
        """`last_ms` is when the store was last written; 0 if that is unknown."""
        self._last_ms = last_ms or now_ms
        self._steps_ms = 0
        self.started_late = self.observe(now_ms) > 0

    def observe(self, now_ms: int) -> int:
        """Take note of the time; returns by how much the clock was set, or 0."""
        elapsed_ms, self._last_ms = now_ms - self._last_ms, now_ms
        if -STEP_MS <= elapsed_ms <= STEP_MS:
            return 0
        self._steps_ms += elapsed_ms
        return elapsed_ms

    def time(self, now_ms: int) -> int:
        """The time by which ages are measured."""
        return now_ms - max(self._steps_ms, 0)


class Deletion(NamedTuple):
    """What was deleted with the oldest segments."""

    segments: int
    size: int
    begin: int  # of the log now
    queues: list[tuple[str, int, int, int]]  # topic, queue, first offset deleted, first one kept

    def text(self) -> str:
        """What was deleted, for the log."""
        messages = sum(end - first for _, _, first, end in self.queues)
        return (
            f"deleted {self.segments} segments ({self.size / (1 << 20):,.0f} MiB, {messages:,} "
            f"messages of {len(self.queues):,} queues): the log now begins at {self.begin}"
        )


class AgedSegment(NamedTuple):
    """A segment as retention sees it."""

    start: int
    size: int
    modified_ms: int


class RetentionDecision(NamedTuple):
    """What to do now."""

    delete: int  # number of segments to delete, oldest first
    refuse: bool  # whether writes are refused from now on
    pinned: bool  # whether pinned messages prevent further deletion


def decide(
    config: StoreConfig,
    segments: Sequence[AgedSegment],
    *,
    now_ms: int,
    hour: int,
    disk: Space,
    refusing: bool,
    pinned_from: int | None = None,
    kept_from: int | None = None,
) -> RetentionDecision:
    """Decide by the table above; `now_ms` by the steady clock, `hour` the local hour of the day."""
    disk_percent = disk.percent
    excess = disk.used - (disk.used + disk.free) * config.disk_force_percent // 100
    in_hours = hour in delete_hours(config)
    due = excess > 0 or in_hours or disk_percent > config.disk_clean_percent
    expired_before = now_ms - config.retain_hours * 3_600_000
    delete = 0
    pinned = False
    for segment in segments[:-1] if due else ():
        if delete >= config.delete_segments_max:
            break
        if excess <= 0 and segment.modified_ms >= expired_before:
            break
        if excess <= 0 and kept_from is not None and segment.start + segment.size > kept_from:
            break
        if pinned_from is not None and segment.start + segment.size > pinned_from:
            pinned = True
            break
        delete += 1
        excess -= segment.size
    limit = _resume_percent(config) if refusing else config.disk_refuse_percent
    return RetentionDecision(delete, disk_percent > limit, pinned)


def delete_hours(config: StoreConfig) -> set[int]:
    return {int(hour) for hour in config.delete_hours.split(";") if hour.strip().isdigit()}


def nearly_full(
    config: StoreConfig, path: Path, disk_percent: int, *, pinned: bool = False
) -> DiskNearlyFull:
    """The error that refuses writes, with what an operator needs to act."""
    because = " (messages still needed keep the oldest segments)" if pinned else ""
    return DiskNearlyFull.over(
        f"the disk of {path} is nearly full{because}",
        figure=disk_percent,
        limit=config.disk_refuse_percent,
        unit="%",
        setting="disk_refuse_percent",
        hint=f"free space or lower retain_hours (now {config.retain_hours}); writes resume "
        f"at {_resume_percent(config)} % (disk_force_percent, at most disk_refuse_percent)",
    )


def _resume_percent(config: StoreConfig) -> int:
    """Disk usage at which writes resume. With a `disk_force_percent` of 100 no deletion is forced,
    but writes must not resume before there is space again."""
    return min(config.disk_force_percent, config.disk_refuse_percent)
