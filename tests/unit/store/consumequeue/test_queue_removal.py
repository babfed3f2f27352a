"""Deleting a topic's queues: the name is free at once, the old messages never come back."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from penstock.errors import StoreError
from penstock.store.consumequeue.queue_removal import PREFIX, read_ends
from penstock.store.disk import Disk
from penstock.store.store import MessageStore
from penstock.store.tools.inspection import StoreFiles
from penstock.store.tools.problem import NOTE
from penstock.store.tools.verify import Verification
from penstock.testing import FaultyDisk, PowerCut
from tests.depth import rounds
from tests.unit.store.conftest import (
    NOW_MS,
    WAIT_SECONDS,
    StoreFixture,
    bodies,
    flush,
    put,
    record,
    small_config,
)


def send(store: MessageStore, topic: str, *names: str, queue_id: int = 0) -> None:
    """Messages with keys and bodies that fill queue files and segments."""
    put(store, *[record(f"{name:60}".encode(), topic, queue_id) for name in names])


def seen(store: MessageStore, topic: str = "t", queue_id: int = 0) -> list[str]:
    first = store.min_offset(topic, queue_id)
    return [body.decode().rstrip() for body in bodies(store, topic, queue_id, first)]


def numbered(life: str, count: int) -> list[str]:
    return [f"{life}{n}" for n in range(count)]


def remove(store: MessageStore, topic: str = "t") -> None:
    list(store.remove_queues(topic.encode()))
    store.finish_removal()


def folders(store: MessageStore) -> list[str]:
    return sorted(path.name for path in store.paths.queues.iterdir())


# --- in a running store


def test_a_removed_topic_has_no_queues_and_no_files(stores: StoreFixture) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 20))
    send(store, "t", "other queue", queue_id=3)
    send(store, "u", "stays")
    removed = list(store.remove_queues(b"t"))
    assert sorted(queue.queue_id for queue in removed) == [0, 3]
    assert store.queue("t", 0) is None
    assert store.max_offset("t", 0) == 0
    assert seen(store, "u") == ["stays"]
    store.finish_removal()
    assert folders(store) == ["u"]


def test_a_recreated_topic_starts_at_0_while_old_files_are_deleted(stores: StoreFixture) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 20))
    list(store.remove_queues(b"t"))
    send(store, "t", *numbered("new", 11))
    store.finish_removal()
    assert seen(store) == numbered("new", 11)
    assert store.max_offset("t", 0) == 11
    assert folders(store) == ["t"]


def test_other_queues_are_found_after_a_removal(stores: StoreFixture) -> None:
    store = stores.open()
    names = [f"topic-{n}" for n in range(50)]
    for name in names:
        send(store, name, name)
    for name in names[::2]:
        remove(store, name)
    for name in names[1::2]:
        assert seen(store, name) == [name]
    assert [name for name in names[::2] if store.queue(name, 0) is not None] == []


def test_removing_a_topic_without_messages_or_queues_does_nothing(stores: StoreFixture) -> None:
    store = stores.open()
    store.make_queue(b"t", 0)
    assert len(list(store.remove_queues(b"t"))) == 1
    assert list(store.remove_queues(b"t")) == []
    store.finish_removal()
    assert read_ends(store.disk, store.paths) == {}


def test_a_removed_queue_can_still_be_used_safely(stores: StoreFixture) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 20))
    queue = store.queue("t", 0)
    assert queue is not None
    list(store.remove_queues(b"t"))
    assert queue.deleted
    assert not queue.writable
    assert len(queue.read(0, 8) or b"") == 160  # not deleted yet
    store.finish_removal()
    assert queue.read(0, 8) == b""
    assert queue.entry(3) is None
    queue.sync()
    queue.preallocate()
    queue.correct_min(0)
    queue.drop_files_before(16)
    queue.warm()
    assert queue.visible_max(store.confirm_offset) == 20
    assert queue.visible_by_file(store.confirm_offset) == 20
    with pytest.raises(StoreError, match="deleted"):
        queue.append(1, 2, 3)
    with pytest.raises(StoreError, match="deleted"):
        queue.reserve(1)


class RemovingDisk(Disk):
    """Removes a topic in the middle of a maintenance run, as the event loop may."""

    threads = False
    store: MessageStore | None = None

    def sync_file(self, path: Path) -> None:
        store, self.store = self.store, None
        if store is not None:
            list(store.remove_queues(b"t"))
            store.finish_removal()
        super().sync_file(path)


def test_a_queue_can_be_removed_during_a_flush(stores: StoreFixture) -> None:
    disk = RemovingDisk()
    store = stores.open(disk)
    send(store, "t", *numbered("old", 20))
    disk.store = store
    store.tick(NOW_MS + 60_000)
    store.maintenance.finish()
    assert store.refusal is None
    send(store, "t", "new")
    assert seen(store) == ["new"]


def test_a_queue_can_be_removed_during_retention(stores: StoreFixture) -> None:
    store = stores.open()
    for n in range(60):
        send(store, "t", f"old{n}")
    remove(store)
    store.expire(1)
    store.maintenance.finish()
    assert store.refusal is None


class Racing(Disk):
    """The thread pool misses a file after its directory is renamed and before queues are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.renamed = threading.Event()
        self.missed = threading.Event()

    def rename(self, old: Path, new: Path) -> None:
        racing = new.name.startswith(PREFIX)
        assert not racing or self.begun.wait(WAIT_SECONDS)
        super().rename(old, new)
        if racing:
            self.renamed.set()
            assert self.missed.wait(WAIT_SECONDS)

    def too_late(self, work: Callable[[Path], None], path: Path) -> None:
        self.begun.set()
        assert self.renamed.wait(WAIT_SECONDS)
        try:
            work(path)
        except FileNotFoundError:
            self.missed.set()
            raise


