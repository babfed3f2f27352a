"""The topics of a broker: lookup, creation by sends, changes, deletion.

A queue that is marked as `writable` may be sent to without further checks. A change of the
topic or of the broker's permission removes the mark, so that the next send is checked again.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from penstock.broker.auto_creations import BROKER, AutoCreations
from penstock.config import LiveSettings, delays_ms
from penstock.errors import InvalidParameter, NoPermission, SystemBusy, TopicNotExist
from penstock.rpc.answers import (
    Answer,
    ClientId,
    EffectQueue,
    EncodedReply,
    PersistSoon,
    RegisterSoon,
    RegisterTopics,
)
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import TopicTable
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
    is_internal_topic,
    is_send_forbidden,
    is_system_topic,
    topic_fault,
)

log = logging.getLogger(__name__)

QUEUES_MAX: Final = 1 << 20
"""Most queues of a topic, by the store's limit of queue ids."""
SEND_REGISTER_MS: Final = 1_000
"""How long the response to a send that created its topic waits for the NameServers; clients wait
3 s."""
_CLUSTER_QUEUES: Final = 16
_BENCHMARK_QUEUES: Final = 1024
_CLIENT_QUEUES: Final = 4  # the number that RocketMQ's clients ask for when a send creates a topic
_REVIVE_QUEUES: Final = 8


