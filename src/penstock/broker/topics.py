"""The topics of a broker: lookup, creation by sending, change, deletion.

A queue may be sent to without a further look as long as its row says `taking`. Whatever changes a
topic, or the broker's permission, takes that mark back, so that the next send asks again.
"""

import logging
from collections.abc import Iterable
from typing import Final

import msgspec

from penstock.config import Live, delays_ms
from penstock.errors import InvalidParameter, NoPermission, TopicNotExist
from penstock.rpc.answers import (
    Answer,
    EffectQueue,
    EncodedReply,
    PersistSoon,
    RegisterSoon,
    RegisterTopics,
)
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore
from penstock.store.tables import TopicTable
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import (
    PERM_INHERIT,
    PERM_READ,
    PERM_READ_WRITE,
    PERM_TEMPLATE,
    PERM_WRITE,
    POP_RETRY_SEPARATOR_V1,
    POP_RETRY_SEPARATOR_V2,
    REPLY_TOPIC_SUFFIX,
    RETRY_TOPIC_PREFIX,
    REVIVE_TOPIC_PREFIX,
    SEND_FORBIDDEN_TOPICS,
    SYNC_BROKER_MEMBER_PREFIX,
    SYSTEM_TOPICS,
    TOPIC_AUTO_CREATE,
    TOPIC_BENCHMARK,
    TOPIC_OFFSET_MOVED,
    TOPIC_ROCKSDB_TRANS_HALF,
    TOPIC_ROCKSDB_TRANS_OP_HALF,
    TOPIC_SCHEDULE,
    TOPIC_SELF_TEST,
    TOPIC_TIMER,
    TOPIC_TRACE,
    TOPIC_TRANS_HALF,
    TOPIC_TRANS_OP_HALF,
    is_system_topic,
    topic_fault,
)

log = logging.getLogger(__name__)

QUEUES_MAX: Final = 1 << 20
"""Most queues of a topic: the store knows no higher queue ids."""
ANNOUNCE_MS: Final = 1_000
"""How long the answer to a send that made its topic waits for NameServers; clients wait 3 s."""
_CLUSTER_QUEUES: Final = 16
_BENCHMARK_QUEUES: Final = 1024
_CLIENT_QUEUES: Final = 4  # what RocketMQ's clients ask for when a send creates a topic
_REVIVE_QUEUES: Final = 8


