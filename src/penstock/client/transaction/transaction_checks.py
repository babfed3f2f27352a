"""Check-backs: a broker asks for the state of a transaction, the application's check decides.

Brokers repeat a check-back with another producer of the group until they get a decision. So a
check-back that is lost, fails or is dropped does no harm.
"""

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from penstock.client.client_session import MemberResponse, Session
from penstock.client.handler_failures import HandlerFailures
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.client.transaction.transaction_handle import Decision, TransactionHandle
from penstock.clock import finish_within
from penstock.errors import HeaderError, PenstockError, WireError
from penstock.transport.peer import PeerRequest
from penstock.wire.codes import PROPERTY_PRODUCER_GROUP, RequestCode
from penstock.wire.java_numbers import parse_nonnegative

log = logging.getLogger(__name__)

CHECKS_MAX: Final = 2_000
"""Most check-backs that wait or run, as in RocketMQ's client."""
CHECK_THREADS_MAX: Final = 4
"""Most checks in threads at the same time (those that are plain functions)."""

Outcome: TypeAlias = Decision | bool | None
Check: TypeAlias = Callable[[ReceivedMessage], Outcome | Awaitable[Outcome]]
"""State of the local transaction: True or COMMIT, False or ROLLBACK, None or UNKNOWN."""
OnAnswered: TypeAlias = Callable[[TransactionHandle, Decision, ReceivedMessage, str], object]
"""(handle, decision, message, address): called after the broker at that address was answered."""


class TransactionChecks:
    """Check-backs to one producer group that wait or run."""

    def __init__(self, session: Session, check: Check | None, on_answered: OnAnswered) -> None:
        self._session = session
        self._check = check
        self._failures = HandlerFailures(session.clock, "check")
        self._on_answered = on_answered
        self._running: dict[str, asyncio.Future[None]] = {}
        self._open: Counter[str] = Counter()  # ids of messages with a running local transaction
        self._threads = asyncio.Semaphore(CHECK_THREADS_MAX)

    def use(self, check: Check) -> None:
        """Use this check from now on."""
        self._check = check

    def started(self, message_id: str) -> None:
        """A local transaction has started: check-backs are answered with "unknown"."""
        self._open[message_id] += 1

    def ended(self, message_id: str) -> None:
        """The local transaction has ended: check-backs go to the check."""
        self._open -= Counter((message_id,))

    def handle_request(
        self, request: PeerRequest, address: str, group: str
    ) -> MemberResponse | bool:
        """Handle CHECK_TRANSACTION_STATE; False if the message is of another group."""
        try:
            [message] = decode_records(
                request.body,
                request.ext.get("bname", ""),
                namespace=self._session.options.namespace,
                received_ms=self._session.clock.now_ms(),
            )
            handle = _handle_of(request, message, address)
        except (WireError, ValueError) as error:
            log.warning("cannot decode a check-back from %s: %s", address, error)
            return None
        if handle.group != group:
            return False
        if handle.message_id in self._running:
            return None  # answered by the check that is running
        if len(self._running) >= CHECKS_MAX:
            log.warning("%d check-backs are waiting; dropping further ones", CHECKS_MAX)
            return None
        done = self._running[handle.message_id] = asyncio.get_running_loop().create_future()
        return self._answer(handle, message, address, done)

    async def finish(self, ms: int) -> None:
        """Wait for running checks, at most this long."""
        if not self._running:
            return
        try:
            work = asyncio.wait(list(self._running.values()))
            await finish_within(self._session.clock, ms, work)
        except TimeoutError:
            log.info("%d checks are still running; brokers will ask again", len(self._running))

    async def _answer(
        self,
        handle: TransactionHandle,
        message: ReceivedMessage,
        address: str,
        done: asyncio.Future[None],
    ) -> None:
        try:
            decision = await self._decide(message)
            if decision is not None:
                await self._send_decision(handle, decision, message, address)
        finally:
            del self._running[handle.message_id]
            done.set_result(None)

    async def _decide(self, message: ReceivedMessage) -> Decision | None:
        """The decision of the check; None if there is no check."""
        if self._open[message.message_id]:
            return Decision.UNKNOWN
        check = self._check
        if check is None:
            self._failures.report(
                log,
                message.topic,
                f"cannot answer the check-back of message {message.message_id} of topic"
                f" {message.topic}: there is no check; give one as check=… or with"
                " @producer.checker",
                "there is none",
            )
            return None
        try:
            if inspect.iscoroutinefunction(check):
                outcome = await check(message)
            else:
                async with self._threads:
                    outcome = await asyncio.to_thread(check, message)
                if inspect.isawaitable(outcome):
                    outcome = await outcome
        except Exception as error:  # raised by the application
            self._failures.report(
                log,
                message.topic,
                f"the check failed for message {message.message_id} of topic {message.topic}",
                error,
            )
            return Decision.UNKNOWN
        if outcome is None:
            return Decision.UNKNOWN
        if isinstance(outcome, bool):
            return Decision.COMMIT if outcome else Decision.ROLLBACK
        if isinstance(outcome, Decision):
            return outcome
        self._failures.report(
            log,
            message.topic,
            f"the check returned a {type(outcome).__name__} for message {message.message_id} of"
            f" topic {message.topic}: return a Decision or a bool",
            f"it returned a {type(outcome).__name__}",
        )
        return Decision.UNKNOWN

    async def _send_decision(
        self, handle: TransactionHandle, decision: Decision, message: ReceivedMessage, address: str
    ) -> None:
        """Answer the broker; if that fails, the broker asks again."""
        session = self._session
        fields, peer = handle.end_fields(decision, from_check=True), session.peer(address)
        timeout_ms = session.options.timeout_ms
        try:
            if decision is Decision.UNKNOWN:
                await peer.oneway(RequestCode.END_TRANSACTION, fields, timeout_ms=timeout_ms)
            else:
                await session.call(peer, RequestCode.END_TRANSACTION, fields)
        except PenstockError as error:
            log.warning("cannot answer the check-back of message %s: %s", handle.message_id, error)
            return
        self._on_answered(handle, decision, message, address)


def _handle_of(request: PeerRequest, message: ReceivedMessage, address: str) -> TransactionHandle:
    """The handle of the half message of a check-back; raises HeaderError for bad offsets."""
    message_id = message.message_id
    queue_offset = parse_nonnegative(request.ext.get("tranStateTableOffset", ""))
    log_offset = parse_nonnegative(request.ext.get("commitLogOffset", ""))
    if queue_offset is None or log_offset is None:
        raise HeaderError("it has no valid offsets of the half message")
    return TransactionHandle(
        topic=message.stored_topic,
        group=message.properties.get(PROPERTY_PRODUCER_GROUP, ""),
        broker_name=request.ext.get("bname", ""),
        address=address,
        queue_offset=queue_offset,
        log_offset=log_offset,
        message_id=message_id,
        transaction_id=request.ext.get("transactionId", message_id),
    )
