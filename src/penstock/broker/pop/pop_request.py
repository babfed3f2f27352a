"""Reads and checks the requests of POP consumers, in RocketMQ's order."""

from dataclasses import dataclass

from penstock.broker.context import BrokerContext
from penstock.broker.filter.filters import TAG
from penstock.broker.pull.pull_subscription import ALL, SubscriptionError, Wanted, tag_hashes_of
from penstock.broker.topics import refuse_internal
from penstock.errors import BadFilter, InvalidParameter, NoPermission, Refused
from penstock.rpc.command import Command
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import PERM_READ, RETRY_TOPIC_PREFIX, ResponseCode, topic_fault
from penstock.wire.receipt_handle import RetryKind, retry_topic

MESSAGES_MAX = 32
"""Maximum number of messages of one pop."""
INVISIBLE_MS_MAX = 3 * 24 * 3600 * 1000
"""Maximum invisible time: RocketMQ's brokers are limited by the default range of their timer, and
messages in flight can't be deleted."""
WAIT_MS_MAX = 300_000
"""Maximum time that a pop is suspended; RocketMQ's clients use 15 to 30 s."""
NEWEST_QUEUES_MAX = 100_000
"""Most queues of a topic whose groups may begin with the newest message."""
RESPONSE_MARGIN_MS = 50
"""The response is sent this long before the client's timeout."""
MODE_MIN = 0


@dataclass(frozen=True, slots=True)
class PollRequest:
    """A request of a group for one queue of a topic, or all queues (-1)."""

    group: str
    topic: str
    queue_id: int
    count_max: int = 0
    ordered: bool = False
    attempt_id: str | None = None
    deadline_ms: int = 0  # until when the client waits


@dataclass(frozen=True, slots=True)
class PopRequest(PollRequest):
    """Fields of POP_MESSAGE."""

    invisible_ms: int = 0
    from_first: bool = True  # initial offset of a group without one
    wanted: Wanted = ALL


class LateRequest(Exception):  # noqa: N818  # not an error: it has its own response
    """The polling time of the request was over before it was read."""


