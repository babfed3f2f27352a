"""Tells the NameServers about this broker: at the start, every `register_ms`, and on change.

Each NameServer has a task of its own, so a dead one delays nobody. What failed is tried again
after 1, 2, 4 … seconds up to the period; a connection that breaks is made again at once, because a
NameServer forgets a broker with its connection. The whole table is sent each time, as Apache does
by default: so a NameServer that has lost a topic gets it back. It is encoded once per version.

Whoever waits until the NameServers know of a few topics need not wait for the table: these are
told one by one before it (REGISTER_TOPIC_IN_NAMESRV), which leaves the version of the table alone.
So the table that follows still counts as new, and nothing of it is lost.
"""

import asyncio
import logging
import ssl as tls
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.clock import Clock, LoopClock, finish_within, pause
from penstock.config import Live
from penstock.errors import BodyError, PeerError, PenstockError
from penstock.transport.peer import Peer, Response, Sign, split_address
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion, KVTable, QueueData, TopicRouteData
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody, body_crc32, encode_register
from penstock.wire.codes import RequestCode, ResponseCode, response_name

log = logging.getLogger(__name__)

CALL_MS = 6_000
UNREGISTER_MS = 3_000
FIRST_ROUND_MS = 6_000
RETRY_MS = 1_000
PERIOD_MS_RANGE = (10_000, 60_000)
"""NameServers drop a broker that is silent for 120 s; Apache keeps the period in here too."""
ENCODING_SHARE = 10
"""Changes that follow each other are gathered, so that encoding takes a tenth of the time at
most: 10,000 topics made one by one must not mean 10,000 tables of 1.6 MB."""
SINGLES_MAX = 32
"""Topics that are told one by one; for more, the table is the shorter message."""


@dataclass(slots=True)
class NameServerState:
    """How it stands with one NameServer."""

    address: str
    registered: bool = False
    tried: bool = False
    success_ms: int = 0
    failures: int = 0  # in a row
    error: str = ""


