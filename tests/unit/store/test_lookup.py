"""Look-ups by physical offset, by key and by time."""

from random import Random

import pytest

from penstock.store.lookup import QUERY_MAX
from penstock.store.store import MessageStore
from tests.unit.store.conftest import (
    EVER_MS,
    NOW_MS,
    SEGMENT_BYTES,
    StoreFixture,
    body_of,
    flush,
    properties,
    put,
    record,
    sized,
)


def by_key(
    store: MessageStore, key: str, begin_ms: int = 0, end_ms: int = EVER_MS, most: int = 64,
    topic: str = "t",
) -> list[bytes]:  # fmt: skip
    found = store.lookup.by_key(
        topic, key, begin_ms=begin_ms, end_ms=end_ms, most=most, confirm_offset=store.confirm_offset
    )
    return [body_of(data) for data in found]


def test_a_record_is_found_by_its_offset(stores: StoreFixture) -> None:
    store = stores.open()
    offsets = put(store, sized(100), sized(3990), sized(200))
    assert offsets[1:] == [SEGMENT_BYTES, 2 * SEGMENT_BYTES]
    sizes = [len(store.lookup.record(o, store.confirm_offset) or b"") for o in offsets]
    assert sizes == [100, 3990, 200]


@pytest.mark.parametrize(
    "offset",
    [-(1 << 62), -1, 1, 50, 99, 100, 4000, 4092, 4095, SEGMENT_BYTES + 5, 9000, 1 << 40, 1 << 62],
)
def test_an_offset_inside_a_record_finds_nothing(stores: StoreFixture, offset: int) -> None:
    store = stores.open()
    put(store, sized(100), sized(3990))
    assert store.lookup.record(offset, store.confirm_offset) is None
    assert store.lookup.record(offset, 1 << 62) is None


def test_random_bytes_contain_no_record(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(Random(1).randbytes(2000)), record(b"\xda\xa3\x20\xa7" * 200))
    starts = {0, 2092}
    for offset in range(SEGMENT_BYTES):
        found = store.lookup.record(offset, 1 << 62)
        assert (found is not None) == (offset in starts)
        assert store.lookup.store_ms(offset) is not None


def test_a_record_is_found_only_below_the_confirmed_offset(stores: StoreFixture) -> None:
    store = stores.open(sync_flush=True)
    put(store, sized(100))
    assert store.lookup.record(0, store.confirm_offset) is None
    flush(store)
    assert store.lookup.record(0, store.confirm_offset) is not None
    assert store.lookup.record(0, 99) is None


def test_keys_are_found_oldest_first_and_only_the_newest(stores: StoreFixture) -> None:
    store = stores.open(index_entries=400, segment_bytes=1 << 16)
    for n in range(100):
        put(store, record(bytes([n]), text=properties(keys=f"all n{n % 10}")))
    assert by_key(store, "n3") == [bytes([n]) for n in range(3, 100, 10)]
    assert by_key(store, "all", most=5) == [bytes([n]) for n in range(95, 100)]
    assert by_key(store, "all", most=1000) == [bytes([n]) for n in range(100 - QUERY_MAX, 100)]
    assert by_key(store, "none") == []
    assert by_key(store, "all", topic="u") == []


def test_a_key_given_twice_is_found_once(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(b"x", text=properties(keys="k k", unique="k")))
    assert by_key(store, "k") == [b"x"]


def test_keys_are_found_in_a_time_range(stores: StoreFixture) -> None:
    store = stores.open()
    for n in range(5):
        put(store, record(bytes([n]), text=properties(keys="k")), now_ms=NOW_MS + 10_000 * n)
    assert by_key(store, "k", NOW_MS + 10_000, NOW_MS + 30_000) == [b"\x01", b"\x02", b"\x03"]
    assert by_key(store, "k", NOW_MS + 41_000) == []
    assert by_key(store, "k", 0, NOW_MS - 1) == []
    assert by_key(store, "k", NOW_MS + 11_000, NOW_MS + 19_000) == []


def test_keys_are_found_over_several_files(stores: StoreFixture) -> None:
    store = stores.open(index_entries=8)
    for n in range(30):
        put(store, record(bytes([n]), text=properties(keys="k")), now_ms=NOW_MS + 1000 * n)
    assert len(store.index.files) == 5 if store.index else False
    assert by_key(store, "k") == [bytes([n]) for n in range(30)]
    assert by_key(store, "k", NOW_MS + 10_000, NOW_MS + 12_000) == [b"\x0a", b"\x0b", b"\x0c"]


TIMES = [10, 20, 20, 20, 30, 40, 40, 50]


def by_time(store: MessageStore, ms: int, *, upper: bool = False) -> int:
    queue = store.queue("t", 0)
    assert queue is not None
    return store.lookup.offset_at(
        queue, NOW_MS + ms, confirm_offset=store.confirm_offset, upper=upper
    )


@pytest.fixture
def timed(stores: StoreFixture) -> MessageStore:
    store = stores.open()
    for ms in TIMES:
        put(store, sized(700), now_ms=NOW_MS + ms)
    return store


@pytest.mark.parametrize(
    ("ms", "lower", "upper"),
    [
        (0, 0, 0),
        (10, 0, 0),
        (15, 1, 0),
        (20, 1, 3),
        (25, 4, 3),
        (30, 4, 4),
        (40, 5, 6),
        (45, 7, 6),
        (50, 7, 7),
        (51, 8, 7),
        (1 << 40, 8, 7),
        (-(1 << 40), 0, 0),
    ],
)
def test_an_offset_is_found_by_time(timed: MessageStore, ms: int, lower: int, upper: int) -> None:
    assert by_time(timed, ms) == lower
    assert by_time(timed, ms, upper=True) == upper


def test_times_are_searched_among_existing_messages(timed: MessageStore) -> None:
    timed.expire(1)
    begin = timed.min_offset("t", 0)
    assert begin > 1
    assert by_time(timed, 0) == by_time(timed, 0, upper=True) == begin
    assert by_time(timed, 50) == 7


def test_times_are_searched_among_confirmed_messages(stores: StoreFixture) -> None:
    store = stores.open(sync_flush=True)
    put(store, sized(100), now_ms=NOW_MS)
    flush(store)
    put(store, sized(100), now_ms=NOW_MS + 10)
    assert by_time(store, 5) == 1
    assert by_time(store, 10, upper=True) == 0


def test_an_empty_queue_has_no_times(stores: StoreFixture) -> None:
    store = stores.open()
    queue = store.make_queue(b"t", 0)
    assert queue is not None
    assert by_time(store, 0) == by_time(store, 0, upper=True) == 0
    assert store.lookup.earliest_ms(queue) == -1


def test_the_time_of_the_oldest_message(timed: MessageStore) -> None:
    queue = timed.queue("t", 0)
    assert queue is not None
    assert timed.lookup.earliest_ms(queue) == NOW_MS + 10


def test_the_time_of_a_record_with_a_long_birth_address(stores: StoreFixture) -> None:
    store = stores.open()
    made = record()
    made.born_host = bytes(20)
    (offset,) = put(store, made)
    assert store.lookup.store_ms(offset) == NOW_MS
    assert [store.lookup.store_ms(o) for o in (-1, SEGMENT_BYTES - 10, 1 << 50)] == [-1, -1, -1]
