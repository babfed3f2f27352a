"""Sending messages again, without servers: plan, rate, failures, report."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.diagnosis.resending import ResendProgress, plan_resend, resend
from penstock.client.messages import MessageQueue, SendReceipt, SendStatus
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.errors import InvalidParameter, PeerLost, PenstockError
from penstock.testing.virtual_clock import VirtualClock
from tests.unit.client.consumer.consumer_kit import record
from tests.unit.client.diagnosis.evidence_kit import members

DEAD = {"RETRY_TOPIC": "Orders", "UNIQ_KEY": "ID"}


class FakeAdmin:
    """Sends nothing; `failing` are the offsets of messages whose send fails."""

    def __init__(self, failing: set[int] | None = None, **group: Any) -> None:
        self.session = SimpleNamespace(clock=VirtualClock(), without_namespace=lambda name: name)
        self.failing = failing or set()
        self.sent_at_ms: list[int] = []
        self._group = group

    async def members(self, group: str) -> object:
        return members("m1", **self._group)

    async def resend_message(
        self, message: ReceivedMessage, *, group: str | None = None
    ) -> SendReceipt:
        self.sent_at_ms.append(self.session.clock.now_ms())
        if message.queue_offset in self.failing:
            raise PeerLost("the connection was lost")
        queue = MessageQueue("t", "broker-a", 0)
        return SendReceipt(SendStatus.SEND_OK, message.message_id, "", queue, 0)

    @property
    def admin(self) -> AsyncAdmin:
        return cast(AsyncAdmin, self)


def letters(count: int, **fields: Any) -> list[ReceivedMessage]:
    values: dict[str, Any] = {"topic": "%DLQ%billing", "properties": DEAD, **fields}
    data = b"".join(record(number, **values) for number in range(count))
    return decode_records(data, "broker-a")


def test_a_plan_says_what_goes_where() -> None:
    fake = FakeAdmin()
    half = letters(1, topic="RMQ_SYS_TRANS_HALF_TOPIC", store_ms=5)
    three = letters(3)
    messages = [three[1], three[2], three[1], *letters(4, properties={})[3:]]
    plan = asyncio.run(plan_resend(fake.admin, messages, group="billing"))
    assert plan.targets == {"%RETRY%billing": 2}
    assert plan.bytes == 10
    assert [one.reason for one in plan.skipped] == ["its topic is not known"]
    assert plan.warnings == ()
    plan = asyncio.run(plan_resend(fake.admin, letters(2)))
    assert plan.targets == {"Orders": 2}
    plan = asyncio.run(plan_resend(fake.admin, half))
    assert [one.reason for one in plan.skipped] == ["its broker has not delivered it yet"]
    assert fake.sent_at_ms == []


def test_a_plan_warns_of_groups_that_do_not_read_their_retry_topic() -> None:
    fake = FakeAdmin(consume_type="CONSUME_POP")
    plan = asyncio.run(plan_resend(fake.admin, letters(1), group="billing"))
    assert "consumes with POP" in plan.warnings[0]
    fake = FakeAdmin(members=())
    plan = asyncio.run(plan_resend(fake.admin, letters(1), group="billing"))
    assert "no connected member" in plan.warnings[0]


def test_the_rate_is_kept_and_progress_is_reported() -> None:
    fake = FakeAdmin()
    seen: list[ResendProgress] = []

    async def run() -> int:
        plan = await plan_resend(fake.admin, letters(5))
        work = asyncio.ensure_future(resend(fake.admin, plan, rate=10, progress=seen.append))
        clock = fake.session.clock
        while not work.done():
            await clock.elapse(10)
        return (await work).spent_ms

    spent_ms = asyncio.run(run())
    began = fake.sent_at_ms[0]
    assert [at - began for at in fake.sent_at_ms] == [0, 100, 200, 300, 400]
    assert spent_ms >= 400
    assert seen[-1] == ResendProgress(5, 0, 5)


def test_a_failure_does_not_end_it_but_many_in_a_row_do() -> None:
    fake = FakeAdmin(failing={1, 3, 4})

    async def run(failures_max: int) -> tuple[int, list[int], list[str]]:
        plan = await plan_resend(fake.admin, letters(7))
        report = await resend(fake.admin, plan, failures_max=failures_max)
        assert not report.is_complete
        failed = [failure.item.message.queue_offset for failure in report.failed]
        assert all(isinstance(failure.error, PenstockError) for failure in report.failed)
        return len(report.sent), failed, [one.reason for one in report.skipped]

    assert asyncio.run(run(10)) == (4, [1, 3, 4], [])
    assert asyncio.run(run(2)) == (2, [1, 3, 4], ["the 2 messages before it failed"] * 2)


def test_a_rate_of_nothing_is_refused() -> None:
    fake = FakeAdmin()

    async def run() -> None:
        await resend(fake.admin, await plan_resend(fake.admin, letters(1)), rate=0)

    with pytest.raises(InvalidParameter, match="rate"):
        asyncio.run(run())
