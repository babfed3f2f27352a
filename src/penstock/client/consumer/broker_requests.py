"""What brokers ask of a consumer: rebalance, reset, and how are you.

    40   members changed            one-way: rebalance soon
    220  reset offsets              one-way: go on at other offsets
    221  how far are you            offsets in memory
    307  running info               settings, queues, figures, stacks: `mqadmin consumerStatus`
    309  consume this message now   the handler's result: `mqadmin consumeMessage`, consoles

The answers have the shape of the Java client's, because Java's tools read them.
"""

import asyncio
import io
import logging
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from penstock.client.client_session import MemberResponse, Session
from penstock.client.consumer.consume_rates import Rates
from penstock.client.consumer.offset_store import Offsets
from penstock.client.consumer.process_queue import ProcessQueue
from penstock.client.consumer.rebalance import Rebalancer
from penstock.clock import Clock
from penstock.errors import BodyError
from penstock.transport.peer import PeerRequest, Response
from penstock.version import VERSION
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerRunningInfo,
    GetConsumerStatusBody,
    ProcessQueueInfo,
    ResetOffsetBody,
    ResetOffsetBodyForC,
)
from penstock.wire.bodies.client_bodies import MessageQueue, SubscriptionData
from penstock.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

STACK_CHARS_MAX = 512 * 1024
"""Most text of stacks that an answer carries."""


