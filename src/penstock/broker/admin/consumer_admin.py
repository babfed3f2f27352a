"""Who is connected and consumes what, and questions that only a client itself can answer."""

from collections.abc import Iterable

from penstock.broker.consumers.clients import GroupMember
from penstock.broker.context import BrokerContext
from penstock.errors import BodyError, ConsumerNotOnline, Refused
from penstock.rpc.answers import Answer, CallClient, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_with
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
    EXT_ACCESS_KEY,
    EXT_SECURITY_TOKEN,
    EXT_SIGNATURE,
    V3_0_7,
    V3_1_8,
    RequestCode,
    ResponseCode,
    language_name,
)
from penstock.wire.message_ids import decode_offset_id

RELAY_MS = 10_000
"""How long a consumer has to answer a question that is passed on."""
STATUS_MS = 5_000
"""How long each consumer of a group has to tell its offsets."""

_CREDENTIALS = frozenset({EXT_ACCESS_KEY, EXT_SECURITY_TOKEN, EXT_SIGNATURE})

OffsetsByClient = dict[str, dict[MessageQueue, int]]


class ConsumerHandlers:
    """Connections, subscriptions, and requests passed on to clients."""

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

    # --- who is there

    def consumer_connections(self, command: Command) -> Answer:
        """The connected consumers of a group and what they subscribe to."""
        name = command.text("consumerGroup")
        group = self._context.clients.consumer_group(name)
        if group is None:
            raise ConsumerNotOnline(f"no consumer of the group {name} is connected")
        return reply_with(
            ConsumerConnection(
                connection_set=_connections(group.members.values()),
                subscription_table=dict(group.subscriptions),
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
        return reply_with(ProducerConnection(connection_set=_connections(members)))

    def all_producers(self, command: Command) -> Answer:
        """Every connected producer, by group."""
        return reply_with(
            ProducerTableInfo(
                data={
                    group: [_producer(member) for member in members]
                    for group, members in self._context.clients.producer_groups().items()
                }
            )
        )

    def groups_of_topic(self, command: Command) -> Answer:
        """The groups that consume a topic, or did."""
        topic = command.text("topic")
        groups = {
            *self._context.clients.groups_of_topic(topic),
            *self._context.offsets.groups_of_topic(topic),
        }
        return reply_with(GroupList(group_list=sorted(groups)))

    def topics_of_group(self, command: Command) -> Answer:
        """The topics on which a group has made progress."""
        topics = self._context.offsets.topics_of_group(command.text("group"))
        return reply_with(TopicList(topic_list=topics, broker_addr=self._context.address))

    def subscription(self, command: Command) -> Answer:
        """What a connected group wants of a topic; nothing of it if it does not subscribe."""
        group, topic = command.text("group"), command.text_or("topic")
        data = self._context.clients.subscription(group, topic)
        return reply_with(
            QuerySubscriptionResponseBody(subscription_data=data, group=group, topic=topic)
        )

    # --- what only they know

    def running_info(self, command: Command) -> Answer:
        """What a consumer says about itself."""
        member = self._consumer(command)
        return _pass_on(command, member, command.ext, command.body)

    def consume_directly(self, command: Command) -> Answer:
        """Have a consumer consume one message now."""
        member = self._consumer(command)
        store = self._context.store
        offset = decode_offset_id(command.text("msgId")).offset
        confirm_offset = store.confirm_offset

        def ask(record: bytes | None) -> Answer:
            if record is None:
                raise Refused(f"no message begins at the log offset {offset}")
            return _pass_on(command, member, self._direct_fields(command), record)

        return InThread(lambda: store.lookup.record(offset, confirm_offset), ask)

    def client_offsets(self, command: Command) -> Answer:
        """Where the consumers of a group are by their own account; all, or the one named."""
        topic, name = command.text("topic"), command.text("group")
        group = self._context.clients.consumer_group(name)
        only = command.text_or("clientAddr").strip()
        members = list(group.members.values()) if group is not None else []
        if not members:
            raise Refused(f"no consumer of the group {name} is connected")
        for member in members:
            _need_version(member, V3_0_7, "tell its offsets")
        asked = [member for member in members if not only or member.client_id == only]
        ext = {"topic": topic, "group": name}
        return _ask_each(asked, ext, {}, command.now_ms)

    def _consumer(self, command: Command) -> GroupMember:
        group, client_id = command.text("consumerGroup"), command.text_or("clientId")
        member = self._context.clients.find_consumer(group, client_id)
        if member is None:
            raise Refused(f"the consumer {client_id} of the group {group} is not connected")
        _need_version(member, V3_1_8, "be asked for its state")
        return member

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


def _pass_on(command: Command, member: GroupMember, ext: dict[str, str], body: bytes) -> CallClient:
    timeout = Reply(
        ResponseCode.CONSUME_MSG_TIMEOUT,
        remark=f"the consumer {member.client_id} did not answer within {RELAY_MS} ms",
    )
    public = {name: value for name, value in ext.items() if name not in _CREDENTIALS}
    deadline_ms = command.now_ms + RELAY_MS
    return CallClient(member.client, command.code, public, body, _as_is, deadline_ms, timeout)


def _as_is(reply: Reply) -> Answer:
    return reply


def _ask_each(
    members: list[GroupMember], ext: dict[str, str], told: OffsetsByClient, begun_ms: int
) -> Answer:
    """Ask one member after the other; if one does not answer, what was told so far is given."""
    so_far = reply_with(GetConsumerStatusBody(consumer_table=told))
    if not members:
        return so_far
    member, rest = members[0], members[1:]
    deadline_ms = begun_ms + STATUS_MS

    def go_on(reply: Reply) -> Answer:
        offsets = _told(reply)
        now_told = told if offsets is None else {**told, member.client_id: offsets}
        return _ask_each(rest, ext, now_told, deadline_ms)

    code = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
    return CallClient(member.client, code, ext, b"", go_on, deadline_ms, so_far)


def _told(reply: Reply) -> dict[MessageQueue, int] | None:
    """The offsets in a client's answer; what it garbles is its own loss."""
    if reply.code != ResponseCode.SUCCESS or not reply.body:
        return None
    try:
        return fastjson.decode(reply.body, GetConsumerStatusBody).message_queue_table
    except BodyError:
        return None


def _need_version(member: GroupMember, version: int, what: str) -> None:
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
        remote_ip=f"/{member.address}",  # Java's way to write an address without a name
        language=language_name(member.language),
        version=member.version,
        last_update_timestamp=member.seen_ms,
    )
