"""Latency-based fault tolerance: which brokers a producer avoids, and for how long.

Every send reports its latency and whether it failed. After a slow response or a failure, later
sends avoid the broker: for a time from RocketMQ's latency table, or after failures for a fixed
time. A background task probes unreachable brokers, so no message has to be risked for that.
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
"""RocketMQ's table: (latency from which a broker is avoided, for how long), in ms."""
SLOW_MS: Final = 550
"""The smallest latency in the table."""
FAILURE_COUNTS_AS_MS: Final = 10_000
"""The latency that a failure counts as."""
PROBE_FIRST_MS: Final = 200
"""Pause before the first probe: a master that failed may be replaced within a second."""
PROBE_EVERY_MS: Final = 3_000
"""The longest pause between probes."""
PROBE_TIMEOUT_MS: Final = 1_000
BROKERS_MAX: Final = 1_024
"""Above this number, brokers without a fault are dropped from the table."""


class BrokerFaults:
    """Faults of brokers, by broker name.

    With `avoid_faulty=False` no broker is avoided; a retry still prefers another broker. `avoid_ms`
    is the time for failures, None for that of the table. Without a session nothing is probed.
    """

    def __init__(
        self,
        avoid_faulty: bool,
        avoid_ms: int | None,
        clock: Clock,
        session: Session | None = None,
    ) -> None:
        self._enabled = avoid_faulty
        self._fixed = avoid_ms is not None
        self._failure_ms = avoid_period_ms(FAILURE_COUNTS_AS_MS) if avoid_ms is None else avoid_ms
        self._clock = clock
        self._brokers: dict[str, _Broker] = {}
        self._until_ms = 0  # no broker is avoided after this time
        self._session = session
        self._probing = False

    def report(
        self, broker_name: str, latency_ms: int, *, failed: bool = False, unreachable: bool = False
    ) -> None:
        """Record the outcome of an attempt.

        `failed`: an error response or none at all (a bad message is not the broker's failure);
        `unreachable`: there was no connection, or it was lost.
        """
        if not self._enabled:
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
                log.info("broker %s is unreachable and is avoided", broker_name)
            broker.reachable = False
            self._start_probing()
        elif not failed:
            broker.reachable = True

    def choose(
        self, queues: Sequence[MessageQueue], start: int, *, last_broker: str | None = None
    ) -> int:
        """The index of the queue to send to: the first suitable one from `start` on.

        `last_broker` is the one that has just failed. Preferred in this order: another available
        broker; of the other reachable brokers the half with the lower latency; the last broker if
        it is reachable; any other broker.
        """
        count = len(queues)
        now_ms = self._clock.monotonic_ms()
        if last_broker is None and now_ms >= self._until_ms:
            return start % count
        for index in range(start, start + count):
            name = queues[index % count].broker_name
            if name != last_broker and self._is_available(name, now_ms):
                return index % count
        return self._choose_avoided(queues, start, last_broker)

    def _choose_avoided(
        self, queues: Sequence[MessageQueue], start: int, last_broker: str | None
    ) -> int:
        """The best queue if all other brokers are avoided."""
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
        indexes = (index % count for index in range(start, start + count))
        return next(index for index in indexes if queues[index].broker_name in wanted)

    def available(self, name: str) -> bool:
        """Whether this broker is not avoided now."""
        return self._is_available(name, self._clock.monotonic_ms())

    def reachable(self, name: str) -> bool:
        """Whether the last attempt reached this broker."""
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
        """Avoid a broker for at least this time; a longer time is not shortened."""
        broker.until_ms = max(broker.until_ms, self._clock.monotonic_ms() + period_ms)
        self._until_ms = max(self._until_ms, broker.until_ms)

    # --- probes of unreachable brokers

    def _start_probing(self) -> None:
        if self._session is not None and not self._probing:
            self._probing = True
            self._session.spawn(self._probe_all(self._session))

    async def _probe_all(self, session: Session) -> None:
        pause_ms = PROBE_FIRST_MS
        try:
            while any(not broker.reachable for broker in self._brokers.values()):
                await pause(self._clock, pause_ms)
                pause_ms = min(2 * pause_ms, PROBE_EVERY_MS)
                await session.refresh()  # another replica may have the role of the master
                for name in [n for n, broker in self._brokers.items() if not broker.reachable]:
                    await self._probe(session, name)
        finally:
            self._probing = False

    async def _probe(self, session: Session, name: str) -> None:
        """Any response means that the broker is back; it is then no longer avoided by the table."""
        address, broker = session.address_of(name), self._brokers.get(name)
        if address is None or broker is None:  # no longer in any route
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
        session.spawn(self._refresh_routes(session))

    async def _refresh_routes(self, session: Session) -> None:
        """Routes may lack the broker; its registration may take some time."""
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
    """How long RocketMQ's table avoids a broker with this latency."""
    return next((period for least, period in AVOID if latency_ms >= least), 0)
