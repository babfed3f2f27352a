"""Numbers and names of RocketMQ's remoting protocol.

Checked against Apache RocketMQ 5.4.0, 5.3.3 and 4.9.8 (RequestCode, ResponseCode, MessageSysFlag,
PullSysFlag, MessageConst, TopicValidator, MixAll). A peer may send a code that is not listed:
codes are plain `int`, and `request_name` / `response_name` accept any of them.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final


class RequestCode(IntEnum):
    """What a request asks for. Codes above 32767 fit JSON headers only."""

    # messages, offsets, clients
    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_BROKER_OFFSET = 13
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    GET_TOPIC_CONFIG_LIST = 22
    GET_TOPIC_NAME_LIST = 23
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    TRIGGER_DELETE_FILES = 27
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    GET_CLIENT_CONFIG = 47
    # access lists of 4.x; gone in 5.3
    UPDATE_AND_CREATE_ACL_CONFIG = 50
    DELETE_ACL_CONFIG = 51
    GET_BROKER_CLUSTER_ACL_INFO = 52
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG = 53
    GET_BROKER_CLUSTER_ACL_CONFIG = 54
    # timers
    GET_TIMER_CHECK_POINT = 60
    GET_TIMER_METRICS = 61
    # name server
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    # administration
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    SUSPEND_CONSUMER = 209
    RESUME_CONSUMER = 210
    RESET_CONSUMER_OFFSET_IN_CONSUMER = 211
    RESET_CONSUMER_OFFSET_IN_BROKER = 212
    ADJUST_CONSUMER_THREAD_POOL = 213
    WHO_CONSUME_THE_MESSAGE = 214
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    REGISTER_TOPIC_IN_NAMESRV = 217
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    REGISTER_FILTER_SERVER = 301
    REGISTER_MESSAGE_FILTER_CLASS = 302
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    QUERY_DATA_VERSION = 322
    RESUME_CHECK_HALF_MESSAGE = 323
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    # 5.x: topics, groups, lite pull, recall, assignment
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    UPDATE_AND_GET_GROUP_FORBIDDEN = 353
    CHECK_ROCKSDB_CQ_WRITE_PROGRESS = 354
    EXPORT_ROCKSDB_CONFIG_TO_JSON = 355
    LITE_PULL_MESSAGE = 361
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    GET_ALL_MESSAGE_REQUEST_MODE = 402
    UPDATE_AND_CREATE_STATIC_TOPIC = 513
    # brokers among themselves
    GET_BROKER_MEMBER_GROUP = 901
    ADD_BROKER = 902
    REMOVE_BROKER = 903
    BROKER_HEARTBEAT = 904
    NOTIFY_MIN_BROKER_ID_CHANGE = 905
    EXCHANGE_BROKER_HA_INFO = 906
    GET_BROKER_HA_STATUS = 907
    RESET_MASTER_FLUSH_OFFSET = 908
    # controller
    CONTROLLER_ALTER_SYNC_STATE_SET = 1001
    CONTROLLER_ELECT_MASTER = 1002
    CONTROLLER_REGISTER_BROKER = 1003
    CONTROLLER_GET_REPLICA_INFO = 1004
    CONTROLLER_GET_METADATA_INFO = 1005
    CONTROLLER_GET_SYNC_STATE_DATA = 1006
    GET_BROKER_EPOCH_CACHE = 1007
    NOTIFY_BROKER_ROLE_CHANGED = 1008
    UPDATE_CONTROLLER_CONFIG = 1009
    GET_CONTROLLER_CONFIG = 1010
    CLEAN_BROKER_DATA = 1011
    CONTROLLER_GET_NEXT_BROKER_ID = 1012
    CONTROLLER_APPLY_BROKER_ID = 1013
    # controller, among its own members
    BROKER_CLOSE_CHANNEL_REQUEST = 1014
    CHECK_NOT_ACTIVE_BROKER_REQUEST = 1015
    GET_BROKER_LIVE_INFO_REQUEST = 1016
    GET_SYNC_STATE_DATA_REQUEST = 1017
    RAFT_BROKER_HEART_BEAT_EVENT_REQUEST = 1018
    # cold data
    UPDATE_COLD_DATA_FLOW_CTR_CONFIG = 2001
    REMOVE_COLD_DATA_FLOW_CTR_CONFIG = 2002
    GET_COLD_DATA_FLOW_CTR_INFO = 2003
    SET_COMMITLOG_READ_MODE = 2004
    # users and access lists of 5.3
    AUTH_CREATE_USER = 3001
    AUTH_UPDATE_USER = 3002
    AUTH_DELETE_USER = 3003
    AUTH_GET_USER = 3004
    AUTH_LIST_USER = 3005
    AUTH_CREATE_ACL = 3006
    AUTH_UPDATE_ACL = 3007
    AUTH_DELETE_ACL = 3008
    AUTH_GET_ACL = 3009
    AUTH_LIST_ACL = 3010
    # 5.4
    SWITCH_TIMER_ENGINE = 5001
    # between Penstock's brokers only
    GET_REPLICA_TABLE = 100001
    # POP
    POP_MESSAGE = 200050
    ACK_MESSAGE = 200051
    PEEK_MESSAGE = 200052
    CHANGE_MESSAGE_INVISIBLETIME = 200053
    NOTIFICATION = 200054
    POLLING_INFO = 200055
    POP_ROLLBACK = 200056
    BATCH_ACK_MESSAGE = 200151


CUT_CODES: Final = {code & 0xFFFF: code.value for code in RequestCode if code > 0xFFFF}
"""Binary headers have 16 bits for a code; Java's clients send what is left of those of POP."""


