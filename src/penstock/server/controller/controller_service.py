"""Runs a controller."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from penstock.clock import Clock, LoopClock
from penstock.config import LiveSettings, Settings
from penstock.controller.handlers import Controller
from penstock.server.controller.broker_set_states import BrokerSetStates
from penstock.server.controller.broker_set_store import FileStore
from penstock.server.listener import is_loopback
from penstock.server.request_loop import RequestLoop
from penstock.server.server import Server
from penstock.store.disk import Disk
from penstock.transport.tls import Tls, outgoing_context

log = logging.getLogger(__name__)


class ControllerService:
    """A controller that serves its port."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings = LiveSettings(settings, "controller")
        self._clock = clock or LoopClock()
        self._disk = Disk()
        self._states: BrokerSetStates | None = None
        self.server: Server | None = None

    async def start(self) -> None:
        """Load the states and listen."""
        config = self.settings.current
        loop = asyncio.get_running_loop()
        root = Path(config.controller.data)
        store = await loop.run_in_executor(None, FileStore, self._disk, root)
        self._states = states = BrokerSetStates(
            self.settings, store, self._clock, ssl=outgoing_context(config.tls)
        )
        address = f"{config.controller.announce or config.controller.host}:{config.controller.port}"
        controller = Controller(self.settings, states, address)
        limits = config.server
        request_loop = RequestLoop(
            controller,
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
        states.start()
        if not is_loopback(config.controller.host):
            log.warning(
                "every client that reaches %s:%d may change who is the master: protect the port "
                "with a firewall",
                config.controller.host,
                self.server.port,
            )
        log.info("the controller is ready on %s:%d", config.controller.host, self.server.port)

    async def stop(self) -> None:
        """Close connections and files."""
        if self._states is not None:
            await self._states.close()
        if self.server is not None:
            await self.server.stop()
        self._disk.close()
