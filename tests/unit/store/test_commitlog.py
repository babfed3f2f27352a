"""Appending records to segments: offsets, rolls, blanks, refusals."""

import ipaddress
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DiskFull, NotWriteable
from penstock.store.commitlog import NO_ROOM, CommitLog
from penstock.store.disk import Disk
from penstock.store.segment import SegmentList
from penstock.wire.layout import MAGIC_BLANK
from penstock.wire.record import Record
from tests.compat import golden
from tests.unit.store.conftest import NOW_MS, SEGMENT_BYTES, WatchedDisk, record, sized

GOLDEN = golden.cases("5.4.0", "store_records")


def open_log(
    folder: Path, *, by_mapping: bool, disk: Disk | None = None, size: int = SEGMENT_BYTES,
    end: int = 0,
) -> CommitLog:  # fmt: skip
    folder.mkdir(exist_ok=True)
    disk = disk or WatchedDisk()
    log = CommitLog(disk, SegmentList(disk, folder, size), by_mapping=by_mapping)
    log.start(end, lambda old, new: None)
    return log


def append(log: CommitLog, made: Record) -> int:
    if made.size == 0:
        assert made.prepare() == 0
    return log.append(made, 0, NOW_MS)


def content(log: CommitLog) -> bytes:
    log.write_staged()
    return b"".join(s.path.read_bytes() for s in log.segments.items)


