"""Clients that record what they saw: producers, readers of each replica, and a group's consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from penstock.client.consumer.async_consumer import AsyncConsumer
from penstock.client.messages import Message, MessageQueue, SendStatus
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.errors import PeerError, PeerUnreachable, PenstockError, SendFailed
from penstock.transport.peer import Peer, Response
from penstock.wire.codes import RequestCode, ResponseCode
from tests.compat.histories.cluster import BROKER_SET, BROKERS, Cluster
from tests.compat.histories.history import Delivery, Final, Outcome, QueueEnd, Read, Record, Send
from tests.compat.python_reading import PULL

TOPIC, QUEUES = "numbers", 3
GROUP = "history"
SEND_MS = 1_000
ROUTES_MS = 200
PAUSE_S = 0.004
FAILED_PAUSE_S = 0.03
PULL_MS = 500
READ_PAUSE_S = 0.03
FINAL_MS = 5_000
NOT_STORED = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SYSTEM_ERROR,
    }
)
"""A broker that answers so has stored nothing."""

Clock = Callable[[], float]
"""Seconds since the begin of the history."""
Note = Callable[[Record], None]


def queue_name(topic: str, queue_id: int) -> str:
    return f"{topic}/{queue_id}"


def is_certain_failure(error: PenstockError) -> bool:
    """Whether an error means that nothing was stored."""
    attempts: Sequence[PenstockError] = (error,)
    if isinstance(error, SendFailed) and error.attempts:
        attempts = error.attempts
    return all(
        isinstance(one, PeerUnreachable)
        or (not isinstance(one, PeerError) and one.answer_code in NOT_STORED)
        for one in attempts
    )


class NumberProducer:
    """Sends numbers to all queues in turn, one after another, until it is stopped."""

    def __init__(
        self, name: str, nameserver: str, clock: Clock, note: Note, *, retries: int = 0
    ) -> None:
        """With `retries`, a message may be stored several times."""
        self.name = name
        self._nameserver = nameserver
        self._clock = clock
        self._note = note
        self._retries = retries
        self._stopping = False
        self.acknowledged = 0

    def stop(self) -> None:
        """Let `run` end after the next outcome."""
        self._stopping = True

    async def run(self) -> None:
        """Send; an instance name of its own gives it connections of its own."""
        async with AsyncProducer(
            self._nameserver,
            group=f"group-{self.name}",
            instance_name=self.name,
            retries=self._retries,
            timeout_ms=SEND_MS,
            route_refresh_ms=ROUTES_MS,
            heartbeat_ms=1_000,
            create_topics=False,
            avoid_faulty=False,
        ) as producer:
            number = 0
            while not self._stopping:
                queue = MessageQueue(TOPIC, BROKER_SET, number % QUEUES)
                acknowledged = await self._send(producer, queue, f"{self.name}-{number}")
                number += 1
                await asyncio.sleep(PAUSE_S if acknowledged else FAILED_PAUSE_S)

    async def _send(self, producer: AsyncProducer, queue: MessageQueue, body: str) -> bool:
        begin, offset, detail = self._clock(), -1, ""
        outcome: Outcome = "unknown"
        try:
            receipt = await producer.send(Message(TOPIC, body), queue=queue)
            offset, detail = receipt.queue_offset, receipt.status.name
            if receipt.status == SendStatus.SEND_OK:
                outcome = "acknowledged"
                self.acknowledged += 1
        except PenstockError as error:
            outcome = "failed" if is_certain_failure(error) else "unknown"
            detail = f"{type(error).__name__}: {error.message}"
        self._note(
            Send(
                producer=self.name,
                queue=queue_name(TOPIC, queue.queue_id),
                body=body,
                outcome=outcome,
                offset=offset,
                attempts_max=1 + self._retries,
                begin=begin,
                end=self._clock(),
                detail=detail,
            )
        )
        return outcome == "acknowledged"


class ReplicaReader:
    """Reads the queues of one broker, master or slave, again and again."""

    def __init__(self, machine: str, address: str, clock: Clock, note: Note) -> None:
        self.machine = machine
        self._address = address
        self._clock = clock
        self._note = note
        self._next = dict.fromkeys(range(QUEUES), 0)

    async def run(self) -> None:
        """Read until it is cancelled."""
        peer = Peer(self._address, connect_ms=PULL_MS)
        try:
            while True:
                try:
                    for queue_id in range(QUEUES):
                        await self._pull(peer, queue_id)
                except PenstockError:
                    await asyncio.sleep(READ_PAUSE_S)
                await asyncio.sleep(READ_PAUSE_S)
        finally:
            await peer.close()

    async def _pull(self, peer: Peer, queue_id: int) -> None:
        answer = await pull(peer, TOPIC, queue_id, self._next[queue_id], PULL_MS)
        moved = int(answer.ext.get("nextBeginOffset", self._next[queue_id]))
        if answer.code == ResponseCode.SUCCESS:
            for one in messages_of(answer):
                body = one.body.decode()
                queue = queue_name(TOPIC, queue_id)
                self._note(Read(self.machine, queue, one.queue_offset, body, self._clock()))
            self._next[queue_id] = moved
        elif answer.code == ResponseCode.PULL_OFFSET_MOVED:
            # The replica has less than before, for example an empty disk: read it again.
            self._next[queue_id] = min(moved, self._next[queue_id])


async def pull(peer: Peer, topic: str, queue_id: int, offset: int, timeout_ms: int) -> Response:
    fields = {**PULL, "topic": topic, "queueId": str(queue_id), "queueOffset": str(offset)}
    return await peer.call(RequestCode.PULL_MESSAGE, fields, timeout_ms=timeout_ms)


def messages_of(answer: Response) -> list[ReceivedMessage]:
    return decode_records(answer.body, BROKER_SET)


class GroupConsumer:
    """A push consumer of a group; it notes what its handler gets."""

    def __init__(self, nameserver: str, clock: Clock, note: Note) -> None:
        self._clock = clock
        self._note = note
        self.seen: set[tuple[str, str]] = set()
        """The queue and body of each message that was received."""
        self._consumer = AsyncConsumer(
            nameserver,
            group=GROUP,
            instance_name="consumer",
            start_at="first",
            timeout_ms=SEND_MS,
            route_refresh_ms=ROUTES_MS,
            heartbeat_ms=500,
            rebalance_ms=1_000,
            drain_ms=1_000,
        )

    async def start(self) -> None:
        async def handle(message: ReceivedMessage) -> None:
            queue, body = queue_name(TOPIC, message.queue_id), message.body.decode()
            self.seen.add((queue, body))
            self._note(Delivery(GROUP, queue, message.queue_offset, body, self._clock()))

        self._consumer.on(TOPIC)(handle)
        await self._consumer.start()

    async def await_all(self, wanted: Iterable[tuple[str, str]], within_s: float) -> None:
        """Wait until all these were received, or until the time is over."""
        missing = set(wanted)
        deadline = asyncio.get_running_loop().time() + within_s
        while (missing := missing - self.seen) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._consumer.close()


async def read_all(cluster: Cluster, master: str, topics: Iterable[str], note: Note) -> None:
    """The last read: all queues of all replicas."""
    ends: dict[str, int] = {}
    for machine in (master, *(one for one in BROKERS if one != master)):
        peer = Peer(cluster.servers[machine].address)
        try:
            for queue_id in range(QUEUES):
                for topic in topics:
                    queue = queue_name(topic, queue_id)
                    if machine == master:
                        low, high = await _range(peer, topic, queue_id)
                        note(QueueEnd(machine, machine == master, queue, low, high))
                        ends[queue] = high
                    for one in await _read_queue(peer, topic, queue_id, ends[queue]):
                        body = one.body.decode()
                        note(Final(machine, machine == master, queue, one.queue_offset, body))
        finally:
            await peer.close()


async def _range(peer: Peer, topic: str, queue_id: int) -> tuple[int, int]:
    fields = {"topic": topic, "queueId": str(queue_id)}
    low, high = [
        await peer.call(code, fields, timeout_ms=FINAL_MS)
        for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
    ]
    return int(low.ext["offset"]), int(high.ext["offset"])


async def _read_queue(peer: Peer, topic: str, queue_id: int, end: int) -> list[ReceivedMessage]:
    """All messages of a queue. A slave learns a little later what is confirmed: wait for it."""
    found: list[ReceivedMessage] = []
    offset, deadline = 0, asyncio.get_running_loop().time() + FINAL_MS / 1000
    while offset < end and asyncio.get_running_loop().time() < deadline:
        answer = await pull(peer, topic, queue_id, offset, FINAL_MS)
        if answer.code == ResponseCode.SUCCESS:
            found += messages_of(answer)
            offset = int(answer.ext["nextBeginOffset"])
        else:
            await asyncio.sleep(READ_PAUSE_S)
    return found
