"""The usual way of a message: everything it needs is there, so it leaves at once.

What happens here happens for every message and makes no task; whatever has to wait, and whatever
goes wrong, is the Sender's (a subclass, in `sending`).
"""

import asyncio
from asyncio import _get_running_loop
from os import getpid
from typing import Any

from penstock.client.messages import Message, MessageQueue, SendStatus
from penstock.client.producer.broker_latency import SLOW_MS, BrokerFaults
from penstock.client.producer.send_codec import (
    Flight,
    Line,
    encode_properties,
    plain_text,
    put_send,
)
from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.transport.pending_calls import PendingCalls

UNSENT_BYTES_MAX = 8 * 1024 * 1024
"""Unsent bytes of a connection above which messages wait outside of it."""

_UNSENT_BYTES_MAX = UNSENT_BYTES_MAX
_SLOW_MS = SLOW_MS
_OK = SendStatus.SEND_OK

_int = int  # hides annotations from the compiler, keeps them for mypy
_str = str
_bool = bool


class Wave:
    """Messages between two flushes."""

    def __init__(self) -> None:
        self.count: int = 0
        self.over: asyncio.Future[None] | None = None


class Tally:
    """How much is under way; a subclass has those who wait for room, and the limits' errors."""

    def __init__(self, count_max: _int, size_max: _int) -> None:
        self.count: int = 0
        self.size: int = 0
        self.count_max: int = count_max
        self.size_max: int = size_max
        self.wave: Wave = Wave()
        self.waiting: bool = False  # for room

    def enter(self, length: _int) -> Wave:
        """One more under way; raises TooMuchInFlight."""
        if self.count >= self.count_max or self.size >= self.size_max:
            self.refuse()
        self.count += 1
        self.size += length
        wave = self.wave
        wave.count += 1
        return wave

    def leave(self, wave: Wave, length: _int) -> None:
        """One less: it has its answer, or none will come."""
        self.count -= 1
        self.size -= length
        wave.count -= 1
        if wave.count == 0 and wave.over is not None and not wave.over.done():
            wave.over.set_result(None)
        if self.waiting:
            self.wake()

    def refuse(self) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError


class Ring:
    """The queues of a topic in turn."""

    def __init__(self, lines: tuple[Line, ...], start: _int) -> None:
        self.lines: tuple[Line, ...] = lines
        self.queues: tuple[MessageQueue, ...] = tuple(line.queue for line in lines)
        self.count: int = len(lines)
        self.alone: bool = len({line.broker_name for line in lines}) == 1
        self.turn: int = start

    def next(self, faults: BrokerFaults, last_broker: str | None) -> Line:
        """The queue whose turn it is, of a broker that does well if there are several."""
        self.turn += 1
        if self.alone:
            return self.lines[self.turn % self.count]
        self.turn = faults.choose(self.queues, self.turn, last_broker=last_broker)
        return self.lines[self.turn]


