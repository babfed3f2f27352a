"""Connections and subscriptions of clients, and requests that the broker forwards to consumers."""

from collections.abc import Iterable

from penstock.broker.consumers.client_groups import GroupMember
from penstock.broker.context import BrokerContext
from penstock.errors import BodyError, ConsumerNotOnline, NoPermission, Refused
from penstock.rpc.answers import Answer, CallClient, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_from_pool, reply_with
from penstock.rpc.router import Row
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    Connection,
    ConsumerConnection,
    GetConsumerStatusBody,
    GroupList,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    QuerySubscriptionResponseBody,
)
from penstock.wire.bodies.client_bodies import MessageQueue, TopicList
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    EXT_ACCESS_KEY,
    EXT_SECURITY_TOKEN,
    EXT_SIGNATURE,
    RETRY_TOPIC_PREFIX,
    V3_0_7,
    V3_1_8,
    RequestCode,
    ResponseCode,
    is_internal_topic,
    language_name,
)
from penstock.wire.message import decode_message
from penstock.wire.message_ids import decode_offset_id
from penstock.wire.receipt_handle import plain_topic

CALL_MS = 10_000
"""Timeout of a request that is forwarded to a consumer."""
STATUS_CALL_MS = 5_000
"""Timeout of each consumer that is asked for its offsets."""

_CREDENTIALS = frozenset({EXT_ACCESS_KEY, EXT_SECURITY_TOKEN, EXT_SIGNATURE})

OffsetsByClient = dict[str, dict[MessageQueue, int]]


