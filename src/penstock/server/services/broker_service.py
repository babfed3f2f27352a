"""Runs a broker: opens the store, listens, checks the announced address, registers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.metrics.broker_metrics import broker_metrics
from penstock.broker.metrics.group_lags import GroupLags
from penstock.broker.replicas.replica_role import ReplicaRole
from penstock.clock import Clock, LoopClock, finish_within, pause
from penstock.config import LiveSettings, Settings
from penstock.config.settings import ha_port
from penstock.errors import BrokerNameTaken, PenstockError
from penstock.metrics import Registry
from penstock.replication.assigned_role import (
    AssignedRole,
    load_assigned_role,
    save_assigned_role,
)
from penstock.server.answer_executor import NameServerCalls
from penstock.server.listener import HeldPorts, is_loopback, release
from penstock.server.metrics.probe import Probe, serve_probe
from penstock.server.metrics.scrape import read_lags
from penstock.server.metrics.server_metrics import (
    add_contact_metrics,
    add_process_metrics,
    add_registration_metrics,
    add_server_metrics,
)
from penstock.server.registration.announced_address import announced_host, check_address, resolve
from penstock.server.registration.nameserver_registration import (
    Connections,
    NameServerRegistration,
)
from penstock.server.registration.route_queries import RouteQueries
from penstock.server.replication.controlled_broker import ControlledBroker
from penstock.server.replication.controlled_services import (
    ControlledServices,
    RunningServices,
    log_figures,
)
from penstock.server.replication.controllers import Controllers
from penstock.server.replication.observer import ReplicationObserver
from penstock.server.replication.replication import ControlledReplica, Replication
from penstock.server.replication.role_changes import RoleChanges
from penstock.server.request_loop import RequestLoop
from penstock.server.server import Server
from penstock.server.services.opened_store import open_store
from penstock.store.disk import Disk
from penstock.store.store import MessageStore
from penstock.transport.peer import Sign
from penstock.transport.tls import Tls, outgoing_context
from penstock.wire.signing import strict_signer

log = logging.getLogger(__name__)

RESTART_MS, RESTART_MS_MAX = 1_000, 30_000
"""Until the first attempt after a restart that failed; then twice as long each time."""
ROLE_POLL_MS = 20
FORWARD_QUIET_MS = 500
FORWARD_MS_MAX = 35_000
"""How long a master that stops forwards requests to the next one: until none has come for
`FORWARD_QUIET_MS`. RocketMQ's clients ask for the route every 30 s."""


