"""The timer where files were lost, things come late, and messages are as awkward as they may be."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.delay import timer_prefetch
from penstock.broker.delay.timer_prefetch import Near
from penstock.store.timer.timer_log import TimerLog
from penstock.store.timer.timer_wheel import TimerWheel
from tests.unit.broker.broker_kit import BrokerFixture
from tests.unit.broker.delay.timer_kit import (
    TIMER,
    bodies,
    crash,
    flush,
    handle_of,
    let_days_pass,
    let_pass,
    open_house,
    recall,
    send,
    stored,
)


@pytest.fixture(autouse=True)
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimerWheel, "slots", 7_680)


def begin(root: Path, **settings: Any) -> BrokerFixture:
    env = open_house(root, **settings)
    env.send(body=b"x")
    return env


def test_what_was_overdue_in_the_queue_is_delivered_when_files_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = begin(tmp_path)
    send(env, 5000, b"fed")
    let_pass(env, 2000)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.broker.delay.timer_enqueue.UNWRITTEN_MAX", -1)  # nothing is taken
        send(env, 500, b"not fed")
        let_pass(env, 8000)
        assert bodies(env) == [b"x", b"fed"]
        now_ms = env.now_ms
        env.close()
    shutil.rmtree(tmp_path / "timerlog")
    env = open_house(tmp_path, now_ms)
    let_pass(env, 3000)
    assert bodies(env) == [b"x", b"fed", b"not fed"]
    env.close()


@pytest.mark.parametrize("clean", [True, False])
def test_files_that_are_made_anew_when_the_broker_ends_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    env = begin(tmp_path)
    for number in range(10):
        send(env, 1000 + number, b"%d" % number)
    send(env, 60_000, b"last")
    let_pass(env, 5000)
    now_ms = env.now_ms
    env.close()
    shutil.rmtree(tmp_path / "timerlog")
    with monkeypatch.context() as patched:
        patched.setattr("penstock.broker.delay.timer_enqueue.TICK_MESSAGES", 2)
        env = open_house(tmp_path, now_ms)
        flush(env)
        for _ in range(3):
            env.tick(1)
        if clean:
            env.close()
        else:
            crash(env)
    env = open_house(tmp_path, now_ms)
    let_pass(env, 70_000)
    assert bodies(env) == [b"x", *[b"%d" % number for number in range(10)], b"last"]
    env.close()


def test_a_recall_holds_when_slots_get_another_length(tmp_path: Path) -> None:
    env = begin(tmp_path)
    answer = send(env, 20_550, b"no")
    send(env, 20_550, b"yes")
    assert recall(env, handle_of(answer)).code == 0
    let_pass(env, 3000)
    now_ms = env.now_ms
    env.close()
    env = open_house(tmp_path, now_ms, timer_precision_ms=100)
    let_pass(env, 30_000)
    assert bodies(env) == [b"x", b"yes"]
    env.close()


def test_what_rolled_late_is_pinned_after_a_crash(tmp_path: Path) -> None:
    """Its slot was passed in a downtime, and its time is near: the log must not lose it."""
    env = begin(tmp_path, timer_roll_slots=600)
    send(env, 1_200_000, b"far")
    let_pass(env, 2000)
    due_ms = env.now_ms - 2000 + 1_200_000
    env.close()
    env = open_house(tmp_path, due_ms - 60_000, timer_roll_slots=600)
    send(env, 60_000, b"near")
    let_pass(env, 3000)
    flush(env)
    now_ms = env.now_ms
    crash(env)
    env = open_house(tmp_path, now_ms, timer_roll_slots=600)
    pinned = env.broker.timers.pinned_from()
    waiting = [(m.body, m.physical_offset) for m in stored(env, TIMER)]
    newest = dict(waiting)
    assert pinned is not None
    assert pinned <= min(newest.values())
    units = [unit.offset for _, unit in env.broker.timers.files.log.scan(0)]
    assert units == sorted(units), "segments of the timer's log are deleted by their last unit"
    let_pass(env, 70_000)
    assert sorted(bodies(env)) == [b"far", b"near", b"x"]
    env.close()


def test_many_recalls_of_one_slot_are_read_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = begin(tmp_path)
    answers = [send(env, 20_000, b"no") for _ in range(40)]
    for answer in answers:
        assert recall(env, handle_of(answer)).code == 0
    send(env, 20_000, b"yes")
    let_pass(env, 5000)
    turns: list[int] = []
    load = Near.load

    def turn(self: Near, now_ms: int) -> None:
        before = [len(chain.recalled) for chain in self.chains.values()]
        load(self, now_ms)
        turns.append(sum(len(chain.recalled) for chain in self.chains.values()) - sum(before))

    monkeypatch.setattr(timer_prefetch, "TICK_UNITS", 8)
    monkeypatch.setattr(Near, "load", turn)
    let_pass(env, 20_000)
    assert 0 < max(turns) <= 8
    assert sum(turns) == 40
    assert bodies(env) == [b"x", b"yes"]
    env.close()


def test_properties_that_leave_no_room_for_the_timers_own_are_refused(tmp_path: Path) -> None:
    env = begin(tmp_path, timer_roll_slots=600, segment_bytes=1 << 20)
    taken = 0
    for length in range(32_300, 32_640, 20):
        properties = {"TIMER_DELAY_MS": "3000000", "k": "v" * length}
        answer = env.send(body=b"%d" % length, properties=properties)
        taken += answer.code == 0
    assert 0 < taken < 17
    let_days_pass(env, 3_600_000, 30_000)
    assert env.broker.timers.figures.rolled >= taken
    assert env.broker.timers.figures.dropped == 0
    assert len(bodies(env)) == 1 + taken
    env.close()


def test_a_timer_topic_that_is_made_anew_stops_nothing(tmp_path: Path) -> None:
    env = begin(tmp_path)
    send(env, 20_000, b"first")
    let_pass(env, 2000)
    now_ms = env.now_ms
    env.close()
    env = open_house(tmp_path, now_ms)
    let_pass(env, 100)
    feed = env.broker.timers.feed
    assert feed.start_offset == 1
    env.store.remove_queues(TIMER.encode())
    let_pass(env, 30_000)
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
    let_pass(env, 5000)
    assert recall(env, handle_of(answer)).code == 0
    let_pass(env, 5000)
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
    let_pass(env, 8000)
    send(env, 2000, b"meanwhile")
    let_pass(env, 10_000)
    assert calls == 2
    assert bodies(env) == [b"x", b"before", *[b"%d" % number for number in range(5)], b"meanwhile"]
    env.close()
