"""The transactional sink's client: sends halves, many at a time, and ends them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

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
from penstock.spark.backoff import as_temporary, retry
from penstock.spark.sink.commit_messages import HalfOffsets, Parcel, Place
from penstock.spark.sink.control_topic import Control
from penstock.spark.sink.row_messages import Outgoing
from penstock.spark.sink.sink_options import SinkOptions
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import (
    MASTER_ID,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TRANSACTION_PREPARED,
    RequestCode,
    ResponseCode,
)
from penstock.wire.message_ids import decode_offset_id

log = logging.getLogger(__name__)

WINDOW: Final = 1_000
"""Halves that are sent before the first of them has to be acknowledged."""
ENDS_AT_ONCE: Final = 500
"""Halves that are ended before the first of them has to be answered."""
ENDINGS_MS: Final = 10_000
"""How long a broker that is away is asked to roll back: what it does not hear expires."""
IN_FLIGHT_MAX: Final = 100_000
PENSTOCK: Final = "penstockVersion"
"""A runtime figure that only Penstock's brokers have."""
NOT_INDEXED: Final = "done before: how is not known"
"""What a broker without an index says of a half that has ended: it may be rolled back."""

_LESS_SAFE: Final = frozenset(
    (
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    )
)


Stored = Callable[[Place, HalfOffsets], object]


class Lost(NamedTuple):
    """Rows that could not be committed, and why the first of them could not."""

    rows: int
    why: str

    def plus(self, other: "Lost") -> "Lost":
        return Lost(self.rows + other.rows, self.why or other.why)


NOTHING: Final = Lost(0, "")


