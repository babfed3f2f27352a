"""Builds the parts of a push consumer when it starts: dispatch, locks, rebalancer, diagnosis."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.client.client_session import Session
from penstock.client.consumer.consumer_options import ConsumerOptions
from penstock.client.consumer.diagnosis import DiagnosedConsumer, Diagnosis
from penstock.client.consumer.dispatch.completion import Completion
from penstock.client.consumer.dispatch.concurrent import ConcurrentDispatch, Dispatch
from penstock.client.consumer.dispatch.handler_calls import HandlerCalls
from penstock.client.consumer.dispatch.handlers import Handlers, Retry
from penstock.client.consumer.dispatch.message_iterator import IteratorDispatch
from penstock.client.consumer.dispatch.orderly import OrderlyDispatch, OrderlyQueueLocks
from penstock.client.consumer.dispatch.send_back import SendBack
from penstock.client.consumer.offset_store import OffsetStore
from penstock.client.consumer.rebalance import RebalanceListener, Rebalancer
from penstock.client.messages import MessageQueue
from penstock.client.received_message import ReceivedMessage
from penstock.client.telemetry.span_creation import make_spans
from penstock.client.trace.trace_writer import Tracer


class StartedConsumer(RebalanceListener, DiagnosedConsumer, Protocol):
    """The consumer that the parts belong to."""

    @property
    def offsets(self) -> OffsetStore:
        """The committed offsets."""

    def resubmit(self, message: ReceivedMessage) -> None:
        """Dispatch a message again."""

    def lock_lost(self, queue: MessageQueue) -> None:
        """Another member has, or may have had, the lock of a queue."""


@dataclass(frozen=True, slots=True)
class ConsumerParts:
    """The parts of a started consumer."""

    completion: Completion
    calls: HandlerCalls
    dispatch: Dispatch
    iterator_dispatch: IteratorDispatch | None
    """Set if there are no handlers: messages are for `async for`."""
    locks: OrderlyQueueLocks | None
    rebalancer: Rebalancer
    diagnosis: Diagnosis


def make_parts(
    session: Session,
    options: ConsumerOptions,
    handlers: Handlers,
    consumer: StartedConsumer,
    tracer: Tracer | None,
) -> ConsumerParts:
    """The parts of a consumer with these options and handlers."""
    send_back = locks = None
    if not options.broadcast:
        send_back = SendBack(session, consumer.group, retries_max=options.retries)
        if options.orderly:
            locks = OrderlyQueueLocks(session, consumer.group, consumer.lock_lost)
    completion = Completion(
        session,
        options.group,
        send_back=send_back,
        retries_max=options.retries,
        resubmit=consumer.resubmit,
    )
    name = f"penstock-{options.group}"
    spans = make_spans(session, group=options.group, broadcast=options.broadcast)
    calls = HandlerCalls(
        handlers, completion, tracer, name=name, threads=options.concurrency, spans=spans
    )
    iterator_dispatch = None if handlers else IteratorDispatch(session, completion, spans)
    dispatch: Dispatch
    if options.orderly:
        handle: Callable[[list[ReceivedMessage]], Awaitable[Retry | None]] = calls.handle
        if iterator_dispatch is not None:
            handle = iterator_dispatch.handle
        dispatch = OrderlyDispatch(
            session,
            consumer.group,
            consumer.offsets,
            handle=handle,
            handler_of=handlers.find,
            locks=locks,
            send_back=send_back,
            handle_batch=options.handle_batch if iterator_dispatch is None else 1,
            retries_max=options.retries,
            concurrency=options.concurrency,
        )
    elif iterator_dispatch is not None:
        dispatch = iterator_dispatch
    else:
        dispatch = ConcurrentDispatch(
            session,
            handlers,
            calls,
            completion,
            name=name,
            concurrency=options.concurrency,
            handle_batch=options.handle_batch,
        )
    rebalancer = _make_rebalancer(session, options, consumer, locks)
    diagnosis = Diagnosis(session, consumer, rebalancer, locks, completion.failures)
    return ConsumerParts(
        completion, calls, dispatch, iterator_dispatch, locks, rebalancer, diagnosis
    )


def _make_rebalancer(
    session: Session,
    options: ConsumerOptions,
    consumer: StartedConsumer,
    locks: OrderlyQueueLocks | None,
) -> Rebalancer:
    return Rebalancer(
        session,
        consumer.group,
        consumer,
        consumer.offsets,
        broadcast=options.broadcast,
        strategy=options.strategy,
        start_at=options.start_at,
        locks=locks,
        rebalance_ms=options.rebalance_ms,
    )
