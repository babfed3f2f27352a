"""Damaged files: a store opens, keeps what is intact, and never crashes.

Unlike a power cut, damage follows no rule: bits flip, ranges turn to zero or to noise, files are
cut short, in any file of a store that crashed or was closed. Records have a CRC for the body only,
so a flipped bit may go unnoticed; what is asserted is what can be known:

* opening ends with a store or with a PenstockError, the latter only if `penstock.json` is hit or a
  segment of the log is cut to nothing, which looks as if it had been deleted;
* the log keeps every undamaged record, before and behind the damage, at its offset with its bytes;
* damage outside the log and its queues costs no message;
* whatever the queues and the index say, reading ends; new messages can be put and read.

A share of the rounds runs with `PENSTOCK_PURE=1`, where reading out of bounds is an exception.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import pytest

from penstock.errors import StoreDamaged, StoreRefused
from penstock.store.get import FOUND
from penstock.store.store import MessageStore
from penstock.testing import FaultyDisk
from penstock.wire.output import Output
from tests.depth import rounds
from tests.store_kit import (
    EVER_MS,
    START_MS,
    Message,
    Model,
    abandon,
    flush,
    open_store,
    put_ok,
    random_message,
    read,
    small_config,
    verify,
)

LATER_MS = START_MS + 10_000_000
CONFIG = small_config(sync_flush=False)
PURE_ROUNDS = rounds(ci=12, proof=200)


def make_store(root: Path, rng: Random, *, closed: bool) -> Model:
    """A store with several files of each kind, as a killed process leaves it unless `closed`."""
    model = Model()
    disk = FaultyDisk(root)
    store = open_store(root, CONFIG, disk)
    now_ms = START_MS
    for serial in range(rng.randrange(60, 160)):
        now_ms += rng.choice((0, 10, 700))
        put_ok(store, model, [random_message(rng, serial)], now_ms)
        if rng.random() < 0.2:
            flush(store)
        if rng.random() < 0.1:
            store.tick(now_ms)
    flush(store)
    store.close() if closed else abandon(store)
    return model


def do_damage(path: Path, rng: Random) -> tuple[int, int]:
    """Damage a file somewhere in its written part; returns the range of damaged offsets."""
    data = bytearray(path.read_bytes())
    written = max(len(data.rstrip(b"\0")), 1)
    at = rng.randrange(written)
    length = min(rng.choice((1, 8, 64, 600, 5000)), len(data) - at)
    kind = rng.choice(("flip", "flip", "flip", "zero", "noise", "cut"))
    if kind == "flip" and data:
        length = 1
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        data[at : at + length] = bytes(length)
    elif kind == "noise":
        data[at : at + length] = rng.randbytes(length)
    else:
        at = rng.choice((0, at))
        length = len(data) - at
        del data[at:]
    path.write_bytes(data)
    return at, at + length


def damage_round(root: Path, seed: int, kind: str = "*") -> None:
    """Make a store, damage one file, open it and check the rules above."""
    rng = Random(seed)
    closed = rng.random() < 0.5
    model = make_store(root, rng, closed=closed)
    files = [p for p in sorted(root.rglob(kind)) if p.is_file() and p.name != "lock"]
    if not files:
        return  # a store that crashed has no snapshot
    path = rng.choice(files)
    begin, end = do_damage(path, rng)
    deleted = path.parent.name == "commitlog" and path.stat().st_size == 0
    try:
        store = open_store(root, CONFIG, FaultyDisk(root), LATER_MS)
    except (StoreDamaged, StoreRefused):
        if path.name != "penstock.json" and not deleted:
            raise
        return
    if path.parent.name == "commitlog":
        check_log(store, model, int(path.name) + begin, int(path.name) + end)
    elif "consumequeue" in path.parts:
        check_log(store, model)
    elif path.parent.name == "index":
        check_queues(store, model)
    else:
        verify(store, model)
    look_around(store, model)
    write_on(store, root)


def check_log(store: MessageStore, model: Model, begin: int = 0, end: int = 0) -> None:
    """Every record exists that has no byte in the damaged range."""
    for stored in model.stored:
        if stored.end <= begin or stored.offset >= end:
            found = store.lookup.record(stored.offset, store.confirm_offset)
            assert found == stored.data(), f"{stored.offset}: {store.report}"


def check_queues(store: MessageStore, model: Model) -> None:
    check_log(store, model)
    for name, row in model.queues().items():
        assert store.max_offset(*name) == len(row)
        assert read(store, name, 0, 1) == [row[0].data()]


def look_around(store: MessageStore, model: Model) -> None:
    """Use every way to read; results may be wrong near the damage, but every read ends."""
    for queue in store.queues.rows:
        reader = store.new_reader()
        offset = queue.min_offset
        while offset < queue.max_offset:
            status = reader.find(queue, offset, 32, 100_000, store.confirm_offset, True)
            assert reader.next_offset > offset, f"stuck at {offset} of {queue.folder}"
            if status == FOUND and reader.total < 1 << 20:
                reader.copy_to(Output(), True)
            offset = reader.next_offset
        for upper in (False, True):
            store.lookup.offset_at(
                queue, START_MS, confirm_offset=store.confirm_offset, upper=upper
            )
    for stored in model.stored[::5]:
        store.lookup.record(stored.offset, store.confirm_offset)
        for key in stored.message.all_keys:
            store.lookup.by_key(
                stored.message.topic, key, begin_ms=0, end_ms=EVER_MS, most=64,
                confirm_offset=store.confirm_offset,
            )  # fmt: skip


def write_on(store: MessageStore, root: Path) -> None:
    """The opened store accepts messages, returns them and can be closed and opened again."""
    fresh = [Message(t, q, b"after", "a", (f"new{t}{q}",)) for t in ("c", "n") for q in (0, 3)]
    places = []
    for message in fresh:
        assert store.put(message.record(), LATER_MS) == 0, store.refusal
        places.append((message, store.writer.queue_offset, store.writer.offset))
    flush(store)
    for again in (False, True):
        for message, queue_offset, offset in places:
            data = store.lookup.record(offset, store.confirm_offset)
            assert data is not None
            assert read(store, message.queue, queue_offset, 1) == [data]
            assert data in store.lookup.by_key(
                message.topic, message.keys[0], begin_ms=0, end_ms=EVER_MS, most=64,
                confirm_offset=store.confirm_offset,
            )  # fmt: skip
        store.close()
        if not again:
            store = open_store(root, CONFIG, FaultyDisk(root), LATER_MS)
            assert store.report.clean


@pytest.mark.parametrize("seed", range(rounds(ci=60, proof=1500)))
def test_the_store_survives_damage_anywhere(tmp_path: Path, seed: int) -> None:
    damage_round(tmp_path / "store", seed)


@pytest.mark.parametrize("kind", ["0*", "penstock.snapshot", "checkpoint", "penstock.json", "2*"])
@pytest.mark.parametrize("seed", range(rounds(ci=6, proof=150)))
def test_the_store_survives_damage_to_each_kind_of_file(
    tmp_path: Path, seed: int, kind: str
) -> None:
    damage_round(tmp_path / "store", 10_000 + seed, kind)


@pytest.mark.skipif(os.environ.get("PENSTOCK_PURE") == "1", reason="runs in pure mode already")
def test_uncompiled_code_survives_damage() -> None:
    env = {**os.environ, "PENSTOCK_PURE": "1"}
    command = [sys.executable, "-m", "tests.faults.test_damage", str(PURE_ROUNDS)]
    subprocess.run(command, env=env, check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("victim", range(20))
@pytest.mark.parametrize(("place", "bit"), [(15, 1), (27, 1), (27, 8), (26, 1)])
def test_a_bit_flip_in_a_record_header_does_not_affect_entries_of_other_messages(
    tmp_path: Path, victim: int, place: int, bit: int
) -> None:
    """The header of a record has no CRC: its queue id and queue offset may be wrong."""
    model = Model()
    store = open_store(tmp_path, CONFIG, FaultyDisk(tmp_path))
    for serial in range(20):
        put_ok(store, model, [Message("t", serial % 2, b"%d" % serial)], START_MS)
    flush(store)
    abandon(store)
    hit = model.stored[victim]
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[hit.offset + place] ^= bit
    path.write_bytes(data)
    store = open_store(tmp_path, CONFIG, FaultyDisk(tmp_path), LATER_MS)
    # The last record of a queue has no successor that could contradict it, so it is trusted.
    if victim >= 18:
        store.close()
        return
    # With the id of the other queue an even record fits there exactly and replaces its successor.
    robbed = model.stored[victim + 1] if place == 15 and victim % 2 == 0 else None
    for stored in model.stored:
        if stored is not hit and stored is not robbed:
            got = read(store, stored.message.queue, stored.queue_offset, 1)
            assert got == [stored.data()], f"{hit.offset} took {stored.queue_offset}"
    store.close()


@pytest.mark.parametrize("bit", [6, 20])
def test_a_damaged_last_entry_without_a_snapshot_loses_no_record(tmp_path: Path, bit: int) -> None:
    """Closed by Apache's broker, or with a damaged snapshot: queues define where the log ends."""
    root = tmp_path / "store"
    model = Model()
    store = open_store(root, CONFIG, FaultyDisk(root))
    for serial in range(20):
        put_ok(store, model, [Message("t", 0, bytes(serial))], START_MS)
    flush(store)
    store.close()
    (root / "penstock.snapshot").unlink()
    path = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[19 * 20 + 11 - bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    store = open_store(root, CONFIG, FaultyDisk(root), LATER_MS)
    try:
        assert store.log.end == model.end
        check_log(store, model)
    finally:
        store.close()


def main() -> None:
    for seed in range(int(sys.argv[1])):
        with tempfile.TemporaryDirectory() as folder:
            damage_round(Path(folder) / "store", 20_000 + seed)


if __name__ == "__main__":
    main()
