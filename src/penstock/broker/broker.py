"""Builds the parts of a broker and drives those that depend on time. No sockets, no clock."""

from __future__ import annotations

import os
from typing import Protocol

import msgspec

from penstock.broker.admin.auth_admin import AuthAdmin
from penstock.broker.admin.cleanup import CleaningHandlers
from penstock.broker.admin.consumer_admin import ConsumerHandlers
from penstock.broker.admin.group_admin import GroupHandlers
from penstock.broker.admin.offset_resets import ResetHandlers
from penstock.broker.admin.runtime_info import RuntimeHandlers
from penstock.broker.admin.settings_admin import SettingsHandlers
from penstock.broker.admin.statistics import StatisticsHandlers
from penstock.broker.admin.topic_admin import TopicHandlers
from penstock.broker.auth.access_control import Access
from penstock.broker.auth.users import AccessTable
from penstock.broker.consumers.assignment import Assignments
from penstock.broker.consumers.clients import Clients
from penstock.broker.consumers.consumer_offsets import Offsets
from penstock.broker.consumers.groups import Groups
from penstock.broker.consumers.heartbeats import HeartbeatHandlers
from penstock.broker.consumers.lock_requests import LockingHandlers
from penstock.broker.consumers.offset_requests import ProgressHandlers
from penstock.broker.consumers.queue_locks import QueueLocks
from penstock.broker.context import BrokerContext
from penstock.broker.delay.delay_levels import Delay
from penstock.broker.delay.timers import Timers
from penstock.broker.long_polling import LongPolling
from penstock.broker.pop.pop_message import Pop
from penstock.broker.pull import PullHandler
from penstock.broker.query import QueryHandlers
from penstock.broker.redirect import Redirects
from penstock.broker.request_reply import Replies
from penstock.broker.retry.consumer_retry import Retry
from penstock.broker.rewrite import MessageRewriter
from penstock.broker.send import SendHandler
from penstock.broker.stats import Stats
from penstock.broker.topics import Topics
from penstock.broker.transaction.transactions import Transactions
from penstock.config import BrokerConfig, Live, Settings
from penstock.rpc.answers import Answer, EffectQueue, PersistentTable, PersistSoon, RegisterSoon
from penstock.rpc.changed_settings import ChangedSettings
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.rpc.router import Router
from penstock.store.store import MessageStore
from penstock.store.tables import (
    ConsumerOffsetTable,
    DelayOffsetTable,
    SubscriptionGroupTable,
    TopicTable,
)
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import DEFAULT_REGION, PERM_READ_WRITE
from penstock.wire.message import encode_host, encode_properties
from penstock.wire.message_ids import UniqueIds

STORE_TICK_MS = 1_000


class Keeper(Protocol):
    """A part that keeps messages for later."""

    def tables(self) -> tuple[PersistentTable, ...]: ...

    def due(self) -> int:
        """When `tick` has something to do."""

    def tick(self, now_ms: int) -> None: ...

    def finish(self, now_ms: int) -> None:
        """Before a clean end."""

    def pinned_from(self) -> int | None:
        """Log offset of the first message that is still needed; None if none is."""


