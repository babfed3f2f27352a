"""Requests of brokers to a consumer.

    40   members changed            one-way: rebalance soon
    220  reset offsets              one-way: continue at other offsets
    221  consumer status            the offsets in memory
    307  running info               settings, queues, statistics, stacks: `mqadmin consumerStatus`
    309  consume message directly   the handler's result: `mqadmin consumeMessage`, consoles

Responses have the form of the Java client's, since Java's tools read them.
"""

import asyncio
import io
import logging
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Protocol

import msgspec

from penstock.client.client_session import MemberResponse, Session
from penstock.client.consumer.consume_rates import Rates
from penstock.client.consumer.consumer_options import QueueConsumerOptions
from penstock.client.consumer.offset_store import OffsetStore
from penstock.client.consumer.process_queue import ProcessQueue, queue_text
from penstock.client.consumer.rebalance import Rebalancer
from penstock.client.received_message import HANDLING
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
from penstock.wire.bodies.client_bodies import ConsumerData, MessageQueue, SubscriptionData
from penstock.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

STACK_CHARS_MAX = 512 * 1024
"""Longest text of stacks in a response."""
QUEUE_FIELDS = ("oldestInWorkSince", "paused", "lastFailure")
"""What a consumer reports of each queue besides Java's fields: when the handler received the oldest
message (ms since 1970), whether the queue is paused, the last failure of a pull or a handler."""


