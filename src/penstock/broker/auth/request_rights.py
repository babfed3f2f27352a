"""The rights that each request code requires.

They are those of Apache RocketMQ 5.4.0 wherever it requires any. Apache allows many codes to every
user with a valid signature (settings of the broker, subscription groups, lists of topics, lite
pulls, batch acks), and others if an optional field is missing. Penstock requires a right for every
code; a code without a row requires Update on the cluster:

- a code without a resource requires a right on the cluster, or on all topics;
- a request that names no resource of its type requires the right on all of them;
- a retry topic stands for its group, also if the request names another group; in acks of popped
  messages, a retry topic of POP stands for group and topic (for Apache, `g_t` is a group, so a user
  who may read g and t can't acknowledge);
- a request that names no resource at all (heartbeat of a producer) requires any right anywhere;
- a producer group may be denied (Pub), but needs no rule, as in Apache.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from penstock.broker.auth.policies import Action, RequiredRight, ResourceType
from penstock.rpc.command import Command
from penstock.wire.bodies.admin_bodies import CreateTopicListRequestBody, SubscriptionGroupList
from penstock.wire.bodies.client_bodies import (
    CheckClientRequestBody,
    HeartbeatData,
    LockBatchRequestBody,
    QueryAssignmentRequestBody,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    decode_batch_ack,
)
from penstock.wire.codes import RETRY_TOPIC_PREFIX, TOPIC_TRANS_HALF, RequestCode
from penstock.wire.receipt_handle import plain_topic

PUB, SUB, GET, LIST = Action.PUB, Action.SUB, Action.GET, Action.LIST
CREATE, UPDATE, DELETE = Action.CREATE, Action.UPDATE, Action.DELETE
TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER

_NO_CHANGE: Final = frozenset((PUB, SUB, GET, LIST, Action.ANY))

RightsOf: TypeAlias = Callable[[Command], list[RequiredRight]]


class CodeRights:
    """The rights that a request code requires."""

    __slots__ = ("by_body", "general", "is_admin_change", "required")

    def __init__(
        self,
        resource_type: ResourceType,
        actions: tuple[Action, ...],
        required: RightsOf,
        *,
        by_body: bool = False,
    ) -> None:
        self.required = required  # returns the rights of one request
        self.by_body = by_body  # whether they depend on the body
        self.general = RequiredRight(
            resource_type, None, actions
        )  # for the log, if the body is not decoded
        # Whether the code is a change by an administrator, which is logged.
        self.is_admin_change = not _NO_CHANGE.intersection(actions)


class RequestRights:
    """The rights of all request codes of one server."""

    def __init__(self, cluster: str) -> None:
        rows = {
            **_of_clients(),
            **_of_admin_tools(),
            **_by_body(),
            **_without_resource(cluster),
        }
        self._rows: dict[int, CodeRights] = {int(code): rights for code, rights in rows.items()}
        self._default = _fixed(CLUSTER, cluster, UPDATE)

    def of(self, code: int) -> CodeRights:
        """The rights that a code requires."""
        return self._rows.get(code, self._default)


def right_on_topic(topic: str, *actions: Action) -> RequiredRight:
    """The right to one of the actions on a topic."""
    return _right_on(TOPIC, topic, actions)


# --- forms of rows -------------------------------------------------------------------------------


def _fixed(resource_type: ResourceType, name: str | None, *actions: Action) -> CodeRights:
    """Always the same resource."""
    required = [RequiredRight(resource_type, name, actions)]
    return CodeRights(resource_type, actions, lambda command: required)


def _fields(*actions: Action, **fields: ResourceType | tuple[ResourceType, str]) -> CodeRights:
    """The resources in these header fields; with a separator, a field names several."""
    resources = [
        (name, *(resource_type if isinstance(resource_type, tuple) else (resource_type, "")))
        for name, resource_type in fields.items()
    ]
    first = resources[0][1]

    def required(command: Command) -> list[RequiredRight]:
        found = []
        for name, resource_type, splitter in resources:
            value = command.ext.get(name)
            if value:
                names = value.split(splitter) if splitter else [value]
                found += [_right_on(resource_type, text, actions) for text in names if text]
        return found or [RequiredRight(first, None, actions)]

    return CodeRights(first, actions, required)


def _cloning() -> CodeRights:
    """The group that gets offsets, the topic, and the group whose offsets are read."""
    changed = _fields(UPDATE, destGroup=GROUP, topic=TOPIC)

    def required(command: Command) -> list[RequiredRight]:
        read = _right_on(GROUP, command.ext.get("srcGroup"), (GET,))
        return [*changed.required(command), read]

    return CodeRights(GROUP, (UPDATE,), required)


def _right_on(
    resource_type: ResourceType, name: str | None, actions: tuple[Action, ...]
) -> RequiredRight:
    if resource_type is TOPIC and name and name.startswith(RETRY_TOPIC_PREFIX):
        # A consumer sends messages to its own retry topic.
        consumer = tuple(action for action in actions if action is not PUB) or (SUB,)
        return RequiredRight(GROUP, _group(name), consumer)
    return RequiredRight(resource_type, name or None, actions)


def _group(name: str) -> str | None:
    return name.removeprefix(RETRY_TOPIC_PREFIX) or None


def _consuming(*actions: Action) -> CodeRights:
    """Topic and group of a consumer; the right on the group includes its retry topic."""

    def required(command: Command) -> list[RequiredRight]:
        return _consumption(command.ext.get("consumerGroup"), [command.ext.get("topic")], actions)

    return CodeRights(GROUP, actions, required)


def _acknowledging() -> CodeRights:
    """Like `_consuming`; a retry topic of POP stands for group and topic."""

    def required(command: Command) -> list[RequiredRight]:
        group, topic = command.ext.get("consumerGroup"), command.ext.get("topic")
        return _consumption(group, [plain_topic(topic, group) if topic and group else topic])

    return CodeRights(GROUP, (SUB,), required)


def _consumption(
    group: str | None, topics: Iterable[str | None], actions: tuple[Action, ...] = (SUB,)
) -> list[RequiredRight]:
    found = [RequiredRight(GROUP, _group(group) if group else None, actions)]
    for topic in topics:
        right = _right_on(TOPIC, topic, actions)
        if right not in found:
            found.append(right)
    return found


def _producing(group: str) -> RequiredRight:
    """The right to be a producer of a group. Apache's access lists do not have it, so it needs no
    rule."""
    return RequiredRight(GROUP, group, (PUB,), unless_denied=True)


def _field_or_any(
    field: str, resource_type: ResourceType, action: Action, *, otherwise: Action
) -> CodeRights:
    """The resource in a field; if the field is missing, a right on any resource."""
    any_resource = [RequiredRight(ResourceType.ANY, None, (otherwise,))]

    def required(command: Command) -> list[RequiredRight]:
        name = command.ext.get(field)
        return (
            [_right_on(resource_type, name, (action,))] if name and name.strip() else any_resource
        )

    return CodeRights(resource_type, (action,), required)


def _end_transaction() -> CodeRights:
    """The topic of a transaction. Answers to checks name the topic of half messages; the handler
    then checks the real topic (`AccessControl.check_write`)."""
    named = _field_or_any("topic", TOPIC, PUB, otherwise=PUB)
    any_resource = [RequiredRight(ResourceType.ANY, None, (PUB,))]

    def required(command: Command) -> list[RequiredRight]:
        of_a_check = command.ext.get("topic") == TOPIC_TRANS_HALF
        group = command.ext.get("producerGroup")
        return [
            *(any_resource if of_a_check else named.required(command)),
            *([_producing(group)] if group else []),
        ]

    return CodeRights(TOPIC, (PUB,), required)


# --- rows ----------------------------------------------------------------------------------------


def _of_clients() -> dict[RequestCode, CodeRights]:
    """Codes of producers and consumers whose header fields name the resources."""
    code = RequestCode
    pull = _consuming(SUB)
    send = _fields(PUB, topic=TOPIC)
    send_v2 = _fields(PUB, b=TOPIC)
    return {
        code.SEND_MESSAGE: send,
        code.SEND_MESSAGE_V2: send_v2,
        code.SEND_BATCH_MESSAGE: send_v2,
        code.SEND_REPLY_MESSAGE: send,
        code.SEND_REPLY_MESSAGE_V2: send_v2,
        code.RECALL_MESSAGE: send,
        code.END_TRANSACTION: _end_transaction(),
        code.CONSUMER_SEND_MSG_BACK: _fields(SUB, group=GROUP),
        code.PULL_MESSAGE: pull,
        code.LITE_PULL_MESSAGE: pull,
        code.POP_MESSAGE: pull,
        code.ACK_MESSAGE: _acknowledging(),
        code.PEEK_MESSAGE: pull,
        code.CHANGE_MESSAGE_INVISIBLETIME: _acknowledging(),
        code.NOTIFICATION: pull,
        code.POLLING_INFO: _consuming(GET),
        code.QUERY_CONSUMER_OFFSET: _consuming(SUB, GET),
        code.UPDATE_CONSUMER_OFFSET: _consuming(SUB, UPDATE),
        code.UNREGISTER_CLIENT: _field_or_any("consumerGroup", GROUP, SUB, otherwise=Action.ANY),
        code.GET_CONSUMER_LIST_BY_GROUP: _fields(SUB, GET, consumerGroup=GROUP),
        code.QUERY_MESSAGE: _fields(SUB, GET, topic=TOPIC),
        code.GET_ROUTEINFO_BY_TOPIC: _fields(PUB, SUB, GET, topic=TOPIC),
    }


def _of_admin_tools() -> dict[RequestCode, CodeRights]:
    """Codes of admin tools whose header fields name the resources."""
    code = RequestCode
    return {
        # topics
        code.UPDATE_AND_CREATE_TOPIC: _fields(CREATE, topic=TOPIC),
        code.UPDATE_AND_CREATE_STATIC_TOPIC: _fields(CREATE, topic=TOPIC),
        code.DELETE_TOPIC_IN_BROKER: _fields(DELETE, topic=TOPIC),
        code.SEARCH_OFFSET_BY_TIMESTAMP: _fields(GET, topic=TOPIC),
        code.GET_MAX_OFFSET: _fields(GET, topic=TOPIC),
        code.GET_MIN_OFFSET: _fields(GET, topic=TOPIC),
        code.GET_EARLIEST_MSG_STORETIME: _fields(GET, topic=TOPIC),
        code.VIEW_MESSAGE_BY_ID: _fields(GET, topic=TOPIC),
        code.GET_TOPIC_STATS_INFO: _fields(GET, topic=TOPIC),
        code.QUERY_TOPIC_CONSUME_BY_WHO: _fields(GET, topic=TOPIC),
        code.GET_TOPIC_CONFIG: _fields(GET, topic=TOPIC),
        code.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _fields(GET, topic=TOPIC),
        code.RESUME_CHECK_HALF_MESSAGE: _fields(UPDATE, topic=TOPIC),
        # groups
        code.DELETE_SUBSCRIPTIONGROUP: _fields(DELETE, groupName=GROUP),
        code.GET_SUBSCRIPTIONGROUP_CONFIG: _fields(GET, group=GROUP),
        code.GET_CONSUMER_CONNECTION_LIST: _fields(GET, consumerGroup=GROUP),
        code.GET_CONSUMER_RUNNING_INFO: _fields(GET, consumerGroup=GROUP),
        code.QUERY_TOPICS_BY_CONSUMER: _fields(GET, group=GROUP),
        # both
        code.GET_CONSUME_STATS: _fields(
            GET, consumerGroup=GROUP, topic=TOPIC, topicList=(TOPIC, ";")
        ),
        code.INVOKE_BROKER_TO_RESET_OFFSET: _fields(UPDATE, group=GROUP, topic=TOPIC),
        code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _fields(GET, group=GROUP, topic=TOPIC),
        code.QUERY_CONSUME_TIME_SPAN: _fields(GET, group=GROUP, topic=TOPIC),
        code.QUERY_CORRECTION_OFFSET: _fields(
            GET, compareGroup=GROUP, filterGroups=(GROUP, ","), topic=TOPIC
        ),
        code.CONSUME_MESSAGE_DIRECTLY: _fields(SUB, consumerGroup=GROUP, topic=TOPIC),
        code.CLONE_GROUP_OFFSET: _cloning(),
        code.QUERY_CONSUME_QUEUE: _fields(GET, topic=TOPIC, consumerGroup=GROUP),
        code.QUERY_SUBSCRIPTION_BY_CONSUMER: _fields(GET, group=GROUP, topic=TOPIC),
        code.UPDATE_AND_GET_GROUP_FORBIDDEN: _fields(UPDATE, group=GROUP, topic=TOPIC),
    }


def _by_body() -> dict[RequestCode, CodeRights]:
    """Codes whose body names the resources."""

    def heartbeat(command: Command) -> list[RequiredRight]:
        found: list[RequiredRight] = []
        data = command.body_as(HeartbeatData)
        for consumer in data.consumer_data_set:
            topics = [subscription.topic for subscription in consumer.subscription_data_set]
            found += _consumption(consumer.group_name, topics)
        found = found or [RequiredRight(ResourceType.ANY, None, (Action.ANY,))]
        producers = (producer.group_name for producer in data.producer_data_set)
        return found + [_producing(group) for group in producers if group]

    def locks(command: Command) -> list[RequiredRight]:
        body = command.body_as(LockBatchRequestBody)
        return _consumption(body.consumer_group, [queue.topic for queue in body.mq_set])

    def filter_check(command: Command) -> list[RequiredRight]:
        body = command.body_as(CheckClientRequestBody)
        resources = body.subscription_data
        return _consumption(body.group, [resources.topic] if resources else [])

    def assignment(command: Command) -> list[RequiredRight]:
        body = command.body_as(QueryAssignmentRequestBody)
        return _consumption(body.consumer_group, [body.topic])

    def request_mode(command: Command) -> list[RequiredRight]:
        body = command.body_as(SetMessageRequestModeRequestBody)
        return _consumption(body.consumer_group, [body.topic], (UPDATE,))

    def acks(command: Command) -> list[RequiredRight]:
        found: list[RequiredRight] = []
        for ack in decode_batch_ack(command.body).acks:
            found += _consumption(ack.consumer_group, [ack.topic])
        return found or [RequiredRight(GROUP, None, (SUB,))]

    def topics(command: Command) -> list[RequiredRight]:
        body = command.body_as(CreateTopicListRequestBody)
        names = [config.topic_name for config in body.topic_config_list]
        return [_right_on(TOPIC, name, (CREATE,)) for name in names or [""]]

    def group(command: Command) -> list[RequiredRight]:
        return [_right_on(GROUP, command.body_as(SubscriptionGroupConfig).group_name, (CREATE,))]

    def groups(command: Command) -> list[RequiredRight]:
        body = command.body_as(SubscriptionGroupList)
        names = [config.group_name for config in body.group_config_list]
        return [_right_on(GROUP, name, (CREATE,)) for name in names or [""]]

    code = RequestCode
    return {
        code.HEART_BEAT: CodeRights(GROUP, (SUB,), heartbeat, by_body=True),
        code.LOCK_BATCH_MQ: CodeRights(GROUP, (SUB,), locks, by_body=True),
        code.UNLOCK_BATCH_MQ: CodeRights(GROUP, (SUB,), locks, by_body=True),
        code.CHECK_CLIENT_CONFIG: CodeRights(GROUP, (SUB,), filter_check, by_body=True),
        code.QUERY_ASSIGNMENT: CodeRights(GROUP, (SUB,), assignment, by_body=True),
        code.SET_MESSAGE_REQUEST_MODE: CodeRights(GROUP, (UPDATE,), request_mode, by_body=True),
        code.BATCH_ACK_MESSAGE: CodeRights(GROUP, (SUB,), acks, by_body=True),
        code.UPDATE_AND_CREATE_TOPIC_LIST: CodeRights(TOPIC, (CREATE,), topics, by_body=True),
        code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: CodeRights(GROUP, (CREATE,), group, by_body=True),
        code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: CodeRights(
            GROUP, (CREATE,), groups, by_body=True
        ),
    }


_READS_CLUSTER: Final = (
    RequestCode.QUERY_BROKER_OFFSET,
    RequestCode.GET_BROKER_CONFIG,
    RequestCode.GET_BROKER_RUNTIME_INFO,
    RequestCode.GET_ALL_CONSUMER_OFFSET,
    RequestCode.GET_ALL_DELAY_OFFSET,
    RequestCode.GET_CLIENT_CONFIG,
    RequestCode.GET_TIMER_CHECK_POINT,
    RequestCode.GET_TIMER_METRICS,
    RequestCode.GET_KV_CONFIG,
    RequestCode.GET_KVLIST_BY_NAMESPACE,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_PRODUCER_CONNECTION_LIST,
    RequestCode.GET_ALL_PRODUCER_INFO,
    RequestCode.VIEW_BROKER_STATS_DATA,
    RequestCode.GET_BROKER_CONSUME_STATS,
    RequestCode.GET_NAMESRV_CONFIG,
    RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON,
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE,
    RequestCode.GET_BROKER_HA_STATUS,
    RequestCode.GET_BROKER_EPOCH_CACHE,
    RequestCode.CONTROLLER_GET_METADATA_INFO,
    RequestCode.CONTROLLER_GET_SYNC_STATE_DATA,
    RequestCode.GET_COLD_DATA_FLOW_CTR_INFO,
    RequestCode.AUTH_GET_USER,
    RequestCode.AUTH_LIST_USER,
    RequestCode.AUTH_GET_ACL,
    RequestCode.AUTH_LIST_ACL,
)
_READS_TOPICS: Final = (
    RequestCode.GET_ALL_TOPIC_CONFIG,
    RequestCode.GET_TOPIC_CONFIG_LIST,
    RequestCode.GET_TOPIC_NAME_LIST,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    RequestCode.GET_TOPICS_BY_CLUSTER,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
    RequestCode.GET_UNIT_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
)


def _without_resource(cluster: str) -> dict[RequestCode, CodeRights]:
    """Codes that name no single topic or group."""
    cluster_get = _fixed(CLUSTER, cluster, GET)
    topics_list = _fixed(TOPIC, None, LIST, GET)
    return {
        **dict.fromkeys(_READS_CLUSTER, cluster_get),
        **dict.fromkeys(_READS_TOPICS, topics_list),
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _fixed(GROUP, None, LIST, GET),
    }
