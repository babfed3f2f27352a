"""Giving lent messages back: acknowledged, or lent for another time.

Acknowledgements for one broker that come while another is on its way go together with the next, as
one request. Those of messages popped in order go alone: their answers tell whether they count.
An acknowledgement changes nothing when it comes twice, so it is tried again where it may be lost.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from penstock.client.client_session import Session
from penstock.client.pop.popped_messages import Loan, read_long
from penstock.client.received_message import ReceivedMessage
from penstock.clock import pause
from penstock.errors import ClientClosed, NotInFlight, PeerError, PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import BatchAck, BatchAckMessageRequestBody
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.receipt_handle import Receipt, retry_topic

log = logging.getLogger(__name__)

TOGETHER_MAX = 512
"""Most acknowledgements of one request."""
BITS_MAX = 8 * 1024
"""How far behind the first message of its pop one may be that is acknowledged with others."""
ATTEMPTS = 3
AGAIN_MS = 100

_Waiter = tuple[Loan, "asyncio.Future[None]"]


class Loans:
    """What one group has to say about the messages lent to it."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group
        self._lines: dict[str, deque[_Waiter]] = {}
        self._changing: dict[int, asyncio.Future[None]] = {}
        self._alone: set[str] = set()

    async def ack(self, loan: Loan) -> None:
        """Tell the broker that the message is done; a second time says nothing more."""
        await self._settled(loan)
        if loan.returned:
            return
        loan.returned = True
        self._session.check_alive()
        name = loan.receipt.broker_name
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = deque()
            self._session.spawn(self._tell(name, line))
        line.append((loan, told))
        try:
            await told
        except PenstockError:
            loan.returned = False  # the caller may try again
            raise

    async def ack_or_log(self, loan: Loan) -> None:
        """The same where nobody waits for it: what is not acknowledged comes again."""
        try:
            await self.ack(loan)
        except PenstockError as error:
            log.warning("a message of %s comes again: %s", loan.topic, error)

    async def extend(self, loan: Loan, invisible_ms: int) -> None:
        """Have the message lent for so long from now on; what was said of it before is void."""
        await self._settled(loan)
        if loan.returned:
            raise NotInFlight(
                f"a message of {loan.topic} was given back before it was to be extended"
            )
        self._session.check_alive()
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changing[id(loan)] = changed
        try:
            await self._change(loan, invisible_ms)
        finally:
            del self._changing[id(loan)]
            changed.set_result(None)

    async def _settled(self, loan: Loan) -> None:
        """Wait for what changes the receipt just now."""
        while (changing := self._changing.get(id(loan))) is not None:
            await asyncio.shield(changing)

    async def _change(self, loan: Loan, invisible_ms: int) -> None:
        old = loan.receipt
        ext = self._named(loan) | {"invisibleTime": str(invisible_ms)}
        session = self._session
        asked_ms = session.clock.monotonic_ms()
        answer = await session.call(
            session.broker(old.broker_name), RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext
        )
        loan.receipt = old._replace(
            start_offset=_offset(old),
            pop_ms=read_long(answer.ext, "popTime"),
            invisible_ms=read_long(answer.ext, "invisibleTime"),
            revive_queue_id=read_long(answer.ext, "reviveQid"),
        )
        loan.ends_ms = asked_ms + loan.receipt.invisible_ms

    # --- acknowledgements on their way

    async def _tell(self, broker_name: str, line: deque[_Waiter]) -> None:
        """Send what is in the line until it is empty."""
        some: list[_Waiter] = []
        try:
            while line:
                some = [line.popleft() for _ in range(min(len(line), TOGETHER_MAX))]
                await self._tell_some(broker_name, some)
        finally:
            del self._lines[broker_name]
            _resolve(
                (told for _, told in [*some, *line]),
                ClientClosed("closed before this was acknowledged"),
            )

    async def _tell_some(self, broker_name: str, some: Sequence[_Waiter]) -> None:
        together: list[_Waiter] = []
        alone: list[_Waiter] = []
        for waiter in some:
            fits = _fits(waiter[0].receipt) and broker_name not in self._alone
            (together if fits and len(some) > 1 else alone).append(waiter)
        if together and not await self._together(broker_name, together):
            self._alone.add(broker_name)
            alone += together
        if alone:
            await asyncio.gather(*(self._one(loan, told) for loan, told in alone))

    async def _one(self, loan: Loan, told: "asyncio.Future[None]") -> None:
        try:
            await self._insist(loan.receipt.broker_name, RequestCode.ACK_MESSAGE, self._named(loan))
        except PenstockError as error:
            _resolve([told], error)
        else:
            _resolve([told])

    async def _together(self, broker_name: str, some: Sequence[_Waiter]) -> bool:
        """One request for all of them; False if the broker does not know such requests."""
        bits: dict[tuple[str, Receipt], int] = {}
        for loan, _ in some:
            key = loan.topic, loan.receipt._replace(queue_offset=None)
            bit = 1 << (_offset(loan.receipt) - loan.receipt.start_offset)
            bits[key] = bits.get(key, 0) | bit
        acks = [
            BatchAck(
                consumer_group=self._group,
                topic=topic,
                retry=receipt.kind.value,
                start_offset=receipt.start_offset,
                queue_id=receipt.queue_id,
                revive_queue_id=receipt.revive_queue_id,
                pop_time=receipt.pop_ms,
                invisible_time=receipt.invisible_ms,
                bit_set=those.to_bytes((those.bit_length() + 7) // 8, "little"),
            )
            for (topic, receipt), those in bits.items()
        ]
        body = fastjson.encode(BatchAckMessageRequestBody(broker_name=broker_name, acks=acks))
        told = [told for _, told in some]
        try:
            await self._insist(broker_name, RequestCode.BATCH_ACK_MESSAGE, {}, body)
        except PenstockError as error:
            if error.answer_code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                return False
            _resolve(told, error)
        else:
            _resolve(told)
        return True

    async def _insist(
        self, broker_name: str, code: int, ext: Mapping[str, str], body: bytes = b""
    ) -> None:
        """Ask, and again where the request or its answer got lost; raises PenstockError."""
        session = self._session
        for left in reversed(range(ATTEMPTS)):
            try:
                await session.call(session.broker(broker_name), code, ext, body)
                return
            except PeerError:
                if not left:
                    raise
            await pause(session.clock, AGAIN_MS)

    def _named(self, loan: Loan) -> dict[str, str]:
        """The header fields that name a lent message."""
        receipt = loan.receipt
        return {
            "consumerGroup": self._group,
            "topic": retry_topic(loan.topic, self._group, receipt.kind),
            "queueId": str(receipt.queue_id),
            "offset": str(receipt.queue_offset),
            "extraInfo": receipt.format(),
            "bname": receipt.broker_name,
        }


def loan_of(message: ReceivedMessage) -> Loan:
    """The loan of a popped message; raises NotInFlight for any other."""
    loan = message.owner
    if not isinstance(loan, Loan):
        raise NotInFlight(f"{message!r} was not popped")
    return loan


def _offset(receipt: Receipt) -> int:
    assert receipt.queue_offset is not None  # read_popped fills it in
    return receipt.queue_offset


def _resolve(told: Iterable["asyncio.Future[None]"], failure: PenstockError | None = None) -> None:
    for one in told:
        if one.done():
            continue
        if failure is None:
            one.set_result(None)
        else:
            one.set_exception(failure)


def _fits(receipt: Receipt) -> bool:
    """Whether it may be acknowledged together with others."""
    return not receipt.ordered and 0 <= _offset(receipt) - receipt.start_offset < BITS_MAX
