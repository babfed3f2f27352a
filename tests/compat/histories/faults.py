"""What happens to a cluster during a history.

A fault is an async context manager: it begins, says what it did, lasts for as long as the block,
and ends. Faults may overlap. Which machines take part depends on who is the master at that time, so
a seed repeats the kinds of faults and their times, but not every detail.

Most faults last for a moment. Outages of etcd that outlast its leases are rare, because a history
waits for their end.

Faults do not take away more than the promise allows: a disk is deleted only when all replicas are
in sync. So there is always a replica with every acknowledged message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from random import Random
from typing import TypeAlias

from tests.compat.histories.cluster import BROKERS, NAMESERVER, Cluster
from tests.compat.histories.machines_network import CLIENTS, Direction, both_ways
from tests.compat.histories.server_process import ServerProcess

LENGTH_S = (0.3, 2.2)
"""How long a fault lasts."""
OUTAGE_S = (4.0, 15.0)
"""How long etcd is away: always longer than its leases (3 s), and sometimes than the time for which
controllers presume that a master is alive (10 s)."""
RARE_EVERY = 19
"""Has no divisor in common with the numbers by which seeds choose the other properties in turn."""
ELECTED_S = 60.0
"""Longer than any election takes on a busy machine; reaching it is an error."""
CLOCK_STEPS_S = (-3_600.0, -30.0, -2.0, 2.0, 30.0, 3_600.0)
WHOLE_S = 6.0
"""How long the deletion of a disk waits for all replicas to be in sync."""

BeginFault: TypeAlias = Callable[[Cluster, Random], AbstractAsyncContextManager[str]]


def _others(*names: str) -> list[str]:
    return [one for one in BROKERS if one not in names]


def _everyone(cluster: Cluster) -> list[str]:
    return [CLIENTS, *cluster.servers]


@asynccontextmanager
async def _lost(cluster: Cluster, directions: Iterable[Direction]) -> AsyncIterator[None]:
    """Lose packets while the block runs."""
    directions = sorted(set(directions))
    losing = asyncio.ensure_future(asyncio.to_thread(cluster.network.lose, directions))
    try:
        await asyncio.shield(losing)
        yield
    finally:
        await losing  # a thread goes on if its task is cancelled
        await asyncio.to_thread(cluster.network.restore, directions)


async def _slave(cluster: Cluster, rng: Random) -> str:
    return rng.choice(_others(await cluster.master()))


# --- the network


@asynccontextmanager
async def isolate_master(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    master = await cluster.master()
    async with _lost(cluster, both_ways([master], _everyone(cluster))):
        yield f"{master}, the master, is separated from all"


@asynccontextmanager
async def isolate_master_with_clients(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """Clients and the NameServer reach the old master; its slaves and controllers do not."""
    master = await cluster.master()
    servers = [*_others(master), *cluster.controllers]
    async with _lost(cluster, both_ways([master], servers)):
        yield f"{master}, the master, reaches only clients and the NameServer"


@asynccontextmanager
async def isolate_master_from_controllers(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    master = await cluster.master()
    async with _lost(cluster, both_ways([master], cluster.controllers)):
        yield f"{master}, the master, is separated from the controllers"


@asynccontextmanager
async def isolate_master_from_slaves(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    master = await cluster.master()
    async with _lost(cluster, both_ways([master], BROKERS)):
        yield f"{master}, the master, is separated from its slaves"


@asynccontextmanager
async def isolate_slave(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    slave = await _slave(cluster, rng)
    async with _lost(cluster, both_ways([slave], _everyone(cluster))):
        yield f"{slave}, a slave, is separated from all"


@asynccontextmanager
async def isolate_controllers(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    async with _lost(cluster, both_ways(cluster.controllers, BROKERS)):
        yield "no broker reaches a controller"


@asynccontextmanager
async def split(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """Two parts, one of which has the master and the other one most of the rest, or so."""
    machines = list(cluster.servers)
    rng.shuffle(machines)
    part = machines[: len(machines) // 2]
    rest = [one for one in _everyone(cluster) if one not in part]
    async with _lost(cluster, both_ways(part, rest)):
        yield f"{', '.join(sorted(part))} are separated from the others"


@asynccontextmanager
async def bridge(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """Two brokers see only the third."""
    middle = rng.choice(BROKERS)
    one, other = _others(middle)
    async with _lost(cluster, both_ways([one], [other])):
        yield f"{one} and {other} see only {middle}"


@asynccontextmanager
async def controllers_see_only_slaves(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """A bridge: the master and the controllers see only the slaves."""
    master = await cluster.master()
    async with _lost(cluster, both_ways([master], [*cluster.controllers, NAMESERVER])):
        yield f"{master}, the master, and the controllers see only the slaves"


@asynccontextmanager
async def one_way(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """One machine can send or receive, but not both."""
    machine = rng.choice([await cluster.master(), *BROKERS, *cluster.controllers])
    several = [one for one in _everyone(cluster) if one != machine]
    peers = sorted(rng.sample(several, k=rng.randint(1, len(several))))
    if rng.random() < 0.5:
        async with _lost(cluster, [(machine, one) for one in peers]):
            yield f"what {machine} sends to {', '.join(peers)} is lost"
    else:
        async with _lost(cluster, [(one, machine) for one in peers]):
            yield f"what {', '.join(peers)} send to {machine} is lost"


@asynccontextmanager
async def flapping(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """The links of one broker are lost and restored several times."""
    machine = rng.choice(BROKERS)
    links = both_ways([machine], [*BROKERS, *cluster.controllers])

    async def flap() -> None:
        while True:
            async with _lost(cluster, links):
                await asyncio.sleep(rng.uniform(0.05, 0.6))
            await asyncio.sleep(rng.uniform(0.05, 0.4))

    task = asyncio.create_task(flap())
    try:
        yield f"the links of {machine} to brokers and controllers come and go"
    finally:
        task.cancel()
        await asyncio.wait([task])


# --- processes


@asynccontextmanager
async def _killed(*servers: ServerProcess) -> AsyncIterator[None]:
    for server in servers:
        server.kill()
    try:
        yield
    finally:
        for server in servers:
            server.start()


@asynccontextmanager
async def _frozen(server: ServerProcess) -> AsyncIterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


@asynccontextmanager
async def kill_master(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    master = await cluster.master()
    async with _killed(cluster.servers[master]):
        yield f"{master}, the master, is killed"


@asynccontextmanager
async def kill_slave(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    slave = await _slave(cluster, rng)
    async with _killed(cluster.servers[slave]):
        yield f"{slave}, a slave, is killed"


@asynccontextmanager
async def kill_all_brokers(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    async with _killed(*(cluster.servers[name] for name in BROKERS)):
        yield "all brokers are killed"


@asynccontextmanager
async def kill_controller(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    name = rng.choice(cluster.controllers)
    async with _killed(cluster.servers[name]):
        yield f"{name} is killed"


@asynccontextmanager
async def kill_master_and_controllers(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    master = await cluster.master()
    names = [master, *cluster.controllers]
    async with _killed(*(cluster.servers[name] for name in names)):
        yield f"{master}, the master, and all controllers are killed"


@asynccontextmanager
async def kill_nameserver(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    async with _killed(cluster.servers[NAMESERVER]):
        yield "the NameServer is killed"


@asynccontextmanager
async def freeze_master(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    master = await cluster.master()
    async with _frozen(cluster.servers[master]):
        yield f"{master}, the master, is stopped (SIGSTOP)"


@asynccontextmanager
async def freeze_slave(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    slave = await _slave(cluster, rng)
    async with _frozen(cluster.servers[slave]):
        yield f"{slave}, a slave, is stopped (SIGSTOP)"


@asynccontextmanager
async def freeze_controller(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    name = rng.choice(cluster.controllers)
    async with _frozen(cluster.servers[name]):
        yield f"{name} is stopped (SIGSTOP)"


@asynccontextmanager
async def stop_master(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """A planned switch: SIGTERM, and another start."""
    master = await cluster.master()
    await asyncio.to_thread(cluster.servers[master].terminate)
    try:
        yield f"{master}, the master, has got SIGTERM"
    finally:
        cluster.servers[master].start()


@asynccontextmanager
async def elect_slave(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """A planned switch, as mqadmin's electMaster asks for it."""
    slave = await _slave(cluster, rng)
    yield f"{slave} is designated as the master: {await cluster.elect(slave)}"


