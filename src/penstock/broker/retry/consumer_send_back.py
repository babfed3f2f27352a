"""CONSUMER_SEND_MSG_BACK: a consumer sends back a message that it could not process.

The message is stored again in `%RETRY%group`, through a delay level, or in `%DLQ%group` after the
last retry. The request names the message by its log offset. If it fails, the consumer sends the
message to the retry topic itself (`dead_letters`).
"""

from typing import Final

from penstock.broker.auto_creations import BROKER
from penstock.broker.context import BrokerContext
from penstock.broker.retry.dead_letter_queues import DeadLetterQueues
from penstock.errors import NoPermission, Refused
from penstock.rpc.answers import Answer, InThread, Reply, reply_when_flushed
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import PUT_OK
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from penstock.wire.codes import (
    PERM_READ_WRITE,
    PERM_WRITE,
    POP_RETRY_PROPERTIES,
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_WAIT,
    RETRY_TOPIC_PREFIX,
    V3_4_9,
    RequestCode,
    is_internal_topic,
)
from penstock.wire.message import decode_message

FIRST_LEVEL: Final = 3
"""Delay level of the first retry if the client sets none; each later one is one higher."""


class ConsumerSendBack:
    """Stores messages again that consumers send back; `host` is the broker's address."""

    def __init__(self, context: BrokerContext, dead_letters: DeadLetterQueues, host: bytes) -> None:
        self._context = context
        self._dead_letters = dead_letters
        self._host = host
        self._round_robin = 0

    def rows(self) -> list[Row]:
        return [Row(RequestCode.CONSUMER_SEND_MSG_BACK, self.send_back)]

    def send_back(self, command: Command) -> Answer:
        """Store a message again: for a later retry, or in the dead letters of its group."""
        offset, group = command.i64("offset"), command.text("group")
        level = command.i32("delayLevel")
        context = self._context
        config = context.groups.find(group, command.now_ms, command.client)
        broker = context.settings.current.broker
        if not broker.permission & PERM_WRITE:
            raise NoPermission(
                f"the broker {broker.name} may not be written to",
                hint="its setting permission (brokerPermission) has no write permission",
            )
        if config.retry_queue_nums <= 0:  # the group has no retries
            return Reply()
        queue = self._retry_queue(config, command.now_ms)
        confirm_offset = context.store.confirm_offset

        def store(data: bytes | None) -> Answer:
            if data is None:
                raise Refused(f"look message by offset failed, {offset}: there is no message")
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
        if is_internal_topic(message.topic):  # no consumer can have received it
            raise Refused(f"the message at {message.physical_offset} is not delivered yet")
        rewriter.read(data)
        refusal = self._context.access.check_read(command, message.topic)
        if refusal is not None:
            return refusal
        properties = dict(message.properties)
        topic = properties.setdefault(PROPERTY_RETRY_TOPIC, message.topic)
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.offset_id)
        properties[PROPERTY_WAIT] = "false"
        for name in POP_RETRY_PROPERTIES:
            properties.pop(name, None)
        dead = message.reconsume_times >= _times_max(config, command) or level < 0
        if dead:
            properties[PROPERTY_DELAY] = "0"
            queue = self._dead_letters.queue(group, now_ms)
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
            self._dead_letters.count(group, topic, properties)
        return self._stored(command)

    def _stored(self, command: Command) -> Answer:
        """The response; under sync flush it waits: the consumer commits the original after it."""
        return None if command.oneway else reply_when_flushed(self._context.store, command, Reply())

    def _retry_queue(self, config: SubscriptionGroupConfig, now_ms: int) -> ConsumeQueue:
        """The next queue of a group's retry topic."""
        topics, name = self._context.topics, RETRY_TOPIC_PREFIX + config.group_name
        topic = topics.ensure(name, config.retry_queue_nums, PERM_READ_WRITE, now_ms)
        queues = max(min(config.retry_queue_nums, topic.read_queue_nums), 1)
        self._round_robin += 1
        return topics.writable_queue(
            name,
            self._round_robin % queues,
            template="",
            template_queues=0,
            client=BROKER,
            now_ms=now_ms,
        )


def _times_max(config: SubscriptionGroupConfig, command: Command) -> int:
    """How often a message may be retried: by the client, if its version sends that."""
    if command.version >= V3_4_9:
        return command.i32_or("maxReconsumeTimes", config.retry_max_times)
    return config.retry_max_times
