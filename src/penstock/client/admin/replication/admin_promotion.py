"""Promotion: a slave becomes the master of its broker, and the master becomes a slave."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.client.admin.replication.admin_replication import ReplicaStatus, ReplicationAdmin
from penstock.clock import finish_within, pause
from penstock.errors import NoRoute, PeerError, PenstockError, Refused
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import RequestCode

CHANGE_MS = 10_000
"""Time limit of the request that changes a role; the old master waits for its slave."""
START_MS = 30_000
"""How long to wait until the slave is the master."""
POLL_MS = 20
RETRY_MS = 200
UNSUPERVISED_MAX = 1_000
SLAVE = "slave"
MASTER_ROLES = ("sync_master", "async_master")


@dataclass(frozen=True, slots=True)
class PromotionPlan:
    """What `promote` will do."""

    slave: ReplicaStatus
    """It becomes the master."""
    master: ReplicaStatus | None
    """It steps down and becomes a slave with the id of the other; None: it can't be asked to."""
    others: tuple[ReplicaStatus, ...]
    """Further slaves, which follow the new master."""
    unknown: tuple[ReplicaStatus, ...]
    """Slaves that do not answer. Without the master's consent, what only they have is lost."""
    role: str
    """The role of the new master: sync_master or async_master."""
    epoch: int
    """The epoch that it begins; 0 without epochs."""
    controllers: tuple[str, ...] = ()
    """The controllers that elect it, if there are any."""


