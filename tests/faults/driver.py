"""A client of a broker that is killed repeatedly: it sends, consumes, sends back and ends
transactions, and records what was acknowledged and what it received.

It outlives the broker: a request without a response counts as not acknowledged, and the client
continues with the next broker, perhaps at another address. Each sender waits for its response
before it sends again, so the messages of a queue are stored in the order of their numbers.
"""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PeerError
from penstock.transport.peer import Peer, PeerRequest, Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import HeartbeatData, ProducerData
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import (
    StoredMessage,
    decode_message,
    decode_messages,
    encode_batch,
    encode_properties,
)
from penstock.wire.message_ids import decode_offset_id

GROUP = "G"
RETRIES = f"%RETRY%{GROUP}"
DEAD_LETTERS = f"%DLQ%{GROUP}"
CALL_MS = 20_000
PAUSE_S = 0.05
PREPARED, COMMIT, ROLLBACK, UNKNOWN = 0x04, 0x08, 0x0C, 0
_ABSENT = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)
_NOTHING = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY)

Place = tuple[str, int]
"""A topic and a queue id."""


@dataclass(slots=True)
class Sent:
    """A sent message: when it was sent, when it may arrive, and what was acknowledged."""

    sent_ms: int
    due_ms: int
    outcome: int = COMMIT  # of a transaction
    decided_ms: int = 0  # when its commit or rollback was first requested
    acked: bool = False
    ended: bool = False


@dataclass(slots=True)
class SentBack:
    """A message that was sent back: when first, and whether that was acknowledged."""

    first_ms: int
    acked: bool = False


@dataclass(slots=True)
class Received:
    """A message that a consumer received."""

    name: str
    queue_offset: int
    store_ms: int
    got_ms: int
    message: StoredMessage


@dataclass(slots=True)
class History:
    """What was acknowledged, and what was received."""

    sent: dict[str, Sent] = field(default_factory=dict)
    sent_back: dict[str, SentBack] = field(default_factory=dict)
    given_up: dict[str, SentBack] = field(default_factory=dict)
    """Messages that were sent back once more, as dead letters."""
    got: dict[Place, list[Received]] = field(default_factory=dict)
    checks: int = 0

    def names(self, topic: str) -> set[str]:
        """The names of the messages received from a topic."""
        return {one.name for (name, _), rows in self.got.items() if name == topic for one in rows}


def now_ms() -> int:
    return int(time.time() * 1000)