class ResponseCode(IntEnum):
    """How a request ended."""

    RPC_TIME_OUT = -1006
    RPC_SEND_TO_CHANNEL_FAILED = -1004
    RPC_ADDR_IS_NULL = -1002
    # only inside RocketMQ's own RPC client, never on the wire
    RPC_UNKNOWN = -1000
    # everybody
    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    # broker
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    # transactions (legacy), consumers, POP
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOW = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210
    BROKER_NOT_EXIST = 211
    BROKER_DISPATCH_NOT_COMPLETE = 212
    BROADCAST_CONSUMPTION = 213
    FLOW_CONTROL = 215
    # static topics, recall, shutdown
    NOT_LEADER_FOR_QUEUE = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500
    # controller
    CONTROLLER_FENCED_MASTER_EPOCH = 2000
    CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH = 2001
    CONTROLLER_INVALID_MASTER = 2002
    CONTROLLER_INVALID_REPLICAS = 2003
    CONTROLLER_MASTER_NOT_AVAILABLE = 2004
    CONTROLLER_INVALID_REQUEST = 2005
    CONTROLLER_BROKER_NOT_ALIVE = 2006
    CONTROLLER_NOT_LEADER = 2007
    CONTROLLER_BROKER_METADATA_NOT_EXIST = 2008
    CONTROLLER_INVALID_CLEAN_BROKER_METADATA = 2009
    CONTROLLER_BROKER_NEED_TO_BE_REGISTERED = 2010
    CONTROLLER_MASTER_STILL_EXIST = 2011
    CONTROLLER_ELECT_MASTER_FAILED = 2012
    CONTROLLER_ALTER_SYNC_STATE_SET_FAILED = 2013
    CONTROLLER_BROKER_ID_INVALID = 2014
    CONTROLLER_JRAFT_INTERNAL_ERROR = 2015
    CONTROLLER_BROKER_LIVE_INFO_NOT_EXISTS = 2016
    # users and access lists
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002


# The codes that a Java producer retries on another broker; every other code is final.
RETRYABLE_RESPONSES: Final = frozenset(
    {
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    }
)

_REQUEST_NAMES: Final = {int(code): code.name for code in RequestCode}
_RESPONSE_NAMES: Final = {int(code): code.name for code in ResponseCode}


def request_name(code: int) -> str:
    """The name of a request code; `UNKNOWN(12345)` where it has none."""
    return _REQUEST_NAMES.get(code) or f"UNKNOWN({code})"