class RacingFlush(Racing):
    def sync_file(self, path: Path) -> None:
        self.too_late(super().sync_file, path)


class RacingRetention(Racing):
    def unlink(self, path: Path) -> None:
        self.too_late(super().unlink, path)


def test_a_flush_waits_for_the_outcome_of_a_removal(stores: StoreFixture) -> None:
    store = stores.open(RacingFlush())
    send(store, "t", *numbered("old", 20))
    store.tick(NOW_MS + 60_000)
    list(store.remove_queues(b"t"))
    store.maintenance.finish()
    assert store.refusal is None


def test_retention_waits_for_the_outcome_of_a_removal(stores: StoreFixture) -> None:
    store = stores.open(RacingRetention())
    for n in range(60):
        send(store, "t", f"old{n}")
    store.expire(1)
    list(store.remove_queues(b"t"))
    store.maintenance.finish()
    assert store.refusal is None


class SlowRename(Disk):
    """Delays the rename, so that the thread pool runs between it and the next step."""

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        time.sleep(0.0005)


def test_writes_continue_while_topics_are_created_and_deleted(stores: StoreFixture) -> None:
    store = stores.open(SlowRename())
    for n in range(rounds(ci=150, proof=5000)):
        for queue_id in range(3):
            send(store, f"t{n}", *numbered("m", 9), queue_id=queue_id)
        store.tick(NOW_MS + n * 1000)
        if n % 5 == 4:
            store.expire(1)
        list(store.remove_queues(b"t%d" % n))
        store.disk.submit(store.finish_removal)
        assert store.refusal is None
    store.maintenance.finish()
    assert store.refusal is None
    store.finish_removal()
    assert folders(store) == []


class Stuck(Disk):
    threads = False

    def rename(self, old: Path, new: Path) -> None:
        raise PermissionError(13, "no")


def test_a_directory_that_can_not_be_renamed_stays_complete(stores: StoreFixture) -> None:
    store = stores.open(Stuck())
    send(store, "t", *numbered("old", 20))
    with pytest.raises(StoreError, match="can't rename"):
        list(store.remove_queues(b"t"))
    send(store, "t", "more")
    assert seen(store) == [*numbered("old", 20), "more"]


# --- over restarts


@pytest.mark.parametrize("clean", [True, False])
def test_deleted_messages_do_not_come_back(stores: StoreFixture, clean: bool) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 20))
    send(store, "u", "stays")
    remove(store)
    flush(store)
    (stores.close if clean else stores.crash)(store)
    store = stores.open()
    assert store.queue("t", 0) is None
    assert seen(store, "u") == ["stays"]
    send(store, "t", "new")
    assert seen(store) == ["new"]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("news", [1, 2, 11, 40])
