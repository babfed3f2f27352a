"""A NameServer, a controller and the replicas of one broker, in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.config import BrokerConfig, ControllerConfig, NameServerConfig, Settings
from penstock.config.replication_settings import ReplicationConfig
from penstock.server.controller.controller_service import ControllerService
from penstock.server.services.broker_service import BrokerService
from penstock.server.services.nameserver_service import NameServerService
from penstock.transport.peer import Peer
from tests.integration.test_broker_service import free_port, send
from tests.integration.test_replication import until
from tests.store_kit import small_config


class ControlledSet:
    """A NameServer, a controller and the replicas of one broker, by their number."""

    def __init__(self, root: Path, **replication: Any) -> None:
        self.root = root
        self._replication = replication
        self.names = NameServerService(Settings(nameserver=NameServerConfig(port=0)))
        self.controller_port = free_port()
        self.controller = self._new_controller()
        self.services: dict[int, BrokerService] = {}
        self._settings: dict[int, Settings] = {}

    def _new_controller(self) -> ControllerService:
        config = ControllerConfig(port=self.controller_port, data=str(self.root / "controller"))
        return ControllerService(Settings(controller=config))

    def settings(self, number: int) -> Settings:
        if number not in self._settings:
            self._settings[number] = Settings(
                broker=BrokerConfig(
                    port=free_port(),
                    data=str(self.root / str(number)),
                    probe_port=0,
                    vip_port=0,
                    nameservers=f"127.0.0.1:{self.names.server.port}",
                ),
                store=small_config(sync_flush=False),
                replication=ReplicationConfig(
                    **{
                        "controllers": f"127.0.0.1:{self.controller_port}",
                        "port": free_port(),
                        "report_ms": 200,
                        "heartbeat_ms": 50,
                        "heartbeat_timeout_ms": 500,
                        "slave_timeout_ms": 500,
                        **self._replication,
                    }
                ),
            )
        return self._settings[number]

    @asynccontextmanager
    async def running(self, count: int) -> AsyncIterator[None]:
        await self.names.start()
        await self.controller.start()
        try:
            await self.start(*range(count))
            yield
        finally:
            for number in list(self.services):
                await self.services.pop(number).stop()
            await self.controller.stop()
            await self.names.stop()

    async def start(self, *numbers: int) -> None:
        for number in numbers:
            self.services[number] = BrokerService(self.settings(number))
        await asyncio.gather(*(self.services[number].start() for number in numbers))

    async def restart_controller(self) -> None:
        self.controller = self._new_controller()
        await self.controller.start()

    def master(self) -> int | None:
        """The number of the replica that is the master and has services."""
        for number, service in self.services.items():
            if service._broker is not None and not service._broker.role.slave:
                return number
        return None

    async def await_master(self, besides: int | None = None) -> int:
        """Wait until there is a master that accepts messages, other than this one."""
        await until(
            lambda: (
                (found := self.master()) is not None
                and found != besides
                and self.services[found]._not_ready() is None
            )
        )
        found = self.master()
        assert found is not None
        return found

    async def await_in_sync(self, count: int) -> BrokerService:
        """Wait until the in-sync set has this many members; returns the master."""

        def enough() -> bool:
            number = self.master()
            master = None if number is None else self.services[number]._replication
            return (
                master is not None
                and master.master is not None
                and 1 + len(master.master.replicas.in_sync) == count
            )

        await until(enough)
        number = self.master()
        assert number is not None
        return self.services[number]

    @asynccontextmanager
    async def client(self, number: int) -> AsyncIterator[Peer]:
        peer = Peer(f"127.0.0.1:{self.settings(number).broker.port}")
        try:
            yield peer
        finally:
            await peer.close()

    async def send_to(self, number: int, message: int) -> int:
        async with self.client(number) as peer:
            return (await send(peer, message)).code


async def crash(service: BrokerService) -> None:
    """End a broker as far as others can see, without handing over."""
    contact = service.contact
    assert contact is not None
    await contact.close()
    service.contact = None
    await service.stop()
