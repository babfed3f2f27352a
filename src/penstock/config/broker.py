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
    server_side_reset: Annotated[
        bool, Doc("whether resetting offsets works by the broker alone", "useServerSideResetOffset",
                  live=True)
    ] = True  # fmt: skip