class Launcher:
    """Makes messages ready and lets them leave."""

    def __init__(self, clock: Clock, tally: Tally, faults: BrokerFaults, timeout_ms: _int) -> None:
        self.clock: Clock = clock
        self.tally: Tally = tally
        self.faults: BrokerFaults = faults
        self.tracer: Any = None
        self.timeout_ms: int = timeout_ms
        self.open: bool = False
        self.pid: int = 0
        self.loop: Any = None
        self.packer: Any = None
        self.create_future: Any = None
        self.topics_known: dict[str, Ring] = {}
        self.waiting: dict[str, int] = {}  # topic → messages that have not left yet
        self.troubled: set[str] = set()  # brokers whose faults are known
        self.retry_not_stored: bool = False

    def launch(
        self,
        message: Message,
        choice: Any,
        ordering_key: str | None,
        timeout_ms: int | None,
        internal: _bool,
        traced: _bool,
    ) -> Any:
        """Send; gives the future of the receipt. `choice` binds it to a queue."""
        flight = self.make_flight(message, ordering_key, timeout_ms, internal)
        flight.traced = traced and self.tracer is not None
        flight.choice = choice
        self.depart(flight)
        return flight.future

    def make_flight(
        self, message: Message, ordering_key: str | None, timeout_ms: int | None, internal: _bool
    ) -> Flight:
        """A message made ready, not on its way yet. Raises what is wrong with it."""
        if not self.open or _get_running_loop() is not self.loop or self.pid != getpid():
            self.refuse()
        packer = self.packer
        topic = message.topic
        if type(topic) is not str:
            topic = plain_text("a topic", topic)
        flight = self.empty_flight(message, topic, timeout_ms)
        body = message.body
        if type(body) is bytes and 0 < len(body) < packer.plain_bytes:
            flight.body = body
        else:
            flight.body, flight.sys_flag = packer.body(message)
        if internal:
            message = packer.internal(flight, message)
        message_id = flight.message_id = packer.next_id(flight.began_ms)
        more = packer.own
        if (
            ordering_key is not None
            or message.delay_level
            or message.delay is not None
            or message.deliver_at is not None
        ):
            more = packer.special(message, ordering_key)
        flight.properties = encode_properties(message, message_id, more, internal)
        if message.flag:
            flight.flag = packer.flag(message)
        return flight

    def empty_flight(self, message: Any, topic: _str, timeout_ms: int | None) -> Flight:
        """The same without its parts."""
        limit_ms = self.timeout_ms if timeout_ms is None else timeout_ms
        clock = self.clock
        return Flight(
            self,
            self.create_future(),
            message,
            topic,
            clock.now_ms(),
            limit_ms,
            clock.monotonic_ms() + limit_ms,
        )

    def depart(self, flight: Flight) -> None:
        """Let it leave now if everything is there, else as soon as it is."""
        topic = flight.topic
        ring = self.topics_known.get(topic)
        if ring is not None and topic not in self.waiting:
            choice = flight.choice
            line = ring.next(self.faults, None) if choice is None else choice(ring)
            calls = None if line.peer is None else line.peer.calls
            if calls is not None and (
                not calls.paused or line.peer.connection.unsent < _UNSENT_BYTES_MAX
            ):
                flight.wave = self.tally.enter(len(flight.body))
                try:
                    self.write(calls, flight, line)
                except BaseException:  # it has not left, and its caller is told so
                    self.tally.leave(flight.wave, len(flight.body))
                    raise
                return
            flight.line = line  # its turn is taken: no other is when it leaves
        self.depart_later(flight)

    def write(self, calls: PendingCalls, flight: Flight, line: Line) -> None:
        """Put its request out."""
        flight.line = line
        flight.sent_ms = flight.deadline_ms - flight.timeout_ms
        if flight.attempts is not None or flight.late:
            flight.sent_ms = self.clock.monotonic_ms()
        opaque = calls.expect(flight)
        try:
            self.put(calls, flight, line, opaque, 0)
        except BaseException:  # nobody will answer it
            calls.pending.pop(opaque, None)
            raise

    def put(
        self, calls: PendingCalls, flight: Flight, line: Line, opaque: _int, command_flag: _int
    ) -> None:
        """Write a request with this number."""
        if line.signs:
            self.put_signed(flight, line, opaque, command_flag)
        elif put_send(calls.output, flight, line, opaque, command_flag):
            calls.push()
        else:
            line.peer.connection.write(flight.body)

    def landed(self, flight: Flight, result: Any, status: SendStatus) -> None:
        """A broker has taken it: `result` is the receipt, or those of a batch."""
        latency_ms = flight.answered_ms - flight.sent_ms
        line = flight.line
        if latency_ms >= _SLOW_MS or (
            self.troubled and line is not None and line.broker_name in self.troubled
        ):
            self.recovered(flight, latency_ms)
        if status is not _OK and self.retry_not_stored and self.not_stored(flight, result, status):
            return
        self.tally.leave(flight.wave, len(flight.body))
        future = flight.future
        if not future.done():
            future.set_result(result)
        if flight.traced:
            self.trace(flight, result)

    # --- what a Sender does

    def crashed(self, flight: Flight, error: PenstockError) -> None:
        """An attempt has failed."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Raise why nothing can be sent."""
        raise NotImplementedError

    def depart_later(self, flight: Flight) -> None:
        raise NotImplementedError

    def put_signed(self, flight: Flight, line: Line, opaque: _int, command_flag: _int) -> None:
        raise NotImplementedError

    def recovered(self, flight: Flight, latency_ms: _int) -> None:
        raise NotImplementedError

    def not_stored(self, flight: Flight, result: Any, status: SendStatus) -> _bool:
        """Whether it is tried again because it is stored less safely than it should be."""
        raise NotImplementedError

    def trace(self, flight: Flight, result: Any) -> None:
        raise NotImplementedError
