"""Inspection: an intact store has no problems, and each kind of damage is reported."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from penstock.errors import StoreError
from penstock.store.store import MessageStore
from penstock.store.tools.dump import find_key, plain_body, walk_log, walk_queue, walk_topic
from penstock.store.tools.inspection import SizeHints, StoreFiles
from penstock.store.tools.survey import survey
from tests.depth import rounds
from tests.unit.store.tools import inspect_kit as kit
from tests.unit.store.tools.inspect_kit import COUNT, damage_kinds, flip, flip_log, verify, write_at

QUEUE = "consumequeue/orders/1/" + f"{0:020d}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, int]]]:
    root = tmp_path_factory.mktemp("made") / "store"
    return root, kit.make_store(root)


@pytest.fixture
def root(made: tuple[Path, list[tuple[int, int]]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "store"))


@pytest.fixture
def placed(made: tuple[Path, list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return made[1]


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A copy of a store that is being written."""
    store = MessageStore(tmp_path / "live", kit.CONFIG, now_ms=kit.START_MS)
    kit.fill(store)
    copy = Path(shutil.copytree(tmp_path / "live", tmp_path / "copy"))
    store.close()
    return copy


# --- intact stores


def test_a_good_store_has_no_problems(root: Path, placed: list[tuple[int, int]]) -> None:
    problems, totals = verify(root)
    assert problems == []
    assert totals.records == totals.queue_entries == COUNT
    assert totals.keys == 3 * COUNT
    assert totals.index_entries >= 3 * COUNT
    assert totals.log_end == sum(placed[-1])
    assert totals.queues == 3


def test_an_empty_store_has_no_problems(tmp_path: Path) -> None:
    MessageStore(tmp_path / "s", kit.CONFIG, now_ms=kit.START_MS).close()
    problems, totals = verify(tmp_path / "s")
    assert (problems, totals.records) == ([], 0)


def test_a_live_store_is_inspected_without_changes(tmp_path: Path) -> None:
    store = MessageStore(tmp_path, kit.CONFIG, now_ms=kit.START_MS)
    kit.fill(store)
    store.disk.close()  # waits for preallocation in the thread pool
    before = kit.contents(tmp_path)
    problems, totals = verify(tmp_path)
    figures = survey(StoreFiles(tmp_path), exact=True)
    assert [p for p in problems if p.severity == "damage"] == []
    assert totals.records == figures.records == COUNT
    assert figures.state == "open (a process holds its lock)"
    assert kit.contents(tmp_path) == before
    store.close()


def test_unknown_sizes_are_guessed_from_the_files(root: Path) -> None:
    (root / "penstock.json").unlink()
    files = StoreFiles(root)
    assert "guess" in files.sizes_from
    assert files.sizes.segment_bytes == kit.SEGMENT_BYTES
    assert files.sizes.queue_file_entries == 50
    assert files.sizes.index_slots == 0  # not four entries per slot: can't be guessed
    problems, _ = verify(root)
    assert [p.kind for p in problems] == ["index.sizes"]
    problems, totals = verify(root, SizeHints(index_slots=50, index_entries=400))
    assert (problems, totals.damage) == ([], 0)


def test_survey_counts_queues_and_files(root: Path, placed: list[tuple[int, int]]) -> None:
    quick, exact = survey(StoreFiles(root)), survey(StoreFiles(root), exact=True)
    assert quick.records == exact.records == COUNT
    assert quick.log_end == exact.log_end == sum(placed[-1])
    assert {(q.topic, q.queue_id): q.count for q in quick.queues} == {
        ("orders", 0): 80, ("orders", 1): 80, ("sms", 3): 80,
    }  # fmt: skip
    assert quick.state == "closed cleanly"
    assert quick.checkpoint is not None
    assert quick.checkpoint.confirm_offset == quick.log_end


def test_a_directory_that_is_not_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="commitlog"):
        StoreFiles(tmp_path)


def test_expired_segments_are_not_reported(tmp_path: Path) -> None:
    store = MessageStore(tmp_path, kit.CONFIG, now_ms=kit.START_MS)
    kit.fill(store)
    store.expire(1)
    store.close()
    problems, totals = verify(tmp_path)
    assert problems == []
    assert totals.log_begin == kit.SEGMENT_BYTES