class Driver:
    """All clients of one broker, over one connection."""

    def __init__(self, address: str, seed: str, *, refused: Collection[int] = ()) -> None:
        """A response with a code of `refused` counts as none."""
        self.history = History()
        self.rng = random.Random(seed)
        self.life = 0
        """How often the broker has come up."""
        self.acked_s: dict[int, float] = {}
        """By life: when the last acknowledged message was sent. What the broker has stored before
        that is confirmed too."""
        self._refused = refused
        self._peer = Peer(address, on_request=self._asked)
        self._up = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[BaseException] = []

    # --- life cycle

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._faults.append(error)

    def check(self) -> None:
        """Raise the first error of a background task."""
        if self._faults:
            raise self._faults[0]

    async def broker_is_up(self, address: str = "") -> None:
        """Go on at the broker, or at its new address."""
        if address and address != self._peer.address:
            await self._peer.close()
            self._peer = Peer(address, on_request=self._asked)
        await self.send_heartbeat()
        self.life += 1
        self._up.set()

    async def send_heartbeat(self) -> None:
        """So that the broker can check transactions."""
        data = HeartbeatData(client_id="driver", producer_data_set=[ProducerData(group_name=GROUP)])
        answer = await self._peer.call(
            RequestCode.HEART_BEAT, {}, fastjson.encode(data), timeout_ms=CALL_MS
        )
        assert answer.code == 0, answer

    def broker_dies(self) -> None:
        self._up.clear()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peer.close()

    async def ask(self, code: int, ext: dict[str, str], body: bytes = b"") -> Response | None:
        """The response, or None if the broker died before it or refuses the request."""
        await self._up.wait()
        try:
            answer = await self._peer.call(code, ext, body, timeout_ms=CALL_MS)
        except PeerError:
            return None
        if answer.code in self._refused:
            await asyncio.sleep(PAUSE_S)
            return None
        return answer

    # --- sending

    async def send(
        self, name: str, topic: str, queue_id: int, sent: Sent, properties: dict[str, str],
        sys_flag: int = 0,
    ) -> Response | None:  # fmt: skip
        """Send a message and record it; returns the response if there is one."""
        self.history.sent[name] = sent
        began_s = time.monotonic()
        ext = {
            **self._send_header(topic, queue_id, sent.sent_ms), "f": str(sys_flag),
            "i": encode_properties({**self._named(name), **properties}).decode(),
        }  # fmt: skip
        answer = await self.ask(RequestCode.SEND_MESSAGE_V2, ext, name.encode())
        if answer is None:
            return None
        assert answer.code == 0, answer
        sent.acked = True
        self.acked_s[self.life] = max(began_s, self.acked_s.get(self.life, 0))
        return answer

    async def send_batch(self, names: list[str], topic: str, queue_id: int, sent_ms: int) -> None:
        """Send messages as a batch and record them."""
        sent = {name: Sent(sent_ms, sent_ms) for name in names}
        self.history.sent |= sent
        body = encode_batch((name.encode(), 0, self._named(name)) for name in names)
        ext = {**self._send_header(topic, queue_id, sent_ms), "m": "true"}
        answer = await self.ask(RequestCode.SEND_BATCH_MESSAGE, ext, body)
        if answer is not None:
            assert answer.code == 0, answer
            for one in sent.values():
                one.acked = True

    def _named(self, name: str) -> dict[str, str]:
        return {"UNIQ_KEY": name.upper().ljust(32, "X"), "KEYS": name}

    def _send_header(self, topic: str, queue_id: int, sent_ms: int) -> dict[str, str]:
        return {
            "a": GROUP, "b": topic, "c": "TBW102", "d": "4", "e": str(queue_id),
            "f": "0", "g": str(sent_ms), "h": "0", "j": "0", "m": "false",
        }  # fmt: skip

    async def send_transaction(
        self, name: str, topic: str, queue_id: int, sent: Sent, properties: dict[str, str]
    ) -> None:
        """Send a half message and end its transaction, unless that is left to a check."""
        half = {"TRAN_MSG": "true", "PGROUP": GROUP, **properties}
        answer = await self.send(name, topic, queue_id, sent, half, PREPARED)
        if answer is None or self.rng.random() < 0.3:
            return
        handle = {
            "tranStateTableOffset": answer.ext["queueOffset"],
            "commitLogOffset": str(decode_offset_id(answer.ext["msgId"]).offset),
        }
        await self._end(name, sent, handle, sent.outcome, checked=False)
        if self.rng.random() < 0.3:  # a client that has lost the response
            await self._end(name, sent, handle, sent.outcome, checked=False)

    async def _end(
        self, name: str, sent: Sent, handle: dict[str, str], state: int, *, checked: bool
    ) -> None:
        if state != UNKNOWN and not sent.decided_ms:
            sent.decided_ms = now_ms()
        ext = {
            **handle, "producerGroup": GROUP, "commitOrRollback": str(state),
            "fromTransactionCheck": str(checked).lower(), "msgId": name, "transactionId": name,
        }  # fmt: skip
        answer = await self.ask(RequestCode.END_TRANSACTION, ext)
        if answer is not None and (sent.acked or answer.code == 0):
            # A half message that was checked before it was confirmed may be lost with its master.
            assert answer.code == 0, (name, answer)
            sent.ended = sent.ended or state != UNKNOWN

    def _asked(self, ask: PeerRequest) -> Response | None:
        if ask.code != RequestCode.CHECK_TRANSACTION_STATE:
            return None
        name = decode_message(ask.body).body.decode()
        self.history.checks += 1
        sent = self.history.sent[name]
        handle = {key: ask.ext[key] for key in ("tranStateTableOffset", "commitLogOffset")}
        state = UNKNOWN if self.rng.random() < 0.2 else sent.outcome
        self.start(self._end(name, sent, handle, state, checked=True))
        return None

    # --- consuming

    async def consume(
        self,
        topic: str,
        queue_id: int,
        then: Callable[[Received], Coroutine[Any, Any, None]] | None,
    ) -> None:
        """Pull a queue from its first message on until cancelled."""
        rows = self.history.got.setdefault((topic, queue_id), [])
        while True:
            for one in await self.pull(topic, queue_id, len(rows)):
                assert one.queue_offset == len(rows), (topic, queue_id, one.queue_offset)
                if then is not None:
                    await then(one)
                rows.append(one)

    async def pull(self, topic: str, queue_id: int, offset: int) -> list[Received]:
        """The messages of a queue from an offset on; waits a little for the first one."""
        ext = {
            "consumerGroup": GROUP, "topic": topic, "queueId": str(queue_id),
            "queueOffset": str(offset), "maxMsgNums": "32", "sysFlag": "6", "commitOffset": "0",
            "suspendTimeoutMillis": "500", "subscription": "*", "subVersion": "0",
            "expressionType": "TAG",
        }  # fmt: skip
        answer = await self.ask(RequestCode.PULL_MESSAGE, ext)
        if answer is None or answer.code in _NOTHING:
            return []
        if answer.code in _ABSENT:
            await asyncio.sleep(PAUSE_S)
            return []
        assert answer.code == 0, (topic, queue_id, offset, answer)
        at = now_ms()
        return [
            Received(message.body.decode(), message.queue_offset, message.store_ms, at, message)
            for message in decode_messages(answer.body)
        ]

    async def send_back(self, got: Received) -> None:
        """Send a message back with a delay of a second, until that is acknowledged."""
        sent_back = self.history.sent_back.setdefault(got.name, SentBack(now_ms()))
        await self._send_back(got, sent_back, retries_max=16)

    async def give_up(self, got: Received) -> None:
        """Send a message back that has been retried as often as allowed."""
        given_up = self.history.given_up.setdefault(got.name, SentBack(now_ms()))
        await self._send_back(got, given_up, retries_max=got.message.reconsume_times)

    async def _send_back(self, got: Received, sent_back: SentBack, *, retries_max: int) -> None:
        ext = {
            "offset": str(got.message.physical_offset), "group": GROUP, "delayLevel": "1",
            "originMsgId": got.message.message_id, "originTopic": got.message.topic,
            "unitMode": "false", "maxReconsumeTimes": str(retries_max),
        }  # fmt: skip
        while not sent_back.acked:
            answer = await self.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext)
            if answer is not None:
                assert answer.code == 0, (got.name, answer)
                sent_back.acked = True
