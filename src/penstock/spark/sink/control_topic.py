"""Where the decisions of a sink are kept: durable, in one place, found with a few calls.

The control topic PENSTOCK_SINK_CONTROL has eight queues on each broker. A sink has one home broker
and one queue there for its notes (`decisions`), each with its kind and the sink in the tag, so that
the broker filters them.

Notes fall to retention, and consumers' offsets do not. So four numbers are kept beside, as offsets
of a group of the sink's own: in queues 0 to 2, which never have messages, and in the sink's queue.

| Number | Says | Where |
|---|---|---|
| home | which broker is the home: a hash of its name | on each broker of the topic |
| state | twice the highest batch, + 1: decided, + 2: done | at home |
| owner | whose batches these are: a hash of the query's id | at home |
| position | nothing that still matters lies before it in the sink's queue | at home |

Brokers write offsets to the disk within seconds, and notes at once; a note is kept for hours at
least. So what one of the two has lost the other one still has: `state` says that there was a
decision even after retention has taken it, and that is an error then (DecisionLost), never a reason
to send rows again. The home is fixed when batch 0 begins, whichever brokers come and go after that.
Where no broker knows a sink in a later batch, its home is away, or `controlBroker` has to say that
the sink is new.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from secrets import token_hex
from typing import Final, NamedTuple, TypeVar

from penstock.client.client_session import Session
from penstock.client.consumer.pull_loop import PullAnswer, pull
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.client.topic_routes import Route
from penstock.errors import (
    BadSetting,
    DecisionLost,
    GroupNotExist,
    NoRoute,
    PenstockError,
    QueryNotFound,
    SendFailed,
    SinkTaken,
)
from penstock.spark.backoff import retry
from penstock.spark.message_schema import CONTROL_TOPIC as TOPIC
from penstock.spark.sink.batch_status import (
    HERE,
    INLINE_BYTES_MAX,
    Body,
    Kind,
    Note,
    Part,
    Standing,
    bundles,
    decode_note,
    encode_note,
    fold,
    rows_in,
    unfinished,
)
from penstock.transport.peer import Peer
from penstock.wire.codes import MASTER_ID, PULL_SUBSCRIPTION, RequestCode

T = TypeVar("T")

QUEUES: Final = 8
GROUP_PREFIX: Final = "CID_RMQ_SYS_PENSTOCK_SINK_"
"""A system group: brokers make it on first sight, and tools do not list it."""
PULL_MESSAGES: Final = 32

_HOME, _STATE, _OWNER, _SLOTS = range(4)
_NUMBER_BITS: Final = 62
_STANDING: Final = (Kind.DECIDED, Kind.ABORTED, Kind.DONE)

Send = Callable[[Message, MessageQueue], Awaitable[SendReceipt]]
MakeTopic = Callable[[str, int], Awaitable[None]]


class Numbers(NamedTuple):
    """What is kept beside the notes."""

    state: int
    owner: int | None
    position: int

    @property
    def last_batch(self) -> int:
        return (self.state - 1) // 2


class Control:
    """The control topic as one sink sees it; `send` and `make_topic` belong to its client.

    A broker that is away or busy is asked again for as long as `patience_ms`.
    """

    def __init__(
        self,
        session: Session,
        send: Send,
        make_topic: MakeTopic,
        sink_id: str,
        query_id: str | None,
        patience_ms: int,
    ) -> None:
        self._session = session
        self._send = send
        self._make_topic = make_topic
        self._patience_ms = patience_ms
        self.sink_id = sink_id
        self._query_id = query_id
        """Whose batches the caller takes them for; None: whosever they are."""
        number = _number("sink", session.options.namespace, sink_id)
        self._name = f"{number:016x}"
        self._topic = session.with_namespace(TOPIC)
        self._group = GROUP_PREFIX + self._name
        self._queue_id = _SLOTS + number % (QUEUES - _SLOTS)
        self.home = ""

    # --- home

    async def locate(self, batch_id: int, chosen: str | None = None) -> None:
        """Find the sink's home, or choose it for a new sink; raises DecisionLost and others."""
        self.home = await self._retry(lambda: self._find_home(batch_id, chosen))

    async def _find_home(self, batch_id: int, chosen: str | None) -> str:
        route = await self._session.find_route(self._topic)
        if route is None:
            await self._make_topic(TOPIC, QUEUES)
            route = await self._session.route(self._topic)
        numbers, failures = set(), []
        for answer in await asyncio.gather(
            *(self._get(broker, _HOME) for broker in route.brokers), return_exceptions=True
        ):
            if isinstance(answer, PenstockError):
                failures.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                numbers.add(answer)
        if failures and len(numbers) != 1:
            raise failures[0]
        if not numbers:
            return await self._choose_home(route, batch_id, chosen)
        home = self._known_home(route, min(numbers), chosen)
        if len(numbers) > 1:  # two tasks of batch 0 chose, and one did not know all brokers yet
            await self._note_home(route, home)
        return home

    def _known_home(self, route: Route, number: int, chosen: str | None) -> str:
        for broker in route.brokers:
            if _number("home", broker) == number:
                if chosen not in (None, broker):
                    raise BadSetting(
                        f"the decisions of the sink {self.sink_id!r} lie on {broker}, not on "
                        f"{chosen} (controlBroker)",
                        hint="leave the option out",
                    )
                return broker
        raise NoRoute(
            f"the broker that keeps the decisions of the sink {self.sink_id!r} is away (brokers "
            f"that are there: {', '.join(route.brokers)})",
            hint="start it again: only it knows whether the batch is published",
        )

    async def _choose_home(self, route: Route, batch_id: int, chosen: str | None) -> str:
        there = ", ".join(route.brokers)
        if chosen is not None and chosen not in route.brokers:
            raise BadSetting(
                f"{chosen!r} (controlBroker) has no topic {TOPIC} (brokers that have it: {there})",
                hint="name one of them",
            )
        if chosen is None and batch_id > 0:
            chosen = await self._search_home(route)
        if chosen is None and batch_id > 0:
            raise DecisionLost(
                f"no broker knows the sink {self.sink_id!r}, and this is its batch {batch_id}: the "
                "broker that keeps its decisions is away, or the sink is new (brokers that are "
                f"there: {there})",
                hint="wait for that broker; or, if the batches before were written otherwise, name "
                "a broker by the option controlBroker",
            )
        home = chosen or max(route.brokers, key=lambda name: _number(self._name, name))
        await self._note_home(route, home)
        return home

    async def _search_home(self, route: Route) -> str | None:
        """The broker with notes of the sink: it may have died before its numbers were on the disk,
        and then it has its notes all the same."""
        for broker in route.brokers:
            if await self._notes(broker, 0):
                return broker
        return None

    async def _note_home(self, route: Route, home: str) -> None:
        number = _number("home", home)
        await self._set(home, _HOME, number)
        others = (name for name in route.brokers if name != home)
        await asyncio.gather(*(self._set(name, _HOME, number) for name in others))

    # --- how it stands

    async def claim(self, batch_id: int) -> Standing:
        """How it stands with a batch of this query, to which the sink belongs from now on; raises
        SinkTaken if it is another's, and as `look`."""
        numbers = await self.numbers()
        standing = await self.look(batch_id, numbers)
        if self._query_id is not None and numbers.owner != _owner(self._query_id):
            await self._note(_OWNER, _owner(self._query_id))
        return standing

    async def numbers(self) -> Numbers:
        """The numbers kept beside the notes."""
        slots = (_STATE, _OWNER, self._queue_id)
        state, owner, position = await self._retry(
            lambda: asyncio.gather(*(self._get(self.home, slot) for slot in slots))
        )
        return Numbers(state or 0, owner, position or 0)

    async def look(self, batch_id: int, numbers: Numbers | None = None) -> Standing:
        """How it stands with a batch; raises DecisionLost, and SinkTaken for a batch of another
        query, or an older one than others that are decided."""
        numbers = numbers or await self.numbers()
        if numbers.state and self._is_anothers(numbers.owner):
            raise self._taken(batch_id, numbers.last_batch)
        self._check_rises(batch_id, numbers.last_batch)
        if numbers.state == 2 * batch_id + 2:
            return Standing(True, None)
        notes = await self._notes_at_home(numbers)
        done = (note.body.batch for note in notes if note.kind is Kind.DONE)
        self._check_rises(batch_id, max(done, default=-1))
        standing = fold(note for note in notes if note.body.batch == batch_id)
        decision = standing.decision
        if decision is not None and self._is_anothers(_owner(decision.body.query)):
            raise self._taken(batch_id, batch_id)
        if standing == (False, None) and numbers.state == 2 * batch_id + 1:
            raise DecisionLost(
                f"batch {batch_id} of the sink {self.sink_id!r} was decided, and retention has "
                f"removed how: some of its rows may be published (topic {TOPIC} on {self.home})"
            )
        return standing

    async def unfinished(self, batch_id: int) -> list[Note]:
        """Decisions on earlier batches that nobody has carried out, the earliest first."""
        numbers = await self.numbers()
        return unfinished(await self._notes_at_home(numbers), numbers.state // 2, batch_id)

    def _check_rises(self, batch_id: int, last: int) -> None:
        if last > batch_id:
            raise SinkTaken(
                f"batch {batch_id} of the sink {self.sink_id!r} comes after its batch {last}, which"
                " is decided: numbers of batches must rise",
                hint="do not put back a checkpoint; a batch write takes a new sinkId, or a higher "
                "batchId",
            )

    def _is_anothers(self, owner: int | None) -> bool:
        return None not in (owner, self._query_id) and owner != _owner(self._query_id or "")

    def _taken(self, batch_id: int, last: int) -> SinkTaken:
        return SinkTaken(
            f"the sink {self.sink_id!r} has batches of another query (up to batch {last}): batch "
            f"{batch_id} of this one would be taken for one of them"
        )

    async def _notes_at_home(self, numbers: Numbers) -> list[Note]:
        return await self._retry(lambda: self._notes(self.home, numbers.position))

    async def _notes(self, broker: str, position: int) -> list[Note]:
        """The notes of the sink that a broker has, in their order."""
        notes: list[Note] = []
        while True:
            answer = await self._pull(broker, self._queue_id, position, _STANDING, PULL_MESSAGES)
            notes += self._read(answer, _STANDING)
            if not position < answer.next_offset < answer.max_offset:
                return notes
            position = answer.next_offset

    # --- notes

    async def write_decision(self, batch_id: int, parcels: Sequence[bytes]) -> None:
        """Decide that a batch consists of these, unless something else is decided before: `look`
        tells afterwards."""
        inline, parts = b"", []
        if sum(map(len, parcels)) <= INLINE_BYTES_MAX:
            inline, parts = b"".join(parcels), [Part.of(HERE, parcels)]
        else:
            for bundle in bundles(parcels):
                body = Body(self.sink_id, batch_id)
                offset = await self._append(Kind.PART, body, b"".join(bundle))
                parts.append(Part.of(offset, bundle))
        body = Body(
            self.sink_id, batch_id, self._query_id or "", token_hex(8), rows_in(parcels), parts
        )
        await self._append(Kind.DECIDED, body, inline)

    async def write_abort(self, batch_id: int, parcels: Sequence[bytes]) -> None:
        """Make decisions void that may still come and that have one of these."""
        body = Body(self.sink_id, batch_id, parts=[Part.of(HERE, parcels)])
        await self._append(Kind.ABORTED, body)

    async def note_decided(self, decision: Note) -> None:
        """There is a decision, and whose: retention does not make that forgotten."""
        numbers = await self.numbers()
        if numbers.owner != _owner(decision.body.query):  # another one claimed the sink meanwhile
            await self._note(_OWNER, _owner(decision.body.query))
        await self._raise_state(2 * decision.body.batch + 1)

    async def note_done(self, decision: Note) -> None:
        """All of it is committed."""
        body = Body(self.sink_id, decision.body.batch, id=decision.body.id)
        await self._append(Kind.DONE, body)
        await self._raise_state(2 * decision.body.batch + 2)
        # After the state: with the position alone the decision would be overlooked.
        await self._note(self._queue_id, decision.offset + 1)

    async def _raise_state(self, state: int) -> None:
        if state > (await self.numbers()).state:
            await self._note(_STATE, state)

    async def _append(self, kind: Kind, body: Body, inline: bytes = b"") -> int:
        message = Message(TOPIC, encode_note(body, inline), self._tag(kind))
        return await self._retry(lambda: self._send_note(message))

    async def _send_note(self, message: Message) -> int:
        queue = MessageQueue(TOPIC, self.home, self._queue_id)
        receipt = await self._send(message, queue)
        if receipt.status is not SendStatus.SEND_OK:
            raise SendFailed(
                f"{self.home} has a note of the sink {self.sink_id!r} less safely than it should "
                f"({receipt.status.name})"
            )
        return receipt.queue_offset

    async def parcels(self, decision: Note) -> AsyncIterator[bytes]:
        """The parcels of a decision, one message of them at a time; raises DecisionLost."""
        for part in decision.body.parts:
            data = decision.inline if part.offset == HERE else await self._part(part.offset)
            for parcel in part.split(data):
                if parcel is None:
                    raise DecisionLost(
                        f"a part of the decision on batch {decision.body.batch} of the sink "
                        f"{self.sink_id!r} is gone: some of its {decision.body.rows} rows may be "
                        f"published ({self.home}, topic {TOPIC}, queue {self._queue_id}, offset "
                        f"{part.offset})"
                    )
                yield parcel

    async def _part(self, offset: int) -> bytes:
        kinds = (Kind.PART,)
        answer = await self._retry(lambda: self._pull(self.home, self._queue_id, offset, kinds, 1))
        found = [note.inline for note in self._read(answer, kinds) if note.offset == offset]
        return found[0] if found else b""

    # --- calls

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await retry(self._session.clock, self._patience_ms, attempt, self._refresh)

    async def _refresh(self) -> None:
        await self._session.find_route(self._topic)

    async def _note(self, queue_id: int, number: int) -> None:
        await self._retry(lambda: self._set(self.home, queue_id, number))

    def _tag(self, kind: Kind) -> str:
        return f"{kind.value}-{self._name}"

    def _read(self, answer: PullAnswer, kinds: Iterable[Kind]) -> list[Note]:
        """This sink's notes in an answer."""
        by_tag = {self._tag(kind): kind for kind in kinds}
        records: list[ReceivedMessage] = decode_records(answer.body, self.home)
        notes = (
            decode_note(by_tag[record.tags], record.queue_offset, record.body)
            for record in records
            if record.tags in by_tag  # brokers compare hashes
        )
        return [note for note in notes if note is not None and note.body.sink == self.sink_id]

    def _peer(self, broker: str) -> Peer:
        """Only the master: a replica may not have the last decisions."""
        address = self._session.brokers.get(broker, {}).get(MASTER_ID)
        if address is None:
            raise NoRoute(f"the master of the broker {broker} is away")
        return self._session.peer(address)

    async def _pull(
        self, broker: str, queue_id: int, offset: int, kinds: Iterable[Kind], count: int
    ) -> PullAnswer:
        fields = self._fields(broker, queue_id) | {
            "queueOffset": str(offset),
            "maxMsgNums": str(count),
            "sysFlag": str(PULL_SUBSCRIPTION),
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": " || ".join(map(self._tag, kinds)),
            "subVersion": "0",
            "expressionType": "TAG",
        }
        return await pull(self._peer(broker), fields, timeout_ms=self._session.options.timeout_ms)

    async def _get(self, broker: str, queue_id: int) -> int | None:
        fields = self._fields(broker, queue_id) | {"setZeroIfNotFound": "false"}
        try:
            answer = await self._session.call(
                self._peer(broker), RequestCode.QUERY_CONSUMER_OFFSET, fields
            )
        except QueryNotFound:
            return None
        text = answer.ext.get("offset", "")
        return int(text) if text.isascii() and text.isdigit() else None

    async def _set(self, broker: str, queue_id: int, number: int) -> None:
        fields = self._fields(broker, queue_id) | {"commitOffset": str(number)}
        code, peer = RequestCode.UPDATE_CONSUMER_OFFSET, self._peer(broker)
        try:
            await self._session.call(peer, code, fields)
        except GroupNotExist:  # pulls make a system group
            await self._pull(broker, queue_id, 0, _STANDING, 1)
            await self._session.call(peer, code, fields)

    def _fields(self, broker: str, queue_id: int) -> dict[str, str]:
        return {
            "consumerGroup": self._group,
            "topic": self._topic,
            "queueId": str(queue_id),
            "bname": broker,
        }


def _owner(query_id: str) -> int:
    return _number("owner", query_id)


def _number(*texts: str) -> int:
    """A number for texts that is the same everywhere and for ever."""
    data = "\0".join(texts).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> (64 - _NUMBER_BITS)
