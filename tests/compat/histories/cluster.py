"""A NameServer, three replicas of one broker, controllers and etcd, each on its own machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.transport.peer import Peer, Response
from penstock.wire.codes import RequestCode, ResponseCode
from tests.compat.etcd_cluster import ETCD_DIR
from tests.compat.go_program import program
from tests.compat.histories import apache_servers
from tests.compat.histories.faketime import FakeClock, library
from tests.compat.histories.machines_network import MachinesNetwork
from tests.compat.histories.server_process import ServerProcess
from tests.compat.replication_machines import penstock_command

BROKERS = ("broker-1", "broker-2", "broker-3")
CONTROLLERS = ("controller-1", "controller-2", "controller-3")
ETCD = ("etcd-1", "etcd-2", "etcd-3")
NAMESERVER = "nameserver"
MACHINES = (NAMESERVER, *BROKERS, *CONTROLLERS, *ETCD)

BROKER_SET = "set"
NAMESERVER_PORT, BROKER_PORT, CONTROLLER_PORT = 9876, 10911, 9878
ETCD_CLIENTS_PORT, ETCD_PEERS_PORT = 2379, 2380
START_S = 120.0
RECOVERY_S = 60.0
"""Longer than any recovery takes on a busy machine; reaching it is an error."""
CALL_MS = 1_000
POLL_S = 0.05
REPLICATION: Mapping[str, int] = {
    "report_ms": 100,
    "idle_ms": 800,
    "lag_ms_max": 1_500,
    "slave_timeout_ms": 800,
    "heartbeat_ms": 100,
    "heartbeat_timeout_ms": 700,
}
"""Short times, so that a history of a few seconds has several failovers."""


class Plan(NamedTuple):
    """The servers of a cluster."""

    controllers: int = 1
    etcd: bool = False
    """Otherwise the state is in files, of one controller."""
    sync_flush: bool = True
    settings: Mapping[str, Any] = REPLICATION
    """Settings of the replication of Penstock's brokers."""
    topics: tuple[str, ...] = ()
    """Topics that all replicas have from the beginning: slaves copy the table of topics only every
    few seconds."""
    queues: int = 3
    """Of each topic."""
    apache_brokers: tuple[str, ...] = ()
    """The machines whose brokers are Apache's."""
    apache_settings: Mapping[str, Any] = {}
    """Settings of Apache's brokers."""
    apache_controller: bool = False
    apache_version: str = ""
    """Of brokers and controller."""

    @property
    def has_apache(self) -> bool:
        return self.apache_controller or bool(self.apache_brokers)


class SetState(NamedTuple):
    """What the controllers say of the broker set."""

    master: str | None
    """The machine of the master."""
    epoch: int
    in_sync: frozenset[str]
    """The machines of members that are alive."""
    size: int
    """The number of members, also of dead ones."""


