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

from penstock.broker.context import BrokerContext
from penstock.errors import NoPermission, Refused
from penstock.rpc.answers import Answer, InThread, Reply, reply_when_flushed
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import PUT_OK
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    PERM_READ_WRITE,
    PERM_WRITE,
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_WAIT,
    RETRY_TOPIC_PREFIX,
    TOPIC_SCHEDULE,
    TOPIC_TIMER,
    TOPIC_TRANS_HALF,
    TOPIC_TRANS_OP_HALF,
    V3_4_9,
    RequestCode,
)
from penstock.wire.message import decode_message

log = logging.getLogger(__name__)

FIRST_LEVEL: Final = 3
"""Delay level of the first retry where the client leaves it to us; each later one is one higher."""
DEAD_LETTER_QUEUES: Final = 1

_WAITING: Final = (TOPIC_TRANS_HALF, TOPIC_TRANS_OP_HALF, TOPIC_SCHEDULE, TOPIC_TIMER)


def group_of(topic: str) -> str:
    """The group of a retry topic; one of POP consumers may name a topic behind it."""
    return topic.removeprefix(RETRY_TOPIC_PREFIX).partition("+")[0]


class Retry:
    """CONSUMER_SEND_MSG_BACK, and the end of sends that were retried too often."""

    def __init__(self, context: BrokerContext, host: bytes) -> None:
        self._context = context
        self._turn = 0
        self._host = host
        self.dead: Counter[tuple[str, str]] = Counter()  # dead letters by (group, topic)

    def rows(self) -> list[Row]:
        return [Row(RequestCode.CONSUMER_SEND_MSG_BACK, self.take_back)]

    # --- sends

    def end(
        self,
        topic: str,
        properties: dict[str, str],
        reconsumed: int,
        times_max: int | None,
        now_ms: int,
    ) -> ConsumeQueue | None:
        """Where a message goes that is sent to a retry topic once too often; None for others."""
        group = group_of(topic)
        config = self._context.groups.find(group, now_ms)
        most = config.retry_max_times if times_max is None else times_max
        # Who consumes in order has tried often enough: nothing comes back out of order.
        if reconsumed <= most and not self._context.locks.is_locked(group, now_ms):
            return None
        properties[PROPERTY_DELAY] = "-1"
        self._note_dead(group, properties.get(PROPERTY_RETRY_TOPIC, topic), properties)
        return self.dead_letters(group, now_ms)

    # --- messages that are handed back

    def take_back(self, command: Command) -> Answer:
        """Store a message once more, for later or among the dead letters of its group."""
        offset, group = command.i64("offset"), command.text("group")
        level = command.i32("delayLevel")
        context = self._context
        config = context.groups.find(group, command.now_ms)
        broker = context.settings.current.broker
        if not broker.permission & PERM_WRITE:
            raise NoPermission(
                f"the broker {broker.name} takes no messages",
                hint="its permission is set so (brokerPermission)",
            )
        if config.retry_queue_nums <= 0:  # the group wants no retries
            return Reply()
        queue = self._retries(config, command.now_ms)
        confirm_offset = context.store.confirm_offset

        def store(data: bytes | None) -> Answer:
            if data is None:
                raise Refused(f"look message by offset failed, {offset}: none begins there")
            return self._store_again(data, queue, config, level, command)

        return InThread(lambda: context.store.lookup.record(offset, confirm_offset), store)

    def _store_again(
        self,
        data: bytes,
        queue: ConsumeQueue,
        config: SubscriptionGroupConfig,
        level: int,
        command: Command,
    ) -> Answer:
        group, now_ms = config.group_name, command.now_ms
        message, rewriter = decode_message(data), self._context.rewriter
        if message.topic in _WAITING:  # no consumer can have it
            raise Refused(f"the message at {message.physical_offset} still waits to be delivered")
        rewriter.read(data)
        refusal = self._context.access.check_read(command, message.topic)
        if refusal is not None:
            return refusal
        properties = dict(message.properties)
        topic = properties.setdefault(PROPERTY_RETRY_TOPIC, message.topic)
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.offset_id)
        properties[PROPERTY_WAIT] = "false"
        dead = message.reconsume_times >= _times_max(config, command) or level < 0
        if dead:
            properties[PROPERTY_DELAY] = "0"
            queue = self.dead_letters(group, now_ms)
        else:
            level = level or FIRST_LEVEL + message.reconsume_times
            properties[PROPERTY_DELAY] = str(level)
            real = queue.topic.decode()
            queue = self._context.delay.redirect(real, queue.queue_id, properties, level)
        status = rewriter.put(
            queue,
            now_ms,
            properties=properties,
            reconsumed=message.reconsume_times + 1,
            store_host=self._host,
        )
        if status != PUT_OK:
            raise rewriter.fault(status)
        self._context.stats.sent_back(group, topic)
        if dead:
            self._note_dead(group, topic, properties)
        return self._stored(command)

    def _stored(self, command: Command) -> Answer:
        """The answer. The consumer then commits the original, so under sync flush it waits."""
        return None if command.oneway else reply_when_flushed(self._context.store, command, Reply())

    # --- where they go

    def _retries(self, config: SubscriptionGroupConfig, now_ms: int) -> ConsumeQueue:
        """The next queue of a group's retry topic."""
        topics, name = self._context.topics, RETRY_TOPIC_PREFIX + config.group_name
        topic = topics.ensure(name, config.retry_queue_nums, PERM_READ_WRITE, now_ms)
        queues = max(min(config.retry_queue_nums, topic.read_queue_nums), 1)
        self._turn += 1
        return topics.writable_queue(
            name, self._turn % queues, template="", template_queues=0, now_ms=now_ms
        )

    def dead_letters(self, group: str, now_ms: int) -> ConsumeQueue:
        """The queue of a group's dead letters."""
        name = DLQ_TOPIC_PREFIX + group
        self._context.topics.ensure(name, DEAD_LETTER_QUEUES, PERM_READ_WRITE, now_ms)
        queue = self._context.store.make_queue(name.encode(), 0)
        assert queue is not None
        return queue

    def _note_dead(self, group: str, topic: str, properties: dict[str, str]) -> None:
        self.dead[group, topic] += 1
        log.info(
            "a message of %s goes to the dead letters of %s: %s",
            topic,
            group,
            properties.get("UNIQ_KEY"),
        )


def _times_max(config: SubscriptionGroupConfig, command: Command) -> int:
    """How often a message may be retried: what the client says, where it may say it."""
    if command.version >= V3_4_9:
        return command.i32_or("maxReconsumeTimes", config.retry_max_times)
    return config.retry_max_times
