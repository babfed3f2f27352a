"""The cases of the golden fixtures: what goes into RocketMQ's classes.

Plain data. Bytes are hex strings. What comes out of the classes is added to the same objects by
the Java program Golden; golden.py describes the result.
"""

from __future__ import annotations

from typing import Any

Case = dict[str, Any]

CHINESE = "\u4e2d\u6587\u6d88\u606f"
EMOJI = "\U0001f680"  # a surrogate pair in UTF-16, four bytes in UTF-8

_VERSION_NUMBER = {"5.5.1": 515, "5.4.0": 493, "4.9.8": 409}
_TEXT = " ".join(f"line {i}: the quick brown fox {CHINESE}" for i in range(150))[:4700].encode()
_BODIES = {
    "empty": b"",
    "one-byte": b"x",
    "short-text": b"hello penstock",
    "text-5k": _TEXT,
    "zeros-9k": bytes(9_000),
    "all-bytes": bytes(range(256)) * 4,
}


def inputs(version: str) -> dict[str, list[Case]]:
    """The input document for one RocketMQ version."""
    number = _VERSION_NUMBER[version]
    return {
        "frames": _frames(number),
        "records": _records(),
        "store_records": _store_records(),
        "properties_to_text": [
            {"name": "empty", "properties": {}},
            {"name": "one", "properties": {"TAGS": "a"}},
            {"name": "three", "properties": {"KEYS": "k1 k2", "TAGS": "a", "WAIT": "true"}},
            {"name": "non-ascii", "properties": {CHINESE: f"{CHINESE}{EMOJI}"}},
            {"name": "empty-value", "properties": {"a": "", "b": "1"}},
            {"name": "null-value", "properties": {"a": None, "b": "1"}},
        ],
        "text_to_properties": [
            {"name": name, "text": text}
            for name, text in {
                "null": None,
                "empty": "",
                "one": "TAGS\x01a\x02",
                "no-final-separator": "KEYS\x01k\x02TAGS\x01a",
                "empty-value": "a\x01\x02b\x011\x02",
                "empty-name": "\x01v\x02b\x011\x02",
                "no-name-value-separator": "junk\x02b\x011\x02",
                "two-name-value-separators": "a\x01x\x01y\x02b\x011\x02",
                "duplicate-name": "a\x011\x02a\x012\x02",
                "doubled-separator": "a\x011\x02\x02b\x012\x02",
                "shortest": "a\x01b",
                "non-ascii": f"{CHINESE}\x01{EMOJI}\x02",
            }.items()
        ],
        "batches": _batches(),
        "offset_ids": [
            {"name": name, "host": host, "port": port, "offset": offset}
            for name, host, port, offset in (
                ("v4", "127.0.0.1", 10911, 123456),
                ("v4-high", "250.251.252.253", 65535, 2**62 + 7),
                ("v4-zero", "0.0.0.0", 0, 0),
                ("v6", "2001:db8::8a2e:370:7334", 10911, 123456),
                ("v6-loopback", "::1", 1, 2**40),
            )
        ],
        "unique_id_reads": [
            {"name": "v4", "id": "0A0102F3FFFE18B4AAC2123456780001"},
            {"name": "v6", "id": "20010DB8000000000000000000000001FFFE18B4AAC2123456780001"},
        ],
        "string_hashes": [
            {"name": name, "text": text}
            for name, text in {
                "empty": "",
                "tag": "TagA",
                "overflow": "a tag that is long enough to overflow",
                "collision-1": "Aa",
                "collision-2": "BB",
                "chinese": CHINESE,
                "emoji": EMOJI,
                "min-int": "polygenelubricants",
                "blank": " ",
            }.items()
        ],
        "crcs": [{"name": name, "body": body.hex()} for name, body in _BODIES.items()],
        "index_hashes": [
            {"name": name, "key": key}
            for name, key in {
                "topic#key": "TopicTest#order-1",
                "min-int": "polygenelubricants",
                "chinese": f"TopicTest#{CHINESE}",
                "empty": "",
            }.items()
        ],
        "index_files": _index_files(),
        "compressed": [
            {"name": f"{codec}-{name}", "codec": codec, "level": 5, "body": body.hex()}
            for codec in ("LZ4", "ZSTD", "ZLIB")
            for name, body in _BODIES.items()
        ],
        "bodies": _bodies(),
    }


