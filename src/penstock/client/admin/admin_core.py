"""The ground of `AsyncAdmin`: which brokers there are, and how one or all of them are asked.

Reading from all brokers goes on without those that can't be reached, and tells which these are;
changing something on several of them tells what was done and what was not.
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

AT_ONCE = 64
"""Calls of one question that run at a time: a group may have thousands of queues."""
_SHOWN_MAX = 60

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BrokerResults(Generic[T]):
    """What brokers have, and the names of those that could not be asked."""

    items: Sequence[tuple[BrokerAddress, T]]
    unreachable: tuple[str, ...]
    problem: PenstockError | None = None
    """Why the first of these could not be asked."""


class AdminCore(Lifetime):
    """Session, brokers and calls."""

    @takes_options(ClientOptions)
    def __init__(self, options: ClientOptions) -> None:
        self.session = Session(options)

    async def start(self) -> None:
        """Make ready; connections are made when they are needed."""
        await self.session.start()

    async def close(self) -> None:
        """End the connections."""
        await self.session.close()

    # --- brokers

    async def brokers(self, cluster: str | None = None) -> list[BrokerAddress]:
        """All brokers, of one cluster or of all, as the NameServers know them."""
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
        """The names of brokers whose master is away: the NameServers know replicas only."""
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
        """A server's answer with one of the `good` codes; an error names request and server."""
        self.session.check_alive()
        answer = await self.session.peer(address).call(
            code, ext, body, timeout_ms=timeout_ms or self.session.options.timeout_ms
        )
        if answer.code not in good:
            raise refusal(answer.code, answer.remark, f"{address} on {_told(code, ext)}")
        return answer

    async def ask_nameserver(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        good: Iterable[int] = (ResponseCode.SUCCESS,),
    ) -> Response:
        """The answer of whichever NameServer gives one."""
        self.session.check_alive()
        answer = await self.session.nameservers.call(code, ext, body)
        if answer.code not in good:
            who = f"NameServer of {self.session.nameservers.text()} on {_told(code, ext)}"
            raise refusal(answer.code, answer.remark, who)
        return answer

    async def from_each(
        self,
        brokers: Iterable[BrokerAddress],
        work: Callable[[BrokerAddress], Coroutine[object, object, T]],
    ) -> BrokerResults[T]:
        """What each has; raises if none can be reached, or one refuses for good."""
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
            log.warning("%s is left out: %s", name, failure)
        return BrokerResults(found, tuple(sorted(failures)), first)

    async def ask_each(
        self,
        brokers: Iterable[BrokerAddress],
        code: int,
        ext: Mapping[str, str] | None = None,
        *,
        good: Iterable[int] = (ResponseCode.SUCCESS,),
    ) -> BrokerResults[Response]:
        """What each answers; raises as `from_each` does."""
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
        """Change the same on each; the error tells where it was done all the same."""
        await self.change_each([(broker, code, ext, body) for broker in brokers])

    async def change_each(
        self, changes: Iterable[tuple[BrokerAddress, int, Mapping[str, str] | None, bytes]]
    ) -> None:
        """Make a change at each broker; the error tells where it was done all the same."""
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
        raise type(first)(f"{text}; done on {', '.join(done) or 'none'}", hint=first.hint)

    async def for_each(
        self, items: Sequence[S], work: Callable[[S], Coroutine[object, object, T]]
    ) -> list[T]:
        """The results of `work` for all items, some at a time; the first failure ends it."""
        found: list[T] = []
        for begin in range(0, len(items), AT_ONCE):
            found += await asyncio.gather(*map(work, items[begin : begin + AT_ONCE]))
        return found

    # --- names

    def bare_queue(self, queue: MessageQueue) -> MessageQueue:
        """The queue as the application knows it."""
        return MessageQueue(
            self.session.without_namespace(queue.topic), queue.broker_name, queue.queue_id
        )

    def full_queue(self, queue: MessageQueue) -> MessageQueue:
        """The queue as servers know it."""
        return MessageQueue(
            self.session.with_namespace(queue.topic), queue.broker_name, queue.queue_id
        )

    def is_ours(self, name: str) -> bool:
        """Whether a name is in our namespace; without one all are."""
        return not self.session.options.namespace or self.session.without_namespace(name) != name


def moment_ms(moment: datetime) -> int:
    """A moment in milliseconds since 1970; without a zone it is local time."""
    return round(moment.timestamp() * 1000)


def _told(code: int, ext: Mapping[str, str] | None) -> str:
    shown = ", ".join(f"{name}={value[:_SHOWN_MAX]}" for name, value in (ext or {}).items())
    return f"{request_name(code)}({shown[: 4 * _SHOWN_MAX]})"
