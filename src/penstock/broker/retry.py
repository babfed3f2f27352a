"""Messages that a consumer could not handle: once more later, at last among the dead letters.

| | |
|---|---|
| `%RETRY%group` | holds what a group gets once more; messages come here through the delay levels |
| `%DLQ%group` | holds what it could not handle after the last time; one queue |

A consumer hands a message back by its place in the log (CONSUMER_SEND_MSG_BACK). If that fails it
sends the message itself, to the retry topic, which the send path shows to `place`.
"""

import logging
from collections import Counter
from typing import Final

from penstock.broker.answers import Answer, Encoded, InThread, Reply
from penstock.broker.command import Command
from penstock.broker.delay import delay_level
from penstock.broker.parts import Parts
from penstock.broker.router import Row
from penstock.errors import MessageIllegal, NoPermission, NotWriteable, PenstockError, Refused
from penstock.store.consumequeue import ConsumeQueue
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.wire.bodies import SubscriptionGroupConfig
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    PERM_READ_WRITE,
    PERM_WRITE,
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_WAIT,
    RETRY_TOPIC_PREFIX,
    V3_4_9,
    RequestCode,
    ResponseCode,
)
from penstock.wire.message import StoredMessage, decode_message, encode_host, encode_properties
from penstock.wire.output import response
from penstock.wire.record import Record

log = logging.getLogger(__name__)

FIRST_LEVEL: Final = 3
"""Delay level of the first retry where the client leaves it to us; each later one is one higher."""
DEAD_LETTER_QUEUES: Final = 1

_I32_MAX: Final = (1 << 31) - 1
_TRANSACTION_MASK: Final = 0x0C
_COMMIT: Final = 0x08


def group_of(topic: str) -> str:
    """The group of a retry topic; one of POP consumers may name a topic behind it."""
    return topic.removeprefix(RETRY_TOPIC_PREFIX).partition("+")[0]


