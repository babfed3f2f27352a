"""Bodies of the admin tools: topics, groups, statistics, resets, connections.

The rules of `client_bodies` apply. Misspelled names (`droped`, `spentTimeMills`) are Java's.
"""

from msgspec import field

from penstock.wire.bodies.client_bodies import (
    Body,
    Int,
    Long,
    MessageQueue,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
    TopicQueueMappingDetail,
)


class CreateTopicListRequestBody(Body):
    """UPDATE_AND_CREATE_TOPIC_LIST."""

    topic_config_list: list[TopicConfig] = []


class TopicConfigAndQueueMapping(TopicConfig):
    """GET_TOPIC_CONFIG."""

    mapping_detail: TopicQueueMappingDetail | None = None


class SubscriptionGroupList(Body):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""

    group_config_list: list[SubscriptionGroupConfig] = []


class GroupForbidden(Body):
    """UPDATE_AND_GET_GROUP_FORBIDDEN."""

    topic: str | None = None
    group: str | None = None
    readable: bool | None = None


class GroupList(Body):
    """QUERY_TOPIC_CONSUME_BY_WHO."""

    group_list: list[str] = []


class QuerySubscriptionResponseBody(Body):
    """QUERY_SUBSCRIPTION_BY_CONSUMER."""

    subscription_data: SubscriptionData | None = None
    group: str | None = None
    topic: str | None = None


# --- offsets and statistics ----------------------------------------------------------------------


class TopicOffset(Body):
    """The offsets of one queue and when it was last written."""

    min_offset: Long = 0
    max_offset: Long = 0
    last_update_timestamp: Long = 0


class TopicStatsTable(Body):
    """GET_TOPIC_STATS_INFO."""

    topic_put_tps: float = 0.0
    offset_table: dict[MessageQueue, TopicOffset] = {}


class OffsetWrapper(Body):
    """How far a group is in one queue."""

    broker_offset: Long = 0
    consumer_offset: Long = 0
    pull_offset: Long = 0
    last_timestamp: Long = 0


class ConsumeStats(Body):
    """GET_CONSUME_STATS."""

    offset_table: dict[MessageQueue, OffsetWrapper] = {}
    consume_tps: float = 0.0


class ConsumeStatsList(Body):
    """GET_BROKER_CONSUME_STATS: for each group, one ConsumeStats per topic."""

    consume_stats_list: list[dict[str, list[ConsumeStats]]] = []
    broker_addr: str | None = None
    total_diff: Long = 0
    total_inflight_diff: Long = 0


class ResetOffsetBody(Body):
    """RESET_CONSUMER_CLIENT_OFFSET, and the response to INVOKE_BROKER_TO_RESET_OFFSET."""

    offset_table: dict[MessageQueue, Long] = {}


class MessageQueueForC(Body):
    """A queue and its offset, for clients that can't read objects as keys."""

    topic: str = ""
    broker_name: str = ""
    queue_id: Int = 0
    offset: Long = 0


class ResetOffsetBodyForC(Body):
    """RESET_CONSUMER_CLIENT_OFFSET for C++ clients."""

    offset_table: list[MessageQueueForC] = []


class GetConsumerStatusBody(Body):
    """GET_CONSUMER_STATUS_FROM_CLIENT (first table), INVOKE_BROKER_TO_GET_CONSUMER_STATUS."""

    message_queue_table: dict[MessageQueue, Long] = {}
    consumer_table: dict[str, dict[MessageQueue, Long]] = {}


class QueryCorrectionOffsetBody(Body):
    """QUERY_CORRECTION_OFFSET: queue → offset."""

    correction_offsets: dict[Int, Long] = {}


class QueueTimeSpan(Body):
    """Store times of a queue's first and last message, and of a group's position."""

    message_queue: MessageQueue | None = None
    min_time_stamp: Long = 0
    max_time_stamp: Long = 0
    consume_time_stamp: Long = 0
    delay_time: Long = 0


class QueryConsumeTimeSpanBody(Body):
    """QUERY_CONSUME_TIME_SPAN."""

    consume_time_span_set: list[QueueTimeSpan] = []


