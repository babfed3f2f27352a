"""When segments are deleted and writes refused: the decision, and its execution by the store."""

import os
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from penstock.config import StoreConfig
from penstock.errors import DiskNearlyFull
from penstock.store.disk import Space
from penstock.store.put import REFUSED
from penstock.store.retention import (
    AgedSegment,
    RetentionDecision,
    SteadyClock,
    decide,
    delete_hours,
    nearly_full,
)
from tests.unit.store.conftest import (
    EVER_MS,
    NOW_MS,
    SEGMENT_BYTES,
    StoreFixture,
    WatchedDisk,
    bodies,
    properties,
    put,
    record,
    sized,
)

HOUR_MS = 3_600_000
OLD, YOUNG = NOW_MS - 73 * HOUR_MS, NOW_MS - HOUR_MS
NOON, FOUR = 12, 4
ALL_DAY = ";".join(map(str, range(24)))


def aged(*modified: int) -> list[AgedSegment]:
    return [AgedSegment(100 * n, 100, ms) for n, ms in enumerate(modified)]


def used(percent: int) -> Space:
    return Space(percent, 100 - percent)


@pytest.mark.parametrize(
    ("percent", "hour", "times", "expected"),
    [
        (50, NOON, (OLD, OLD, OLD), RetentionDecision(0, False, False)),
        (50, FOUR, (OLD, OLD, OLD), RetentionDecision(2, False, False)),
        (50, FOUR, (OLD, YOUNG, OLD), RetentionDecision(1, False, False)),
        (50, FOUR, (YOUNG, YOUNG), RetentionDecision(0, False, False)),
        (75, NOON, (OLD, OLD), RetentionDecision(0, False, False)),
        (76, NOON, (OLD, OLD), RetentionDecision(1, False, False)),
        (76, NOON, (YOUNG, YOUNG), RetentionDecision(0, False, False)),
        (85, NOON, (YOUNG, YOUNG), RetentionDecision(0, False, False)),
        (86, NOON, (YOUNG, YOUNG, YOUNG), RetentionDecision(1, False, False)),
        (86, NOON, (OLD, OLD, YOUNG), RetentionDecision(2, False, False)),
        (90, NOON, (YOUNG, YOUNG), RetentionDecision(1, False, False)),
        (91, NOON, (YOUNG, YOUNG), RetentionDecision(1, True, False)),
        (91, NOON, (YOUNG,), RetentionDecision(0, True, False)),
        (91, NOON, (), RetentionDecision(0, True, False)),
        (100, NOON, (OLD,) * 20, RetentionDecision(10, True, False)),
    ],
)
def test_retention_depends_on_disk_usage_age_and_hour(
    percent: int, hour: int, times: tuple[int, ...], expected: RetentionDecision
) -> None:
    found = decide(
        StoreConfig(), aged(*times), now_ms=NOW_MS, hour=hour, disk=used(percent), refusing=False
    )
    assert found == expected


@pytest.mark.parametrize(("percent", "refuse"), [(91, True), (86, True), (85, False), (10, False)])
def test_writes_resume_below_the_force_threshold(percent: int, refuse: bool) -> None:
    found = decide(
        StoreConfig(), aged(YOUNG), now_ms=NOW_MS, hour=NOON, disk=used(percent), refusing=True
    )
    assert found.refuse is refuse


@pytest.mark.parametrize(
    ("pinned_from", "delete", "pinned"),
    [
        (None, 4, False),
        (0, 0, True),
        (99, 0, True),
        (100, 1, True),
        (250, 2, True),
        (400, 4, False),
    ],
)
def test_pinned_messages_keep_their_segments(
    pinned_from: int | None, delete: int, pinned: bool
) -> None:
    found = decide(
        StoreConfig(), aged(*[OLD] * 5), now_ms=NOW_MS, hour=NOON, disk=used(95), refusing=False,
        pinned_from=pinned_from,
    )  # fmt: skip
    assert found == RetentionDecision(delete, True, pinned)


