"""Which rights a request takes: one row per request code.

The rows are those of Apache RocketMQ 5.4.0 wherever it asks for a right at all. It leaves many
codes to any user who can sign (the broker's settings, subscription groups, lists of topics, lite
pulls, batch acknowledgements), and others when an optional field is left out. Here every code has
a row, and a code without one takes Update on the cluster:

- what a code without a resource reads or changes belongs to the cluster, or to all topics;
- a request that names no resource of its kind takes the right to all of them;
- a retry topic stands for its group, also where a request names another group beside it; where
  popped messages are acknowledged, one of POP stands for group and topic (to Apache, `g_t` is a
  group of its own, so that who may read g and t alone can't acknowledge);
- clients that name no resource at all (heartbeats of producers) must have some right somewhere.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from penstock.broker.auth.policies import Action, Kind, Need
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
TOPIC, GROUP, CLUSTER = Kind.TOPIC, Kind.GROUP, Kind.CLUSTER

_NO_CHANGE: Final = frozenset((PUB, SUB, GET, LIST, Action.ANY))

Finder: TypeAlias = Callable[[Command], list[Need]]


class Right:
    """What a code takes."""

    __slots__ = ("by_body", "in_general", "is_change", "needs")

    def __init__(
        self, kind: Kind, actions: tuple[Action, ...], needs: Finder, *, by_body: bool = False
    ) -> None:
        self.needs = needs  # what one request takes
        self.by_body = by_body  # whether its body tells
        self.in_general = Need(kind, None, actions)  # what to tell where no body is read
        # Whether it is the act of an administrator who changes something.
        self.is_change = not _NO_CHANGE.intersection(actions)


class Rights:
    """The rows of one server, whose cluster's name is known."""

    def __init__(self, cluster: str) -> None:
        rows = {**_by_fields(), **_by_body(), **_without_resource(cluster)}
        self._rows: dict[int, Right] = {int(code): right for code, right in rows.items()}
        self._rest = _fixed(CLUSTER, cluster, UPDATE)

    def of(self, code: int) -> Right:
        """What the code takes."""
        return self._rows.get(code, self._rest)


def reading(topic: str) -> Right:
    """What it takes to consume a topic."""
    return _of_topic(topic, SUB)


def sending(topic: str) -> Right:
    """What it takes to send to a topic."""
    return _of_topic(topic, PUB)


def _of_topic(topic: str, action: Action) -> Right:
    need = _need(TOPIC, topic, (action,))
    return Right(need.kind, need.actions, lambda command: [need])


# --- kinds of rows -------------------------------------------------------------------------------


def _fixed(kind: Kind, name: str | None, *actions: Action) -> Right:
    """Always the same resource."""
    needs = [Need(kind, name, actions)]
    return Right(kind, actions, lambda command: needs)


def _fields(*actions: Action, **fields: Kind | tuple[Kind, str]) -> Right:
    """The resources that these header fields name; with a splitter, a field names several."""
    wanted = [
        (name, *(kind if isinstance(kind, tuple) else (kind, ""))) for name, kind in fields.items()
    ]
    first = wanted[0][1]

    def needs(command: Command) -> list[Need]:
        found = []
        for name, kind, splitter in wanted:
            value = command.ext.get(name)
            if value:
                names = value.split(splitter) if splitter else [value]
                found += [_need(kind, text, actions) for text in names if text]
        return found or [Need(first, None, actions)]

    return Right(first, actions, needs)


def _need(kind: Kind, name: str | None, actions: tuple[Action, ...]) -> Need:
    if kind is TOPIC and name and name.startswith(RETRY_TOPIC_PREFIX):
        # Who consumes sends its messages there again.
        consumer = tuple(action for action in actions if action is not PUB) or (SUB,)
        return Need(GROUP, _group(name), consumer)
    return Need(kind, name or None, actions)


def _group(name: str) -> str | None:
    return name.removeprefix(RETRY_TOPIC_PREFIX) or None


