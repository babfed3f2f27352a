"""A broker's parts for tests of queries and administration, and requests to their handlers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from penstock.broker.auth.access_control import AccessControl
from penstock.broker.auth.users import AccessTable
from penstock.broker.auto_creations import AutoCreations
from penstock.broker.consumers.client_groups import GroupMember
from penstock.broker.consumers.clients import Clients
from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
from penstock.broker.consumers.groups import Groups
from penstock.broker.context import BrokerContext
from penstock.broker.delay.delay_levels import Delay
from penstock.broker.delay.timers import Timers
from penstock.broker.filter.filters import Filters
from penstock.broker.long_polling import LongPolling
from penstock.broker.replicas.replica_role import ReplicaRole
from penstock.broker.rewrite import MessageRewriter
from penstock.broker.stats import Stats
from penstock.broker.topics import Topics
from penstock.config import LiveSettings, Settings
from penstock.errors import PenstockError, TopicNotExist
from penstock.rpc.answers import (
    Answer,
    CallClient,
    EffectQueue,
    InThread,
    NextIteration,
    RegisterTopics,
    Reply,
)
from penstock.rpc.changed_settings import ChangedSettings
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.rpc.router import Router, refusal
from penstock.store.disk import Disk
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import DelayOffsetTable, SubscriptionGroupTable, TopicTable
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    ConsumerData,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from penstock.wire.codes import V5_4_0, LanguageCode
from tests.store_kit import Message, small_config
from tests.unit.broker.consumers.membership_kit import opened_locks

NOW_MS = 1_700_000_000_000
BROKER = "broker-a"
ADDRESS = "127.0.0.1:10911"

T = TypeVar("T")


class PlainDisk(Disk):
    """Real files; work for the thread pool runs at once."""

    threads = False


class PlainTopics:
    """The topic table alone."""

    def __init__(self) -> None:
        self.table = TopicTable()

    def get(self, topic: str) -> TopicConfig | None:
        return self.table.get(topic)

    def need(self, topic: str) -> TopicConfig:
        config = self.get(topic)
        if config is None:
            raise TopicNotExist(f"there is no topic {topic}")
        return config


class PlainGroups:
    """The group table alone."""

    def __init__(self) -> None:
        self.table = SubscriptionGroupTable()

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        return self.table.get(group)


@dataclass
class AdminFixture:
    """Parts of a broker on a small store."""

    store: MessageStore
    live: LiveSettings = field(default_factory=lambda: LiveSettings(Settings()))
    topics: PlainTopics = field(default_factory=PlainTopics)
    groups: PlainGroups = field(default_factory=PlainGroups)
    effects: EffectQueue = field(default_factory=EffectQueue)

    def __post_init__(self) -> None:
        groups = cast(Groups, self.groups)
        self.offsets = ConsumerOffsets(ConsumerOffsetTable(), self.store, self.live)
        self.clients = Clients(self.live, groups, self.effects)
        self.stats = Stats(self.store, self.topics.table, NOW_MS)
        rewriter = MessageRewriter(self.store, cast(Topics, self.topics))
        self.delay = Delay(
            DelayOffsetTable(), self.store, rewriter, self.live.current.store.delay_levels
        )
        self.context = BrokerContext(
            role=ReplicaRole(),
            settings=self.live,
            store=self.store,
            persistence=Persistence(self.store.disk, self.store.paths.root),
            topics=cast(Topics, self.topics),
            groups=groups,
            auto_creations=AutoCreations(self.live),
            offsets=self.offsets,
            delay=self.delay,
            rewriter=rewriter,
            clients=self.clients,
            locks=opened_locks(self.live, self.store),
            long_polling=LongPolling(self.store),
            stats=self.stats,
            access=AccessControl(self.live, AccessTable(), self.effects),
            changed_settings=ChangedSettings(),
            filters=Filters(),
            effects=self.effects,
            address=ADDRESS,
            started_ms=NOW_MS,
        )
        self.timers = Timers(
            self.live,
            self.store,
            self.context.persistence,
            self.context.topics,
            rewriter,
            self.effects,
            now_ms=NOW_MS,
        )

    # --- contents

    def topic(self, name: str, queues: int = 1, **fields: Any) -> None:
        config = TopicConfig(
            topic_name=name, read_queue_nums=queues, write_queue_nums=queues, **fields
        )
        self.topics.table.put(config, NOW_MS)

    def group(self, name: str) -> None:
        self.groups.table.put(SubscriptionGroupConfig(group_name=name), NOW_MS)

    def put(self, topic: str, queue_id: int = 0, *, ms: int = NOW_MS, **fields: Any) -> int:
        """Store a message; returns its log offset."""
        message = Message(topic, queue_id, fields.pop("body", b"body"), **fields)
        assert self.store.put(message.record(), ms) == PUT_OK
        self.store.publish()
        return self.store.writer.offset

    def consumer(self, group: str, *topics: str, client: int = 1, **fields: Any) -> GroupMember:
        """A consumer connects and subscribes."""
        known = member(client, **fields)
        subscriptions = [SubscriptionData(topic=topic, sub_string="*") for topic in topics]
        data = ConsumerData(
            group_name=group,
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            consume_from_where="CONSUME_FROM_LAST_OFFSET",
            subscription_data_set=subscriptions,
        )
        self.clients.register_consumer(data, known)
        self.effects.take()
        return known

    def change(self, **broker: Any) -> None:
        """Change settings of the broker."""
        current = self.live.current
        self.live.current = msgspec.structs.replace(
            current, broker=msgspec.structs.replace(current.broker, **broker)
        )


def member(
    client: int, *, version: int = V5_4_0, language: int = LanguageCode.JAVA, name: str = ""
) -> GroupMember:
    """A connection of a client."""
    return GroupMember(
        client, name or f"id{client}", f"10.0.0.{client}:99", language, version, NOW_MS
    )


@contextmanager
def admin_fixture(root: Path) -> Iterator[AdminFixture]:
    """A fixture on a new store, which is closed at the end."""
    store = MessageStore(root, small_config(sync_flush=False), disk=PlainDisk(), now_ms=NOW_MS)
    try:
        yield AdminFixture(store)
    finally:
        store.close()


def ask(
    family: Any, code: int, body: Any = b"", *, now_ms: Any = NOW_MS, **ext: Any
) -> Reply | CallClient:
    """The answer of handlers, including work in the thread pool."""
    named = {name: str(value) for name, value in ext.items()}
    command = Command(code, named, body, peer="10.0.0.9:99", now_ms=now_ms)
    return finish(Router([family.rows()]).handle(command))


def finish(answer: Answer) -> Reply | CallClient:
    """Run work for the thread pool until there is an answer; errors become refusals."""
    try:
        while isinstance(answer, InThread | NextIteration | RegisterTopics):
            answer = answer.then(answer.work()) if isinstance(answer, InThread) else answer.then()
    except PenstockError as error:
        return refusal(error)
    assert isinstance(answer, Reply | CallClient)
    return answer


def reply(family: Any, code: int, body: Any = b"", **ext: Any) -> Reply:
    answer = ask(family, code, body, **ext)
    assert isinstance(answer, Reply)
    return answer


def decoded(family: Any, kind: type[T], code: int, **ext: Any) -> T:
    """The typed body of a success."""
    answer = reply(family, code, **ext)
    assert answer.code == 0, answer.remark
    return fastjson.decode(answer.body, kind)
