"""The timer log and wheel: RocketMQ's format, tails, ends, chains."""

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StoreDamaged
from penstock.store.timer.timer_checkpoint import TimerProgress
from penstock.store.timer.timer_log import NOWHERE, UNIT_BYTES, TimerLog, Unit, read_unit
from penstock.store.timer.timer_slots import Chain
from penstock.store.timer.timer_store import TimerStore
from penstock.store.timer.timer_wheel import PAGE_SLOTS, Slot, TimerWheel
from tests.unit.broker.delay.timer_kit import QuickDisk

NOW_MS = 1_700_000_000_000
SEGMENT = 10 * UNIT_BYTES + 30


def unit(number: int, previous: int = NOWHERE, slot_ms: int = NOW_MS, **fields: int) -> Unit:
    plain = Unit(previous, 1, NOW_MS - 5000, slot_ms - NOW_MS + 5000, 1000 + number, 200, 7, 0)
    return plain._replace(**fields)


def write(log: TimerLog) -> None:
    log.write(log.unwritten_chunks())
    log.wrote(log.end)


@pytest.fixture
def log(tmp_path: Path) -> TimerLog:
    return TimerLog(QuickDisk(), tmp_path / "timerlog", SEGMENT)


def test_a_unit_has_the_format_of_rocketmq(log: TimerLog) -> None:
    log.append(Unit(-1, 3, 1000, -7, 99, 123, -5, 1001))
    (chunk,) = log.unwritten_chunks()
    plain = struct.pack(">iqiqiqiiq", 52, -1, 3, 1000, -7, 99, 123, -5, 1001)
    assert chunk.data[:44] + bytes(2) + chunk.data[46:] == plain, "reserved bytes hold a checksum"
    assert read_unit(plain, 0) == read_unit(chunk.data, 0)
    assert read_unit(chunk.data, 0) == Unit(-1, 3, 1000, -7, 99, 123, -5, 1001)
    assert Unit(-1, 3, 1000, -7, 99, 123, -5, 1001).slot_ms == 993


def test_a_unit_with_a_flipped_bit_is_not_valid() -> None:
    data = unit(7, due_ms=NOW_MS + 1).pack()
    for bit in range(8 * UNIT_BYTES):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert read_unit(bytes(damaged), 0) is None, bit


def test_a_full_segment_ends_with_a_filler(log: TimerLog) -> None:
    places = [log.append(unit(number)) for number in range(25)]
    assert places[:11] == [*range(0, 520, 52), SEGMENT]
    write(log)
    data = (log.folder / ("0" * 20)).read_bytes()
    assert len(data) == SEGMENT
    assert data[520:] == struct.pack(">iqI", 30, 0, 0xCBD43194) + bytes(14)
    assert [place for place, _ in log.scan(0)] == places
    log.close()


@pytest.mark.parametrize("written", [0, 3, 10, 17, 25])
def test_units_are_read_from_the_tail_and_from_files(log: TimerLog, written: int) -> None:
    places = []
    for number in range(25):
        if number == written:
            write(log)
        places.append(log.append(unit(number)))
    assert [log.unit(place).offset for place in places] == [1000 + n for n in range(25)]
    with pytest.raises(StoreDamaged):
        log.unit(log.end)
    log.close()


def test_units_behind_a_cut_are_removed(log: TimerLog) -> None:
    for number in range(25):
        log.append(unit(number))
    write(log)
    log.close()
    again = TimerLog(QuickDisk(), log.folder, 4096)
    again.load()
    assert again.segment_bytes == SEGMENT, "the size it was made with"
    again.cut(3 * UNIT_BYTES)
    assert len(list(again.scan(0))) == 3
    assert again.append(unit(77)) == 3 * UNIT_BYTES
    write(again)
    assert len(list(again.scan(0))) == 4
    assert len(list(log.folder.iterdir())) == 1
    again.close()


def test_segments_are_deleted_with_their_messages(log: TimerLog) -> None:
    for number in range(25):
        log.append(unit(number))
    write(log)
    log.drop_before(1009)
    assert log.begin == 0
    log.drop_before(1010)
    assert log.begin == SEGMENT
    log.drop_before(1_000_000)
    assert log.begin == 2 * SEGMENT, "the last one stays"
    log.close()


def test_a_damaged_old_unit_does_not_stop_deletion(log: TimerLog) -> None:
    for number in range(25):
        log.append(unit(number))
    write(log)
    path = log.folder / ("0" * 20)
    data = bytearray(path.read_bytes())
    data[9 * UNIT_BYTES : 10 * UNIT_BYTES] = bytes(UNIT_BYTES)
    path.write_bytes(data)
    log.drop_before(1010)
    assert log.begin == 0, "nobody knows what the last unit was"
    log.drop_before(1011)
    assert log.begin == SEGMENT
    log.close()


