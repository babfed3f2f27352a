"""A broker asks what became of a transaction: the application's check tells, and we answer.

Brokers ask one producer of the group after another, again and again until somebody knows. So a
check that is lost, fails or is not taken up does no harm: it is asked again later.
"""

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from penstock.client.client_session import MemberResponse, Session
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.client.transaction.transaction_handle import Decision, TransactionHandle
from penstock.clock import finish_within
from penstock.errors import PenstockError, RecordError
from penstock.transport.peer import PeerRequest
from penstock.wire.codes import PROPERTY_PRODUCER_GROUP, RequestCode

log = logging.getLogger(__name__)

CHECKS_MAX: Final = 2_000
"""Checks that wait or run; RocketMQ's figure."""
CHECK_THREADS_MAX: Final = 4
"""Checks at a time that are plain functions: they run in threads."""

Outcome: TypeAlias = Decision | bool | None
Check: TypeAlias = Callable[[ReceivedMessage], Outcome | Awaitable[Outcome]]
"""What became of the work beside a message: True or COMMIT, False or ROLLBACK, None or UNKNOWN."""
Answered: TypeAlias = Callable[[TransactionHandle, Decision, ReceivedMessage, str], object]
"""(handle, decision, message, address): called after the broker at that address was answered."""


class Checks:
    """Checks of one producer group that wait or run."""

    def __init__(self, session: Session, check: Check | None, answered: Answered) -> None:
        self._session = session
        self.check = check
        self._answered = answered
        self._running: dict[str, asyncio.Future[None]] = {}
        self.open: Counter[str] = Counter()
        """Ids of messages whose local work is under way here: nobody knows yet how it ends."""
        self._threads = asyncio.Semaphore(CHECK_THREADS_MAX)

    def handle_request(self, ask: PeerRequest, address: str, group: str) -> MemberResponse | bool:
        """Take up CHECK_TRANSACTION_STATE; False if it is about another group's message."""
        try:
            [message] = decode_records(
                ask.body,
                ask.ext.get("bname", ""),
                namespace=self._session.options.namespace,
                received_ms=self._session.clock.now_ms(),
            )
            handle = _asked_handle(ask, message, address)
        except (RecordError, ValueError) as error:
            log.warning("%s asks about a transaction that can't be read: %s", address, error)
            return None
        if handle.group != group:
            return False
        if handle.message_id in self._running:
            return None  # the answer to the first time is the answer
        if len(self._running) >= CHECKS_MAX:
            log.warning("%d checks wait: the next ones are left to be asked again", CHECKS_MAX)
            return None
        done = self._running[handle.message_id] = asyncio.get_running_loop().create_future()
        return self._answer(handle, message, address, done)

    async def finish(self, ms: int) -> None:
        """Wait for what runs, not longer than this."""
        if not self._running:
            return
        try:
            work = asyncio.wait(list(self._running.values()))
            await finish_within(self._session.clock, ms, work)
        except TimeoutError:
            log.info("%d checks do not end: brokers will ask again", len(self._running))

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
                await self._tell(handle, decision, message, address)
        finally:
            del self._running[handle.message_id]
            done.set_result(None)

    async def _decide(self, message: ReceivedMessage) -> Decision | None:
        """What the check says; None if there is no check."""
        if self.open[message.message_id]:
            return Decision.UNKNOWN
        check = self.check
        if check is None:
            log.warning(
                "a broker asks what became of the transaction of message %s of %r, and there is "
                "no check to tell: give one as check=… or by @producer.checker",
                message.message_id,
                message.topic,
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
        except Exception:  # the application's own
            log.exception("the check of message %s of %r failed", message.message_id, message.topic)
            return Decision.UNKNOWN
        if outcome is None:
            return Decision.UNKNOWN
        if isinstance(outcome, bool):
            return Decision.COMMIT if outcome else Decision.ROLLBACK
        if isinstance(outcome, Decision):
            return outcome
        log.error(
            "the check of message %s of %r returned %r: that is no Decision",
            message.message_id,
            message.topic,
            outcome,
        )
        return Decision.UNKNOWN

    async def _tell(
        self, handle: TransactionHandle, decision: Decision, message: ReceivedMessage, address: str
    ) -> None:
        """Answer the broker that has asked; it asks again where that fails."""
        session = self._session
        fields, peer = handle.end_fields(decision, from_check=True), session.peer(address)
        timeout_ms = session.options.timeout_ms
        try:
            if decision is Decision.UNKNOWN:
                await peer.oneway(RequestCode.END_TRANSACTION, fields, timeout_ms=timeout_ms)
            else:
                await session.call(peer, RequestCode.END_TRANSACTION, fields)
        except PenstockError as error:
            log.warning("the check of message %s is not answered: %s", handle.message_id, error)
            return
        self._answered(handle, decision, message, address)


def _asked_handle(ask: PeerRequest, message: ReceivedMessage, address: str) -> TransactionHandle:
    """The handle of the half that a broker asks about; ValueError if its offsets are no numbers."""
    message_id = message.message_id
    return TransactionHandle(
        topic=message.stored_topic,
        group=message.properties.get(PROPERTY_PRODUCER_GROUP, ""),
        broker_name=ask.ext.get("bname", ""),
        address=address,
        queue_offset=int(ask.ext.get("tranStateTableOffset", "")),
        log_offset=int(ask.ext.get("commitLogOffset", "")),
        message_id=message_id,
        transaction_id=ask.ext.get("transactionId", message_id),
    )