class Topics:
    """The topic table and its rules."""

    def __init__(
        self, table: TopicTable, store: MessageStore, settings: Live, effects: EffectQueue
    ) -> None:
        self.table = table
        self._store = store
        self._settings = settings
        self._effects = effects
        self._turn = 0
        self.creations = 0  # by sending
        broker = settings.current.broker
        self._default_queues = broker.default_topic_queues
        self._own = frozenset({broker.name, broker.cluster, broker.cluster + REPLY_TOPIC_SUFFIX})

    # --- the topics every broker has

    def seed(self) -> None:
        """Make the topics every broker has."""
        for config in self._built_in().values():
            self.table.seed(config)
        if self.table.dirty:
            self._effects.put(PersistSoon(self.table))

    def adopt(self, now_ms: int) -> None:
        """Make the topics anew whose queues hold messages and that the table does not know.

        A send that creates its topic is answered before the table is on the disk; a crash between
        the two must not hide the message. Deleted topics have no queues.
        """
        queues: dict[str, int] = {}
        for queue in self._store.queues.rows:
            topic = queue.topic.decode("utf-8", "replace")
            if self.table.get(topic) is None and queue.max_offset > 0:
                queues[topic] = max(queues.get(topic, _CLIENT_QUEUES), queue.queue_id + 1)
        for topic, count in queues.items():
            log.warning("the topic %s was not in the table, but has messages: made anew", topic)
            self.put(_topic(topic, count), now_ms)

    def refresh(self, now_ms: int) -> None:
        """Live settings changed: let sends ask again, and have the template if there should be."""
        self.recheck_queues()
        default_queues = self._settings.current.broker.default_topic_queues
        for config in self._built_in().values():
            stale = (
                config.topic_name == TOPIC_AUTO_CREATE and default_queues != self._default_queues
            )
            if stale or self.table.get(config.topic_name) is None:
                self.put(config, now_ms)
        self._default_queues = default_queues

    def is_system(self, topic: str) -> bool:
        """Whether the topic belongs to the broker's machinery: nobody may change or delete it."""
        return topic in self._own or is_system_topic(topic)

    def system_names(self) -> list[str]:
        """All system topics known here, those that do not exist included."""
        return sorted({*SYSTEM_TOPICS, *self._own, *self._built_in()})

    def _built_in(self) -> dict[str, TopicConfig]:
        settings = self._settings.current
        broker = settings.broker
        made = [_topic(TOPIC_SELF_TEST)]
        if broker.auto_create_topics:
            made.append(_topic(TOPIC_AUTO_CREATE, broker.default_topic_queues, PERM_TEMPLATE))
        made += [
            _topic(TOPIC_BENCHMARK, _BENCHMARK_QUEUES),
            _topic(broker.cluster, _CLUSTER_QUEUES, PERM_TEMPLATE),
            _topic(broker.name, perm=PERM_TEMPLATE),
            _topic(TOPIC_OFFSET_MOVED),
            _topic(TOPIC_SCHEDULE, len(delays_ms(settings.store.delay_levels))),
        ]
        if broker.trace_topic:
            made.append(_topic(TOPIC_TRACE))
        made += [
            _topic(broker.cluster + REPLY_TOPIC_SUFFIX),
            _topic(REVIVE_TOPIC_PREFIX + broker.cluster, _REVIVE_QUEUES),
            _topic(SYNC_BROKER_MEMBER_PREFIX + broker.name, perm=PERM_INHERIT),
            _topic(TOPIC_TRANS_HALF),
            _topic(TOPIC_TRANS_OP_HALF),
            _topic(TOPIC_ROCKSDB_TRANS_HALF),
            _topic(TOPIC_ROCKSDB_TRANS_OP_HALF),
            _topic(TOPIC_TIMER),
        ]
        return {config.topic_name: config for config in made}

    # --- lookup

    def get(self, topic: str) -> TopicConfig | None:
        """The topic of this name."""
        return self.table.get(topic)

    def need(self, topic: str) -> TopicConfig:
        """The topic of this name; raises TopicNotExist."""
        config = self.table.get(topic)
        if config is None:
            raise TopicNotExist(f"the topic {topic} does not exist here")
        return config

    def writable_queue(
        self, topic: str, queue_id: int, *, template: str, template_queues: int, now_ms: int
    ) -> ConsumeQueue:
        """The queue a message may be sent to, marked as `taking`; a negative id means any.

        Creates the topic after the template where that is allowed. Raises NoPermission,
        TopicNotExist or InvalidParameter.
        """
        if topic in SEND_FORBIDDEN_TOPICS:
            raise NoPermission(f"the topic {topic} is the broker's own: nobody may send to it")
        config = self.table.get(topic)
        if config is None:
            _check_name(topic)
            config = self._create_by_send(topic, template, template_queues, now_ms)
        broker = self._settings.current.broker
        if config.order and not broker.permission & PERM_WRITE:
            # Other topics go on until the route tells producers, as RocketMQ has it: no send fails
            # while a broker is drained. An ordered one would be torn between two brokers.
            raise NoPermission(
                f"the broker {broker.name} takes no messages of ordered topics",
                hint="its permission is set so (brokerPermission); another broker may serve it",
            )
        if not config.perm & PERM_WRITE:
            raise NoPermission(
                f"the topic {topic} may not be sent to: its permission is {config.perm}",
                hint="mqadmin updateTopicPerm -p 6 allows it",
            )
        return self._open_gate(config, queue_id)

    def priority_queue(self, topic: str, priority: int, now_ms: int) -> ConsumeQueue:
        """The queue for messages of this priority: the last write queue for all higher ones."""
        queue_id = min(priority, self.need(topic).write_queue_nums - 1)
        return self.writable_queue(topic, queue_id, template="", template_queues=0, now_ms=now_ms)

    def readable_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue a consumer may read. Raises NoPermission, TopicNotExist or InvalidParameter."""
        config = self.need(topic)
        broker = self._settings.current.broker
        if not broker.permission & PERM_READ:
            raise NoPermission(
                f"the broker {broker.name} may not be read from",
                hint="its permission is set so (brokerPermission)",
            )
        if not config.perm & PERM_READ:
            raise NoPermission(
                f"the topic {topic} may not be read: its permission is {config.perm}",
                hint="mqadmin updateTopicPerm -p 6 allows it",
            )
        if not 0 <= queue_id < config.read_queue_nums:
            raise InvalidParameter(
                f"the topic {topic} has no queue {queue_id} to read: there are "
                f"{config.read_queue_nums}, counted from 0"
            )
        return self._queue(topic, queue_id)

    # --- changes

    def ensure(self, topic: str, queues: int, permission: int, now_ms: int) -> TopicConfig:
        """The topic, created with so many queues if it is new (retry and dead-letter topics)."""
        config = self.table.get(topic)
        if config is None:
            name = topic
            if topic.startswith(RETRY_TOPIC_PREFIX):  # POP's, which only the broker itself makes
                name = topic.replace(POP_RETRY_SEPARATOR_V2, POP_RETRY_SEPARATOR_V1, 1)
            _check_name(name)
            config = _topic(topic, queues, permission)
            self.put(config, now_ms)
        return config

    def put(self, config: TopicConfig, now_ms: int) -> None:
        """Create or change a topic: persisted and registered soon."""
        before = self.table.get(config.topic_name)
        self.table.put(config, now_ms)
        if before is None:
            log.info("topic %s is created: %s", config.topic_name, config)
            self._store.prepare(config.topic_name, config.write_queue_nums)
        else:
            log.info("topic %s is changed: %s, before: %s", config.topic_name, config, before)
            self._recheck_queues_of(before)
        self._tell()

    def mark_ordered(self, names: Iterable[str], now_ms: int) -> None:
        """These have an order config at the NameServers, as Apache has it: they are ordered, and
        stay so when it is taken away."""
        for name in names:
            config = self.table.get(name)
            if config is not None and not config.order:
                self.put(msgspec.structs.replace(config, order=True), now_ms)

    def delete(self, topic: str, now_ms: int) -> list[ConsumeQueue]:
        """Forget a topic; gives its queues, whose files the caller has destroyed in the pool
        (`store.finish_removal`)."""
        name = topic.encode()
        if self.table.get(topic) is None and not self._store.queues.of(name):
            return []
        queues = self._store.remove_queues(name)
        if self.table.remove(topic, now_ms) is not None:
            log.info("topic %s is deleted, with %d queues", topic, len(queues))
            self._tell()
        return queues

    def reply_when_registered(self, topic: str, reply: EncodedReply, now_ms: int) -> Answer:
        """The answer to a send that made its topic: consumers that start on it find the route."""
        return RegisterTopics(lambda: reply, now_ms + ANNOUNCE_MS, (topic,))

    def recheck_queues(self) -> None:
        """Let every queue ask again before it takes messages: the broker's permission changed."""
        for queue in self._store.queues.rows:
            queue.writable = False

    def _create_by_send(
        self, topic: str, template: str, template_queues: int, now_ms: int
    ) -> TopicConfig:
        model = self.table.get(template)
        allowed = template != TOPIC_AUTO_CREATE or (
            self._settings.current.broker.auto_create_topics
        )
        if model is not None and allowed and model.perm & PERM_INHERIT:
            config = TopicConfig(
                topic_name=topic,
                read_queue_nums=(queues := max(min(template_queues, model.write_queue_nums), 0)),
                write_queue_nums=queues,
                perm=model.perm & ~PERM_INHERIT,
                topic_filter_type=model.topic_filter_type,
            )
            self.put(config, now_ms)
            self.creations += 1
            return config
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return self.ensure(topic, 1, PERM_READ_WRITE, now_ms)
        raise TopicNotExist(f"the topic {topic} does not exist here and is not created by sending")

    def _open_gate(self, config: TopicConfig, queue_id: int) -> ConsumeQueue:
        topic = config.topic_name
        if queue_id < 0:
            if config.write_queue_nums <= 0:
                raise InvalidParameter(f"the topic {topic} has no queue to write to")
            self._turn += 1
            queue_id = self._turn % config.write_queue_nums
        queues = max(config.write_queue_nums, config.read_queue_nums)
        if queue_id >= queues:
            raise InvalidParameter(
                f"the topic {topic} has no queue {queue_id}: there are {queues}, counted from 0",
                hint="the producer's route may be old; it asks the NameServer every 30 s",
            )
        queue = self._queue(topic, queue_id)
        queue.writable = True
        return queue

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = self._store.make_queue(topic.encode(), queue_id)
        if queue is None:
            raise InvalidParameter(f"the topic {topic} can't have a queue {queue_id}")
        return queue

    def _recheck_queues_of(self, config: TopicConfig) -> None:
        name = config.topic_name.encode()
        for queue_id in range(max(config.write_queue_nums, config.read_queue_nums)):
            queue = self._store.queues.get(name, queue_id)
            if queue is not None:
                queue.writable = False

    def _tell(self) -> None:
        self._effects.put(PersistSoon(self.table))
        self._effects.put(RegisterSoon())


def _topic(name: str, queues: int = 1, perm: int = PERM_READ_WRITE) -> TopicConfig:
    return TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)


def _check_name(topic: str) -> None:
    fault = topic_fault(topic)
    if fault is not None:
        raise InvalidParameter(fault)
