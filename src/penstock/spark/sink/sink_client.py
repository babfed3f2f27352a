"""The client of the transactional sink: sends half messages and ends them, many at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from penstock.arrow.backoff import as_temporary, retry
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.producer_options import MESSAGE_BYTES_MAX
from penstock.client.transaction.async_transaction_producer import (
    AsyncTransactionProducer,
    Decision,
    TransactionHandle,
)
from penstock.client.transaction.transaction_checks import Check
from penstock.errors import (
    HeaderError,
    MessageIllegal,
    NoPermission,
    NotTransactional,
    PeerError,
    PenstockError,
    Refused,
    RowRefused,
    SendFailed,
    TransactionCommitted,
    WriteGaveUp,
)
from penstock.spark.sink.commit_messages import HalfMessageOffsets, HalfMessages, HalfMessageTopic
from penstock.spark.sink.control_topic import ControlTopic
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.send_batches import is_delayed
from penstock.spark.sink.sink_options import NEW_TOPIC_MS, SinkOptions
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import (
    MASTER_ID,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TRANSACTION_PREPARED,
    REMARK_OUTCOME_UNKNOWN,
    RequestCode,
    ResponseCode,
)
from penstock.wire.message_ids import decode_offset_id

log = logging.getLogger(__name__)

SEND_WINDOW: Final = 1_000
"""Half messages that are sent before the first one must be acknowledged."""
END_WINDOW: Final = 500
"""Half messages that are ended before the first one must be answered."""
ROLLBACK_RETRY_MS: Final = 10_000
"""How long rollbacks on an unavailable broker are retried: its half messages expire anyway."""
IN_FLIGHT_MAX: Final = 100_000
PENSTOCK: Final = "penstockVersion"
"""An entry of the runtime information that only Penstock's brokers have."""
_NOT_DURABLE: Final = frozenset(
    (
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    )
)


OnStored = Callable[[HalfMessageTopic, HalfMessageOffsets], object]
"""Called for each half message that a broker has stored."""


class LostRows(NamedTuple):
    """The number of rows that could not be committed, and the reason of the first."""

    rows: int
    why: str

    def plus(self, other: "LostRows") -> "LostRows":
        return LostRows(self.rows + other.rows, self.why or other.why)


NOTHING_LOST: Final = LostRows(0, "")


