"""Records that were damaged at rest are not delivered; those around them are."""

import pytest

from penstock.store.get import FOUND, MESSAGE_WAS_REMOVING
from penstock.store.lookup import GONE
from penstock.store.store import MessageStore
from tests.unit.store.conftest import (
    EVER_MS,
    SEGMENT_BYTES,
    StoreFixture,
    body_of,
    flush,
    properties,
    put,
    record,
    split,
)

COUNT = 8


def fill(store: MessageStore) -> list[tuple[int, int]]:
    """Messages of one queue; returns the place and size of each."""
    places = []
    for n in range(COUNT):
        made = record(b"body %d" % n * 20, text=properties(keys=f"k{n}"))
        places.append((*put(store, made), made.size))
    flush(store)
    return places


def flip(store: MessageStore, offset: int) -> None:
    path = store.paths.log / f"{offset - offset % SEGMENT_BYTES:020d}"
    data = bytearray(path.read_bytes())
    data[offset % SEGMENT_BYTES] ^= 1
    path.write_bytes(data)


def damaged_store(
    stores: StoreFixture, victims: list[int], at: int, **config: bool
) -> MessageStore:
    """A store that was closed, damaged and opened again; the last record stays whole."""
    store = stores.open(**config)
    places = fill(store)
    stores.close(store)
    for victim in victims:
        flip(store, places[victim][0] + at)
    return stores.open(**config)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("at", [3, 5, 9, 34, 87, 100], ids=str)
@pytest.mark.parametrize("victims", [[0], [3], [2, 3, 5]], ids=str)
def test_a_damaged_message_is_left_out_of_a_read(
    stores: StoreFixture, at: int, victims: list[int], wait: bool
) -> None:
    store = damaged_store(stores, victims, at)
    found = store.get("t", 0, 0, wait=wait)
    assert found.status == FOUND
    kept = [n for n in range(COUNT) if n not in victims]
    assert [body_of(data)[:6] for data in split(found.data)] == [b"body %d" % n for n in kept]
    assert (found.count, found.next_offset) == (len(kept), COUNT)
    assert len(store.log.damaged) == len(victims)


def test_a_read_of_damaged_messages_only_goes_on(stores: StoreFixture) -> None:
    store = damaged_store(stores, [2, 3], 100)
    found = store.get("t", 0, 2, count_max=2, wait=True)
    assert (found.status, found.next_offset, found.data) == (MESSAGE_WAS_REMOVING, 4, b"")


def test_each_damaged_message_is_logged_once(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    store = damaged_store(stores, [3], 100)
    for _ in range(3):
        store.get("t", 0, 0, wait=True)
    (text,) = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
    (offset,) = store.log.damaged
    assert text == (
        f"a message of topic t, queue 0, at log offset {offset} is damaged and is not delivered: "
        "the body does not match its CRC"
    )


def test_a_damaged_message_is_not_found_by_offset_or_key(stores: StoreFixture) -> None:
    store = damaged_store(stores, [3], 100)
    queue = store.queue("t", 0)
    assert queue is not None
    offset, size, _ = queue.entry(3) or (0, 0, 0)
    assert store.lookup.record(offset, store.confirm_offset) is None
    assert store.lookup.read_record(offset, size, wait=True) == GONE
    assert store.lookup.read_record(offset, size, wait=False) == GONE
    ask = {"begin_ms": 0, "end_ms": EVER_MS, "most": 9, "confirm_offset": store.confirm_offset}
    assert store.lookup.by_key("t", "k3", **ask) == []
    assert len(store.lookup.by_key("t", "k4", **ask)) == 1
    assert store.log.damaged == {offset}


def test_the_check_can_be_turned_off(stores: StoreFixture) -> None:
    store = damaged_store(stores, [3], 100, check_cold_reads=False)
    assert store.get("t", 0, 0, wait=True).count == COUNT
    assert store.log.damaged == set()