class ConsumerHandlers:
    """Handles requests for connections, and forwards requests to consumers."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.GET_CONSUMER_CONNECTION_LIST, self.consumer_connections),
            Row(RequestCode.GET_PRODUCER_CONNECTION_LIST, self.producer_connections),
            Row(RequestCode.GET_ALL_PRODUCER_INFO, self.all_producers),
            Row(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, self.groups_of_topic),
            Row(RequestCode.QUERY_TOPICS_BY_CONSUMER, self.topics_of_group),
            Row(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, self.subscription),
            Row(RequestCode.GET_CONSUMER_RUNNING_INFO, self.running_info),
            Row(RequestCode.CONSUME_MESSAGE_DIRECTLY, self.consume_directly),
            Row(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, self.client_offsets),
        ]

    # --- connections

    def consumer_connections(self, command: Command) -> Answer:
        """The connected consumers of a group and their subscriptions."""
        name = command.text("consumerGroup")
        group = self._context.clients.consumer_group(name)
        if group is None:
            raise ConsumerNotOnline(f"no consumer of the group {name} is connected")
        members, subscriptions = list(group.members.values()), dict(group.subscriptions)
        return reply_from_pool(
            lambda: ConsumerConnection(
                connection_set=_connections(members),
                subscription_table=subscriptions,
                consume_type=group.consume_type,
                message_model=group.message_model,
                consume_from_where=group.consume_from_where,
            )
        )

    def producer_connections(self, command: Command) -> Answer:
        """The connected producers of a group."""
        group = command.text("producerGroup")
        members = self._context.clients.producers(group)
        if not members:
            raise Refused(f"no producer of the group {group} is connected")
        return reply_from_pool(lambda: ProducerConnection(connection_set=_connections(members)))

    def all_producers(self, command: Command) -> Answer:
        """All connected producers by group."""
        groups = self._context.clients.producer_groups()
        return reply_from_pool(
            lambda: ProducerTableInfo(
                data={
                    group: [_producer(member) for member in members]
                    for group, members in groups.items()
                }
            )
        )

    def groups_of_topic(self, command: Command) -> Answer:
        """The groups that consume a topic or have offsets on it."""
        topic = command.text("topic")
        groups = {
            *self._context.clients.groups_of_topic(topic),
            *self._context.offsets.groups_of_topic(topic),
        }
        return reply_from_pool(lambda: GroupList(group_list=sorted(groups)))

    def topics_of_group(self, command: Command) -> Answer:
        """The topics on which a group has offsets."""
        topics = self._context.offsets.topics_of_group(command.text("group"))
        address = self._context.address
        return reply_from_pool(lambda: TopicList(topic_list=topics, broker_addr=address))

    def subscription(self, command: Command) -> Answer:
        """The subscription of a connected group to a topic, if any."""
        group, topic = command.text("group"), command.text_or("topic")
        data = self._context.clients.subscription(group, topic)
        return reply_with(
            QuerySubscriptionResponseBody(subscription_data=data, group=group, topic=topic)
        )

    # --- requests to consumers

    def running_info(self, command: Command) -> Answer:
        """The run-time information of a consumer."""
        member = self._consumer(command)
        return _call_consumer(command, member, command.ext, command.body)

    def consume_directly(self, command: Command) -> Answer:
        """Let a consumer consume one message now."""
        member = self._consumer(command)
        store = self._context.store
        offset = decode_offset_id(command.text("msgId")).offset
        confirm_offset = store.confirm_offset

        def ask(record: bytes | None) -> Answer:
            if record is None:
                raise Refused(f"there is no message at log offset {offset}")
            topic = decode_message(record).topic
            refusal = self._context.access.check_read(command, topic)
            if refusal is not None:
                return refusal
            self._require_subscription(command.text("consumerGroup"), topic)
            return _call_consumer(command, member, self._direct_fields(command), record)

        return InThread(lambda: store.lookup.record(offset, confirm_offset), ask)

    def client_offsets(self, command: Command) -> Answer:
        """The offsets that the consumers of a group report, of all or of one client."""
        topic, name = command.text("topic"), command.text("group")
        group = self._context.clients.consumer_group(name)
        only = command.text_or("clientAddr").strip()
        members = list(group.members.values()) if group is not None else []
        if not members:
            raise Refused(f"no consumer of the group {name} is connected")
        for member in members:
            _require_version(member, V3_0_7, "report its offsets")
        selected = [member for member in members if not only or member.client_id == only]
        ext = {"topic": topic, "group": name}
        return _query_each(selected, ext, {}, command.now_ms)

    def _consumer(self, command: Command) -> GroupMember:
        group, client_id = command.text("consumerGroup"), command.text_or("clientId")
        member = self._context.clients.find_consumer(group, client_id)
        if member is None:
            raise Refused(f"the consumer {client_id} of the group {group} is not connected")
        _require_version(member, V3_1_8, "report its state")
        return member

    def _require_subscription(self, name: str, topic: str) -> None:
        """Refuse a message that no consumer of the group would receive."""
        group = self._context.clients.consumer_group(name)
        subscribed = group is not None and plain_topic(topic, name) in group.subscriptions
        own = (RETRY_TOPIC_PREFIX + name, DLQ_TOPIC_PREFIX + name)
        if not (subscribed or topic in own) or is_internal_topic(topic):
            raise NoPermission(
                f"the group {name} does not subscribe to the topic {topic} of the message",
                hint="name a message of a topic that the group consumes",
            )

    def _direct_fields(self, command: Command) -> dict[str, str]:
        context = self._context
        ext = {**command.ext, "brokerName": context.settings.current.broker.name}
        topic = context.topics.get(command.text_or("topic"))
        if topic is not None:
            ext["topicSysFlag"] = str(topic.topic_sys_flag)
        group = context.groups.get(command.text("consumerGroup"))
        if group is not None:
            ext["groupSysFlag"] = str(group.group_sys_flag)
        return ext


def _call_consumer(
    command: Command, member: GroupMember, ext: dict[str, str], body: bytes
) -> CallClient:
    timeout = Reply(
        ResponseCode.CONSUME_MSG_TIMEOUT,
        remark=f"the consumer {member.client_id} did not respond within {CALL_MS} ms",
    )
    public = {name: value for name, value in ext.items() if name not in _CREDENTIALS}
    deadline_ms = command.now_ms + CALL_MS
    return CallClient(member.client, command.code, public, body, _forward, deadline_ms, timeout)


def _forward(reply: Reply) -> Answer:
    return reply


def _query_each(
    members: list[GroupMember], ext: dict[str, str], statuses: OffsetsByClient, started_ms: int
) -> Answer:
    """Query the members one after another; after a timeout, return the results so far."""
    so_far = reply_with(GetConsumerStatusBody(consumer_table=statuses))
    if not members:
        return so_far
    member, rest = members[0], members[1:]
    deadline_ms = started_ms + STATUS_CALL_MS

    def next_member(reply: Reply) -> Answer:
        offsets = _decode_status(reply)
        updated = statuses if offsets is None else {**statuses, member.client_id: offsets}
        return _query_each(rest, ext, updated, deadline_ms)

    code = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
    return CallClient(member.client, code, ext, b"", next_member, deadline_ms, so_far)


def _decode_status(reply: Reply) -> dict[MessageQueue, int] | None:
    """The offsets in a client's response; None if it failed or is not valid."""
    if reply.code != ResponseCode.SUCCESS or not reply.body:
        return None
    try:
        return fastjson.decode(reply.body, GetConsumerStatusBody).message_queue_table
    except BodyError:
        return None


def _require_version(member: GroupMember, version: int, what: str) -> None:
    if member.version < version:
        raise Refused(
            f"the client {member.client_id} is too old to {what}: version {member.version}",
            hint="upgrade the client",
        )


def _connections(members: Iterable[GroupMember]) -> list[Connection]:
    return [
        Connection(
            client_id=member.client_id,
            client_addr=member.address,
            language=language_name(member.language),
            version=member.version,
        )
        for member in members
    ]


def _producer(member: GroupMember) -> ProducerInfo:
    return ProducerInfo(
        client_id=member.client_id,
        remote_ip=f"/{member.address}",  # as Java formats an address without a host name
        language=language_name(member.language),
        version=member.version,
        last_update_timestamp=member.seen_ms,
    )
