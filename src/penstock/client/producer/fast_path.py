"""The fast path of a send: when everything is known, the request is written at once.

This code runs for every message and creates no task. Sends that have to wait, and failures, are
handled by `sending.Sender`, a subclass.
"""

import asyncio
from asyncio import _get_running_loop
from collections.abc import Callable
from os import getpid
from typing import TYPE_CHECKING

from penstock.client.messages import Message, MessageQueue, SendStatus
from penstock.client.producer.broker_latency import SLOW_MS, BrokerFaults
from penstock.client.producer.send_codec import (
    PendingSend,
    SendResult,
    SendTarget,
    encode_properties,
    plain_text,
    put_send,
)
from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.transport.pending_calls import PendingCalls

if TYPE_CHECKING:
    from penstock.client.producer.outgoing import MessageBatch, Packer
    from penstock.client.producer.publish_info import TargetSelector, TopicPublishInfo
    from penstock.client.trace.trace_writer import Tracer
    from penstock.transport.peer import PeerConnection

UNSENT_BYTES_MAX = 8 * 1024 * 1024
"""Sends are deferred while a connection has more unsent bytes than this."""

_UNSENT_BYTES_MAX = UNSENT_BYTES_MAX
_SLOW_MS = SLOW_MS
_OK = SendStatus.SEND_OK

_int = int  # hides annotations from the compiler, keeps them for mypy
_str = str
_bool = bool


class FlushGroup:
    """Sends between two calls of `flush`."""

    def __init__(self) -> None:
        self.count: int = 0  # sends of this group that are in flight
        self.done: asyncio.Future[None] | None = None  # set by a flush that waits for count == 0


class InFlightCounter:
    """Counts messages and bytes in flight; a subclass has the waiters and the limits' errors."""

    def __init__(self, count_max: _int, bytes_max: _int) -> None:
        self.count: int = 0  # messages in flight; a batch counts as one
        self.byte_count: int = 0  # bytes of their bodies
        self.count_max: int = count_max
        self.bytes_max: int = bytes_max
        self.flush_group: FlushGroup = FlushGroup()  # of new sends, until the next flush
        self.has_waiters: bool = False  # a send waits for the count to drop

    def add(self, length: _int) -> FlushGroup:
        """Count one more; raises TooMuchInFlight at a limit."""
        if self.count >= self.count_max or self.byte_count >= self.bytes_max:
            self.raise_full()
        self.count += 1
        self.byte_count += length
        flush_group = self.flush_group
        flush_group.count += 1
        return flush_group

    def remove(self, flush_group: FlushGroup, length: _int) -> None:
        """Count one less: it is acknowledged or has failed."""
        self.count -= 1
        self.byte_count -= length
        flush_group.count -= 1
        done = flush_group.done
        if flush_group.count == 0 and done is not None and not done.done():
            done.set_result(None)
        if self.has_waiters:
            self.wake_waiter()

    def raise_full(self) -> None:
        """Raise TooMuchInFlight."""
        raise NotImplementedError

    def wake_waiter(self) -> None:
        """Let one waiter continue."""
        raise NotImplementedError


class RoundRobin:
    """Uses the queues of a topic in turn. Valid as long as the route that it was made from."""

    def __init__(self, targets: tuple[SendTarget, ...], start: _int) -> None:
        self.targets: tuple[SendTarget, ...] = targets
        self.queues: tuple[MessageQueue, ...] = tuple(target.queue for target in targets)
        self.count: int = len(targets)
        self.single_broker: bool = len({target.broker_name for target in targets}) == 1
        self.position: int = start  # index of the last target used, not reduced modulo count

    def next(self, faults: BrokerFaults, last_broker: str | None) -> SendTarget:
        """The next queue; with several brokers one of a broker that is not avoided."""
        self.position += 1
        if self.single_broker:
            return self.targets[self.position % self.count]
        # Not read again: a synchronous producer may do this in two threads.
        position = faults.choose(self.queues, self.position, last_broker=last_broker)
        self.position = position
        return self.targets[position]


