"""Bodies that clients, brokers and NameServers exchange, as typed values.

Attribute names are Python's, names on the wire are Java's. Defaults are Java's too, except times,
which are 0 where Java takes the clock. Decode them with `fastjson.decode`, encode them with
`fastjson.encode`. Unknown members are ignored, None is not written, enumerations stay strings.
"""

from typing import Annotated, Any, Final, Self, dataclass_transform

from msgspec import Meta, Struct, field

from penstock.wire import fastjson
from penstock.wire.codes import PERM_READ_WRITE

# Checked on decoding, so that no later packing into 4 or 8 bytes can fail.
Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Long = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Body(Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """Base of all bodies: frozen, keyword-only, Java's names on the wire.

    Bodies contain no reference cycles. There may be 100,000 of them, and a garbage collection that
    looks at each would stop all threads.
    """


class MessageQueue(Body, kw_only=False, order=True):
    """One queue of a topic on a broker; a key of many tables. Sorts as Java sorts it."""

    topic: str = ""
    broker_name: str = ""
    queue_id: Int = 0


class DataVersion(Body):
    """Version of a table; 4.x has no `state_version`."""

    counter: Long = 0
    state_version: Long = 0
    timestamp: Long = 0

    def next(self, now_ms: int, *, state_version: int = 0) -> Self:
        """The version after a change at `now_ms`; `state_version` is the master's epoch."""
        return type(self)(counter=self.counter + 1, state_version=state_version, timestamp=now_ms)

    def rank(self) -> tuple[int, int, int]:
        """The sort key of versions: the newer one is higher."""
        return self.state_version, self.counter, self.timestamp


# --- topics and routes ---------------------------------------------------------------------------


class TopicConfig(Body):
    """A topic as a broker keeps it."""

    topic_name: str = ""
    read_queue_nums: Int = 16
    write_queue_nums: Int = 16
    perm: Int = PERM_READ_WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int = 0
    order: bool = False
    attributes: dict[str, str] = {}

    @property
    def queues(self) -> int:
        """The number of queues, whether they are read or written."""
        return max(self.read_queue_nums, self.write_queue_nums, 0)


class QueueData(Body):
    """The queues of a topic on one broker."""

    broker_name: str = ""
    read_queue_nums: Int = 0
    write_queue_nums: Int = 0
    perm: Int = 0
    topic_sys_flag: Int = 0


class BrokerData(Body):
    """The addresses of one broker name, by broker id (0 is the master)."""

    cluster: str | None = None
    broker_name: str = ""
    broker_addrs: dict[Long, str] = {}
    zone_name: str | None = None
    enable_acting_master: bool = False


class TopicQueueMappingInfo(Body):
    """Where the queues of a static topic are; passed on, but not used."""

    topic: str | None = None
    scope: str = "__global__"
    total_queues: Int = 0
    bname: str | None = None
    epoch: Long = 0
    dirty: bool = False
    curr_id_map: dict[Int, Int] = {}


class LogicQueueMappingItem(Body):
    """A range of a static topic's queue on one broker."""

    gen: Int = 0
    queue_id: Int = 0
    bname: str | None = None
    logic_offset: Long = 0
    start_offset: Long = 0
    end_offset: Long = -1
    time_of_start: Long = -1
    time_of_end: Long = -1


class TopicQueueMappingDetail(TopicQueueMappingInfo):
    """A static topic with the history of each of its queues."""

    hosted_queues: dict[Int, list[LogicQueueMappingItem]] = {}


class TopicRouteData(Body):
    """The route of a topic. Written by `encode_strict` for clients from 4.9.4 on."""

    order_topic_conf: str | None = None
    queue_datas: list[QueueData] = []
    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}
    topic_queue_mapping_by_broker: dict[str, TopicQueueMappingInfo] | None = None


class ClusterInfo(Body):
    """All brokers that a NameServer knows, and their clusters."""

    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}


class TopicList(Body):
    """Names of topics; `broker_addr` is a broker that has the system topics."""

    topic_list: list[str] = []
    broker_addr: str | None = None


class KVTable(Body):
    """Strings by name: runtime info, order configuration."""

    table: dict[str, str] = {}


class BrokerMemberGroup(Body):
    """The brokers of one name."""

    cluster: str | None = None
    broker_name: str | None = None
    broker_addrs: dict[Long, str] = {}


class GetBrokerMemberGroupResponseBody(Body):
    """Response to GET_BROKER_MEMBER_GROUP."""

    broker_member_group: BrokerMemberGroup | None = None


# --- heartbeat -----------------------------------------------------------------------------------


class SubscriptionData(Body):
    """A consumer's filter on a topic: tags with their hashes, or an SQL92 expression."""

    class_filter_mode: bool = False
    topic: str = ""
    sub_string: str | None = None
    tags_set: frozenset[str] = frozenset()
    code_set: frozenset[Int] = frozenset()
    sub_version: Long = 0
    expression_type: str = "TAG"


class ProducerData(Body):
    """A producer group of a client."""

    group_name: str = ""


class ConsumerData(Body):
    """A consumer group of a client and its subscriptions."""

    group_name: str = ""
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None
    subscription_data_set: list[SubscriptionData] = []
    unit_mode: bool = False


