"""The parts of a controller that keeps its state in etcd, wired together."""

from __future__ import annotations

import asyncio
import logging
import ssl as tls
from typing import Any

from penstock.clock import Clock, finish_within, pause
from penstock.config.controller_settings import ControllerConfig, etcd_endpoints
from penstock.errors import EtcdError, EtcdRefused, TlsError
from penstock.server.controller.etcd.controller_lease import ControllerLease, random_number
from penstock.server.controller.etcd.etcd_client import EtcdClient, EtcdEndpoint
from penstock.server.controller.etcd.etcd_keys import Keys
from penstock.server.controller.etcd.etcd_store import EtcdStore
from penstock.server.controller.etcd.etcd_watch import Watch
from penstock.server.controller.etcd.reported_liveness import ReportedLiveness
from penstock.server.controller.etcd.reports import Reports
from penstock.server.controller.etcd.view import View

log = logging.getLogger(__name__)

START_MS = 10_000
"""How long a starting controller waits for etcd. After that it starts and goes on trying."""
LEADER_MS = 5_000
"""How often the leader of etcd is looked for."""
SILENT_MS = 15_000
"""Without an answer of etcd for this long, the controller is not ready."""


class EtcdBackend:
    """A store and a liveness in etcd."""

    def __init__(self, config: ControllerConfig, clock: Clock, address: str) -> None:
        """`address` of this controller. Raises TlsError if a file can't be used."""
        self._clock = clock
        self.client = EtcdClient(
            endpoints(config), user=config.etcd_user, password=config.etcd_password, clock=clock
        )
        keys = Keys(config.etcd_prefix)
        own = random_number()
        self.view = View(keys, own)
        self._lease = ControllerLease(self.client, clock)
        self.watch = Watch(
            self.client, keys, self.view, self._lease, clock, own=own, address=address
        )
        self._reports = Reports(self.client, keys, self.view, self._lease, clock, own=own)
        self.store = EtcdStore(self.client, keys, self.view, clock, own=own)
        self.liveness = ReportedLiveness(clock, self._reports, self.view, self._lease)
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Read everything, if etcd answers, and keep it up to date. Raises EtcdRefused."""
        try:
            await finish_within(self._clock, START_MS, self._load())
        except EtcdRefused:
            self.client.close()
            raise
        except (EtcdError, TimeoutError):
            log.error("etcd does not answer; trying again: %s", self.client.figures.error)
        self._tasks = [
            asyncio.ensure_future(work)
            for work in (
                self.watch.run(),
                self.watch.tick(),
                self._lease.run(),
                self._reports.run(),
                self.liveness.report_deaths(),
                self._follow_leader(),
            )
        ]

    async def _load(self) -> None:
        await self.watch.read_all()
        await self._lease.acquire()

    async def _follow_leader(self) -> None:
        """Send requests to the member that leads: others forward them to it."""
        while True:
            await self.client.find_leader()
            await pause(self._clock, LEADER_MS)

    async def close(self) -> None:
        await self.liveness.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._lease.close()
        self.client.close()

    def not_ready(self) -> str | None:
        """Why the controller is not ready; None if it is."""
        figures = self.client.figures
        if not self.watch.resyncs:
            return f"etcd has not answered yet: {figures.error or 'no error'}"
        silent_ms = self._clock.monotonic_ms() - figures.answered_ms
        if silent_ms > SILENT_MS:
            return f"etcd has not answered for {silent_ms // 1000} s: {figures.error}"
        return None


def endpoints(config: ControllerConfig) -> list[EtcdEndpoint]:
    """The members of the cluster. Raises TlsError if a file can't be used."""
    found = etcd_endpoints(config.etcd)
    with_tls = bool(config.etcd_ca or config.etcd_certificate)
    context = None
    if with_tls or any(https for *_, https in found):
        context = _context(config)
    return [
        EtcdEndpoint(host, port, context if with_tls or https else None)
        for host, port, https in found
    ]


def _context(config: ControllerConfig) -> tls.SSLContext:
    try:
        context = tls.create_default_context(cafile=config.etcd_ca or None)
    except OSError as error:
        raise TlsError(f"can't use controller.etcd_ca {config.etcd_ca}: {error}") from None
    context.minimum_version = tls.TLSVersion.TLSv1_2
    if config.etcd_certificate:
        try:
            context.load_cert_chain(config.etcd_certificate, config.etcd_key or None)
        except OSError as error:
            raise TlsError(
                f"can't use controller.etcd_certificate {config.etcd_certificate} and "
                f"controller.etcd_key: {error}"
            ) from None
    return context