class Topics:
    """The topics of a broker."""

    def __init__(
        self,
        table: TopicTable,
        store: MessageStore,
        settings: LiveSettings,
        effects: EffectQueue,
        auto_creations: AutoCreations,
        *,
        copied: bool = False,
    ) -> None:
        """With `copied` the table is that of the master: nothing else changes it."""
        self.table = table
        self._copied = copied
        self._auto_creations = auto_creations
        self._store = store
        self._settings = settings
        self._effects = effects
        self._next_queue = 0  # for sends without a queue id
        self.creations = 0  # topics created by sends
        self._blocked: set[str] = set()  # names of topics that are being deleted
        broker = settings.current.broker
        self._default_queues = broker.default_topic_queues
        self._broker_topics = frozenset(
            {broker.name, broker.cluster, broker.cluster + REPLY_TOPIC_SUFFIX}
        )

    # --- built-in topics

    def seed(self) -> None:
        """Create the built-in topics that are missing."""
        for config in self._built_in().values():
            self.table.seed(config)
        if self.table.dirty:
            self._effects.put(PersistSoon(self.table))

    def adopt(self, now_ms: int, known_to: int = 0) -> None:
        """Create topics for queues with messages whose topic is not in the table.

        A send that creates its topic is answered before the table is written; a crash between the
        two must not hide the message. Deleted topics have no queues, except in the store of a
        former slave, whose table has all topics with messages below the log offset `known_to`.
        """
        if self._copied:
            return
        known_to = known_to if known_to <= self._store.log.end else 0
        queues: dict[str, int] = {}
        for queue in self._store.queues.rows:
            topic = queue.topic.decode("utf-8", "replace")
            if self.table.get(topic) is None and queue.max_offset > 0:
                if known_to:
                    entry = queue.entry(queue.max_offset - 1)
                    if entry is not None and entry[0] < known_to:
                        continue
                queues[topic] = max(queues.get(topic, _CLIENT_QUEUES), queue.queue_id + 1)
        for topic, count in queues.items():
            log.warning("created topic %s again: it has messages but was not in the table", topic)
            self.put(_topic(topic, count), now_ms)

    def refresh(self, now_ms: int) -> None:
        """Apply changed live settings: check sends again, create or change built-in topics."""
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
        """Whether the topic is internal: clients may not change or delete it."""
        return topic in self._broker_topics or is_system_topic(topic)

    def system_names(self) -> list[str]:
        """The names of all system topics, including those that do not exist."""
        return sorted({*SYSTEM_TOPICS, *self._broker_topics, *self._built_in()})

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
        self,
        topic: str,
        queue_id: int,
        *,
        template: str,
        template_queues: int,
        client: ClientId,
        now_ms: int,
    ) -> ConsumeQueue:
        """The queue that a message may be sent to, marked as `writable`; a negative id means any.

        Creates the topic from the template if that is allowed to this client. Raises NoPermission,
        TopicNotExist or InvalidParameter.
        """
        if is_send_forbidden(topic):
            raise NoPermission(f"the topic {topic} is internal: clients may not send to it")
        config = self.table.get(topic)
        if config is None:
            _check_name(topic)
            config = self._create_by_send(topic, template, template_queues, client, now_ms)
        broker = self._settings.current.broker
        if config.order and not broker.permission & PERM_WRITE:
            # Other topics accept sends until producers see the new route, as in RocketMQ, so that
            # no send fails while a broker is drained. In an ordered topic the messages of one key
            # would be split between two brokers.
            raise NoPermission(
                f"the broker {broker.name} does not accept messages of ordered topics",
                hint="its permission (brokerPermission) does not allow writing; send to another "
                "broker",
            )
        if not config.perm & PERM_WRITE:
            raise NoPermission(
                f"the topic {topic} is not writable: its permission is {config.perm}",
                hint="mqadmin updateTopicPerm -p 6 allows it",
            )
        return self._queue_for_send(config, queue_id)

    def priority_queue(self, topic: str, priority: int, now_ms: int) -> ConsumeQueue:
        """The queue for messages of this priority: the last write queue for all higher ones."""
        queue_id = min(priority, self.need(topic).write_queue_nums - 1)
        return self.writable_queue(
            topic, queue_id, template="", template_queues=0, client=BROKER, now_ms=now_ms
        )

    def readable_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, if it may be read. Raises NoPermission, TopicNotExist or InvalidParameter."""
        refuse_internal(topic)
        config = self.need(topic)
        broker = self._settings.current.broker
        if not broker.permission & PERM_READ:
            raise NoPermission(
                f"the broker {broker.name} is not readable",
                hint="its permission (brokerPermission) does not allow reading",
            )
        if not config.perm & PERM_READ:
            raise NoPermission(
                f"the topic {topic} is not readable: its permission is {config.perm}",
                hint="mqadmin updateTopicPerm -p 6 allows it",
            )
        if not 0 <= queue_id < config.read_queue_nums:
            raise InvalidParameter(
                f"the topic {topic} has no readable queue {queue_id}: it has "
                f"{config.read_queue_nums} readable queues, numbered from 0"
            )
        return self._queue(topic, queue_id)

    # --- changes

    def ensure(self, topic: str, queues: int, permission: int, now_ms: int) -> TopicConfig:
        """The topic, created if it does not exist (retry and dead letter topics)."""
        config = self.table.get(topic)
        if config is None:
            self.refuse_blocked(topic)
            name = topic
            if topic.startswith(RETRY_TOPIC_PREFIX):  # of POP, which only the broker creates
                name = topic.replace(POP_RETRY_SEPARATOR_V2, POP_RETRY_SEPARATOR_V1, 1)
            _check_name(name)
            config = _topic(topic, queues, permission)
            self.put(config, now_ms)
        return config

    def put(self, config: TopicConfig, now_ms: int) -> None:
        """Create or change a topic; it is persisted and registered soon. A slave gets it from its
        master instead."""
        if self._copied:
            return
        before = self.table.get(config.topic_name)
        self.table.put(config, now_ms)
        if before is None:
            log.info("created topic %s", _described(config))
            self._store.prepare(config.topic_name, config.write_queue_nums)
        else:
            log.info("changed topic %s; before: %s", _described(config), _described(before))
            self._recheck_queues_of(before)
        self._persist_and_register()

    def mark_ordered(self, names: Iterable[str], now_ms: int) -> None:
        """Mark topics with an order config at the NameServers as ordered. As in Apache, they stay
        ordered when the order config is removed."""
        for name in names:
            config = self.table.get(name)
            if config is not None and not config.order:
                self.put(msgspec.structs.replace(config, order=True), now_ms)

    def delete(self, topic: str, now_ms: int) -> Iterator[ConsumeQueue]:
        """Delete a topic, queue by queue; the caller then deletes the files in the thread pool
        (`store.finish_removal`). The deletion may be done in steps: the topic is gone after the
        first."""
        name = topic.encode()
        if self.table.get(topic) is None and name not in self._store.queues.topics:
            return
        removed = self._store.remove_queues(name)
        first = next(removed, None)  # raises before anything has changed
        if self.table.remove(topic, now_ms) is not None:
            log.info("deleted topic %s", topic)
            self._persist_and_register()
        if first is not None:
            yield first
            yield from removed

    @contextmanager
    def blocked(self, topic: str) -> Iterator[bool]:
        """Block a deleted topic's name: nobody can create it in this block, so that a new topic
        does not get what is left of the old one. False if the name is blocked already."""
        if topic in self._blocked:
            yield False
            return
        self._blocked.add(topic)
        try:
            yield True
        finally:
            self._blocked.discard(topic)

    def refuse_blocked(self, topic: str) -> None:
        """Raise SystemBusy for a name that is blocked."""
        if topic in self._blocked:
            raise SystemBusy(
                f"a topic {topic} is being deleted", hint="create it again when that has finished"
            )

    def reply_when_registered(self, topic: str, reply: EncodedReply, now_ms: int) -> Answer:
        """Reply to a send that created its topic when the NameServers know the topic."""
        return RegisterTopics(lambda: reply, now_ms + SEND_REGISTER_MS, (topic,))

    def recheck_queues(self) -> None:
        """Check the next send to every queue again: the broker's permission has changed."""
        for queue in self._store.queues.rows:
            queue.writable = False

    def _create_by_send(
        self, topic: str, template: str, template_queues: int, client: ClientId, now_ms: int
    ) -> TopicConfig:
        self.refuse_blocked(topic)
        template_config = self.table.get(template)
        allowed = template != TOPIC_AUTO_CREATE or (
            self._settings.current.broker.auto_create_topics
        )
        if template_config is not None and allowed and template_config.perm & PERM_INHERIT:
            queues = max(min(template_queues, template_config.write_queue_nums), 0)
            self.check_count()
            self.check_queues(queues)
            self._auto_creations.count(client, f"the topic {topic}", now_ms)
            config = TopicConfig(
                topic_name=topic,
                read_queue_nums=queues,
                write_queue_nums=queues,
                perm=template_config.perm & ~PERM_INHERIT,
                topic_filter_type=template_config.topic_filter_type,
            )
            self.put(config, now_ms)
            self.creations += 1
            return config
        if topic.startswith(RETRY_TOPIC_PREFIX):
            self._auto_creations.count(client, f"the topic {topic}", now_ms)
            return self.ensure(topic, 1, PERM_READ_WRITE, now_ms)
        raise TopicNotExist(f"the topic {topic} does not exist here and is not created by sending")

    def check_count(self, created: int = 1) -> None:
        """Refuse to create topics beyond `topics_max`. Topics that the broker itself needs, such as
        those of retries and dead letters, are not refused: messages would be lost."""
        limit = self._settings.current.broker.topics_max
        count = len(self.table.topics) + created
        if count > limit:
            raise InvalidParameter.over(
                "too many topics",
                figure=count,
                limit=limit,
                unit="topics",
                setting="topics_max",
                hint="delete topics that are not used, or raise the setting",
            )

    def check_queues(self, added: int) -> None:
        """Refuse to create queues beyond `queues_max`, of all topics together. Those of topics that
        the broker itself needs are not refused."""
        limit = self._settings.current.broker.queues_max
        count = self.table.queues + added
        if added > 0 and count > limit:
            raise InvalidParameter.over(
                "too many queues of all topics",
                figure=count,
                limit=limit,
                unit="queues",
                setting="queues_max",
                hint="reduce the queues of topics, delete topics, or raise the setting",
            )

    def _queue_for_send(self, config: TopicConfig, queue_id: int) -> ConsumeQueue:
        topic = config.topic_name
        if queue_id < 0:
            if config.write_queue_nums <= 0:
                raise InvalidParameter(f"the topic {topic} has no writable queue")
            self._next_queue += 1
            queue_id = self._next_queue % config.write_queue_nums
        queues = max(config.write_queue_nums, config.read_queue_nums)
        if queue_id >= queues:
            raise InvalidParameter(
                f"the topic {topic} has no queue {queue_id}: it has {queues} queues, from 0 on",
                hint="the producer's route may be out of date; it is updated every 30 s",
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
        for queue in self._store.queues.of(config.topic_name.encode()):
            queue.writable = False

    def _persist_and_register(self) -> None:
        self._effects.put(PersistSoon(self.table))
        self._effects.put(RegisterSoon())


def refuse_internal(topic: str) -> None:
    """Raise NoPermission for a topic that only the broker reads and has offsets on."""
    if is_internal_topic(topic):
        raise NoPermission(
            f"the topic {topic} is internal: clients may not read it or change offsets on it",
            hint="mqadmin queryMsgByKey and queryMsgByUniqueKey find its messages",
        )


def _topic(name: str, queues: int = 1, perm: int = PERM_READ_WRITE) -> TopicConfig:
    return TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)


def _described(config: TopicConfig) -> str:
    queues = f"{config.write_queue_nums}/{config.read_queue_nums}"
    ordered = ", ordered" if config.order else ""
    return f"{config.topic_name} (write/read queues {queues}, perm {config.perm}{ordered})"


def _check_name(topic: str) -> None:
    fault = topic_fault(topic)
    if fault is not None:
        raise InvalidParameter(fault)