def _frames(number: int) -> list[Case]:
    def frame(name: str, code: int, **changes: Any) -> Case:
        case: Case = {
            "name": name,
            "code": code,
            "flag": 0,
            "opaque": 7,
            "version": number,
            "language": "JAVA",
            "remark": None,
            "ext": None,
            "header_class": None,
            "header": None,
            "body": None,
        }
        return {**case, **changes}

    properties = f"KEYS\x01k1 k2\x02TAGS\x01a\x02name\x01{CHINESE}{EMOJI}\x02"
    send = {
        "a": "producer-group",
        "b": "TopicTest",
        "c": "TBW102",
        "d": 4,
        "e": 3,
        "f": 0,
        "g": 1700000000123,
        "h": -5,
        "i": properties,
        "j": 0,
        "k": False,
        "l": 16,
        "m": False,
        "n": "broker-a",
    }
    return [
        frame(
            "route-query",
            105,
            header_class="GetRouteInfoRequestHeader",
            header={"topic": "TopicTest", "acceptStandardJsonOnly": True},
        ),
        frame(
            "send-v2",
            310,
            opaque=2**31 - 1,
            header_class="SendMessageRequestHeaderV2",
            header=send,
            body=b"hello penstock".hex(),
        ),
        frame(
            "send-v2-required-only",
            310,
            header_class="SendMessageRequestHeaderV2",
            header={key: send[key] for key in "abcdefgh"},
            body="00",
        ),
        frame(
            "response",
            17,
            flag=1,
            remark=f'No topic "T\\1"\n\t{CHINESE} {EMOJI} <&>\'/',
            ext={"msgId": "7F00000100002A9F000000000001E240", "queueId": "3", "empty": ""},
            body=b'{"a":1}'.hex(),
        ),
        frame("response-plain", 0, flag=1),
        frame("one-way", 15, flag=2, ext={"topic": "T", "consumerGroup": "g"}),
        frame("empty-ext", 34, ext={}, body="7b7d"),
        frame("negative-opaque", 34, opaque=-(2**31)),
        frame("python-client", 105, language="PYTHON", ext={"topic": "T"}),
        frame("large-code", 200050, ext={"topic": "T"}),
        frame("control-characters", 1, ext={"k": "".join(map(chr, range(32))) + '\x7f\u2028"\\/'}),
    ]


def _record(name: str, **changes: Any) -> Case:
    case: Case = {
        "name": name,
        "topic": "TopicTest",
        "queue_id": 3,
        "flag": 0,
        "queue_offset": 12,
        "physical_offset": 123456,
        "sys_flag": 0,
        "born_timestamp": 1700000000123,
        "born_host": "10.1.2.3",
        "born_port": 54321,
        "store_timestamp": 1700000000456,
        "store_host": "127.0.0.1",
        "store_port": 10911,
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
        "body": b"hello penstock".hex(),
        "properties": {"KEYS": "k1", "TAGS": "a", "UNIQ_KEY": "7F0000010000000000000000000A0001"},
    }
    return {**case, **changes}


def _records() -> list[Case]:
    v6 = {"born_host": "2001:db8:0:0:0:8a2e:370:7334", "sys_flag": 0x10}
    return [
        _record("v4"),
        _record("v6-born", **v6),
        _record("v6-store", store_host="fe80:0:0:0:0:0:0:1", sys_flag=0x20),
        _record("v6-both", **{**v6, "store_host": "0:0:0:0:0:0:0:1", "sys_flag": 0x30}),
        _record("compressed-legacy", sys_flag=0x001, body=_TEXT.hex()),
        _record("compressed-lz4", sys_flag=0x101, body=_TEXT.hex()),
        _record("compressed-zstd", sys_flag=0x201, body=_TEXT.hex()),
        _record("compressed-zlib", sys_flag=0x301, body=_TEXT.hex()),
        _record("no-properties", properties={}),
        _record("non-ascii", topic=f"T-{CHINESE}", properties={"name": f"{CHINESE}{EMOJI}"}),
        _record("topic-127", topic="t" * 127),
        _record(
            "extreme-numbers",
            queue_id=2**31 - 1,
            flag=-(2**31),
            queue_offset=2**63 - 1,
            physical_offset=2**63 - 1,
            born_timestamp=0,
            store_timestamp=2**63 - 1,
            born_host="255.255.255.255",
            born_port=65535,
            reconsume_times=-1,
            prepared_transaction_offset=-1,
        ),
        _record("half", sys_flag=0x4, properties={"TRAN_MSG": "true", "PGROUP": "g"}),
        _record("committed", sys_flag=0x8, prepared_transaction_offset=98765),
    ]


