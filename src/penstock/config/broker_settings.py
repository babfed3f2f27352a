"""The settings of a broker."""

from typing import Annotated

from penstock.config.doc import I32_MAX, PORT_MAX, Checked, Doc

_NAME_MAX = 127  # the length is one signed byte in RocketMQ, which has the same limit
_PERMISSION_MAX = 7


def check_name(text: str) -> None:
    """Names of brokers and clusters occur in addresses, paths and the tables of tools."""
    if not text or len(text) > _NAME_MAX:
        raise ValueError(f"must have 1 to {_NAME_MAX} characters")
    if any(character.isspace() or character in "/:;,@" for character in text):
        raise ValueError("must not contain white space or / : ; , @")


def check_region(text: str) -> None:
    """The region is written into properties and JSON as it is."""
    if not text or not text.isprintable() or any(character in '"\\' for character in text):
        raise ValueError('must not be empty or contain control characters, " or \\')


def check_addresses(text: str) -> None:
    """host:port, separated by semicolons; may be empty."""
    for address in filter(None, (piece.strip() for piece in text.split(";"))):
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) <= PORT_MAX):
            raise ValueError("must be a list of host:port, separated by ;")


class BrokerConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """The settings of one broker."""

    cluster: Annotated[
        str, Doc("The name of the cluster that the broker belongs to.", "brokerClusterName",
                 check=check_name)
    ] = "DefaultCluster"  # fmt: skip
    name: Annotated[
        str, Doc("The name of the broker. A master and its slaves share it.", "brokerName",
                 check=check_name)
    ] = "broker-a"  # fmt: skip
    id: Annotated[
        int,
        Doc("The broker's number among the brokers of its name. 0 is a master, other numbers are "
            "slaves.", "brokerId", most=I32_MAX),
    ] = 0  # fmt: skip
    host: Annotated[str, Doc("The address to listen on.", "bindAddress")] = "127.0.0.1"
    port: Annotated[int, Doc("The port to listen on.", "listenPort", most=PORT_MAX)] = 10911
    announce: Annotated[
        str, Doc("The address that clients connect to. Empty: `host`, or an address of this "
                 "machine if `host` is a wildcard.", "brokerIP1")
    ] = ""  # fmt: skip
    nameservers: Annotated[
        str, Doc("The NameServers to register with, as host:port, separated by `;`.", "namesrvAddr",
                 check=check_addresses)
    ] = ""  # fmt: skip
    data: Annotated[str, Doc("The directory of the store.", "storePathRootDir", path=True)] = (
        "penstock-data/broker-a"
    )
    probe_port: Annotated[
        int, Doc("The port of /metrics, /healthz and /readyz. 0: off; -1: `port` + 2.", least=-1,
                 most=PORT_MAX)
    ] = -1  # fmt: skip
    vip_port: Annotated[
        int, Doc("A second port for clients that use RocketMQ's VIP channel. 0: off; -1: `port` - "
                 "2.", least=-1, most=PORT_MAX)
    ] = -1  # fmt: skip
    permission: Annotated[
        int, Doc("What clients may do on this broker: 4 read, 2 write, 6 both.", "brokerPermission",
                 live=True, most=_PERMISSION_MAX)
    ] = 6  # fmt: skip
    auto_create_topics: Annotated[
        bool, Doc("Create a topic when a client sends to one that does not exist.",
                  "autoCreateTopicEnable", live=True)
    ] = True  # fmt: skip
    auto_create_groups: Annotated[
        bool, Doc("Create a consumer group when a client uses one that does not exist.",
                  "autoCreateSubscriptionGroup", live=True)
    ] = True  # fmt: skip
    topics_max: Annotated[
        int, Doc("The maximum number of topics that sends and tools may create. Retry topics "
                 "and dead letter topics count, but are always created.", live=True, least=1)
    ] = 50_000  # fmt: skip
    queues_max: Annotated[
        int, Doc("The maximum number of queues of all topics that sends and tools may create.",
                 live=True, least=1)
    ] = 4_000_000  # fmt: skip
    groups_max: Annotated[
        int, Doc("The maximum number of consumer groups. More are not created.", live=True, least=1)
    ] = 50_000  # fmt: skip
    auto_creations_max: Annotated[
        int, Doc("The maximum number of topics and groups that are created automatically in an "
                 "hour for clients at one address.", live=True, least=1)
    ] = 5_000  # fmt: skip
    default_topic_queues: Annotated[
        int, Doc("The maximum number of queues of an automatically created topic.",
                 "defaultTopicQueueNums", live=True, least=1, most=65_536)
    ] = 8  # fmt: skip
    region: Annotated[
        str, Doc("The region that is recorded in every message.", "regionId", check=check_region)
    ] = "DefaultRegion"
    trace_on: Annotated[
        bool, Doc("Whether clients may send message traces.", "traceOn", live=True)
    ] = True
    trace_topic: Annotated[
        bool, Doc("Create the topic for message traces at start-up.", "traceTopicEnable")
    ] = True
    store_replies: Annotated[
        bool, Doc("Store the replies of request-reply messages in addition to forwarding them.",
                  "storeReplyMessageEnable", live=True)
    ] = True  # fmt: skip
    long_polling: Annotated[
        bool, Doc("Suspend a pull that finds no messages for as long as the client allows.",
                  "longPollingEnable", live=True)
    ] = True  # fmt: skip
    short_polling_ms: Annotated[
        int, Doc("How long a pull is suspended when `long_polling` is off.",
                 "shortPollingTimeMills", live=True)
    ] = 1_000  # fmt: skip
    property_filter: Annotated[
        bool, Doc("Whether consumers may filter by message properties (SQL92).",
                  "enablePropertyFilter", live=True)
    ] = True  # fmt: skip
    recall_enabled: Annotated[
        bool, Doc("Whether producers may recall timer messages before their delivery.",
                  "recallMessageEnable", live=True)
    ] = True  # fmt: skip
    pull_bytes_max: Annotated[
        int, Doc("The maximum size of the messages in one pull response.",
                 "maxTransferBytesOnMessageInMemory", live=True, least=1)
    ] = 256 * 1024  # fmt: skip
    pull_messages_max: Annotated[
        int, Doc("The maximum number of messages in one pull response.",
                 "maxTransferCountOnMessageInMemory", live=True, least=1)
    ] = 1_024  # fmt: skip
    register_ms: Annotated[
        int, Doc("How often the broker registers with its NameServers.", "registerNameServerPeriod",
                 live=True, least=1)
    ] = 30_000  # fmt: skip
    offset_persist_ms: Annotated[
        int, Doc("How often consumer offsets are written to disk.", "flushConsumerOffsetInterval",
                 live=True, least=1)
    ] = 5_000  # fmt: skip
    client_expire_ms: Annotated[
        int, Doc("A client that sends no heartbeat for this long is removed.",
                 "channelExpiredTimeout", live=True, least=1)
    ] = 120_000  # fmt: skip
    flush_timeout_ms: Annotated[
        int, Doc("Sync flush: how long a send waits for the flush before the response is "
                 "FLUSH_DISK_TIMEOUT.", "syncFlushTimeout", live=True, least=1)
    ] = 5_000  # fmt: skip
    lock_lease_ms: Annotated[
        int, Doc("How long a consumer holds the lock of a queue without renewing it.", live=True,
                 least=1)
    ] = 60_000  # fmt: skip
    reject_transactions: Annotated[
        bool, Doc("Refuse transactional messages.", "rejectTransactionMessage", live=True)
    ] = False
    transaction_timeout_ms: Annotated[
        int, Doc("How long the broker waits after a half message before the first check-back, "
                 "unless the message asks for a longer time.", "transactionTimeOut", live=True)
    ] = 6_000  # fmt: skip
    transaction_check_ms: Annotated[
        int, Doc("The interval between the check-backs of an open transaction.",
                 "transactionCheckInterval", live=True, least=1)
    ] = 30_000  # fmt: skip
    transaction_checks_max: Annotated[
        int, Doc("The number of check-backs, answered with unknown or not at all, after which a "
                 "transaction is rolled back.", "transactionCheckMax", live=True, least=1)
    ] = 5  # fmt: skip
    open_transactions_max: Annotated[
        int, Doc("The maximum number of open transactions. Each takes about 420 bytes of memory.",
                 live=True, least=1)
    ] = 1_000_000  # fmt: skip
    default_request_mode: Annotated[
        str, Doc("How groups with broker-side rebalancing receive messages unless a request mode "
                 "is set for them: PULL or POP.", "defaultMessageRequestMode", live=True,
                 choices=("PULL", "POP"))
    ] = "PULL"  # fmt: skip
    default_pop_share_queues: Annotated[
        int, Doc("POP: the number of other consumers of the group whose queues each consumer also "
                 "pops from. -1: every consumer pops from all queues.", "defaultPopShareQueueNum",
                 live=True, least=-1)
    ] = -1  # fmt: skip
    share_queues: Annotated[
        bool, Doc("Assign queues to consumers that use broker-side rebalancing. Otherwise each of "
                  "them gets all queues.", "serverLoadBalancerEnable", live=True)
    ] = True  # fmt: skip
    pop_retry_topic_v2: Annotated[
        bool, Doc("Name POP retry topics %RETRY%group+topic instead of %RETRY%group_topic.",
                  "enableRetryTopicV2", live=True)
    ] = False  # fmt: skip
    pop_retry_topic_v1_read: Annotated[
        bool, Doc("With `pop_retry_topic_v2`: also pop from the retry topics with the old names.",
                  "retrieveMessageFromPopRetryTopicV1", live=True)
    ] = True  # fmt: skip
    pop_retry_percent: Annotated[
        int, Doc("The percentage of POP requests that look for messages to retry first.",
                 "popFromRetryProbability", live=True, most=100)
    ] = 20  # fmt: skip
    pop_higher_priority_first: Annotated[
        bool, Doc("POP from topics of type PRIORITY: a higher number is more urgent. Otherwise a "
                  "lower number is, and 0 is the most urgent.", "priorityOrderAsc", live=True)
    ] = True  # fmt: skip
    pop_retry_topic_shown: Annotated[
        bool, Doc("Deliver popped messages to retry under the name of the retry topic instead of "
                  "their original topic.", "popResponseReturnActualRetryTopic", live=True)
    ] = False  # fmt: skip
    pop_first_if_young: Annotated[
        bool, Doc("A new group that asks for the newest messages starts at the first message of a "
                  "queue if that is among the newest `hot_bytes` of the log.",
                  "initPopOffsetByCheckMsgInMem", live=True)
    ] = True  # fmt: skip
    pop_waiting_max: Annotated[
        int, Doc("The maximum number of suspended POP requests, and of suspended notifications.",
                 "maxPopPollingSize", live=True)
    ] = 100_000  # fmt: skip
    pop_waiting_per_queue_max: Annotated[
        int, Doc("The maximum number of suspended POP requests per group, topic and queue.",
                 "popPollingSize", live=True)
    ] = 1_024  # fmt: skip
    pop_batches_max: Annotated[
        int, Doc("The maximum number of POP checkpoints that are not fully acknowledged, 0.5 KB "
                 "of memory each. Beyond it POP requests are refused.", "popCkMaxBufferSize",
                 live=True, least=1)
    ] = 200_000  # fmt: skip
    pop_in_flight_limited: Annotated[
        bool, Doc("Whether `pop_in_flight_max` applies.", "enablePopMessageThreshold", live=True)
    ] = False
    pop_in_flight_max: Annotated[
        int, Doc("The maximum number of messages of a queue in flight for a group. Beyond it the "
                 "group receives no messages of the queue.", "popInflightMessageThreshold",
                 live=True)
    ] = 10_000  # fmt: skip
    server_side_reset: Annotated[
        bool, Doc("Reset consumer offsets in the broker, without involving the consumers.",
                  "useServerSideResetOffset", live=True)
    ] = True  # fmt: skip