def test_offsets_of_a_recreated_topic_survive_a_restart(
    stores: StoreFixture, clean: bool, news: int
) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 20))
    flush(store)
    remove(store)
    send(store, "t", *numbered("new", news))
    flush(store)
    (stores.close if clean else stores.crash)(store)
    store = stores.open()
    assert seen(store) == numbered("new", news)
    assert store.min_offset("t", 0) == 0
    assert store.report.warnings() == []


def store_with_old_messages(stores: StoreFixture) -> MessageStore:
    """A store with messages so far behind its checkpoint that recovery does not read them."""
    store = stores.open()
    for n in range(200):
        now_ms = NOW_MS + n * 1000
        put(store, record(b"x" * 60, "t" if n % 2 else "u"), now_ms=now_ms)
        flush(store)
        store.tick(now_ms)
    store.tick(NOW_MS + 300_000)
    return store


def test_a_crash_that_undoes_the_rename_restores_no_messages(stores: StoreFixture) -> None:
    store = store_with_old_messages(stores)
    topic, copy = store.paths.queues / "t", store.paths.root / "copy"
    shutil.copytree(topic, copy)
    remove(store)
    stores.crash(store)
    copy.rename(topic)
    store = stores.open()
    assert store.report.replayed_from > 0
    assert seen(store) == []
    send(store, "t", "new")
    assert store.min_offset("t", 0) == 0
    assert seen(store) == ["new"]


def test_a_removed_topic_does_not_extend_the_replay_after_a_crash(stores: StoreFixture) -> None:
    store = store_with_old_messages(stores)
    remove(store)
    send(store, "t", "new")
    flush(store)
    stores.crash(store)
    store = stores.open()
    assert store.report.replayed_from > 0
    assert seen(store) == ["new"]
    assert len(seen(store, "u")) == 100


def test_a_partly_deleted_directory_is_deleted_at_the_next_start(stores: StoreFixture) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 20))
    flush(store)
    list(store.remove_queues(b"t"))
    assert folders(store) == [".removed-0"]
    stores.crash(store)
    store = stores.open()
    assert ".removed-0" not in folders(store)


def test_the_removal_record_is_deleted_with_the_segments(stores: StoreFixture) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 5))
    remove(store)
    for n in range(60):
        send(store, "u", f"more{n}")
    flush(store)
    assert list(read_ends(store.disk, store.paths)) == ["t"]
    store.expire(1)
    store.maintenance.finish()
    stores.close(store)
    store = stores.open()
    assert read_ends(store.disk, store.paths) == {}


def test_a_removal_deletes_removal_records_of_deleted_segments(stores: StoreFixture) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 5))
    remove(store)
    send(store, "u", *numbered("more", 60))
    store.expire(1)
    store.maintenance.finish()
    remove(store, "u")
    assert list(read_ends(store.disk, store.paths)) == ["u"]


class Undeletable(Disk):
    """Log segments can't be deleted."""

    threads = False

    def unlink(self, path: Path) -> None:
        if path.parent.name == "commitlog":
            raise PermissionError(13, "no")
        super().unlink(path)


def test_a_removal_record_is_kept_as_long_as_the_segments(stores: StoreFixture) -> None:
    store = stores.open(Undeletable())
    send(store, "t", *numbered("old", 5))
    remove(store)
    send(store, "u", *numbered("more", 60))
    store.expire(1)
    store.maintenance.finish()
    remove(store, "u")
    assert list(read_ends(store.disk, store.paths)) == ["t", "u"]


def test_inspection_takes_removed_topics_into_account(stores: StoreFixture) -> None:
    store = stores.open()
    send(store, "t", *numbered("old", 20))
    send(store, "t", "other queue", queue_id=1)
    remove(store)
    send(store, "t", *numbered("new", 3))
    stores.close(store)
    problems = list(Verification(StoreFiles(store.paths.root)).run())
    assert {problem.severity for problem in problems} == {NOTE}


