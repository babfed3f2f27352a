"""A POP consumer against a simple model: any sequence of events and lost responses.

- A message that was acknowledged in time is never received again.
- A message in flight is not received again meanwhile.
- Every other message is redelivered: nothing is lost.

(In order, acknowledged messages behind an unacknowledged one are redelivered with it: brokers
continue at the first open message.)
"""

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.client.pop.async_pop_consumer import AsyncPopConsumer
from penstock.client.pop.popped_messages import receipt_of
from penstock.client.received_message import ReceivedMessage
from penstock.errors import NotInFlight, PeerTimeout
from penstock.wire.codes import RequestCode
from tests.unit.client.client_kit import ClientBrokerFixture, FixtureSession, session_of

LENT_MS = st.sampled_from([1_000, 4_000, 10_000])
CODES = [
    RequestCode.POP_MESSAGE,
    RequestCode.ACK_MESSAGE,
    RequestCode.BATCH_ACK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
]


class PopClientMachine(RuleBasedStateMachine):
    """One consumer, one topic of four queues."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-pop-")
        self.broker_fixture = ClientBrokerFixture(Path(self.folder.name) / "store")
        self.sent: set[bytes] = set()
        self.acked: set[bytes] = set()
        self.unsure: set[bytes] = set()
        self.in_flight: dict[bytes, tuple[ReceivedMessage, int]] = {}
        self.lost = False
        self.losses: dict[int, tuple[str, int]] = {}
        self.send(0, 1)

    @initialize()
    def begin(self) -> None:
        async def start() -> None:
            self.session = FixtureSession(self.broker_fixture)
            self.session.lose = self.is_lost
            with session_of("pop.async_pop_consumer", self.session):
                self.consumer = AsyncPopConsumer(group="G", start_at="first")
            self.consumer.subscribe("T")
            await self.consumer.start()

        self.loop.run_until_complete(start())

    def teardown(self) -> None:
        try:
            if hasattr(self, "consumer"):
                self.everything_comes_in_the_end()
        finally:
            self.loop.run_until_complete(self.consumer.close())
            self.loop.close()
            self.broker_fixture.close()
            self.folder.cleanup()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do it while time passes as it must."""

        async def do() -> Any:
            task = asyncio.ensure_future(work)
            await self.session.clock.elapse(0)
            while not task.done():
                await self.session.elapse(50)
            return await task

        return self.loop.run_until_complete(do())

    @property
    def now_ms(self) -> int:
        return self.session.clock.now_ms()

    # --- rules

    @rule(queue_id=st.integers(0, 3), count=st.integers(1, 5))
    def send(self, queue_id: int, count: int) -> None:
        for _ in range(count):
            body = b"%d" % len(self.sent)
            assert self.broker_fixture.send("T", queue_id, body).code == 0
            self.sent.add(body)
        self.broker_fixture.store.publish()

    @rule(count_max=st.integers(1, 32), invisible_ms=LENT_MS, new=st.integers(0, 3))
    def receive(self, count_max: int, invisible_ms: int, new: int) -> None:
        self.send(3, new)
        self.take(count_max, invisible_ms)

    def take(self, count_max: int, invisible_ms: int) -> list[ReceivedMessage]:
        try:
            messages: list[ReceivedMessage] = self.run(
                self.consumer.receive(count_max, wait_ms=0, invisible_ms=invisible_ms)
            )
        except PeerTimeout:
            assert self.lost
            return []
        assert len(messages) <= count_max
        for message in messages:
            body = message.body
            assert body not in self.acked, "acknowledged, and here again"
            if body in self.in_flight and body not in self.unsure:
                assert self.in_flight[body][1] <= self.now_ms, "in flight, and received again"
            self.in_flight[body] = message, receipt_of(message).visible_ms
            self.unsure.discard(body)
        return messages

    @rule(wait_ms=st.integers(1, 1_000), sending=st.booleans())
    def receive_and_give_up(self, wait_ms: int, sending: bool) -> None:
        async def give_up() -> None:
            receiving = asyncio.ensure_future(
                self.consumer.receive(wait_ms=60_000, invisible_ms=10_000)
            )
            await self.session.elapse(wait_ms)
            if not receiving.cancel():
                some = [] if receiving.exception() else receiving.result()
                for message in some:
                    assert message.body not in self.acked
                    self.in_flight[message.body] = message, 0  # no task handles it
            await asyncio.wait([receiving])

        self.loop.run_until_complete(give_up())
        if sending:
            self.send(1, 2)

    @rule(data=st.data(), count=st.integers(1, 10))
    @precondition(lambda self: self.in_flight)
    def ack(self, data: st.DataObject, count: int) -> None:
        bodies = data.draw(st.permutations(sorted(self.in_flight)))[:count]
        self.ack_these(bodies)

    def ack_these(self, bodies: list[bytes]) -> None:
        async def ack() -> list[object]:
            acks = (self.consumer.ack(self.in_flight[body][0]) for body in bodies)
            return list(await asyncio.gather(*acks, return_exceptions=True))

        began_ms = self.now_ms
        for body, failure in zip(bodies, self.run(ack()), strict=True):
            in_time = self.now_ms < self.in_flight[body][1]
            if failure is None and in_time and body not in self.unsure:
                self.acked.add(body)
                del self.in_flight[body]
            else:
                assert failure is None or (isinstance(failure, PeerTimeout) and self.lost)
                assert began_ms <= self.now_ms
                self.unsure.add(body)

    @rule(data=st.data(), invisible_ms=LENT_MS, then_ack=st.booleans())
    @precondition(lambda self: self.in_flight)
    def extend(self, data: st.DataObject, invisible_ms: int, then_ack: bool) -> None:
        self.let_pass(data.draw(st.sampled_from([0, 1, 600])))
        body = data.draw(st.sampled_from(sorted(self.in_flight)))
        message, until_ms = self.in_flight[body]
        began_ms = self.now_ms
        try:
            self.run(self.consumer.extend(message, invisible_ms))
        except (PeerTimeout, NotInFlight):
            assert self.lost or body in self.unsure
            self.unsure.add(body)
            return
        if began_ms >= until_ms:
            self.unsure.add(body)
        self.in_flight[body] = message, began_ms + invisible_ms
        if then_ack:
            self.ack_these([body])

    @rule(ms=st.sampled_from([10, 1_500, 4_500, 11_000]))
    def let_pass(self, ms: int) -> None:
        self.loop.run_until_complete(self.session.elapse(ms))

    @rule(
        code=st.sampled_from(CODES), lost=st.sampled_from(["request", "answer"]),
        count=st.integers(1, 4),
    )  # fmt: skip
    def lose(self, code: int, lost: str, count: int) -> None:
        self.losses = {code: (lost, count)}

    def is_lost(self, code: int) -> str | None:
        lost, left = self.losses.pop(code, ("", 0))
        if left > 1:
            self.losses[code] = lost, left - 1
        self.lost |= bool(lost)
        return lost or None

    def everything_comes_in_the_end(self) -> None:
        """Acknowledged messages are not received again: `take` checks it."""
        self.losses.clear()
        for _ in range(3):
            self.let_pass(11_000)
            while self.take(32, 10_000):
                self.ack_these([body for body in self.in_flight if body not in self.unsure])
        # What we are not sure of is done, or it would have come, and we were sure.
        assert self.sent == self.acked | self.unsure


TestPopClient = PopClientMachine.TestCase
TestPopClient.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
