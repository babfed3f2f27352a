"""The base of `AsyncAdmin`: finding brokers, and requests to one or all of them.

A query of all brokers skips those that can't be reached, and the result names them. If a change of
several brokers fails, the error says where it succeeded.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from penstock.client.admin.admin_values import BrokerAddress
from penstock.client.client_options import ClientOptions, takes_options
from penstock.client.client_session import Session
from penstock.client.lifetime import Lifetime
from penstock.errors import NoRoute, PeerError, PenstockError, SystemBusy, refusal
from penstock.transport.peer import Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import ClusterInfo, MessageQueue
from penstock.wire.codes import MASTER_ID, RequestCode, ResponseCode, request_name

log = logging.getLogger(__name__)

CONCURRENT_MAX = 64
"""Concurrent requests of one query: a group may have thousands of queues."""
_SHOWN_MAX = 60

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BrokerResults(Generic[T]):
    """The results of brokers, and the names of those that could not be reached."""

    items: Sequence[tuple[BrokerAddress, T]]
    unreachable: tuple[str, ...]
    problem: PenstockError | None = None
    """The error of the first of these."""


class AdminCore(Lifetime):
    """The session, the brokers and requests."""

    @takes_options(ClientOptions)
    def __init__(self, options: ClientOptions) -> None:
        self.session = Session(options)

    async def start(self) -> None:
        """Start the session. Connections are opened when they are needed."""
        await self.session.start()

    async def close(self) -> None:
        """Close the connections."""
        await self.session.close()

    # --- brokers

    async def brokers(self, cluster: str | None = None) -> list[BrokerAddress]:
        """The registered brokers of one cluster or of all."""
        answer = await self.ask_nameserver(RequestCode.GET_BROKER_CLUSTER_INFO)
        info = fastjson.decode(answer.body, ClusterInfo)
        clusters = info.cluster_addr_table
        if cluster is not None and cluster not in clusters:
            known = ", ".join(sorted(clusters)) or "none"
            raise NoRoute(
                f"the NameServers {self.session.nameservers.text()} know no cluster {cluster!r} "
                f"(clusters: {known})",
                hint="check the name of the cluster",
            )
        return sorted(
            BrokerAddress(in_cluster, name, number, address)
            for in_cluster, names in clusters.items()
            if cluster in (None, in_cluster)
            for name in names
            if name in info.broker_addr_table
            for number, address in info.broker_addr_table[name].broker_addrs.items()
        )

    async def masters(
        self, cluster: str | None = None, names: Iterable[str] = ()
    ) -> list[BrokerAddress]:
        """The masters, of one cluster or of all, or those with these names; raises NoRoute."""
        found = [broker for broker in await self.brokers(cluster) if broker.is_master]
        wanted = set(names)
        chosen = [broker for broker in found if not wanted or broker.name in wanted]
        missing = sorted(wanted - {broker.name for broker in chosen})
        if missing or not chosen:
            known = ", ".join(broker.name for broker in found) or "none"
            what = f"no master {', '.join(missing)}" if missing else "no master"
            raise NoRoute(
                f"the NameServers {self.session.nameservers.text()} know {what} "
                f"{f'in the cluster {cluster} ' if cluster else ''}(masters: {known})",
                hint="check the names, and that the broker runs and knows these NameServers",
            )
        return chosen

    async def brokers_without_master(self) -> tuple[str, ...]:
        """The names of brokers of which only replicas are registered."""
        brokers = await self.brokers()
        masters = {broker.name for broker in brokers if broker.is_master}
        return tuple(sorted({broker.name for broker in brokers} - masters))

    leaderless = brokers_without_master  # the name before 0.1.0 was released

    async def broker(self, name: str, broker_id: int = MASTER_ID) -> BrokerAddress:
        """One broker by its name; raises NoRoute."""
        if broker_id == MASTER_ID:
            return (await self.masters(names=[name]))[0]
        found = [b for b in await self.brokers() if (b.name, b.id) == (name, broker_id)]
        if not found:
            raise NoRoute(
                f"the NameServers {self.session.nameservers.text()} know no broker {name} "
                f"with the id {broker_id}",
                hint="check the name and the id",
            )
        return found[0]

    # --- calls

    async def ask(
        self,
        address: str,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        good: Iterable[int] = (ResponseCode.SUCCESS,),
        timeout_ms: int | None = None,
    ) -> Response:
        """Send a request; raises an error unless the response has a `good` code.

        The error's message has the reason, and its note the request.
        """
        self.session.check_alive()
        answer = await self.session.peer(address).call(
            code, ext, body, timeout_ms=timeout_ms or self.session.options.timeout_ms
        )
        if answer.code not in good:
            raise _refused(answer, address, code, ext)
        return answer

    async def ask_nameserver(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        good: Iterable[int] = (ResponseCode.SUCCESS,),
    ) -> Response:
        """Send a request to the NameServers; the response of the first that responds."""
        self.session.check_alive()
        answer = await self.session.nameservers.call(code, ext, body)
        if answer.code not in good:
            who = f"NameServer of {self.session.nameservers.text()}"
            raise _refused(answer, who, code, ext)
        return answer

    async def from_each(
        self,
        brokers: Iterable[BrokerAddress],
        work: Callable[[BrokerAddress], Coroutine[object, object, T]],
    ) -> BrokerResults[T]:
        """The results of each; raises if none can be reached, or one refuses the request."""
        targets = list(brokers)
        results = await asyncio.gather(*map(work, targets), return_exceptions=True)
        found: list[tuple[BrokerAddress, T]] = []
        failures: dict[str, PenstockError] = {}
        for broker, result in zip(targets, results, strict=True):
            if not isinstance(result, BaseException):
                found.append((broker, result))
            elif isinstance(result, PeerError | SystemBusy):
                failures[broker.name] = result
            else:
                raise result
        first = next(iter(failures.values()), None)
        if first is not None and not found:
            raise first
        for name, failure in failures.items():
            log.warning("skipped broker %s: %s", name, failure)
        return BrokerResults(found, tuple(sorted(failures)), first)

    async def ask_each(
        self,
        brokers: Iterable[BrokerAddress],
        code: int,
        ext: Mapping[str, str] | None = None,
        *,
        good: Iterable[int] = (ResponseCode.SUCCESS,),
    ) -> BrokerResults[Response]:
        """The response of each broker; raises as `from_each` does."""
        return await self.from_each(
            brokers, lambda broker: self.ask(broker.address, code, ext, good=good)
        )

    async def tell_each(
        self,
        brokers: Iterable[BrokerAddress],
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> None:
        """Send the same change to each broker; the error says where it succeeded."""
        await self.change_each([(broker, code, ext, body) for broker in brokers])

    async def change_each(
        self, changes: Iterable[tuple[BrokerAddress, int, Mapping[str, str] | None, bytes]]
    ) -> None:
        """Send a change to each broker; the error says where it succeeded."""
        done: list[str] = []
        failures: list[PenstockError] = []
        for broker, code, ext, body in changes:
            try:
                await self.ask(broker.address, code, ext, body)
                done.append(broker.name)
            except PenstockError as error:
                failures.append(error)
        if not failures:
            return
        if not done and len(failures) == 1:
            raise failures[0]
        first = failures[0]
        text = "; ".join(error.message for error in failures)
        raise type(first)(f"{text}; changed on {', '.join(done) or 'none'}", hint=first.hint)

    async def for_each(
        self, items: Sequence[S], work: Callable[[S], Coroutine[object, object, T]]
    ) -> list[T]:
        """The results of `work` for all items, several at a time; raises the first error."""
        found: list[T] = []
        for begin in range(0, len(items), CONCURRENT_MAX):
            found += await asyncio.gather(*map(work, items[begin : begin + CONCURRENT_MAX]))
        return found

    # --- names

    def bare_queue(self, queue: MessageQueue) -> MessageQueue:
        """The queue with the topic's name without namespace."""
        return MessageQueue(
            self.session.without_namespace(queue.topic), queue.broker_name, queue.queue_id
        )

    def full_queue(self, queue: MessageQueue) -> MessageQueue:
        """The queue with the topic's name with namespace."""
        return MessageQueue(
            self.session.with_namespace(queue.topic), queue.broker_name, queue.queue_id
        )

    def is_ours(self, name: str) -> bool:
        """Whether a name is in the client's namespace; without a namespace all are."""
        return not self.session.options.namespace or self.session.without_namespace(name) != name


def timestamp_ms(time: datetime) -> int:
    """A time in milliseconds since 1970; without a time zone it is local time."""
    return round(time.timestamp() * 1000)


def _refused(answer: Response, who: str, code: int, ext: Mapping[str, str] | None) -> PenstockError:
    """The error for a response; a traceback, but not the message, has the request."""
    error = refusal(answer.code, answer.remark, who)
    error.add_note(f"Request: {_request_text(code, ext)}")
    return error


def _request_text(code: int, ext: Mapping[str, str] | None) -> str:
    shown = ", ".join(f"{name}={value[:_SHOWN_MAX]}" for name, value in (ext or {}).items())
    return f"{request_name(code)}({shown[: 4 * _SHOWN_MAX]})"
