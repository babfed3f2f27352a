"""The timer after restarts, crashes and lost files: no message is lost, few are duplicated."""

import logging
import shutil
import struct
from pathlib import Path
from random import Random

import pytest

from penstock.store.timer.timer_checkpoint import TimerCheckpointFile
from penstock.store.timer.timer_wheel import SLOT_BYTES, TimerWheel
from penstock.store.tools.inspection import StoreFiles
from penstock.store.tools.verify import Verification
from penstock.testing import FaultyDisk
from tests.unit.broker.broker_kit import BrokerFixture
from tests.unit.broker.delay.timer_kit import (
    DAY_MS,
    HOUR_MS,
    advance,
    advance_in_steps,
    bodies,
    crash,
    flush,
    handle_of,
    open_broker,
    recall,
    send,
)


@pytest.fixture(autouse=True)
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours of slots, so that copying the wheel is fast."""
    monkeypatch.setattr(TimerWheel, "slots", 7_680)


def restart(env: BrokerFixture, *, clean: bool = True) -> BrokerFixture:
    root, now_ms = env.store.paths.root, env.now_ms
    if clean:
        env.close()
    else:
        crash(env)
    return open_broker(root, now_ms)


def prepare(root: Path) -> BrokerFixture:
    """Messages due in this second, in the next, in a minute, in days."""
    env = open_broker(root)
    env.send(body=b"x")
    for delay_ms in (100, 400, 400, 400, 800, 1500, 60_000, 60_000, 2 * DAY_MS):
        send(env, delay_ms)
    return env


ALL = [b"x", b"100", b"400", b"400", b"400", b"800", b"1500", b"60000", b"60000"]


@pytest.mark.parametrize("passed_ms", [0, 50, 100, 400, 799, 1000, 1499, 3000, 59_990, 61_000])
def test_a_clean_stop_neither_loses_nor_duplicates(tmp_path: Path, passed_ms: int) -> None:
    env = prepare(tmp_path)
    advance(env, passed_ms)
    env = restart(env)
    env = restart(env)
    advance(env, 70_000 - passed_ms)
    assert bodies(env) == ALL
    env.close()


def test_a_clean_stop_long_after_the_first_start_rebuilds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = prepare(tmp_path)
    advance(env, 30_000)
    send(env, 1, b"last")
    advance(env, 1)
    caplog.clear()
    env = restart(env)
    assert "rebuilding" not in caplog.text
    advance(env, 40_000)
    assert bodies(env) == [*ALL[:7], b"last", *ALL[7:]]
    env.close()


def test_a_stop_between_two_messages_of_one_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.delay.timers.TICK_MESSAGES_MAX", 2)
    env = prepare(tmp_path)
    advance(env, 399)
    env.tick(1)
    assert bodies(env) == ALL[:4]
    env = restart(env)
    send(env, 1, b"late")
    advance(env, 70_000)
    assert bodies(env) == [*ALL[:5], b"late", *ALL[5:]]
    env.close()


@pytest.mark.parametrize("passed_ms", [0, 50, 400, 1000, 1499, 3000, 61_000])
def test_a_kill_loses_nothing(tmp_path: Path, passed_ms: int) -> None:
    env = prepare(tmp_path)
    advance(env, passed_ms)
    before = bodies(env)
    env = restart(env, clean=False)
    assert bodies(env) == before
    advance(env, 70_000)
    assert set(bodies(env)) == set(ALL)
    assert bodies(env).count(b"60000") <= 4
    env.close()


def test_saved_progress_is_not_delivered_again_after_a_kill(tmp_path: Path) -> None:
    env = prepare(tmp_path)
    advance(env, 5000)
    assert env.broker.timers.files.checkpointed.queue_offset == 9
    env = restart(env, clean=False)
    advance(env, 70_000)
    assert bodies(env) == ALL
    env.close()


def test_a_broker_that_is_killed_soon_after_each_start_repeats_nothing(tmp_path: Path) -> None:
    env = prepare(tmp_path)
    env = restart(env, clean=False)
    env.now_ms += 61_000  # all but the last are due
    for _ in range(5):
        advance(env, 200)
        env = restart(env, clean=False)
    advance(env, 1_000)
    assert bodies(env) == ALL
    env.close()


def test_progress_is_saved_after_a_flush(tmp_path: Path) -> None:
    env = prepare(tmp_path)
    for _ in range(40):
        env.tick(100)  # nothing reaches the disk
    assert len(bodies(env)) == 7
    assert env.broker.timers.files.checkpointed.queue_offset == 0
    flush(env)
    for _ in range(30):
        env.tick(100)
    assert env.broker.timers.files.checkpointed.queue_offset == 9
    env.close()


@pytest.mark.parametrize(
    "lost",
    [
        ("timerwheel",),
        ("timerlog",),
        ("timerwheel", "timerlog"),
        ("config/timercheck",),
        ("config/timercheck", "timerwheel"),
        ("config/timercheck", "config/timercheck.bak", "timerwheel", "timerlog"),
    ],
)
def test_lost_files_are_rebuilt(
    tmp_path: Path, lost: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    env = prepare(tmp_path)
    advance(env, 3000)
    now_ms = env.now_ms
    env.close()
    for name in lost:
        path = tmp_path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    env = open_broker(tmp_path, now_ms)
    copied = "config/timercheck" in lost and "config/timercheck.bak" not in lost
    assert ("using its .bak" in caplog.text) == copied
    advance(env, 70_000)
    if "config/timercheck.bak" in lost:
        assert set(bodies(env)) == set(ALL), "all that the queue has, once more"
    else:
        assert bodies(env) == ALL
    advance_in_steps(env, 2 * DAY_MS, HOUR_MS)
    advance(env, 1000)
    assert bodies(env)[-1] == b"%d" % (2 * DAY_MS)
    assert bodies(env).count(b"%d" % (2 * DAY_MS)) == 1
    env.close()


@pytest.mark.slow
def test_damaged_files_are_rebuilt(tmp_path: Path) -> None:
    rng = Random(5)
    for number in range(12):
        root = tmp_path / str(number)
        env = prepare(root)
        advance(env, 3000)
        now_ms = env.now_ms
        env.close()
        name = rng.choice(["timerwheel", "timerlog/" + "0" * 20, "config/timercheck"])
        data = bytearray((root / name).read_bytes())
        used = [at for at in range(0, len(data), 4) if data[at : at + 4] != b"\0\0\0\0"]
        at = rng.choice(used)
        data[at : at + 4] = rng.randbytes(4)
        (root / name).write_bytes(data)
        env = open_broker(root, now_ms)
        advance(env, 70_000)
        assert bodies(env) == ALL, (name, at)
        env.close()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("name", ["timerwheel", "timerlog/" + "0" * 20])
def test_zeroed_files_are_rebuilt_with_one_warning(
    tmp_path: Path, name: str, clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    env = prepare(tmp_path)
    advance(env, 5000)
    now_ms = env.now_ms
    if clean:
        env.close()
    else:
        crash(env)
    path = tmp_path / name
    path.write_bytes(bytes(path.stat().st_size))
    caplog.clear()
    env = open_broker(tmp_path, now_ms)
    warned = [record for record in caplog.records if "rebuilding" in record.getMessage()]
    assert [record.levelno for record in warned] == [logging.WARNING]
    advance(env, 70_000)
    repeated = [] if clean or name == "timerwheel" else [b"1500"]  # of the last millisecond
    assert sorted(bodies(env)) == sorted(ALL + repeated)
    env.close()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("timerwheel", "timer.wheel"),
        ("timerlog/" + "0" * 20, "timer.log"),
        ("config/timercheck", "timer.checkpoint"),
        (None, None),
    ],
)
def test_verify_reports_damage_of_the_timer_files(
    tmp_path: Path, name: str | None, kind: str | None, clean: bool
) -> None:
    env = prepare(tmp_path)
    for number in range(100):  # more than one segment
        send(env, 60_000 + number)
    advance(env, 5000)
    if clean:
        env.close()
    else:
        crash(env)
    if kind == "timer.checkpoint":
        (tmp_path / "config/timercheck").unlink()
        (tmp_path / "config/timercheck.bak").unlink(missing_ok=True)
    elif name is not None:
        path = tmp_path / name
        path.write_bytes(bytes(path.stat().st_size))
    problems = Verification(StoreFiles(tmp_path)).run()
    assert [p.kind for p in problems if p.kind.startswith("timer.")] == ([kind] if kind else [])


@pytest.mark.parametrize("clean", [True, False])
def test_a_wheel_without_one_slot_is_rebuilt(tmp_path: Path, clean: bool) -> None:
    env = prepare(tmp_path)
    advance(env, 5000)
    files = env.broker.timers.files
    now_ms, (slot_ms, _) = env.now_ms, next(files.wheel.used(files.progress.read_ms))
    if clean:
        env.close()
    else:
        crash(env)
    path = tmp_path / "timerwheel"
    data = bytearray(path.read_bytes())
    at = slot_ms // 1000 % TimerWheel.slots * SLOT_BYTES
    assert any(data[at : at + SLOT_BYTES])
    data[at : at + SLOT_BYTES] = bytes(SLOT_BYTES)
    path.write_bytes(data)
    env = open_broker(tmp_path, now_ms)
    advance(env, 70_000)
    assert bodies(env) == ALL
    env.close()


@pytest.mark.parametrize("clean", [True, False])
def test_after_the_clock_was_ahead_timers_are_in_time(tmp_path: Path, clean: bool) -> None:
    env = open_broker(tmp_path)
    env.send(body=b"x")
    send(env, 4 * HOUR_MS, b"far")
    env.now_ms += 3 * HOUR_MS
    send(env, 2000, b"early")
    advance(env, 5000)
    assert bodies(env) == [b"x", b"early"]
    now_ms = env.now_ms - 3 * HOUR_MS
    if clean:
        env.close()
    else:
        crash(env)
    env = open_broker(tmp_path, now_ms)
    send(env, 2000, b"after")
    advance(env, 1999)
    assert bodies(env) == [b"x", b"early"]
    advance(env, 1)
    assert bodies(env) == [b"x", b"early", b"after"]
    advance_in_steps(env, 4 * HOUR_MS, 30_000)
    advance(env, 1000)
    assert bodies(env) == [b"x", b"early", b"after", b"far"]
    env.close()


def test_a_clock_set_back_while_messages_are_delivered_delays_nothing(tmp_path: Path) -> None:
    env = open_broker(tmp_path)
    env.send(body=b"x")
    env.now_ms += 3 * HOUR_MS
    send(env, 2000, b"early")
    advance(env, 2000)
    env.now_ms -= 3 * HOUR_MS  # in the slot that is being delivered
    send(env, 2000, b"after")
    advance(env, 2000)
    assert bodies(env) == [b"x", b"early", b"after"]
    advance_in_steps(env, 4 * HOUR_MS, 30_000)
    assert bodies(env) == [b"x", b"early", b"after"]
    env.close()


def test_progress_is_saved_as_soon_as_it_is_flushed(tmp_path: Path) -> None:
    """So that a crash repeats no more than a period and the time of a flush."""
    env = open_broker(tmp_path)
    env.send(body=b"x")
    for number in range(100):
        send(env, 100 * number + 1, b"m")
    advance(env, 2000)
    flush_ms = env.store.config.timer_flush_ms
    for _ in range(80):
        advance(env, 50)
        saved = env.broker.timers.files.checkpointed
        assert env.now_ms - max(saved.due_ms, saved.read_ms) <= flush_ms + 300
    env.close()


def test_a_rebuild_does_not_duplicate_rolled_messages(tmp_path: Path) -> None:
    env = open_broker(tmp_path, timer_roll_slots=600)
    env.send(body=b"x")
    send(env, HOUR_MS, b"far")
    advance_in_steps(env, 40 * 60_000, 30_000)
    assert env.broker.timers.metrics.rolled >= 2
    now_ms = env.now_ms
    env.close()
    shutil.rmtree(tmp_path / "timerlog")
    env = open_broker(tmp_path, now_ms, timer_roll_slots=600)
    advance_in_steps(env, HOUR_MS, 30_000)
    assert bodies(env) == [b"x", b"far"]
    env.close()


def test_files_of_another_precision_are_converted(tmp_path: Path) -> None:
    env = prepare(tmp_path)
    advance(env, 3000)
    now_ms = env.now_ms
    env.close()
    env = open_broker(tmp_path, now_ms, timer_precision_ms=100)
    advance(env, 10_000)
    send(env, 250, b"250")
    advance(env, 60_000)
    assert bodies(env) == [*ALL[:7], b"250", *ALL[7:]]
    env.close()


def test_a_store_of_apache_is_opened(tmp_path: Path) -> None:
    """RocketMQ leaves the last field of units empty, and its checkpoint is not consistent."""
    env = prepare(tmp_path)
    advance(env, 3000)
    now_ms = env.now_ms
    env.close()
    path = tmp_path / "timerlog" / ("0" * 20)
    data = bytearray(path.read_bytes())
    for at in range(0, 9 * 52, 52):
        data[at + 44 : at + 52] = bytes(8)
    path.write_bytes(data)
    check = bytearray((tmp_path / "config/timercheck").read_bytes())
    check[64:] = bytes(len(check) - 64)
    struct.pack_into(">q", check, 8, 5 * 52)  # the flushed place is behind
    (tmp_path / "config/timercheck").write_bytes(check)
    env = open_broker(tmp_path, now_ms)
    advance(env, 56_999)
    assert bodies(env) == ALL[:7]
    advance(env, 1001)
    assert bodies(env) == ALL, "at the end of their slot"
    env.close()


def test_a_downtime_longer_than_the_wheel(tmp_path: Path) -> None:
    env = open_broker(tmp_path)
    env.send(body=b"x")
    send(env, 4000, b"old")
    advance(env, 2000)
    now_ms = env.now_ms
    env.close()
    env = open_broker(tmp_path, now_ms)
    turn_ms = TimerWheel.slots * 1000
    env.now_ms += turn_ms + 500
    env.broker.timers.enqueue.start_offset = 2  # the queue is behind, as after a crash
    send(env, 1500, b"new")
    advance(env, 60_000)
    advance_in_steps(env, 2 * turn_ms, 60_000)
    assert bodies(env) == [b"x", b"old", b"new"]
    env.close()


def test_recalls_survive_kill_and_lost_files(tmp_path: Path) -> None:
    env = prepare(tmp_path)
    first = send(env, 20_000, b"no")
    advance(env, 3000)
    second = send(env, 30_000, b"nor this")
    for answer in (first, second):
        assert recall(env, handle_of(answer)).code == 0
    env.store.publish()
    now_ms = env.now_ms + DAY_MS
    crash(env)
    env = open_broker(tmp_path, now_ms)
    advance(env, 3000)
    assert set(bodies(env)) == set(ALL)
    env.close()


DELAYS_MS = range(5050, 7050, 50)


@pytest.mark.parametrize(
    ("before_ms", "after_ms"), [(1000, 100), (1000, 300), (200, 500), (100, 1000), (700, 1000)]
)
@pytest.mark.parametrize("stop_ms", [0, 20, 5130, 5640])
def test_a_recall_after_slots_got_another_length(
    tmp_path: Path, before_ms: int, after_ms: int, stop_ms: int
) -> None:
    """A handle contains the slot of the send, which may be longer than those of the recall."""
    env = open_broker(tmp_path, timer_precision_ms=before_ms)
    env.send(body=b"x")
    handles = [handle_of(send(env, delay_ms, b"no")) for delay_ms in DELAYS_MS]
    send(env, 5500, b"yes")
    advance(env, 1000)
    now_ms = env.now_ms
    env.close()
    env = open_broker(tmp_path, now_ms, timer_precision_ms=after_ms)
    advance(env, 100)
    for handle in handles:
        assert recall(env, handle).code == 0
    flush(env)
    if stop_ms:
        advance(env, stop_ms - 20)
        env.store.publish()
        crash(env)
        env = open_broker(tmp_path, now_ms + stop_ms, timer_precision_ms=after_ms)
    advance(env, 10_000)
    assert set(bodies(env)) == {b"x", b"yes"}
    assert env.broker.timers.metrics.counts.get("T", 0) == 0
    env.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_power_cut_loses_nothing_that_was_flushed(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    root = tmp_path / "0"
    env = open_broker(root, disk=FaultyDisk(root))
    env.send(body=b"x")
    durable: set[bytes] = set()
    for life in range(1, 4):
        sent: set[bytes] = set()
        for number in range(12):
            body = b"%d.%d" % (life, number)
            send(env, rng.randrange(1, 9000), body)
            sent.add(body)
            let = env.now_ms + rng.randrange(400)
            while env.now_ms < let:
                env.tick(min(max(env.broker.due() - env.now_ms, 1), let - env.now_ms))
            if rng.random() < 0.3:
                flush(env)
                durable |= sent
        disk = env.store.disk
        assert isinstance(disk, FaultyDisk)
        env.store.publish()
        target = disk.crash(tmp_path / str(life), rng)
        now_ms = env.now_ms
        env.store._lock.release()
        env.store.flusher.discard()
        env = open_broker(target, now_ms + rng.choice((0, 0, 20_000)), disk=FaultyDisk(target))
    advance(env, 12_000)
    assert durable <= set(bodies(env))
    env.close()


def test_the_timer_waits_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = prepare(tmp_path)

    def fail(self: TimerCheckpointFile, page: bytes, *, backup: bool) -> None:
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(TimerCheckpointFile, "write", fail)
        advance(env, 3000)
        assert bodies(env) == ALL[:7], "delivery goes on"
    advance(env, 3000)
    assert env.broker.timers.files.checkpointed.queue_offset == 9
    env = restart(env, clean=False)
    advance(env, 70_000)
    assert bodies(env) == ALL
    env.close()