def _store_records() -> list[Case]:
    def record(name: str, version: int, **changes: Any) -> Case:
        return _record(name, record_version=version, **{"physical_offset": 0, **changes})

    return [
        record("v1", 1),
        record("v1-no-properties", 1, properties={}),
        record("v1-empty-body", 1, body=""),
        record("v2-short-topic", 2),
        record("v2-long-topic", 2, topic="%RETRY%" + "g" * 193),
        record(
            "v2-v6-both",
            2,
            topic="%RETRY%" + "g" * 248,
            born_host="2001:db8:0:0:0:0:0:1",
            store_host="2001:db8:0:0:0:0:0:2",
            sys_flag=0x30,
        ),
    ]


def _batches() -> list[Case]:
    def message(body: bytes, flag: int = 0, **properties: str) -> Case:
        return {"flag": flag, "body": body.hex(), "properties": properties}

    return [
        {"name": "one", "messages": [message(b"a", TAGS="t")]},
        {
            "name": "three",
            "messages": [
                message(b"first", KEYS="k1", TAGS="a", WAIT="true"),
                message(b"second", flag=-7, name=f"{CHINESE}{EMOJI}"),
                message(bytes(range(256))),
            ],
        },
    ]


def _index_files() -> list[Case]:
    puts = [
        ("TopicTest#a", 0, 1700000000000),
        ("TopicTest#b", 200, 1700000000999),
        ("TopicTest#a", 400, 1700000001000),
        (f"TopicTest#{CHINESE}", 600, 1700000003500),
        ("TopicTest#c", 800, 1699999990000),
        ("polygenelubricants", 1000, 1700000009000),
        ("TopicTest#d", 1200, 1700000009001),
    ]
    return [
        {
            "name": "small",
            "hash_slots": 5,
            "max_entries": 7,
            "puts": [
                {"key": key, "physical_offset": offset, "store_timestamp": time}
                for key, offset, time in puts
            ],
        },
        {"name": "unused", "hash_slots": 3, "max_entries": 4, "puts": []},
    ]


