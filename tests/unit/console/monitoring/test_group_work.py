"""The oldest message in work: known from consumers that pull, unknown where nobody tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

from penstock.console.monitoring.group_work import GroupWork, read_group_work
from penstock.errors import NoPermission, PeerTimeout
from penstock.wire.bodies.admin_bodies import (
    ConsumerRunningInfo,
    PopProcessQueueInfo,
    ProcessQueueInfo,
)
from penstock.wire.bodies.client_bodies import MessageQueue

ONE, TWO, THREE = (MessageQueue("orders", "broker-a", number) for number in range(3))


class Members:
    """The methods of AsyncAdmin that are needed. `stored` has the store time of messages."""

    def __init__(self, **infos: ConsumerRunningInfo | Exception) -> None:
        self.infos = infos
        self.stored: dict[tuple[MessageQueue, int], int] = {}
        self.refusal: Exception | None = None

    def bare_queue(self, queue: MessageQueue) -> MessageQueue:
        return queue

    async def for_each(
        self, items: Sequence[Any], work: Callable[[Any], Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        return [await work(item) for item in items]

    async def running_info(self, group: str, client_id: str) -> ConsumerRunningInfo:
        found = self.infos[client_id]
        if isinstance(found, Exception):
            raise found
        return found

    async def message_at(self, queue: MessageQueue, offset: int) -> SimpleNamespace | None:
        if self.refusal is not None:
            raise self.refusal
        store_ms = self.stored.get((queue, offset))
        return None if store_ms is None else SimpleNamespace(store_ms=store_ms)


def held(low: int, count: int) -> ProcessQueueInfo:
    return ProcessQueueInfo(cached_msg_min_offset=low, cached_msg_count=count)


def read(admin: Any) -> GroupWork:
    return asyncio.run(read_group_work(admin, "billing", list(admin.infos)))


def test_the_oldest_is_the_first_that_was_stored() -> None:
    since = {f"oldestInWorkSince {TWO.topic}/{TWO.broker_name}/{TWO.queue_id}": "5000"}
    admin = Members(
        m1=ConsumerRunningInfo(mq_table={ONE: held(700, 3), THREE: held(0, 0)}),
        m2=ConsumerRunningInfo(mq_table={TWO: held(20, 1)}, user_consumer_info=since),
    )
    admin.stored = {(ONE, 700): 3_000, (TWO, 20): 2_000}
    work = read(admin)
    assert work.oldest is not None
    assert (work.oldest.queue, work.oldest.offset, work.oldest.store_ms) == (TWO, 20, 2_000)
    assert work.oldest.work.client_id == "m2"
    assert {queue: one.count for queue, one in work.queues.items()} == {ONE: 3, TWO: 1, THREE: 0}


def test_nothing_is_in_work() -> None:
    work = read(Members(m1=ConsumerRunningInfo(mq_table={ONE: held(0, 0)})))
    assert (work.oldest, work.problem) == (None, None)


def test_pop_consumers_do_not_tell_which_messages_they_have() -> None:
    popped = PopProcessQueueInfo(wait_ack_count=2)
    work = read(Members(m1=ConsumerRunningInfo(mq_pop_table={ONE: popped})))
    assert work.oldest is None
    assert work.problem is not None
    assert "POP" in work.problem
    assert work.queues[ONE].count == 2


def test_a_silent_member_makes_it_unknown() -> None:
    admin = Members(m1=ConsumerRunningInfo(mq_table={ONE: held(7, 1)}), m2=PeerTimeout("late"))
    admin.stored = {(ONE, 7): 1}
    work = read(admin)
    assert work.silent == ("m2",)
    assert work.oldest is None
    assert work.problem == "not all members tell what they have"


def test_a_message_that_can_not_be_read_makes_it_unknown() -> None:
    admin = Members(m1=ConsumerRunningInfo(mq_table={ONE: held(7, 1)}))
    assert read(admin).problem is not None
    admin.refusal = NoPermission("no")
    assert read(admin).problem == "not all messages that are in work can be read"
