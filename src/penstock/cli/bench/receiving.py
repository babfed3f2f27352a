"""Receiving: consumers that only record when messages arrive."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from penstock.cli.bench.measurement import MS_NS, Measurement
from penstock.cli.bench.stamped_body import PROBE, SeenNumbers, StampedBodies
from penstock.client.messages import Message
from penstock.errors import ClientError

if TYPE_CHECKING:
    from penstock.client.messages import MessageQueue
    from penstock.client.producer.async_producer import AsyncProducer
    from penstock.client.received_message import ReceivedMessage

HANDLE_BATCH = 32
PROBE_EVERY_S = 0.5
READY_S_MAX = 60.0
POLL_S = 0.05
PRIMING_BODY = b"penstock bench: connect"
"""The body of the messages that open the connections of producers; they are not counted."""


class StampedReceiver:
    """Receives the messages of an end-to-end run."""

    def __init__(self, bodies: StampedBodies, measured: Measurement) -> None:
        self._bodies = bodies
        self.measured = measured
        self.seen = SeenNumbers()
        self.probed: set[MessageQueue] = set()
        """Queues from which a probe has arrived."""

    def receive(self, messages: "Sequence[ReceivedMessage]") -> None:
        """Record messages that were delivered together."""
        now_ns = time.monotonic_ns()
        for message in messages:
            body = message.body
            stamp = self._bodies.read(body)
            if stamp is None:
                continue
            begin_ns, number = stamp
            if number == PROBE:
                self.probed.add(message.queue)
            elif self.seen.add(number):
                self.measured.succeeded(begin_ns, now_ns, len(body))

    async def wait_for_subscription(self, producer: "AsyncProducer", topic: str) -> None:
        """Return when a message of each queue has arrived, so that no later one is missed."""
        queues = {*await producer.queues(topic)}
        deadline = time.monotonic() + READY_S_MAX
        while missing := queues - self.probed:
            if time.monotonic() > deadline:
                names = ", ".join(f"{q.broker_name}/{q.queue_id}" for q in sorted(missing)[:5])
                raise ClientError(
                    f"no message arrived from {len(missing)} of {len(queues)} queues of {topic} "
                    f"within {READY_S_MAX:.0f} s ({names})",
                    hint="check that the topic is readable and that the group may consume it",
                )
            body = self._bodies.body(time.monotonic_ns(), PROBE)
            await asyncio.gather(
                *(producer.send(Message(topic, body), queue=queue) for queue in missing)
            )
            await _until(lambda: queues <= self.probed, PROBE_EVERY_S)

    async def wait_for(self, numbers: SeenNumbers, seconds: float, stop: asyncio.Event) -> None:
        """Wait until all of these numbers have arrived, or for this time."""
        await _until(lambda: stop.is_set() or self.seen.missing(numbers) == 0, seconds)


class ArrivalReceiver:
    """Receives whatever is in a topic, and records its age if that is wanted.

    The measurement begins with the first message, or, for new messages (`ages`), with `start`.
    """

    def __init__(self, begin: Callable[[], Measurement], *, ages: bool) -> None:
        self._begin = begin
        self._ages = ages
        self._measured: Measurement | None = None

    def start(self) -> Measurement:
        """Begin the measurement unless it has begun."""
        if self._measured is None:
            self._measured = self._begin()
        return self._measured

    def receive(self, messages: "Sequence[ReceivedMessage]") -> None:
        """Record messages that were delivered together. Ages compare two machines' clocks."""
        if self._measured is None and self._ages:
            return
        counted = [message for message in messages if not _is_priming(message)]
        if not counted:
            return
        measured = self.start()
        now_ns, now_ms = time.monotonic_ns(), time.time_ns() / MS_NS
        for message in counted:
            age_ns = round((now_ms - message.store_ms) * MS_NS) if self._ages else None
            measured.arrived(now_ns, age_ns, message.body_length)

    async def wait_for_first(self, seconds: float, stop: asyncio.Event) -> bool:
        """Return when a message has arrived, or after this time; whether one has."""
        await _until(lambda: stop.is_set() or self._measured is not None, seconds)
        return self._measured is not None


def _is_priming(message: "ReceivedMessage") -> bool:
    return message.body_length == len(PRIMING_BODY) and message.body == PRIMING_BODY


@contextlib.asynccontextmanager
async def consumers(
    count: int,
    nameserver: str | None,
    topic: str,
    receiver: StampedReceiver | ArrivalReceiver,
    **options: object,
) -> AsyncIterator[None]:
    """Run this many consumers of one group."""
    from penstock.client.consumer.async_consumer import AsyncConsumer

    async def handle(messages: "list[ReceivedMessage]") -> None:
        receiver.receive(messages)

    async with contextlib.AsyncExitStack() as running:
        for _ in range(count):
            consumer = AsyncConsumer(
                nameserver,
                handle_batch=HANDLE_BATCH,
                **options,  # type: ignore[arg-type]
            )
            consumer.on(topic)(handle)
            await running.enter_async_context(consumer)
        yield


async def _until(done: Callable[[], bool], seconds: float) -> None:
    """Return when this is true, or after this time."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