def response_name(code: int) -> str:
    """The name of a response code; `UNKNOWN(12345)` where it has none."""
    return _RESPONSE_NAMES.get(code) or f"UNKNOWN({code})"


REMARK_OUTCOME_UNKNOWN: Final = "already resolved; the outcome is not indexed"
"""END_TRANSACTION, Penstock only: the transaction is resolved, but a broker without an index can't
tell whether it was committed or rolled back."""

# --- header --------------------------------------------------------------------------------------


class SerializeType(IntEnum):
    """Top byte of the header mark: how the header of this frame is written."""

    JSON = 0
    ROCKETMQ = 1


class LanguageCode(IntEnum):
    """Language of the sender: the number in binary headers, the name in JSON headers."""

    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12
    NODE_JS = 13


_LANGUAGE_NAMES: Final = {int(code): code.name for code in LanguageCode}


def language_name(code: int) -> str:
    """The name of a language code; OTHER for an unknown number."""
    return _LANGUAGE_NAMES.get(code, "OTHER")


FLAG_RESPONSE: Final = 1
FLAG_ONE_WAY: Final = 2

# `version` is an ordinal: each release follows its own snapshot.
V3_0_7: Final = 29  # consumers below can't be told to reset their offsets
V3_1_8: Final = 63  # consumers below can't be asked for their status
V3_4_9: Final = 121  # from here on the client's maxReconsumeTimes applies
V4_1_0_SNAPSHOT: Final = 232  # brokers below are assumed to have no SQL92 filters
V4_9_3: Final = 399  # up to here `_UNIQUE_KEY_QUERY` is left out of the signature
V4_9_4: Final = 401  # from here on route bodies are strict JSON
V4_9_8: Final = 409
V5_0_0: Final = 413  # from here on compressed registrations have a mapping section
V5_3_1: Final = 475  # only peers above understand GO_AWAY
V5_3_3: Final = 479
V5_4_0: Final = 493
HIGHER_VERSION: Final = 612

# --- sysFlag of a message ------------------------------------------------------------------------

SYS_COMPRESSED: Final = 0x01
SYS_MULTI_TAGS: Final = 0x02
SYS_TRANSACTION_NONE: Final = 0x00
SYS_TRANSACTION_PREPARED: Final = 0x04
SYS_TRANSACTION_COMMIT: Final = 0x08
SYS_TRANSACTION_ROLLBACK: Final = 0x0C
SYS_TRANSACTION_MASK: Final = 0x0C
SYS_BORN_HOST_V6: Final = 0x10
SYS_STORE_HOST_V6: Final = 0x20
SYS_NEED_UNWRAP: Final = 0x40
SYS_INNER_BATCH: Final = 0x80
SYS_COMPRESSION_LEGACY: Final = 0x000  # zlib, from clients older than the type bits
SYS_COMPRESSION_LZ4: Final = 0x100
SYS_COMPRESSION_ZSTD: Final = 0x200
SYS_COMPRESSION_ZLIB: Final = 0x300
SYS_COMPRESSION_MASK: Final = 0x700

# --- sysFlag of a pull ---------------------------------------------------------------------------

PULL_COMMIT_OFFSET: Final = 0x01
PULL_SUSPEND: Final = 0x02
PULL_SUBSCRIPTION: Final = 0x04
PULL_CLASS_FILTER: Final = 0x08
PULL_LITE: Final = 0x10

# --- sysFlag of a topic --------------------------------------------------------------------------

TOPIC_UNIT: Final = 0x01
TOPIC_UNIT_SUB: Final = 0x02

# --- permissions of a topic or a broker ----------------------------------------------------------

PERM_INHERIT: Final = 1
PERM_WRITE: Final = 2
PERM_READ: Final = 4
PERM_PRIORITY: Final = 8
PERM_READ_WRITE: Final = PERM_READ | PERM_WRITE
PERM_TEMPLATE: Final = PERM_READ_WRITE | PERM_INHERIT

MASTER_ID: Final = 0

# --- extra fields outside any request's own list -------------------------------------------------

