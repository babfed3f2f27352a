"""RocketMQ's names and formats: reading broker.conf, writing GET_BROKER_CONFIG."""

import os
from pathlib import Path

import pytest

from penstock.config import BrokerConfig, ReplicationConfig, Settings, StoreConfig
from penstock.config.apache import apache_values, find_setting, names_by_apache
from penstock.config.apache_names import IGNORED
from penstock.config.settings import ROLE_TABLES, Role, all_settings, ha_port
from penstock.config.sources import LoadedSettings, from_properties, merge_layers
from penstock.errors import BadSetting
from penstock.wire.java_properties import format_properties, parse_properties

# Like RocketMQ's conf/2m-noslave/broker-a.properties, with settings that users often add.
BROKER_CONF = b"""
brokerClusterName=Shop
brokerName = broker-7
brokerId=0
deleteWhen=04
fileReservedTime=48
brokerRole=ASYNC_MASTER
flushDiskType=SYNC_FLUSH
namesrvAddr=10.0.0.1:9876;10.0.0.2:9876
listenPort=30911
brokerIP1=192.0.2.7
storePathRootDir=/data/store
storePathCommitLog=/data/store/commitlog
storePathConsumeQueue=/data/store/consumequeue
mapedFileSizeCommitLog=1073741824
mappedFileSizeCommitLog=536870912
mappedFileSizeConsumeQueue=6000010
diskMaxUsedSpaceRatio=88
serverChannelMaxIdleTimeSeconds=240
sendMessageThreadPoolNums=128
autoCreateTopicEnable=false
tlsMode=permissive
authenticationEnabled=true
initAuthenticationUser={"username":"admin","password":"a:b"}
maxMessageSize=65536\t
"""


def read(data: bytes, role: Role = "broker") -> LoadedSettings:
    return merge_layers([from_properties(parse_properties(data), "broker.conf", role)])


def test_broker_conf_is_read() -> None:
    settings = read(BROKER_CONF).settings
    assert settings.broker == BrokerConfig(
        cluster="Shop", name="broker-7", host="0.0.0.0", port=30911, announce="192.0.2.7",
        nameservers="10.0.0.1:9876;10.0.0.2:9876", data="/data/store", auto_create_topics=False,
    )  # fmt: skip
    assert settings.store == StoreConfig(
        segment_bytes=536870912, queue_file_entries=300_001, sync_flush=True, retain_hours=48,
        disk_clean_percent=88, body_bytes_max=65536,
    )  # fmt: skip
    assert settings.server.idle_ms == 240_000
    assert settings.tls.mode == "permissive"
    assert settings.access.initial_user == "admin:a:b"


def test_ignored_and_unknown_names_have_different_warnings() -> None:
    assert read(BROKER_CONF).warnings == (
        "broker.conf: ignored unknown setting mapedFileSizeCommitLog; did you mean "
        "mappedFileSizeCommitLog?",
        "broker.conf: ignored settings of RocketMQ, which have no effect in Penstock: "
        "sendMessageThreadPoolNums, storePathCommitLog, storePathConsumeQueue",
    )


@pytest.mark.parametrize(
    "line",
    [
        "flushDiskTyp=SYNC_FLUSH", "flushdisktype=SYNC_FLUSH", "authentificationEnabled=true",
        "brokerrole=SYNC_MASTER", "inSyncReplica=2",
    ],
)  # fmt: skip
def test_a_misspelt_setting_that_changes_a_promise_is_refused(line: str) -> None:
    with pytest.raises(BadSetting, match=r"broker\.conf: unknown setting .*; did you mean "):
        read(b"deleteWhen=04\n" + line.encode())


