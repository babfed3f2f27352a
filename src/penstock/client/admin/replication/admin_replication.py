"""Replication: the role, the log and the lag of each replica."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.client.admin.admin_cluster import ClusterAdmin, read_runtime_info
from penstock.client.admin.admin_values import BrokerAddress, BrokerRuntimeInfo
from penstock.errors import PeerError, PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.bodies.cluster_bodies import (
    BrokerReplicasInfoWithHistory,
    EpochEntryCache,
    HARuntimeInfo,
    ReplicasInfoWithHistory,
)
from penstock.wire.codes import RequestCode, ResponseCode

UNSUPPORTED = (
    ResponseCode.SUCCESS,
    ResponseCode.SYSTEM_ERROR,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
)
"""The answers of a broker that may not know a request, or has no epochs."""


@dataclass(frozen=True, slots=True)
class Election:
    """One election of a master by controllers."""

    broker: str
    epoch: int
    master_id: int
    """The id that the controllers have given to the master."""
    time_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class KnownReplica:
    """A replica as the controllers know it, registered with the NameServers or not."""

    id: int
    """The id that the controllers have given to it."""
    address: str
    is_alive: bool
    """Whether it sends heartbeats."""
    in_sync: bool
    is_master: bool


@dataclass(frozen=True, slots=True)
class ElectionHistory:
    """The last elections of one broker's master, the newest last, and its replicas."""

    broker: str
    elections: tuple[Election, ...] = ()
    replicas: tuple[KnownReplica, ...] = ()
    problem: PenstockError | None = None
    """Why they are unknown: no controller answered."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A master or a slave. An unknown value is None."""

    broker: BrokerAddress
    role: str | None = None
    """async_master, sync_master or slave; of Apache's brokers master or slave."""
    epoch: int | None = None
    """The last epoch that its log has reached; None also if it has no epochs."""
    newest_epoch: int | None = None
    """The last epoch that it knows. A slave hears of an epoch before it has the log up to there."""
    penstock: bool = False
    """Whether it is one of Penstock's brokers."""
    controllers: tuple[str, ...] = ()
    """The controllers that give it its role, if there are any."""
    log_end: int | None = None
    behind: int | None = None
    """Slave: bytes of the master's log that it lacks."""
    in_sync: bool | None = None
    """Slave: whether its master counts it as in sync."""
    error: str = ""
    """Slave: why it can't receive the log of its master, as far as it says so."""
    problem: PenstockError | None = None
    """The error that occurred when the broker was queried."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """What one broker says of itself."""

    broker: BrokerAddress
    info: BrokerRuntimeInfo | None = None
    replication: HARuntimeInfo | None = None
    epochs: EpochEntryCache | None = None
    problem: PenstockError | None = None


class ReplicationAdmin(ClusterAdmin):
    """The part of `AsyncAdmin` about replication."""

    async def replicas(self, cluster: str | None = None) -> tuple[ReplicaStatus, ...]:
        """All masters and slaves, sorted by name and id."""
        answers = await self.for_each(sorted(await self.brokers(cluster)), self._ask_replica)
        return tuple(_statuses(answers))

    async def elections(self, cluster: str | None = None) -> tuple[Election, ...]:
        """The last elections of the brokers whose masters controllers elect, the newest last.

        Apache's controllers do not keep them.
        """
        found: list[Election] = []
        for history in await self.election_histories(await self.replicas(cluster)):
            if history.problem is not None:
                raise history.problem
            found += history.elections
        return tuple(found)

    async def election_histories(
        self, replicas: Sequence[ReplicaStatus]
    ) -> tuple[ElectionHistory, ...]:
        """Of each of these brokers whose master controllers elect, sorted by name."""
        controllers = {one.broker.name: one.controllers for one in replicas if one.controllers}
        return tuple(
            [
                await self._history_of(name, addresses)
                for name, addresses in sorted(controllers.items())
            ]
        )

    async def _history_of(self, name: str, controllers: Sequence[str]) -> ElectionHistory:
        """As the first controller that answers tells it."""
        body = fastjson.encode([name])
        code = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA
        problem: PenstockError | None = None
        for address in controllers:
            try:
                answer = await self.ask(address, code, body=body)
            except PeerError as error:
                problem = error
                continue
            table = fastjson.decode(answer.body, BrokerReplicasInfoWithHistory).replicas_info_table
            return _history(name, table[name]) if name in table else ElectionHistory(name)
        return ElectionHistory(name, problem=problem)

    async def _ask_replica(self, broker: BrokerAddress) -> _Answers:
        address = broker.address
        try:
            runtime = await self.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO)
            info = read_runtime_info(fastjson.decode(runtime.body, KVTable).table)
            status = await self.ask(address, RequestCode.GET_BROKER_HA_STATUS, good=UNSUPPORTED)
            epochs = await self.ask(address, RequestCode.GET_BROKER_EPOCH_CACHE, good=UNSUPPORTED)
            replication, cache = None, None
            if status.code == ResponseCode.SUCCESS:
                replication = fastjson.decode(status.body, HARuntimeInfo)
            if epochs.code == ResponseCode.SUCCESS:
                cache = fastjson.decode(epochs.body, EpochEntryCache)
            return _Answers(broker, info, replication, cache)
        except PenstockError as error:
            return _Answers(broker, problem=error)


def _history(name: str, info: ReplicasInfoWithHistory) -> ElectionHistory:
    elections = (
        Election(name, one.epoch, one.master_broker_id, one.time_ms, one.reason)
        for one in info.election_history
    )
    replicas = (
        KnownReplica(
            id=one.broker_id,
            address=one.broker_address or "",
            is_alive=one.alive,
            in_sync=in_sync,
            is_master=one.broker_id == info.master_broker_id,
        )
        for in_sync, group in ((True, info.in_sync_replicas), (False, info.not_in_sync_replicas))
        for one in group
    )
    return ElectionHistory(name, tuple(elections), tuple(replicas))


def _statuses(answers: Sequence[_Answers]) -> Iterator[ReplicaStatus]:
    for one in answers:
        status = _own_status(one)
        if not one.broker.is_master:
            same = [a for a in answers if _set_of(a) == _set_of(one)]
            status = _with_master(status, same)
        yield status


def _set_of(answers: _Answers) -> tuple[str, str]:
    """Replicas of one broker have the same cluster and name."""
    return answers.broker.cluster, answers.broker.name


def _own_status(answers: _Answers) -> ReplicaStatus:
    """What a broker says of itself alone."""
    info, replication = answers.info, answers.replication
    if info is None:
        return ReplicaStatus(answers.broker, problem=answers.problem)
    role = info.raw.get("penstockRole")
    if role is None and replication is not None:
        role = "master" if replication.master else "slave"
    return ReplicaStatus(
        answers.broker,
        role=role,
        epoch=_reached_epoch(answers.epochs),
        newest_epoch=answers.epochs.epoch_list[-1].epoch
        if answers.epochs is not None and answers.epochs.epoch_list
        else None,
        penstock=info.penstock_version is not None,
        controllers=tuple(filter(None, info.raw.get("penstockControllers", "").split(";"))),
        log_end=info.log_end,
        error=info.raw.get("penstockReplicationError", ""),
    )


def _reached_epoch(cache: EpochEntryCache | None) -> int | None:
    if cache is None:
        return None
    reached = [entry.epoch for entry in cache.epoch_list if entry.start_offset <= cache.max_offset]
    return reached[-1] if reached else None


def _with_master(status: ReplicaStatus, replicas: Sequence[_Answers]) -> ReplicaStatus:
    """Compare a slave with its master."""
    master = next((one for one in replicas if one.broker.is_master), None)
    if master is None or master.info is None:
        return status
    behind = None
    if status.log_end is not None and master.info.log_end is not None:
        behind = max(master.info.log_end - status.log_end, 0)
    ids = master.info.raw.get("penstockInSyncSlaves")
    if ids is not None:
        in_sync: bool | None = str(status.broker.id) in ids.split(",")
    else:
        slaves = [one.broker for one in replicas if not one.broker.is_master]
        in_sync = _in_sync_by_host(master.replication, status.broker, slaves)
    return replace(status, behind=behind, in_sync=in_sync)


def _in_sync_by_host(
    replication: HARuntimeInfo | None, slave: BrokerAddress, slaves: Iterable[BrokerAddress]
) -> bool | None:
    """Whether the master counts the slave as in sync; it knows only the hosts of its slaves.

    None if several slaves have the same host, and only some of them are in sync, or if the
    connection of a slave comes from a host that no slave announces.
    """
    if replication is None:
        return None
    host, hosts = _host(slave.address), [_host(other.address) for other in slaves]
    same_host = hosts.count(host)
    connections = [
        (_host(connection.addr or ""), connection.in_sync)
        for connection in replication.ha_connection_info
    ]
    found = [in_sync for address, in_sync in connections if address == host]
    if not any(found):
        elsewhere = any(in_sync and address not in hosts for address, in_sync in connections)
        return None if elsewhere else False
    return True if all(found) and len(found) >= same_host else None


def _host(address: str) -> str:
    return address.lstrip("/").rpartition(":")[0]
