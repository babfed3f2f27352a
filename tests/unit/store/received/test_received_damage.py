"""Damage of the master's log at its slave: asked for again, then isolated as in a recovery."""

import logging
from pathlib import Path
from random import Random

import pytest

from penstock.errors import ReplicationError
from penstock.store.consumequeue.consumequeue import FILLER_SIZE
from penstock.wire import layout
from tests.depth import rounds
from tests.store_kit import (
    SEGMENT_BYTES,
    START_MS,
    Message,
    Model,
    Stored,
    abandon,
    flush,
    open_store,
    put_ok,
    small_config,
)
from tests.unit.store.conftest import WatchedDisk
from tests.unit.store.received.test_received_log import Slave, master_log

ATTEMPTS = 3
"""So often are the same bytes asked for at most."""


def follow(slave: Slave, log: bytes, piece: int = 1000) -> int:
    """Receive the log; connects again after an error. Returns the number of errors."""
    errors = last = 0
    at_before = -1
    while slave.received.next_offset < len(log):
        at = slave.received.next_offset
        try:
            slave.take(log[at : at + piece])
        except ReplicationError:
            errors += 1
            last = last + 1 if slave.store.log.end == at_before else 1
            at_before = slave.store.log.end
            assert last < ATTEMPTS, f"offset {at_before} was refused {last} times"
            slave.received.restart()
    return errors


def entries(slave: Slave) -> dict[tuple[bytes, int], list[object]]:
    return {
        (queue.topic, queue.queue_id): [
            queue.entry(offset) for offset in range(queue.min_offset, queue.max_offset)
        ]
        for queue in slave.store.queues.rows
    }


def assert_kept(slave: Slave, model: Model, damaged: list[Stored]) -> None:
    """All messages but the damaged ones are where they were, fillers stand for the others."""
    for name, row in model.queues().items():
        queue = slave.store.queue(*name)
        assert queue is not None or not [s for s in row if s not in damaged]
        for stored in row if queue is not None else ():
            entry = queue.entry(stored.queue_offset)
            if stored in damaged:
                assert entry is None or entry[1] == FILLER_SIZE
            else:
                assert entry == stored.entry()
                assert slave.store.lookup.record(stored.offset, slave.store.log.end)


FIELDS = {
    "size, less": (layout.SIZE_AT + 3, 0x01),
    "size, more": (layout.SIZE_AT + 2, 0x02),
    "size, beyond the segment": (layout.SIZE_AT, 0x10),
    "magic number": (layout.MAGIC_AT, 0x10),
    "CRC": (layout.BODY_CRC_AT, 0x10),
    "log offset": (layout.PHYSICAL_OFFSET_AT + 7, 0x40),
    "body length": (layout.BORN_HOST_AT + 8 + 8 + 8 + 12, 0x10),
}