class BrokerService:
    """A broker that serves its port, is registered with its NameServers and has a probe."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        *,
        disk: Disk | None = None,
        make_broker: Callable[[LiveSettings, MessageStore, str, str, int], Broker] = Broker,
    ) -> None:
        """`disk` and `make_broker` replace the real ones in tests."""
        self.settings = LiveSettings(settings)
        self._configured = settings
        self._assigned: AssignedRole | None = None
        self._clock = clock or LoopClock()
        self._disk = disk
        self._make_broker = make_broker
        self._probe: Probe | None = None
        self._registration: NameServerRegistration | None = None
        self._broker: Broker | None = None
        self._server: Server | None = None
        self._held: HeldPorts = {}
        self._nameservers: Connections = {}
        """Connections that stay open while the services are started again."""
        self._replication: Replication | None = None
        self._observer: ReplicationObserver | None = None
        self._controlled: ControlledServices | None = None
        self.contact: ControlledBroker | None = None
        """With the controllers, if there are any."""
        self._restarting: asyncio.Future[None] | None = None
        self._failure = ""
        """Why the services could not be started again; the next attempt follows."""
        self._pausing = False
        """`_restart` waits for the next attempt; `_retry` ends that."""
        self._retry = asyncio.Event()
        self._starting = asyncio.Lock()
        self._waiting: asyncio.Future[None] | None = None
        self._stopping = False
        self._handing_over = False

    async def start(self) -> None:
        """Open the store, listen, check the announced address, register."""
        async with self._starting:
            if self.settings.current.replication.controllers:
                await self._wait(self._join_controllers())
            if self._stopping:
                return
            await self._start_services()
        if self.contact is not None:
            await self._meet_controllers(self.contact)
            await self._wait(self._await_role())

    async def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the controllers, or until `interrupt`."""
        self._waiting = waiting = asyncio.ensure_future(work)
        try:
            await waiting
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self._waiting = None

    def interrupt(self) -> None:
        """Let a start that waits for the controllers return; `stop` follows."""
        self._stopping = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _join_controllers(self) -> None:
        """Get an id from the controllers."""
        config = self.settings.current
        root, disk = Path(config.broker.data), self._disk or Disk()
        disk.group_readable = config.store.group_readable
        await asyncio.get_running_loop().run_in_executor(None, disk.make_directory, root)
        controllers = Controllers(
            config.replication.controller_addresses(),
            self._clock,
            ssl=outgoing_context(config.tls),
        )
        self._controlled = services = ControlledServices(self._running, self._restart_soon)
        self.contact = ControlledBroker(
            self.settings,
            controllers,
            services,
            disk,
            root,
            f"{announced_host(config)}:{config.broker.port}",
            self._clock,
        )
        services.joined(await self.contact.join())

    async def _meet_controllers(self, contact: ControlledBroker) -> None:
        """The store is open: the controllers may give this broker its role."""
        await contact.start(log_epoch=self.replication.stored_epoch)

    async def _await_role(self) -> None:
        """Wait until this broker is a slave that follows, or a master that accepts messages."""
        reported = ""
        while (reason := self._not_ready()) is not None:
            if reason != reported and self._running() is not None:
                reported = reason
                log.info("not ready yet: %s", reason)
            await pause(self._clock, ROLE_POLL_MS)

    def _running(self) -> RunningServices | None:
        """The services, unless they are being started or stopped."""
        if self._broker is None or self._server is None or self._replication is None:
            return None
        return RunningServices(self._broker, self._server, self._replication)

    async def _start_services(self) -> None:
        loop = asyncio.get_running_loop()
        assigned = await loop.run_in_executor(None, self._take_assigned_role)
        controlled = None
        if self._controlled is not None and self.contact is not None:
            controlled = ControlledReplica(
                self.contact.replica_id,
                self._controlled.lead_state,
                partial(self.contact.ask_for_set, self._controlled.lead_state.epoch),
                stopping=self._handing_over,
                confirmed=self._controlled.confirm_offset,
            )
        # A role that the last start in this process did not have was given by a promotion.
        promoted = self._restarting is not None and assigned != self._assigned
        self._assigned = assigned
        config = self.settings.current
        address = f"{announced_host(config)}:{config.broker.port}"
        host = await loop.run_in_executor(None, resolve, address)
        store = await loop.run_in_executor(
            None, open_store, config, self._disk, self._clock.now_ms()
        )
        try:
            # First, because an epoch begins before anything else changes.
            make_replication = partial(
                Replication,
                self.settings,
                store,
                self._clock,
                self._restart_soon,
                assigned=assigned,
                promoted=promoted,
                controlled=controlled,
            )
            self._replication = replication = await loop.run_in_executor(None, make_replication)
            broker = self._new_broker(store, address, host)
        except BaseException:
            await loop.run_in_executor(None, store.close)
            raise
        self._broker = broker
        try:
            self._registration = self._make_registration(broker, address)
            self._accept_roles(broker)
            self._server = server = self._make_server(broker, self._registration)
            # All this before clients are served: a master acknowledges nothing without its replicas
            # and its controllers, and a slave knows where to forward requests.
            if self.contact is not None:
                self.contact.serves()
            await replication.start(broker, server.after_work, _signer(broker, self._clock))
            self._observer = ReplicationObserver(self.settings, replication, self._clock)
            self._describe_role(broker, address)
            await self._listen(server, broker, address)
            sign = _signer(broker, self._clock)
            await check_address(address, config.tls, sign, self._clock)
            await self._register(self._registration)
            await self._start_probe(broker)
        except BaseException:
            await self._stop_services()
            raise
        log.info("broker %s is ready on %s", config.broker.name, address)

    async def _register(self, registration: NameServerRegistration) -> None:
        """Register; a slave whose id is taken follows its master without being registered."""
        try:
            await registration.first_round()
        except BrokerNameTaken as error:
            if not self.broker.role.slave:
                raise
            log.warning("%s: trying again", error)
            registration.start()

    def _describe_role(self, broker: Broker, address: str) -> None:
        """Tell the broker what its server knows of its role."""
        role, replication = broker.role, self.replication
        assert self._observer is not None
        role.replication = self._observer.state
        if not role.slave:
            role.epoch = replication.registered_epoch
            role.ha_address = self._ha_address(address) if replication.listening else ""
        if self._controlled is not None:
            self._controlled.apply_confirmation()

    def _accept_roles(self, broker: Broker) -> None:
        """Let others change the role of this broker, from its first request on."""
        if self.contact is not None:
            broker.role.learn = self.contact.learn
            return
        broker.role.change = RoleChanges(
            self.settings,
            self._configured,
            broker,
            self.replication,
            self._clock,
            self._restart_soon,
        ).change

    def _take_assigned_role(self) -> AssignedRole | None:
        """Use the role that this broker was given while it ran, if the settings have not changed
        since."""
        if self._controlled is not None:
            assigned = self._controlled.assigned
            self.settings.current = assigned.applied_to(self.settings.current)
            return assigned
        root = Path(self._configured.broker.data)
        if not root.is_dir():  # a new broker; or the store says why it can't be opened
            return None
        disk = self._disk or Disk()
        saved = load_assigned_role(disk, root)
        return (
            saved if saved is None or not saved.role else self._take_saved_role(disk, root, saved)
        )

    def _take_saved_role(self, disk: Disk, root: Path, assigned: AssignedRole) -> AssignedRole:
        configured = self._configured
        if not assigned.counts_for(configured):
            log.warning(
                "the settings have changed and give this broker the role %s and the id %d; a "
                "promotion had given it %s and %d",
                configured.replication.role,
                configured.broker.id,
                assigned.role,
                assigned.broker_id,
            )
            # For good: the settings may change back.
            none = AssignedRole(epoch=assigned.epoch)
            save_assigned_role(disk, root, none, configured)
            return none
        self.settings.current = assigned.applied_to(self.settings.current)
        log.warning(
            "this broker is %s with the id %d, as given by a promotion; the settings say %s, %d",
            assigned.role,
            assigned.broker_id,
            configured.replication.role,
            configured.broker.id,
        )
        return assigned

    def _new_broker(self, store: MessageStore, address: str, host: str) -> Broker:
        now_ms = self._clock.now_ms()
        if self.settings.current.replication.role == "slave":
            role = ReplicaRole(slave=True, hides_log=self._controlled is not None)
            return Broker(self.settings, store, address, host, now_ms, role=role)
        return self._make_broker(self.settings, store, address, host, now_ms)

    def _make_server(self, broker: Broker, registration: NameServerRegistration) -> Server:
        limits = self.settings.current.server
        context = broker.context
        request_loop = RequestLoop(
            broker,
            broker.router.in_place,
            context.access if context.access.enabled() else None,
            frame_bytes_max=limits.frame_bytes_max,
            header_bytes_max=limits.header_bytes_max,
        )
        return Server(
            self.settings,
            broker,
            request_loop,
            broker.effects,
            submit=context.store.disk.submit,
            store=context.store,
            long_polling=context.long_polling,
            persistence=context.persistence,
            nameservers=NameServerCalls(
                register_soon=registration.register_soon,
                register_topics=registration.register_topics,
                find_route=RouteQueries(registration, self._clock).find,
            ),
            on_log=self.replication.log_grew,
            clock=self._clock,
        )

    async def _listen(self, server: Server, broker: Broker, address: str) -> None:
        config = self.settings.current
        tls = Tls.of(config.tls)
        held = self._held
        await server.start(config.broker.host, config.broker.port, tls, held)
        vip_port = config.broker.port - 2 if config.broker.vip_port < 0 else config.broker.vip_port
        if vip_port > 0:
            try:
                await server.listen_also(config.broker.host, vip_port, tls, held)
            except OSError as error:
                log.warning("no VIP channel on port %d (vip_port): %s", vip_port, error)
        if not broker.context.access.enabled() and not is_loopback(config.broker.host):
            log.warning(
                "every client that reaches %s may read and write everything: access control is off "
                "(access.authentication, access.authorization)",
                address,
            )

    def _make_registration(self, broker: Broker, address: str) -> NameServerRegistration:
        topics, clock = broker.context.topics, self._clock
        return NameServerRegistration(
            self.settings,
            broker.registration,
            address,
            self._ha_address(address),
            sign=_signer(broker, self._clock),
            ssl=outgoing_context(self.settings.current.tls),
            on_order_config=lambda config: topics.mark_ordered(config, clock.now_ms()),
            on_master=self.replication.set_master,
            compare=self.replication.compare,
            connections=self._nameservers,
            clock=clock,
        )

    def _ha_address(self, address: str) -> str:
        """The announced address of the HA port."""
        config = self.settings.current
        host = config.replication.announce or address.rpartition(":")[0]
        return f"{host}:{ha_port(config)}"

    async def _start_probe(self, broker: Broker) -> None:
        assert self._server is not None
        assert self._registration is not None
        lags, store = GroupLags(broker.context), broker.context.store
        registry = broker_metrics(broker, lags)
        registry.preparations.append(lambda: read_lags(lags, store, self._clock))
        add_server_metrics(registry, self._server, broker.router.refusals)
        add_registration_metrics(registry, self._registration.states)
        if self.contact is not None:
            add_contact_metrics(registry, self.contact, self.replication.forwarding)
        await self._serve_probe(registry)

    async def _serve_probe(self, registry: Registry) -> None:
        config = self.settings.current.broker
        port = config.port + 2 if config.probe_port < 0 else config.probe_port
        if port != 0:
            add_process_metrics(registry)
            self._probe = await serve_probe(config.host, port, registry, self._not_in_sync)

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "the broker is not started"
        return self._broker

    @property
    def replication(self) -> Replication:
        assert self._replication is not None, "the broker is not started"
        return self._replication

    @property
    def server(self) -> Server:
        assert self._server is not None, "the broker is not started"
        return self._server

    def registration_summary(self) -> str:
        """With which NameServers the broker is registered; empty if it has none."""
        assert self._registration is not None, "the broker is not started"
        return self._registration.summary()

    def _not_ready(self) -> str | None:
        if self._broker is None or self._registration is None or self._replication is None:
            return self._failure or "the role of this broker is being changed"
        return (
            self._broker.not_ready()
            or self._registration.not_ready()
            or (self._replication.not_ready() if self.contact is not None else None)
        )

    def _not_in_sync(self) -> str | None:
        """Why `/readyz` says that this broker is not ready, or None. A replica must be in the
        in-sync set: tools that restart one replica after another have to wait for that."""
        reason = self._not_ready()
        if reason is None and self.contact is not None and not self.contact.in_sync:
            reason = "this replica has not joined the in-sync set yet"
        return reason

    def _restart_soon(self) -> None:
        """Stop and start again, without ending the process."""
        if self._pausing:  # `_restart` tries again
            self._retry.set()
        else:
            self._restarting = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        retry_ms = RESTART_MS
        async with self._starting:
            while not self._stopping or self._handing_over:
                try:
                    if self._controlled is not None and self._controlled.failed():
                        await self._controlled.drop_unflushed()
                    if self._server is not None:
                        self._held = self._server.take_ports()
                    await self._stop_services(restarts=True)
                    frozen = gc.get_freeze_count() > 0  # by `serve_broker`
                    gc.unfreeze()  # the tables of the broker that was stopped are garbage
                    await self._start_services()
                    self._failure = ""
                    if frozen:
                        gc.freeze()
                    await self._release()
                    return
                except Exception as error:
                    log.error(
                        "the broker could not be restarted; retrying in %d s: %s",
                        retry_ms // 1000,
                        error,
                        exc_info=None if isinstance(error, PenstockError | OSError) else error,
                    )
                    self._pausing = True
                    await self._report_failure(error)
                    await self._pause_before_retry(retry_ms)
                    self._pausing = False
                    retry_ms = min(2 * retry_ms, RESTART_MS_MAX)
        await self._release()

    async def _report_failure(self, error: Exception) -> None:
        """Let `/readyz` say why this broker does not serve, and another replica be the master."""
        self._failure = f"the broker could not be restarted: {error}"
        self._retry.clear()
        await self._release()
        registry = Registry()
        try:
            if self.contact is not None:
                add_contact_metrics(registry, self.contact, None)
            await self._serve_probe(registry)
        except OSError as unserved:
            log.warning("%s", unserved)
        if self.contact is not None:
            await self.contact.cannot_serve()

    async def _pause_before_retry(self, retry_ms: int) -> None:
        """Until a while has passed, the role changes or the process stops."""
        waiting = asyncio.ensure_future(self._retry.wait())
        with contextlib.suppress(TimeoutError):
            await finish_within(self._clock, retry_ms, waiting)

    async def _release(self) -> None:
        """Close what was kept open for the next start."""
        release(self._held)
        await self._close_connections()

    async def _close_connections(self) -> None:
        while self._nameservers:
            await self._nameservers.popitem()[1].close()

    async def stop(self) -> None:
        """Unregister, send pending responses, write the tables, close the store."""
        self._stopping = True
        if self.contact is not None:
            await self._hand_over(self.contact)
        if self._restarting is not None:
            self._retry.set()
            await self._restarting  # it logs its errors and raises none
        if self.contact is not None:
            await self.contact.close()
        await self._stop_services()

    async def _hand_over(self, contact: ControlledBroker) -> None:
        """A master has another replica elected. Then it is a slave for a while, and forwards the
        requests of clients that do not know the new master yet. So does a slave that had to forward
        requests before."""
        self._handing_over = True
        try:
            handed_over = await contact.hand_over() and self._restarting is not None
            async with asyncio.timeout(FORWARD_MS_MAX / 1000):
                if handed_over:
                    assert self._restarting is not None
                    await asyncio.shield(self._restarting)
                    await self._await_successor()
                await self._forward_last(-1 if handed_over else 0)
        except TimeoutError:
            log.warning("clients still send to this broker, which is no longer the master")
        finally:
            self._handing_over = False

    async def _await_successor(self) -> None:
        """Wait until the new master is registered: clients find none without this broker."""
        while self._registration is not None and self._registration.awaits_successor:
            await pause(self._clock, ROLE_POLL_MS)

    async def _forward_last(self, count: int) -> None:
        """Wait until clients have no more requests for the master; `count` were forwarded."""
        while self._replication is not None:
            forwarding = self._replication.forwarding
            if forwarding is None or forwarding.count == count:
                return
            count = forwarding.count
            await pause(self._clock, FORWARD_QUIET_MS)

    async def _stop_services(self, *, restarts: bool = False) -> None:
        """Stop what is running; a second call does nothing."""
        if self._probe is not None:
            probe, self._probe = self._probe, None
            await probe.close()
        if self._registration is not None:
            registration, self._registration = self._registration, None
            if restarts:
                self._nameservers = await registration.detach()
            else:
                await registration.close()
        if self.contact is None:  # a slave would only refuse what clients still send to it
            await self._close_connections()
        if self._observer is not None:
            self._observer.close()
        replication, self._replication = self._replication, None
        if replication is not None:
            await replication.close()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()
        if self._broker is not None:
            self.settings.listeners.clear()
            broker, self._broker = self._broker, None
            if self.contact is not None and replication is not None:
                self.contact.stopped(log_figures(broker.context.store, replication))
            await asyncio.get_running_loop().run_in_executor(None, broker.close)


def _signer(broker: Broker, clock: Clock) -> Sign | None:
    """Strict signatures: Apache's NameServers check none."""
    credentials = broker.context.access.internal()
    return None if credentials is None else strict_signer(*credentials, clock.now_ms)
