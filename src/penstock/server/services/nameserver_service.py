"""Runs a NameServer."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.clock import Clock, LoopClock
from penstock.config import LiveSettings, Settings
from penstock.nameserver.nameserver import NameServer
from penstock.nameserver.signed_nameserver_changes import SignedNameServerChanges
from penstock.rpc.changed_settings import ChangedSettings
from penstock.rpc.persistence import Persistence
from penstock.server.listener import is_loopback
from penstock.server.request_loop import RequestLoop
from penstock.server.server import Server
from penstock.store.disk import Disk
from penstock.transport.tls import Tls

log = logging.getLogger(__name__)


class NameServerService:
    """A NameServer that serves its port."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings = LiveSettings(settings, "nameserver")
        self._clock = clock or LoopClock()
        self._disk = Disk()
        self._persistence: Persistence | None = None
        if settings.nameserver.data:
            folder = Path(settings.nameserver.data)
            self._disk.make_directory((folder / ChangedSettings.FILE).parent)
            self._persistence = Persistence(self._disk, folder)
        self.nameserver = NameServer(self.settings, self._clock.now_ms(), self._persistence)
        self.server: Server | None = None

    async def start(self) -> None:
        """Listen."""
        config = self.settings.current
        limits = config.server
        access = (
            SignedNameServerChanges(config.access) if config.nameserver.signed_changes else None
        )
        request_loop = RequestLoop(
            self.nameserver,
            access=access,
            frame_bytes_max=limits.frame_bytes_max,
            header_bytes_max=limits.header_bytes_max,
        )
        self.server = Server(
            self.settings,
            self.nameserver,
            request_loop,
            self.nameserver.effects,
            submit=self._disk.submit,
            persistence=self._persistence,
            clock=self._clock,
        )
        await self.server.start(config.nameserver.host, config.nameserver.port, Tls.of(config.tls))
        if access is None and not is_loopback(config.nameserver.host):
            log.warning(
                "every client that reaches %s:%d may register brokers and change routes: set "
                "nameserver.signed_changes, or protect the port with a firewall",
                config.nameserver.host,
                self.server.port,
            )
        log.info("NameServer is ready on %s:%d", config.nameserver.host, self.server.port)

    async def stop(self) -> None:
        """Close connections and files."""
        if self.server is not None:
            await self.server.stop()
        self._disk.close()