class BrokerStatsItem(Body):
    """A statistic over one period."""

    sum: Long = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Body):
    """VIEW_BROKER_STATS_DATA."""

    stats_minute: BrokerStatsItem | None = None
    stats_hour: BrokerStatsItem | None = None
    stats_day: BrokerStatsItem | None = None


class ConsumeQueueData(Body):
    """One entry of a queue, and whether a filter accepts it."""

    physic_offset: Long = 0
    physic_size: Int = 0
    tags_code: Long = 0
    extend_data_json: str | None = None
    bit_map: str | None = None
    eval: bool = False
    msg: str | None = None


class QueryConsumeQueueResponseBody(Body):
    """QUERY_CONSUME_QUEUE."""

    subscription_data: SubscriptionData | None = None
    filter_data: str | None = None
    queue_data: list[ConsumeQueueData] | None = None
    max_queue_index: Long = 0
    min_queue_index: Long = 0


# --- connections ---------------------------------------------------------------------------------


class Connection(Body):
    """A connected client."""

    client_id: str | None = None
    client_addr: str | None = None
    language: str | None = None
    version: Int = 0


class ConsumerConnection(Body):
    """GET_CONSUMER_CONNECTION_LIST."""

    connection_set: list[Connection] = []
    subscription_table: dict[str, SubscriptionData] = {}
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None


class ProducerConnection(Body):
    """GET_PRODUCER_CONNECTION_LIST."""

    connection_set: list[Connection] = []


class ProducerInfo(Body):
    """A connected producer."""

    client_id: str | None = None
    remote_ip: str | None = field(default=None, name="remoteIP")
    language: str | None = None
    version: Int = 0
    last_update_timestamp: Long = 0


class ProducerTableInfo(Body):
    """GET_ALL_PRODUCER_INFO, by group."""

    data: dict[str, list[ProducerInfo]] = {}


class ProcessQueueInfo(Body):
    """What a consumer has cached of one queue."""

    commit_offset: Long = 0
    cached_msg_min_offset: Long = 0
    cached_msg_max_offset: Long = 0
    cached_msg_count: Int = 0
    cached_msg_size_in_mib: Int = field(default=0, name="cachedMsgSizeInMiB")
    transaction_msg_min_offset: Long = 0
    transaction_msg_max_offset: Long = 0
    transaction_msg_count: Int = 0
    locked: bool = False
    try_unlock_times: Long = 0
    last_lock_timestamp: Long = 0
    dropped: bool = field(default=False, name="droped")
    last_pull_timestamp: Long = 0
    last_consume_timestamp: Long = 0


class PopProcessQueueInfo(Body):
    """What a POP consumer has in flight from one queue."""

    wait_ack_count: Int = 0
    dropped: bool = field(default=False, name="droped")
    last_pop_timestamp: Long = 0


class ConsumeStatus(Body):
    """Rates of a consumer on one topic: times in ms, rates per second."""

    pull_rt: float = field(default=0.0, name="pullRT")
    pull_tps: float = field(default=0.0, name="pullTPS")
    consume_rt: float = field(default=0.0, name="consumeRT")
    consume_ok_tps: float = field(default=0.0, name="consumeOKTPS")
    consume_failed_tps: float = field(default=0.0, name="consumeFailedTPS")
    consume_failed_msgs: Long = 0


class ConsumerRunningInfo(Body):
    """GET_CONSUMER_RUNNING_INFO."""

    properties: dict[str, str] = {}
    subscription_set: list[SubscriptionData] = []
    mq_table: dict[MessageQueue, ProcessQueueInfo] = {}
    mq_pop_table: dict[MessageQueue, PopProcessQueueInfo] = {}
    status_table: dict[str, ConsumeStatus] = {}
    user_consumer_info: dict[str, str] = {}
    jstack: str | None = None


class ConsumeMessageDirectlyResult(Body):
    """CONSUME_MESSAGE_DIRECTLY; `consume_result` is CR_SUCCESS, CR_LATER, CR_ROLLBACK, …"""

    order: bool = False
    auto_commit: bool = True
    consume_result: str | None = None
    remark: str | None = None
    spent_time_mills: Long = 0
