"""The timer against a simple model: random sends, recalls, waits, stops, kills and power cuts."""

import logging
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.store.timer.timer_wheel import TimerWheel
from penstock.testing import FaultyDisk
from tests.depth import rounds
from tests.unit.broker.broker_kit import NOW_MS
from tests.unit.broker.delay.timer_kit import (
    advance,
    advance_in_steps,
    bodies,
    collect_files,
    crash,
    flush,
    handle_of,
    open_broker,
    recall,
    send,
    stored,
)

DELAYS = st.one_of(
    st.integers(1, 3000),
    st.integers(1, 30_000),
    st.integers(1, 3 * 3_600_000),
    st.sampled_from([999, 1000, 1001, 2000, 600_000, 1_200_000]),
)


class TimerMachine(RuleBasedStateMachine):
    """Each message is delivered at its time or after a restart: once, or more after a kill."""

    @initialize(precision=st.sampled_from([1000, 1000, 100]), slots=st.sampled_from([7680, 1280]))
    def begin(self, precision: int, slots: int) -> None:
        logging.disable()  # pytest keeps the errors that are logged, and with them the brokers
        self.base = Path(tempfile.mkdtemp())
        self.patch = patch.object(TimerWheel, "slots", slots)
        self.patch.start()
        self.options: dict[str, Any] = {"timer_roll_slots": 600, "timer_precision_ms": precision}
        self.lives = 0
        self.root = self.base / "0"
        self.env = open_broker(self.root, disk=FaultyDisk(self.root), **self.options)
        self.env.send(body=b"x")
        flush(self.env)
        self.due: dict[bytes, int] = {}
        self.handles: dict[bytes, str] = {}
        self.recalled: set[bytes] = set()
        self.volatile: set[bytes] = set()  # not flushed yet
        self.killed = False
        self.serial = 0

    @rule(delay_ms=DELAYS)
    def send(self, delay_ms: int) -> None:
        self.serial += 1
        body = b"%d" % self.serial
        answer = send(self.env, delay_ms, body, properties={"UNIQ_KEY": f"ID{self.serial:030}"})
        self.due[body] = self.env.now_ms + delay_ms
        self.handles[body] = handle_of(answer)
        self.volatile.add(body)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        body = data.draw(st.sampled_from(sorted(self.handles)))
        if recall(self.env, self.handles[body]).code == 0:
            flush(self.env)
            self.volatile.clear()
            self.recalled.add(body)

    @rule(ms=st.one_of(st.integers(1, 50), st.integers(1, 5000)))
    def wait(self, ms: int) -> None:
        advance(self.env, ms)
        self.volatile.clear()

    @rule(minutes=st.integers(1, 90))
    def wait_long(self, minutes: int) -> None:
        advance_in_steps(self.env, minutes * 60_000, 60_000)
        self.volatile.clear()

    @rule(ms=st.sampled_from([0, 0, 700, 30_000, 4_000_000]))
    def restart(self, ms: int) -> None:
        now_ms = self.env.now_ms + ms
        self.env.close()
        self.env = open_broker(self.root, now_ms, disk=FaultyDisk(self.root), **self.options)

    @rule(ms=st.sampled_from([0, 0, 700, 30_000, 4_000_000]))
    def kill(self, ms: int) -> None:
        self.killed = True
        self.env.store.publish()
        now_ms = self.env.now_ms + ms
        crash(self.env)
        self.env = open_broker(self.root, now_ms, disk=FaultyDisk(self.root), **self.options)

    @rule(ms=st.sampled_from([0, 700, 30_000]), seed=st.integers(0, 99))
    def cut_power(self, ms: int, seed: int) -> None:
        self.killed = True
        disk = self.env.store.disk
        assert isinstance(disk, FaultyDisk)
        self.lives += 1
        self.root = disk.crash(self.base / str(self.lives), Random(seed))
        now_ms = self.env.now_ms + ms
        crash(self.env)
        for body in self.volatile:
            del self.due[body], self.handles[body]
        self.volatile.clear()
        self.env = open_broker(self.root, now_ms, disk=FaultyDisk(self.root), **self.options)

    @rule(
        lost=st.sampled_from(["timerlog", "timerwheel", "", "", "clock"]),
        clean=st.booleans(),
        ms=st.sampled_from([0, 700, 30_000, 4_000_000]),
    )
    def rebuild(self, lost: str, clean: bool, ms: int) -> None:
        """Files are lost, slots get another length, or the clock is behind at the start."""
        self.killed = True  # messages of the last millisecond may be delivered twice
        now_ms = self.env.now_ms + ms
        self.env.store.publish()
        if clean:
            self.env.close()
        else:
            crash(self.env)
        path, start_ms = self.root / (lost or "timerlog"), now_ms
        if lost == "clock":
            start_ms = NOW_MS
        elif not lost:
            self.options["timer_precision_ms"] = 1100 - self.options["timer_precision_ms"]
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        self.env = open_broker(self.root, start_ms, disk=FaultyDisk(self.root), **self.options)
        self.env.now_ms = now_ms

    @invariant()
    def nothing_is_early_or_recalled(self) -> None:
        for message in stored(self.env)[1:]:
            assert message.body not in self.recalled, message
            if message.body in self.due:
                assert message.store_ms >= self.due[message.body]

    def teardown(self) -> None:
        if not hasattr(self, "env"):
            return
        try:
            for _ in range(8):
                advance_in_steps(self.env, 30 * 60_000, 60_000)
            got = bodies(self.env)[1:]
            assert set(got) >= self.due.keys() - self.recalled, "lost"
            if not self.killed:
                assert len(got) == len(set(got)), "delivered twice without a crash"
        finally:
            self.env.close()
            self.patch.stop()
            logging.disable(logging.NOTSET)
            del self.env  # Hypothesis keeps some of the machines
            collect_files()
            shutil.rmtree(self.base)


TestTimerMachine = TimerMachine.TestCase
TestTimerMachine.settings = settings(
    max_examples=rounds(ci=15, proof=300), stateful_step_count=25, deadline=None
)
