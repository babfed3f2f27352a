"""Targets are found by the bytes of requests, and only by those of their own requests."""

from pathlib import Path

import pytest

from penstock.broker.consumers.consumer_targets import ConsumerTarget, TargetKey, TargetTable
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.disk import Disk
from penstock.wire.frame import BINARY, Request
from penstock.wire.output import encode

Names = tuple[bytes, bytes, int, bytes | None]


def queue() -> ConsumeQueue:
    return ConsumeQueue(Disk(), Path("nowhere"), b"T", 0, 100)


def key_of(group: bytes, topic: bytes, queue_id: int, expression: bytes | None) -> TargetKey:
    fields = {"consumerGroup": group.decode(), "topic": topic.decode(), "queueId": str(queue_id)}
    if expression is not None:
        fields["subscription"] = expression.decode()
    data = encode(11, fields, encoding=BINARY)
    request, key = Request(), TargetKey()
    request.bind(memoryview(bytearray(data)))
    request.read(0, len(data))
    assert key.read(request, None if expression is None else b"subscription")
    return key


# Their FNV hashes are equal where the other names are G, T, queue 0.
COLLISIONS: list[tuple[Names, Names]] = [
    ((b"g2676241", b"T", 0, None), (b"g3537787", b"T", 0, None)),
    ((b"G", b"t2420349", 0, None), (b"G", b"t3534140", 0, None)),
    ((b"G", b"T", 0, b"e2515780"), (b"G", b"T", 0, b"e3654246")),
    ((b"G", b"T", 0, None), (b"G", b"T", 0, b"")),
]


@pytest.mark.parametrize(("names", "others"), COLLISIONS)
def test_names_with_the_same_hash_are_different_targets(names: Names, others: Names) -> None:
    key, other_key = key_of(*names), key_of(*others)
    assert key.hash == other_key.hash
    target, table = ConsumerTarget(key, queue()), TargetTable()
    assert target.has_key(key_of(*names))
    assert not target.has_key(other_key)
    table.put(key, target)
    assert table.find(other_key) is None
    other = ConsumerTarget(other_key, queue())
    table.put(other_key, other)
    assert table.find(key_of(*names)) is target
    assert table.find(key_of(*others)) is other
    again = ConsumerTarget(key, queue())
    table.put(key, again)
    assert table.find(key) is again
    assert table.used == 2


def test_a_key_needs_names_and_a_queue() -> None:
    request, key = Request(), TargetKey()
    fields = {"consumerGroup": "G", "topic": "T", "queueId": "0"}
    for wrong in (
        {"consumerGroup": ""}, {"topic": ""}, {"queueId": ""}, {"queueId": "-1"},
        {"queueId": str(1 << 31)},
    ):  # fmt: skip
        data = encode(11, fields | wrong, encoding=BINARY)
        request.bind(memoryview(bytearray(data)))
        request.read(0, len(data))
        assert not key.read(request, None)


@pytest.mark.parametrize("targets_max", [8, 1 << 10, 1 << 15])
def test_a_table_keeps_its_limit(targets_max: int) -> None:
    table = TargetTable(targets_max)
    keys = [key_of(b"G%d" % (n % 7), b"T%d" % (n // 7), n % 5, None) for n in range(2000)]
    for key in keys:
        table.put(key, ConsumerTarget(key, queue()))
    found = [table.find(key) for key in keys]
    kept = sum(target is not None for target in found)
    assert table.used >= kept
    assert kept <= targets_max
    assert kept > min(targets_max, 2000) * 0.7
    for key, target in zip(keys, found, strict=True):
        assert target is None or target.has_key(key)
    last = found[-1]
    assert last is not None, "the newest is always kept"
    assert (last.group, last.topic, last.queue_id) == ("G4", "T285", 4)


def test_a_growing_table_forgets_deleted_queues() -> None:
    table, deleted = TargetTable(), queue()
    deleted.retire("elsewhere")
    gone, kept = key_of(b"G", b"gone", 0, None), key_of(b"G", b"kept", 0, None)
    table.put(gone, ConsumerTarget(gone, deleted))
    table.put(kept, ConsumerTarget(kept, queue()))
    for number in range(100):
        key = key_of(b"H", b"T", number, None)
        table.put(key, ConsumerTarget(key, queue()))
    assert table.find(gone) is None
    assert table.find(kept) is not None