# --- crashed stores


def test_a_copy_of_a_live_store_has_no_damage(crashed: Path) -> None:
    problems, totals = verify(crashed)
    assert [p for p in problems if p.severity == "damage"] == []
    assert totals.records == COUNT


def test_a_torn_tail_is_a_note(crashed: Path, placed: list[tuple[int, int]]) -> None:
    offset, size = placed[-1]
    path, at = kit.log_place(crashed, offset)
    write_at(path, at + size // 2, bytes(size - size // 2))
    problems, totals = verify(crashed)
    assert totals.damage == 0
    assert "log.torn-tail" in {p.kind for p in problems}
    assert totals.records == COUNT - 1


def test_a_bad_record_before_good_ones_is_damage_also_after_a_crash(
    crashed: Path, placed: list[tuple[int, int]]
) -> None:
    flip_log(crashed, placed[-9][0] + 95)
    problems, _ = verify(crashed)
    (found,) = [p for p in problems if p.severity == "damage"]
    assert found.kind == "log.crc"
    assert "recovery keeps these bytes and what follows them" in found.text


def test_a_hole_of_a_power_cut_is_a_torn_tail(crashed: Path, placed: list[tuple[int, int]]) -> None:
    path, at = kit.log_place(crashed, placed[-9][0])
    sector = at - at % 512 + 512
    write_at(path, sector, bytes(512))
    problems, totals = verify(crashed)
    assert totals.damage == 0
    assert "log.torn-tail" in {p.kind for p in problems}
    assert totals.records < COUNT


def test_entries_that_recovery_rebuilds_are_notes(crashed: Path) -> None:
    write_at(crashed / QUEUE, 20 * 20, bytes(30 * 20))
    shutil.rmtree(crashed / "consumequeue" / "sms")
    (crashed / "checkpoint").unlink(missing_ok=True)
    problems, totals = verify(crashed)
    assert totals.damage == 0
    assert {(p.kind, p.count) for p in problems} == {("queue.hole", 30), ("queue.no-entry", 80)}


# --- damage in the log


def in_record(place: int) -> Callable[[Path, list[tuple[int, int]]], None]:
    return lambda root, placed: flip_log(root, placed[100][0] + place)


@pytest.mark.parametrize(
    ("place", "kinds"),
    [
        (0, {"log.size", "queue.no-record", "index.no-record"}),
        (3, {"log.lengths", "queue.no-record", "index.no-record"}),
        (5, {"log.magic", "queue.no-record", "index.no-record"}),
        (8, {"log.crc", "queue.damaged-record"}),
        (31, {"log.place", "queue.damaged-record", "index.no-record"}),
        (90, {"log.crc", "queue.damaged-record"}),
    ],
)
def test_a_bit_flip_in_a_record_is_reported(
    root: Path, placed: list[tuple[int, int]], place: int, kinds: set[str]
) -> None:
    in_record(place)(root, placed)
    assert damage_kinds(root) == kinds
    problems, totals = verify(root)
    assert totals.records == COUNT - 1
    path, at = kit.log_place(root, placed[100][0])
    assert (problems[0].file, problems[0].offset) == (f"commitlog/{path.name}", at)


def test_a_hole_in_the_log_is_damage(root: Path, placed: list[tuple[int, int]]) -> None:
    path, at = kit.log_place(root, placed[60][0])
    write_at(path, at, bytes(placed[64][0] - placed[60][0]))
    assert "log.unwritten" in damage_kinds(root)
    assert verify(root)[1].records == COUNT - 4


def test_a_record_of_another_queue_is_reported(root: Path, placed: list[tuple[int, int]]) -> None:
    flip_log(root, placed[100][0] + 15, 0x01)  # queue id 1 → 0
    kinds = damage_kinds(root)
    assert "queue.queue-id" in kinds


def test_a_wrong_queue_offset_is_reported(root: Path, placed: list[tuple[int, int]]) -> None:
    flip_log(root, placed[100][0] + 27, 0x08)
    assert "queue.offset" in damage_kinds(root)


def test_a_missing_segment_is_damage(root: Path) -> None:
    (root / "commitlog" / f"{kit.SEGMENT_BYTES:020d}").unlink()
    kinds = damage_kinds(root)
    assert {"log.missing-segment", "queue.no-record", "index.no-record"} <= kinds


def test_a_short_segment_is_damage(root: Path) -> None:
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.truncate(9000)
    assert "log.length" in damage_kinds(root)


def test_a_lost_end_of_a_clean_store_is_damage(root: Path, placed: list[tuple[int, int]]) -> None:
    path, at = kit.log_place(root, placed[-2][0])
    write_at(path, at, bytes(sum(placed[-1]) - placed[-2][0]))
    assert damage_kinds(root) >= {
        "snapshot.log-end", "queue.beyond", "index.beyond", "checkpoint.time",
        "checkpoint.confirmed",
    }  # fmt: skip


def test_a_damaged_blank_is_damage(root: Path, placed: list[tuple[int, int]]) -> None:
    last = max(p for p in placed if p[0] < kit.SEGMENT_BYTES)
    flip_log(root, sum(last) + 3, 0x01)
    assert damage_kinds(root) == {"log.blank"}


# --- damage in queues


@pytest.mark.parametrize(
    ("place", "kind"),
    [(0, "queue.beyond"), (7, "queue.no-record"), (11, "queue.size"), (19, "queue.tag")],
)
def test_a_bit_flip_in_a_queue_entry_is_reported(root: Path, place: int, kind: str) -> None:
    flip(root / QUEUE, 20 * 20 + place, 0x01)
    problems, _ = verify(root)
    assert [(p.kind, p.file, p.offset) for p in problems] == [(kind, QUEUE, 20 * 20)]


def test_a_lost_entry_is_a_hole(root: Path) -> None:
    write_at(root / QUEUE, 20 * 20, bytes(3 * 20))
    problems, _ = verify(root)
    assert [(p.kind, p.count) for p in problems] == [("queue.hole", 3)]


def test_a_swapped_entry_is_reported(root: Path) -> None:
    data = (root / QUEUE).read_bytes()
    write_at(root / QUEUE, 20 * 20, data[21 * 20 : 22 * 20] + data[20 * 20 : 21 * 20])
    problems, _ = verify(root)
    assert [(p.kind, p.count) for p in problems] == [("queue.offset", 2)]


def test_a_lost_queue_is_damage(root: Path) -> None:
    shutil.rmtree(root / "consumequeue" / "sms")
    assert damage_kinds(root) == {"queue.no-entry", "snapshot.queue"}


def test_a_lost_queue_file_is_damage(root: Path) -> None:
    (root / QUEUE).unlink()
    assert damage_kinds(root) == {"queue.no-entry"}


def test_entries_cut_off_at_the_end_are_damage(root: Path) -> None:
    last = root / "consumequeue/orders/1" / f"{1000:020d}"
    write_at(last, 10 * 20, bytes(40 * 20))
    assert damage_kinds(root) == {"queue.no-entry", "snapshot.queue"}


# --- damage in the index


def index_file(root: Path) -> Path:
    return min((root / "index").iterdir())


@pytest.mark.parametrize(
    ("place", "mask", "kinds"),
    [
        (0, 0x80, {"index.garbled", "index.chain"}),
        (4, 0x01, {"index.beyond"}),
        (11, 0x01, {"index.no-record"}),
        (14, 0x40, {"index.time"}),
        (19, 0x01, {"index.chain"}),
    ],
)
def test_a_bit_flip_in_an_index_entry_is_reported(
    root: Path, place: int, mask: int, kinds: set[str]
) -> None:
    flip(index_file(root), kit.INDEX_ENTRIES_AT + 60 * 20 + place, mask)
    assert damage_kinds(root) & kinds
    assert damage_kinds(root) <= kinds


def test_an_index_entry_with_another_key_is_reported(root: Path) -> None:
    path = index_file(root)
    at = kit.INDEX_ENTRIES_AT + 60 * 20
    key_hash = int.from_bytes(path.read_bytes()[at : at + 4], "big")
    write_at(path, at, (key_hash + kit.CONFIG.index_slots).to_bytes(4, "big"))  # same slot
    assert damage_kinds(root) == {"index.other-key"}


def test_slots_header_and_length_are_checked(root: Path) -> None:
    path = index_file(root)
    good = path.read_bytes()
    write_at(path, 40 + 4 * 7, bytes(4))
    assert damage_kinds(root) == {"index.slot"}
    path.write_bytes(good)
    write_at(path, 32, (1).to_bytes(4, "big"))
    assert damage_kinds(root) == {"index.header"}
    path.write_bytes(good)
    write_at(path, 36, (4000).to_bytes(4, "big"))
    assert damage_kinds(root) == {"index.header"}
    path.write_bytes(good[:-1])
    assert damage_kinds(root) == {"index.length"}


def test_keys_missing_in_the_index_are_a_note(root: Path) -> None:
    for path in sorted((root / "index").iterdir())[1:-1]:
        path.unlink()
    problems, totals = verify(root)
    assert totals.damage == 0
    assert [p.kind for p in problems] == ["index.keys"]


# --- checkpoint and snapshot


def test_the_checkpoint_is_compared_with_the_log(root: Path) -> None:
    path = root / "checkpoint"
    good = path.read_bytes()
    write_at(path, 8, (1 << 50).to_bytes(8, "big"))
    assert damage_kinds(root) == {"checkpoint.time"}
    path.write_bytes(good[:20])
    assert damage_kinds(root) == {"checkpoint.short"}
    path.unlink()
    problems, _ = verify(root)
    assert [p.kind for p in problems] == ["checkpoint.absent"]


# --- dump


def test_messages_are_found_by_queue_log_offset_and_key(
    root: Path, placed: list[tuple[int, int]]
) -> None:
    files = StoreFiles(root)
    messages = [f.message for f in walk_queue(files, "orders", 1, 20)]
    assert [m.queue_offset for m in messages if m] == list(range(20, 80))
    assert messages[0] is not None
    assert messages[0].body == kit.body(61)
    assert len(list(walk_topic(files, "orders"))) == 160
    assert [f.offset for f in walk_log(files, placed[200][0])] == [p[0] for p in placed[200:]]
    (found,) = find_key(files, "orders", "k61")
    assert found.message == messages[0]
    assert list(find_key(files, "sms", "k61")) == []
    assert len(list(find_key(files, "orders", "shared"))) == 160


def test_compressed_bodies_are_decompressed(root: Path, placed: list[tuple[int, int]]) -> None:
    found = next(walk_log(StoreFiles(root), placed[kit.COMPRESSED][0]))
    assert found.message is not None
    assert found.message.body != kit.body(kit.COMPRESSED)
    assert plain_body(found.message) == (kit.body(kit.COMPRESSED), None)


def test_salvage_skips_damage(root: Path, placed: list[tuple[int, int]]) -> None:
    flip_log(root, placed[10][0] + 5)
    flip_log(root, placed[150][0] + 2)
    files = StoreFiles(root)
    stopped = list(walk_log(files, 0))
    assert [f.message is None for f in stopped] == [False] * 10 + [True]
    salvaged = list(walk_log(files, 0, salvage=True))
    assert sum(f.message is not None for f in salvaged) == COUNT - 2
    assert [f.offset for f in salvaged if f.message is None] == [placed[10][0], placed[150][0]]


# --- any damage


@pytest.mark.parametrize("seed", range(rounds(ci=40, proof=500)))
def test_any_damage_is_reported_without_an_exception(root: Path, seed: int) -> None:
    chance = Random(seed)
    if seed % 3 == 0:
        (root / "abort").write_bytes(b"1")
    paths = sorted(p for p in root.rglob("*") if p.is_file() and p.name not in ("lock", "abort"))
    for _ in range(chance.randrange(1, 12)):
        path = chance.choice(paths)
        size = path.stat().st_size
        if chance.random() < 0.15:
            with path.open("r+b") as file:
                file.truncate(chance.randrange(size + 1))
        elif size:
            at = chance.randrange(size)
            write_at(path, at, chance.randbytes(min(chance.choice((1, 8, 512)), size - at)))
    files = StoreFiles(root)
    verify(root)
    survey(files)
    for found in walk_log(files, 0, salvage=True):
        assert found.message is not None or found.problem
    for topic in ("orders", "sms"):
        list(walk_topic(files, topic))
        list(find_key(files, topic, "shared"))