class FastPath:
    """Encodes messages and writes their requests."""

    def __init__(
        self, clock: Clock, counter: InFlightCounter, faults: BrokerFaults, timeout_ms: _int
    ) -> None:
        self.clock: Clock = clock
        self.counter: InFlightCounter = counter
        self.faults: BrokerFaults = faults
        self.timeout_ms: int = timeout_ms  # default of all attempts of one send together
        self.retry_not_stored: bool = False  # the producer's option
        self.publish_infos: dict[str, TopicPublishInfo] = {}  # by topic; dropped with the route
        self.deferred_counts: dict[str, int] = {}  # topic → sends whose request is not written yet
        self.faulty_brokers: set[str] = set()  # names with a reported failure or slow response
        # Set by `Sender.start`, valid until it is closed.
        self.open: bool = False
        self.pid: int = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.packer: Packer | None = None
        self.create_future: Callable[[], asyncio.Future[SendResult]] | None = None
        self.tracer: Tracer | None = None

    def start_send(
        self,
        message: Message,
        select: "TargetSelector | None",
        ordering_key: str | None,
        timeout_ms: int | None,
        internal: _bool,
        traced: _bool,
    ) -> "asyncio.Future[SendResult]":
        """Send a message; returns the future of its receipt. `select` binds it to a queue."""
        pending = self.make_pending(message, ordering_key, timeout_ms, internal)
        pending.traced = traced and self.tracer is not None
        pending.select = select
        self.write_or_defer(pending)
        return pending.future

    def make_pending(
        self, message: Message, ordering_key: str | None, timeout_ms: int | None, internal: _bool
    ) -> PendingSend:
        """Encode a message without sending it; raises MessageIllegal."""
        if not self.open or _get_running_loop() is not self.loop or self.pid != getpid():
            self.raise_unusable()
        packer = self.packer
        assert packer is not None
        topic = message.topic
        if type(topic) is not str:
            topic = plain_text("the topic", topic)
        pending = self.new_pending(message, topic, timeout_ms)
        body = message.body
        if type(body) is bytes and 0 < len(body) < packer.plain_bytes:
            pending.body = body
        else:
            packer.put_body(pending, message)
        if internal:
            message = packer.internal(pending, message)
        message_id = pending.message_id = packer.next_id(pending.born_ms)
        more = packer.common_properties
        if (
            ordering_key is not None
            or message.delay_level
            or message.delay is not None
            or message.deliver_at is not None
            or message.priority is not None
        ):
            more = packer.special_properties(message, ordering_key)
        pending.properties = encode_properties(message, message_id, more, internal)
        if message.flag:
            pending.flag = packer.flag(message)
        return pending

    def new_pending(
        self, message: "Message | MessageBatch", topic: _str, timeout_ms: int | None
    ) -> PendingSend:
        """A pending send whose request is not encoded yet."""
        limit_ms = self.timeout_ms if timeout_ms is None else timeout_ms
        clock = self.clock
        create_future = self.create_future
        assert create_future is not None
        return PendingSend(
            self,
            create_future(),
            message,
            topic,
            clock.now_ms(),
            limit_ms,
            clock.monotonic_ms() + limit_ms,
        )

    def write_or_defer(self, pending: PendingSend) -> None:
        """Write the request now if route and connection are ready, else as soon as they are."""
        topic = pending.topic
        round_robin = self.publish_infos.get(topic)
        if (
            round_robin is not None
            and topic not in self.deferred_counts
            and not pending.uncompressed
        ):
            select = pending.select
            target = round_robin.next(self.faults, None) if select is None else select(round_robin)
            peer = target.peer
            calls = None if peer is None else peer.calls
            if calls is not None and (not calls.paused or unsent_bytes(target) < _UNSENT_BYTES_MAX):
                flush_group = self.counter.add(len(pending.body))
                pending.flush_group = flush_group
                try:
                    self.write_request(calls, pending, target)
                except BaseException:  # not written, and the caller gets the error
                    self.counter.remove(flush_group, len(pending.body))
                    raise
                return
            pending.target = target  # this queue's turn is used: keep it for the deferred attempt
        self.defer(pending)

    def write_request(self, calls: PendingCalls, pending: PendingSend, target: SendTarget) -> None:
        """Register the call and write its request."""
        pending.target = target
        pending.sent_ms = pending.deadline_ms - pending.timeout_ms
        if pending.failures is not None or pending.deferred:
            pending.sent_ms = self.clock.monotonic_ms()
        opaque = calls.expect(pending)
        try:
            self.write_frame(calls, pending, target, opaque, 0)
        except BaseException:  # no response will come
            calls.pending.pop(opaque, None)
            raise

    def write_frame(
        self,
        calls: PendingCalls,
        pending: PendingSend,
        target: SendTarget,
        opaque: _int,
        command_flag: _int,
    ) -> None:
        """Write the request with this opaque."""
        if target.signs:
            self.write_signed(pending, target, opaque, command_flag)
        elif put_send(calls.output, pending, target, opaque, command_flag):
            calls.flush_soon()
        else:
            connection_of(target).write(pending.body)

    def send_succeeded(self, pending: PendingSend, result: SendResult, status: SendStatus) -> None:
        """A broker has stored the message or the batch."""
        latency_ms = pending.answered_ms - pending.sent_ms
        target = pending.target
        if latency_ms >= _SLOW_MS or (
            self.faulty_brokers and target is not None and target.broker_name in self.faulty_brokers
        ):
            self.report_latency(pending, latency_ms)
        if (
            status is not _OK
            and self.retry_not_stored
            and self.retry_if_not_stored(pending, result, status)
        ):
            return
        flush_group = pending.flush_group
        assert flush_group is not None
        self.counter.remove(flush_group, len(pending.body))
        future = pending.future
        if not future.done():
            future.set_result(result)
        if pending.traced:
            self.trace(pending, result)

    # --- implemented by Sender

    def send_failed(self, pending: PendingSend, error: PenstockError) -> None:
        """An attempt has failed."""
        raise NotImplementedError

    def raise_unusable(self) -> None:
        """Raise the reason why nothing can be sent."""
        raise NotImplementedError

    def defer(self, pending: PendingSend) -> None:
        """Write the request in a task, as soon as route and connection are ready."""
        raise NotImplementedError

    def write_signed(
        self, pending: PendingSend, target: SendTarget, opaque: _int, command_flag: _int
    ) -> None:
        """Write a request that has to be signed."""
        raise NotImplementedError

    def report_latency(self, pending: PendingSend, latency_ms: _int) -> None:
        """Tell the broker statistics about a slow response, or a response of a faulty broker."""
        raise NotImplementedError

    def retry_if_not_stored(
        self, pending: PendingSend, result: SendResult, status: SendStatus
    ) -> _bool:
        """Retry a send whose status is not SEND_OK; whether a retry was started."""
        raise NotImplementedError

    def trace(self, pending: PendingSend, result: SendResult) -> None:
        """Write the trace of a stored message or batch."""
        raise NotImplementedError


def connection_of(target: SendTarget) -> "PeerConnection":
    """The open connection to the broker of a queue."""
    peer = target.peer
    assert peer is not None
    connection = peer.connection
    assert connection is not None
    return connection


def unsent_bytes(target: SendTarget) -> _int:
    """Bytes that are not sent yet on the connection to the broker of a queue."""
    return connection_of(target).unsent