class PopRequestReader:
    """Reads and checks the requests of POP consumers."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def pop(self, command: Command) -> PopRequest:
        """POP_MESSAGE; raises LateRequest if its polling time is over."""
        wait_ms, born_ms = command.i64("pollTime"), command.i64_or("bornTime", 0) or command.now_ms
        if command.now_ms - born_ms - wait_ms > 500:
            raise LateRequest
        count_max = command.i32("maxMsgNums")
        if count_max > MESSAGES_MAX:
            raise InvalidParameter.over(
                "the pop requests too many messages (maxMsgNums)",
                figure=count_max,
                limit=MESSAGES_MAX,
                unit="messages",
            )
        invisible_ms = command.i64("invisibleTime")
        check_invisible_ms(invisible_ms)
        mode = command.i32("initMode")
        group, topic, queue_id = self.allowed(command)
        fault = topic_fault(retry_topic(topic, group, RetryKind.V1))
        if fault is not None and not topic.startswith(RETRY_TOPIC_PREFIX):
            raise InvalidParameter(
                f"the names of the group and the topic are too long for a retry topic: {fault}",
                hint="the name of the retry topic contains both; use shorter names",
            )
        if mode != MODE_MIN and queue_id < 0:
            self._refuse_too_many_queues(topic)
        return PopRequest(
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

    def _refuse_too_many_queues(self, topic: str) -> None:
        """A group that begins with the newest message needs an offset for each queue at once, also
        for queues without messages: it begins with the first message that arrives there."""
        queues = self._context.topics.need(topic).read_queue_nums
        if queues > NEWEST_QUEUES_MAX:
            raise InvalidParameter.over(
                f"a group can't begin with the newest message in all queues of the topic {topic}",
                figure=queues,
                limit=NEWEST_QUEUES_MAX,
                unit="queues",
                hint="begin with the first message (CONSUME_FROM_FIRST_OFFSET, initMode 0), pop "
                "single queues, or reduce the queues of the topic",
            )

    def notification(self, command: Command) -> PollRequest:
        """NOTIFICATION."""
        wait_ms, born_ms = command.i64("pollTime"), command.i64_or("bornTime", 0) or command.now_ms
        group, topic, queue_id = self.allowed(command)
        return PollRequest(
            group,
            topic,
            queue_id,
            0,
            command.truth("order"),
            command.ext.get("attemptId") or None,
            _deadline(command.now_ms, born_ms, wait_ms),
        )

    def peek(self, command: Command) -> PollRequest:
        """PEEK_MESSAGE."""
        count_max = command.i32("maxMsgNums")
        group, topic, queue_id = self.allowed(command)
        return PollRequest(group, topic, queue_id, max(1, min(count_max, MESSAGES_MAX)))

    def allowed(self, command: Command) -> tuple[str, str, int]:
        """Group, topic and queue, if broker, topic and group permit reading."""
        context = self._context
        group, topic = command.text("consumerGroup"), command.text("topic")
        queue_id = command.i32("queueId")
        broker = context.settings.current.broker
        if not broker.permission & PERM_READ:
            raise NoPermission(
                f"the broker {broker.name} may not be read",
                hint="its setting permission (brokerPermission) has no read permission",
            )
        self.readable(topic, queue_id)
        if not context.groups.find(group, command.now_ms, command.client).consume_enable:
            raise NoPermission(
                f"consumption is disabled for the group {group}",
                hint="enable it with mqadmin updateSubGroup -s true",
            )
        if not context.groups.may_read(group, topic):
            raise NoPermission(
                f"the group {group} may not read the topic {topic}",
                hint="an administrator revoked the permission; mqadmin can grant it again",
            )
        return group, topic, max(queue_id, -1)

    def readable(self, topic: str, queue_id: int) -> TopicConfig:
        """The topic, if it is readable and has this queue."""
        refuse_internal(topic)
        config = self._context.topics.need(topic)
        if not config.perm & PERM_READ:
            raise NoPermission(
                f"the topic {topic} may not be read: its permission is {config.perm}",
                hint="allow it with mqadmin updateTopicPerm -p 6",
            )
        if queue_id >= config.read_queue_nums:
            raise InvalidParameter(
                f"the topic {topic} has no read queue {queue_id}: "
                f"it has {config.read_queue_nums}, numbered from 0"
            )
        return config

    def _wanted(self, kind: str, expression: str) -> Wanted:
        if not expression:
            return ALL
        if kind == TAG:
            return Wanted(tag_hashes_of(expression))
        context = self._context
        try:
            context.filters.check_kind(kind, context.settings.current.broker.property_filter)
            return Wanted(filter=context.filters.get(expression))
        except Refused as error:
            bad = isinstance(error, BadFilter)
            code = ResponseCode.SUBSCRIPTION_PARSE_FAILED if bad else error.code
            raise SubscriptionError(code, error.remark()) from None


def check_invisible_ms(invisible_ms: int) -> None:
    """Refuse an invisible time that is out of range."""
    if invisible_ms < 0:
        raise InvalidParameter(f"the invisible time must not be negative: {invisible_ms} ms")
    if invisible_ms > INVISIBLE_MS_MAX:
        raise InvalidParameter.over(
            "the invisible time is too long (invisibleTime)",
            figure=invisible_ms,
            limit=INVISIBLE_MS_MAX,
            unit="ms",
            hint="use a shorter time and renew it while messages are processed",
        )


def _deadline(now_ms: int, born_ms: int, wait_ms: int) -> int:
    """Until when the client waits; its clock may differ, so never longer than `wait_ms`."""
    if wait_ms <= 0:
        return 0
    wait_ms = min(wait_ms, WAIT_MS_MAX)
    return min(born_ms + wait_ms, now_ms + wait_ms) - RESPONSE_MARGIN_MS
