"""Which brokers a producer had better leave alone for a while, and which it tries first.

Every send reports how long it took and whether it failed. A slow answer, and a failure, keep the
next sends away from that broker for a time: by RocketMQ's table of latencies, or after failures for
a fixed period. Whoever could not be reached at all is asked beside now and then whether it is back,
so that no message has to find that out.
"""

import logging
from collections.abc import Sequence
from typing import Final

from penstock.client.client_session import Session
from penstock.clock import Clock, pause
from penstock.errors import PeerError
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import TOPIC_AUTO_CREATE, RequestCode

log = logging.getLogger(__name__)

AVOID: Final = ((15_000, 30_000), (5_000, 10_000), (3_000, 6_000), (1_800, 5_000), (550, 2_000))
"""RocketMQ's table: from this latency on, the broker is avoided for so long, in ms."""
SLOW_MS: Final = 550
"""Quicker answers than this are all the same."""
FAILURE_COUNTS_AS_MS: Final = 10_000
"""The latency in that table that a failure is worth."""
PROBE_EVERY_MS: Final = 3_000
PROBE_TIMEOUT_MS: Final = 1_000
BROKERS_MAX: Final = 1_024
"""How many are remembered before those without a fault are forgotten."""


class BrokerFaults:
    """What is known of each broker by name.

    With `avoid_faulty=False` nothing is avoided; a retry still prefers another broker. `avoid_ms`
    is the period for failures, None for the table's.
    """

    def __init__(self, avoid_faulty: bool, avoid_ms: int | None, clock: Clock) -> None:
        self._on = avoid_faulty
        self._fixed = avoid_ms is not None
        self._failure_ms = avoid_period_ms(FAILURE_COUNTS_AS_MS) if avoid_ms is None else avoid_ms
        self._clock = clock
        self._brokers: dict[str, _Broker] = {}
        self._until_ms = 0  # nobody is avoided after it: the usual way is short
        self._session: Session | None = None
        self._probing = False

    def probe_through(self, session: Session) -> None:
        """Ask brokers that were unreachable whether they are back, from now on."""
        self._session = session

    def report(
        self, broker_name: str, latency_ms: int, *, failed: bool = False, unreachable: bool = False
    ) -> None:
        """How an attempt at this broker went.

        `failed`: an error came, or nothing (an error of the message's own is no failure of the
        broker); `unreachable`: no connection, or it broke.
        """
        if not self._on:
            return
        broker = self._brokers.get(broker_name)
        if broker is None:
            broker = self._admit(broker_name)
        broker.latency_ms = latency_ms
        if failed or unreachable:
            self._avoid(broker, self._failure_ms)
        elif latency_ms >= SLOW_MS:
            self._avoid(broker, avoid_period_ms(latency_ms))
        if unreachable:
            if broker.reachable:
                log.info("broker %s is unreachable: it is avoided", broker_name)
            broker.reachable = False
            self._start_probing()
        elif not failed:
            broker.reachable = True

    def choose(
        self, queues: Sequence[MessageQueue], start: int, *, last_broker: str | None = None
    ) -> int:
        """The index of the queue to send to: the first one from `start` on that will do.

        `last_broker` is the one that has just failed. In this order: an available broker that is
        another; of the reachable others the better half by latency; the last one if it is
        reachable; any other.
        """
        count = len(queues)
        now_ms = self._clock.monotonic_ms()
        if last_broker is None and now_ms >= self._until_ms:
            return start % count
        for place in range(start, start + count):
            name = queues[place % count].broker_name
            if name != last_broker and self._is_available(name, now_ms):
                return place % count
        return self._choose_bearable(queues, start, last_broker)

    def _choose_bearable(
        self, queues: Sequence[MessageQueue], start: int, last_broker: str | None
    ) -> int:
        """The least bad queue where all other brokers are avoided."""
        names = {queue.broker_name for queue in queues}
        others = names - {last_broker}
        reachable = sorted(filter(self.reachable, others), key=self._latency_of)
        if reachable:
            wanted = set(reachable[: (len(reachable) + 1) // 2])
        elif last_broker in names and self.reachable(last_broker):
            wanted = {last_broker}
        else:
            wanted = others or names
        count = len(queues)
        places = (place % count for place in range(start, start + count))
        return next(place for place in places if queues[place].broker_name in wanted)

    def available(self, name: str) -> bool:
        """Whether sends need not avoid this broker now."""
        return self._is_available(name, self._clock.monotonic_ms())

    def reachable(self, name: str) -> bool:
        """Whether the last attempt got through to this broker."""
        broker = self._brokers.get(name)
        return broker is None or broker.reachable

    def _is_available(self, name: str, now_ms: int) -> bool:
        broker = self._brokers.get(name)
        return broker is None or now_ms >= broker.until_ms

    def _latency_of(self, name: str) -> int:
        return self._brokers[name].latency_ms

    def _admit(self, name: str) -> "_Broker":
        if len(self._brokers) >= BROKERS_MAX:
            now_ms = self._clock.monotonic_ms()
            self._brokers = {n: b for n, b in self._brokers.items() if b.until_ms > now_ms}
        broker = self._brokers[name] = _Broker()
        return broker

    def _avoid(self, broker: "_Broker", period_ms: int) -> None:
        """A longer time than it has already is not cut short by this."""
        broker.until_ms = max(broker.until_ms, self._clock.monotonic_ms() + period_ms)
        self._until_ms = max(self._until_ms, broker.until_ms)

    # --- asking whether a broker is back

    def _start_probing(self) -> None:
        if self._session is not None and not self._probing:
            self._probing = True
            self._session.spawn(self._probe_all(self._session))

    async def _probe_all(self, session: Session) -> None:
        try:
            while any(not broker.reachable for broker in self._brokers.values()):
                await pause(self._clock, PROBE_EVERY_MS)
                for name in [n for n, broker in self._brokers.items() if not broker.reachable]:
                    await self._probe(session, name)
        finally:
            self._probing = False

    async def _probe(self, session: Session, name: str) -> None:
        """Whatever it answers, it is back; what the table has it avoided for is over then."""
        address, broker = session.address_of(name), self._brokers.get(name)
        if address is None or broker is None:  # no route names it any more
            self._brokers.pop(name, None)
            return
        try:
            await session.peer(address).call(
                RequestCode.GET_MAX_OFFSET,
                {"topic": TOPIC_AUTO_CREATE, "queueId": "0"},
                timeout_ms=PROBE_TIMEOUT_MS,
            )
        except PeerError:
            self._avoid(broker, 2 * PROBE_EVERY_MS)
            return
        log.info("broker %s at %s is reachable again", name, address)
        broker.reachable = True
        if not self._fixed:
            broker.until_ms = 0
        session.spawn(self._find_again(session))

    async def _find_again(self, session: Session) -> None:
        """Fresh routes, as ours may leave it out; it may be a moment until they have it."""
        await session.refresh()
        await pause(self._clock, PROBE_EVERY_MS)
        await session.refresh()


class _Broker:
    __slots__ = ("latency_ms", "reachable", "until_ms")

    def __init__(self) -> None:
        self.latency_ms = 0
        self.until_ms = 0
        self.reachable = True


def avoid_period_ms(latency_ms: int) -> int:
    """How long RocketMQ's table keeps away from a broker that took so long."""
    return next((period for least, period in AVOID if latency_ms >= least), 0)