def test_a_damaged_removal_record_is_read_from_its_backup_or_ignored(stores: StoreFixture) -> None:
    store = stores.open()
    for life in ("a", "b"):
        send(store, "t", *numbered(life, 3))
        remove(store)
    stores.close(store)
    store.paths.removed.write_bytes(b"{tor")
    assert list(read_ends(store.disk, store.paths)) == ["t"]
    Path(f"{store.paths.removed}.bak").unlink()
    assert read_ends(store.disk, store.paths) == {}


def test_a_log_shortened_by_a_power_cut_accepts_new_records_at_the_same_offsets(
    tmp_path: Path,
) -> None:
    disk = FaultyDisk(tmp_path / "0")
    store = MessageStore(disk.root, small_config(), disk=disk, now_ms=NOW_MS)
    send(store, "t", "flushed")
    flush(store)
    send(store, "t", *numbered("old", 8))
    remove(store)
    end = store.log.end
    root = disk.crash(tmp_path / "1", OnlySyncedSurvives())
    disk = FaultyDisk(root)
    store = MessageStore(root, small_config(), disk=disk, now_ms=NOW_MS)
    assert store.log.end < end
    send(store, "t", "new")
    assert store.log.end < end
    flush(store)
    disk = FaultyDisk(disk.crash(tmp_path / "2", OnlySyncedSurvives()))
    store = MessageStore(disk.root, small_config(), disk=disk, now_ms=NOW_MS)
    assert seen(store) == ["new"]


class OnlySyncedSurvives(Random):
    """The worst power cut: only synced data survives."""

    def random(self) -> float:
        return 0.99

    def choice(self, options):  # type: ignore[no-untyped-def]
        return options[0]


@pytest.mark.parametrize("seed", range(rounds(ci=60, proof=3000)))
def test_a_power_cut_around_a_removal_leaves_the_old_or_the_new_topic(
    tmp_path: Path, seed: int
) -> None:
    rng = Random(seed)
    disk = FaultyDisk(tmp_path / "0")
    config = small_config(sync_flush=True)
    store = MessageStore(disk.root, config, disk=disk, now_ms=NOW_MS)
    olds, news = rng.randrange(1, 40), rng.randrange(0, 30)
    send(store, "u", "stays")
    send(store, "t", *numbered("old", olds))
    flush(store)
    if rng.random() < 0.5:
        store.tick(NOW_MS + 60_000)
    disk.cut_after(rng.choice((None, rng.randrange(0, 60))))
    removed = flushed = False
    try:
        list(store.remove_queues(b"t"))
        if rng.random() < 0.7:
            store.finish_removal()
            removed = True
        send(store, "t", *numbered("new", news))
        disk.write_back(rng)
        flush(store)
        flushed = True
        store.finish_removal()
        removed = True
    except PowerCut:
        pass
    restarted = MessageStore(
        disk.crash(tmp_path / "1", rng), config, disk=(later := FaultyDisk(tmp_path / "1")),
        now_ms=NOW_MS,
    )  # fmt: skip
    assert later.dead is False
    found = seen(restarted)
    life = "old" if found[:1] == ["old0"] else "new"
    assert found == numbered(life, len(found))
    assert life == "new" or not removed
    if flushed and news:
        assert found == numbered("new", news)
    if life == "old":
        assert len(found) == olds
    assert seen(restarted, "u") == ["stays"]
    send(restarted, "t", "next")
    flush(restarted)
    assert seen(restarted) == [*found, "next"]
    assert folders(restarted) == ["t", "u"]


class StubbornFirst(Disk):
    """The first segment of the log can't be deleted for a while."""

    threads = False
    stubborn = True

    def unlink(self, path: Path) -> None:
        if path.parent.name == "commitlog" and int(path.name) == 0 and self.stubborn:
            raise PermissionError(13, "no")
        super().unlink(path)


def test_no_segment_is_deleted_before_its_predecessor(stores: StoreFixture) -> None:
    disk = StubbornFirst()
    store = stores.open(disk)
    send(store, "t", *numbered("x", 300))
    before = sorted(path.name for path in store.paths.log.iterdir())
    assert len(before) > 4
    for _ in range(2):
        store.expire(1)
        store.maintenance.finish()
    assert sorted(path.name for path in store.paths.log.iterdir()) == before, "a gap is damage"
    disk.stubborn = False
    store.expire(1)
    store.maintenance.finish()
    assert sorted(path.name for path in store.paths.log.iterdir()) == before[3:]
