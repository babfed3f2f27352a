"""When to delete, when to refuse writes, when to resume: a pure decision.

| use of the disk | what happens |
|---|---|
| below `disk_clean_percent` | expired segments are deleted in the hours of `delete_hours` |
| above it | expired segments are deleted at any hour |
| above `disk_force_percent` | the oldest segments are deleted whatever their age |
| above `disk_refuse_percent` | and writes are refused until use is below `disk_force_percent` |

The last segment is never deleted, nor one that holds bytes from `pinned_from` on (messages that
timers, delays, transactions or POP still need).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.config import StoreConfig
from penstock.errors import DiskNearlyFull


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
    disk_percent: int,
    refusing: bool,
    pinned_from: int | None = None,
) -> RetentionDecision:
    """Decide by the table above; `hour` is the local hour of the day."""
    forced = disk_percent > config.disk_force_percent
    in_hours = hour in delete_hours(config)
    due = forced or in_hours or disk_percent > config.disk_clean_percent
    expired_before = now_ms - config.retain_hours * 3_600_000
    delete = 0
    pinned = False
    for segment in segments[:-1] if due else ():
        if delete >= config.delete_segments_max:
            break
        if not forced and segment.modified_ms >= expired_before:
            break
        if pinned_from is not None and segment.start + segment.size > pinned_from:
            pinned = True
            break
        delete += 1
    limit = config.disk_force_percent if refusing else config.disk_refuse_percent
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
        f"at {config.disk_force_percent} % (disk_force_percent)",
    )
