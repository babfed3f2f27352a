"""Transactions: consumers see a message only after a local transaction has succeeded.

The message is sent as a half message, which is invisible to consumers; then the producer commits it
or rolls it back (END_TRANSACTION). Unlike in Java this is not a one-way request: the producer waits
for the response and retries, so a commit that returns has taken effect. Only "unknown" is sent
one-way, since Apache's broker does not respond to it.

If the broker gets no decision, because the process died or the network failed, it sends a
check-back (CHECK_TRANSACTION_STATE) to any producer of the group, and `check` answers it from the
application's own data.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, TypeVar

from penstock.client.client_options import takes_options
from penstock.client.client_session import MemberResponse
from penstock.client.messages import Message, MessageQueue, SendStatus
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.received_message import ReceivedMessage
from penstock.client.transaction.transaction_checks import Check, TransactionChecks
from penstock.client.transaction.transaction_handle import Decision, TransactionHandle
from penstock.client.transaction.transaction_options import TransactionProducerOptions
from penstock.clock import pause
from penstock.errors import (
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
RETRY_MS: Final = 100
"""Pause before a retry; it grows with each attempt."""
CLOSE_MS: Final = 3_000
"""How long `close` waits for running checks."""

C = TypeVar("C", bound=Check)

_STATES: Final = {
    Decision.COMMIT: "COMMIT_MESSAGE",
    Decision.ROLLBACK: "ROLLBACK_MESSAGE",
    Decision.UNKNOWN: "UNKNOW",
}


class Transaction:
    """`async with producer.transaction(message)`: commits at the end, rolls back on an exception.

    Set `decision` inside the block to ROLLBACK to roll back without an exception, or to UNKNOWN to
    leave the decision to a later `commit` or `rollback` with `handle`, or to the check.
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
        """The handle of the open transaction, for this process or another."""
        if self._handle is None:
            raise RuntimeError("the transaction is not started: use it in a `with` statement")
        return self._handle

    async def __aenter__(self) -> Self:
        self._handle = await self._producer.prepare(self.message, timeout_ms=self._timeout_ms)
        self._producer.local_transaction_started(self._handle)
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
            # The application's exception must not be replaced by ours.
            log.warning("cannot roll back the transaction: %s", failure)
        finally:
            producer.local_transaction_ended(handle)


