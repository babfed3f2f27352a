"""Timed messages over restarts, crashes and lost files: none is lost, few come twice."""

import shutil
import struct
from pathlib import Path
from random import Random

import pytest

from penstock.store.timer.timer_store import TimerStore
from penstock.store.timer.timer_wheel import TimerWheel
from penstock.testing import FaultyDisk
from tests.unit.broker.broker_kit import House
from tests.unit.broker.delay.timer_kit import (
    DAY_MS,
    HOUR_MS,
    bodies,
    crash,
    flush,
    handle_of,
    let_days_pass,
    let_pass,
    open_house,
    recall,
    send,
)


@pytest.fixture(autouse=True)
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours of slots, so that a wheel's copy is quick."""
    monkeypatch.setattr(TimerWheel, "slots", 7_680)


def restart(home: House, *, clean: bool = True) -> House:
    root, now_ms = home.store.paths.root, home.now_ms
    if clean:
        home.close()
    else:
        crash(home)
    return open_house(root, now_ms)


def prepare(root: Path) -> House:
    """Messages due in this second, in the next, in a minute, in days."""
    home = open_house(root)
    home.send(body=b"x")
    for delay_ms in (100, 400, 400, 400, 800, 1500, 60_000, 60_000, 2 * DAY_MS):
        send(home, delay_ms)
    return home


ALL = [b"x", b"100", b"400", b"400", b"400", b"800", b"1500", b"60000", b"60000"]


@pytest.mark.parametrize("passed_ms", [0, 50, 100, 400, 799, 1000, 1499, 3000, 59_990, 61_000])
def test_a_clean_stop_neither_loses_nor_doubles(tmp_path: Path, passed_ms: int) -> None:
    home = prepare(tmp_path)
    let_pass(home, passed_ms)
    home = restart(home)
    home = restart(home)
    let_pass(home, 70_000 - passed_ms)
    assert bodies(home) == ALL
    home.close()


def test_a_stop_between_two_of_one_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.delay.timers.TICK_MESSAGES_MAX", 2)
    home = prepare(tmp_path)
    let_pass(home, 399)
    home.tick(1)
    assert bodies(home) == ALL[:4]
    home = restart(home)
    send(home, 1, b"late")
    let_pass(home, 70_000)
    assert bodies(home) == [*ALL[:5], b"late", *ALL[5:]]
    home.close()


@pytest.mark.parametrize("passed_ms", [0, 50, 400, 1000, 1499, 3000, 61_000])
def test_after_kill_nothing_is_lost(tmp_path: Path, passed_ms: int) -> None:
    home = prepare(tmp_path)
    let_pass(home, passed_ms)
    before = bodies(home)
    home = restart(home, clean=False)
    assert bodies(home) == before
    let_pass(home, 70_000)
    assert set(bodies(home)) == set(ALL)
    assert bodies(home).count(b"60000") <= 4
    home.close()


def test_what_was_noted_is_not_delivered_again_after_kill(tmp_path: Path) -> None:
    home = prepare(tmp_path)
    let_pass(home, 5000)
    assert home.context.timers.files.noted.queue_offset == 9
    home = restart(home, clean=False)
    let_pass(home, 70_000)
    assert bodies(home) == ALL
    home.close()


def test_progress_is_noted_when_the_copies_are_durable(tmp_path: Path) -> None:
    home = prepare(tmp_path)
    for _ in range(40):
        home.tick(100)  # nothing reaches the disk
    assert len(bodies(home)) == 7
    assert home.context.timers.files.noted.queue_offset == 0
    flush(home)
    for _ in range(30):
        home.tick(100)
    assert home.context.timers.files.noted.queue_offset == 9
    home.close()


@pytest.mark.parametrize(
    "lost",
    [
        ("timerwheel",), ("timerlog",), ("timerwheel", "timerlog"), ("config/timercheck",),
        ("config/timercheck", "timerwheel"),
        ("config/timercheck", "config/timercheck.bak", "timerwheel", "timerlog"),
    ],
)  # fmt: skip
def test_lost_files_are_made_anew(tmp_path: Path, lost: tuple[str, ...]) -> None:
    home = prepare(tmp_path)
    let_pass(home, 3000)
    now_ms = home.now_ms
    home.close()
    for name in lost:
        path = tmp_path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    home = open_house(tmp_path, now_ms)
    let_pass(home, 70_000)
    if "config/timercheck.bak" in lost:
        assert set(bodies(home)) == set(ALL), "all that the queue has, once more"
    else:
        assert bodies(home) == ALL
    let_days_pass(home, 2 * DAY_MS, HOUR_MS)
    let_pass(home, 1000)
    assert bodies(home)[-1] == b"%d" % (2 * DAY_MS)
    assert bodies(home).count(b"%d" % (2 * DAY_MS)) == 1
    home.close()


def test_damaged_files_are_made_anew(tmp_path: Path) -> None:
    rng = Random(5)
    for number in range(12):
        root = tmp_path / str(number)
        home = prepare(root)
        let_pass(home, 3000)
        now_ms = home.now_ms
        home.close()
        name = rng.choice(["timerwheel", "timerlog/" + "0" * 20, "config/timercheck"])
        data = bytearray((root / name).read_bytes())
        used = [at for at in range(0, len(data), 4) if data[at : at + 4] != b"\0\0\0\0"]
        at = rng.choice(used)
        data[at : at + 4] = rng.randbytes(4)
        (root / name).write_bytes(data)
        home = open_house(root, now_ms)
        let_pass(home, 70_000)
        assert set(bodies(home)) >= {b"x", b"60000"}, (name, at)
        home.close()


