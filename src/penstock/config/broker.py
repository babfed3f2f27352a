"""The settings of a broker."""

from typing import Annotated

from penstock.config.doc import PORT_MAX, Checked, Doc

_NAME_MAX = 127  # a byte counts it in the queues' keys and in RocketMQ's own checks
_PERMISSION_MAX = 7


def check_name(text: str) -> None:
    """Names of brokers and clusters stand in addresses, paths and tables of tools."""
    if not text or len(text) > _NAME_MAX:
        raise ValueError(f"a name has 1 to {_NAME_MAX} signs")
    if any(sign.isspace() or sign in "/:;,@" for sign in text):
        raise ValueError("a name has no blanks and none of / : ; , @")


def check_addresses(text: str) -> None:
    """host:port, separated by semicolons; empty is allowed."""
    for address in filter(None, (piece.strip() for piece in text.split(";"))):
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) <= PORT_MAX):
            raise ValueError(f"{address!r} is no address; write host:port, separated by ;")


def check_request_mode(text: str) -> None:
    """How consumers get messages."""
    if text not in ("PULL", "POP"):
        raise ValueError("write PULL or POP")


class BrokerConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """One broker."""

    cluster: Annotated[
        str, Doc("the cluster this broker belongs to", "brokerClusterName", check=check_name)
    ] = "DefaultCluster"
    name: Annotated[
        str, Doc("the broker's name; master and slaves share it", "brokerName", check=check_name)
    ] = "broker-a"
    id: Annotated[int, Doc("0 is the master, others are its slaves", "brokerId")] = 0
    host: Annotated[str, Doc("address to listen on", "bindAddress")] = "127.0.0.1"
    port: Annotated[int, Doc("port to listen on", "listenPort", most=PORT_MAX)] = 10911
    announce: Annotated[
        str, Doc("address that clients are told; empty: `host`, or this machine's own address if "
                 "that is a wildcard", "brokerIP1")
    ] = ""  # fmt: skip
    nameservers: Annotated[
        str, Doc("NameServers to register with: host:port, separated by ;", "namesrvAddr",
                 check=check_addresses)
    ] = ""  # fmt: skip
    data: Annotated[str, Doc("directory of the store", "storePathRootDir", path=True)] = (
        "penstock-data/broker-a"
    )
    probe_port: Annotated[
        int, Doc("port of /metrics, /healthz and /readyz; 0: off, -1: `port` + 2", least=-1,
                 most=PORT_MAX)
    ] = -1  # fmt: skip
    vip_port: Annotated[
        int, Doc("second port, for clients that use RocketMQ's VIP channel; 0: off, -1: `port` - 2",
                 least=-1, most=PORT_MAX)
    ] = -1  # fmt: skip
    permission: Annotated[
        int, Doc("what clients may do here: 4 read, 2 write, 6 both", "brokerPermission",
                 live=True, most=_PERMISSION_MAX)
    ] = 6  # fmt: skip
    auto_create_topics: Annotated[
        bool, Doc("whether a send to an unknown topic creates it", "autoCreateTopicEnable",
                  live=True)
    ] = True  # fmt: skip
    auto_create_groups: Annotated[
        bool, Doc("whether an unknown consumer group is created when it is first seen",
                  "autoCreateSubscriptionGroup", live=True)
    ] = True  # fmt: skip
    default_topic_queues: Annotated[
        int, Doc("most queues of a topic that a send creates", "defaultTopicQueueNums", live=True,
                 least=1, most=65_536)
    ] = 8  # fmt: skip
    region: Annotated[str, Doc("region noted in every message", "regionId")] = "DefaultRegion"
    trace_on: Annotated[bool, Doc("whether clients may send traces", "traceOn", live=True)] = True
    trace_topic: Annotated[
        bool, Doc("whether the topic for message traces exists", "traceTopicEnable")
    ] = True
    store_replies: Annotated[
        bool, Doc("whether replies of request-reply are stored besides being handed on",
                  "storeReplyMessageEnable", live=True)
    ] = True  # fmt: skip
    long_polling: Annotated[
        bool, Doc("whether pulls wait for messages as long as the client asks for",
                  "longPollingEnable", live=True)
    ] = True  # fmt: skip
    short_polling_ms: Annotated[
        int, Doc("how long pulls wait where `long_polling` is off", "shortPollingTimeMills",
                 live=True)
    ] = 1_000  # fmt: skip
    property_filter: Annotated[
        bool, Doc("whether consumers may filter by properties (SQL92)", "enablePropertyFilter",
                  live=True)
    ] = True  # fmt: skip
    recall_enabled: Annotated[
        bool, Doc("whether messages with a time of delivery may be called back",
                  "recallMessageEnable", live=True)
    ] = True  # fmt: skip
    pull_bytes_max: Annotated[
        int, Doc("most bytes of messages in one answer to a pull",
                 "maxTransferBytesOnMessageInMemory", live=True, least=1)
    ] = 256 * 1024  # fmt: skip
    pull_messages_max: Annotated[
        int, Doc("most messages in one answer to a pull", "maxTransferCountOnMessageInMemory",
                 live=True, least=1)
    ] = 1_024  # fmt: skip
    register_ms: Annotated[
        int, Doc("how often the broker registers with its NameServers", "registerNameServerPeriod",
                 live=True, least=1)
    ] = 30_000  # fmt: skip
    offset_persist_ms: Annotated[
        int, Doc("how often consumer offsets are written to disk", "flushConsumerOffsetInterval",
                 live=True, least=1)
    ] = 5_000  # fmt: skip
    client_expire_ms: Annotated[
        int, Doc("a client that is silent this long is forgotten", "channelExpiredTimeout",
                 live=True, least=1)
    ] = 120_000  # fmt: skip
    flush_timeout_ms: Annotated[
        int, Doc("sync flush: after this long a send is answered FLUSH_DISK_TIMEOUT",
                 "syncFlushTimeout", live=True, least=1)
    ] = 5_000  # fmt: skip
    lock_lease_ms: Annotated[
        int, Doc("how long a consumer owns a queue it has locked, unless it locks it again",
                 live=True, least=1)
    ] = 60_000  # fmt: skip
    reject_transactions: Annotated[
        bool, Doc("whether transactional messages are refused", "rejectTransactionMessage",
                  live=True)
    ] = False  # fmt: skip
    transaction_timeout_ms: Annotated[
        int, Doc("how long a half is left in peace before its producer is asked, unless it asks "
                 "for longer itself", "transactionTimeOut", live=True)
    ] = 6_000  # fmt: skip
    transaction_check_ms: Annotated[
        int, Doc("how often a producer is asked about an open half", "transactionCheckInterval",
                 live=True, least=1)
    ] = 30_000  # fmt: skip
    transaction_checks_max: Annotated[
        int, Doc("a half is rolled back after so many checks that were answered unknown, or not in "
                 "time", "transactionCheckMax", live=True, least=1)
    ] = 5  # fmt: skip
    open_transactions_max: Annotated[
        int, Doc("most halves that may be open; each takes about 420 bytes of memory", live=True,
                 least=1)
    ] = 1_000_000  # fmt: skip
    default_request_mode: Annotated[
        str, Doc("how groups get messages that leave sharing queues to the broker, unless they are "
                 "told otherwise: PULL or POP", "defaultMessageRequestMode", live=True,
                 check=check_request_mode)
    ] = "PULL"  # fmt: skip
    default_pop_share_queues: Annotated[
        int, Doc("in how many consumers' shares each one of a group that pops helps out; -1: all "
                 "pop from all queues", "defaultPopShareQueueNum", live=True, least=-1)
    ] = -1  # fmt: skip
    share_queues: Annotated[
        bool, Doc("whether the broker shares queues among consumers that leave it to it; else each "
                  "gets all", "serverLoadBalancerEnable", live=True)
    ] = True  # fmt: skip
    pop_retry_topic_v2: Annotated[
        bool, Doc("whether messages that were popped and not acknowledged come back in "
                  "%RETRY%group+topic instead of %RETRY%group_topic", "enableRetryTopicV2",
                  live=True)
    ] = False  # fmt: skip
    pop_retry_topic_v1_read: Annotated[
        bool, Doc("with `pop_retry_topic_v2`, whether the older retry topics are still popped from",
                  "retrieveMessageFromPopRetryTopicV1", live=True)
    ] = True  # fmt: skip
    pop_retry_percent: Annotated[
        int, Doc("of 100 pops, so many look for messages to retry first", "popFromRetryProbability",
                 live=True, most=100)
    ] = 20  # fmt: skip
    pop_retry_topic_shown: Annotated[
        bool, Doc("whether popped messages to retry have the retry topic's name instead of their "
                  "own", "popResponseReturnActualRetryTopic", live=True)
    ] = False  # fmt: skip
    pop_first_if_young: Annotated[
        bool, Doc("whether a group that begins with the newest message begins a young queue with "
                  "the first", "initPopOffsetByCheckMsgInMem", live=True)
    ] = True  # fmt: skip
    pop_waiting_max: Annotated[
        int, Doc("most pops, and most notifications, that wait for messages", "maxPopPollingSize",
                 live=True)
    ] = 100_000  # fmt: skip
    pop_waiting_per_queue_max: Annotated[
        int, Doc("most pops of one group on one topic and queue that wait", "popPollingSize",
                 live=True)
    ] = 1_024  # fmt: skip
    pop_batches_max: Annotated[
        int, Doc("most batches of popped messages that are open, 0.5 KB of memory each: beyond it "
                 "pops are refused", "popCkMaxBufferSize", live=True, least=1)
    ] = 200_000  # fmt: skip
    pop_in_flight_limited: Annotated[
        bool, Doc("whether `pop_in_flight_max` counts", "enablePopMessageThreshold", live=True)
    ] = False  # fmt: skip
    pop_in_flight_max: Annotated[
        int, Doc("a group with more messages of a queue popped and not acknowledged gets no more "
                 "of it", "popInflightMessageThreshold", live=True)
    ] = 10_000  # fmt: skip
    server_side_reset: Annotated[
        bool, Doc("whether resetting offsets works by the broker alone", "useServerSideResetOffset",
                  live=True)
    ] = True  # fmt: skip
