"""`Producer` and `TransactionProducer`: the asynchronous ones for code that blocks."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from penstock.client.client_options import ClientKeywords
from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.accumulator import Batching
from penstock.client.producer.async_producer import GROUP_DEFAULT, AsyncProducer
from penstock.client.producer.outgoing import MESSAGE_BYTES_MAX
from penstock.client.producer.publish_info import Selector
from penstock.client.received_message import ReceivedMessage
from penstock.client.sync.loop_thread import Face, await_result, blocking, in_loop, loop_thread
from penstock.client.transaction.async_transaction_producer import (
    AsyncTransactionProducer,
    C,
    ProducerKeywords,
    Transaction,
)
from penstock.client.transaction.transaction_checks import Check
from penstock.client.transaction.transaction_handle import Decision, TransactionHandle

IN_FLIGHT_MAX = 10_000

Sends = TypeVar("Sends", bound=AsyncProducer)


class _ProducerFace(Face[Sends], Generic[Sends]):
    """What both producers do."""

    _in_flight_max = IN_FLIGHT_MAX

    def _reset(self) -> None:
        self._room = threading.Semaphore(self._in_flight_max)

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> SendReceipt:
        """Send and wait until a broker has it.

        It goes to the next of the topic's queues, to `queue`, to the one that messages with the
        same `ordering_key` go to, or to the one that `selector(queues, message)` returns.
        """
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
        selector: Selector | None = None,
        timeout_ms: int | None = None,
    ) -> "Future[SendReceipt]":
        """As `send`, without waiting: the future has the receipt or the error.

        This waits only while `in_flight_max` messages are without their acknowledgement.
        """
        inner = self._open()
        self._check_caller()
        room = self._room
        room.acquire()
        try:
            future = loop_thread().begin(
                inner.submit,
                message,
                queue=queue,
                ordering_key=ordering_key,
                selector=selector,
                timeout_ms=timeout_ms,
            )
        except BaseException:
            room.release()
            raise
        future.add_done_callback(lambda _: room.release())
        return future

    send_oneway = blocking(AsyncProducer.send_oneway)
    send_batch = blocking(AsyncProducer.send_batch)
    flush = blocking(AsyncProducer.flush)
    recall = blocking(AsyncProducer.recall)
    request = blocking(AsyncProducer.request)
    queues = blocking(AsyncProducer.queues)

    def reply(self, request: ReceivedMessage, body: bytes | str, **fields: Any) -> SendReceipt:
        """Answer a request; `fields` are those of Message."""
        return self._run(self._open().reply, request, body, **fields)


class Producer(_ProducerFace[AsyncProducer]):
    """Sends messages; `AsyncProducer` tells what the options mean.

    A child process that inherits one may go on using it: it makes connections of its own.
    """

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        group: str = GROUP_DEFAULT,
        retries: int = 2,
        retry_not_stored: bool = False,
        compression: str | None = "zlib",
        compress_above_bytes: int = 4096,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        avoid_faulty: bool = True,
        avoid_ms: int | None = None,
        batching: Batching | bool = False,
        in_flight_max: int = IN_FLIGHT_MAX,
        **client: Unpack[ClientKeywords],
    ) -> None:
        self._in_flight_max = in_flight_max
        super().__init__(
            partial(
                AsyncProducer,
                nameservers,
                group=group,
                retries=retries,
                retry_not_stored=retry_not_stored,
                compression=compression,
                compress_above_bytes=compress_above_bytes,
                message_bytes_max=message_bytes_max,
                avoid_faulty=avoid_faulty,
                avoid_ms=avoid_ms,
                batching=batching,
                in_flight_max=in_flight_max,
                **client,
            )
        )


class TransactionProducer(_ProducerFace[AsyncTransactionProducer]):
    """A producer whose messages may be tied to other work: see `AsyncTransactionProducer`.

    `options` are those of `Producer`. A check that is a plain function runs in a thread.
    """

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        group: str,
        check: Check | None = None,
        topics: Sequence[str] = (),
        **options: Unpack[ProducerKeywords],
    ) -> None:
        self._in_flight_max = options.get("in_flight_max", IN_FLIGHT_MAX)
        self._check = check
        self._of = partial(
            AsyncTransactionProducer, nameservers, group=group, topics=topics, **options
        )
        super().__init__(lambda: self._of(check=self._check))

    def checker(self, check: C) -> C:
        """Decorator: this function is the check."""
        self._check = check
        self._set_check(check)
        return check

    def transaction(
        self, message: Message, *, timeout_ms: int | None = None
    ) -> "BlockingTransaction":
        """A message that is committed at the end of a `with` block, and rolled back on errors."""
        return BlockingTransaction(self, self._open().transaction(message, timeout_ms=timeout_ms))

    _set_check = in_loop(AsyncTransactionProducer.checker)
    prepare = blocking(AsyncTransactionProducer.prepare)
    commit = blocking(AsyncTransactionProducer.commit)
    rollback = blocking(AsyncTransactionProducer.rollback)


class BlockingTransaction:
    """`with producer.transaction(message)`: commits at the end, rolls back on an exception.

    `decision` may be set inside: ROLLBACK without an exception, or UNKNOWN to leave the message to
    a later `commit` or `rollback` with `handle`, or to the check.
    """

    def __init__(self, producer: TransactionProducer, inner: Transaction) -> None:
        self._producer = producer
        self._inner = inner

    @property
    def handle(self) -> TransactionHandle:
        """What names the open transaction, in this process or another."""
        return self._inner.handle

    @property
    def message(self) -> Message:
        return self._inner.message

    @property
    def decision(self) -> Decision:
        return self._inner.decision

    @decision.setter
    def decision(self, decision: Decision) -> None:
        self._inner.decision = decision

    def __enter__(self) -> Self:
        self._producer._run(self._inner.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._producer._run(self._inner.__aexit__, kind, error, trace)
