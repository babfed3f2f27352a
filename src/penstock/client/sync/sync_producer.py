"""`Producer` and `TransactionProducer`, the synchronous producers."""

from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from penstock.client.client_options import same_arguments_as
from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.producer.publish_info import QueueSelector
from penstock.client.received_message import ReceivedMessage
from penstock.client.sync.direct_sends import DirectSends
from penstock.client.sync.in_flight_gate import InFlightGate
from penstock.client.sync.loop_thread import await_result, loop_thread
from penstock.client.sync.sync_client import SyncClient, blocking, in_loop
from penstock.client.transaction.async_transaction_producer import (
    AsyncTransactionProducer,
    C,
    Transaction,
)
from penstock.client.transaction.transaction_checks import Check
from penstock.client.transaction.transaction_handle import Decision, TransactionHandle

ProducerT = TypeVar("ProducerT", bound=AsyncProducer)


class _SyncProducer(SyncClient[ProducerT], Generic[ProducerT]):
    """Methods of both producers."""

    def _reset_state(self) -> None:
        self._gate = InFlightGate(self._client.options.in_flight_max)
        self._direct = DirectSends(self._client, self._gate)

    def _mark_closed(self) -> bool:
        closes = super()._mark_closed()
        if closes:
            self._direct.close(self._client.options.timeout_ms)
        return closes

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> SendReceipt:
        """Send a message and wait for the acknowledgement.

        It goes to the next queue of the topic in turn, to `queue`, to the queue of its
        `ordering_key`, or to the queue that `selector(queues, message)` returns.
        """
        self._started_client()
        self._check_caller()
        if queue is None and selector is None:
            receipt = self._direct.send(message, ordering_key, timeout_ms)
            if receipt is not None:
                return receipt
        return await_result(
            self.submit(
                message,
                queue=queue,
                ordering_key=ordering_key,
                selector=selector,
                timeout_ms=timeout_ms,
            )
        )

    def submit(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> "Future[SendReceipt]":
        """Send a message without waiting; returns the future of the receipt.

        It waits only while `in_flight_max` messages are in flight.
        """
        client = self._started_client()
        self._check_caller()
        gate = self._gate
        gate.enter()
        try:
            future = loop_thread().submit(
                self._in_context(client.submit),
                message,
                queue=queue,
                ordering_key=ordering_key,
                selector=selector,
                timeout_ms=timeout_ms,
            )
        except BaseException:
            gate.leave()
            raise
        future.add_done_callback(lambda _: gate.leave())
        return future

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: QueueSelector | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """Send a message without an acknowledgement; returns when the request is written."""
        self._direct.forbid()
        self._run(
            self._started_client().send_oneway,
            message,
            queue=queue,
            ordering_key=ordering_key,
            selector=selector,
            timeout_ms=timeout_ms,
        )

    def flush(self) -> None:
        """Return when every message submitted before is acknowledged or has failed."""
        client = self._started_client()
        self._check_caller()
        self._gate.wait_for_direct()
        self._run(client.flush)

    send_batch = blocking(AsyncProducer.send_batch)
    recall = blocking(AsyncProducer.recall)
    request = blocking(AsyncProducer.request)
    queues = blocking(AsyncProducer.queues)

    def reply(self, request: ReceivedMessage, body: bytes | str, **fields: Any) -> SendReceipt:
        """Reply to a request; `fields` are those of Message."""
        return self._run(self._started_client().reply, request, body, **fields)


class Producer(_SyncProducer[AsyncProducer]):
    """Sends messages. The options are described at `ProducerOptions`.

    A child process can use an inherited producer: it opens its own connections.
    """

    @same_arguments_as(AsyncProducer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(partial(AsyncProducer, *args, **kwargs))


class TransactionProducer(_SyncProducer[AsyncTransactionProducer]):
    """A producer of transactional messages; see `AsyncTransactionProducer`.

    The options are described at `TransactionProducerOptions`. A check that is not a coroutine runs
    in a thread.
    """

    @same_arguments_as(AsyncTransactionProducer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._check: Check | None = kwargs.get("check")
        super().__init__(
            lambda: AsyncTransactionProducer(*args, **{**kwargs, "check": self._check})
        )

    def checker(self, check: C) -> C:
        """Decorator: use this function as the check."""
        self._check = check
        self._set_check(check)
        return check

    def transaction(self, message: Message, *, timeout_ms: int | None = None) -> "SyncTransaction":
        """A message that is committed at the end of a `with` block, or rolled back on an error."""
        client = self._started_client()
        return SyncTransaction(self, client.transaction(message, timeout_ms=timeout_ms))

    _set_check = in_loop(AsyncTransactionProducer.checker)
    prepare = blocking(AsyncTransactionProducer.prepare)
    commit = blocking(AsyncTransactionProducer.commit)
    rollback = blocking(AsyncTransactionProducer.rollback)


class SyncTransaction:
    """`with producer.transaction(message)`: commits at the end, rolls back on an exception.

    Set `decision` inside the block to ROLLBACK to roll back without an exception, or to UNKNOWN to
    leave the decision to a later `commit` or `rollback` with `handle`, or to the check.
    """

    def __init__(self, producer: TransactionProducer, transaction: Transaction) -> None:
        self._producer = producer
        self._transaction = transaction

    @property
    def handle(self) -> TransactionHandle:
        """The handle of the open transaction, for this process or another."""
        return self._transaction.handle

    @property
    def message(self) -> Message:
        return self._transaction.message

    @property
    def decision(self) -> Decision:
        return self._transaction.decision

    @decision.setter
    def decision(self, decision: Decision) -> None:
        self._transaction.decision = decision

    def __enter__(self) -> Self:
        self._producer._run(self._transaction.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._producer._run(self._transaction.__aexit__, kind, error, trace)