class PromotionAdmin(ReplicationAdmin):
    """The part of `AsyncAdmin` that moves the role of the master."""

    async def plan_promotion(
        self,
        broker: str,
        broker_id: int,
        *,
        cluster: str | None = None,
        role: str | None = None,
        force: bool = False,
    ) -> PromotionPlan:
        """Plan to make a slave the master of its broker.

        With `force` also if the present master can't be asked to step down, because it is down or
        not registered. Then the slave must have at least as much of the log as each other replica
        that answers. Raises Refused if the promotion could lose messages or is not possible.
        """
        replicas = [one for one in await self.replicas(cluster) if one.broker.name == broker]
        slave = next((one for one in replicas if one.broker.id == broker_id), None)
        if slave is None:
            known = ", ".join(str(one.broker.id) for one in replicas) or "none"
            raise NoRoute(
                f"the NameServers know no broker {broker} with the id {broker_id} (ids: {known})",
                hint="check the name and the id with `penstock cluster status`",
            )
        _check_slave(slave)
        if slave.controllers:
            return _plan_election(slave, replicas)
        master = next((one for one in replicas if _may_be_master(one)), None)
        slaves = [one for one in replicas if one not in (slave, master)]
        others = tuple(one for one in slaves if one.problem is None)
        unknown = tuple(one for one in slaves if one.problem is not None)
        if master is None or master.problem is not None:
            _check_loss(slave, master, others, force=force)
            master = None
        elif not master.penstock:
            raise _apache_master(master)
        if role is None:
            role = master.role if master is not None and master.role else MASTER_ROLES[0]
        if role not in MASTER_ROLES:
            raise Refused(f"{role!r} is not the role of a master", hint=" or ".join(MASTER_ROLES))
        epoch = 0
        if slave.newest_epoch is not None:
            newest = max(one.newest_epoch or 0 for one in replicas)
            # A master that was not asked may begin epochs of its own. Numbers must not be equal.
            epoch = newest + (1 if master is not None else random.randint(2, UNSUPERVISED_MAX))
        return PromotionPlan(slave, master, others, unknown, role, epoch)

    async def promote(self, plan: PromotionPlan) -> tuple[str, ...]:
        """Carry out a plan; returns what did not succeed although the promotion did."""
        if plan.controllers:
            await self._elect(plan)
            return ()
        if plan.master is not None:
            await self._change_role(plan, plan.master, "stepDown")
        try:
            await self._take_over(plan)
        except (PenstockError, TimeoutError) as error:
            raise _without_master(plan, error) from error
        problems = []
        for other in plan.others:
            try:
                await self._change_role(plan, other, "follow")
            except PenstockError as error:
                problems.append(f"slave {other.broker.id} ({other.broker.address}): {error}")
        return tuple(problems)

    async def _elect(self, plan: PromotionPlan) -> None:
        """Have a controller elect the slave, and wait until it is the master."""
        fields = {
            "clusterName": plan.slave.broker.cluster,
            "brokerName": plan.slave.broker.name,
            "brokerId": str(plan.slave.broker.id),
            "designateElect": "true",
            "invokeTime": str(self.session.clock.now_ms()),
        }
        problem: PenstockError | None = None
        for address in plan.controllers:
            try:
                await self.ask(
                    address, RequestCode.CONTROLLER_ELECT_MASTER, fields, timeout_ms=CHANGE_MS
                )
                break
            except PeerError as error:
                problem = error
        else:
            assert problem is not None
            raise problem
        await finish_within(self.session.clock, START_MS, self._await_master(plan.slave))

    async def _take_over(self, plan: PromotionPlan) -> None:
        """Make the slave the master, and wait until it is registered as such."""
        deadline_ms = self.session.clock.monotonic_ms() + START_MS
        while True:
            try:
                await self._change_role(plan, plan.slave, "takeOver")
                break
            except PeerError:
                if self.session.clock.monotonic_ms() >= deadline_ms:
                    raise
                await pause(self.session.clock, RETRY_MS)
        await finish_within(self.session.clock, START_MS, self._await_master(plan.slave))

    async def _change_role(self, plan: PromotionPlan, replica: ReplicaStatus, step: str) -> None:
        fields = {
            "masterBrokerId": str(plan.slave.broker.id),
            "masterAddress": plan.slave.broker.address,
            # Without epochs, a number that only NameServers compare.
            "masterEpoch": str(plan.epoch or self.session.clock.now_ms() // 1000),
            "syncStateSetEpoch": "0",
            "penstockStep": step,
            "penstockRole": plan.role,
        }
        await self.ask(
            replica.broker.address,
            RequestCode.NOTIFY_BROKER_ROLE_CHANGED,
            fields,
            timeout_ms=CHANGE_MS,
        )

    async def _await_master(self, replica: ReplicaStatus) -> None:
        """Wait until a replica answers as a master; it restarts its services for that."""
        while True:
            try:
                answer = await self.ask(replica.broker.address, RequestCode.GET_BROKER_RUNTIME_INFO)
                role = fastjson.decode(answer.body, KVTable).table.get("penstockRole")
                registered = [one.address for one in await self.brokers() if one.is_master]
                if role in MASTER_ROLES and replica.broker.address in registered:
                    return
            except PenstockError:
                pass
            await pause(self.session.clock, POLL_MS)


def _plan_election(slave: ReplicaStatus, replicas: Sequence[ReplicaStatus]) -> PromotionPlan:
    """Controllers elect the slave; they refuse one that is not in sync."""
    if slave.in_sync is False:
        raise Refused(
            f"slave {slave.broker.id} ({slave.broker.address}) is not in sync",
            hint="wait until it has caught up; `penstock cluster status` shows it",
        )
    master = next((one for one in replicas if _may_be_master(one)), None)
    others = [one for one in replicas if one not in (slave, master)]
    return PromotionPlan(
        slave,
        master,
        tuple(one for one in others if one.problem is None),
        tuple(one for one in others if one.problem is not None),
        MASTER_ROLES[0],
        max(one.newest_epoch or 0 for one in replicas) + 1,
        slave.controllers,
    )


def _check_slave(slave: ReplicaStatus) -> None:
    name = f"{slave.broker.name} {slave.broker.id} ({slave.broker.address})"
    if slave.problem is not None:
        raise slave.problem
    if slave.broker.is_master or slave.role != SLAVE:
        raise Refused(f"{name} is the master already", hint="")
    if not slave.penstock:
        raise Refused(
            f"{name} is one of Apache's brokers, which get their role from their settings or from "
            "a controller",
            hint="stop it, set brokerRole and brokerId in its settings, and start it again",
        )


def _may_be_master(replica: ReplicaStatus) -> bool:
    """Whether a replica is the master, or may be it and does not answer."""
    if replica.problem is not None:
        return replica.broker.is_master
    return replica.role != SLAVE


def _apache_master(master: ReplicaStatus) -> Refused:
    return Refused(
        f"the master {master.broker.address} is one of Apache's brokers and can't step down",
        hint="pause the producers (brokerPermission=4), wait until the slave has everything "
        "(penstock cluster status), stop the master, and promote with --force",
    )


def _without_master(plan: PromotionPlan, error: Exception) -> Refused:
    name, number = plan.slave.broker.name, plan.slave.broker.id
    stepped_down = "the old master has stepped down, and " if plan.master is not None else ""
    return Refused(
        f"slave {number} has not become the master: {error}; {stepped_down}{name} has no master",
        hint=f"check the slave's log, then run `penstock cluster promote {name} {number} --force`",
    )


def _check_loss(
    slave: ReplicaStatus,
    master: ReplicaStatus | None,
    others: Sequence[ReplicaStatus],
    *,
    force: bool,
) -> None:
    """Refuse a promotion without the consent of the master, unless it is forced and this slave has
    the most of the log."""
    if master is not None and not isinstance(master.problem, PeerError):
        assert master.problem is not None
        raise master.problem  # it runs, but does not tell its state
    if not force:
        who = "no master is registered"
        if master is not None:
            who = f"the master {master.broker.address} does not answer ({master.problem})"
        raise Refused(
            f"{who}, so it can't be asked to step down",
            hint="make sure that it does not run, then promote with --force; messages that this "
            "slave does not have are lost",
        )
    mine = slave.epoch or 0, slave.log_end or 0
    ahead = max(others, key=lambda one: (one.epoch or 0, one.log_end or 0), default=None)
    if ahead is not None and (ahead.epoch or 0, ahead.log_end or 0) > mine:
        raise Refused(
            f"slave {ahead.broker.id} ({ahead.broker.address}) has more of the log: epoch "
            f"{ahead.epoch}, end {ahead.log_end}, this one epoch {slave.epoch}, end "
            f"{slave.log_end}",
            hint=f"promote {ahead.broker.id} instead",
        )