EXT_ACCESS_KEY: Final = "AccessKey"
EXT_SECURITY_TOKEN: Final = "SecurityToken"
EXT_SIGNATURE: Final = "Signature"
EXT_UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
EXT_BOOT_TIMESTAMP: Final = "bootTimestamp"
EXT_ZONE_NAME: Final = "__ZONE_NAME"
EXT_ZONE_MODE: Final = "__ZONE_MODE"
EXT_REQUEST_TYPE: Final = "ReqT"
EXT_MSG_REGION: Final = "MSG_REGION"
EXT_TRACE_ON: Final = "TRACE_ON"
EXT_SUPPORT_HEARTBEAT_V2: Final = "IS_SUPPORT_HEART_BEAT_V2"
EXT_SUB_CHANGE: Final = "IS_SUB_CHANGE"
DEFAULT_REGION: Final = "DefaultRegion"

# --- properties of a message ---------------------------------------------------------------------

PROPERTY_SEPARATOR: Final = "\x02"  # ends an entry
PROPERTY_NAME_SEPARATOR: Final = "\x01"  # between name and value
KEY_SEPARATOR: Final = " "

PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_WAIT: Final = "WAIT"
PROPERTY_DELAY: Final = "DELAY"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID: Final = "REAL_QID"
PROPERTY_TRANSACTION_PREPARED: Final = "TRAN_MSG"
PROPERTY_PRODUCER_GROUP: Final = "PGROUP"
PROPERTY_MIN_OFFSET: Final = "MIN_OFFSET"
PROPERTY_MAX_OFFSET: Final = "MAX_OFFSET"
PROPERTY_BUYER_ID: Final = "BUYER_ID"
PROPERTY_ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_TRANSFER_FLAG: Final = "TRANSFER_FLAG"
PROPERTY_CORRECTION_FLAG: Final = "CORRECTION_FLAG"
PROPERTY_MQ2_FLAG: Final = "MQ2_FLAG"
PROPERTY_RECONSUME_TIME: Final = "RECONSUME_TIME"
PROPERTY_MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
PROPERTY_MSG_REGION: Final = "MSG_REGION"
PROPERTY_TRACE_ON: Final = "TRACE_ON"
PROPERTY_UNIQ_KEY: Final = "UNIQ_KEY"
PROPERTY_EXTEND_UNIQ_INFO: Final = "EXTEND_UNIQ_INFO"
PROPERTY_DUP_INFO: Final = "DUP_INFO"
PROPERTY_CONSUME_START_TIME: Final = "CONSUME_START_TIME"
PROPERTY_INSTANCE_ID: Final = "INSTANCE_ID"
PROPERTY_CORRELATION_ID: Final = "CORRELATION_ID"
PROPERTY_REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
PROPERTY_TTL: Final = "TTL"
PROPERTY_ARRIVE_TIME: Final = "ARRIVE_TIME"
PROPERTY_PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
PROPERTY_CLUSTER: Final = "CLUSTER"
PROPERTY_MSG_TYPE: Final = "MSG_TYPE"
PROPERTY_POP_CK: Final = "POP_CK"
PROPERTY_POP_CK_OFFSET: Final = "POP_CK_OFFSET"
PROPERTY_FIRST_POP_TIME: Final = "1ST_POP_TIME"
PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
PROPERTY_INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
PROPERTY_TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
PROPERTY_TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
PROPERTY_TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
PROPERTY_TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
PROPERTY_TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
PROPERTY_TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
PROPERTY_TIMER_OUT_MS: Final = "TIMER_OUT_MS"
PROPERTY_TIMER_DEL_UNIQKEY: Final = "TIMER_DEL_UNIQKEY"
PROPERTY_TIMER_DELAY_LEVEL: Final = "TIMER_DELAY_LEVEL"
PROPERTY_BORN_HOST: Final = "__BORNHOST"
PROPERTY_BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"
PROPERTY_DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
PROPERTY_DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
PROPERTY_CRC32: Final = "__CRC32#"
PROPERTY_TRANSACTION_ID: Final = "__transactionId__"
PROPERTY_TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
PROPERTY_CHECK_IMMUNITY_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
PROPERTY_SHARDING_KEY: Final = "__SHARDINGKEY"
PROPERTY_INNER_NUM: Final = "INNER_NUM"
PROPERTY_INNER_BASE: Final = "INNER_BASE"
PROPERTY_INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
PROPERTY_FORWARD_QUEUE_ID: Final = "PROPERTY_FORWARD_QUEUE_ID"
PROPERTY_REDIRECT: Final = "REDIRECT"
PROPERTY_TRACE_CONTEXT: Final = "TRACE_CONTEXT"
PROPERTY_PRIORITY: Final = "_SYS_MSG_PRIORITY_"  # 5.4
PROPERTY_ORIGIN_GROUP: Final = "ORIGIN_GROUP"  # 5.4
PROPERTY_TIMER_ROLL_LABEL: Final = "TIMER_ROLL_LABEL"  # 5.4
PROPERTY_TRANSIENT_PREFIX: Final = "__RMQ.TRANSIENT."  # such properties are never stored
POP_RETRY_PROPERTIES: Final = (PROPERTY_FIRST_POP_TIME, PROPERTY_ORIGIN_GROUP)
"""Added to revived messages by the broker; no sender may set them in a retry topic."""
MSG_TYPE_REPLY: Final = "reply"  # value of PROPERTY_MSG_TYPE

