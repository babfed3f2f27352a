"""`mode=log`: every record is read once with any slices; damage is reported."""

import itertools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrow import log_reader as scan_module
from penstock.arrow.log_reader import LogSelection, LogSlice, plan_scan, read_slice
from penstock.errors import BadSetting, DataLost, ReadFailed
from penstock.store.segment import NAME_DIGITS
from penstock.store.tools.file_pieces import search
from penstock.wire.layout import MAGIC_BLANK
from penstock.wire.message import encode_batch
from tests.store_kit import SEGMENT_BYTES, START_MS, Message, Model, Stored, random_message
from tests.unit.arrow.columns.test_column_builder import log_of
from tests.unit.client.consumer.consumer_kit import record

COLUMNS = ("topic", "queue_id", "queue_offset", "body", "commit_log_offset")
ALL = LogSelection(columns=COLUMNS)
Row = tuple[str, int, int, bytes, int]


def model_of(count: int, seed: int = 7) -> Model:
    rng = Random(seed)
    model = Model()
    for serial in range(count):
        model.put([random_message(rng, serial)], START_MS + 1000 * serial)
    return model


def write(root: Path, model: Model) -> list[Path]:
    """The log of a model as files of a store, the last one with zeros behind its end."""
    folder = root / "commitlog"
    folder.mkdir(parents=True)
    segments = -(-model.end // SEGMENT_BYTES)
    data = bytearray(segments * SEGMENT_BYTES)
    for stored in model.stored:
        data[stored.offset : stored.end] = stored.data()
    ends = {stored.offset // SEGMENT_BYTES: stored.end for stored in model.stored}
    for number in range(segments - 1):
        left = (number + 1) * SEGMENT_BYTES - ends[number]
        blank = left.to_bytes(4, "big") + MAGIC_BLANK.to_bytes(4, "big", signed=True)
        data[ends[number] : ends[number] + 8] = blank
    paths = []
    for begin in range(0, len(data), SEGMENT_BYTES):
        paths.append(folder / f"{begin:0{NAME_DIGITS}d}")
        paths[-1].write_bytes(data[begin : begin + SEGMENT_BYTES])
    return paths


def rows_of(stored: Iterable[Stored]) -> list[Row]:
    return [
        (s.message.topic, s.message.queue_id, s.queue_offset, s.message.body, s.offset)
        for s in stored
    ]


def read(slices: Sequence[LogSlice], scan: LogSelection = ALL) -> list[Row]:
    rows: list[Row] = []
    for part in slices:
        for batch in read_slice(part, scan):
            batch.validate(full=True)
            assert batch.schema.names == list(scan.columns)
            rows += zip(*(column.to_pylist() for column in batch.columns), strict=True)
    return rows


def cut(path: Path, start: int, edges: Iterable[int], next_file: int | None) -> list[LogSlice]:
    inner = sorted(set(edges))
    size = path.stat().st_size
    bounds = [0, *(edge for edge in inner if 0 < edge < size), size]
    return [
        LogSlice(str(path), start, begin, end, next_file)
        for begin, end in itertools.pairwise(bounds)
    ]


def test_store_directory_log_directory_and_file_give_every_record_once(tmp_path: Path) -> None:
    model = model_of(150)
    paths = write(tmp_path, model)
    assert len(paths) > 3
    assert read(plan_scan(str(tmp_path), ALL)) == rows_of(model.stored)
    assert read(plan_scan(str(tmp_path / "commitlog"), ALL)) == rows_of(model.stored)
    assert read(plan_scan(tmp_path.as_uri(), ALL)) == rows_of(model.stored)
    first = [stored for stored in model.stored if stored.offset < SEGMENT_BYTES]
    assert read(plan_scan(str(paths[0]), ALL)) == rows_of(first)


@given(edges=st.lists(st.integers(1, SEGMENT_BYTES), max_size=12), window=st.integers(128, 5000))
def test_slices_of_a_file_have_no_gap_or_overlap(
    tmp_path_factory: pytest.TempPathFactory, edges: list[int], window: int
) -> None:
    model = model_of(40)
    paths = write(tmp_path_factory.mktemp("log"), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_module, "WINDOW_BYTES", window)
        found = []
        for number, path in enumerate(paths):
            start = number * SEGMENT_BYTES
            last = number == len(paths) - 1
            found += read(cut(path, start, edges, None if last else start + SEGMENT_BYTES))
    assert found == rows_of(model.stored)


def test_slice_edges_at_and_near_record_starts(tmp_path: Path) -> None:
    model = model_of(30)
    paths = write(tmp_path, model)
    for shift in (-1, 0, 1):
        edges = [stored.offset + shift for stored in model.stored]
        found = read(cut(paths[0], 0, edges, SEGMENT_BYTES))
        first = [stored for stored in model.stored if stored.offset < SEGMENT_BYTES]
        assert found == rows_of(first)


def test_slices_are_planned_by_task_count_and_written_bytes(tmp_path: Path) -> None:
    model = model_of(100)
    write(tmp_path, model)
    segments = -(-model.end // SEGMENT_BYTES)
    assert len(plan_scan(str(tmp_path), ALL)) == segments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.arrow.log_slices.SLICE_BYTES_MIN", 512)
        slices = plan_scan(str(tmp_path), ALL, tasks_min=20)
    assert [part.task for part in slices] == sorted(part.task for part in slices)
    assert {part.task for part in slices} == set(range(20))
    assert read(slices) == rows_of(model.stored)
    assert slices[-1].end == SEGMENT_BYTES  # no record written meanwhile is missed


@pytest.mark.parametrize(
    ("cores", "least", "blank", "tasks"), [(1, 0, 0, 1), (3, 0, 0, 4), (64, 0, 0, 8), (1, 8, 90, 8)]
)
def test_number_of_tasks_follows_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, least: int, blank: int, tasks: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr("penstock.arrow.log_slices.SLICE_BYTES_MIN", 1 << 10)
    monkeypatch.setattr("penstock.arrow.log_slices.TASK_BYTES_MIN", 8 << 10)
    written = 64 << 10
    (tmp_path / f"{0:020}").write_bytes(bytes([1]) * written + bytes(blank * written))
    planned = plan_scan(str(tmp_path), ALL, tasks_min=least)
    assert len({part.task for part in planned}) == tasks
    assert sum(part.end - part.begin for part in planned) == (1 + blank) * written


def test_topics_tags_and_times_filter(tmp_path: Path) -> None:
    model = model_of(200)
    paths = write(tmp_path, model)

    def found(**wanted: object) -> list[Row]:
        scan = LogSelection(columns=COLUMNS, **wanted)  # type: ignore[arg-type]
        return read(plan_scan(str(tmp_path), scan), scan)

    def expected(wanted: object) -> list[Row]:
        assert callable(wanted)
        return rows_of(stored for stored in model.stored if wanted(stored))

    assert found(topics=frozenset({"sms"})) == expected(lambda s: s.message.topic == "sms")
    assert found(pattern="(sm|order)s") == expected(lambda s: s.message.topic != "c")
    assert found(tags="a || vip") == expected(lambda s: s.message.tags in ("a", "vip"))
    from_ms, until_ms = START_MS + 100_000, START_MS + 110_000
    middle = expected(lambda s: from_ms <= s.store_ms < until_ms)
    assert middle
    assert found(from_ms=from_ms, until_ms=until_ms) == middle
    late = LogSelection(columns=COLUMNS, from_ms=START_MS + 190_000)
    assert len(plan_scan(str(tmp_path), late)) < len(paths)  # files that are too old stay unread


def test_pattern_needs_no_topic_column(tmp_path: Path) -> None:
    model = model_of(50)
    write(tmp_path, model)
    scan = LogSelection(columns=("body",), pattern="sms")
    batches = [batch for part in plan_scan(str(tmp_path), scan) for batch in read_slice(part, scan)]
    bodies = [body for batch in batches for body in batch.column("body").to_pylist()]
    assert bodies == [s.message.body for s in model.stored if s.message.topic == "sms"]


def test_preallocated_file_and_torn_tail_are_not_a_loss(tmp_path: Path) -> None:
    model = model_of(100)
    paths = write(tmp_path, model)
    ahead = tmp_path / "commitlog" / f"{len(paths) * SEGMENT_BYTES:0{NAME_DIGITS}d}"
    ahead.write_bytes(bytes(SEGMENT_BYTES))
    last = model.stored[-1]
    begin = last.offset % SEGMENT_BYTES
    with paths[-1].open("r+b") as file:  # its second half never reached the disk
        file.seek(begin + 60)
        file.write(bytes(last.message.size() - 60))
    assert read(plan_scan(str(tmp_path), ALL)) == rows_of(model.stored[:-1])


def test_copy_that_ends_inside_a_record_is_not_a_loss(tmp_path: Path) -> None:
    model = model_of(100)
    paths = write(tmp_path, model)
    last = model.stored[-1]
    with paths[-1].open("r+b") as file:
        file.truncate(last.end % SEGMENT_BYTES - 5)
    assert read(plan_scan(str(tmp_path), ALL)) == rows_of(model.stored[:-1])


@pytest.mark.parametrize("what", ["body", "magic", "size", "place", "zeros"])
@pytest.mark.parametrize("where", ["inside", "at an edge"])
def test_damage_is_reported_or_skipped(
    tmp_path: Path, what: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    for serial in range(60):
        model.put([Message("orders", 0, Random(serial).randbytes(400), "a")], START_MS + serial)
    paths = write(tmp_path, model)
    victim = model.stored[7]
    with paths[0].open("r+b") as file:
        spot = {"body": 100, "magic": 4, "size": 0, "place": 30, "zeros": 0}[what]
        file.seek(victim.offset + spot)
        file.write(bytes(victim.message.size()) if what == "zeros" else b"\x7f\x7f")
    edges = [] if where == "inside" else [victim.offset]
    slices = cut(paths[0], 0, edges, SEGMENT_BYTES)
    with pytest.raises(DataLost) as caught:
        read(slices)
    assert str(victim.offset) in str(caught.value)
    assert str(victim.end - 1) in str(caught.value)
    with caplog.at_level(logging.WARNING):
        found = read(slices, LogSelection(columns=COLUMNS, fail_on_data_loss=False))
    whole = [s for s in model.stored if s is not victim and s.offset < SEGMENT_BYTES]
    assert found == rows_of(whole)
    assert "data loss" in caplog.text


def test_damaged_body_is_read_without_check_crc(tmp_path: Path) -> None:
    model = model_of(20)
    paths = write(tmp_path, model)
    victim = next(s for s in model.stored[3:] if s.message.body)
    with paths[0].open("r+b") as file:
        file.seek(victim.offset + 88)
        file.write(bytes([victim.message.body[0] ^ 1]))
    scan = LogSelection(columns=COLUMNS, check_crc=False)
    assert len(read(plan_scan(str(tmp_path), scan), scan)) == len(model.stored)


def test_truncated_file_before_the_next_one_is_a_loss(tmp_path: Path) -> None:
    model = model_of(100)
    paths = write(tmp_path, model)
    first = [stored for stored in model.stored if stored.offset < SEGMENT_BYTES]
    with paths[0].open("r+b") as file:
        file.truncate(first[-1].offset)
    with pytest.raises(DataLost, match=f"log offset {first[-1].offset} to {SEGMENT_BYTES - 1}"):
        read(plan_scan(str(tmp_path), ALL))
    going_on = LogSelection(columns=COLUMNS, fail_on_data_loss=False)
    expected = [stored for stored in model.stored if stored is not first[-1]]
    assert read(plan_scan(str(tmp_path), going_on), going_on) == rows_of(expected)


def test_missing_file_is_a_loss(tmp_path: Path) -> None:
    model = model_of(100)
    paths = write(tmp_path, model)
    paths[1].unlink()
    with pytest.raises(DataLost, match=f"{SEGMENT_BYTES} to {2 * SEGMENT_BYTES - 1} are missing"):
        plan_scan(str(tmp_path), ALL)
    going_on = LogSelection(columns=COLUMNS, fail_on_data_loss=False)
    kept = [s for s in model.stored if s.offset // SEGMENT_BYTES != 1]
    assert read(plan_scan(str(tmp_path), going_on), going_on) == rows_of(kept)


def test_deleted_old_files_are_not_a_loss(tmp_path: Path) -> None:
    model = model_of(100)
    paths = write(tmp_path, model)
    paths[0].unlink()
    kept = [s for s in model.stored if s.offset >= SEGMENT_BYTES]
    assert read(plan_scan(str(tmp_path), ALL)) == rows_of(kept)


def test_record_longer_than_the_window(tmp_path: Path) -> None:
    model = Model()
    for size in (10, 9_000, 20, 7_000, 30):
        model.put([Message("big", 0, bytes(size - 1) + b"!")], START_MS)
    write(tmp_path, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_module, "WINDOW_BYTES", 256)
        assert read(plan_scan(str(tmp_path), ALL)) == rows_of(model.stored)


def test_paths_without_a_log_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="does not exist"):
        plan_scan(str(tmp_path / "nowhere"), ALL)
    with pytest.raises(BadSetting, match="no commit log"):
        plan_scan(str(tmp_path), ALL)
    with pytest.raises(BadSetting, match="not a local path"):
        plan_scan("s3a://bucket/store", ALL)
    (tmp_path / "commitlog").mkdir()
    assert plan_scan(str(tmp_path), ALL) == []


# --- a running broker, and missing files


def test_record_completed_during_the_search_is_not_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(20)
    paths = write(tmp_path, model)
    late = model.stored[7]
    with paths[0].open("r+b") as file:  # as seen by a read that started before the broker's write
        file.seek(late.offset)
        file.write(bytes(late.message.size()))

    def slow_search(*place: Any) -> int | None:
        found = search(*place)
        with paths[0].open("r+b") as file:
            file.seek(late.offset)
            file.write(late.data())
        return found

    monkeypatch.setattr(scan_module, "search", slow_search)
    assert read(plan_scan(str(tmp_path), ALL)) == rows_of(model.stored)


def queue_offsets(path: Path, scan: LogSelection) -> list[int]:
    batches = [batch for part in plan_scan(str(path), scan) for batch in read_slice(part, scan)]
    return [offset for batch in batches for offset in batch.column("queue_offset").to_pylist()]


def broken_batch(offset: int) -> bytes:
    inner = encode_batch((b"inner %d" % n, 0, {}) for n in range(2)) + b"?"
    return record(offset, inner, sys_flag=0xC0)


def test_messages_of_a_broken_batch_are_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_of(record(0), broken_batch(1), record(3))
    path = tmp_path / ("0" * NAME_DIGITS)
    path.write_bytes(log + bytes(1000))
    with pytest.raises(DataLost, match=f"log offset {len(record(0))} to"):
        read(plan_scan(str(path), ALL))
    going_on = LogSelection(columns=("queue_offset",), fail_on_data_loss=False)
    assert queue_offsets(path, going_on) == [0, 1, 2, 3]
    assert caplog.text.count("data loss") == 1


def test_missing_middle_file_is_a_loss(tmp_path: Path) -> None:
    model = model_of(1000)
    paths = write(tmp_path, model)
    for path in paths[3:]:
        path.unlink()
    paths[1].unlink()
    with pytest.raises(DataLost, match=f"{SEGMENT_BYTES} to {2 * SEGMENT_BYTES - 1} are missing"):
        plan_scan(str(tmp_path), ALL)


def test_empty_middle_file_is_a_loss(tmp_path: Path) -> None:
    model = model_of(100)
    paths = write(tmp_path, model)
    paths[1].write_bytes(b"")
    with pytest.raises(DataLost, match=f"log offset {SEGMENT_BYTES} to {2 * SEGMENT_BYTES - 1}"):
        read(plan_scan(str(tmp_path), ALL))
    going_on = LogSelection(columns=COLUMNS, fail_on_data_loss=False)
    kept = [s for s in model.stored if s.offset // SEGMENT_BYTES != 1]
    assert read(plan_scan(str(tmp_path), going_on), going_on) == rows_of(kept)


def test_files_of_different_lengths_are_read_completely(tmp_path: Path) -> None:
    """A store whose file size was increased once."""
    blank = (8).to_bytes(4, "big") + MAGIC_BLANK.to_bytes(4, "big", signed=True)
    begin, offsets = 0, 0
    for count in (6, 3, 3):
        log = log_of(*(record(offsets + n) for n in range(count)), begin=begin) + blank
        (tmp_path / f"{begin:0{NAME_DIGITS}d}").write_bytes(log)
        begin, offsets = begin + len(log), offsets + count
    assert queue_offsets(tmp_path, LogSelection(columns=("queue_offset",))) == list(range(offsets))


def test_file_deleted_by_retention_after_planning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(100)
    paths = write(tmp_path, model)
    slices = plan_scan(str(tmp_path), ALL)
    paths[0].unlink()
    with pytest.raises(DataLost, match=f"log offset 0 to {SEGMENT_BYTES - 1}"):
        read(slices)
    going_on = LogSelection(columns=COLUMNS, fail_on_data_loss=False)
    kept = [s for s in model.stored if s.offset >= SEGMENT_BYTES]
    assert read(slices, going_on) == rows_of(kept)
    assert "data loss" in caplog.text
    (tmp_path / "commitlog").rename(tmp_path / "elsewhere")
    with pytest.raises(ReadFailed, match="can't be read"):  # missing completely: not a loss
        read(slices, going_on)


def test_other_files_and_files_deleted_during_the_listing_are_skipped(
    tmp_path: Path,
) -> None:
    model = model_of(100)
    paths = write(tmp_path, model)
    (tmp_path / "commitlog" / ("9" * NAME_DIGITS)).write_bytes(b"no log")
    paths[0].unlink()
    paths[0].symlink_to(tmp_path / "gone")
    kept = [s for s in model.stored if s.offset >= SEGMENT_BYTES]
    assert read(plan_scan(str(tmp_path), ALL)) == rows_of(kept)


def test_files_created_during_the_listing_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may have a file that was created during it, and lack the one before."""
    model = model_of(100)
    paths = write(tmp_path, model)
    listings = [[paths[0], paths[2]], paths]
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(listings.pop(0)))
    found = read(plan_scan(str(tmp_path), ALL))
    assert found == rows_of(s for s in model.stored if s.offset < 3 * SEGMENT_BYTES)