def test_rocketmqs_defaults_apply_to_a_broker_conf() -> None:
    settings = read(b"deleteWhen=04").settings
    broker = settings.broker
    assert settings.replication.protocol == "static"
    assert broker.host == "0.0.0.0"
    assert broker.data == str(Path.home() / "store")
    assert broker.name == os.uname().nodename
    assert read(b"listenPort=9876", "nameserver").settings.nameserver.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("flushDiskType=sometimes", "flushDiskType must be SYNC_FLUSH or ASYNC_FLUSH, not 'some"),
        ("listenPort=x", "broker.conf: listenPort must be a whole number, not 'x'"),
        ("listenPort=99999", "listenPort must be at most 65535, not '99999'"),
        ("mappedFileSizeConsumeQueue=0", "at least 1"),
        ("serverChannelMaxIdleTimeSeconds=-1", "must be a whole number of seconds"),
        ("autoCreateTopicEnable=maybe", "must be true or false"),
        ("initAuthenticationUser=admin", "(?m)must be {.username.*}$"),
        ("aclEnable=true", "aclEnable=true is not supported: .*authenticationEnabled"),
        ("brokerRole=SLAVE", "broker.id must be greater than 0 for a slave"),
        (
            "brokerRole=SLAVE\nbrokerId=0",
            "broker.conf: brokerId must be greater than 0 for a slave",
        ),
        ("brokerRole=master", "must be ASYNC_MASTER, SYNC_MASTER or SLAVE, not 'master'"),
        ("inSyncReplicas=2", "inSyncReplicas must be at most 1, not 2: an async_master acknowl"),
        ("minInSyncReplicas=2", "minInSyncReplicas must be at most in_sync_replicas .1., not 2"),
        ("haMasterAddress=master", "haMasterAddress must be host:port, not 'master'"),
        ("haTransferBatchSize=4194304", "haTransferBatchSize must be at most 2097152"),
        ("syncFromLastFile=maybe", "syncFromLastFile must be true or false, not 'maybe'"),
        ("enableSlaveActingMaster=true", "slaveReadEnable=true on the master and its slaves"),
        ("messageStorePlugIn=org.apache.rocketmq.tieredstore.X", "no tiered storage"),
        ("authenticationProvider=com.example.Ldap", "Java classes can't be loaded"),
        ("tls.protocols=TLSv1.3", "OpenSSL"),
        ("enableLmq=true", "light message queues are not supported"),
        ("cleanFileForciblyEnable=false", "set diskSpaceCleanForciblyRatio=100"),
        (
            "brokre=x\nfoo=bar",
            "has no setting of Penstock or RocketMQ .ignored unknown",
        ),
        ("", "(?m)broker.conf has no setting of Penstock or RocketMQ$"),
        ("enableDLegerCommitLog=true", "controllers elect the master"),
        ("enableControllerMode=true", "set controllerAddr"),
        ("storeType=defaultRocksDB", "the only store type is default"),
        ("timerRocksDBEnable=true", "timerRocksDBEnable=true is not supported: .* not in RocksDB"),
        ("transRocksDBEnable=true", "follow docs/migration.md"),
        ("storePathRootDir=/a\nstorePathCommitLog=/b/commitlog", "must be in /a/commitlog"),
    ],
)
def test_invalid_and_unsupported_values_are_refused(line: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        read(line.encode())


def test_the_controller_mode_with_addresses_is_not_reported_as_ignored() -> None:
    loaded = read(b"enableControllerMode=true\ncontrollerAddr=c1:9878;c2:9878")
    assert loaded.settings.replication.controllers == "c1:9878;c2:9878"
    assert loaded.warnings == ()


def test_values_that_change_nothing_are_accepted() -> None:
    lines = (
        "brokerRole=ASYNC_MASTER", "inSyncReplicas=1", "totalReplicas=3", "messageStorePlugIn=",
        "allAckInSyncStateSet=false", "cleanFileForciblyEnable=true", "enableLmq=false",
        "authorizationProvider=org.apache.rocketmq.auth.authorization.provider.Default",
    )  # fmt: skip
    read("\n".join(lines).encode())


def test_a_broker_id_without_the_slave_role_is_ignored() -> None:
    loaded = read(b"brokerId=3\nbrokerRole=ASYNC_MASTER\n")
    assert loaded.settings.broker.id == 0
    assert loaded.warnings[0].startswith(
        "broker.conf: brokerId=3 is ignored without brokerRole=SLAVE"
    )


SLAVE_CONF = b"""
brokerRole=SLAVE
brokerId=2
haListenPort=0
brokerIP2=10.0.0.2
haMasterAddress=10.0.0.1:10912
inSyncReplicas=3
minInSyncReplicas=2
allAckInSyncStateSet=true
slaveTimeout=1000
haSendHeartbeatInterval=2000
haHousekeepingInterval=9000
haTransferBatchSize=32768
haFlowControlEnable=true
haMaxGapNotInSync=1000000
haMaxTimeSlaveNotCatchup=5000
syncFromLastFile=true
asyncLearner=true
slaveReadEnable=true
accessMessageInMemoryMaxRatio=30
"""


def test_the_settings_of_replication_are_read() -> None:
    settings = read(SLAVE_CONF).settings
    assert settings.broker.id == 2
    assert settings.replication == ReplicationConfig(
        role="slave", protocol="static", announce="10.0.0.2", master="10.0.0.1:10912",
        in_sync_replicas=3, min_in_sync_replicas=2, all_in_sync_acknowledge=True,
        slave_timeout_ms=1000, report_ms=2000, idle_ms=9000, frame_bytes_max=32768,
        rate_bytes_max=100 * 1024 * 1024, lag_bytes_max=1_000_000, lag_ms_max=5000,
        from_first_segment=False, learner=True, read_from_slaves=True, memory_percent=30,
    )  # fmt: skip
    assert read(SLAVE_CONF).warnings == ()
    assert ha_port(settings) == 10912
    values = apache_values(settings, "broker")
    assert values["brokerRole"] == "SLAVE"
    assert values["haListenPort"] == "10912"
    assert values["brokerIP2"] == "10.0.0.2"
    assert read(format_properties(values)).settings.replication.role == "slave"


@pytest.mark.parametrize(
    ("lines", "rate"),
    [
        (b"maxHaTransferByteInSecond=5000", 0),
        (b"maxHaTransferByteInSecond=5000\nhaFlowControlEnable=false", 0),
        (b"haFlowControlEnable=true\nmaxHaTransferByteInSecond=5000", 5000),
        (b"haFlowControlEnable=true", 100 * 1024 * 1024),
    ],
)
def test_the_rate_limit_needs_flow_control_as_in_rocketmq(lines: bytes, rate: int) -> None:
    loaded = read(lines)
    assert loaded.settings.replication.rate_bytes_max == rate
    assert loaded.warnings == ()


_WRITTEN_WITH_DEFAULTS = (
    "replication.port", "replication.announce", "replication.in_sync_replicas",
    "replication.min_in_sync_replicas",
)  # fmt: skip


@pytest.mark.parametrize("role", ["broker", "nameserver"])
def test_written_values_can_be_read_back(role: Role) -> None:
    settings = read(BROKER_CONF).settings if role == "broker" else Settings()
    text = format_properties(apache_values(settings, role))
    again = read(text, role).settings
    for name, setting in all_settings().items():
        table, field = name.split(".")
        if table not in ROLE_TABLES[role] or table in ("tls", "access") or setting.doc.secret:
            continue
        if name in _WRITTEN_WITH_DEFAULTS:
            continue
        assert getattr(getattr(again, table), field) == getattr(getattr(settings, table), field), (
            name
        )


def test_keys_that_the_tools_read_are_present() -> None:
    values = apache_values(Settings(), "broker")
    asked = {
        "brokerClusterName": "DefaultCluster", "brokerId": "0", "brokerName": "broker-a",
        "brokerRole": "ASYNC_MASTER", "fileReservedTime": "72", "flushDiskType": "ASYNC_FLUSH",
        "maxMessageSize": "4194304", "msgTraceTopicName": "RMQ_SYS_TRACE_TOPIC",
        "slaveReadEnable": "false", "traceOn": "true", "traceTopicEnable": "true",
        "autoCreateTopicEnable": "true", "autoCreateSubscriptionGroup": "true",
        "listenPort": "10911", "haListenPort": "10912", "brokerPermission": "6",
        "deleteWhen": "04", "mappedFileSizeConsumeQueue": "6000000", "namesrvAddr": "",
        "tls.server.mode": "permissive", "broker.lock_lease_ms": "60000", "brokerIP1": "127.0.0.1",
        "popCkStayBufferTimeOut": "3000", "brokerIP2": "127.0.0.1", "haMasterAddress": "",
        "haFlowControlEnable": "false", "syncFromLastFile": "false", "inSyncReplicas": "1",
    }  # fmt: skip
    assert {key: values[key] for key in asked} == asked
    assert "messageDelayLevel" in values


def test_secrets_are_not_written() -> None:
    values = apache_values(read(BROKER_CONF).settings, "broker")
    assert not {"initAuthenticationUser", "tls.server.keyPassword"} & values.keys()
    assert not any("a:b" in value for value in values.values())


def test_shared_names_apply_to_the_nameserver() -> None:
    settings = read(b"listenPort=1234\norderMessageEnable=true\n", "nameserver").settings
    assert settings.nameserver.port == 1234
    assert settings.nameserver.order_messages
    assert settings.broker == BrokerConfig()
    assert find_setting("listenPort", "nameserver") != find_setting("listenPort", "broker")
    assert apache_values(settings, "nameserver")["listenPort"] == "1234"


def test_no_ignored_name_has_an_effect() -> None:
    assert not IGNORED & {*names_by_apache("broker"), *names_by_apache("nameserver")}