# Names that applications may not use for their own properties.
RESERVED_PROPERTIES: Final = frozenset(
    {
        PROPERTY_KEYS,
        PROPERTY_TAGS,
        PROPERTY_WAIT,
        PROPERTY_DELAY,
        PROPERTY_RETRY_TOPIC,
        PROPERTY_REAL_TOPIC,
        PROPERTY_REAL_QUEUE_ID,
        PROPERTY_TRANSACTION_PREPARED,
        PROPERTY_PRODUCER_GROUP,
        PROPERTY_MIN_OFFSET,
        PROPERTY_MAX_OFFSET,
        PROPERTY_BUYER_ID,
        PROPERTY_ORIGIN_MESSAGE_ID,
        PROPERTY_TRANSFER_FLAG,
        PROPERTY_CORRECTION_FLAG,
        PROPERTY_MQ2_FLAG,
        PROPERTY_RECONSUME_TIME,
        PROPERTY_MAX_RECONSUME_TIMES,
        PROPERTY_MSG_REGION,
        PROPERTY_TRACE_ON,
        PROPERTY_UNIQ_KEY,
        PROPERTY_EXTEND_UNIQ_INFO,
        PROPERTY_DUP_INFO,
        PROPERTY_CONSUME_START_TIME,
        PROPERTY_INSTANCE_ID,
        PROPERTY_CORRELATION_ID,
        PROPERTY_REPLY_TO_CLIENT,
        PROPERTY_TTL,
        PROPERTY_ARRIVE_TIME,
        PROPERTY_PUSH_REPLY_TIME,
        PROPERTY_CLUSTER,
        PROPERTY_MSG_TYPE,
        PROPERTY_POP_CK,
        PROPERTY_POP_CK_OFFSET,
        PROPERTY_FIRST_POP_TIME,
        PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
        PROPERTY_INNER_MULTI_QUEUE_OFFSET,
        PROPERTY_TIMER_DELAY_SEC,
        PROPERTY_TIMER_DELAY_MS,
        PROPERTY_TIMER_DELIVER_MS,
        PROPERTY_TIMER_ENQUEUE_MS,
        PROPERTY_TIMER_DEQUEUE_MS,
        PROPERTY_TIMER_ROLL_TIMES,
        PROPERTY_TIMER_OUT_MS,
        PROPERTY_TIMER_DEL_UNIQKEY,
        PROPERTY_TIMER_DELAY_LEVEL,
        PROPERTY_BORN_HOST,
        PROPERTY_BORN_TIMESTAMP,
        PROPERTY_DLQ_ORIGIN_TOPIC,
        PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
        PROPERTY_CRC32,
        PROPERTY_PRIORITY,
        PROPERTY_ORIGIN_GROUP,
    }
)

# --- topics --------------------------------------------------------------------------------------