class SinkClient(AsyncTransactionProducer):
    """Sends and ends the halves of one sink's tasks."""

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
            **options.connection.client_keywords(),
        )
        self._ours: set[str] = set()  # brokers, by name
        self._routed: set[str] = set()  # topics whose brokers are ours

    def control(self, sink_id: str, query_id: str | None) -> Control:
        """The decisions of a sink, as this query is to see them, or (None) any."""
        return Control(
            self._session,
            self._send_note,
            self._make_topic,
            sink_id,
            query_id,
            self._options.delivery_timeout_ms,
        )

    @property
    def group_name(self) -> str:
        """The group of its halves, as servers know it."""
        return self._session.with_namespace(self.group)

    def now_ms(self) -> int:
        return self._session.clock.now_ms()

    async def _send_note(self, message: Message, queue: MessageQueue) -> SendReceipt:
        return await self.send(message, queue=queue)

    async def _make_topic(self, topic: str, queues: int) -> None:
        connection = self._options.connection
        async with AsyncAdmin(connection.nameservers, **connection.client_keywords()) as admin:
            masters = await admin.masters()
            ours = [master.name for master in masters if await self._is_ours(master.address)]
            if not ours:
                raise _not_ours(", ".join(master.name for master in masters))
            await admin.create_topic(topic, queues=queues, brokers=ours)

    # --- whose brokers these are

    async def check_brokers(self, topic: str) -> None:
        """Make sure that all brokers of a topic are Penstock's; raises NotTransactional."""
        if topic in self._routed:
            return
        route = await self._session.find_route(self._session.with_namespace(topic))
        if route is not None:  # else it is made by the first send, and receipts tell where
            for broker in route.brokers:
                await self._check_broker(broker)
            self._routed.add(topic)

    async def _check_broker(self, broker: str) -> None:
        if broker in self._ours:
            return
        address = self._session.brokers.get(broker, {}).get(MASTER_ID)
        if address is None:
            return  # nothing can be sent to it either
        if not await self._is_ours(address):
            raise _not_ours(broker)
        self._ours.add(broker)

    async def _is_ours(self, address: str) -> bool:
        peer = self._session.peer(address)
        try:
            answer = await self._session.call(peer, RequestCode.GET_BROKER_RUNTIME_INFO)
        except Refused as error:
            # One of Apache's has no figures in its first second and says so by an error.
            raise as_temporary(error) from None
        return PENSTOCK in fastjson.decode(answer.body, KVTable).table

    # --- sending

    async def send_halves(
        self,
        rows: Sequence[Outgoing],
        properties: Mapping[str, str],
        partition: int,
        stored: Stored,
    ) -> None:
        """Send rows as halves; `stored` is told of each, also of those before one that failed.

        Raises RowRefused for a row that can't be sent, WriteGaveUp when there is no time left.
        """
        for topic in {row.message.topic for row in rows}:
            await self._retry(partial(self.check_brokers, topic))
        marks = {
            **properties,
            PROPERTY_TRANSACTION_PREPARED: "true",
            PROPERTY_PRODUCER_GROUP: self.group_name,
        }
        for begin in range(0, len(rows), WINDOW):
            window = list(rows[begin : begin + WINDOW])
            await self._retry(partial(self._send_window, window, marks, partition, stored))

    async def _retry(self, attempt: Callable[[], Awaitable[None]]) -> None:
        patience_ms = self._options.delivery_timeout_ms
        try:
            await retry(self._session.clock, patience_ms, attempt)
        except PenstockError as error:
            if not error.retry:
                raise
            raise WriteGaveUp(f"not sent within {patience_ms} ms: {error}") from error

    async def _send_window(
        self, window: list[Outgoing], marks: Mapping[str, str], partition: int, stored: Stored
    ) -> None:
        """Send these; those that are acknowledged are taken out. Raises what one of them met."""
        flights: list[tuple[Outgoing, asyncio.Future[SendReceipt]]] = []
        problem: PenstockError | None = None
        for row in window:
            try:
                flights.append((row, self._submit(row, marks)))
            except MessageIllegal as error:
                problem = RowRefused.at(row.row, partition, str(error), error.hint)
                break
            except PenstockError as error:  # no room: these have their turn later
                problem = error
                break
        left: list[Outgoing] = []
        for row, flight in flights:
            try:
                self._take(await flight, stored)
            except MessageIllegal as error:
                problem = RowRefused.at(row.row, partition, str(error), error.hint)
            except PenstockError as error:
                problem = problem if problem is not None and not problem.retry else error
                left.append(row)
        window[: len(flights)] = left
        for broker in {f.result().queue.broker_name for _, f in flights if _is_sent(f)}:
            await self._check_broker(broker)  # it may have come since the route was looked at
        if problem is not None:
            raise problem

    def _submit(self, row: Outgoing, marks: Mapping[str, str]) -> "asyncio.Future[SendReceipt]":
        message = row.message
        if message.delay_level or message.delay is not None or message.deliver_at is not None:
            raise MessageIllegal(
                "a message in a transaction can't wait for its time besides",
                hint="write rows with a delay with delivery=at-least-once",
            )
        half = replace(message, properties={**message.properties, **marks})
        return self._sender.submit(half, ordering_key=row.queue_key, internal=True)

    def _take(self, receipt: SendReceipt, stored: Stored) -> None:
        """Note a half that a broker has; raises SendFailed if it has to be sent again."""
        if receipt.status is not SendStatus.SEND_OK:
            raise SendFailed(f"a half is stored less safely than it should ({receipt.status.name})")
        broker = receipt.queue.broker_name
        try:
            log_offset = decode_offset_id(receipt.offset_id).offset
        except HeaderError as error:
            raise NotTransactional(f"{broker} does not say where a half lies: {error}") from None
        address = self._session.address_of(broker) or ""
        topic = self._session.with_namespace(receipt.queue.topic)
        stored(Place(broker, address, topic), HalfOffsets(receipt.queue_offset, log_offset))

    # --- ending

    async def commit_halves(self, parcel: Parcel) -> Lost:
        """Commit them all, in the order in which they were stored, so that rows of one queue keep
        theirs; gives those that can't be committed any more. Raises errors with `retry` when a
        broker does not answer for too long: then it is not known of all of them."""
        refusals: list[str] = []
        for window in _windows(parcel):
            await retry(
                self._session.clock,
                self._options.delivery_timeout_ms,
                partial(self._end_window, window, Decision.COMMIT, refusals),
            )
        return Lost(len(refusals), refusals[0] if refusals else "")

    async def roll_back_halves(self, parcel: Parcel) -> None:
        """Roll them back as far as their brokers can be reached; the others expire."""
        away: dict[str, PenstockError] = {}
        for window in _windows(parcel):
            for broker in {handle.broker_name for handle in window} - away.keys():
                its = [handle for handle in window if handle.broker_name == broker]
                attempt = partial(self._end_window, its, Decision.ROLLBACK, [])
                try:
                    await retry(self._session.clock, ENDINGS_MS, attempt)
                except PenstockError as error:
                    away[broker] = error
        for broker, why in away.items():
            log.warning("halves on %s are left to expire: %s", broker, why)

    async def _end_window(
        self, window: list[TransactionHandle], decision: Decision, refusals: list[str]
    ) -> None:
        """End these; those that are answered are taken out. Raises what one of them met."""
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
        """Tell a broker; why it refuses for ever, or "". Raises errors with `retry`."""
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
            raise  # it is not the half that is wrong
        except TransactionCommitted:
            return ""  # by a decision: so it is no loss that it can't be rolled back
        except Refused as error:
            if error.answer_code in _LESS_SAFE:
                raise SendFailed(str(error)) from error
            if error.retry:
                raise
            return str(error)
        unsure = decision is Decision.COMMIT and (answer.remark or "").startswith(NOT_INDEXED)
        return answer.remark or "" if unsure else ""

    async def _refresh(self, handle: TransactionHandle) -> None:
        """The broker may have another address by now."""
        try:
            await self._session.find_route(handle.topic)
        except PenstockError as error:
            log.info("no fresh route of %s: %s", handle.topic, error)


def _windows(parcel: Parcel) -> Iterator[list[TransactionHandle]]:
    """The halves, as many together as are ended at once."""
    halves = parcel.each()
    while window := [
        TransactionHandle(
            topic=place.topic,
            group=parcel.group,
            broker_name=place.broker,
            address=place.address,
            queue_offset=half.queue_offset,
            log_offset=half.log_offset,
            message_id="",
            transaction_id="",
        )
        for place, half in islice(halves, ENDS_AT_ONCE)
    ]:
        yield window


def _is_sent(flight: "asyncio.Future[SendReceipt]") -> bool:
    return not flight.cancelled() and flight.exception() is None


def _not_ours(broker: str) -> NotTransactional:
    return NotTransactional(
        f"delivery=transactional needs Penstock's brokers, and {broker} is not one: it would store "
        "a message again each time its commit is repeated"
    )