class Registrar:
    """Keeps a broker registered."""

    def __init__(
        self,
        settings: Live,
        describe: Callable[[], RegisterBrokerBody],
        address: str,
        ha_address: str,
        *,
        sign: Sign | None = None,
        ssl: tls.SSLContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`describe` gives topics and filter servers; its DataVersion changes with the content."""
        self._settings = settings
        self._describe = describe
        self._address = address
        self._ha_address = ha_address
        self._clock = clock or LoopClock()
        self._body = b""
        self._body_crc32 = 0
        self._body_version: DataVersion | None = None
        self._encode_ms = 0
        self._links = [
            _Link(self, server, sign=sign, ssl=ssl)
            for server in parse_nameservers(settings.current.broker.nameservers)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self._tired = False  # the last change that waited for NameServers waited in vain
        self.order_config: dict[str, str] = {}
        """Topic → `broker:queues;…` of ordered topics, as the NameServers told it last."""
        self.take_order_config: Callable[[Mapping[str, str]], None] = lambda config: None
        """Is told of it each time."""
        self.master_address = ""
        self.master_ha_address = ""
        """Where this broker's master is, if it is a slave and a NameServer knows it."""

    @property
    def states(self) -> list[NameServerState]:
        return [link.state for link in self._links]

    @property
    def peers(self) -> list[Peer]:
        """The NameServers, those that know us first."""
        links = sorted(self._links, key=lambda link: not link.state.registered)
        return [link.peer for link in links]

    def start(self) -> None:
        """Begin to register."""
        if not self._tasks:
            self._tasks = [asyncio.ensure_future(link.run()) for link in self._links]

    def soon(self) -> None:
        """Something changed: register now. Several calls become one round."""
        for link in self._links:
            link.wake.set()

    def tell(self, topics: Sequence[str], deadline_ms: int) -> asyncio.Future[None]:
        """Tell all NameServers of these topics as they are now, or of the whole table.

        The result is there when each knows, or has failed, or at the deadline.
        """
        telling = asyncio.ensure_future(self._tell(topics, deadline_ms))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        return telling

    async def _tell(self, topics: Sequence[str], deadline_ms: int) -> None:
        if not self._tasks:  # not begun, or over
            return
        try:
            singles = self._singles(topics) if len(topics) <= SINGLES_MAX else {}
            told = asyncio.gather(*(link.tell(singles) for link in self._links))
            await finish_within(self._clock, deadline_ms - self._clock.now_ms(), told)
        except TimeoutError:
            if not self._tired:
                log.warning("a NameServer does not answer: changes do not wait for it any longer")
            self._tired = True
        except Exception:
            log.exception("the NameServers can't be told")
        else:
            self._tired = False

    def _singles(self, topics: Sequence[str]) -> dict[str, bytes]:
        """By topic the body that tells of it; none for topics that are gone again."""
        table = self._describe().topic_config_serialize_wrapper.topic_config_table
        name = self._settings.current.broker.name
        return {
            topic: fastjson.encode(
                TopicRouteData(
                    queue_datas=[
                        QueueData(
                            broker_name=name,
                            read_queue_nums=config.read_queue_nums,
                            write_queue_nums=config.write_queue_nums,
                            perm=config.perm,
                            topic_sys_flag=config.topic_sys_flag,
                        )
                    ]
                )
            )
            for topic in topics
            if (config := table.get(topic)) is not None
        }

    async def first_round(self, timeout_ms: int = FIRST_ROUND_MS) -> bool:
        """Begin, and wait until each was tried once or the time is over; whether one knows us."""
        self.start()
        tried = asyncio.gather(*(link.tried.wait() for link in self._links))
        try:
            await finish_within(self._clock, timeout_ms, tried)
        except TimeoutError:
            late = [state.address for state in self.states if not state.tried]
            log.warning("no answer yet from the NameServers %s: going on", ", ".join(late))
        return not self._links or any(state.registered for state in self.states)

    def not_ready(self) -> str | None:
        """Why clients can't find this broker, or None."""
        if not self._links or any(state.registered for state in self.states):
            return None
        return "not registered with any NameServer: " + "; ".join(
            f"{state.address}: {state.error or 'no answer yet'}" for state in self.states
        )

    async def close(self) -> None:
        """Say goodbye to those who know us, in bounded time, and close the connections."""
        tasks = [*self._tasks, *self._telling]
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.leave() for link in self._links))

    def header(self) -> dict[str, str]:
        """The fields that name this broker."""
        broker = self._settings.current.broker
        return {
            "brokerName": broker.name,
            "brokerAddr": self._address,
            "clusterName": broker.cluster,
            "brokerId": str(broker.id),
        }

    def registration(self) -> tuple[dict[str, str], bytes]:
        """Fields and body of REGISTER_BROKER as it is now."""
        body = self._describe()
        version = body.topic_config_serialize_wrapper.data_version
        if version != self._body_version:
            before_ms = self._clock.monotonic_ms()
            self._body = _encode(body)
            self._body_crc32 = body_crc32(self._body)
            self._body_version = version
            self._encode_ms = self._clock.monotonic_ms() - before_ms
        ext = {
            **self.header(),
            "haServerAddr": self._ha_address,
            "enableActingMaster": "false",
            "compressed": "false",
            "bodyCrc32": str(self._body_crc32),
        }
        return ext, self._body

    @property
    def period_ms(self) -> int:
        low, high = PERIOD_MS_RANGE
        return min(max(self._settings.current.broker.register_ms, low), high)

    @property
    def spacing_ms(self) -> int:
        """How long after a registration the next one has to wait at least."""
        return ENCODING_SHARE * self._encode_ms

    def learn(self, answer: Response) -> None:
        """Take over what a NameServer tells in its answer."""
        self.master_address = answer.ext.get("masterAddr", self.master_address)
        self.master_ha_address = answer.ext.get("haServerAddr", self.master_ha_address)
        if answer.body:
            try:
                self.order_config = fastjson.decode(answer.body, KVTable).table
            except BodyError as error:
                log.warning("the order config of a NameServer can't be read: %s", error)
            else:
                self.take_order_config(self.order_config)