TOPIC_AUTO_CREATE: Final = "TBW102"  # the template of topics created by sending
TOPIC_SCHEDULE: Final = "SCHEDULE_TOPIC_XXXX"
TOPIC_BENCHMARK: Final = "BenchmarkTest"
TOPIC_TRANS_HALF: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
TOPIC_TRANS_OP_HALF: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TOPIC_ROCKSDB_TRANS_HALF: Final = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"  # 5.4
TOPIC_ROCKSDB_TRANS_OP_HALF: Final = "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"  # 5.4
TOPIC_TRANS_CHECK_MAX_TIME: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
TOPIC_TRACE: Final = "RMQ_SYS_TRACE_TOPIC"
TOPIC_SELF_TEST: Final = "SELF_TEST_TOPIC"
TOPIC_OFFSET_MOVED: Final = "OFFSET_MOVED_EVENT"
TOPIC_ROCKSDB_OFFSET: Final = "CHECKPOINT_TOPIC"
TOPIC_TIMER: Final = "rmq_sys_wheel_timer"

SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
SYNC_BROKER_MEMBER_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"  # + broker name
TRACE_DATA_PREFIX: Final = "rmq_sys_TRACE_DATA_"  # + region: traces of clients of a cloud
REVIVE_TOPIC_PREFIX: Final = "rmq_sys_REVIVE_LOG_"  # + cluster name
REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"  # cluster name before it
RETRY_TOPIC_PREFIX: Final = "%RETRY%"
DLQ_TOPIC_PREFIX: Final = "%DLQ%"
LMQ_PREFIX: Final = "%LMQ%"
POP_RETRY_SEPARATOR_V1: Final = "_"
POP_RETRY_SEPARATOR_V2: Final = "+"
POP_ORDER_REVIVE_QUEUE: Final = 999

# Topics of every broker; it adds those that are named after its cluster and itself.
SYSTEM_TOPICS: Final = frozenset(
    {
        TOPIC_AUTO_CREATE,
        TOPIC_SCHEDULE,
        TOPIC_BENCHMARK,
        TOPIC_TRANS_HALF,
        TOPIC_TRANS_OP_HALF,
        TOPIC_ROCKSDB_TRANS_HALF,
        TOPIC_ROCKSDB_TRANS_OP_HALF,
        TOPIC_TRANS_CHECK_MAX_TIME,
        TOPIC_TRACE,
        TOPIC_SELF_TEST,
        TOPIC_OFFSET_MOVED,
        TOPIC_ROCKSDB_OFFSET,
    }
)

# Topics whose messages only the broker writes and reads: it stores them again in the topics that
# they name. All topics with SYSTEM_TOPIC_PREFIX are internal too, except TRACE_DATA_PREFIX.
INTERNAL_TOPICS: Final = frozenset(
    {
        TOPIC_SCHEDULE,
        TOPIC_TRANS_HALF,
        TOPIC_TRANS_OP_HALF,
        TOPIC_ROCKSDB_TRANS_HALF,
        TOPIC_ROCKSDB_TRANS_OP_HALF,
        TOPIC_ROCKSDB_OFFSET,
    }
)

# Topics that only the broker writes, but consumers may read.
SEND_FORBIDDEN_TOPICS: Final = frozenset(
    {TOPIC_TRANS_CHECK_MAX_TIME, TOPIC_SELF_TEST, TOPIC_OFFSET_MOVED}
)

# --- groups --------------------------------------------------------------------------------------

GROUP_DEFAULT_PRODUCER: Final = "DEFAULT_PRODUCER"
GROUP_DEFAULT_CONSUMER: Final = "DEFAULT_CONSUMER"
GROUP_TOOLS_CONSUMER: Final = "TOOLS_CONSUMER"
GROUP_SCHEDULE_CONSUMER: Final = "SCHEDULE_CONSUMER"
GROUP_FILTERSRV_CONSUMER: Final = "FILTERSRV_CONSUMER"
GROUP_MONITOR_CONSUMER: Final = "__MONITOR_CONSUMER"
GROUP_INNER_PRODUCER: Final = "CLIENT_INNER_PRODUCER"
GROUP_SELF_TEST_PRODUCER: Final = "SELF_TEST_P_GROUP"
GROUP_SELF_TEST_CONSUMER: Final = "SELF_TEST_C_GROUP"
GROUP_ONS_HTTP_PROXY: Final = "CID_ONS-HTTP-PROXY"
GROUP_ONSAPI_PERMISSION: Final = "CID_ONSAPI_PERMISSION"
GROUP_ONSAPI_OWNER: Final = "CID_ONSAPI_OWNER"
GROUP_ONSAPI_PULL: Final = "CID_ONSAPI_PULL"
GROUP_SYS_TRANS: Final = "CID_RMQ_SYS_TRANS"
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"