@pytest.mark.parametrize("damage", ["gap", "short"])
def test_incomplete_files_are_damaged(log: TimerLog, damage: str) -> None:
    for number in range(25):
        log.append(unit(number))
    write(log)
    log.close()
    middle = log.folder / f"{SEGMENT:020d}"
    if damage == "gap":
        middle.unlink()
    else:
        middle.write_bytes(b"x")
    with pytest.raises(StoreDamaged):
        TimerLog(QuickDisk(), log.folder, SEGMENT).load()


@given(data=st.binary(max_size=80))
def test_bytes_that_are_not_a_unit_are_none(data: bytes) -> None:
    found = read_unit(data, 0)
    assert found is None or found.size > 0


# --- the wheel


@pytest.fixture
def wheel(tmp_path: Path) -> TimerWheel:
    return TimerWheel(QuickDisk(), tmp_path / "timerwheel", 1000)


def test_a_slot_has_the_format_of_rocketmq(wheel: TimerWheel) -> None:
    wheel.add(NOW_MS, 520, 1)
    wheel.add(NOW_MS, 572, 1)
    wheel.write(wheel.take_dirty())
    assert wheel.path.stat().st_size == 2 * 7 * 86_400 * 32
    with wheel.path.open("rb") as file:
        file.seek(NOW_MS // 1000 % 1_209_600 * 32)
        assert file.read(32) == struct.pack(">qqqii", NOW_MS // 1000, 520, 572, 2, 0)


def test_slots_of_another_time_are_empty(wheel: TimerWheel) -> None:
    wheel.add(NOW_MS, 520, 1)
    turn_ms = wheel.slots * 1000
    assert wheel.get(NOW_MS + turn_ms) is None
    assert wheel.next_used(NOW_MS + 1000, NOW_MS + turn_ms) is None
    assert wheel.next_used(NOW_MS - 500_000, NOW_MS + 1) == NOW_MS
    assert wheel.next_used(NOW_MS - 500_000, NOW_MS) is None


def test_the_slots_of_a_whole_revolution_are_found_in_order(wheel: TimerWheel) -> None:
    start_ms = NOW_MS - NOW_MS % (PAGE_SLOTS * 1000) + 50_000  # within a page
    last = wheel.slots - 1
    times = [start_ms + number * 1000 for number in (0, 1, 77, 78, 1000, last - 50, last)]
    for at_ms in times:
        wheel.add(at_ms, 520, 1)
    wheel.add(start_ms - 5000 - wheel.slots * 1000, 520, 1)  # passed long ago
    assert [at_ms for at_ms, _ in wheel.used(start_ms)] == times


def test_future_slots_are_loaded_from_the_file(wheel: TimerWheel) -> None:
    times = [NOW_MS + number * 1000 for number in (-400_000, -1, 0, 5, 300, 604_000)]
    for number, at_ms in enumerate(times):
        wheel.add(at_ms, 52 * number, 1)
    wheel.write(wheel.take_dirty())
    again = TimerWheel(QuickDisk(), wheel.path, 1000)
    assert again.load(NOW_MS, NOW_MS)
    assert [at_ms for at_ms, _ in again.used(NOW_MS)] == times[2:]
    assert again.total() == 4
    assert again.take_dirty() == []
    for precision_ms in (100, 500):
        assert not TimerWheel(QuickDisk(), wheel.path, precision_ms).load(NOW_MS, NOW_MS)


def test_past_pages_use_no_memory(wheel: TimerWheel) -> None:
    for number in range(20):
        wheel.add(NOW_MS + number * PAGE_SLOTS * 1000, number, 1)
    wheel.forget_before(NOW_MS + 10 * PAGE_SLOTS * 1000)
    assert len(list(wheel.used(NOW_MS))) == 20, "not before they are written"
    wheel.write(wheel.take_dirty())
    wheel.forget_before(NOW_MS + 10 * PAGE_SLOTS * 1000)
    assert len(list(wheel.used(NOW_MS))) in (9, 10)


@settings(max_examples=50)
@given(
    slots=st.dictionaries(st.integers(0, 2000), st.integers(1, 9), max_size=30),
    low=st.integers(0, 2000), high=st.integers(0, 2100),
)  # fmt: skip
def test_counts_add_up(slots: dict[int, int], low: int, high: int) -> None:
    wheel = TimerWheel(QuickDisk(), Path("/nowhere/timerwheel"), 1000)
    for number, units in slots.items():
        wheel.set(NOW_MS + number * 1000, Slot(0, 0, units))
    expected = sum(units for number, units in slots.items() if low <= number < high)
    assert wheel.count(NOW_MS + low * 1000, NOW_MS + high * 1000) == expected
    assert wheel.total() == sum(slots.values())


# --- chains


@settings(max_examples=60, deadline=None)
@given(
    due=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    late=st.lists(st.integers(1, 1000), max_size=20),
    step=st.integers(1, 9), written=st.integers(0, 60), done=st.integers(0, 70),
)  # fmt: skip
def test_a_chain_is_in_the_order_of_delivery(
    tmp_path_factory: pytest.TempPathFactory, due: list[int], late: list[int], step: int,
    written: int, done: int,
) -> None:  # fmt: skip
    log = TimerLog(QuickDisk(), tmp_path_factory.mktemp("log"), SEGMENT)
    last, units = NOWHERE, []
    for number, ms in enumerate(due):
        if number == written:
            write(log)
        units.append(unit(number, last, due_ms=NOW_MS + ms))
        last = log.append(units[-1])
    expected = sorted(units, key=lambda each: each.due_ms)
    chain = Chain(log, NOW_MS, 1000, last)
    if 0 < done <= len(expected):
        at_ms = expected[done - 1].due_ms
        chain.skip(at_ms, sum(each.due_ms == at_ms for each in expected[:done]))
        expected = expected[done:]
        late = [max(ms, at_ms - NOW_MS) for ms in late]
    more = [unit(1000 + number, due_ms=NOW_MS + ms) for number, ms in enumerate(late)]
    while not chain.walked:
        chain.read(step, wait=True)
        if more:
            chain.add(more[0])
            expected.append(more.pop(0))
    chain.arrange()
    for each in more:
        chain.add(each)
        expected.append(each)
    got = []
    while (waiting := chain.head()) is not None:
        got.append((waiting.due_ms, waiting.offset))
        chain.pop(waiting.due_ms)
    expected.sort(key=lambda each: each.due_ms)
    assert got == [(each.due_ms, each.offset) for each in expected]
    assert chain.count == 0
    log.close()


def test_a_chain_that_leaves_its_slot_is_damaged(log: TimerLog) -> None:
    first = log.append(unit(1))
    second = log.append(unit(2, first, slot_ms=NOW_MS + 1000))
    third = log.append(unit(3, second))
    chain = Chain(log, NOW_MS, 1000, third)
    with pytest.raises(StoreDamaged):
        chain.read(9, wait=True)


def test_messages_are_read_ahead_by_number_and_bytes(log: TimerLog) -> None:
    chain = Chain(log, NOW_MS, 1000, NOWHERE)
    for number in range(10):
        chain.add(unit(number, due_ms=NOW_MS + 1 + number // 4, size=1000))
    found, cursor = chain.ahead((0, 0), NOW_MS + 1000, 99, 2500)
    assert [waiting.offset for waiting in found] == [1000, 1001, 1002]
    found, cursor = chain.ahead(cursor, NOW_MS + 1000, 3, 99_999)
    assert [waiting.offset for waiting in found] == [1003, 1004, 1005]
    found, cursor = chain.ahead(cursor, NOW_MS + 2, 99, 99_999)
    assert [waiting.offset for waiting in found] == [1006, 1007]
    assert chain.ahead(cursor, NOW_MS + 1000, 99, 0) == ([], cursor)


# --- together


def make_store(root: Path) -> TimerStore:
    (root / "config").mkdir(exist_ok=True)
    return TimerStore(QuickDisk(), root, precision_ms=1000, segment_bytes=SEGMENT, now_ms=NOW_MS)


def add(files: TimerStore, slot_ms: int, number: int) -> None:
    files.add(
        slot_ms, NOW_MS, offset=number * 100, size=100, topic_hash=1, due_ms=slot_ms + 1,
        roll=False, delete=False,
    )  # fmt: skip


def save_checkpoint(files: TimerStore, queue_offset: int) -> None:
    progress = TimerProgress(files.progress.read_ms, files.log.end, queue_offset)
    files.flush_job(progress, 0)()
    files.flush_done()


def test_units_of_messages_lost_in_a_power_cut_are_removed(tmp_path: Path) -> None:
    files = make_store(tmp_path)
    for number in range(4):
        add(files, NOW_MS + 5000, number)
    save_checkpoint(files, 4)
    for number in range(4, 9):
        add(files, NOW_MS + 5000 + number % 2 * 1000, number)
    files.flush_job(None, 0)()  # written, and no checkpoint for it
    files.close()
    again = make_store(tmp_path)
    assert again.open(600, lambda offset: offset // 100, NOW_MS), "six messages are left"
    assert again.progress.queue_offset == 6
    assert again.log.end == 6 * UNIT_BYTES
    assert [slot for _, slot in again.wheel.used(NOW_MS)] == [
        Slot(0, 4 * UNIT_BYTES, 5), Slot(5 * UNIT_BYTES, 5 * UNIT_BYTES, 1)
    ]  # fmt: skip
    again.close()


@pytest.mark.parametrize(
    ("written", "queue_offset", "count"), [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 2, 0)]
)
def test_a_message_of_several_units_is_read_again_if_one_is_missing(
    tmp_path: Path, written: int, queue_offset: int, count: int
) -> None:
    files = make_store(tmp_path)
    add(files, NOW_MS + 5000, 0)
    save_checkpoint(files, 1)
    for slot_ms in (NOW_MS + 7000, NOW_MS + 6000, NOW_MS + 5000):
        files.add(
            slot_ms, NOW_MS, offset=100, size=100, topic_hash=1, due_ms=NOW_MS + 5001,
            roll=False, delete=True, copy=slot_ms != NOW_MS + 5000,
        )  # fmt: skip
    assert files.wheel.total() == 0
    files.flush_job(None, 0)()
    files.close()
    path = tmp_path / "timerlog" / ("0" * 20)
    data = path.read_bytes()
    path.write_bytes(data[: written * UNIT_BYTES].ljust(len(data), b"\0"))
    (tmp_path / "timerwheel").unlink()
    again = make_store(tmp_path)
    assert again.open(1000, lambda offset: offset // 100, NOW_MS)
    assert again.progress.queue_offset == queue_offset
    assert again.wheel.total() == count
    again.close()


def test_distant_messages_are_rolled_and_the_wheel_is_never_overrun(tmp_path: Path) -> None:
    files = make_store(tmp_path)
    window_ms = 3_600_000
    assert files.choose_slot(NOW_MS + window_ms - 1000, NOW_MS, window_ms) == (
        NOW_MS + window_ms - 1000, False
    )  # fmt: skip
    for far_ms, at_ms in ((window_ms, window_ms // 2), (9 * window_ms, window_ms)):
        places = [files.choose_slot(NOW_MS + far_ms, NOW_MS, window_ms) for _ in range(1000)]
        assert all(roll for _, roll in places)
        slots = {slot_ms - NOW_MS for slot_ms, _ in places}
        assert max(slots) <= at_ms, "never later"
        assert min(slots) > at_ms - window_ms // 8
        assert len(slots) == window_ms // 8000, "what was sent in one go does not roll in one go"
    assert files.choose_slot(NOW_MS - 9000, NOW_MS, window_ms) == (NOW_MS, False), "not in the past"
    turn_ms = files.wheel.slots * 1000
    slot_ms, roll = files.choose_slot(NOW_MS + turn_ms, NOW_MS + turn_ms, window_ms)
    assert roll
    assert slot_ms < NOW_MS + turn_ms


def test_a_slot_is_kept_until_its_delivery_is_durable(tmp_path: Path) -> None:
    files = make_store(tmp_path)
    slot_ms = NOW_MS - NOW_MS % (1000 * PAGE_SLOTS) + 1000 * PAGE_SLOTS  # the start of a page
    add(files, slot_ms, 0)
    save_checkpoint(files, 1)
    files.pass_slots(slot_ms + 5000)  # delivered, and not durable yet
    files.flush_job(None, 0)()
    files.flush_done()
    add(files, slot_ms + 9000, 1)  # in the same page
    files.flush_job(None, 0)()
    files.flush_done()
    files.close()
    again = make_store(tmp_path)
    assert again.open(10_000, lambda offset: offset // 100, slot_ms + 5000)
    assert [at_ms for at_ms, _ in again.wheel.used(NOW_MS)] == [slot_ms, slot_ms + 9000]
    again.close()


def test_a_unit_that_is_its_own_predecessor_is_damage(tmp_path: Path) -> None:
    files = make_store(tmp_path)
    add(files, NOW_MS + 5000, 0)
    save_checkpoint(files, 1)
    add(files, NOW_MS + 5000, 1)
    files.flush_job(None, 0)()
    files.close()
    path = tmp_path / "timerlog" / ("0" * 20)
    data = bytearray(path.read_bytes())
    struct.pack_into(">q", data, UNIT_BYTES + 4, UNIT_BYTES)
    path.write_bytes(data)
    again = make_store(tmp_path)
    assert not again.open(100, lambda offset: offset // 100, NOW_MS), "made anew"
    assert again.rebuilding
    assert again.was_delivered(0, NOW_MS)
    assert not again.was_delivered(1, NOW_MS)
    again.close()