class Retry:
    """CONSUMER_SEND_MSG_BACK, and what becomes of sends that are delayed or retried."""

    def __init__(self, parts: Parts, host: bytes) -> None:
        self._parts = parts
        self._turn = 0
        self._record = Record(_I32_MAX)
        self._record.store_host = host
        self.dead: Counter[tuple[str, str]] = Counter()  # dead letters by (group, topic)

    def rows(self) -> list[Row]:
        return [Row(RequestCode.CONSUMER_SEND_MSG_BACK, self.take_back)]

    # --- sends

    def place(
        self, topic: str, queue_id: int, properties: dict[str, str], *, sys_flag: int,
        reconsumed: int, times_max: int | None, now_ms: int,
    ) -> ConsumeQueue | None:  # fmt: skip
        """Where a message goes instead of the queue it was sent to, or None.

        What the detour has to know later is noted in its properties.
        """
        if topic.startswith(RETRY_TOPIC_PREFIX):
            group = group_of(topic)
            config = self._parts.groups.find(group, now_ms)
            most = config.retry_max_times if times_max is None else times_max
            # Who consumes in order has tried often enough: nothing comes back out of order.
            if reconsumed > most or self._parts.locks.is_locked(group, now_ms):
                properties[PROPERTY_DELAY] = "-1"
                self._note_dead(group, properties.get(PROPERTY_RETRY_TOPIC, topic), properties)
                return self._dead_letters(group, now_ms)
        level = delay_level(properties)
        if level > 0 and sys_flag & _TRANSACTION_MASK in (0, _COMMIT):
            return self._parts.delay.park(topic, queue_id, properties, level)
        return None

    def check_room(self, record_bytes: int, topic: str) -> None:
        """Refuse a message that could be parked, but not be delivered."""
        self._parts.delay.check_room(record_bytes, topic)

    # --- messages that are handed back

    def take_back(self, command: Command) -> Answer:
        """Store a message once more, for later or among the dead letters of its group."""
        offset, group = command.i64("offset"), command.text("group")
        level = command.i32("delayLevel")
        parts = self._parts
        config = parts.groups.find(group, command.now_ms)
        broker = parts.settings.current.broker
        if not broker.permission & PERM_WRITE:
            raise NoPermission(
                f"the broker {broker.name} takes no messages",
                hint="its permission is set so (brokerPermission)",
            )
        if config.retry_queue_nums <= 0:  # the group wants no retries
            return Reply()
        queue = self._retries(config, command.now_ms)
        confirmed = parts.store.confirmed

        def store(data: bytes | None) -> Answer:
            if data is None:
                raise Refused(f"look message by offset failed, {offset}: none begins there")
            return self._store_again(decode_message(data), queue, config, level, command)

        return InThread(lambda: parts.store.lookup.record(offset, confirmed), store)

    def _store_again(
        self, message: StoredMessage, queue: ConsumeQueue, config: SubscriptionGroupConfig,
        level: int, command: Command,
    ) -> Answer:  # fmt: skip
        group, now_ms = config.group_name, command.now_ms
        refusal = self._parts.access.check_read(command, message.topic)
        if refusal is not None:
            return refusal
        properties = dict(message.properties)
        topic = properties.setdefault(PROPERTY_RETRY_TOPIC, message.topic)
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.offset_id)
        properties[PROPERTY_WAIT] = "false"
        dead = message.reconsume_times >= _times_max(config, command) or level < 0
        if dead:
            properties[PROPERTY_DELAY] = "0"
            queue = self._dead_letters(group, now_ms)
        else:
            level = level or FIRST_LEVEL + message.reconsume_times
            properties[PROPERTY_DELAY] = str(level)
            real = queue.topic.decode()
            queue = self._parts.delay.park(real, queue.queue_id, properties, level)
        self._put(message, properties, queue, now_ms)
        self._parts.stats.sent_back(group, topic)
        if dead:
            self._note_dead(group, topic, properties)
        return self._stored(command)

    def _put(
        self, message: StoredMessage, properties: dict[str, str], queue: ConsumeQueue, now_ms: int
    ) -> None:
        record, path = self._record, self._parts.store.path
        record.fill(queue.topic, message.body, encode_properties(properties))
        record.queue_id = queue.queue_id
        record.flag = message.flag
        record.sys_flag = message.sys_flag
        record.born_ms = message.born_ms
        record.born_host = encode_host(message.born_host)
        record.reconsume_times = message.reconsume_times + 1
        status = path.check(record)
        if status == PUT_OK:
            status = path.put_in(record, queue, now_ms)
        record.release()
        if status == ILLEGAL:
            raise MessageIllegal(f"the message can't be stored again (problem {path.problem})")
        if status != PUT_OK:
            if isinstance(path.fault, PenstockError):
                raise path.fault
            raise NotWriteable(f"the message can't be stored: {path.fault}")

    def _stored(self, command: Command) -> Answer:
        """The answer. The consumer then commits the original, so under sync flush it waits."""
        if command.oneway:
            return None
        store = self._parts.store
        if not store.flusher.group_commit:
            return Reply()
        late = response(
            ResponseCode.FLUSH_DISK_TIMEOUT, command.opaque, command.encoding,
            remark="stored, but not on the disk within flush_timeout_ms",
        )  # fmt: skip
        return Encoded(response(0, command.opaque, command.encoding), late, store.log.end)

    # --- where they go

    def _retries(self, config: SubscriptionGroupConfig, now_ms: int) -> ConsumeQueue:
        """The next queue of a group's retry topic."""
        topics, name = self._parts.topics, RETRY_TOPIC_PREFIX + config.group_name
        topic = topics.ensure(name, config.retry_queue_nums, PERM_READ_WRITE, now_ms)
        queues = max(min(config.retry_queue_nums, topic.read_queue_nums), 1)
        self._turn += 1
        return topics.admit(
            name, self._turn % queues, template="", template_queues=0, now_ms=now_ms
        )

    def _dead_letters(self, group: str, now_ms: int) -> ConsumeQueue:
        name = DLQ_TOPIC_PREFIX + group
        self._parts.topics.ensure(name, DEAD_LETTER_QUEUES, PERM_READ_WRITE, now_ms)
        queue = self._parts.store.make_queue(name.encode(), 0)
        assert queue is not None
        return queue

    def _note_dead(self, group: str, topic: str, properties: dict[str, str]) -> None:
        self.dead[group, topic] += 1
        log.info(
            "a message of %s goes to the dead letters of %s: %s",
            topic, group, properties.get("UNIQ_KEY"),
        )  # fmt: skip


def _times_max(config: SubscriptionGroupConfig, command: Command) -> int:
    """How often a message may be retried: what the client says, where it may say it."""
    if command.version >= V3_4_9:
        return command.i32_or("maxReconsumeTimes", config.retry_max_times)
    return config.retry_max_times