class ManagedConsumer(Protocol):
    """A consumer that handles requests of brokers."""

    @property
    def group(self) -> str:
        """The group, with namespace."""

    def members_changed(self) -> None:
        """Rebalance soon."""

    async def reset(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue at these offsets; see `reset_queues`."""

    def progress(self, topic: str) -> dict[MessageQueue, int]:
        """The offsets in memory."""

    def running_info(self) -> ConsumerRunningInfo:
        """Settings and statistics; see the function `running_info`."""

    async def consume_directly(
        self, record: bytes, broker_name: str
    ) -> ConsumeMessageDirectlyResult:
        """Call the handler with a message that is in no queue; see `try_handler`."""


def handle_request(
    consumer: ManagedConsumer, request: PeerRequest, address: str
) -> MemberResponse | bool:
    """Handle a request for this consumer's group; False for all others."""
    group = request.ext.get("consumerGroup", request.ext.get("group"))
    if group != consumer.group:
        return False
    if request.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
        log.debug("%s: members have changed, says %s", group, address)
        consumer.members_changed()
        return None
    if request.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
        return _reset(consumer, request, address)
    if request.code == RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
        table = consumer.progress(request.ext.get("topic", ""))
        return _response(GetConsumerStatusBody(message_queue_table=table))
    if request.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
        return _response(_with_stacks(consumer.running_info(), request))
    if request.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
        return _consume(consumer, request)
    return False


def _response(body: object) -> Response:
    return Response(ResponseCode.SUCCESS, body=fastjson.encode(body))


async def _reset(consumer: ManagedConsumer, request: PeerRequest, address: str) -> None:
    topic = request.ext.get("topic", "")
    try:
        table = _offset_table(request.body)
    except BodyError as error:
        log.warning("cannot decode the offset reset of topic %s from %s: %s", topic, address, error)
        return
    log.warning("%s resets the offsets of %d queues of topic %s", address, len(table), topic)
    await consumer.reset(topic, {q: max(n, 0) for q, n in table.items() if q.topic == topic})


def _offset_table(body: bytes) -> dict[MessageQueue, int]:
    if not body:
        return {}
    try:
        return fastjson.decode(body, ResetOffsetBody).offset_table
    except BodyError:
        rows = fastjson.decode(body, ResetOffsetBodyForC).offset_table
        return {MessageQueue(row.topic, row.broker_name, row.queue_id): row.offset for row in rows}


async def _consume(consumer: ManagedConsumer, request: PeerRequest) -> Response:
    result = await consumer.consume_directly(request.body, request.ext.get("brokerName", ""))
    return _response(result)


async def reset_queues(
    rebalancer: Rebalancer, offsets: OffsetStore, table: Mapping[MessageQueue, int]
) -> None:
    """Restart the assigned ones of these queues at the given offsets."""
    assigned = rebalancer.assigned.intersection(table)
    for queue in assigned:
        offsets.freeze(queue, table[queue])
    await asyncio.gather(*(rebalancer.restart_queue(queue) for queue in assigned))


async def try_handler(
    call: Callable[[], Awaitable[bool]], clock: Clock, *, orderly: bool
) -> ConsumeMessageDirectlyResult:
    """The result of one handler call: `call` returns whether the message is done, or raises."""
    started_ms = clock.monotonic_ms()
    remark = None
    try:
        result = "CR_SUCCESS" if await call() else "CR_LATER"
    except Exception as error:  # raised by the application
        log.warning("the handler failed for a directly consumed message", exc_info=error)
        result, remark = "CR_THROW_EXCEPTION", f"{type(error).__name__}: {error}"
    spent_ms = clock.monotonic_ms() - started_ms
    return ConsumeMessageDirectlyResult(
        order=orderly, consume_result=result, remark=remark, spent_time_mills=spent_ms
    )


# --- heartbeats and running info


def consumer_data(
    group: str,
    options: QueueConsumerOptions,
    consume_type: str,
    subscriptions: Iterable[SubscriptionData],
) -> ConsumerData:
    """A consumer in heartbeats; `group` has the namespace."""
    start_at = options.start_at
    where = "TIMESTAMP" if isinstance(start_at, datetime) else f"{start_at.upper()}_OFFSET"
    return ConsumerData(
        group_name=group,
        consume_type=consume_type,
        message_model=_message_model(options),
        consume_from_where=f"CONSUME_FROM_{where}",
        subscription_data_set=list(subscriptions),
    )


def common_settings(options: QueueConsumerOptions) -> dict[str, str]:
    """The settings of push and pull consumers in running info, by Java's names."""
    return {
        "consumerGroup": options.group,
        "messageModel": _message_model(options),
        "pullBatchSize": str(options.pull_batch),
        "pullThresholdForQueue": str(options.messages_max),
        "pullThresholdSizeForQueue": str(options.bytes_max // 2**20),
    }


def _message_model(options: QueueConsumerOptions) -> str:
    return "BROADCASTING" if options.broadcast else "CLUSTERING"


class LockAges(Protocol):
    """Ages of our queue locks (`orderly.OrderlyQueueLocks`)."""

    def age_ms(self, queue: MessageQueue) -> int | None:
        """The age of the lock; None if there is none."""


def running_info(
    session: Session,
    *,
    subscriptions: Iterable[SubscriptionData],
    process_queues: Iterable[ProcessQueue],
    offsets: OffsetStore,
    settings: Mapping[str, str],
    rates: Rates,
    started_ms: int,
    orderly: bool = False,
    concurrency: int = 0,
    locks: LockAges | None = None,
) -> ConsumerRunningInfo:
    """The state of a consumer for Java's tools; `settings` are its options by Java's names."""
    subscriptions = list(subscriptions)
    process_queues = list(process_queues)
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
        mq_table={w.queue: _queue_info(w, offsets, locks, session.clock) for w in process_queues},
        status_table={
            s.topic: rates.status(s.topic, (w for w in process_queues if w.queue.topic == s.topic))
            for s in subscriptions
        },
        user_consumer_info={
            field: value
            for w in process_queues
            for field, value in _reported(w, session.clock).items()
        },
    )


def queue_field(name: str, queue: MessageQueue) -> str:
    """The name of a field of `QUEUE_FIELDS` in the running info, for one queue."""
    return f"{name} {queue_text(queue)}"


def _reported(process_queue: ProcessQueue, clock: Clock) -> dict[str, str]:
    """What Java's running info has no field for. Other clients' tools print it as text."""
    queue, oldest = process_queue.queue, process_queue.oldest
    in_work, paused, failure = QUEUE_FIELDS
    reported = {queue_field(paused, queue): str(process_queue.paused).lower()}
    if oldest is not None and oldest.state == HANDLING and oldest.handling_since_ms:
        since_ms = clock.now_ms() - (clock.monotonic_ms() - oldest.handling_since_ms)
        reported[queue_field(in_work, queue)] = str(since_ms)
    problem = process_queue.pull_failure or process_queue.last_failure
    if problem is not None:
        reported[queue_field(failure, queue)] = problem
    return reported


def _queue_info(
    process_queue: ProcessQueue, offsets: OffsetStore, locks: LockAges | None, clock: Clock
) -> ProcessQueueInfo:
    oldest = process_queue.oldest
    age_ms = None if locks is None else locks.age_ms(process_queue.queue)
    return ProcessQueueInfo(
        commit_offset=offsets.get(process_queue.queue) or 0,
        cached_msg_min_offset=0 if oldest is None else oldest.queue_offset,
        cached_msg_max_offset=0 if oldest is None else max(process_queue.next_offset - 1, 0),
        cached_msg_count=process_queue.count,
        cached_msg_size_in_mib=process_queue.bytes // 2**20,
        locked=age_ms is not None,
        last_lock_timestamp=0 if age_ms is None else clock.now_ms() - age_ms,
        dropped=process_queue.dropped,
        last_pull_timestamp=process_queue.last_pull_ms,
    )


def _with_stacks(info: ConsumerRunningInfo, request: PeerRequest) -> ConsumerRunningInfo:
    if request.ext.get("jstackEnable", "").lower() != "true":
        return info
    return msgspec.structs.replace(info, jstack=_stacks())


def _stacks() -> str:
    """The stacks of all threads and tasks of this process."""
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