class AsyncTransactionProducer(AsyncProducer):
    """A producer of transactional messages. The options are those of `TransactionProducerOptions`.

    `check` answers check-backs: a plain function (called in a thread) or a coroutine function. It
    is not called for `transaction` blocks that are still open in this process. Brokers send
    check-backs to producers that have sent them a heartbeat: brokers of `topics` and brokers that
    create topics get one soon after the start, others with the first message.
    """

    @takes_options(TransactionProducerOptions)
    def __init__(self, options: TransactionProducerOptions) -> None:
        self._configure(options)
        topics = options.topics
        self._check_topics = (topics,) if isinstance(topics, str) else tuple(topics)
        self._checks = TransactionChecks(self._session, options.check, self._trace_check)
        self._registers = False  # whether to register at brokers that create topics

    def checker(self, check: C) -> C:
        """Decorator: use this function as the check."""
        self._checks.use(check)
        return check

    async def start(self) -> None:
        """Start as any producer, and register at brokers for check-backs in the background."""
        if self._session.started:
            return
        try:
            await super().start()
        except BaseException:  # a route of `topics` failed: close the session again
            await super().close()
            raise
        self._registers = True
        self._session.spawn(self._register())

    async def _register(self) -> None:
        """A restarted process has to answer check-backs before it sends its first message."""
        try:
            route = await self._session.find_route(TOPIC_AUTO_CREATE)
        except PenstockError as error:
            log.info("%s: cannot register for check-backs yet: %s", self.group, error)
            return
        if route is not None:
            await self._session.send_heartbeats()

    async def close(self) -> None:
        """Wait for running checks, then close as any producer."""
        await self._checks.finish(CLOSE_MS)
        await super().close()

    # --- transactions

    def transaction(self, message: Message, *, timeout_ms: int | None = None) -> Transaction:
        """A message that is committed at the end of a `with` block, or rolled back on an error."""
        return Transaction(self, message, timeout_ms)

    async def prepare(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        ordering_key: str | None = None,
        timeout_ms: int | None = None,
    ) -> TransactionHandle:
        """Send a half message; any process can commit it or roll it back by the handle."""
        if message.delay_level or message.delay is not None or message.deliver_at is not None:
            raise MessageIllegal(
                "a transactional message cannot have a delay",
                hint="send it without a delay, or without a transaction",
            )
        if message.priority is not None:
            raise MessageIllegal(
                "a transactional message cannot have a priority",
                hint="send it without a priority, or without a transaction",
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
            self._session.spawn(self._session.send_heartbeats())  # registers us for check-backs
        try:
            log_offset = decode_offset_id(receipt.offset_id).offset
        except HeaderError as error:
            raise SendFailed(f"the response has no offset of the half message: {error}") from None
        handle = TransactionHandle(
            topic=self._session.with_namespace(message.topic),
            group=group,
            broker_name=receipt.queue.broker_name,
            address=self._session.master_address(receipt.queue.broker_name) or "",
            queue_offset=receipt.queue_offset,
            log_offset=log_offset,
            message_id=receipt.message_id,
            transaction_id=receipt.transaction_id or "",
        )
        if receipt.status is not SendStatus.SEND_OK:
            await self.end(handle, Decision.ROLLBACK, message, timeout_ms)
            raise SendFailed(
                f"the half message was stored with {receipt.status.name} and rolled back",
                hint="try again: the transaction was not started",
            )
        return handle

    async def commit(self, handle: TransactionHandle, *, timeout_ms: int | None = None) -> None:
        """Commit a half message: consumers receive it.

        Raises TransactionRolledBack, TransactionOpen, or another refusal of the broker.
        `timeout_ms` applies to each attempt. On Apache's brokers an attempt whose response was lost
        may have stored the message; the next attempt then stores it again.
        """
        await self.end(handle, Decision.COMMIT, None, timeout_ms)

    async def rollback(self, handle: TransactionHandle, *, timeout_ms: int | None = None) -> None:
        """Roll a half message back. Raises TransactionCommitted, or as `commit`."""
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
        if self._spans is None:
            await self._resolve(handle, decision, message, timeout_ms)
            return
        topic = self._session.without_namespace(handle.topic)
        with self._spans.ending(decision.name.lower(), topic, handle.message_id):
            await self._resolve(handle, decision, message, timeout_ms)

    async def _resolve(
        self,
        handle: TransactionHandle,
        decision: Decision,
        message: Message | None,
        timeout_ms: int | None,
    ) -> None:
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
                    f"cannot {decision.name.lower()} message {handle.message_id} of topic "
                    f"{handle.topic!r} at {handle.broker_name}: {failures[-1]}",
                    handle=str(handle),
                ) from failures[-1]
            await pause(session.clock, RETRY_MS * len(failures))
        keys = KEY_SEPARATOR.join(message.keys) if message is not None and message.keys else None
        self._trace_end(
            handle,
            decision,
            address,
            from_check=False,
            tags=message.tags if message is not None else None,
            keys=keys,
        )

    def local_transaction_started(self, handle: TransactionHandle) -> None:
        """Answer check-backs with "unknown" until `local_transaction_ended`."""
        self._checks.started(handle.message_id)

    def local_transaction_ended(self, handle: TransactionHandle) -> None:
        """Pass check-backs on to the check again."""
        self._checks.ended(handle.message_id)

    async def _address_of(self, handle: TransactionHandle, *, fresh: bool) -> str:
        """The current address of the half message's broker; from the handle if no route has it."""
        session = self._session
        if fresh or session.master_address(handle.broker_name) is None:
            try:
                await session.find_route(handle.topic)
            except PenstockError as error:
                log.info("cannot refresh the route of topic %s: %s", handle.topic, error)
        address = session.master_address(handle.broker_name) or handle.address
        if not address:
            raise NoRoute(f"the address of broker {handle.broker_name!r} is not known")
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

    # --- SessionMember

    def topics(self) -> Iterable[str]:
        yield from super().topics()
        yield from map(self._session.with_namespace, self._check_topics)
        if self._registers:  # not before: without a NameServer the start would fail
            yield TOPIC_AUTO_CREATE

    def handle_request(self, request: PeerRequest, address: str) -> MemberResponse | bool:
        if request.code == RequestCode.CHECK_TRANSACTION_STATE:
            group = self._session.with_namespace(self.group)
            return self._checks.handle_request(request, address, group)
        return super().handle_request(request, address)
