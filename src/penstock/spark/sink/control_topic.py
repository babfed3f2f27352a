"""The control topic: where the decisions of a sink are stored durably and found with a few calls.

The topic PENSTOCK_SINK_CONTROL has eight queues on each broker. A sink has one control broker, and
one queue there for its control records (`batch_status`). Their tags contain the kind and the sink,
so that the broker filters them.

Control records are deleted by retention, consumer offsets are not. So four numbers are stored
besides, as offsets of a consumer group of the sink: in queues 0 to 2, which never have messages,
and in the sink's queue.

| Number | Meaning | Stored on |
|---|---|---|
| control broker | a hash of its name | each broker of the topic |
| state | twice the last batch, + 1: decided, + 2: done | the control broker |
| owner | a hash of the id of the query that writes the batches | the control broker |
| position | older control records in the sink's queue are not needed | the control broker |

Brokers write offsets to disk within seconds, and messages at once; messages are kept for hours at
least. So what one of the two loses, the other still has. If retention has deleted a decision,
`state` still says that there was one: that is an error (DecisionLost), never a reason to send rows
again. The control broker is fixed when batch 0 starts, whichever brokers come and go later. If no
broker knows the sink of a later batch, its control broker is unavailable, or the option
`controlBroker` has to say that the sink is new.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from secrets import token_hex
from typing import Final, NamedTuple, TypeVar

from penstock.arrow.backoff import retry
from penstock.arrow.message_schema import CONTROL_TOPIC as TOPIC
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
from penstock.spark.sink.batch_status import (
    INLINE_BYTES_MAX,
    INLINE_OFFSET,
    BatchStatus,
    ControlRecord,
    ControlRecordBody,
    ControlRecordKind,
    Part,
    decode_control_record,
    encode_control_record,
    group_chunks,
    rows_in,
    status_of,
    unfinished,
)
from penstock.transport.peer import Peer
from penstock.wire.codes import MASTER_ID, PULL_SUBSCRIPTION, RequestCode
from penstock.wire.java_numbers import parse_nonnegative

T = TypeVar("T")

QUEUES: Final = 8
GROUP_PREFIX: Final = "CID_RMQ_SYS_PENSTOCK_SINK_"
"""A system group: brokers create it on first use, and tools do not list it."""
PULL_MESSAGES: Final = 32

_CONTROL_BROKER, _STATE, _OWNER, _SLOTS = range(4)
_NUMBER_BITS: Final = 62
_STATUS_KINDS: Final = (
    ControlRecordKind.DECIDED,
    ControlRecordKind.ABORTED,
    ControlRecordKind.DONE,
)

Send = Callable[[Message, MessageQueue], Awaitable[SendReceipt]]
CreateTopic = Callable[[str, int], Awaitable[None]]


class SinkState(NamedTuple):
    """The numbers that are stored besides the control records."""

    state: int
    owner: int | None
    position: int

    @property
    def last_batch(self) -> int:
        return (self.state - 1) // 2


class ControlTopic:
    """The control topic of one sink; `send` and `create_topic` are its client's.

    Requests to an unavailable or busy broker are retried for `timeout_ms`.
    """

    def __init__(
        self,
        session: Session,
        send: Send,
        create_topic: CreateTopic,
        sink_id: str,
        query_id: str | None,
        timeout_ms: int,
    ) -> None:
        self._session = session
        self._send = send
        self._create_topic = create_topic
        self._timeout_ms = timeout_ms
        self.sink_id = sink_id
        self._query_id = query_id
        """The query that the batches must belong to; None: any."""
        number = _number("sink", session.options.namespace, sink_id)
        self._name = f"{number:016x}"
        self._topic = session.with_namespace(TOPIC)
        self._group = GROUP_PREFIX + self._name
        self._queue_id = _SLOTS + number % (QUEUES - _SLOTS)
        self.control_broker = ""

    # --- control broker

    async def find_control_broker(self, batch_id: int, chosen: str | None = None) -> None:
        """Find the sink's control broker, or choose one for a new sink; raises DecisionLost and
        others."""
        self.control_broker = await self._retry(lambda: self._look_up_broker(batch_id, chosen))

    async def _look_up_broker(self, batch_id: int, chosen: str | None) -> str:
        route = await self._session.find_route(self._topic)
        if route is None:
            await self._create_topic(TOPIC, QUEUES)
            route = await self._session.route(self._topic)
        hashes, failures = set(), []
        for answer in await asyncio.gather(
            *(self._get(broker, _CONTROL_BROKER) for broker in route.brokers),
            return_exceptions=True,
        ):
            if isinstance(answer, PenstockError):
                failures.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                hashes.add(answer)
        if failures and len(hashes) != 1:
            raise failures[0]
        if not hashes:
            return await self._choose_broker(route, batch_id, chosen)
        control_broker = self._known_broker(route, min(hashes), chosen)
        if len(hashes) > 1:  # two tasks of batch 0 chose, and one did not know all brokers yet
            await self._store_broker(route, control_broker)
        return control_broker

    def _known_broker(self, route: Route, number: int, chosen: str | None) -> str:
        for broker in route.brokers:
            if _number("home", broker) == number:
                if chosen not in (None, broker):
                    raise BadSetting(
                        f"the decisions of the sink {self.sink_id!r} are on {broker}, not on "
                        f"{chosen} (controlBroker)",
                        hint="leave the option out",
                    )
                return broker
        raise NoRoute(
            f"the broker that keeps the decisions of the sink {self.sink_id!r} is unavailable "
            f"(known brokers: {', '.join(route.brokers)})",
            hint="start it again: only it knows whether the batch is published",
        )

    async def _choose_broker(self, route: Route, batch_id: int, chosen: str | None) -> str:
        known = ", ".join(route.brokers)
        if chosen is not None and chosen not in route.brokers:
            raise BadSetting(
                f"{chosen!r} (controlBroker) has no topic {TOPIC} (brokers that have it: {known})",
                hint="name one of them",
            )
        if chosen is None and batch_id > 0:
            chosen = await self._search_broker(route)
        if chosen is None and batch_id > 0:
            raise DecisionLost(
                f"no broker knows the sink {self.sink_id!r}, and this is its batch {batch_id}: the "
                "broker that keeps its decisions is unavailable, or the sink is new (known "
                f"brokers: {known})",
                hint="wait for that broker; or, if another sink wrote the earlier batches, name a "
                "broker with the option controlBroker",
            )
        control_broker = chosen or max(route.brokers, key=lambda name: _number(self._name, name))
        await self._store_broker(route, control_broker)
        return control_broker

    async def _search_broker(self, route: Route) -> str | None:
        """The broker that has control records of the sink.

        It may have crashed before its offsets were on disk; it still has the records.
        """
        for broker in route.brokers:
            if await self._read_records(broker, 0):
                return broker
        return None

    async def _store_broker(self, route: Route, control_broker: str) -> None:
        number = _number("home", control_broker)
        await self._set(control_broker, _CONTROL_BROKER, number)
        others = (name for name in route.brokers if name != control_broker)
        await asyncio.gather(*(self._set(name, _CONTROL_BROKER, number) for name in others))

    # --- batch status

    async def take_ownership(self, batch_id: int) -> BatchStatus:
        """Make this query the owner of the sink; returns the status of the batch.

        Raises SinkTaken if the sink has batches of another query, and the errors of `status`.
        """
        stored_state = await self.stored_state()
        status = await self.status(batch_id, stored_state)
        if self._query_id is not None and stored_state.owner != _owner(self._query_id):
            await self._store_number(_OWNER, _owner(self._query_id))
        return status

    async def stored_state(self) -> SinkState:
        """The numbers stored besides the control records."""
        slots = (_STATE, _OWNER, self._queue_id)
        state, owner, position = await self._retry(
            lambda: asyncio.gather(*(self._get(self.control_broker, slot) for slot in slots))
        )
        return SinkState(state or 0, owner, position or 0)

    async def status(self, batch_id: int, stored_state: SinkState | None = None) -> BatchStatus:
        """The status of a batch.

        Raises DecisionLost, and SinkTaken if the batch belongs to another query, or if a later
        batch is decided.
        """
        stored_state = stored_state or await self.stored_state()
        if stored_state.state and self._has_other_owner(stored_state.owner):
            raise self._taken_error(batch_id, stored_state.last_batch)
        self._check_batch_order(batch_id, stored_state.last_batch)
        if stored_state.state == 2 * batch_id + 2:
            return BatchStatus(True, None)
        records = await self._current_records(stored_state)
        done = (record.body.batch for record in records if record.kind is ControlRecordKind.DONE)
        self._check_batch_order(batch_id, max(done, default=-1))
        status = status_of(record for record in records if record.body.batch == batch_id)
        decision = status.decision
        if decision is not None and self._has_other_owner(_owner(decision.body.query)):
            raise self._taken_error(batch_id, batch_id)
        if status == (False, None) and stored_state.state == 2 * batch_id + 1:
            raise DecisionLost(
                f"batch {batch_id} of the sink {self.sink_id!r} was decided, but retention has "
                f"deleted the decision: some of its rows may be published (topic {TOPIC} on "
                f"{self.control_broker})"
            )
        return status

    async def unfinished(self, batch_id: int) -> list[ControlRecord]:
        """Decisions on earlier batches that are not done, the earliest first."""
        stored_state = await self.stored_state()
        records = await self._current_records(stored_state)
        return unfinished(records, stored_state.state // 2, batch_id)

    def _check_batch_order(self, batch_id: int, last: int) -> None:
        if last > batch_id:
            raise SinkTaken(
                f"batch {batch_id} of the sink {self.sink_id!r} comes after its batch {last}, which"
                " is decided: batch numbers must increase",
                hint="do not restore an old checkpoint; for a batch write set a new sinkId or a "
                "higher batchId",
            )

    def _has_other_owner(self, owner: int | None) -> bool:
        return None not in (owner, self._query_id) and owner != _owner(self._query_id or "")

    def _taken_error(self, batch_id: int, last: int) -> SinkTaken:
        return SinkTaken(
            f"the sink {self.sink_id!r} has batches of another query (up to batch {last}): batch "
            f"{batch_id} of this one would be taken for one of them"
        )

    async def _current_records(self, stored_state: SinkState) -> list[ControlRecord]:
        position = stored_state.position
        return await self._retry(lambda: self._read_records(self.control_broker, position))

    async def _read_records(self, broker: str, position: int) -> list[ControlRecord]:
        """The control records of the sink on a broker, in order."""
        records: list[ControlRecord] = []
        while True:
            answer = await self._pull(
                broker, self._queue_id, position, _STATUS_KINDS, PULL_MESSAGES
            )
            records += self._read(answer, _STATUS_KINDS)
            if not position < answer.next_offset < answer.max_offset:
                return records
            position = answer.next_offset

    # --- control records

    async def write_decision(self, batch_id: int, chunks: Sequence[bytes]) -> None:
        """Decide that a batch consists of these chunks, unless there is an earlier decision:
        `status` tells afterwards."""
        inline, parts = b"", []
        if sum(map(len, chunks)) <= INLINE_BYTES_MAX:
            inline, parts = b"".join(chunks), [Part.of(INLINE_OFFSET, chunks)]
        else:
            for group in group_chunks(chunks):
                body = ControlRecordBody(self.sink_id, batch_id)
                offset = await self._append(ControlRecordKind.PART, body, b"".join(group))
                parts.append(Part.of(offset, group))
        body = ControlRecordBody(
            self.sink_id, batch_id, self._query_id or "", token_hex(8), rows_in(chunks), parts
        )
        await self._append(ControlRecordKind.DECIDED, body, inline)

    async def write_abort(self, batch_id: int, chunks: Sequence[bytes]) -> None:
        """Make later decisions void that have one of these chunks."""
        body = ControlRecordBody(self.sink_id, batch_id, parts=[Part.of(INLINE_OFFSET, chunks)])
        await self._append(ControlRecordKind.ABORTED, body)

    async def record_decided(self, decision: ControlRecord) -> None:
        """Store that there is a decision, and its owner: retention does not delete this."""
        stored_state = await self.stored_state()
        if stored_state.owner != _owner(
            decision.body.query
        ):  # another query took ownership meanwhile
            await self._store_number(_OWNER, _owner(decision.body.query))
        await self._raise_state(2 * decision.body.batch + 1)

    async def record_done(self, decision: ControlRecord) -> None:
        """Store that all half messages of a decision are committed."""
        body = ControlRecordBody(self.sink_id, decision.body.batch, id=decision.body.id)
        await self._append(ControlRecordKind.DONE, body)
        await self._raise_state(2 * decision.body.batch + 2)
        # After the state: with only the position stored, the decision would be overlooked.
        await self._store_number(self._queue_id, decision.offset + 1)

    async def _raise_state(self, state: int) -> None:
        if state > (await self.stored_state()).state:
            await self._store_number(_STATE, state)

    async def _append(
        self, kind: ControlRecordKind, body: ControlRecordBody, inline: bytes = b""
    ) -> int:
        message = Message(TOPIC, encode_control_record(body, inline), self._tag(kind))
        return await self._retry(lambda: self._send_control_record(message))

    async def _send_control_record(self, message: Message) -> int:
        queue = MessageQueue(TOPIC, self.control_broker, self._queue_id)
        receipt = await self._send(message, queue)
        if receipt.status is not SendStatus.SEND_OK:
            raise SendFailed(
                f"{self.control_broker} did not store a control record of the sink "
                f"{self.sink_id!r} durably ({receipt.status.name})"
            )
        return receipt.queue_offset

    async def chunks_of(self, decision: ControlRecord) -> AsyncIterator[bytes]:
        """The chunks of a decision, read one control record at a time; raises DecisionLost."""
        for part in decision.body.parts:
            data = (
                decision.inline if part.offset == INLINE_OFFSET else await self._part(part.offset)
            )
            for chunk in part.split(data):
                if chunk is None:
                    raise DecisionLost(
                        f"a part of the decision on batch {decision.body.batch} of the sink "
                        f"{self.sink_id!r} is missing: some of its {decision.body.rows} rows may "
                        f"be published ({self.control_broker}, topic {TOPIC}, queue "
                        f"{self._queue_id}, offset {part.offset})"
                    )
                yield chunk

    async def _part(self, offset: int) -> bytes:
        kinds = (ControlRecordKind.PART,)
        answer = await self._retry(
            lambda: self._pull(self.control_broker, self._queue_id, offset, kinds, 1)
        )
        found = [record.inline for record in self._read(answer, kinds) if record.offset == offset]
        return found[0] if found else b""

    # --- requests

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await retry(self._session.clock, self._timeout_ms, attempt, self._refresh)

    async def _refresh(self) -> None:
        await self._session.find_route(self._topic)

    async def _store_number(self, queue_id: int, number: int) -> None:
        await self._retry(lambda: self._set(self.control_broker, queue_id, number))

    def _tag(self, kind: ControlRecordKind) -> str:
        return f"{kind.value}-{self._name}"

    def _read(self, answer: PullAnswer, kinds: Iterable[ControlRecordKind]) -> list[ControlRecord]:
        """This sink's control records in a pull response."""
        by_tag = {self._tag(kind): kind for kind in kinds}
        messages: list[ReceivedMessage] = decode_records(answer.body, self.control_broker)
        records = (
            decode_control_record(by_tag[message.tags], message.queue_offset, message.body)
            for message in messages
            if message.tags in by_tag  # brokers compare only hashes of tags
        )
        return [
            record for record in records if record is not None and record.body.sink == self.sink_id
        ]

    def _peer(self, broker: str) -> Peer:
        """The master: a replica may not have the last decisions."""
        address = self._session.brokers.get(broker, {}).get(MASTER_ID)
        if address is None:
            raise NoRoute(f"the master of the broker {broker} is unavailable")
        return self._session.peer(address)

    async def _pull(
        self,
        broker: str,
        queue_id: int,
        offset: int,
        kinds: Iterable[ControlRecordKind],
        count: int,
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
        return parse_nonnegative(answer.ext.get("offset", ""))

    async def _set(self, broker: str, queue_id: int, number: int) -> None:
        fields = self._fields(broker, queue_id) | {"commitOffset": str(number)}
        code, peer = RequestCode.UPDATE_CONSUMER_OFFSET, self._peer(broker)
        try:
            await self._session.call(peer, code, fields)
        except GroupNotExist:  # a pull creates a system group
            await self._pull(broker, queue_id, 0, _STATUS_KINDS, 1)
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
    """A hash of texts that is the same in every process and version."""
    data = "\0".join(texts).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> (64 - _NUMBER_BITS)
