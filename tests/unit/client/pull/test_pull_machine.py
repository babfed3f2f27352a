"""Pull consumers against a model, with any sequence of events."""

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.client.messages import MessageQueue
from penstock.errors import InvalidParameter
from tests.unit.client.client_kit import ClientBrokerFixture
from tests.unit.client.pull.test_async_pull_consumer import PULL, PullFixture, Q


class PullMachine(RuleBasedStateMachine):
    """Two assigned queues against a model: positions and stored messages."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-pull-")
        self.broker_fixture = ClientBrokerFixture(Path(self.folder.name) / "store")
        self.broker_fixture.send("T", 0, b"0")
        self.broker_fixture.send("T", 1, b"0")
        self.ends = dict.fromkeys(Q[:2], 1)
        self.positions = dict.fromkeys(Q[:2], 0)
        self.paused: set[MessageQueue] = set()
        self.losses: list[str] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(batch=st.integers(1, 5))
    def begin(self, batch: int) -> None:
        async def start() -> None:
            self.fixture = PullFixture(
                self.broker_fixture, auto_commit=False, pull_batch=batch, messages_max=7
            )
            self.consumer = self.fixture.consumer
            self.fixture.session.lose = lambda code: (
                self.losses.pop() if self.losses and code == PULL else None
            )
            await self.consumer.start()
            self.consumer.assign(Q[:2])

        self.run(start())

    def teardown(self) -> None:
        if hasattr(self, "fixture"):
            self.run(self.consumer.close())
        self.broker_fixture.close()
        self.loop.close()
        self.folder.cleanup()

    @rule(queue=st.sampled_from(Q[:2]), count=st.integers(1, 12))
    def send(self, queue: MessageQueue, count: int) -> None:
        for _ in range(count):
            self.broker_fixture.send("T", queue.queue_id, str(self.ends[queue]).encode())
            self.ends[queue] += 1
        self.broker_fixture.store.publish()

    @rule(count_max=st.integers(1, 20), ms=st.sampled_from([0, 1, 100]))
    def poll(self, count_max: int, ms: int = 0) -> None:
        self.let_pass(ms)
        got = self.run(self.consumer.poll(0, count_max=count_max))
        assert len(got) <= count_max
        for message in got:
            queue = message.queue
            assert queue not in self.paused
            assert message.queue_offset == self.positions[queue], "nothing is missing or doubled"
            assert message.body == str(message.queue_offset).encode()
            self.positions[queue] += 1

    @rule(ms=st.sampled_from([0, 1, 300, 16_000]))
    def let_pass(self, ms: int) -> None:
        self.run(self.fixture.session.elapse(ms))

    @rule(queue=st.sampled_from(Q[:2]), allocation=st.floats(0, 1))
    def seek(self, queue: MessageQueue, allocation: float) -> None:
        offset = int(self.ends[queue] * allocation)
        self.run(self.consumer.seek(queue, offset))
        self.positions[queue] = offset

    @rule(queue=st.sampled_from(Q[:2]), begin=st.booleans())
    def seek_to_an_end(self, queue: MessageQueue, begin: bool) -> None:
        move = self.consumer.seek_to_begin if begin else self.consumer.seek_to_end
        self.run(move(queue))
        self.positions[queue] = 0 if begin else self.ends[queue]

    @rule(queue=st.sampled_from(Q[:2]), ms=st.sampled_from([0, 100]))
    def pause_or_resume(self, queue: MessageQueue, ms: int) -> None:
        self.let_pass(ms)
        if queue in self.paused:
            self.consumer.resume([queue])
        else:
            self.consumer.pause([queue])
        self.paused ^= {queue}

    @rule(lost=st.sampled_from(["request", "answer"]), count=st.integers(1, 3))
    def lose(self, lost: str, count: int) -> None:
        self.losses = [lost] * count

    @rule(queue=st.sampled_from(Q[:2]), allocation=st.floats(0, 1.5))
    def commit(self, queue: MessageQueue, allocation: float) -> None:
        offset = int(self.positions[queue] * allocation)
        if offset > self.positions[queue]:
            with pytest.raises(InvalidParameter):
                self.run(self.consumer.commit({queue: offset}))
            return
        self.run(self.consumer.commit({queue: offset}))
        assert self.run(self.consumer.committed(queue)) == offset

    @rule()
    def commit_all(self) -> None:
        self.run(self.consumer.commit())
        for queue, offset in self.positions.items():
            stored = self.fixture.stored(queue.queue_id)
            assert (0 if stored is None else stored) == offset

    @invariant()
    def positions_are_known(self) -> None:
        if hasattr(self, "fixture"):
            for queue, offset in self.positions.items():
                assert self.run(self.consumer.position(queue)) == offset

    @rule()
    def everything_comes_in_the_end(self) -> None:
        self.losses = []
        self.consumer.resume(self.paused)
        self.paused.clear()
        for _ in range(40):
            if self.positions == self.ends:
                break
            self.poll(20, 3_100)
        assert self.positions == self.ends


TestPullMachine = PullMachine.TestCase
TestPullMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
