"""The timer with lost files, late messages and unusual input."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.delay import timer_prefetch
from penstock.broker.delay.timer_prefetch import TimerPrefetch
from penstock.store.timer.timer_log import TimerLog
from penstock.store.timer.timer_wheel import TimerWheel
from tests.unit.broker.broker_kit import BrokerFixture
from tests.unit.broker.delay.timer_kit import (
    TIMER,
    advance,
    advance_in_steps,
    bodies,
    crash,
    flush,
    handle_of,
    open_broker,
    recall,
    send,
    stored,
)


@pytest.fixture(autouse=True)
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimerWheel, "slots", 7_680)


def begin(root: Path, **settings: Any) -> BrokerFixture:
    env = open_broker(root, **settings)
    env.send(body=b"x")
    return env


def test_overdue_messages_are_delivered_after_a_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = begin(tmp_path)
    send(env, 5000, b"fed")
    advance(env, 2000)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.broker.delay.timer_enqueue.UNWRITTEN_BYTES_MAX", -1)
        send(env, 500, b"not enqueued")
        advance(env, 8000)
        assert bodies(env) == [b"x", b"fed"]
        now_ms = env.now_ms
        env.close()
    shutil.rmtree(tmp_path / "timerlog")
    env = open_broker(tmp_path, now_ms)
    advance(env, 3000)
    assert bodies(env) == [b"x", b"fed", b"not enqueued"]
    env.close()


@pytest.mark.parametrize("clean", [True, False])
def test_a_stop_during_a_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    env = begin(tmp_path)
    for number in range(10):
        send(env, 1000 + number, b"%d" % number)
    send(env, 60_000, b"last")
    advance(env, 5000)
    now_ms = env.now_ms
    env.close()
    shutil.rmtree(tmp_path / "timerlog")
    with monkeypatch.context() as patched:
        patched.setattr("penstock.broker.delay.timer_enqueue.TICK_MESSAGES_MAX", 2)
        env = open_broker(tmp_path, now_ms)
        flush(env)
        for _ in range(3):
            env.tick(1)
        if clean:
            env.close()
        else:
            crash(env)
    env = open_broker(tmp_path, now_ms)
    advance(env, 70_000)
    assert bodies(env) == [b"x", *[b"%d" % number for number in range(10)], b"last"]
    env.close()


def test_a_recall_survives_a_change_of_precision(tmp_path: Path) -> None:
    env = begin(tmp_path)
    answer = send(env, 20_550, b"no")
    send(env, 20_550, b"yes")
    assert recall(env, handle_of(answer)).code == 0
    advance(env, 3000)
    now_ms = env.now_ms
    env.close()
    env = open_broker(tmp_path, now_ms, timer_precision_ms=100)
    advance(env, 30_000)
    assert bodies(env) == [b"x", b"yes"]
    env.close()


def test_late_rolled_messages_are_pinned_after_a_crash(tmp_path: Path) -> None:
    """Its slot passed during a downtime, and it is due soon: retention must not delete it."""
    env = begin(tmp_path, timer_roll_slots=600)
    send(env, 1_200_000, b"far")
    advance(env, 2000)
    due_ms = env.now_ms - 2000 + 1_200_000
    env.close()
    env = open_broker(tmp_path, due_ms - 60_000, timer_roll_slots=600)
    send(env, 60_000, b"near")
    advance(env, 3000)
    flush(env)
    now_ms = env.now_ms
    crash(env)
    env = open_broker(tmp_path, now_ms, timer_roll_slots=600)
    pinned = env.broker.timers.pinned_from()
    waiting = [(m.body, m.physical_offset) for m in stored(env, TIMER)]
    newest = dict(waiting)
    assert pinned is not None
    assert pinned <= min(newest.values())
    units = [unit.offset for _, unit in env.broker.timers.files.log.scan(0)]
    assert units == sorted(units), "segments of the timer's log are deleted by their last unit"
    advance(env, 70_000)
    assert sorted(bodies(env)) == [b"far", b"near", b"x"]
    env.close()


def test_many_recalls_of_one_slot_are_read_in_several_ticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = begin(tmp_path)
    answers = [send(env, 20_000, b"no") for _ in range(40)]
    for answer in answers:
        assert recall(env, handle_of(answer)).code == 0
    send(env, 20_000, b"yes")
    advance(env, 5000)
    counts: list[int] = []
    load = TimerPrefetch.load

    def counted_load(self: TimerPrefetch, now_ms: int) -> None:
        before = [len(chain.recalled) for chain in self.chains.values()]
        load(self, now_ms)
        counts.append(sum(len(chain.recalled) for chain in self.chains.values()) - sum(before))

    monkeypatch.setattr(timer_prefetch, "TICK_UNITS_MAX", 8)
    monkeypatch.setattr(TimerPrefetch, "load", counted_load)
    advance(env, 20_000)
    assert 0 < max(counts) <= 8
    assert sum(counts) == 40
    assert bodies(env) == [b"x", b"yes"]
    env.close()


def test_properties_must_leave_room_for_those_of_the_timer(tmp_path: Path) -> None:
    env = begin(tmp_path, timer_roll_slots=600, segment_bytes=1 << 20)
    taken = 0
    for length in range(32_300, 32_640, 20):
        properties = {"TIMER_DELAY_MS": "3000000", "k": "v" * length}
        answer = env.send(body=b"%d" % length, properties=properties)
        taken += answer.code == 0
    assert 0 < taken < 17
    advance_in_steps(env, 3_600_000, 30_000)
    assert env.broker.timers.metrics.rolled >= taken
    assert env.broker.timers.metrics.dropped == 0
    assert len(bodies(env)) == 1 + taken
    env.close()


def test_a_recreated_timer_topic_stops_nothing(tmp_path: Path) -> None:
    env = begin(tmp_path)
    send(env, 20_000, b"first")
    advance(env, 2000)
    now_ms = env.now_ms
    env.close()
    env = open_broker(tmp_path, now_ms)
    advance(env, 100)
    enqueue = env.broker.timers.enqueue
    assert enqueue.start_offset == 1
    list(env.store.remove_queues(TIMER.encode()))
    advance(env, 30_000)
    assert bodies(env) == [b"x", b"first"]
    env.close()


def test_damage_found_while_running_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = begin(tmp_path)
    answer = send(env, 20_000, b"no")
    for number in range(5):
        send(env, 20_000, b"%d" % number)
    send(env, 1000, b"before")
    advance(env, 5000)
    assert recall(env, handle_of(answer)).code == 0
    advance(env, 5000)
    path = tmp_path / "timerlog" / ("0" * 20)
    path.write_bytes(b"\xff" * path.stat().st_size)
    clear, calls = TimerLog.clear, 0

    def fail_first(self: TimerLog) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(5, "input/output error")
        clear(self)

    monkeypatch.setattr(TimerLog, "clear", fail_first)
    advance(env, 8000)
    send(env, 2000, b"meanwhile")
    advance(env, 10_000)
    assert calls == 2
    assert bodies(env) == [b"x", b"before", *[b"%d" % number for number in range(5)], b"meanwhile"]
    env.close()
