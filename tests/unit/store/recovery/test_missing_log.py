"""Segments that are missing, or came back: the start notices it by what the other files say."""

import shutil
from pathlib import Path

import pytest

from penstock.errors import StoreDamaged
from penstock.store.store import MessageStore
from penstock.store.tools.inspection import StoreFiles
from penstock.store.tools.problem import DAMAGE
from penstock.store.tools.verify import Verification
from tests.unit.store.conftest import (
    NOW_MS,
    SEGMENT_BYTES,
    StoreFixture,
    bodies,
    body_of,
    flush,
    properties,
    put,
    record,
    split,
)

COUNT = 40
STOPS = ("close", "crash")


def body(n: int) -> bytes:
    return f"body {n:4d}".encode() * 20


def fill(store: MessageStore, count: int = COUNT) -> None:
    """Messages in two queues, flushed, with a checkpoint."""
    for n in range(count):
        made = record(body(n), queue_id=n % 2, text=properties(keys=f"k{n}"))
        put(store, made, now_ms=NOW_MS + n)
    flush(store)
    store.tick(NOW_MS + 60_000)
    store.maintenance.finish()


def stopped(stores: StoreFixture, stop: str, count: int = COUNT) -> MessageStore:
    store = stores.open()
    fill(store, count)
    getattr(stores, stop)(store)
    return store


def segment(store: MessageStore, number: int) -> Path:
    return sorted(store.paths.log.iterdir())[number]


def files(root: Path) -> dict[Path, bytes]:
    """All but the marks of an open store."""
    names = (path for path in root.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in names if path.name not in ("lock", "abort")}


def next_offsets(store: MessageStore) -> list[int]:
    found = []
    for queue_id in (0, 1):
        put(store, record(b"new", queue_id=queue_id))
        found.append(store.writer.queue_offset)
    return found


def readable(store: MessageStore, queue_id: int) -> list[bytes]:
    """All bodies of a queue as a consumer reads them: on from what the store answers."""
    found, offset = [], 0
    while offset < store.max_offset("t", queue_id):
        got = store.get("t", queue_id, offset, wait=True)
        found += [body_of(data) for data in split(got.data)]
        offset = got.next_offset
    return found


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("gone", ["", "penstock.snapshot", "checkpoint"])
def test_an_empty_log_directory_of_a_used_store_is_refused(
    stores: StoreFixture, stop: str, gone: str
) -> None:
    """A file system that was not mounted: what is written now would contradict it later."""
    store = stopped(stores, stop)
    aside = store.paths.root / "aside"
    store.paths.log.rename(aside)
    store.paths.log.mkdir()
    (store.paths.root / gone if gone else aside / "none").unlink(missing_ok=True)
    before = files(store.paths.root)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="commitlog is empty, but") as caught:
            stores.open()
        assert "mounted" in caught.value.hint
        assert f"delete {store.paths.root}" in caught.value.hint
    assert files(store.paths.root) == before
    store.paths.log.rmdir()
    aside.rename(store.paths.log)
    store = stores.open()
    assert bodies(store, queue_id=0) == [body(n) for n in range(0, COUNT, 2)]
    assert next_offsets(store) == [COUNT // 2, COUNT // 2]


def test_queue_files_alone_say_that_there_was_a_log(stores: StoreFixture) -> None:
    store = stopped(stores, "close")
    for path in (store.paths.log, store.paths.index):
        shutil.rmtree(path)
    for path in (store.paths.checkpoint, store.paths.snapshot, store.paths.sizes):
        path.unlink()
    with pytest.raises(StoreDamaged, match=r"consumequeue/t/0 has entries"):
        stores.open()


@pytest.mark.parametrize("stop", STOPS)
def test_an_empty_log_of_an_unused_store_is_no_loss(stores: StoreFixture, stop: str) -> None:
    store = stores.open()
    store.make_queue(b"t", 0)
    getattr(stores, stop)(store)
    shutil.rmtree(store.paths.log)
    store = stores.open()
    assert next_offsets(store) == [0, 0]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["deleted", "empty"])