class HeartbeatData(Body):
    """HEART_BEAT: all groups of one client."""

    client_id: str = field(default="", name="clientID")
    producer_data_set: list[ProducerData] = []
    consumer_data_set: list[ConsumerData] = []
    heartbeat_fingerprint: Int = 0
    without_sub: bool = False


class CheckClientRequestBody(Body):
    """CHECK_CLIENT_CONFIG: asks whether the broker accepts this filter."""

    client_id: str = ""
    group: str = ""
    subscription_data: SubscriptionData | None = None
    namespace: str | None = None


class GetConsumerListByGroupResponseBody(Body):
    """Response to GET_CONSUMER_LIST_BY_GROUP."""

    consumer_id_list: list[str] = []


# --- locks, assignment, POP ----------------------------------------------------------------------


class LockBatchRequestBody(Body):
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    consumer_group: str = ""
    client_id: str = ""
    only_this_broker: bool = False
    mq_set: list[MessageQueue] = []


class LockBatchResponseBody(Body):
    """The queues that are locked for the requesting client."""

    lock_ok_mq_set: list[MessageQueue] = field(default_factory=list, name="lockOKMQSet")


class QueryAssignmentRequestBody(Body):
    """QUERY_ASSIGNMENT: asks which queues are assigned to the client."""

    topic: str = ""
    consumer_group: str = ""
    client_id: str = ""
    strategy_name: str | None = None
    message_model: str | None = None


class MessageQueueAssignment(Body):
    """One assigned queue, to be pulled or popped."""

    message_queue: MessageQueue | None = None
    mode: str = "PULL"
    attachments: dict[str, str] | None = None


class QueryAssignmentResponseBody(Body):
    """Response to QUERY_ASSIGNMENT; None if the broker assigns nothing."""

    message_queue_assignments: list[MessageQueueAssignment] | None = None


class SetMessageRequestModeRequestBody(Body):
    """SET_MESSAGE_REQUEST_MODE: pull or POP, for one group on one topic."""

    topic: str = ""
    consumer_group: str = ""
    mode: str = "PULL"
    pop_share_queue_num: Int = 0


class BatchAck(Body):
    """Acknowledgement of several messages of one pop; bit k of `bit_set` is `start_offset` + k."""

    consumer_group: str = field(default="", name="c")
    topic: str = field(default="", name="t")
    retry: str = field(default="0", name="r")
    start_offset: Long = field(default=0, name="so")
    queue_id: Int = field(default=0, name="q")
    revive_queue_id: Int = field(default=0, name="rq")
    pop_time: Long = field(default=0, name="pt")
    invisible_time: Long = field(default=0, name="it")
    bit_set: bytes = field(default=b"", name="b")

    def distances(self) -> int:
        """The bit set as a number."""
        return int.from_bytes(self.bit_set, "little")


class BatchAckMessageRequestBody(Body):
    """BATCH_ACK_MESSAGE. `decode_batch_ack` also accepts the long names."""

    broker_name: str | None = None
    acks: list[BatchAck] = []


_BATCH_ACK_NAMES: Final = {
    "consumerGroup": "c",
    "topic": "t",
    "retry": "r",
    "startOffset": "so",
    "queueId": "q",
    "reviveQueueId": "rq",
    "popTime": "pt",
    "invisibleTime": "it",
    "bitSet": "b",
}
_BATCH_ACK_LONG_NAMES: Final = tuple(f'"{name}"'.encode() for name in _BATCH_ACK_NAMES)


def decode_batch_ack(data: bytes) -> BatchAckMessageRequestBody:
    """The body of BATCH_ACK_MESSAGE, with short or long names."""
    if b"\\" not in data and not any(name in data for name in _BATCH_ACK_LONG_NAMES):
        return fastjson.decode(data, BatchAckMessageRequestBody)
    value: Any = fastjson.decode(data, dict[str, Any])
    acks = value.get("acks")
    if isinstance(acks, list):
        value["acks"] = [
            {_BATCH_ACK_NAMES.get(name, name): member for name, member in ack.items()}
            if isinstance(ack, dict)
            else ack
            for ack in acks
        ]
    return fastjson.build(value, BatchAckMessageRequestBody)


# --- consumer groups -----------------------------------------------------------------------------


class SimpleSubscriptionData(Body):
    """A subscription stored with a group."""

    topic: str = ""
    expression_type: str | None = None
    expression: str | None = None
    version: Long = 0


class ExponentialRetryPolicy(Body):
    """Retry delays that grow by a factor, in ms."""

    initial: Long = 5_000
    max: Long = 7_200_000
    multiplier: Long = 2


class CustomizedRetryPolicy(Body):
    """A list of retry delays, in ms; a group without any uses the delay levels."""

    next: tuple[Long, ...] = ()


class GroupRetryPolicy(Body):
    """The retry delays of a group's failed messages."""

    type: str = "CUSTOMIZED"
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: CustomizedRetryPolicy | None = None


class SubscriptionGroupConfig(Body):
    """A consumer group as a broker keeps it."""

    group_name: str = ""
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: Int = 1
    retry_max_times: Int = 16
    group_retry_policy: GroupRetryPolicy = GroupRetryPolicy()
    broker_id: Long = 0
    which_broker_when_consume_slowly: Long = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: Int = 0
    consume_timeout_minute: Int = 15
    subscription_data_set: list[SimpleSubscriptionData] | None = None
    attributes: dict[str, str] = {}