# --- disks and clocks


@asynccontextmanager
async def _disk_deleted(cluster: Cluster, name: str) -> AsyncIterator[str]:
    try:
        await cluster.await_in_sync(within_s=WHOLE_S)
    except TimeoutError:  # other faults last; a second copy might be the last one
        yield f"the disk of {name} is not deleted, because not all replicas are in sync"
        return
    async with _killed(cluster.servers[name]):
        await asyncio.to_thread(cluster.delete_disk, name)
        yield f"{name} is killed and its disk is deleted"


@asynccontextmanager
async def delete_disk_of_master(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    async with _disk_deleted(cluster, await cluster.master()) as what:
        yield what


@asynccontextmanager
async def delete_disk_of_slave(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    async with _disk_deleted(cluster, await _slave(cluster, rng)) as what:
        yield what


@asynccontextmanager
async def step_clock(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    machine = rng.choice([await cluster.master(), *BROKERS])
    seconds = rng.choice(CLOCK_STEPS_S)
    cluster.clocks[machine].step(seconds)
    try:
        yield f"the clock of {machine} is set by {seconds:+.0f} s"
    finally:
        cluster.clocks[machine].step(0)


# --- etcd


@asynccontextmanager
async def kill_etcd_leader(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    leader = await cluster.etcd_leader()
    async with _killed(cluster.servers[leader]):
        yield f"{leader}, the leader of etcd, is killed"


@asynccontextmanager
async def kill_all_etcd(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    async with _killed(*(cluster.servers[name] for name in cluster.etcd)):
        yield "all members of etcd are killed"


@asynccontextmanager
async def freeze_etcd_leader(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    leader = await cluster.etcd_leader()
    async with _frozen(cluster.servers[leader]):
        yield f"{leader}, the leader of etcd, is stopped (SIGSTOP)"


@asynccontextmanager
async def isolate_etcd_leader(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    leader = await cluster.etcd_leader()
    async with _lost(cluster, both_ways([leader], _everyone(cluster))):
        yield f"{leader}, the leader of etcd, is separated from all"


@asynccontextmanager
async def isolate_a_controller_from_etcd(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    name = rng.choice(cluster.controllers)
    async with _lost(cluster, both_ways([name], cluster.etcd)):
        yield f"{name} is separated from etcd"


@asynccontextmanager
async def _etcd_away(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    servers = [cluster.servers[name] for name in cluster.etcd]
    how = rng.choice(("killed", "stopped (SIGSTOP)", "separated from the controllers"))
    async with AsyncExitStack() as away:
        match how:
            case "killed":
                await away.enter_async_context(_killed(*servers))
            case "stopped (SIGSTOP)":
                for server in servers:
                    await away.enter_async_context(_frozen(server))
            case _:
                links = both_ways(cluster.controllers, cluster.etcd)
                await away.enter_async_context(_lost(cluster, links))
        yield f"all members of etcd are {how} for long"


@asynccontextmanager
async def etcd_outage(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    async with _etcd_away(cluster, rng) as what:
        yield what


@asynccontextmanager
async def etcd_outage_with_dead_master(cluster: Cluster, rng: Random) -> AsyncIterator[str]:
    """The master dies during the outage, and comes back when another one has been elected."""
    state = await cluster.await_in_sync()
    master = state.master or ""
    async with AsyncExitStack() as dead:
        async with _etcd_away(cluster, rng) as what:
            await asyncio.sleep(rng.uniform(*LENGTH_S))
            await dead.enter_async_context(_killed(cluster.servers[master]))
            yield f"{what}, and {master}, the master, is killed"
        await cluster.await_running_master(within_s=ELECTED_S)


ALWAYS: tuple[BeginFault, ...] = (
    kill_master, isolate_master, freeze_master, split, stop_master, one_way,
    isolate_master_with_clients, delete_disk_of_master, kill_controller, bridge,
    isolate_master_from_controllers, kill_master_and_controllers, elect_slave, freeze_controller,
    isolate_master_from_slaves, kill_slave, flapping, delete_disk_of_slave, isolate_slave,
    kill_all_brokers, freeze_slave, controllers_see_only_slaves, kill_nameserver,
    isolate_controllers,
)  # fmt: skip
NEEDS_ALL_REPLICAS: tuple[BeginFault, ...] = (
    delete_disk_of_master, delete_disk_of_slave, etcd_outage_with_dead_master,
)  # fmt: skip
"""These begin when other faults have ended."""
WITH_CLOCKS: tuple[BeginFault, ...] = (step_clock,)
WITH_ETCD: tuple[BeginFault, ...] = (
    kill_etcd_leader, freeze_etcd_leader, isolate_etcd_leader, isolate_a_controller_from_etcd,
    kill_all_etcd,
)  # fmt: skip
RARE: Mapping[int, BeginFault] = {4: etcd_outage, 13: etcd_outage_with_dead_master}
"""Faults that last for `OUTAGE_S` and need etcd. A history has one if its seed has this remainder
when it is divided by `RARE_EVERY`."""


WITH_APACHE: tuple[BeginFault, ...] = (
    kill_master, isolate_master, freeze_master, isolate_master_with_clients, kill_slave, one_way,
    isolate_master_from_slaves, elect_slave, isolate_slave, freeze_slave,
)  # fmt: skip
"""Apache's servers are slow to start, and their clock can't be set here."""


def chosen_faults(cluster: Cluster, seed: int, rng: Random, count: int) -> list[BeginFault]:
    """The faults of a history. Seeds take turns for one of them."""
    available = _faults_of(cluster)
    chosen = [available[seed % len(available)]]
    chosen += rng.choices(available, k=count - 1)
    if cluster.etcd and (rare := rare_fault(seed)) is not None:
        chosen[-1] = rare
    rng.shuffle(chosen)
    return chosen


def rare_fault(seed: int) -> BeginFault | None:
    """The long fault that a history has if it uses etcd."""
    return RARE.get(seed % RARE_EVERY)


def length_s(fault: BeginFault, rng: Random) -> float:
    """How long a fault lasts."""
    return rng.uniform(*(OUTAGE_S if fault in RARE.values() else LENGTH_S))


def _faults_of(cluster: Cluster) -> list[BeginFault]:
    """The faults that are possible here and last for `LENGTH_S`."""
    if cluster.plan.has_apache:
        return list(WITH_APACHE)
    clocks = WITH_CLOCKS if cluster.clocks else ()
    etcd = WITH_ETCD if cluster.etcd else ()
    mixed: list[BeginFault] = []
    extra = [*etcd, *clocks]
    for number, fault in enumerate(ALWAYS):  # so that few seeds have faults of all kinds
        mixed.append(fault)
        if number % 3 == 2 and extra:
            mixed.append(extra.pop(0))
    return mixed + extra