class _Link:
    """One NameServer."""

    def __init__(
        self, registrar: Registrar, address: str, *, sign: Sign | None, ssl: tls.SSLContext | None
    ) -> None:
        self.state = NameServerState(address)
        self.wake = asyncio.Event()
        self.tried = asyncio.Event()
        self._round = asyncio.Event()  # the end of the round that begins next
        self._registrar = registrar
        self._clock = registrar._clock
        self.peer = Peer(address, sign=sign, ssl=ssl, on_lost=self._lost, clock=self._clock)

    async def run(self) -> None:
        """Register, wait for the next occasion, and so on."""
        while True:
            self.wake.clear()
            started_ms = self._clock.now_ms()
            await self._register()
            await pause(self._clock, self._registrar.spacing_ms)
            wait_ms = self._registrar.period_ms
            if self.state.failures:
                wait_ms = min(wait_ms, RETRY_MS << min(self.state.failures - 1, 6))
                self.wake.clear()  # a change is no reason to knock at a closed door at once
            await self._next_occasion(wait_ms)
            if not self.peer.connected:  # also one that takes us and then hangs up
                await pause(self._clock, RETRY_MS - (self._clock.now_ms() - started_ms))

    async def tell(self, singles: Mapping[str, bytes]) -> None:
        """Tell of single topics, or of all if none is given or one is not taken."""
        if self.state.failures:
            return  # it gets the whole table when it is back
        if not singles or not self.state.registered or not await self._take_singles(singles):
            ended = self._round
            self.wake.set()
            await ended.wait()

    async def leave(self) -> None:
        """Unregister where we are registered."""
        try:
            if self.state.registered and self.peer.connected:
                ext = self._registrar.header()
                await self.peer.call(RequestCode.UNREGISTER_BROKER, ext, timeout_ms=UNREGISTER_MS)
        except PeerError as error:
            log.warning("not unregistered from the NameServer %s", error)
        finally:
            self.state.registered = False
            await self.peer.close()

    async def _take_singles(self, singles: Mapping[str, bytes]) -> bool:
        """Whether it has taken all of these topics."""
        calls = (
            self.peer.call(
                RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": topic}, body, timeout_ms=CALL_MS
            )
            for topic, body in singles.items()
        )
        try:
            answers = await asyncio.gather(*calls)
        except PenstockError:  # the next round of the table tells what is wrong
            return False
        return all(answer.code == ResponseCode.SUCCESS for answer in answers)

    async def _register(self) -> None:
        ended, self._round = self._round, asyncio.Event()
        try:
            ext, body = self._registrar.registration()
            answer = await self.peer.call(
                RequestCode.REGISTER_BROKER, ext, body, timeout_ms=CALL_MS
            )
            if answer.code == ResponseCode.SUCCESS:
                self._registrar.learn(answer)
                self._succeeded()
            else:
                self._failed(f"{response_name(answer.code)}: {answer.remark or 'no reason given'}")
        except PenstockError as error:  # no answer, or a table that does not fit a frame
            self._failed(str(error).removeprefix(f"{self.state.address}: "))
        except Exception as error:
            log.exception("the broker can't be described")
            self._failed(f"a bug of Penstock: {error!r}")
        self.state.tried = True
        self.tried.set()
        ended.set()

    async def _next_occasion(self, wait_ms: int) -> None:
        alarm = self._clock.wake_at(self._clock.now_ms() + wait_ms, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            alarm.cancel()

    def _succeeded(self) -> None:
        state = self.state
        if not state.registered:
            log.info("registered with the NameServer %s", state.address)
        state.registered = True
        state.success_ms = self._clock.now_ms()
        state.failures = 0
        state.error = ""

    def _failed(self, error: str) -> None:
        state = self.state
        if error != state.error:  # said once, not every period
            log.warning("not registered with the NameServer %s: %s", state.address, error)
        state.registered = False
        state.failures += 1
        state.error = error

    def _lost(self) -> None:
        if self.state.registered:
            log.warning("the NameServer %s closed the connection", self.state.address)
        self.state.registered = False
        self.wake.set()


def parse_nameservers(text: str) -> list[str]:
    """The addresses of `host:port;host:port`, each once; commas do as well."""
    addresses: list[str] = []
    for address in text.replace(",", ";").split(";"):
        address = address.strip()
        if address and address not in addresses:
            try:
                split_address(address)
            except ValueError as error:
                raise ValueError(f"nameservers: {error}") from None
            addresses.append(address)
    return addresses


def _encode(body: RegisterBrokerBody) -> bytes:
    """As strict JSON, which every fastjson reads; ten times as fast as its own dialect."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # half a surrogate pair in an attribute
        return encode_register(body, compressed=False)