def test_rolled_messages_are_not_doubled_when_files_are_made_anew(tmp_path: Path) -> None:
    home = open_house(tmp_path, timer_roll_slots=600)
    home.send(body=b"x")
    send(home, HOUR_MS, b"far")
    let_days_pass(home, 40 * 60_000, 30_000)
    assert home.context.timers.figures.rolled >= 2
    now_ms = home.now_ms
    home.close()
    shutil.rmtree(tmp_path / "timerlog")
    home = open_house(tmp_path, now_ms, timer_roll_slots=600)
    let_days_pass(home, HOUR_MS, 30_000)
    assert bodies(home) == [b"x", b"far"]
    home.close()


def test_slots_of_another_length_are_taken_over(tmp_path: Path) -> None:
    home = prepare(tmp_path)
    let_pass(home, 3000)
    now_ms = home.now_ms
    home.close()
    home = open_house(tmp_path, now_ms, timer_precision_ms=100)
    let_pass(home, 10_000)
    send(home, 250, b"250")
    let_pass(home, 60_000)
    assert bodies(home) == [*ALL[:7], b"250", *ALL[7:]]
    home.close()


def test_a_store_of_apaches_is_taken_over(tmp_path: Path) -> None:
    """RocketMQ leaves the last field of units empty, and its checkpoint is of no one moment."""
    home = prepare(tmp_path)
    let_pass(home, 3000)
    now_ms = home.now_ms
    home.close()
    path = tmp_path / "timerlog" / ("0" * 20)
    data = bytearray(path.read_bytes())
    for at in range(0, 9 * 52, 52):
        data[at + 44 : at + 52] = bytes(8)
    path.write_bytes(data)
    check = bytearray((tmp_path / "config/timercheck").read_bytes())
    check[64:] = bytes(len(check) - 64)
    struct.pack_into(">q", check, 8, 5 * 52)  # the flushed place is behind
    (tmp_path / "config/timercheck").write_bytes(check)
    home = open_house(tmp_path, now_ms)
    let_pass(home, 56_999)
    assert bodies(home) == ALL[:7]
    let_pass(home, 1001)
    assert bodies(home) == ALL, "at the end of their slot"
    home.close()


def test_a_wheel_that_has_turned_while_the_broker_was_down(tmp_path: Path) -> None:
    home = open_house(tmp_path)
    home.send(body=b"x")
    send(home, 4000, b"old")
    let_pass(home, 2000)
    now_ms = home.now_ms
    home.close()
    home = open_house(tmp_path, now_ms)
    turn_ms = TimerWheel.slots * 1000
    home.now_ms += turn_ms + 500
    home.context.timers.feed.start_offset = 2  # the queue is behind, as after a crash
    send(home, 1500, b"new")
    let_pass(home, 60_000)
    let_days_pass(home, 2 * turn_ms, 60_000)
    assert bodies(home) == [b"x", b"old", b"new"]
    home.close()


def test_recalls_survive_kill_and_lost_files(tmp_path: Path) -> None:
    home = prepare(tmp_path)
    first = send(home, 20_000, b"no")
    let_pass(home, 3000)
    second = send(home, 30_000, b"nor this")
    for answer in (first, second):
        assert recall(home, handle_of(answer)).code == 0
    home.store.settle()
    now_ms = home.now_ms + DAY_MS
    crash(home)
    home = open_house(tmp_path, now_ms)
    let_pass(home, 3000)
    assert set(bodies(home)) == set(ALL)
    home.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_power_cut_loses_nothing_that_was_flushed(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    root = tmp_path / "0"
    home = open_house(root, disk=FaultyDisk(root))
    home.send(body=b"x")
    durable: set[bytes] = set()
    for life in range(1, 4):
        sent: set[bytes] = set()
        for number in range(12):
            body = b"%d.%d" % (life, number)
            send(home, rng.randrange(1, 9000), body)
            sent.add(body)
            let = home.now_ms + rng.randrange(400)
            while home.now_ms < let:
                home.tick(min(max(home.broker.due() - home.now_ms, 1), let - home.now_ms))
            if rng.random() < 0.3:
                flush(home)
                durable |= sent
        disk = home.store.disk
        assert isinstance(disk, FaultyDisk)
        home.store.settle()
        target = disk.crash(tmp_path / str(life), rng)
        now_ms = home.now_ms
        home.store._lock.release()
        home.store.flusher.discard()
        home = open_house(target, now_ms + rng.choice((0, 0, 20_000)), disk=FaultyDisk(target))
    let_pass(home, 12_000)
    assert durable <= set(bodies(home))
    home.close()


def test_a_full_disk_makes_the_timer_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = prepare(tmp_path)

    def fail(self: TimerStore, path: Path, page: bytes) -> None:
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(TimerStore, "_write_check", fail)
        let_pass(home, 3000)
        assert bodies(home) == ALL[:7], "delivery goes on"
    let_pass(home, 3000)
    assert home.context.timers.files.noted.queue_offset == 9
    home = restart(home, clean=False)
    let_pass(home, 70_000)
    assert bodies(home) == ALL
    home.close()