class Consuming(Protocol):
    """What a consumer has for its brokers."""

    @property
    def group(self) -> str:
        """Its group, as servers know it."""

    def members_changed(self) -> None:
        """Rebalance soon."""

    async def reset(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Go on at these offsets; see `reset_queues`."""

    def progress(self, topic: str) -> dict[MessageQueue, int]:
        """The offsets in memory."""

    def running_info(self) -> ConsumerRunningInfo:
        """All about it; see `running_info`."""

    async def consume_directly(
        self, record: bytes, broker_name: str
    ) -> ConsumeMessageDirectlyResult:
        """Hand a message to the handler, beside all queues; see `try_handler`."""


def answer(consumer: Consuming, ask: PeerRequest, address: str) -> MemberResponse | bool:
    """For `Member.asked`: what a broker asks of this consumer's group; False for all else."""
    group = ask.ext.get("consumerGroup", ask.ext.get("group"))
    if group != consumer.group:
        return False
    if ask.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
        log.debug("%s says that the members of %s have changed", address, group)
        consumer.members_changed()
        return None
    if ask.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
        return _reset(consumer, ask, address)
    if ask.code == RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
        table = consumer.progress(ask.ext.get("topic", ""))
        return _answer(GetConsumerStatusBody(message_queue_table=table))
    if ask.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
        return _answer(_with_stacks(consumer.running_info(), ask))
    if ask.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
        return _consume(consumer, ask)
    return False


def _answer(body: object) -> Response:
    return Response(ResponseCode.SUCCESS, body=fastjson.encode(body))


async def _reset(consumer: Consuming, ask: PeerRequest, address: str) -> None:
    topic = ask.ext.get("topic", "")
    try:
        table = _offset_table(ask.body)
    except BodyError as error:
        log.warning("%s resets %s with offsets that can't be read: %s", address, topic, error)
        return
    log.warning("%s resets %s to %d offsets", address, topic, len(table))
    await consumer.reset(topic, {q: max(n, 0) for q, n in table.items() if q.topic == topic})


def _offset_table(body: bytes) -> dict[MessageQueue, int]:
    if not body:
        return {}
    try:
        return fastjson.decode(body, ResetOffsetBody).offset_table
    except BodyError:
        rows = fastjson.decode(body, ResetOffsetBodyForC).offset_table
        return {MessageQueue(row.topic, row.broker_name, row.queue_id): row.offset for row in rows}


async def _consume(consumer: Consuming, ask: PeerRequest) -> Response:
    result = await consumer.consume_directly(ask.body, ask.ext.get("brokerName", ""))
    return _answer(result)


async def reset_queues(
    rebalancer: Rebalancer, offsets: Offsets, table: Mapping[MessageQueue, int]
) -> None:
    """Drop those of these queues that are ours, store the offsets, and take the queues anew."""
    ours = rebalancer.ours.intersection(table)
    for queue in ours:
        offsets.freeze(queue, table[queue])
    await asyncio.gather(*(rebalancer.give_up(queue) for queue in ours))


async def try_handler(
    call: Callable[[], Awaitable[bool]], clock: Clock, *, orderly: bool
) -> ConsumeMessageDirectlyResult:
    """The result of one call of a handler: `call` says whether it is done, or raises."""
    begun_ms = clock.monotonic_ms()
    remark = None
    try:
        result = "CR_SUCCESS" if await call() else "CR_LATER"
    except Exception as error:  # the application's
        log.warning("a message that was handed over directly failed", exc_info=error)
        result, remark = "CR_THROW_EXCEPTION", f"{type(error).__name__}: {error}"
    spent_ms = clock.monotonic_ms() - begun_ms
    return ConsumeMessageDirectlyResult(
        order=orderly, consume_result=result, remark=remark, spent_time_mills=spent_ms
    )


# --- running info


class LockAges(Protocol):
    """Who knows how old our locks are (`orderly.QueueLocks`)."""

    def age_ms(self, queue: MessageQueue) -> int | None:
        """How old the lock is; None if there is none."""


def running_info(
    session: Session,
    *,
    subscriptions: Iterable[SubscriptionData],
    works: Iterable[ProcessQueue],
    offsets: Offsets,
    settings: Mapping[str, str],
    rates: Rates,
    started_ms: int,
    orderly: bool = False,
    concurrency: int = 0,
    locks: LockAges | None = None,
) -> ConsumerRunningInfo:
    """A consumer as Java's tools want to see it; `settings` are its options, by Java's names."""
    subscriptions = list(subscriptions)
    works = list(works)
    return ConsumerRunningInfo(
        properties={
            **settings,
            "PROP_NAMESERVER_ADDR": ";".join(session.nameservers.addresses),
            "PROP_THREADPOOL_CORE_SIZE": str(concurrency),
            "PROP_CONSUMEORDERLY": str(orderly).lower(),
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            "PROP_CLIENT_VERSION": f"penstock {VERSION}",
            "PROP_CONSUMER_START_TIMESTAMP": str(started_ms),
        },
        subscription_set=subscriptions,
        mq_table={w.queue: _queue_info(w, offsets, locks, session.clock) for w in works},
        status_table={
            s.topic: rates.status(s.topic, (w for w in works if w.queue.topic == s.topic))
            for s in subscriptions
        },
    )


def _queue_info(
    work: ProcessQueue, offsets: Offsets, locks: LockAges | None, clock: Clock
) -> ProcessQueueInfo:
    oldest = work.oldest
    age_ms = None if locks is None else locks.age_ms(work.queue)
    return ProcessQueueInfo(
        commit_offset=offsets.get(work.queue) or 0,
        cached_msg_min_offset=0 if oldest is None else oldest.queue_offset,
        cached_msg_max_offset=0 if oldest is None else max(work.next_offset - 1, 0),
        cached_msg_count=work.count,
        cached_msg_size_in_mib=work.bytes // 2**20,
        locked=age_ms is not None,
        last_lock_timestamp=0 if age_ms is None else clock.now_ms() - age_ms,
        dropped=work.dropped,
        last_pull_timestamp=work.last_pull_ms,
    )


def _with_stacks(info: ConsumerRunningInfo, ask: PeerRequest) -> ConsumerRunningInfo:
    if ask.ext.get("jstackEnable", "").lower() != "true":
        return info
    return ConsumerRunningInfo(
        properties=info.properties,
        subscription_set=info.subscription_set,
        mq_table=info.mq_table,
        status_table=info.status_table,
        jstack=_stacks(),
    )


def _stacks() -> str:
    """Where all threads and tasks of this process are."""
    text = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        text.write(f"thread {names.get(ident, ident)}\n")
        text.writelines(traceback.format_stack(frame))
    for task in asyncio.all_tasks():
        text.write(f"task {task.get_name()}\n")
        for frame in task.get_stack():
            text.write(f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}\n")
    return text.getvalue()[:STACK_CHARS_MAX]