@pytest.fixture(params=[True, False], ids=["mapping", "pwrite"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> CommitLog:
    return open_log(tmp_path / "log", by_mapping=request.param)


def test_records_follow_each_other(log: CommitLog) -> None:
    assert [append(log, sized(n)) for n in (100, 200, 300)] == [0, 100, 300]
    assert log.end == 600
    data = content(log)
    assert [struct.unpack_from(">i", data, at)[0] for at in (0, 100, 300)] == [100, 200, 300]
    assert data[600:] == bytes(SEGMENT_BYTES - 600)


@pytest.mark.parametrize("rest", [8, 9, 100])
def test_a_record_may_leave_exactly_the_size_of_a_blank(log: CommitLog, rest: int) -> None:
    assert append(log, sized(SEGMENT_BYTES - rest)) == 0
    assert log.rolls == 0
    assert append(log, sized(93)) == SEGMENT_BYTES
    assert log.rolls == 1
    size, magic = struct.unpack_from(">ii", content(log), SEGMENT_BYTES - rest)
    assert (size, magic) == (rest, MAGIC_BLANK)


@pytest.mark.parametrize("over", [-7, -1])
def test_a_record_that_leaves_less_than_a_blank_rolls(log: CommitLog, over: int) -> None:
    append(log, sized(1000))
    assert append(log, sized(SEGMENT_BYTES - 1000 + over)) == SEGMENT_BYTES
    data = content(log)
    assert struct.unpack_from(">ii", data, 1000) == (SEGMENT_BYTES - 1000, MAGIC_BLANK)
    assert data[1008:SEGMENT_BYTES] == bytes(SEGMENT_BYTES - 1008)


def test_segments_are_named_by_their_start_offset(log: CommitLog) -> None:
    for _ in range(3):
        append(log, sized(SEGMENT_BYTES - 8))
    assert [s.path.name for s in log.segments.items] == [
        f"{n * SEGMENT_BYTES:020d}" for n in (0, 1, 2)
    ]


def test_space_for_a_batch_is_reserved_in_one_segment(log: CommitLog) -> None:
    append(log, sized(1000))
    assert log.make_room(3088) == 0
    assert log.rolls == 0
    assert log.make_room(3089) == 0
    assert (log.rolls, log.end) == (1, SEGMENT_BYTES)


def test_mapping_and_pwrite_give_the_same_files(tmp_path: Path) -> None:
    logs = [open_log(tmp_path / name, by_mapping=name == "map") for name in ("map", "pwrite")]
    for n in range(60):
        for log in logs:
            append(log, record(bytes([n]) * (n * 37 % 900), text=b"TAGS\x01a\x02"))
    assert logs[0].rolls > 3
    assert content(logs[0]) == content(logs[1])


def test_staged_bytes_are_written_on_request(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log", by_mapping=False)
    append(log, sized(100))
    assert (log.end, log.written) == (100, 0)
    assert log.segments.items[0].path.read_bytes() == bytes(SEGMENT_BYTES)
    log.write_staged()
    assert log.written == 100
    assert log.segments.items[0].path.read_bytes()[:4] == struct.pack(">i", 100)
    log.write_staged()
    append(log, sized(200))
    assert log.segments.items[0].path.read_bytes()[100:104] == bytes(4)
    assert struct.unpack_from(">i", content(log), 100) == (200,)


def test_a_record_longer_than_the_staging_buffer(tmp_path: Path) -> None:
    size = 3 << 20
    logs = [
        open_log(tmp_path / name, by_mapping=name == "map", size=size) for name in ("map", "pwrite")
    ]
    for log in logs:
        assert [append(log, sized(n)) for n in (100, 2 << 20, 500)] == [0, 100, 100 + (2 << 20)]
    assert content(logs[0]) == content(logs[1])


def test_a_full_disk_refuses_before_anything_is_written(log: CommitLog) -> None:
    append(log, sized(SEGMENT_BYTES - 200))
    before = content(log)
    disk = log.disk
    assert isinstance(disk, WatchedDisk)
    disk.no_space = lambda path: True
    assert append(log, sized(300)) == NO_ROOM
    assert isinstance(log.refusal, DiskFull)
    assert (log.end, content(log)) == (SEGMENT_BYTES - 200, before)
    assert append(log, sized(150)) == SEGMENT_BYTES - 200
    disk.no_space = lambda path: False
    assert append(log, sized(300)) == SEGMENT_BYTES


def test_any_failure_to_roll_refuses_the_put(log: CommitLog) -> None:
    append(log, sized(SEGMENT_BYTES - 200))
    assert isinstance(log.disk, WatchedDisk)
    log.disk.sync_fails = lambda path: True
    assert append(log, sized(300)) == NO_ROOM
    assert isinstance(log.refusal, NotWriteable)
    assert len(log.segments.items) == 1


def test_writing_continues_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    first = open_log(folder, by_mapping=True)
    append(first, sized(300))
    segments = SegmentList(first.disk, folder, SEGMENT_BYTES)
    segments.push(first.segments.items[0])
    second = CommitLog(first.disk, segments, by_mapping=False)
    second.start(300, lambda old, new: None)
    assert append(second, sized(150)) == 300
    assert struct.unpack_from(">i", content(second), 300) == (150,)


def test_writing_may_start_in_a_missing_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log", by_mapping=True, end=3 * SEGMENT_BYTES)
    assert log.begin() == log.end == 3 * SEGMENT_BYTES
    assert append(log, sized(100)) == 3 * SEGMENT_BYTES


def test_the_next_segment_is_preallocated_and_deleted_if_unused(tmp_path: Path) -> None:
    disk = Disk()
    log = open_log(tmp_path / "log", by_mapping=True, disk=disk)
    append(log, sized(SEGMENT_BYTES - 8))
    append(log, sized(100))
    disk.close()  # waits for the segment that is being created
    assert len(os.listdir(tmp_path / "log")) == 3
    log.close()
    assert sorted(os.listdir(tmp_path / "log")) == [f"{0:020d}", f"{SEGMENT_BYTES:020d}"]


def host(text: str, port: int) -> bytes:
    return ipaddress.ip_address(text).packed + port.to_bytes(4, "big")


@pytest.mark.parametrize(
    "case", [c for c in GOLDEN.values() if c["name"] != "v2-short-topic"], ids=lambda c: c["name"]
)
@pytest.mark.parametrize("by_mapping", [True, False])
def test_records_equal_those_of_the_java_encoder(
    tmp_path: Path, case: dict[str, Any], by_mapping: bool
) -> None:
    log = open_log(tmp_path / "log", by_mapping=by_mapping)
    made = Record()
    text = "".join(f"{name}\x01{value}\x02" for name, value in case["properties"].items())
    made.fill(case["topic"].encode(), bytes.fromhex(case["body"]), text.encode())
    made.queue_id, made.flag, made.sys_flag = case["queue_id"], case["flag"], case["sys_flag"]
    made.born_ms = case["born_timestamp"]
    made.born_host = host(case["born_host"], case["born_port"])
    made.store_host = host(case["store_host"], case["store_port"])
    made.reconsume_times = case["reconsume_times"]
    made.prepared_offset = case["prepared_transaction_offset"]
    assert made.prepare() == 0
    assert log.append(made, case["queue_offset"], case["store_timestamp"]) == 0
    assert content(log)[: made.size].hex() == case["hex"]