class SinkClient(AsyncTransactionProducer):
    """Sends and ends the half messages of one sink."""

    def __init__(self, options: SinkOptions, check: Callable[["SinkClient"], Check]) -> None:
        self._options = options
        super().__init__(
            options.connection.nameservers,
            group=options.group,
            check=check(self),
            compression=options.compression,
            compress_above_bytes=options.compress_above_bytes,
            message_bytes_max=max(options.message_bytes_max, MESSAGE_BYTES_MAX),
            in_flight_max=IN_FLIGHT_MAX,
            create_topics=options.create_topics,
            **options.connection.client_keywords(),
        )
        self._penstock_brokers: set[str] = set()  # brokers, by name
        self._checked_topics: set[str] = set()  # topics whose brokers are ours

    def control(self, sink_id: str, query_id: str | None) -> ControlTopic:
        """The control topic for a sink; batches must belong to this query (None: to any)."""
        return ControlTopic(
            self._session,
            self._send_control_record,
            self._create_topic,
            sink_id,
            query_id,
            self._options.delivery_timeout_ms,
        )

    @property
    def group_name(self) -> str:
        """The producer group of its half messages, as servers know it."""
        return self._session.with_namespace(self.group)

    def now_ms(self) -> int:
        return self._session.clock.now_ms()

    async def _send_control_record(self, message: Message, queue: MessageQueue) -> SendReceipt:
        return await self.send(message, queue=queue)

    async def _create_topic(self, topic: str, queues: int) -> None:
        connection = self._options.connection
        async with AsyncAdmin(connection.nameservers, **connection.client_keywords()) as admin:
            masters = await admin.masters()
            ours = [master.name for master in masters if await self._is_penstock(master.address)]
            if not ours:
                raise _not_penstock(", ".join(master.name for master in masters))
            await admin.create_topic(topic, queues=queues, brokers=ours)

    # --- broker checks

    async def check_brokers(self, topic: str) -> None:
        """Check that all brokers of a topic are Penstock's; raises NotTransactional."""
        if topic in self._checked_topics:
            return
        route = await self._session.find_route(self._session.with_namespace(topic))
        if route is not None:  # otherwise the first send creates the topic; receipts tell where
            for broker in route.brokers:
                await self._check_broker(broker)
            self._checked_topics.add(topic)

    async def _check_topic(self, topic: str) -> None:
        """Raise NoRoute for a topic that does not exist; waits for a NameServer."""
        session = self._session
        name = session.with_namespace(topic)
        find_route = partial(session.find_route, name)
        if await retry(session.clock, self._options.delivery_timeout_ms, find_route) is None:
            raise await session.nameservers.no_route(name)

    async def _check_broker(self, broker: str) -> None:
        if broker in self._penstock_brokers:
            return
        address = self._session.brokers.get(broker, {}).get(MASTER_ID)
        if address is None:
            return  # nothing can be sent to it either
        if not await self._is_penstock(address):
            raise _not_penstock(broker)
        self._penstock_brokers.add(broker)

    async def _is_penstock(self, address: str) -> bool:
        peer = self._session.peer(address)
        try:
            answer = await self._session.call(peer, RequestCode.GET_BROKER_RUNTIME_INFO)
        except Refused as error:
            # An Apache broker has no runtime information in its first second and returns an error.
            raise as_temporary(error) from None
        return PENSTOCK in fastjson.decode(answer.body, KVTable).table

    # --- sending

    async def send_half_messages(
        self,
        rows: Sequence[RowMessage],
        properties: Mapping[str, str],
        partition: int,
        on_stored: OnStored,
    ) -> None:
        """Send rows as half messages; calls `on_stored` for each, also if a later one fails.

        Raises RowRefused for a row that can't be sent, WriteGaveUp after the delivery timeout.
        """
        for topic in {row.message.topic for row in rows}:
            if not self._options.create_topics and topic not in self._checked_topics:
                await retry(self._session.clock, NEW_TOPIC_MS, partial(self._check_topic, topic))
            await self._retry(partial(self.check_brokers, topic))
        half_properties = {
            **properties,
            PROPERTY_TRANSACTION_PREPARED: "true",
            PROPERTY_PRODUCER_GROUP: self.group_name,
        }
        for begin in range(0, len(rows), SEND_WINDOW):
            window = list(rows[begin : begin + SEND_WINDOW])
            await self._retry(
                partial(self._send_window, window, half_properties, partition, on_stored)
            )

    async def _retry(self, attempt: Callable[[], Awaitable[None]]) -> None:
        timeout_ms = self._options.delivery_timeout_ms
        try:
            await retry(self._session.clock, timeout_ms, attempt)
        except PenstockError as error:
            if not error.retry:
                raise
            raise WriteGaveUp(f"not sent within {timeout_ms} ms: {error}") from error

    async def _send_window(
        self,
        window: list[RowMessage],
        half_properties: Mapping[str, str],
        partition: int,
        on_stored: OnStored,
    ) -> None:
        """Send these rows; removes those that are acknowledged. Raises the error of one of them."""
        pending: list[tuple[RowMessage, asyncio.Future[SendReceipt]]] = []
        problem: PenstockError | None = None
        for row in window:
            try:
                pending.append((row, self._submit(row, half_properties)))
            except MessageIllegal as error:
                problem = RowRefused.at(row.row, partition, str(error), error.hint)
                break
            except PenstockError as error:  # too many in flight: retry these
                problem = error
                break
        left: list[RowMessage] = []
        for row, future in pending:
            try:
                self._report_stored(await future, on_stored)
            except MessageIllegal as error:
                problem = RowRefused.at(row.row, partition, str(error), error.hint)
            except PenstockError as error:
                problem = problem if problem is not None and not problem.retry else error
                left.append(row)
        window[: len(pending)] = left
        for broker in {f.result().queue.broker_name for _, f in pending if _is_sent(f)}:
            await self._check_broker(broker)  # it may be new since the route was checked
        if problem is not None:
            raise problem

    def _submit(
        self, row: RowMessage, half_properties: Mapping[str, str]
    ) -> "asyncio.Future[SendReceipt]":
        message = row.message
        if is_delayed(message):
            raise MessageIllegal(
                "a message in a transaction can't be delayed",
                hint="write delayed rows with delivery=at-least-once",
            )
        half = replace(message, properties={**message.properties, **half_properties})
        return self._sender.submit(half, ordering_key=row.queue_key, internal=True)

    def _report_stored(self, receipt: SendReceipt, on_stored: OnStored) -> None:
        """Report a stored half message; raises SendFailed if it must be sent again."""
        if receipt.status is not SendStatus.SEND_OK:
            raise SendFailed(f"a half message is not stored durably ({receipt.status.name})")
        broker = receipt.queue.broker_name
        try:
            log_offset = decode_offset_id(receipt.offset_id).offset
        except HeaderError as error:
            raise NotTransactional(
                f"{broker} does not return the offset of a half message: {error}"
            ) from None
        address = self._session.address_of(broker) or ""
        topic = self._session.with_namespace(receipt.queue.topic)
        on_stored(
            HalfMessageTopic(broker, address, topic),
            HalfMessageOffsets(receipt.queue_offset, log_offset),
        )

    # --- ending

    async def commit_half_messages(self, messages: HalfMessages) -> LostRows:
        """Commit all of them in the order in which they were stored, so that rows of one queue keep
        their order; returns the rows that can't be committed any more.

        Raises errors with `retry` if a broker does not answer for too long: then the state of some
        is unknown.
        """
        refusals: list[str] = []
        for window in _windows(messages):
            await retry(
                self._session.clock,
                self._options.delivery_timeout_ms,
                partial(self._end_window, window, Decision.COMMIT, refusals),
            )
        return LostRows(len(refusals), refusals[0] if refusals else "")

    async def roll_back_half_messages(self, messages: HalfMessages) -> None:
        """Roll them back if their brokers can be reached; the others expire."""
        away: dict[str, PenstockError] = {}
        for window in _windows(messages):
            for broker in {handle.broker_name for handle in window} - away.keys():
                its = [handle for handle in window if handle.broker_name == broker]
                attempt = partial(self._end_window, its, Decision.ROLLBACK, [])
                try:
                    await retry(self._session.clock, ROLLBACK_RETRY_MS, attempt)
                except PenstockError as error:
                    away[broker] = error
        for broker, why in away.items():
            log.warning("could not roll back half messages on %s; they expire: %s", broker, why)

    async def _end_window(
        self, window: list[TransactionHandle], decision: Decision, refusals: list[str]
    ) -> None:
        """End these; removes those that are answered. Raises the error of one of them."""
        answers = await asyncio.gather(
            *(self._end(handle, decision) for handle in window), return_exceptions=True
        )
        problem: BaseException | None = None
        left = []
        for handle, answer in zip(window, answers, strict=True):
            if isinstance(answer, BaseException):
                left.append(handle)
                if problem is None or getattr(problem, "retry", False):
                    problem = answer
            elif answer:
                refusals.append(answer)
        window[:] = left
        if problem is not None:
            raise problem

    async def _end(self, handle: TransactionHandle, decision: Decision) -> str:
        """End one half message; returns the reason of a permanent refusal, or "". Raises errors
        with `retry`."""
        session = self._session
        address = await self._address_of(handle, fresh=False)
        fields = handle.end_fields(decision, from_check=False)
        code = RequestCode.END_TRANSACTION
        try:
            answer = await session.call(session.peer(address), code, fields)
        except PeerError:
            await self._refresh(handle)
            raise
        except NoPermission:
            raise  # the half message is not at fault
        except TransactionCommitted:
            return ""  # committed by a decision, so it is not lost if it can't be rolled back
        except Refused as error:
            if error.answer_code in _NOT_DURABLE:
                raise SendFailed(str(error)) from error
            if error.retry:
                raise
            return str(error)
        is_unknown = decision is Decision.COMMIT and answer.remark == REMARK_OUTCOME_UNKNOWN
        return REMARK_OUTCOME_UNKNOWN if is_unknown else ""

    async def _refresh(self, handle: TransactionHandle) -> None:
        """Get a new route: the broker's address may have changed."""
        try:
            await self._session.find_route(handle.topic)
        except PenstockError as error:
            log.info("could not refresh the route of %s: %s", handle.topic, error)


def _windows(messages: HalfMessages) -> Iterator[list[TransactionHandle]]:
    """The half messages in groups that are ended at once."""
    half_messages = messages.interleaved()
    while window := [
        TransactionHandle(
            topic=topic.topic,
            group=messages.group,
            broker_name=topic.broker,
            address=topic.address,
            queue_offset=half.queue_offset,
            log_offset=half.log_offset,
            message_id="",
            transaction_id="",
        )
        for topic, half in islice(half_messages, END_WINDOW)
    ]:
        yield window


def _is_sent(future: "asyncio.Future[SendReceipt]") -> bool:
    return not future.cancelled() and future.exception() is None


def _not_penstock(broker: str) -> NotTransactional:
    return NotTransactional(
        f"delivery=transactional needs Penstock's brokers, but {broker} is not one: it would store "
        "a message again each time its commit is repeated"
    )