@pytest.mark.parametrize("append_by", ["mapping", "pwrite"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_a_damaged_record_of_the_master_is_isolated(
    tmp_path: Path,
    append_by: str,
    field: str,
    piece: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, log = master_log(tmp_path / "master", 2, 60)
    hit = model.stored[20]
    at, bit = FIELDS[field]
    damaged = bytearray(log)
    damaged[hit.offset + at] ^= bit
    slave = Slave(tmp_path / "slave", append_by=append_by)
    with caplog.at_level(logging.WARNING):
        assert follow(slave, bytes(damaged), piece) in (1, 2)
    assert slave.log() == bytes(damaged)
    assert_kept(slave, model, [hit])
    assert slave.store.report.damaged_ranges == 1
    assert (
        caplog.text.count(f"the log is damaged at offset {hit.offset}: {hit.message.size()} ") == 1
    )
    known = entries(slave)
    abandon(slave.store)
    slave.open()  # a recovery gives the same result
    assert entries(slave) == known
    slave.store.close()


def test_a_fault_of_the_connection_is_not_taken_for_damage(tmp_path: Path) -> None:
    """Other bytes arrive each time; the right ones are accepted."""
    model, log = master_log(tmp_path / "master", 2, 10)
    hit = model.stored[5]
    slave = Slave(tmp_path / "slave")
    for number in range(5):
        damaged = bytearray(log)
        damaged[hit.offset + layout.BODY_CRC_AT + number % 4] ^= 1 << number
        with pytest.raises(ReplicationError, match=f"log offset {hit.offset} is not a valid"):
            slave.take(bytes(damaged[slave.received.next_offset :]))
        slave.received.restart()
    slave.take(log[hit.offset :])
    assert slave.log() == log
    assert_kept(slave, model, [])
    assert slave.store.report.damaged_ranges == 0
    slave.store.close()


def test_damage_at_the_end_waits_for_the_next_record(tmp_path: Path) -> None:
    """Where it ends is not known before; the slave has not acknowledged it until then."""
    model, log = master_log(tmp_path / "master", 2, 10)
    hit = model.stored[-2]
    damaged = bytearray(log)
    damaged[hit.offset] ^= 0x10
    slave = Slave(tmp_path / "slave")
    with pytest.raises(ReplicationError):
        slave.take(bytes(damaged[: hit.end]))
    slave.received.restart()
    slave.take(bytes(damaged[hit.offset : hit.end + 20]))
    assert slave.store.log.end == hit.offset
    assert slave.received.next_offset == hit.end + 20
    slave.take(bytes(damaged[hit.end + 20 :]))
    assert slave.log() == bytes(damaged)
    assert_kept(slave, model, [hit])
    slave.store.close()


def test_logs_that_differ_are_not_joined(tmp_path: Path) -> None:
    """Without a comparison of epochs, nothing says that the slave's log ends where a record of the
    master begins."""
    model, log = master_log(tmp_path / "master", 2, 20)
    slave = Slave(tmp_path / "slave")
    slave.take(log[: model.stored[3].end])
    end = slave.store.log.end
    slave.store.close()
    slave.open()
    other = log[: end - 10] + bytes(7) + log[end - 10 :]
    for _ in range(5):
        slave.received.restart()
        with pytest.raises(ReplicationError, match="is not a valid record"):
            slave.take(other[end:])
    assert slave.store.log.end == end
    slave.received.restart()
    slave.take(log[end : model.stored[5].end])  # the right one
    end = slave.store.log.end
    for _ in range(5):
        slave.received.restart()
        with pytest.raises(ReplicationError, match="is not a valid record"):
            slave.take(other[end:])  # and then another one
    slave.store.close()


def test_a_damaged_blank_record_is_replaced(tmp_path: Path) -> None:
    model, log = master_log(tmp_path / "master", 3, 60)
    last = max(s.end for s in model.stored if s.offset < SEGMENT_BYTES)
    assert last < SEGMENT_BYTES
    for at in (0, 3, 4):
        damaged = bytearray(log)
        damaged[last + at] ^= 0x10
        slave = Slave(tmp_path / f"slave{at}")
        follow(slave, bytes(damaged))
        assert slave.log() == log
        assert_kept(slave, model, [])
        slave.store.close()


def test_a_long_damaged_range_is_taken_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a whole segment had been lost, and a file of zeros were in its place."""
    monkeypatch.setattr("penstock.store.received.received_log.PIECE_BYTES_MAX", 1000)
    model, log = master_log(tmp_path / "master", 3, 90)
    lost = [s for s in model.stored if SEGMENT_BYTES <= s.offset < 2 * SEGMENT_BYTES]
    damaged = log[:SEGMENT_BYTES] + bytes(SEGMENT_BYTES) + log[2 * SEGMENT_BYTES :]
    slave = Slave(tmp_path / "slave")
    follow(slave, damaged, 100)
    assert slave.store.log.end == len(log)
    assert_kept(slave, model, lost)
    assert slave.store.report.damaged_bytes == SEGMENT_BYTES
    slave.store.close()


@pytest.mark.parametrize("seed", range(rounds(ci=40, proof=2000)))
def test_damage_anywhere_costs_only_what_it_hits(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    model, log = master_log(tmp_path / "master", seed, 60)
    end = model.stored[-3].offset  # a successor arrives
    damaged = bytearray(log)
    hits = []
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(end)
        length = min(rng.choice((1, 8, 600, 5000)), end - at)
        noise = rng.choice((bytes(length), rng.randbytes(length)))
        damaged[at : at + length] = noise
        hits.append((at, at + length))
    slave = Slave(tmp_path / "slave", append_by=rng.choice(("mapping", "pwrite")))
    follow(slave, bytes(damaged), rng.choice((50, 1000, 1 << 20)))
    assert slave.store.log.end == len(log)
    stored = slave.log()
    for one in model.stored:
        if not any(low < one.end and one.offset < high for low, high in hits):
            assert stored[one.offset : one.end] == log[one.offset : one.end]
    slave.store.close()


@pytest.mark.parametrize("append_by", ["mapping", "pwrite"])
@pytest.mark.parametrize("bit", range(64))
def test_a_damaged_queue_offset_costs_one_message(
    tmp_path: Path, append_by: str, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No checksum covers it. The slave's queue must neither become huge nor stop."""
    model, log = queue_log(tmp_path / "master", 12)
    hit = model.stored[6]
    damaged = bytearray(log)
    damaged[hit.offset + layout.QUEUE_OFFSET_AT + 7 - bit // 8] ^= 1 << bit % 8
    slave = Slave(tmp_path / "slave", append_by=append_by)
    slave.take(bytes(damaged))
    queue = slave.store.queue("t", 0)
    assert queue is not None
    assert queue.max_offset == 12
    assert_kept(slave, model, [hit])
    slave.store.close()
    assert caplog.text.count("its queue offset does not continue the queue") == 1


@pytest.mark.parametrize("bit", [3, 10, 20, 40, 62])
def test_a_queue_that_begins_with_a_damaged_offset_begins_again(tmp_path: Path, bit: int) -> None:
    model, log = queue_log(tmp_path / "master", 12)
    damaged = bytearray(log)
    damaged[layout.QUEUE_OFFSET_AT + 7 - bit // 8] ^= 1 << bit % 8
    slave = Slave(tmp_path / "slave")
    slave.take(bytes(damaged))
    queue = slave.store.queue("t", 0)
    assert queue is not None
    assert (queue.min_offset, queue.max_offset) == (1, 12)
    assert_kept(slave, model, model.stored[:1])
    slave.store.close()


def queue_log(root: Path, count: int) -> tuple[Model, bytes]:
    """A store with one queue; its model and the bytes of its log."""
    model = Model()
    store = open_store(root, small_config(sync_flush=False), WatchedDisk())
    for serial in range(count):
        put_ok(store, model, [Message("t", 0, b"%d" % serial)], START_MS + serial)
    flush(store)
    log = bytes(store.log.segments.items[0].view)[: store.log.end]
    store.close()
    return model, log