SYSTEM_GROUPS: Final = frozenset(
    {
        GROUP_DEFAULT_PRODUCER,
        GROUP_DEFAULT_CONSUMER,
        GROUP_TOOLS_CONSUMER,
        GROUP_SCHEDULE_CONSUMER,
        GROUP_FILTERSRV_CONSUMER,
        GROUP_MONITOR_CONSUMER,
        GROUP_INNER_PRODUCER,
        GROUP_SELF_TEST_PRODUCER,
        GROUP_SELF_TEST_CONSUMER,
        GROUP_ONS_HTTP_PROXY,
        GROUP_ONSAPI_PERMISSION,
        GROUP_ONSAPI_OWNER,
        GROUP_ONSAPI_PULL,
        GROUP_SYS_TRANS,
    }
)

# Groups that a broker creates at start.
BUILT_IN_GROUPS: Final = (
    GROUP_TOOLS_CONSUMER,
    GROUP_FILTERSRV_CONSUMER,
    GROUP_SELF_TEST_CONSUMER,
    GROUP_ONS_HTTP_PROXY,
    GROUP_ONSAPI_PULL,
    GROUP_ONSAPI_PERMISSION,
    GROUP_ONSAPI_OWNER,
    GROUP_SYS_TRANS,
)

# --- names ---------------------------------------------------------------------------------------

TOPIC_CHARS_MAX: Final = 127
RETRY_TOPIC_CHARS_MAX: Final = 255  # retry and dead-letter topics
GROUP_CHARS_MAX: Final = 120  # leaves space for the prefix of its retry topic
PROPERTIES_BYTES_MAX: Final = 32767

_NAME_CHARS: Final = frozenset("%|-_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def topic_fault(topic: str) -> str | None:
    """Why the topic name is not valid, or None."""
    chars_max = TOPIC_CHARS_MAX
    if topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
        chars_max = RETRY_TOPIC_CHARS_MAX
    return _name_fault("topic", topic, chars_max)


def group_fault(group: str) -> str | None:
    """Why the group name is not valid, or None."""
    return _name_fault("group", group, GROUP_CHARS_MAX)


def is_system_topic(topic: str) -> bool:
    """Whether the topic is a system topic of every cluster."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def is_internal_topic(topic: str) -> bool:
    """Whether only the broker writes and reads the messages of the topic."""
    return topic in INTERNAL_TOPICS or (
        topic.startswith(SYSTEM_TOPIC_PREFIX) and not topic.startswith(TRACE_DATA_PREFIX)
    )


def is_send_forbidden(topic: str) -> bool:
    """Whether clients may not send to the topic."""
    return topic in SEND_FORBIDDEN_TOPICS or is_internal_topic(topic)


def real_topic(topic: str, properties: Mapping[str, str]) -> str:
    """The topic that a message was sent to; it may be stored in a topic that only the broker
    writes."""
    return properties.get(PROPERTY_REAL_TOPIC) or topic if is_send_forbidden(topic) else topic


def is_system_group(group: str) -> bool:
    """Whether the group belongs to the broker or to RocketMQ's tools."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def _name_fault(kind: str, name: str, chars_max: int) -> str | None:
    if not name.strip():
        return f"the {kind} name is blank"
    if len(name) > chars_max:
        return f"the {kind} name has {len(name)} characters, the limit is {chars_max}: {name[:40]}…"
    for char in name:
        if char not in _NAME_CHARS:
            return f"the {kind} name {name!r} contains {char!r}; allowed are a-z A-Z 0-9 % | _ -"
    return None