@pytest.mark.parametrize(
    ("kept_from", "percent", "delete"),
    [
        (None, 80, 4),
        (0, 80, 0),
        (250, 80, 2),
        (0, 86, 1),  # the disk is too full
    ],
)
def test_what_another_replica_needs_is_kept_while_the_disk_allows_it(
    kept_from: int | None, percent: int, delete: int
) -> None:
    found = decide(
        StoreConfig(), aged(*[OLD] * 5), now_ms=NOW_MS, hour=NOON, disk=used(percent),
        refusing=False, kept_from=kept_from,
    )  # fmt: skip
    assert found.delete == delete


@pytest.mark.parametrize(
    ("percent", "delete"), [(85, 0), (86, 1), (90, 1), (91, 2), (97, 3), (100, 3)]
)
def test_a_full_disk_deletes_no_more_than_needed(percent: int, delete: int) -> None:
    segments = [AgedSegment(5 * n, 5, YOUNG) for n in range(20)]
    found = decide(
        StoreConfig(), segments, now_ms=NOW_MS, hour=NOON, disk=used(percent), refusing=False
    )
    assert found.delete == delete


# --- a clock that does not jump


def test_a_clock_that_is_set_forward_makes_nothing_older() -> None:
    clock = SteadyClock(NOW_MS, 0)
    assert clock.observe(NOW_MS + 1_000) == 0
    assert clock.time(NOW_MS + 1_000) == NOW_MS + 1_000
    assert clock.observe(NOW_MS + 3 * HOUR_MS) == 3 * HOUR_MS - 1_000
    assert clock.time(NOW_MS + 3 * HOUR_MS) == NOW_MS + 1_000
    assert clock.observe(NOW_MS + 3 * HOUR_MS + 5_000) == 0
    assert clock.time(NOW_MS + 3 * HOUR_MS + 5_000) == NOW_MS + 6_000
    assert clock.observe(NOW_MS + 7_000) < 0
    assert clock.time(NOW_MS + 7_000) == NOW_MS + 6_000  # two steps of unknown precision


def test_a_clock_that_is_set_back_is_followed() -> None:
    clock = SteadyClock(NOW_MS, 0)
    assert clock.observe(NOW_MS - 3 * HOUR_MS) == -3 * HOUR_MS
    assert clock.time(NOW_MS - 3 * HOUR_MS) == NOW_MS - 3 * HOUR_MS


def test_the_time_while_the_store_was_closed_does_not_count() -> None:
    clock = SteadyClock(NOW_MS, NOW_MS - 80 * HOUR_MS)
    assert clock.started_late
    assert clock.time(NOW_MS) == NOW_MS - 80 * HOUR_MS
    assert not SteadyClock(NOW_MS, NOW_MS - 5_000).started_late
    assert not SteadyClock(NOW_MS, NOW_MS + 80 * HOUR_MS).started_late


@pytest.mark.parametrize(
    ("text", "hours"), [("04", {4}), ("04;16", {4, 16}), (" 4 ;;", {4}), ("", set())]
)
def test_hours_are_separated_by_semicolons(text: str, hours: set[int]) -> None:
    assert delete_hours(StoreConfig(delete_hours=text)) == hours


def test_the_refusal_names_usage_limit_and_next_step(tmp_path: Path) -> None:
    error = nearly_full(StoreConfig(), tmp_path, 93)
    for part in (str(tmp_path), "93 %", "90", "disk_refuse_percent"):
        assert part in str(error)
    for part in ("retain_hours", "72", "85", "disk_force_percent"):
        assert part in error.remark()


# --- execution by the store


