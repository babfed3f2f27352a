"""A broker: builds its services and handlers, and calls those that depend on time.

It has no sockets and no clock.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.broker.admin.auth_admin import AuthAdmin
from penstock.broker.admin.cleanup import CleaningHandlers
from penstock.broker.admin.consumer_admin import ConsumerHandlers
from penstock.broker.admin.group_admin import GroupHandlers
from penstock.broker.admin.offset_resets import ResetHandlers
from penstock.broker.admin.replication_status import ReplicationHandlers
from penstock.broker.admin.role_requests import RoleHandlers
from penstock.broker.admin.runtime_info import RuntimeHandlers
from penstock.broker.admin.settings_admin import SettingsHandlers
from penstock.broker.admin.statistics import StatisticsHandlers
from penstock.broker.admin.sync_state_set import SyncStateHandlers
from penstock.broker.admin.topic_admin import TopicHandlers
from penstock.broker.auth.access_control import AccessControl
from penstock.broker.auth.password_key import PasswordKey
from penstock.broker.auth.users import AccessTable
from penstock.broker.auto_creations import AutoCreations
from penstock.broker.consumers.assignment import Assignments
from penstock.broker.consumers.clients import Clients
from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
from penstock.broker.consumers.groups import Groups
from penstock.broker.consumers.heartbeats import HeartbeatHandlers
from penstock.broker.consumers.lock_journal import LockJournal
from penstock.broker.consumers.offset_requests import OffsetRequests
from penstock.broker.consumers.queue_locks import LockRequests, QueueLocks
from penstock.broker.consumers.unread_deletions import UnreadDeletions
from penstock.broker.context import BrokerContext
from penstock.broker.delay.delay_levels import Delay
from penstock.broker.delay.timers import OldTimer
from penstock.broker.filter.filters import Filters
from penstock.broker.long_polling import LongPolling
from penstock.broker.master_services import HandlerFamily, MasterServices, TimedService
from penstock.broker.pull.pull_handler import PullHandler
from penstock.broker.query import QueryHandlers
from penstock.broker.replicas.replica_role import (
    MASTER_CHANGES,
    MasterRequests,
    ReplicaRole,
    slave_rows,
)
from penstock.broker.replicas.replica_state import ReplicaState
from penstock.broker.rewrite import MessageRewriter
from penstock.broker.stats import Stats
from penstock.broker.takeover.replicated_tables import ReplicatedTables
from penstock.broker.takeover.takeover import take_over
from penstock.broker.topics import Topics
from penstock.config import AccessConfig, LiveSettings, Settings
from penstock.errors import NotMaster, StoreError
from penstock.rpc.answers import Answer, EffectQueue, PersistentTable, PersistSoon, RegisterSoon
from penstock.rpc.changed_settings import ChangedSettings
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.rpc.router import Router, refusal
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import (
    ConfigFile,
    DelayOffsetTable,
    SubscriptionGroupTable,
    TopicTable,
)
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import PERM_READ_WRITE

if TYPE_CHECKING:
    from penstock.broker.delay.timers import Timers
    from penstock.broker.pop.pop_message import Pop
    from penstock.broker.request_reply import Replies
    from penstock.broker.retry.dead_letter_queues import DeadLetterQueues
    from penstock.broker.send import SendHandler
    from penstock.broker.transaction.transactions import Transactions

log = logging.getLogger(__name__)

STORE_TICK_MS = 1_000


class Broker:
    """A broker over an open store. Clients know it by `address`; `host` is the same with a numeric
    host, as stored in messages."""

    def __init__(
        self,
        settings: LiveSettings,
        store: MessageStore,
        address: str,
        host: str,
        now_ms: int,
        *,
        long_polling: LongPolling | None = None,
        role: ReplicaRole | None = None,
    ) -> None:
        """Without `role` it is a master."""
        self.settings = settings
        self.role = role or ReplicaRole()
        if long_polling is None:
            long_polling = LongPolling(store)
        state = ReplicaState()
        state.load(ConfigFile(store.disk, store.paths.root / state.FILE))
        self.context = context = build_context(
            settings, store, address, now_ms, long_polling, self.role, state.content.topics_to
        )
        self.effects = context.effects
        self._assignments = Assignments(
            settings, context.persistence, context.clients, context.groups, context.topics
        )
        self.master: MasterServices | None = None
        self.replicated: ReplicatedTables | None = None
        """The tables of a slave, which it copies from its master."""
        if self.role.slave:
            store.writer.refusal = self.role.refusal()
            self.replicated = ReplicatedTables(context, self._assignments.modes, state)
            context.persistence.save(state)()
        else:
            self.master = self._make_master(state, host, now_ms)
        self.pull = PullHandler(context)
        self.router = self._make_router()
        self._timed: tuple[TimedService, ...] = () if self.master is None else self.master.timed
        store.on_retention(self._pinned_from)
        self._offsets_ms = self._store_ms = now_ms
        self._permission = settings.current.broker.permission
        self._settings_changed(settings.current)
        settings.listeners.append(self._settings_changed)

    def _make_master(self, state: ReplicaState, host: str, now_ms: int) -> MasterServices:
        """The services of a master, which may have been a slave."""
        context = self.context
        if not state.takes_over:
            return MasterServices(context, host, now_ms)

        def timer_rebuilt() -> None:
            state.timer_rebuilt()
            context.effects.put(PersistSoon(state))

        delivered = take_over(context, state, now_ms)
        return MasterServices(context, host, now_ms, old_timer=OldTimer(delivered, timer_rebuilt))

    def _make_router(self) -> Router:
        families = self._families()
        if self.master is not None:
            return Router(family.rows() for family in (*self.master.families, *families))
        requests, store = MasterRequests(self.role, self.effects), self.context.store
        rows = (
            slave_rows(self.role, self.settings, store, requests, family.rows())
            for family in families
        )
        return Router([*rows, requests.rows()])

    def _families(self) -> tuple[HandlerFamily, ...]:
        """The handlers of masters and slaves: with those of `MasterServices`, their rows are the
        requests that the broker serves."""
        context = self.context
        settings, store = context.settings, context.store
        clients, groups, topics = context.clients, context.groups, context.topics
        return (
            self.pull,
            HeartbeatHandlers(settings, clients, groups, topics, context.filters),
            OffsetRequests(store, context.offsets, groups, topics),
            LockRequests(context.locks, groups, topics, clients),
            self._assignments,
            QueryHandlers(context),
            TopicHandlers(context),
            GroupHandlers(context),
            StatisticsHandlers(context),
            ConsumerHandlers(context),
            ResetHandlers(context),
            CleaningHandlers(context),
            RuntimeHandlers(context, self.master.timers if self.master is not None else None),
            ReplicationHandlers(context),
            RoleHandlers(context),
            SyncStateHandlers(context),
            SettingsHandlers(context),
            AuthAdmin(context),
        )

    @property
    def send(self) -> SendHandler:
        return self._services.send

    @property
    def dead_letters(self) -> DeadLetterQueues:
        return self._services.dead_letters

    @property
    def timers(self) -> Timers:
        return self._services.timers

    @property
    def transactions(self) -> Transactions:
        return self._services.transactions

    @property
    def pop(self) -> Pop:
        return self._services.pop

    @property
    def replies(self) -> Replies:
        return self._services.replies

    @property
    def _services(self) -> MasterServices:
        assert self.master is not None, "a slave has no services that write to the log"
        return self.master

    # --- what the server calls

    def handle(self, command: Command) -> Answer:
        if command.code in MASTER_CHANGES:
            try:
                self.role.refuse_if_stepping_down()
            except NotMaster as error:
                return refusal(error)
        return self.router.handle(command)

    def connected(self, client: int, peer: str, now_ms: int) -> None:
        """Note the client's address. Its first heartbeat registers it."""
        self.context.auto_creations.connected(client, peer)

    def disconnected(self, client: int, now_ms: int) -> None:
        self.context.auto_creations.disconnected(client)
        self.context.clients.disconnected(client)

    def due(self) -> int:
        """When `tick` has something to do."""
        context = self.context
        return min(
            context.clients.due(),
            context.stats.due(),
            *(service.due() for service in self._timed),
            self._store_ms + STORE_TICK_MS,
            self._offsets_ms + self.settings.current.broker.offset_persist_ms,
        )

    def tick(self, now_ms: int) -> None:
        """Deliver delayed messages, expire clients, sample statistics, maintain files and persist
        offsets, as far as they are due."""
        context = self.context
        for service in self._timed:
            service.tick(now_ms)
        if context.delay.take_save(now_ms):
            self.effects.put(PersistSoon(context.delay.table))
        context.clients.tick(now_ms)
        context.stats.tick(now_ms)
        if not 0 <= now_ms - self._store_ms < STORE_TICK_MS:
            self._store_ms = now_ms
            context.store.tick(now_ms)
            self._name_master()
        period_ms = self.settings.current.broker.offset_persist_ms
        if not 0 <= now_ms - self._offsets_ms < period_ms:
            self._offsets_ms = now_ms
            for table in self._tables():
                if table.dirty:
                    self.effects.put(PersistSoon(table))

    def clock_stepped(self, step_ms: int) -> None:
        """The clock was set: clients and locks expire, and half messages are checked, as if it had
        not been."""
        if self.master is not None:
            self.master.transactions.clock_stepped(step_ms)
        self.context.clients.clock_stepped(step_ms)
        self.context.locks.clock_stepped(step_ms)

    def registration(self) -> RegisterBrokerBody:
        """The topics for the NameServers; none has more permissions than the broker."""
        wrapper = self.context.topics.table.wrapper()
        allowed = self.settings.current.broker.permission | ~PERM_READ_WRITE
        topics = wrapper.topic_config_table
        if allowed & PERM_READ_WRITE != PERM_READ_WRITE:
            topics = {
                name: msgspec.structs.replace(config, perm=config.perm & allowed)
                for name, config in topics.items()
            }
        version = wrapper.data_version
        if self.role.epoch:
            version = msgspec.structs.replace(version, state_version=self.role.epoch)
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
                topic_config_table=topics, data_version=version
            )
        )

    def not_ready(self) -> str | None:
        """Why the broker can't do its work now, or None; a slave need not accept messages."""
        refusal = self.context.store.refusal
        return None if refusal is None or isinstance(refusal, NotMaster) else str(refusal)

    def close(self) -> None:
        """Write the tables and close the store. Waits for the disk."""
        context = self.context
        for service in self._timed:
            service.finish(self._store_ms)
        for table in self._tables():
            if table.dirty:
                try:
                    context.persistence.save(table)()
                except StoreError as error:  # the others and the store still have to be saved
                    log.error("the last changes are lost: %s", error)
        context.locks.close()
        context.store.close()

    def _tables(self) -> tuple[PersistentTable, ...]:
        context = self.context
        return (
            context.offsets.table,
            context.topics.table,
            context.groups.table,
            context.access.table,
            context.changed_settings,
            *self._assignments.tables(),
            *(self.replicated.tables() if self.replicated is not None else ()),
            *(table for service in self._timed or (context.delay,) for table in service.tables()),
        )

    def _pinned_from(self) -> int | None:
        pins = [service.pinned_from() for service in self._timed]
        return min((pin for pin in pins if pin is not None), default=None)

    def _name_master(self) -> None:
        """Let the store's refusal name the present master."""
        writer = self.context.store.writer
        if self.role.slave and isinstance(writer.refusal, NotMaster):
            writer.refusal = self.role.refusal()

    def _settings_changed(self, settings: Settings) -> None:
        if self.master is not None:
            self.master.configure(settings)
        if settings.broker.permission != self._permission:
            self._permission = settings.broker.permission
            self.context.topics.recheck_queues()
            self.context.topics.table.touch(self._store_ms)
            self.effects.put(RegisterSoon())
        self.context.topics.refresh(self._store_ms)
        self.context.store.reconfigure(settings.store)


