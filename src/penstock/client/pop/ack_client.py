"""Acknowledges popped messages and changes their invisible time.

Acknowledgements to a broker that come while a request is in flight are sent in one batch after it.
Those of ordered pops are sent one by one, because their responses tell whether they are valid. An
acknowledgement is idempotent, so it is retried if the request or the response was lost.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from penstock.client.client_session import Session
from penstock.client.pop.popped_messages import PopReceipt, read_long
from penstock.clock import pause
from penstock.errors import ClientClosed, NotInFlight, PeerError, PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import BatchAck, BatchAckMessageRequestBody
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.receipt_handle import Receipt, retry_topic

log = logging.getLogger(__name__)

BATCH_MAX = 512
"""Most acknowledgements in one request."""
BITS_MAX = 8 * 1024
"""Largest distance to the first offset of the pop for a batch: the length of its bit set."""
ATTEMPTS = 3
RETRY_MS = 100

_PendingAck = tuple[PopReceipt, "asyncio.Future[None]"]


class PopAckClient:
    """Acknowledgements of one group."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group
        self._queues: dict[str, deque[_PendingAck]] = {}  # by broker name
        self._changing: dict[int, asyncio.Future[None]] = {}  # by id of the receipt
        self._without_batch_ack: set[str] = set()  # brokers that do not know BATCH_ACK_MESSAGE

    async def ack(self, receipt: PopReceipt) -> None:
        """Acknowledge a message; a second call does nothing."""
        await self._wait_for_change(receipt)
        if receipt.acked:
            return
        receipt.acked = True
        self._session.check_alive()
        name = receipt.handle.broker_name
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = deque()
            self._session.spawn(self._send_acks(name, queue))
        queue.append((receipt, done))
        try:
            await done
        except PenstockError:
            receipt.acked = False  # the caller may try again
            raise

    async def ack_or_log(self, receipt: PopReceipt) -> None:
        """Acknowledge a message and log a failure: the message is then redelivered."""
        try:
            await self.ack(receipt)
        except PenstockError as error:
            log.warning(
                "cannot acknowledge a message of topic %s, it will be redelivered: %s",
                receipt.topic,
                error,
            )

    async def extend(self, receipt: PopReceipt, invisible_ms: int) -> None:
        """Change the invisible time, counted from now; the old receipt handle becomes invalid."""
        await self._wait_for_change(receipt)
        if receipt.acked:
            raise NotInFlight(f"the message of topic {receipt.topic} is already acknowledged")
        self._session.check_alive()
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changing[id(receipt)] = changed
        try:
            await self._change(receipt, invisible_ms)
        finally:
            del self._changing[id(receipt)]
            changed.set_result(None)

    async def _wait_for_change(self, receipt: PopReceipt) -> None:
        """Wait for a change of the receipt handle in flight."""
        while (changing := self._changing.get(id(receipt))) is not None:
            await asyncio.shield(changing)

    async def _change(self, receipt: PopReceipt, invisible_ms: int) -> None:
        old = receipt.handle
        ext = self._fields(receipt) | {"invisibleTime": str(invisible_ms)}
        session = self._session
        sent_ms = session.clock.monotonic_ms()
        answer = await session.call(
            session.master(old.broker_name), RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext
        )
        receipt.handle = old._replace(
            start_offset=_offset(old),
            pop_ms=read_long(answer.ext, "popTime"),
            invisible_ms=read_long(answer.ext, "invisibleTime"),
            revive_queue_id=read_long(answer.ext, "reviveQid"),
        )
        receipt.visible_ms = sent_ms + receipt.handle.invisible_ms

    # --- acknowledgements in flight

    async def _send_acks(self, broker_name: str, queue: deque[_PendingAck]) -> None:
        """Send queued acknowledgements until the queue is empty."""
        some: list[_PendingAck] = []
        try:
            while queue:
                some = [queue.popleft() for _ in range(min(len(queue), BATCH_MAX))]
                await self._send_some(broker_name, some)
        finally:
            del self._queues[broker_name]
            _resolve(
                (done for _, done in [*some, *queue]),
                ClientClosed("the consumer was closed before the acknowledgement was sent"),
            )

    async def _send_some(self, broker_name: str, some: Sequence[_PendingAck]) -> None:
        batch: list[_PendingAck] = []
        single: list[_PendingAck] = []
        for pending in some:
            fits = _can_batch(pending[0].handle) and broker_name not in self._without_batch_ack
            (batch if fits and len(some) > 1 else single).append(pending)
        if batch and not await self._ack_batch(broker_name, batch):
            self._without_batch_ack.add(broker_name)
            single += batch
        if single:
            await asyncio.gather(*(self._ack_one(receipt, done) for receipt, done in single))

    async def _ack_one(self, receipt: PopReceipt, done: "asyncio.Future[None]") -> None:
        try:
            await self._call_with_retries(
                receipt.handle.broker_name, RequestCode.ACK_MESSAGE, self._fields(receipt)
            )
        except PenstockError as error:
            _resolve([done], error)
        else:
            _resolve([done])

    async def _ack_batch(self, broker_name: str, some: Sequence[_PendingAck]) -> bool:
        """Acknowledge all in one request; False if the broker does not support it."""
        bits: dict[tuple[str, Receipt], int] = {}
        for receipt, _ in some:
            key = receipt.topic, receipt.handle._replace(queue_offset=None)
            bit = 1 << (_offset(receipt.handle) - receipt.handle.start_offset)
            bits[key] = bits.get(key, 0) | bit
        acks = [
            BatchAck(
                consumer_group=self._group,
                topic=topic,
                retry=handle.kind.value,
                start_offset=handle.start_offset,
                queue_id=handle.queue_id,
                revive_queue_id=handle.revive_queue_id,
                pop_time=handle.pop_ms,
                invisible_time=handle.invisible_ms,
                bit_set=bit_set.to_bytes((bit_set.bit_length() + 7) // 8, "little"),
            )
            for (topic, handle), bit_set in bits.items()
        ]
        body = fastjson.encode(BatchAckMessageRequestBody(broker_name=broker_name, acks=acks))
        futures = [done for _, done in some]
        try:
            await self._call_with_retries(broker_name, RequestCode.BATCH_ACK_MESSAGE, {}, body)
        except PenstockError as error:
            if error.answer_code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                return False
            _resolve(futures, error)
        else:
            _resolve(futures)
        return True

    async def _call_with_retries(
        self, broker_name: str, code: int, ext: Mapping[str, str], body: bytes = b""
    ) -> None:
        """Send a request; retry if it or its response was lost. Raises PenstockError."""
        session = self._session
        for left in reversed(range(ATTEMPTS)):
            try:
                await session.call(session.master(broker_name), code, ext, body)
                return
            except PeerError:
                if not left:
                    raise
            await pause(session.clock, RETRY_MS)

    def _fields(self, receipt: PopReceipt) -> dict[str, str]:
        """The header fields that identify a message in flight."""
        handle = receipt.handle
        return {
            "consumerGroup": self._group,
            "topic": retry_topic(receipt.topic, self._group, handle.kind),
            "queueId": str(handle.queue_id),
            "offset": str(handle.queue_offset),
            "extraInfo": handle.format(),
            "bname": handle.broker_name,
        }


def _offset(handle: Receipt) -> int:
    assert handle.queue_offset is not None  # read_popped fills it in
    return handle.queue_offset


def _resolve(done: Iterable["asyncio.Future[None]"], failure: PenstockError | None = None) -> None:
    for one in done:
        if one.done():
            continue
        if failure is None:
            one.set_result(None)
        else:
            one.set_exception(failure)


def _can_batch(handle: Receipt) -> bool:
    """Whether it may be acknowledged in a batch."""
    return not handle.ordered and 0 <= _offset(handle) - handle.start_offset < BITS_MAX
