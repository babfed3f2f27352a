"""Parts of a broker for tests of topics and groups: all real except clients and access control."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from penstock.broker.admin.group_admin import GroupHandlers
from penstock.broker.admin.topic_admin import TopicHandlers
from penstock.broker.auto_creations import AutoCreations
from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
from penstock.broker.consumers.groups import Groups
from penstock.broker.context import BrokerContext
from penstock.broker.delay.delay_levels import Delay
from penstock.broker.long_polling import LongPolling
from penstock.broker.rewrite import MessageRewriter
from penstock.broker.stats import Stats
from penstock.broker.topics import Topics
from penstock.config import LiveSettings, Settings
from penstock.errors import PenstockError
from penstock.rpc.answers import EffectQueue, InThread, NextIteration, RegisterTopics, Reply
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.rpc.router import Router, refusal
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import DelayOffsetTable, SubscriptionGroupTable, TopicTable
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from tests.unit.store.conftest import NOW_MS, WatchedDisk, put, record, small_config


class TopicKit:
    """The parts, and a way to send requests."""

    def __init__(self, store: MessageStore, **broker: Any) -> None:
        settings = Settings()
        settings = msgspec.structs.replace(
            settings, broker=msgspec.structs.replace(settings.broker, **broker)
        )
        self.live = LiveSettings(settings)
        self.store = store
        self.effects = EffectQueue()
        self.persistence = Persistence(store.disk, store.paths.root)
        creations = AutoCreations(self.live)
        self.topics = Topics(TopicTable(), store, self.live, self.effects, creations)
        self.groups = Groups(SubscriptionGroupTable(), self.live, self.effects, creations)
        self.offsets = ConsumerOffsets(ConsumerOffsetTable(), store, self.live)
        self.delay = Delay(
            DelayOffsetTable(),
            store,
            MessageRewriter(store, self.topics),
            self.live.current.store.delay_levels,
        )
        self.long_polling = LongPolling(store)
        self.stats = Stats(store, self.topics.table, NOW_MS)
        self.topics.seed()
        self.groups.seed()
        self.effects.take()
        context = SimpleNamespace(
            settings=self.live,
            store=store,
            persistence=self.persistence,
            topics=self.topics,
            groups=self.groups,
            offsets=self.offsets,
            long_polling=self.long_polling,
            effects=self.effects,
            stats=self.stats,
            delay=self.delay,
        )
        self.context = cast(BrokerContext, context)
        families = (TopicHandlers(self.context), GroupHandlers(self.context))
        self.router = Router(family.rows() for family in families)

    def set(self, **broker: Any) -> None:
        """Change live settings of the broker."""
        current = self.live.current
        self.live.current = msgspec.structs.replace(
            current, broker=msgspec.structs.replace(current.broker, **broker)
        )

    def ask(self, code: int, ext: dict[str, Any] | None = None, body: bytes = b"") -> Reply:
        """The reply to a request, work in the thread pool included."""
        fields = {name: str(value) for name, value in (ext or {}).items()}
        answer = self.router.handle(Command(code, fields, body, now_ms=NOW_MS))
        try:
            while isinstance(answer, InThread | NextIteration | RegisterTopics):
                answer = (
                    answer.then(answer.work()) if isinstance(answer, InThread) else answer.then()
                )
        except PenstockError as error:
            answer = refusal(error)
        assert isinstance(answer, Reply)
        return answer

    def create(self, topic: str, **ext: Any) -> Reply:
        """UPDATE_AND_CREATE_TOPIC as mqadmin sends it."""
        fields = {
            "topic": topic, "defaultTopic": "TBW102", "readQueueNums": 8, "writeQueueNums": 8,
            "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false",
        }  # fmt: skip
        return self.ask(17, {**fields, **ext})

    def send(self, topic: str, *bodies: str, queue_id: int = 0) -> None:
        put(self.store, *[record(body.encode(), topic, queue_id) for body in bodies])


@contextmanager
def topic_kit(root: Path, **broker: Any) -> Iterator[TopicKit]:
    """A kit with a store that is closed at the end."""
    store = MessageStore(root, small_config(), disk=WatchedDisk(), now_ms=NOW_MS)
    try:
        yield TopicKit(store, **broker)
    finally:
        store.close()