def build_context(
    settings: LiveSettings,
    store: MessageStore,
    address: str,
    now_ms: int,
    long_polling: LongPolling,
    role: ReplicaRole,
    topics_known_to: int,
) -> BrokerContext:
    """Load the tables and build what the handlers share."""
    effects = EffectQueue()
    persistence = Persistence(store.disk, store.paths.root)
    topic_table, group_table = TopicTable(), SubscriptionGroupTable()
    offset_table = ConsumerOffsetTable()
    access_table = AccessTable(_password_key(settings.current.access, store))
    delay_table, changed_settings = DelayOffsetTable(), ChangedSettings()
    tables = (topic_table, group_table, offset_table, access_table, delay_table, changed_settings)
    for table in tables:
        table.load(persistence.file(table.FILE))
    _prepare_users(access_table, persistence)
    changed_settings.apply(settings)
    auto_creations = AutoCreations(settings)
    groups = Groups(group_table, settings, effects, auto_creations, copied=role.slave)
    topics = Topics(topic_table, store, settings, effects, auto_creations, copied=role.slave)
    topics.seed()
    topics.adopt(now_ms, topics_known_to)
    groups.seed()
    access = AccessControl(settings, access_table, effects)
    access.seed(now_ms)
    rewriter = MessageRewriter(store, topics)
    commits = role.commits if role.slave else None
    offsets = ConsumerOffsets(offset_table, store, settings, commits=commits)
    store.on_deletion(UnreadDeletions(offsets).log)
    return BrokerContext(
        role=role,
        settings=settings,
        changed_settings=changed_settings,
        store=store,
        persistence=persistence,
        topics=topics,
        groups=groups,
        auto_creations=auto_creations,
        offsets=offsets,
        clients=Clients(settings, groups, effects),
        locks=_load_locks(settings, store, now_ms),
        access=access,
        filters=Filters(),
        rewriter=rewriter,
        delay=Delay(
            delay_table, store, rewriter, settings.current.store.delay_levels, copied=role.slave
        ),
        long_polling=long_polling,
        stats=Stats(store, topic_table, now_ms),
        effects=effects,
        address=address,
        started_ms=now_ms,
    )


def _load_locks(settings: LiveSettings, store: MessageStore, now_ms: int) -> QueueLocks:
    locks = QueueLocks(settings, LockJournal(store.disk, store.paths.config))
    locks.load(now_ms, complete=store.report.pages_kept)
    return locks


def _prepare_users(table: AccessTable, persistence: Persistence) -> None:
    """Report lost users and encrypt passwords: the key is stored before the first user, and the
    topics soon after the first start."""
    is_new = persistence.file(TopicTable.FILE).is_new()
    if table.key.saved and not is_new and persistence.file(table.FILE).is_new():
        log.error(
            "%s and its .bak are missing, but the key of the passwords exists: users and access "
            "lists are lost, except for the users in the settings; restore the file from a backup",
            table.FILE,
        )
    persistence.before(table.FILE, lambda: table.key.save)
    if table.dirty:
        for _ in range(2):  # the first leaves passwords in plain text in the .bak
            persistence.save(table)()


def _password_key(access: AccessConfig, store: MessageStore) -> PasswordKey:
    default = store.paths.root / "config" / "penstock-access.key"
    return PasswordKey.load(Path(access.key_file) if access.key_file else default)
