"""A slave's log: bytes of a master's log in pieces of any size give the same log and queues."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from penstock.errors import DiskFull, ReplicationError
from penstock.store.put import PUT_OK
from penstock.store.received.received_log import ReceivedLog
from penstock.store.store import MessageStore
from tests.depth import rounds
from tests.store_kit import (
    SEGMENT_BYTES,
    START_MS,
    Message,
    Model,
    abandon,
    flush,
    open_store,
    put_ok,
    random_message,
    small_config,
    verify,
)
from tests.unit.store.conftest import WatchedDisk, nowhere


def master_log(root: Path, seed: int, count: int) -> tuple[Model, bytes]:
    """A store with several segments; its model and the bytes of its log."""
    rng, model = Random(seed), Model()
    store = open_store(root, small_config(sync_flush=False), WatchedDisk())
    for serial in range(count):
        put_ok(store, model, [random_message(rng, serial)], START_MS + serial)
    flush(store)
    data = b"".join(bytes(segment.view) for segment in store.log.segments.items)[: store.log.end]
    store.close()
    return model, data


class Slave:
    """A slave's store that can be closed, killed and opened again."""

    def __init__(self, root: Path, *, append_by: str = "mapping") -> None:
        self.root = root
        self.config = small_config(sync_flush=append_by == "pwrite", append_by=append_by)
        self.open()

    def open(self) -> None:
        self.store: MessageStore = open_store(self.root, self.config, WatchedDisk())
        self.received = ReceivedLog(self.store.log, self.store.writer, self.store.make_queue)

    def log(self) -> bytes:
        segments = self.store.log.segments.items
        return b"".join(bytes(s.view) for s in segments)[: self.store.log.end]

    def take(self, data: bytes) -> None:
        self.received.receive(memoryview(bytearray(data)))
        assert self.received.dispatch()
        flush(self.store)


@pytest.mark.parametrize("append_by", ["mapping", "pwrite"])
@pytest.mark.parametrize("seed", range(rounds(ci=12, proof=300)))
def test_pieces_of_any_size_give_the_log_of_the_master(
    tmp_path: Path, append_by: str, seed: int
) -> None:
    rng = Random(seed)
    model, log = master_log(tmp_path / "master", seed, 60)
    slave = Slave(tmp_path / "slave", append_by=append_by)
    at = 0
    while at < len(log):
        piece = log[at : at + rng.choice((1, 7, 100, 1000, 8000))]
        slave.take(piece)
        at = slave.received.next_offset
        assert slave.store.log.end <= at or at % SEGMENT_BYTES
        event = rng.choice((*("",) * 8, "close", "kill", "reconnect"))
        if event == "close":
            slave.store.close()
            slave.open()
            assert slave.store.report.clean
        elif event == "kill":
            abandon(slave.store)
            slave.open()
            assert slave.store.report.warnings() == []
        elif event == "reconnect":
            slave.received.restart()
        at = slave.received.next_offset
        assert slave.log() == log[: slave.store.log.end]
    verify(slave.store, model)
    slave.store.close()
    slave.open()
    assert slave.store.log.end == len(log)
    verify(slave.store, model)
    slave.store.close()


def test_a_record_that_arrives_in_part_is_not_written(tmp_path: Path) -> None:
    model, log = master_log(tmp_path / "master", 1, 3)
    slave = Slave(tmp_path / "slave")
    slave.take(log[: len(log) - 1])
    assert slave.store.confirm_offset == slave.store.log.end == model.stored[-1].offset
    assert slave.received.next_offset == len(log) - 1
    slave.take(log[len(log) - 1 :])
    assert slave.store.confirm_offset == len(log)
    slave.store.close()


@pytest.mark.parametrize("at", [0, 5, 9, 30])
def test_what_is_not_a_valid_record_is_not_written(tmp_path: Path, at: int) -> None:
    model, log = master_log(tmp_path / "master", 2, 10)
    hit = model.stored[5]
    damaged = bytearray(log)
    damaged[hit.offset + at] ^= 0x10
    slave = Slave(tmp_path / "slave")
    with pytest.raises(ReplicationError, match=f"log offset {hit.offset} is not a valid record"):
        slave.take(damaged)
    assert slave.store.log.end == hit.offset
    slave.received.restart()
    slave.take(log[hit.offset :])
    verify(slave.store, model)
    slave.store.close()


def test_another_segment_size_is_noticed(tmp_path: Path) -> None:
    _, log = master_log(tmp_path / "master", 3, 60)
    slave = Slave(tmp_path / "slave")
    slave.store.close()
    slave.config = msgspec.structs.replace(slave.config, segment_bytes=2 * SEGMENT_BYTES)
    slave.root = tmp_path / "other"
    slave.open()
    with pytest.raises(ReplicationError, match="the segments of the master have another length"):
        slave.take(log)
    slave.store.close()


def test_a_topic_that_was_created_again_begins_at_zero(tmp_path: Path) -> None:
    root = tmp_path / "master"
    store = open_store(root, small_config(sync_flush=False), WatchedDisk())
    message = Message("t", 0, b"body")
    for _ in range(3):
        assert store.put(message.record(), START_MS) == PUT_OK
    assert list(store.remove_queues(b"t"))
    store.finish_removal()
    assert store.put(message.record(), START_MS) == PUT_OK
    flush(store)
    log = bytes(store.log.segments.items[0].view)[: store.log.end]
    store.close()
    slave = Slave(tmp_path / "slave")
    slave.take(log)
    assert (slave.store.min_offset("t", 0), slave.store.max_offset("t", 0)) == (0, 1)
    slave.store.close()


def test_a_log_that_begins_later_gives_queues_that_begin_later(tmp_path: Path) -> None:
    model, log = master_log(tmp_path / "master", 4, 60)
    slave = Slave(tmp_path / "slave")
    slave.store.begin_log_at(slave.store.log.create_begin(SEGMENT_BYTES)())()
    slave.received.restart()
    slave.take(log[SEGMENT_BYTES:])
    verify(slave.store, model, SEGMENT_BYTES)
    slave.store.close()
    slave.open()
    verify(slave.store, model, SEGMENT_BYTES)
    slave.store.close()


def test_a_full_disk_stops_the_log_and_nothing_is_lost(tmp_path: Path) -> None:
    model, log = master_log(tmp_path / "master", 5, 60)
    slave = Slave(tmp_path / "slave")
    disk = slave.store.disk
    assert isinstance(disk, WatchedDisk)
    disk.no_space = lambda path: True
    for at in range(0, len(log), 512):
        try:
            slave.received.receive(memoryview(bytearray(log[at : at + 512])))
        except DiskFull:
            break
        if not slave.received.dispatch():
            break
    assert slave.received.dispatched < len(log)
    disk.no_space = nowhere
    slave.received.restart()
    slave.take(log[slave.store.log.end :])
    verify(slave.store, model)
    slave.store.close()
