"""What pops, peeks and notifications ask for, checked in RocketMQ's order."""

from dataclasses import dataclass

from penstock.broker.context import BrokerContext
from penstock.broker.filter.filters import TAG
from penstock.broker.pull import ALL, SubscriptionError, Wanted, expression_codes
from penstock.errors import BadFilter, InvalidParameter, NoPermission, Refused
from penstock.rpc.command import Command
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import PERM_READ, RETRY_TOPIC_PREFIX, ResponseCode, topic_fault
from penstock.wire.receipt_handle import RetryKind, retry_topic

MESSAGES_MAX = 32
"""Most messages of one pop."""
INVISIBLE_MS_MAX = 3 * 24 * 3600 * 1000
"""Longest time that messages are lent for: RocketMQ's brokers can't lend longer than their timer
reaches by default, and what is lent can't be deleted."""
WAIT_MS_MAX = 300_000
"""No pop is held longer than this; RocketMQ's clients wait 15 to 30 s."""
EARLY_MS = 50
"""So long before the client gives up it is answered."""
MODE_MIN = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A queue of a topic, or all of them (-1), for a group."""

    group: str
    topic: str
    queue_id: int
    count_max: int = 0
    ordered: bool = False
    attempt_id: str | None = None
    deadline_ms: int = 0  # how long the client waits


@dataclass(frozen=True, slots=True)
class PopAsk(Ask):
    """A pop."""

    invisible_ms: int = 0
    from_first: bool = True  # where a group begins that has no progress
    wanted: Wanted = ALL


class LateRequest(Exception):  # noqa: N818  # no error of anybody: it has an answer of its own
    """The client has given up waiting before the request was read."""


class Requests:
    """Reads requests of POP consumers."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def pop(self, command: Command) -> PopAsk:
        """POP_MESSAGE; LateRequest if nobody waits for the answer any more."""
        wait_ms, born_ms = command.i64("pollTime"), command.i64_or("bornTime", 0) or command.now_ms
        if command.now_ms - born_ms - wait_ms > 500:
            raise LateRequest
        count_max = command.i32("maxMsgNums")
        if count_max > MESSAGES_MAX:
            raise InvalidParameter.over(
                "the pop asks for too many messages",
                figure=count_max,
                limit=MESSAGES_MAX,
                unit="messages",
            )
        invisible_ms = command.i64("invisibleTime")
        check_invisible(invisible_ms)
        mode = command.i32("initMode")
        group, topic, queue_id = self.allowed(command)
        fault = topic_fault(retry_topic(topic, group, RetryKind.V1))
        if fault is not None and not topic.startswith(RETRY_TOPIC_PREFIX):
            raise InvalidParameter(
                f"the names of the group and the topic are too long together: {fault}",
                hint="messages that are not acknowledged come back in a topic of both names",
            )
        return PopAsk(
            group,
            topic,
            queue_id,
            max(count_max, 1),
            command.truth("order"),
            command.ext.get("attemptId") or None,
            _deadline(command.now_ms, born_ms, wait_ms),
            invisible_ms,
            mode == MODE_MIN,
            self._wanted(command.text_or("expType", TAG), command.text_or("exp")),
        )

    def notification(self, command: Command) -> Ask:
        """NOTIFICATION."""
        wait_ms, born_ms = command.i64("pollTime"), command.i64_or("bornTime", 0) or command.now_ms
        group, topic, queue_id = self.allowed(command)
        return Ask(
            group,
            topic,
            queue_id,
            0,
            command.truth("order"),
            command.ext.get("attemptId") or None,
            _deadline(command.now_ms, born_ms, wait_ms),
        )

    def peek(self, command: Command) -> Ask:
        """PEEK_MESSAGE."""
        count_max = command.i32("maxMsgNums")
        group, topic, queue_id = self.allowed(command)
        return Ask(group, topic, queue_id, max(1, min(count_max, MESSAGES_MAX)))

    def allowed(self, command: Command) -> tuple[str, str, int]:
        """Group, topic and queue, if broker, topic and group allow to read them."""
        context = self._context
        group, topic = command.text("consumerGroup"), command.text("topic")
        queue_id = command.i32("queueId")
        broker = context.settings.current.broker
        if not broker.permission & PERM_READ:
            raise NoPermission(
                f"the broker {broker.name} does not serve pops",
                hint="its permission is set so (brokerPermission)",
            )
        self.readable(topic, queue_id)
        if not context.groups.find(group, command.now_ms).consume_enable:
            raise NoPermission(
                f"the group {group} may not consume",
                hint="switch it on with mqadmin updateSubGroup -s true",
            )
        if not context.groups.may_read(group, topic):
            raise NoPermission(
                f"the group {group} may not read the topic {topic}",
                hint="it was forbidden to this group; mqadmin can allow it again",
            )
        return group, topic, max(queue_id, -1)

    def readable(self, topic: str, queue_id: int) -> TopicConfig:
        """The topic, if it may be read and has this queue."""
        config = self._context.topics.need(topic)
        if not config.perm & PERM_READ:
            raise NoPermission(
                f"the topic {topic} may not be read: its permission is {config.perm}",
                hint="mqadmin updateTopicPerm -p 6 allows it",
            )
        if queue_id >= config.read_queue_nums:
            raise InvalidParameter(
                f"the topic {topic} has no queue {queue_id} to read: there are "
                f"{config.read_queue_nums}, counted from 0"
            )
        return config

    def _wanted(self, kind: str, expression: str) -> Wanted:
        if not expression:
            return ALL
        if kind == TAG:
            return Wanted(expression_codes(expression))
        context = self._context
        try:
            context.filters.check_kind(kind, context.settings.current.broker.property_filter)
            return Wanted(filter=context.filters.get(expression))
        except Refused as error:
            bad = isinstance(error, BadFilter)
            code = ResponseCode.SUBSCRIPTION_PARSE_FAILED if bad else error.code
            raise SubscriptionError(code, error.remark()) from None


def check_invisible(invisible_ms: int) -> None:
    """Refuse a time that nothing can be lent for."""
    if invisible_ms < 0:
        raise InvalidParameter(f"messages can't be lent for {invisible_ms} ms")
    if invisible_ms > INVISIBLE_MS_MAX:
        raise InvalidParameter.over(
            "messages can't be lent that long (invisibleTime)",
            figure=invisible_ms,
            limit=INVISIBLE_MS_MAX,
            unit="ms",
            hint="lend them for a shorter time and extend it while they are worked on",
        )


def _deadline(now_ms: int, born_ms: int, wait_ms: int) -> int:
    """Until when the client waits. Its clock may be another one: never longer than it says."""
    if wait_ms <= 0:
        return 0
    wait_ms = min(wait_ms, WAIT_MS_MAX)
    return min(born_ms + wait_ms, now_ms + wait_ms) - EARLY_MS