class Broker:
    """A broker over an open store, whose clients know it as `address`.

    `host` is the same by number, as messages note it.
    """

    def __init__(
        self, settings: Live, store: MessageStore, address: str, host: str, now_ms: int
    ) -> None:
        self.settings = settings
        self.effects = EffectQueue()
        self.context = self._build(settings, store, address, now_ms)
        self.context.access.seed(now_ms)
        numeric = encode_host(host)
        self.retry = Retry(self.context, numeric)
        self.context.redirects = Redirects(self.context, self.retry)
        self.context.timers = Timers(self.context)
        self.context.transactions = Transactions(self.context, numeric)
        self.pop = Pop(self.context, self.retry, numeric)
        self._assignments = Assignments(self.context)
        self.replies = Replies(self.context, numeric)
        self._keepers: tuple[Keeper, ...] = (
            self.context.delay,
            self.context.timers,
            self.context.transactions,
            self.pop,
        )
        store.care.pinned_from = self._pinned_from
        self.send = self._make_send(numeric)
        self.pull = PullHandler(self.context)
        self.router = Router(
            family.rows()
            for family in (
                self.send,
                self.pull,
                HeartbeatHandlers(self.context),
                ProgressHandlers(self.context),
                LockingHandlers(self.context),
                self.retry,
                self.context.timers,
                self.context.transactions,
                self.pop,
                self._assignments,
                self.replies,
                QueryHandlers(self.context),
                TopicHandlers(self.context),
                GroupHandlers(self.context),
                StatisticsHandlers(self.context),
                ConsumerHandlers(self.context),
                ResetHandlers(self.context),
                CleaningHandlers(self.context),
                RuntimeHandlers(self.context),
                SettingsHandlers(self.context),
                AuthAdmin(self.context),
            )
        )
        self._offsets_ms = self._store_ms = now_ms
        self._permission = settings.current.broker.permission
        self._settings_changed(settings.current)
        settings.listeners.append(self._settings_changed)

    def _build(
        self, settings: Live, store: MessageStore, address: str, now_ms: int
    ) -> BrokerContext:
        effects = self.effects
        persistence = Persistence(store.disk, store.paths.root)
        topic_table, group_table = TopicTable(), SubscriptionGroupTable()
        offset_table, access_table = ConsumerOffsetTable(), AccessTable()
        delay_table, changed_settings = DelayOffsetTable(), ChangedSettings()
        for table in (
            topic_table,
            group_table,
            offset_table,
            access_table,
            delay_table,
            changed_settings,
        ):
            table.load(persistence.file(table.FILE))
        changed_settings.apply(settings)
        locks = QueueLocks(settings)
        locks.load(persistence.file(locks.FILE), now_ms)
        groups = Groups(group_table, settings, effects)
        topics = Topics(topic_table, store, settings, effects)
        topics.seed()
        topics.adopt(now_ms)
        groups.seed()
        rewriter = MessageRewriter(store, topics)
        return BrokerContext(
            settings=settings,
            store=store,
            persistence=persistence,
            topics=topics,
            groups=groups,
            offsets=Offsets(offset_table, store, settings),
            rewriter=rewriter,
            delay=Delay(delay_table, store, rewriter, settings.current.store.delay_levels),
            clients=Clients(settings, groups, effects),
            locks=locks,
            long_polling=LongPolling(store),
            stats=Stats(store, topic_table, now_ms),
            access=Access(settings, access_table, effects),
            changed_settings=changed_settings,
            effects=effects,
            address=address,
            started_ms=now_ms,
        )

    def _make_send(self, host: bytes) -> SendHandler:
        config = self.settings.current
        ids = UniqueIds(host[:-4], pid=os.getpid(), loader=self.context.started_ms & 0x7FFFFFFF)
        region = config.broker.region
        return SendHandler(
            self.context.store.path,
            self.context.topics,
            self.context.redirects,
            host,
            unique_ids=ids,
            region=b"" if region == DEFAULT_REGION else region.encode(),
        )

    # --- what the server calls

    def handle(self, command: Command) -> Answer:
        return self.router.handle(command)

    def connected(self, client: int, peer: str, now_ms: int) -> None:
        """Nothing is known of a client before its first heartbeat."""

    def disconnected(self, client: int, now_ms: int) -> None:
        self.context.clients.disconnected(client)

    def due(self) -> int:
        """When `tick` has something to do."""
        context = self.context
        return min(
            context.clients.due(),
            context.stats.due(),
            *(keeper.due() for keeper in self._keepers),
            self._store_ms + STORE_TICK_MS,
            self._offsets_ms + self.settings.current.broker.offset_persist_ms,
        )

    def tick(self, now_ms: int) -> None:
        """Do what is due: deliver messages that waited, expire clients, take samples, care for
        files, persist offsets."""
        context = self.context
        for keeper in self._keepers:
            keeper.tick(now_ms)
        context.clients.tick(now_ms)
        context.stats.tick(now_ms)
        if not 0 <= now_ms - self._store_ms < STORE_TICK_MS:
            self._store_ms = now_ms
            context.store.tick(now_ms)
        period_ms = self.settings.current.broker.offset_persist_ms
        if not 0 <= now_ms - self._offsets_ms < period_ms:
            self._offsets_ms = now_ms
            for table in self._tables():
                if table.dirty:
                    self.effects.put(PersistSoon(table))

    def registration(self) -> RegisterBrokerBody:
        """What the NameServers are told about our topics: none allows more than the broker."""
        wrapper = self.context.topics.table.wrapper()
        allowed = self.settings.current.broker.permission | ~PERM_READ_WRITE
        topics = wrapper.topic_config_table
        if allowed & PERM_READ_WRITE != PERM_READ_WRITE:
            topics = {
                name: msgspec.structs.replace(config, perm=config.perm & allowed)
                for name, config in topics.items()
            }
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
                topic_config_table=topics, data_version=wrapper.data_version
            )
        )

    def not_ready(self) -> str | None:
        """Why messages can't be taken now, or None."""
        refusal = self.context.store.refusal
        return None if refusal is None else str(refusal)

    def close(self) -> None:
        """Write the tables and close the store; this waits for the disk."""
        context = self.context
        for keeper in self._keepers:
            keeper.finish(self._store_ms)
        for table in self._tables():
            if table.dirty:
                context.persistence.save(table)()
        context.store.close()

    def _tables(self) -> tuple[PersistentTable, ...]:
        context = self.context
        return (
            context.offsets.table,
            context.topics.table,
            context.groups.table,
            context.access.table,
            context.changed_settings,
            context.locks,
            *self._assignments.tables(),
            *(table for keeper in self._keepers for table in keeper.tables()),
        )

    def _pinned_from(self) -> int | None:
        pins = [keeper.pinned_from() for keeper in self._keepers]
        return min((pin for pin in pins if pin is not None), default=None)

    def _settings_changed(self, settings: Settings) -> None:
        self.send.configure(
            _extra_properties(settings.broker),
            settings.store.body_bytes_max,
            trace_on=settings.broker.trace_on,
        )
        if settings.broker.permission != self._permission:
            self._permission = settings.broker.permission
            self.context.topics.recheck_queues()
            self.context.topics.table.touch(self._store_ms)
            self.effects.put(RegisterSoon())
        self.context.topics.refresh(self._store_ms)
        self.context.store.reconfigure(settings.store)


def _extra_properties(config: BrokerConfig) -> bytes:
    """The properties that a broker adds to every message."""
    return encode_properties(
        {
            "MSG_REGION": config.region,
            "TRACE_ON": "true" if config.trace_on else "false",
            "CLUSTER": config.cluster,
        }
    )