def _consuming(*actions: Action) -> Right:
    """Topic and group of a consumer, who has its own retry topic with its group."""

    def needs(command: Command) -> list[Need]:
        return _consumption(command.ext.get("consumerGroup"), [command.ext.get("topic")], actions)

    return Right(GROUP, actions, needs)


def _acknowledging() -> Right:
    """As `_consuming`: messages that were popped again are acknowledged under POP's retry topic,
    which stands for group and topic."""

    def needs(command: Command) -> list[Need]:
        group, topic = command.ext.get("consumerGroup"), command.ext.get("topic")
        return _consumption(group, [plain_topic(topic, group) if topic and group else topic])

    return Right(GROUP, (SUB,), needs)


def _consumption(
    group: str | None, topics: Iterable[str | None], actions: tuple[Action, ...] = (SUB,)
) -> list[Need]:
    found = [Need(GROUP, _group(group) if group else None, actions)]
    for topic in topics:
        need = _need(TOPIC, topic, actions)
        if need not in found:
            found.append(need)
    return found


def _somewhere(field: str, kind: Kind, action: Action, *, otherwise: Action) -> Right:
    """A field that may be missing; then, some right anywhere."""
    anywhere = [Need(Kind.ANY, None, (otherwise,))]

    def needs(command: Command) -> list[Need]:
        name = command.ext.get(field)
        return [_need(kind, name, (action,))] if name and name.strip() else anywhere

    return Right(kind, (action,), needs)


def _ending() -> Right:
    """The topic of a transaction; answers to checks name that of all halves, so that only the half
    tells (`access.check_write`)."""
    named = _somewhere("topic", TOPIC, PUB, otherwise=PUB)
    anywhere = [Need(Kind.ANY, None, (PUB,))]

    def needs(command: Command) -> list[Need]:
        of_a_check = command.ext.get("topic") == TOPIC_TRANS_HALF
        return anywhere if of_a_check else named.needs(command)

    return Right(TOPIC, (PUB,), needs)


# --- rows ----------------------------------------------------------------------------------------


def _by_fields() -> dict[RequestCode, Right]:
    code = RequestCode
    pull = _consuming(SUB)
    send = _fields(PUB, topic=TOPIC)
    send_v2 = _fields(PUB, b=TOPIC)
    of_cluster = _fields(UPDATE, clusterName=CLUSTER)
    return {
        code.SEND_MESSAGE: send,
        code.SEND_MESSAGE_V2: send_v2,
        code.SEND_BATCH_MESSAGE: send_v2,
        code.SEND_REPLY_MESSAGE: send,
        code.SEND_REPLY_MESSAGE_V2: send_v2,
        code.RECALL_MESSAGE: send,
        code.END_TRANSACTION: _ending(),
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
        code.UNREGISTER_CLIENT: _somewhere("consumerGroup", GROUP, SUB, otherwise=Action.ANY),
        code.GET_CONSUMER_LIST_BY_GROUP: _fields(SUB, GET, consumerGroup=GROUP),
        code.QUERY_MESSAGE: _fields(SUB, GET, topic=TOPIC),
        code.GET_ROUTEINFO_BY_TOPIC: _fields(PUB, SUB, GET, topic=TOPIC),
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
        code.CLONE_GROUP_OFFSET: _fields(UPDATE, destGroup=GROUP, topic=TOPIC),
        code.QUERY_CONSUME_QUEUE: _fields(GET, topic=TOPIC, consumerGroup=GROUP),
        code.QUERY_SUBSCRIPTION_BY_CONSUMER: _fields(GET, group=GROUP, topic=TOPIC),
        code.UPDATE_AND_GET_GROUP_FORBIDDEN: _fields(UPDATE, group=GROUP, topic=TOPIC),
        # what a broker asks of a NameServer, in the name of its cluster
        code.REGISTER_BROKER: of_cluster,
        code.UNREGISTER_BROKER: of_cluster,
        code.BROKER_HEARTBEAT: of_cluster,
        code.QUERY_DATA_VERSION: _fields(GET, clusterName=CLUSTER),
        code.GET_BROKER_MEMBER_GROUP: _fields(GET, clusterName=CLUSTER),
        code.DELETE_TOPIC_IN_NAMESRV: of_cluster,
    }


