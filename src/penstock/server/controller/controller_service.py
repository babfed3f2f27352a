"""Runs a controller: its state in files or in etcd, its port, its probe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from penstock.clock import Clock, LoopClock
from penstock.config import LiveSettings, Settings
from penstock.controller.controller import Controller
from penstock.controller.signed_controller_changes import SignedControllerChanges
from penstock.metrics import Registry
from penstock.server.controller.broker_set_states import StoredBrokerSetStates
from penstock.server.controller.broker_set_store import BrokerSetStore, FileStore
from penstock.server.controller.controller_metrics import (
    add_controller_metrics,
    add_etcd_metrics,
)
from penstock.server.controller.etcd.etcd_backend import EtcdBackend
from penstock.server.controller.liveness import Liveness, LocalLiveness
from penstock.server.listener import is_loopback
from penstock.server.metrics.probe import Probe, serve_probe
from penstock.server.metrics.server_metrics import add_process_metrics, add_server_metrics
from penstock.server.request_loop import RequestLoop
from penstock.server.server import Server
from penstock.store.disk import Disk
from penstock.transport.peer import Sign
from penstock.transport.tls import Tls, outgoing_context
from penstock.wire.signing import strict_signer

log = logging.getLogger(__name__)


class ControllerService:
    """A controller that serves its port."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings = LiveSettings(settings, "controller")
        self._clock = clock or LoopClock()
        self._disk = Disk()
        self._etcd: EtcdBackend | None = None
        self._liveness: Liveness | None = None
        self.states: StoredBrokerSetStates | None = None
        self.server: Server | None = None
        self._probe: Probe | None = None

    async def start(self) -> None:
        """Load the states and listen."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.settings.current
        own = config.controller
        address = f"{own.announce or own.host}:{own.port}"
        access = SignedControllerChanges(config.access) if own.signed_changes else None
        store, self._liveness = await self._open(address)
        self.states = states = StoredBrokerSetStates(
            self.settings,
            store,
            self._liveness,
            self._clock,
            sign=_signer(config, self._clock),
            ssl=outgoing_context(config.tls),
        )
        controller = Controller(self.settings, states, address)
        await self._listen(controller, access)
        states.start()
        await self._start_probe(controller, states, store, self._liveness)
        where = f"etcd ({own.etcd})" if own.etcd else own.data
        log.info("the controller is ready on %s:%d; its state is in %s", own.host, own.port, where)

    async def _open(self, address: str) -> tuple[BrokerSetStore, Liveness]:
        config = self.settings.current.controller
        if config.etcd:
            self._etcd = backend = EtcdBackend(config, self._clock, address)
            await backend.start()
            return backend.store, backend.liveness
        loop = asyncio.get_running_loop()
        store = await loop.run_in_executor(None, FileStore, self._disk, Path(config.data))
        return store, LocalLiveness(self._clock)

    async def _listen(self, controller: Controller, access: SignedControllerChanges | None) -> None:
        config = self.settings.current
        limits = config.server
        request_loop = RequestLoop(
            controller,
            access=access,
            frame_bytes_max=limits.frame_bytes_max,
            header_bytes_max=limits.header_bytes_max,
        )
        self.server = Server(
            self.settings,
            controller,
            request_loop,
            controller.effects,
            submit=self._disk.submit,
            clock=self._clock,
        )
        await self.server.start(config.controller.host, config.controller.port, Tls.of(config.tls))
        if access is None and not is_loopback(config.controller.host):
            log.warning(
                "every client that reaches %s:%d may change the master: set "
                "controller.signed_changes, or protect the port with a firewall",
                config.controller.host,
                self.server.port,
            )

    async def _start_probe(
        self,
        controller: Controller,
        states: StoredBrokerSetStates,
        store: BrokerSetStore,
        liveness: Liveness,
    ) -> None:
        config = self.settings.current.controller
        port = config.port + 2 if config.probe_port < 0 else config.probe_port
        if port == 0:
            return
        assert self.server is not None
        registry = Registry({"node_type": "controller", "node_id": f"{config.host}:{config.port}"})
        add_controller_metrics(registry, states, store, liveness)
        if self._etcd is not None:
            add_etcd_metrics(registry, self._etcd)
        add_server_metrics(registry, self.server, controller.router.refusals)
        add_process_metrics(registry)
        self._probe = await serve_probe(config.host, port, registry, self._not_ready())

    def _not_ready(self) -> Callable[[], str | None]:
        return (lambda: None) if self._etcd is None else self._etcd.not_ready

    async def stop(self) -> None:
        """Close connections and files."""
        if self._probe is not None:
            await self._probe.close()
        if self.states is not None:
            await self.states.close()
        if self.server is not None:
            await self.server.stop()
        if self._etcd is not None:
            await self._etcd.close()
        elif self._liveness is not None:
            await self._liveness.close()
        self._disk.close()


def _signer(settings: Settings, clock: Clock) -> Sign | None:
    """Signs notifications, for brokers with access control."""
    name, _, password = settings.access.internal_user.partition(":")
    return strict_signer(name, password, clock.now_ms) if name else None