def _bodies() -> list[Case]:
    def body(name: str, class_: str, fields: Case, **options: bool) -> Case:
        return {"name": name, "class": class_, "fields": fields, **options}

    version = {"stateVersion": 0, "timestamp": 1700000000123, "counter": 9}
    broker = {
        "cluster": "DefaultCluster",
        "brokerName": "broker-a",
        "brokerAddrs": {"0": "127.0.0.1:10911", "1": "127.0.0.2:10911"},
    }
    queue_data = {
        "brokerName": "broker-a",
        "readQueueNums": 4,
        "writeQueueNums": 8,
        "perm": 6,
        "topicSysFlag": 0,
    }
    route = {"queueDatas": [queue_data], "brokerDatas": [broker], "filterServerTable": {}}
    subscription = {
        "topic": "TopicTest",
        "subString": "a || b",
        "tagsSet": ["a", "b"],
        "codeSet": [97, 98],
        "subVersion": 1700000000123,
        "expressionType": "TAG",
    }
    mq0 = {"topic": "TopicTest", "brokerName": "broker-a", "queueId": 0}
    mq1 = {"topic": "TopicTest", "brokerName": "broker-a", "queueId": 1}
    topic_config = {"topicName": "TopicTest", "readQueueNums": 8, "writeQueueNums": 8, "perm": 6}
    topics = {
        "topicConfigTable": {
            "TopicTest": topic_config,
            "ordered": {**topic_config, "topicName": "ordered", "order": True, "perm": 4},
        },
        "dataVersion": version,
    }
    offsets = {"TopicTest@group": {"0": 123, "1": 7}, "%RETRY%group@group": {"0": 0}}
    lock = {"consumerGroup": "group", "clientId": "10.0.0.1@1", "mqSet": [mq0, mq1]}
    mode = {"topic": "TopicTest", "consumerGroup": "group", "mode": "POP", "popShareQueueNum": 2}
    return [
        body("data-version", "DataVersion", version),
        body("message-queue", "MessageQueue", mq0),
        body("route", "TopicRouteData", route, strict=True),
        body(
            "route-non-ascii",
            "TopicRouteData",
            {
                **route,
                "orderTopicConf": f"broker-a:4;{CHINESE}{EMOJI}<&>'",
                "filterServerTable": {"127.0.0.1:10911": ["127.0.0.1:30000"]},
            },
            strict=True,
        ),
        body("route-empty", "TopicRouteData", {}, strict=True),
        body(
            "cluster-info",
            "ClusterInfo",
            {
                "brokerAddrTable": {
                    "broker-a": broker,
                    "broker-b": {
                        **broker,
                        "brokerName": "broker-b",
                        "brokerAddrs": {"0": "127.0.0.3:10911"},
                        "zoneName": "z1",
                        "enableActingMaster": True,
                    },
                },
                "clusterAddrTable": {"DefaultCluster": ["broker-a", "broker-b"]},
            },
        ),
        body(
            "heartbeat",
            "HeartbeatData",
            {
                "clientID": "10.0.0.1@4321#99",
                "producerDataSet": [{"groupName": "producer-group"}],
                "consumerDataSet": [
                    {
                        "groupName": "group",
                        "consumeType": "CONSUME_PASSIVELY",
                        "messageModel": "CLUSTERING",
                        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
                        "subscriptionDataSet": [
                            subscription,
                            {
                                **subscription,
                                "topic": "%RETRY%group",
                                "subString": "*",
                                "tagsSet": [],
                                "codeSet": [],
                            },
                        ],
                        "unitMode": False,
                    }
                ],
            },
        ),
        body("topic-configs", "TopicConfigSerializeWrapper", topics),
        body(
            "topic-configs-and-mapping",
            "TopicConfigAndMappingSerializeWrapper",
            {**topics, "mappingDataVersion": version},
        ),
        body(
            "topic-config-attributes",
            "TopicConfig",
            {**topic_config, "attributes": {"message.type": "FIFO", "queue.type": "SimpleCQ"}},
        ),
        body(
            "subscription-groups",
            "SubscriptionGroupWrapper",
            {
                "subscriptionGroupTable": {
                    "group": {"groupName": "group", "retryMaxTimes": 3, "consumeEnable": False}
                },
                "forbiddenTable": {"group": {"TopicTest": 4}},
                "dataVersion": version,
            },
        ),
        body("subscription-group-defaults", "SubscriptionGroupConfig", {"groupName": "group"}),
        body("lock-request", "LockBatchRequestBody", lock),
        body("unlock-request", "UnlockBatchRequestBody", lock),
        body("lock-response", "LockBatchResponseBody", {"lockOKMQSet": [mq0, mq1]}),
        body("reset-offset", "ResetOffsetBody", {"offsetTable": [[mq0, 123], [mq1, 0]]}),
        body(
            "reset-offset-c",
            "ResetOffsetBodyForC",
            {"offsetTable": [{**mq0, "offset": 123}]},
        ),
        body(
            "consumer-status",
            "GetConsumerStatusBody",
            {
                "messageQueueTable": [[mq0, 123]],
                "consumerTable": {"10.0.0.1@1": [[mq0, 123], [mq1, 4]]},
            },
        ),
        body(
            "topic-stats",
            "TopicStatsTable",
            {
                "offsetTable": [
                    [mq0, {"minOffset": 1, "maxOffset": 9, "lastUpdateTimestamp": 1700000000123}]
                ],
                "topicPutTps": 1.5,
            },
        ),
        body(
            "consume-stats",
            "ConsumeStats",
            {
                "offsetTable": [
                    [
                        mq0,
                        {
                            "brokerOffset": 9,
                            "consumerOffset": 4,
                            "pullOffset": 5,
                            "lastTimestamp": 1700000000123,
                        },
                    ]
                ],
                "consumeTps": 0.0,
            },
        ),
        body(
            "consumer-connection",
            "ConsumerConnection",
            {
                "connectionSet": [
                    {
                        "clientId": "10.0.0.1@1",
                        "clientAddr": "10.0.0.1:4000",
                        "language": "JAVA",
                        "version": 493,
                    }
                ],
                "subscriptionTable": {"TopicTest": subscription},
                "consumeType": "CONSUME_PASSIVELY",
                "messageModel": "BROADCASTING",
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            },
        ),
        body(
            "producer-connection",
            "ProducerConnection",
            {
                "connectionSet": [
                    {
                        "clientId": "10.0.0.1@1",
                        "clientAddr": "10.0.0.1:4000",
                        "language": "GO",
                        "version": 409,
                    }
                ]
            },
        ),
        body(
            "consumer-running-info",
            "ConsumerRunningInfo",
            {
                "properties": {"PROP_CONSUME_TYPE": "CONSUME_PASSIVELY"},
                "subscriptionSet": [subscription],
                "mqTable": [[mq0, {"commitOffset": 4, "cachedMsgCount": 2, "locked": True}]],
                "mqPopTable": [[mq1, {"waitAckCount": 1, "droped": False}]],
                "statusTable": {"TopicTest": {"pullRT": 1.5, "consumeFailedMsgs": 2}},
                "userConsumerInfo": {"a": "b"},
                "jstack": "main\n\tat x",
            },
        ),
        body(
            "consumer-list",
            "GetConsumerListByGroupResponseBody",
            {"consumerIdList": ["10.0.0.1@1", "10.0.0.2@2"]},
        ),
        body("kv-table", "KVTable", {"table": {"brokerActive": "true", "note": CHINESE}}),
        body("topic-list", "TopicList", {"topicList": ["TopicTest"], "brokerAddr": "1.2.3.4:1"}),
        body("group-list", "GroupList", {"groupList": ["group"]}),
        body(
            "consumer-offsets",
            "ConsumerOffsetSerializeWrapper",
            {"offsetTable": offsets, "dataVersion": version},
        ),
        body(
            "register-broker",
            "RegisterBrokerBody",
            {
                "topicConfigSerializeWrapper": {**topics, "mappingDataVersion": version},
                "filterServerList": ["127.0.0.1:30000"],
            },
            compress=True,
        ),
        body(
            "query-assignment-request",
            "QueryAssignmentRequestBody",
            {
                "topic": "TopicTest",
                "consumerGroup": "group",
                "clientId": "10.0.0.1@1",
                "strategyName": "AVG",
                "messageModel": "CLUSTERING",
            },
        ),
        body(
            "query-assignment-response",
            "QueryAssignmentResponseBody",
            {
                "messageQueueAssignments": [
                    {"messageQueue": mq0, "mode": "PULL", "attachments": {"a": "b"}},
                    {"messageQueue": mq1, "mode": "POP", "attachments": None},
                ]
            },
        ),
        body("set-request-mode", "SetMessageRequestModeRequestBody", mode),
        body(
            "request-modes",
            "MessageRequestModeSerializeWrapper",
            {"messageRequestModeMap": {"TopicTest": {"group": mode}}},
        ),
        body(
            "user-info",
            "UserInfo",
            {"username": "u", "password": "p", "userType": "Super", "userStatus": "enable"},
        ),
        body(
            "acl-info",
            "AclInfo",
            {
                "subject": "User:u",
                "policies": [
                    {
                        "policyType": "Custom",
                        "entries": [
                            {
                                "resource": "Topic:T",
                                "actions": ["Pub", "Sub"],
                                "sourceIps": ["10.0.0.0/8"],
                                "decision": "Allow",
                            }
                        ],
                    }
                ],
            },
        ),
        body(
            "direct-consume-result",
            "ConsumeMessageDirectlyResult",
            {
                "order": False,
                "autoCommit": True,
                "consumeResult": "CR_SUCCESS",
                "spentTimeMills": 3,
            },
        ),
    ]
