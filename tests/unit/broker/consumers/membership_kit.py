"""The parts of a broker that groups and offsets need, on a small store."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.broker.auto_creations import AutoCreations
from penstock.broker.consumers.client_groups import GroupMember
from penstock.broker.consumers.clients import Clients
from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
from penstock.broker.consumers.groups import Groups
from penstock.broker.consumers.lock_journal import LockJournal
from penstock.broker.consumers.queue_locks import QueueLocks
from penstock.broker.topics import Topics
from penstock.config import LiveSettings, Settings
from penstock.errors import PenstockError
from penstock.rpc.answers import (
    EffectQueue,
    InThread,
    NextIteration,
    NotifyMembers,
    Reply,
)
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.rpc.router import Router, refusal
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import SubscriptionGroupTable, TopicTable
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from penstock.wire.bodies.client_bodies import ConsumerData, SubscriptionData
from tests.store_kit import Message, small_config
from tests.unit.store.conftest import WatchedDisk

NOW_MS = 1_700_000_000_000


def settings(**broker: Any) -> LiveSettings:
    """Default settings, except these of the broker."""
    plain = Settings()
    return LiveSettings(
        msgspec.structs.replace(plain, broker=msgspec.structs.replace(plain.broker, **broker))
    )


def change(live: LiveSettings, **broker: Any) -> None:
    """Change settings of a running broker."""
    new = msgspec.structs.replace(live.current.broker, **broker)
    live.current = msgspec.structs.replace(live.current, broker=new)


def member(client: int, client_id: str = "", seen_ms: int = NOW_MS) -> GroupMember:
    return GroupMember(client, client_id or f"id{client}", f"10.0.0.{client}:99", 0, 479, seen_ms)


def consumer(group: str, *topics: str, version: int = 1, **fields: Any) -> ConsumerData:
    """A consumer group in a heartbeat."""
    return ConsumerData(
        group_name=group,
        consume_type="CONSUME_PASSIVELY",
        message_model=fields.get("message_model", "CLUSTERING"),
        consume_from_where="CONSUME_FROM_LAST_OFFSET",
        subscription_data_set=[subscription(t, version=version) for t in topics],
    )


def subscription(topic: str, *, version: int = 1, text: str = "*") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=text, sub_version=version)


def notified(effects: EffectQueue) -> list[tuple[int, str]]:
    """(client, group) of the notifications since the last call."""
    return [
        (client, effect.group)
        for effect in effects.take()
        if isinstance(effect, NotifyMembers)
        for client in effect.members
    ]


def opened_locks(
    live: LiveSettings, store: MessageStore, now_ms: int = NOW_MS, *, complete: bool = True
) -> QueueLocks:
    """The locks of a broker that starts with this store."""
    locks = QueueLocks(live, LockJournal(store.disk, store.paths.config))
    locks.load(now_ms, complete=complete)
    return locks


@dataclass
class ConsumerFixture:
    """Parts of a broker, and requests to them."""

    store: MessageStore
    live: LiveSettings = field(default_factory=settings)
    effects: EffectQueue = field(default_factory=EffectQueue)

    def __post_init__(self) -> None:
        creations = AutoCreations(self.live)
        self.groups = Groups(SubscriptionGroupTable(), self.live, self.effects, creations)
        self.topics = Topics(TopicTable(), self.store, self.live, self.effects, creations)
        self.offsets = ConsumerOffsets(ConsumerOffsetTable(), self.store, self.live)
        self.clients = Clients(self.live, self.groups, self.effects)
        self.locks = opened_locks(self.live, self.store)
        self.persistence = Persistence(self.store.disk, self.store.paths.root)
        self.router = Router([])

    def serve(self, *families: Any) -> None:
        """Route requests to these handlers."""
        self.router = Router([family.rows() for family in families])

    def ask(
        self, code: int, body: bytes = b"", *, now_ms: int = NOW_MS, client: int = 1, **ext: object
    ) -> Reply:
        """The response to a request, including work in the thread pool."""
        named = {name: str(value) for name, value in ext.items()}
        command = Command(
            code, named, body, client=client, peer="10.0.0.1:99", now_ms=now_ms, version=479
        )
        answer = self.router.handle(command)
        try:
            while isinstance(answer, NextIteration):
                answer = answer.then()
            if isinstance(answer, InThread):
                answer = answer.then(answer.work())
        except PenstockError as error:
            answer = refusal(error)
        assert isinstance(answer, Reply)
        return answer

    def put(self, topic: str, queue_id: int, *bodies: bytes, ms: int = NOW_MS) -> None:
        """Store messages and publish them."""
        for body in bodies:
            assert self.store.put(Message(topic, queue_id, body).record(), ms) == 0
        self.store.publish()


def make_fixture(root: Path) -> ConsumerFixture:
    """A fixture on a new store without threads."""
    store = MessageStore(root, small_config(sync_flush=False), disk=WatchedDisk(), now_ms=NOW_MS)
    return ConsumerFixture(store)