def test_without_forced_deletion_writes_resume_at_the_limit(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = stores.open(disk, disk_force_percent=100)
    now_ms = NOW_MS
    for percent, refused in ((90, False), (91, True), (91, True), (90, False)):
        disk.usage = Space(percent, 100 - percent)
        now_ms += 10_000
        store.tick(now_ms)
        assert isinstance(store.refusal, DiskNearlyFull) is refused


def test_writes_stop_and_resume_automatically(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = stores.open(disk)
    put(store, record())
    now_ms = NOW_MS
    for percent, refused in ((90, False), (91, True), (86, True), (85, False), (86, False)):
        disk.usage = Space(percent, 100 - percent)
        now_ms += 10_000
        store.tick(now_ms)
        assert isinstance(store.refusal, DiskNearlyFull) is refused
        assert (store.put(record(), now_ms) == REFUSED) is refused


def fill(stores: StoreFixture, disk: WatchedDisk, segments: int = 4):  # type: ignore[no-untyped-def]
    """A store with two messages in each of a few segments."""
    store = stores.open(disk, queue_file_entries=2, index_entries=6)
    for n in range(2 * segments):
        put(store, record(bytes([n]) * 1900, text=properties(keys=f"k{n}")))
    assert len(store.log.segments.items) == segments
    return store


def test_old_segments_are_deleted_with_their_queue_and_index_entries(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = fill(stores, disk)
    store.expire(2)
    assert store.log.begin() == 2 * SEGMENT_BYTES
    assert sorted(os.listdir(store.paths.log)) == [f"{n * SEGMENT_BYTES:020d}" for n in (2, 3)]
    assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (4, 8)
    assert sorted(os.listdir(store.paths.queues / "t" / "0"))[0] == f"{80:020d}"
    assert bodies(store, offset=4) == [bytes([n]) * 1900 for n in (4, 5, 6, 7)]
    assert store.lookup.record(0, store.confirm_offset) is None
    ranges = {"begin_ms": 0, "end_ms": EVER_MS, "most": 9, "confirm_offset": store.confirm_offset}
    assert store.lookup.by_key("t", "k1", **ranges) == []
    assert len(store.lookup.by_key("t", "k6", **ranges)) == 1


def test_a_queue_without_messages_left_keeps_its_offsets(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, sized(3000), sized(3000, queue_id=1), sized(3000, queue_id=1))
    store.expire(2)
    assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (1, 1)
    put(store, sized(200))
    assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (1, 2)


def test_segments_are_deleted_by_age_at_their_hour(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = fill(stores, disk)
    for segment in store.log.segments.items[:2]:
        os.utime(segment.path, (OLD / 1000, OLD / 1000))
    for segment in store.log.segments.items[2:]:
        os.utime(segment.path, (NOW_MS / 1000, NOW_MS / 1000))
    midnight = datetime.fromtimestamp(NOW_MS / 1000).replace(hour=0, minute=0, second=0)
    at_four = int(midnight.timestamp() * 1000) + 28 * HOUR_MS
    store.tick(at_four - HOUR_MS)
    assert store.log.begin() == 0
    store.tick(at_four + 60_000)
    assert store.log.begin() == 2 * SEGMENT_BYTES


def test_segments_are_not_deleted_because_the_clock_was_set_forward(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    store = fill(stores, WatchedDisk())
    for segment in store.log.segments.items:
        os.utime(segment.path, (NOW_MS / 1000, NOW_MS / 1000))
    store.reconfigure(msgspec.structs.replace(store.config, retain_hours=2, delete_hours=ALL_DAY))
    store.tick(NOW_MS + 10_000)
    for later_ms in range(0, 60_000, 10_000):
        store.tick(NOW_MS + 3 * HOUR_MS + later_ms)
    assert store.log.begin() == 0
    (line,) = [line for line in caplog.messages if "clock" in line]
    assert line.startswith("the clock was set forward by 2 h 59 min: messages are not deleted")
    for minute in range(2 * 60 + 3):
        store.tick(NOW_MS + 3 * HOUR_MS + minute * 60_000)
    assert store.log.begin() == 3 * SEGMENT_BYTES
    assert "deleted 3 segments (0 MiB, 6 messages of 1 queues): the log now begins" in caplog.text


def test_pinned_segments_stay_and_writes_are_refused(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = fill(stores, disk)
    store.on_retention(lambda: SEGMENT_BYTES + 5)
    disk.usage = Space(95, 5)
    store.tick(NOW_MS + 10_000)
    assert store.log.begin() == SEGMENT_BYTES
    assert isinstance(store.refusal, DiskNearlyFull)


def test_the_last_segment_is_never_deleted(stores: StoreFixture) -> None:
    store = fill(stores, WatchedDisk())
    store.expire(99)
    assert len(store.log.segments.items) == 1


def test_deleted_segments_stay_deleted_after_a_restart(stores: StoreFixture) -> None:
    store = fill(stores, WatchedDisk())
    store.expire(1)
    for end in (stores.close, stores.crash):
        end(store)
        store = stores.open(queue_file_entries=2, index_entries=6)
        assert store.log.begin() == SEGMENT_BYTES
        assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (2, 8)
        assert bodies(store, offset=2) == [bytes([n]) * 1900 for n in range(2, 8)]