class Cluster:
    """The servers of one history."""

    def __init__(self, network: MachinesNetwork, root: Path, plan: Plan) -> None:
        self.network = network
        self.root = root
        self.plan = plan
        self.controllers = CONTROLLERS[: plan.controllers]
        self.etcd = ETCD if plan.etcd else ()
        self.clocks: dict[str, FakeClock] = {}
        self.servers: dict[str, ServerProcess] = {}
        root.mkdir(parents=True, exist_ok=True)
        for name in self.etcd:
            self._add(name, ETCD_CLIENTS_PORT, self._etcd_command(name))
        nameserver = ("nameserver", "--host", "0.0.0.0", "--port", str(NAMESERVER_PORT))
        self._add(NAMESERVER, NAMESERVER_PORT, penstock_command(*nameserver))
        for name in self.controllers:
            self._add_controller(name)
        for name in BROKERS:
            self._create_topics(name)
            self._add_broker(name)

    # --- servers

    def _add_controller(self, name: str) -> None:
        if self.plan.apache_controller:
            words, environment = apache_servers.controller(
                self.root / f"apache-{name}",
                host=self.network.address(name),
                port=CONTROLLER_PORT,
                version=self.plan.apache_version,
            )
            self._add(name, CONTROLLER_PORT, words, environment)
            return
        file = self._write(name, self._controller_settings(name))
        self._add(name, CONTROLLER_PORT, penstock_command("controller", "-c", str(file)))

    def _add_broker(self, name: str) -> None:
        if name in self.plan.apache_brokers:
            words, environment = apache_servers.broker(
                self.root / f"apache-{name}",
                self.disk(name),
                name=BROKER_SET,
                host=self.network.address(name),
                port=BROKER_PORT,
                nameserver=self.nameserver,
                controllers=self.addresses(self.controllers, CONTROLLER_PORT, ";"),
                settings=self.plan.apache_settings,
                version=self.plan.apache_version,
            )
            self._add(name, BROKER_PORT, words, environment)
            return
        file = self._write(name, self._broker_settings(name))
        clock: dict[str, str] = {}
        if library() is not None:
            self.clocks[name] = FakeClock(self.root / f"{name}.clock")
            clock = self.clocks[name].environment()
        self._add(name, BROKER_PORT, penstock_command("broker", "-c", str(file)), clock)

    def _add(
        self,
        name: str,
        port: int,
        command: Iterable[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.servers[name] = ServerProcess(
            name,
            f"{self.network.address(name)}:{port}",
            [*self.network.enter(name), *command],
            self.root / f"{name}.log",
            environment=environment,
        )

    def _write(self, name: str, text: str) -> Path:
        file = self.root / f"{name}.toml"
        file.write_text(text)
        return file

    def disk(self, name: str) -> Path:
        return self.root / f"disk-{name}"

    def addresses(self, names: Iterable[str], port: int, separator: str) -> str:
        return separator.join(f"{self.network.address(name)}:{port}" for name in names)

    @property
    def nameserver(self) -> str:
        return self.servers[NAMESERVER].address

    def _controller_settings(self, name: str) -> str:
        return f"""
            [controller]
            host = "0.0.0.0"
            port = {CONTROLLER_PORT}
            announce = "{self.network.address(name)}"
            data = "{self.disk(name)}"
            etcd = "{self.addresses(self.etcd, ETCD_CLIENTS_PORT, ",")}"
            scan_ms = 100
            probe_port = 0
            """

    def _broker_settings(self, name: str) -> str:
        """Apache's slaves copy the tables of a master by its VIP channel."""
        address = self.network.address(name)
        controllers = self.addresses(self.controllers, CONTROLLER_PORT, ";")
        replication = {"controllers": controllers, "read_from_slaves": True, **self.plan.settings}
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in replication.items())
        return f"""
            [broker]
            name = "{BROKER_SET}"
            host = "0.0.0.0"
            announce = "{address}"
            port = {BROKER_PORT}
            data = "{self.disk(name)}"
            nameservers = "{self.nameserver}"
            probe_port = 0
            vip_port = {-1 if self.plan.apache_brokers else 0}
            [store]
            sync_flush = {json.dumps(self.plan.sync_flush)}
            segment_bytes = 1048576
            [replication]
            announce = "{address}"
            {lines}
            """

    def _create_topics(self, name: str) -> None:
        table = {
            topic: {
                "topicName": topic,
                "readQueueNums": self.plan.queues,
                "writeQueueNums": self.plan.queues,
                "perm": 6,
                "topicFilterType": "SINGLE_TAG",
            }
            for topic in self.plan.topics
        }
        folder = self.disk(name) / "config"
        folder.mkdir(parents=True)
        (folder / "topics.json").write_text(json.dumps({"topicConfigTable": table}))

    def _etcd_command(self, name: str) -> list[str]:
        clients, peers = (
            f"http://{self.network.address(name)}:{port}"
            for port in (ETCD_CLIENTS_PORT, ETCD_PEERS_PORT)
        )
        members = ",".join(
            f"{one}=http://{self.network.address(one)}:{ETCD_PEERS_PORT}" for one in self.etcd
        )
        return [
            str(program(ETCD_DIR, "etcd")),
            *("--name", name, "--data-dir", str(self.disk(name))),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", members, "--initial-cluster-token", "histories"),
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
        ]

    async def start(self) -> None:
        """Start all servers; returns when all replicas are in sync."""
        for server in self.servers.values():
            server.start()
        await self.await_in_sync(within_s=START_S)

    def start_missing(self) -> None:
        """Start again what does not run, and continue what was stopped."""
        for server in self.servers.values():
            server.thaw()
            server.start()

    def close(self) -> None:
        self.network.restore_all()
        for server in self.servers.values():
            server.kill()

    def delete_disk(self, name: str) -> None:
        """Delete all that a server has stored; it must not be running."""
        assert not self.servers[name].running
        shutil.rmtree(self.disk(name), ignore_errors=True)

    # --- what the controllers say

    async def state(self) -> SetState | None:
        """What the first controller says that answers; None if there is none, or no set."""
        for name in self.controllers:
            body = json.dumps([BROKER_SET]).encode()
            code = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA
            answer = await try_call(self.servers[name].address, code, {}, body)
            if answer is None or answer.code != ResponseCode.SUCCESS:
                continue
            table = json.loads(answer.body)["replicasInfoTable"]
            return self._read_state(table[BROKER_SET]) if BROKER_SET in table else None
        return None

    def _read_state(self, told: dict[str, Any]) -> SetState:
        in_sync = told["inSyncReplicas"]
        return SetState(
            self.machine_of(told.get("masterAddress") or ""),
            told.get("masterEpoch") or 0,
            frozenset(
                machine
                for one in in_sync
                if one["alive"]
                if (machine := self.machine_of(one["brokerAddress"])) is not None
            ),
            len(in_sync),
        )

    def machine_of(self, address: str) -> str | None:
        return next((name for name in BROKERS if self.servers[name].address == address), None)

    async def ids(self) -> dict[str, int]:
        """The id of each living replica, by its machine."""
        for name in self.controllers:
            body = json.dumps([BROKER_SET]).encode()
            code = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA
            answer = await try_call(self.servers[name].address, code, {}, body)
            if answer is not None and answer.code == ResponseCode.SUCCESS:
                told = json.loads(answer.body)["replicasInfoTable"].get(BROKER_SET, {})
                known = told.get("inSyncReplicas", []) + told.get("notInSyncReplicas", [])
                return {
                    machine: one["brokerId"]
                    for one in known
                    if one["alive"]
                    if (machine := self.machine_of(one["brokerAddress"])) is not None
                }
        return {}

    async def master(self) -> str:
        """The machine of the master; of the last one, if no controller answers now."""
        state = await self.state()
        found = None if state is None else state.master
        self._last_master = found or getattr(self, "_last_master", BROKERS[0])
        return self._last_master

    async def elect(self, name: str) -> str:
        """Designate a machine as the master; returns what the controllers say."""
        ids = await self.ids()
        if name not in ids:
            return f"{name} is not alive"
        fields = {
            "clusterName": "DefaultCluster",
            "brokerName": BROKER_SET,
            "brokerId": str(ids[name]),
            "designateElect": "true",
        }
        for controller in self.controllers:
            address = self.servers[controller].address
            answer = await try_call(address, RequestCode.CONTROLLER_ELECT_MASTER, fields)
            if answer is not None:
                return f"code {answer.code} {answer.remark or ''}".strip()
        return "no controller answers"

    async def etcd_leader(self) -> str:
        """The machine of etcd's leader; any one if there is none."""
        found = await asyncio.gather(*(self._etcd_status(name) for name in self.etcd))
        for name, status in zip(self.etcd, found, strict=True):
            own = status.get("header", {}).get("member_id")
            if own and status.get("leader") == own:
                return name
        return self.etcd[0]

    async def _etcd_status(self, name: str) -> dict[str, Any]:
        host, _, port = self.servers[name].address.rpartition(":")
        try:
            async with asyncio.timeout(CALL_MS / 1000):
                reader, writer = await asyncio.open_connection(host, int(port))
                with contextlib.closing(writer):
                    request = "POST /v3/maintenance/status HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}"
                    writer.write(request.encode())
                    text = await reader.read()
            status: dict[str, Any] = json.loads(text.partition(b"\r\n\r\n")[2])
        except (OSError, TimeoutError, ValueError):
            return {}
        return status

    async def await_in_sync(self, *, within_s: float = RECOVERY_S) -> SetState:
        """Wait until all replicas are alive and in sync; raises TimeoutError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while True:
            state = await self.state()
            whole = state is not None and state.in_sync == set(BROKERS) and state.master
            if whole and state is not None and state.size == len(BROKERS):
                return state
            if loop.time() > deadline:
                raise TimeoutError(f"not all replicas are in sync within {within_s} s: {state}")
            await asyncio.sleep(POLL_S)

    async def await_running_master(self, *, within_s: float) -> None:
        """Wait until the controllers name a master whose process runs; raises TimeoutError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while (state := await self.state()) is None or (
            state.master is None or not self.servers[state.master].running
        ):
            if loop.time() > deadline:
                raise TimeoutError(f"no running replica was elected within {within_s} s: {state}")
            await asyncio.sleep(POLL_S)

    def last_lines(self) -> str:
        """The end of the log of each server but etcd."""
        return "\n".join(
            f"--- {name}\n{server.last_lines()}"
            for name, server in self.servers.items()
            if name not in self.etcd
        )


async def try_call(
    address: str, code: int, fields: Mapping[str, str], body: bytes = b""
) -> Response | None:
    """The response of a server; None if it does not answer."""
    peer = Peer(address, connect_ms=CALL_MS)
    try:
        return await peer.call(code, fields, body, timeout_ms=CALL_MS)
    except PenstockError:
        return None
    finally:
        await peer.close()


@asynccontextmanager
async def running(network: MachinesNetwork, root: Path, plan: Plan) -> AsyncIterator[Cluster]:
    """A cluster whose replicas are in sync."""
    cluster = Cluster(network, root, plan)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.close()