def _by_body() -> dict[RequestCode, Right]:
    """What only the body tells."""

    def heartbeat(command: Command) -> list[Need]:
        found: list[Need] = []
        for consumer in command.body_as(HeartbeatData).consumer_data_set:
            topics = [subscription.topic for subscription in consumer.subscription_data_set]
            found += _consumption(consumer.group_name, topics)
        return found or [Need(Kind.ANY, None, (Action.ANY,))]

    def locks(command: Command) -> list[Need]:
        body = command.body_as(LockBatchRequestBody)
        return _consumption(body.consumer_group, [queue.topic for queue in body.mq_set])

    def filter_check(command: Command) -> list[Need]:
        body = command.body_as(CheckClientRequestBody)
        wanted = body.subscription_data
        return _consumption(body.group, [wanted.topic] if wanted else [])

    def assignment(command: Command) -> list[Need]:
        body = command.body_as(QueryAssignmentRequestBody)
        return _consumption(body.consumer_group, [body.topic])

    def request_mode(command: Command) -> list[Need]:
        body = command.body_as(SetMessageRequestModeRequestBody)
        return _consumption(body.consumer_group, [body.topic], (UPDATE,))

    def acks(command: Command) -> list[Need]:
        found: list[Need] = []
        for ack in decode_batch_ack(command.body).acks:
            found += _consumption(ack.consumer_group, [ack.topic])
        return found or [Need(GROUP, None, (SUB,))]

    def topics(command: Command) -> list[Need]:
        body = command.body_as(CreateTopicListRequestBody)
        names = [config.topic_name for config in body.topic_config_list]
        return [_need(TOPIC, name, (CREATE,)) for name in names or [""]]

    def group(command: Command) -> list[Need]:
        return [_need(GROUP, command.body_as(SubscriptionGroupConfig).group_name, (CREATE,))]

    def groups(command: Command) -> list[Need]:
        body = command.body_as(SubscriptionGroupList)
        names = [config.group_name for config in body.group_config_list]
        return [_need(GROUP, name, (CREATE,)) for name in names or [""]]

    code = RequestCode
    return {
        code.HEART_BEAT: Right(GROUP, (SUB,), heartbeat, by_body=True),
        code.LOCK_BATCH_MQ: Right(GROUP, (SUB,), locks, by_body=True),
        code.UNLOCK_BATCH_MQ: Right(GROUP, (SUB,), locks, by_body=True),
        code.CHECK_CLIENT_CONFIG: Right(GROUP, (SUB,), filter_check, by_body=True),
        code.QUERY_ASSIGNMENT: Right(GROUP, (SUB,), assignment, by_body=True),
        code.SET_MESSAGE_REQUEST_MODE: Right(GROUP, (UPDATE,), request_mode, by_body=True),
        code.BATCH_ACK_MESSAGE: Right(GROUP, (SUB,), acks, by_body=True),
        code.UPDATE_AND_CREATE_TOPIC_LIST: Right(TOPIC, (CREATE,), topics, by_body=True),
        code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Right(GROUP, (CREATE,), group, by_body=True),
        code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Right(
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


def _without_resource(cluster: str) -> dict[RequestCode, Right]:
    """Codes about no single topic or group."""
    cluster_get = _fixed(CLUSTER, cluster, GET)
    topics_list = _fixed(TOPIC, None, LIST, GET)
    return {
        **dict.fromkeys(_READS_CLUSTER, cluster_get),
        **dict.fromkeys(_READS_TOPICS, topics_list),
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _fixed(GROUP, None, LIST, GET),
    }
