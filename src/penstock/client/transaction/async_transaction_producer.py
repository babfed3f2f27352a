"""Transactions: a message that its consumers see only once the work beside it has succeeded.

The message is sent as a half, which the broker keeps back; then the producer says what becomes of
it (END_TRANSACTION). That is a call whose answer is awaited and which is tried again, not a one-way
request as in Java: a commit that returns has happened. Only "unknown" is told one-way, since
Apache's broker does not answer it.

Where nothing is said, because the process died or the network failed, the broker asks any producer
of the group (CHECK_TRANSACTION_STATE), and `check` answers from what the application has stored.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, TypeVar, Unpack

from penstock.client.client_options import ClientKeywords
from penstock.client.client_session import MemberResponse
from penstock.client.messages import Message, MessageQueue, SendStatus
from penstock.client.producer.accumulator import Batching
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.received_message import ReceivedMessage
from penstock.client.transaction.transaction_checks import Check, Checks
from penstock.client.transaction.transaction_handle import Decision, TransactionHandle
from penstock.clock import pause
from penstock.errors import (
    BadSetting,
    HeaderError,
    MessageIllegal,
    NoRoute,
    PenstockError,
    SendFailed,
    TransactionOpen,
)
from penstock.transport.peer import PeerRequest
from penstock.wire.codes import (
    KEY_SEPARATOR,
    PROPERTY_MSG_REGION,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TRANSACTION_PREPARED,
    TOPIC_AUTO_CREATE,
    RequestCode,
    ResponseCode,
)
from penstock.wire.message_ids import decode_offset_id

__all__ = ["AsyncTransactionProducer", "Decision", "Transaction", "TransactionHandle"]

log = logging.getLogger(__name__)

ATTEMPTS_MAX: Final = 3
AGAIN_MS: Final = 100
CLOSE_MS: Final = 3_000

C = TypeVar("C", bound=Check)


class ProducerKeywords(ClientKeywords, total=False):
    """The keywords of every producer, beside its group."""

    retries: int
    retry_not_stored: bool
    compression: str | None
    compress_above_bytes: int
    message_bytes_max: int
    avoid_faulty: bool
    avoid_ms: int | None
    batching: Batching | bool
    in_flight_max: int


_STATES: Final = {
    Decision.COMMIT: "COMMIT_MESSAGE",
    Decision.ROLLBACK: "ROLLBACK_MESSAGE",
    Decision.UNKNOWN: "UNKNOW",
}


class Transaction:
    """`async with producer.transaction(message)`: commits at the end, rolls back on an exception.

    `decision` may be set inside: ROLLBACK without an exception, or UNKNOWN to leave the message to
    a later `commit` or `rollback` with `handle`, or to the check.
    """

    def __init__(
        self, producer: "AsyncTransactionProducer", message: Message, timeout_ms: int | None
    ) -> None:
        self._producer = producer
        self._timeout_ms = timeout_ms
        self._handle: TransactionHandle | None = None
        self.message = message
        self.decision = Decision.COMMIT

    @property
    def handle(self) -> TransactionHandle:
        """What names the open transaction, in this process or another."""
        if self._handle is None:
            raise RuntimeError("the transaction has not begun: use it with `with`")
        return self._handle

    async def __aenter__(self) -> Self:
        self._handle = await self._producer.prepare(self.message, timeout_ms=self._timeout_ms)
        self._producer.begun(self._handle)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handle, producer = self.handle, self._producer
        decision = self.decision if error is None else Decision.ROLLBACK
        try:
            await producer.end(handle, decision, self.message, self._timeout_ms)
        except PenstockError as failure:
            if error is None:
                raise
            # The application's own error is the one to be seen.
            log.warning("the transaction is not rolled back: %s", failure)
        finally:
            producer.left(handle)


class AsyncTransactionProducer(AsyncProducer):
    """A producer whose messages may be tied to other work.

    `check` is asked about messages whose fate no producer has told; it may be a plain function
    (called in a thread) or a coroutine function. It is not asked about blocks of `transaction` that
    are still open here. Brokers ask producers that they know: those of `topics`, and those where
    topics are made by sending to them, know this one soon after its start, others from its first
    message to them on.
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
        if not group:
            raise BadSetting(
                "a transaction producer without a group",
                hint="name one: its producers answer for each other's transactions",
            )
        super().__init__(nameservers, group=group, **options)
        self._checks = Checks(self._session, check, self._trace_check)
        self._check_topics = (topics,) if isinstance(topics, str) else tuple(topics)
        self._introduces = False

    def checker(self, check: C) -> C:
        """Decorator: this function is the check."""
        self._checks.check = check
        return check

    async def start(self) -> None:
        """As any producer; then brokers are told, beside, that they may ask."""
        if self._session.started:
            return
        try:
            await super().start()
        except BaseException:  # no NameServer tells of `topics`: nothing stays behind
            await super().close()
            raise
        self._introduces = True
        self._session.spawn(self._introduce())

    async def _introduce(self) -> None:
        """A process that comes back has to answer for its old transactions before it sends."""
        try:
            route = await self._session.find_route(TOPIC_AUTO_CREATE)
        except PenstockError as error:
            log.info("%s can't be asked about transactions yet: %s", self.group, error)
            return
        if route is not None:
            await self._session.send_heartbeats()

    async def close(self) -> None:
        """Finish checks that run, then as any producer."""
        await self._checks.finish(CLOSE_MS)
        await super().close()

    # --- transactions

    def transaction(self, message: Message, *, timeout_ms: int | None = None) -> Transaction:
        """A message that is committed at the end of a `with` block, and rolled back on errors."""
        return Transaction(self, message, timeout_ms)

    async def prepare(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        timeout_ms: int | None = None,
    ) -> TransactionHandle:
        """Send a message that stays hidden until `commit`; any process may end it by the handle."""
        if message.delay_level or message.delay is not None or message.deliver_at is not None:
            raise MessageIllegal(
                "a message in a transaction can't wait for its time besides",
                hint="send it without delay, or outside of a transaction",
            )
        group = self._session.with_namespace(self.group)
        half = replace(
            message,
            properties={
                **message.properties,
                PROPERTY_TRANSACTION_PREPARED: "true",
                PROPERTY_PRODUCER_GROUP: group,
            },
        )
        receipt = await self._sender.send(
            half, queue=queue, ordering_key=ordering_key, timeout_ms=timeout_ms, internal=True
        )
        if not self._session.is_registered_at(receipt.queue.broker_name):
            self._session.spawn(self._session.send_heartbeats())  # so that it can ask us
        try:
            log_offset = decode_offset_id(receipt.offset_id).offset
        except HeaderError as error:
            raise SendFailed(f"the broker's answer names no place of the half: {error}") from None
        handle = TransactionHandle(
            topic=self._session.with_namespace(message.topic),
            group=group,
            broker_name=receipt.queue.broker_name,
            address=self._session.address_of(receipt.queue.broker_name) or "",
            queue_offset=receipt.queue_offset,
            log_offset=log_offset,
            message_id=receipt.message_id,
            transaction_id=receipt.transaction_id or "",
        )
        if receipt.status is not SendStatus.SEND_OK:
            await self.end(handle, Decision.ROLLBACK, message, timeout_ms)
            raise SendFailed(
                f"the half was not stored safely ({receipt.status.name}), so it was rolled back",
                hint="nothing was begun: try again",
            )
        return handle

    async def commit(self, handle: TransactionHandle, *, timeout_ms: int | None = None) -> None:
        """Let consumers have the message.

        Raises TransactionRolledBack, TransactionOpen, or what else the broker says. `timeout_ms` is
        for each attempt. On Apache's brokers an attempt whose answer was lost may have stored the
        message already; the next one stores it again.
        """
        await self.end(handle, Decision.COMMIT, None, timeout_ms)

    async def rollback(self, handle: TransactionHandle, *, timeout_ms: int | None = None) -> None:
        """Let nobody have it. Raises TransactionCommitted, TransactionOpen, or as `commit`."""
        await self.end(handle, Decision.ROLLBACK, None, timeout_ms)

    async def end(
        self,
        handle: TransactionHandle,
        decision: Decision,
        message: Message | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """Commit or roll back; UNKNOWN leaves the transaction open. `message` is for the trace."""
        if decision is Decision.UNKNOWN:
            return
        session = self._session
        session.check_alive()
        failures: list[PenstockError] = []
        while True:
            try:
                address = await self._address_of(handle, fresh=bool(failures))
                await session.call(
                    session.peer(address),
                    RequestCode.END_TRANSACTION,
                    handle.end_fields(decision, from_check=False),
                    timeout_ms=timeout_ms,
                )
                break
            except PenstockError as error:
                replica = error.answer_code == ResponseCode.SLAVE_NOT_AVAILABLE
                if not error.retry and not replica:
                    raise
                failures.append(error)
            if len(failures) >= ATTEMPTS_MAX:
                raise TransactionOpen(
                    f"{handle.broker_name} can't be told to {decision.name.lower()} the message "
                    f"{handle.message_id} of {handle.topic!r}: {failures[-1]}",
                    handle=str(handle),
                ) from failures[-1]
            await pause(session.clock, AGAIN_MS * len(failures))
        keys = KEY_SEPARATOR.join(message.keys) if message is not None and message.keys else None
        self._trace_end(
            handle,
            decision,
            address,
            from_check=False,
            tags=message.tags if message is not None else None,
            keys=keys,
        )

    def begun(self, handle: TransactionHandle) -> None:
        """The work beside a message begins here: until `left`, checks are told "unknown"."""
        self._checks.open[handle.message_id] += 1

    def left(self, handle: TransactionHandle) -> None:
        """It has ended, and what became of it is told or not."""
        self._checks.open -= Counter((handle.message_id,))

    async def _address_of(self, handle: TransactionHandle, *, fresh: bool) -> str:
        """Where the broker that keeps a half listens now; by the handle if no route tells."""
        session = self._session
        if fresh or session.address_of(handle.broker_name) is None:
            try:
                await session.find_route(handle.topic)
            except PenstockError as error:
                log.info("no fresh route of %s: %s", handle.topic, error)
        address = session.address_of(handle.broker_name) or handle.address
        if not address:
            raise NoRoute(f"no address is known of the broker {handle.broker_name!r}")
        return address

    def _trace_end(
        self,
        handle: TransactionHandle,
        decision: Decision,
        address: str,
        *,
        from_check: bool,
        tags: str | None,
        keys: str | None,
        region: str | None = None,
    ) -> None:
        if self._tracer is not None:
            self._tracer.ended(
                topic=self._session.without_namespace(handle.topic),
                message_id=handle.message_id,
                tags=tags,
                keys=keys,
                address=address,
                transaction_id=handle.transaction_id or None,
                state=_STATES[decision],
                from_check=from_check,
                region=region,
            )

    def _trace_check(
        self, handle: TransactionHandle, decision: Decision, message: ReceivedMessage, address: str
    ) -> None:
        self._trace_end(
            handle,
            decision,
            address,
            from_check=True,
            tags=message.tags,
            keys=KEY_SEPARATOR.join(message.keys) or None,
            region=message.properties.get(PROPERTY_MSG_REGION),
        )

    # --- a member of the session

    def topics(self) -> Iterable[str]:
        yield from super().topics()
        yield from map(self._session.with_namespace, self._check_topics)
        if self._introduces:  # not sooner: without a NameServer the start would fail
            yield TOPIC_AUTO_CREATE

    def handle_request(self, ask: PeerRequest, address: str) -> MemberResponse | bool:
        if ask.code == RequestCode.CHECK_TRANSACTION_STATE:
            return self._checks.handle_request(
                ask, address, self._session.with_namespace(self.group)
            )
        return super().handle_request(ask, address)
