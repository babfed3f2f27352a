"""POP against a simple model: any sequence of requests, with restarts in between.

For a broker that is stopped or killed between two requests:

- a message is delivered until it is acknowledged, and never again afterwards;
- it is never delivered while it is in flight;
- an ack is accepted if it is in time and has the newest receipt handle, otherwise it has no effect.

A broker killed within a loop iteration may revive a message twice: see `test_revive`. Ordered pops
may receive messages again that were acknowledged in the last seconds before a kill, as pulling
consumers do: their progress is saved every few seconds.
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.broker.pop import revive_log
from tests.unit.broker.broker_kit import BrokerFixture
from tests.unit.broker.pop.pop_kit import PopClient, Popped, advance, persist, reopen

TIMES_MS = st.sampled_from([0, 1, 500, 3_000, 10_000, 45_000])


class PopMachine(RuleBasedStateMachine):
    """One group that pops from one topic."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-pop-")
        self.root = Path(self.folder.name) / "store"
        self.env = BrokerFixture(self.root)
        self.sent = 0
        self.acked: set[bytes] = set()
        self.in_flight: dict[bytes, tuple[int, Popped]] = {}  # until when, with the newest receipt
        self.old: list[Popped] = []  # receipt handles that are outdated

    @property
    def client(self) -> PopClient:
        return PopClient(self.env)

    @initialize()
    def make_topic(self) -> None:
        self.send(0, 1)

    # --- rules

    @rule(queue_id=st.integers(0, 3), count=st.integers(1, 6))
    def send(self, queue_id: int, count: int) -> None:
        for _ in range(count):
            assert self.env.send(body=b"%d" % self.sent, queue_id=queue_id).code == 0
            self.sent += 1
        self.env.store.publish()

    @rule(count=st.integers(1, 8), invisible_ms=TIMES_MS, queue_id=st.integers(-1, 3))
    def pop(self, count: int, invisible_ms: int, queue_id: int) -> None:
        found = self.client.pop(maxMsgNums=count, invisibleTime=invisible_ms, queueId=queue_id)
        assert len(found) <= count
        for popped in found:
            self.mark_in_flight(popped, self.env.now_ms + invisible_ms)
        if invisible_ms == 0:
            self.env.tick(1)
            self.expire()

    def mark_in_flight(self, popped: Popped, until_ms: int) -> None:
        assert popped.body not in self.acked, "acknowledged, and delivered again"
        assert popped.body not in self.in_flight, "delivered while it is in flight"
        assert popped.message.topic == "T"
        self.in_flight[popped.body] = (until_ms, popped)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        body = data.draw(st.sampled_from(sorted(self.in_flight)))
        _, popped = self.in_flight.pop(body)
        assert self.client.ack(popped).code == 0
        self.acked.add(body)
        self.old.append(popped)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def ack_batch(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.in_flight)), min_size=1))
        popped = [self.in_flight.pop(body)[1] for body in sorted(chosen)]
        assert self.client.ack_batch(popped).code == 0
        self.acked |= chosen

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), invisible_ms=TIMES_MS)
    def change(self, data: st.DataObject, invisible_ms: int) -> None:
        body = data.draw(st.sampled_from(sorted(self.in_flight)))
        _, popped = self.in_flight[body]
        changed = self.client.change(popped, invisible_ms)
        self.old.append(popped)
        self.in_flight[body] = (changed.receipt.visible_ms, changed)
        if invisible_ms == 0:
            self.env.tick(2)
            self.expire()

    @precondition(lambda self: self.old)
    @rule(data=st.data(), change=st.booleans())
    def use_an_old_receipt(self, data: st.DataObject, change: bool) -> None:
        popped = data.draw(st.sampled_from(self.old))
        if change:
            assert self.client.ask_change(popped, 1_000).code == 0
        else:
            assert self.client.ack(popped).code == 0

    @rule(ms=st.sampled_from([1, 100, 3_000, 10_001, 60_000]))
    def time_passes(self, ms: int) -> None:
        advance(self.env, ms)
        self.expire()

    def expire(self) -> None:
        """All messages in flight were revived."""
        self.env.store.publish()
        for body, (until_ms, popped) in list(self.in_flight.items()):
            if until_ms <= self.env.now_ms:
                del self.in_flight[body]
                self.old.append(popped)

    @rule()
    def tables_are_written(self) -> None:
        persist(self.env)

    @rule(crash=st.booleans())
    def restart(self, crash: bool) -> None:
        self.env = reopen(self.env, self.root, crash=crash)

    # --- the end

    def teardown(self) -> None:
        try:
            for _ in range(3):
                advance(self.env, 60_000)
                self.expire()
                while found := self.client.pop(invisibleTime=600_000):
                    for popped in found:
                        self.mark_in_flight(popped, self.env.now_ms + 600_000)
                    self.client.ack_all(found)
                    for popped in found:
                        del self.in_flight[popped.body]
                        self.acked.add(popped.body)
            assert self.acked == {b"%d" % number for number in range(self.sent)}
            assert len(self.env.broker.pop.revive_log.checkpoints) == 0
        finally:
            self.env.close()
            self.folder.cleanup()


@pytest.fixture(autouse=True)
def short_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that checkpoints are rewritten."""
    monkeypatch.setattr(revive_log, "REWRITE_AFTER", 4)


TestPops = PopMachine.TestCase
TestPops.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