def test_missing_last_segments_are_refused(
    stores: StoreFixture, stop: str, count: int, how: str
) -> None:
    store = stopped(stores, stop)
    for path in sorted(store.paths.log.iterdir())[-count:]:
        path.unlink()
    if how == "empty":
        (store.paths.log / f"{store.log.end // SEGMENT_BYTES * SEGMENT_BYTES:020d}").touch()
        if count > 1:
            with pytest.raises(StoreDamaged, match="is missing"):
                stores.open()
            return
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=r"the last segments .* are missing") as caught:
            stores.open()
        assert str(store.log.end) in caught.value.message
        assert "truncate -s" in caught.value.hint
    kinds = {problem.kind for problem in Verification(StoreFiles(stores.root)).run()}
    assert {"log.missing-segment"} <= kinds or stop == "crash"


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("number", [-1, -2])
def test_a_missing_segment_can_be_given_up(
    stores: StoreFixture, stop: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros in its place: the other messages can be read, and no queue offset is used again."""
    store = stopped(stores, stop)
    name = segment(store, number)
    name.unlink()
    with pytest.raises(StoreDamaged, match=r"(are|is) missing") as caught:
        stores.open()
    assert f"truncate -s {SEGMENT_BYTES} {name}" in caught.value.hint
    with open(name, "wb") as made:
        made.truncate(SEGMENT_BYTES)
    store = stores.open()
    assert readable(store, 0)[:6] == [body(n) for n in range(0, 12, 2)]
    assert "damage" in caplog.text
    assert next_offsets(store) == [COUNT // 2, COUNT // 2]


@pytest.mark.parametrize("stop", STOPS)
def test_a_log_that_lost_all_its_records_is_refused(stores: StoreFixture, stop: str) -> None:
    """All that is left is the segment that was made ahead."""
    store = stopped(stores, stop)
    beyond = max(int(path.name) for path in store.paths.log.iterdir()) + SEGMENT_BYTES
    shutil.rmtree(store.paths.log)
    store.paths.log.mkdir()
    with open(store.paths.log / f"{beyond:020d}", "wb") as made:
        made.truncate(SEGMENT_BYTES)
    with pytest.raises(StoreDamaged, match="no record of the log is left"):
        stores.open()


@pytest.mark.parametrize("bit", [1 << 20, 1 << 40])
def test_a_wrong_confirm_offset_alone_refuses_nothing(stores: StoreFixture, bit: int) -> None:
    store = stopped(stores, "crash")
    page = bytearray(store.paths.checkpoint.read_bytes())
    page[32:40] = (int.from_bytes(page[32:40], "big") ^ bit).to_bytes(8, "big")
    store.paths.checkpoint.write_bytes(page)
    store = stores.open()
    assert next_offsets(store) == [COUNT // 2, COUNT // 2]


@pytest.mark.parametrize("same_sizes", [False, True])
def test_a_log_that_came_back_is_not_cut(stores: StoreFixture, same_sizes: bool) -> None:
    """The snapshot is of a store that began anew while the log was away."""
    store = stopped(stores, "close")
    aside = stores.root / "aside"
    store.paths.log.rename(aside)
    for name in ("consumequeue", "index"):
        shutil.rmtree(stores.root / name)
    for path in (store.paths.checkpoint, store.paths.snapshot):
        path.unlink()
    store = stores.open()
    text = properties(keys="k0") if same_sizes else b""
    put(store, record(body(0) if same_sizes else b"meanwhile", text=text))
    stores.close(store)
    shutil.rmtree(store.paths.log)
    aside.rename(store.paths.log)
    store = stores.open()
    assert not store.paths.truncated.exists()
    for queue_id in (0, 1):
        assert bodies(store, queue_id=queue_id) == [body(n) for n in range(queue_id, COUNT, 2)]
    if not same_sizes:
        assert any("valid records follow" in text for text in store.report.warnings())


FILLS = {"zeros": b"\0", "garbage": b"\xaa"}


@pytest.mark.parametrize("byte", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("gone", ["", "penstock.snapshot"])
def test_queue_offsets_at_a_damaged_end_of_the_log_are_not_used_again(
    stores: StoreFixture, byte: bytes, stop: str, gone: str
) -> None:
    """A group that has consumed them would never get the new messages at their offsets."""
    store = stopped(stores, stop)
    end = store.log.end
    if gone:
        (store.paths.root / gone).unlink(missing_ok=True)
    with open(segment(store, -1), "r+b") as target:
        target.seek(end % SEGMENT_BYTES - 700)
        target.write(byte * 700)
    store = stores.open()
    assert [store.max_offset("t", q) for q in (0, 1)] == [COUNT // 2, COUNT // 2]
    assert store.report.lost_messages >= 2
    text = "\n".join(store.report.warnings())
    assert "lost to the damage" in text
    assert next_offsets(store) == [COUNT // 2, COUNT // 2]
    stores.close(store)
    store = stores.open()
    assert [store.max_offset("t", q) for q in (0, 1)] == [COUNT // 2 + 1] * 2


def test_missing_first_segments_are_reported(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks like retention, but retention was not at work: the snapshot knows."""
    store = stopped(stores, "close")
    segment(store, 0).unlink()
    (problem,) = [p for p in Verification(StoreFiles(stores.root)).run() if p.severity == DAMAGE]
    assert problem.kind == "snapshot.log-begin"
    assert f"0 to {SEGMENT_BYTES}" in problem.text
    store = stores.open()
    assert f"log offsets 0 to {SEGMENT_BYTES}" in caplog.text
    assert "deleted since the store was closed" in caplog.text
    assert next_offsets(store) == [COUNT // 2, COUNT // 2]
    stores.close(store)
    caplog.clear()
    stores.open()
    assert caplog.text == ""


def test_what_retention_deleted_is_not_reported(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open()
    fill(store)
    store.expire(1)
    store.maintenance.finish()
    stores.close(store)
    assert not [p for p in Verification(StoreFiles(stores.root)).run() if p.severity == DAMAGE]
    caplog.clear()
    assert stores.open().report.warnings() == []
