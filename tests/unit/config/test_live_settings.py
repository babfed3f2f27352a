"""Changing the settings of a running server."""

import pytest

from penstock.config import LiveSettings, ReplicationConfig, Settings
from penstock.errors import InvalidParameter, NoPermission
from penstock.rpc.changed_settings import ChangedSettings


def test_live_settings_change_by_either_name_and_notify_listeners() -> None:
    live = LiveSettings(Settings())
    received: list[Settings] = []
    live.listeners.append(received.append)
    names = live.change({"brokerPermission": " 4 ", "store.retain_hours": "24"})
    assert names == ["broker.permission", "store.retain_hours"]
    assert live.current.broker.permission == 4
    assert live.current.store.retain_hours == 24
    assert received == [live.current]
    assert live.apache_values()["fileReservedTime"] == "24"
    assert live.changes == 1
    assert live.changed == {"broker.permission": "4", "store.retain_hours": "24"}


def test_changes_can_be_applied_after_a_restart() -> None:
    live, again = LiveSettings(Settings()), LiveSettings(Settings())
    live.change({"traceOn": "false", "serverChannelMaxIdleTimeSeconds": "5"})
    again.change(live.changed)
    assert again.current == live.current
    assert again.current.server.idle_ms == 5000


def test_contradictory_changes_are_refused() -> None:
    live = LiveSettings(Settings())
    with pytest.raises(InvalidParameter, match=r"disk_refuse_percent must be at least"):
        live.change({"store.disk_refuse_percent": "20"})
    assert live.current == Settings()
    assert live.change({"diskSpaceCleanForciblyRatio": "95", "store.disk_refuse_percent": "97"})
    again = LiveSettings(Settings())
    changed = ChangedSettings()
    changed.set(live.changed, 1)
    changed.apply(again)
    assert again.current == live.current, "each change alone would contradict a default"


def test_setting_the_same_value_is_not_a_change() -> None:
    live = LiveSettings(Settings())
    live.listeners.append(lambda settings: pytest.fail("nothing has changed"))
    assert live.change({"brokerPermission": "6", "brokerName": "broker-a"}) == []
    assert live.changes == 0


@pytest.mark.parametrize(
    "key",
    ["brokerName", "listenPort", "flushDiskType", "broker.data", "tls.server.certPath",
     "storePathRootDir", "storePathCommitLog", "brokerConfigPath", "rocketmqHome",
     "configBlackList", "messageStorePlugIn", "tls.server.keyPassword", "initAuthenticationUser"],
)  # fmt: skip
def test_fixed_settings_paths_and_classes_are_refused(key: str) -> None:
    live = LiveSettings(Settings())
    values = {"brokerName": "broker-z", "flushDiskType": "SYNC_FLUSH", "listenPort": "1",
              "initAuthenticationUser": '{"username":"a","password":"b"}'}  # fmt: skip
    with pytest.raises(NoPermission, match=key):
        live.change({"traceOn": "false", key: values.get(key, "/elsewhere/x;sh")})
    assert live.current == Settings()


@pytest.mark.parametrize(
    ("key", "value"),
    [("brokerPermission", "all"), ("fileReservedTime", "-1"), ("deleteWhen", "noon"),
     ("serverChannelMaxIdleTimeSeconds", "soon"), ("diskMaxUsedSpaceRatio", "175")],
)  # fmt: skip
def test_an_invalid_value_is_refused_and_nothing_changes(key: str, value: str) -> None:
    live = LiveSettings(Settings())
    with pytest.raises(InvalidParameter, match=f"{key} must .*{value}"):
        live.change({"traceOn": "false", key: value})
    assert live.current == Settings()


def test_unknown_names_are_ignored() -> None:
    live = LiveSettings(Settings())
    ignored = {"sendMessageThreadPoolNums": "4", "noSuchThing": "1", "nameserver.scan_ms": "9"}
    assert live.change({**ignored, "traceOn": "false"}) == ["broker.trace_on"]


def test_a_change_that_would_break_a_guarantee_is_refused_and_nothing_changes() -> None:
    live = LiveSettings(Settings())
    with pytest.raises(InvalidParameter, match="enableDLegerCommitLog=true is not supported: the"):
        live.change({"traceOn": "false", "enableDLegerCommitLog": "true"})
    with pytest.raises(InvalidParameter, match="in_sync_replicas must be at most 1, not 2"):
        live.change({"traceOn": "false", "inSyncReplicas": "2"})
    assert live.current == Settings()


def test_the_replicas_of_a_sync_master_change_at_run_time() -> None:
    live = LiveSettings(Settings(replication=ReplicationConfig(role="sync_master")))
    live.change({"inSyncReplicas": "3", "minInSyncReplicas": "2"})
    assert live.current.replication.copies_required() == 3
    with pytest.raises(InvalidParameter, match=r"min_in_sync_replicas must be at most .* \(1\)"):
        live.change({"inSyncReplicas": "1"})
    with pytest.raises(NoPermission, match="brokerRole"):
        live.change({"brokerRole": "ASYNC_MASTER"})


def test_the_rate_limit_is_switched_as_in_rocketmq() -> None:
    live = LiveSettings(Settings())

    def rate(**values: str) -> int:
        live.change(values)
        return live.current.replication.rate_bytes_max

    assert rate(maxHaTransferByteInSecond="5000") == 0, "flow control is off"
    assert rate(haFlowControlEnable="true") == 100 * 1024 * 1024
    assert rate(maxHaTransferByteInSecond="5000") == 5000
    assert rate(haFlowControlEnable="true") == 5000
    assert rate(haFlowControlEnable="false") == 0
    assert live.apache_values()["haFlowControlEnable"] == "false"


def test_a_nameserver_changes_only_its_settings() -> None:
    live = LiveSettings(Settings(), "nameserver")
    assert live.change({"orderMessageEnable": "true", "brokerPermission": "4"}) == [
        "nameserver.order_messages"
    ]
    with pytest.raises(NoPermission, match="kvConfigPath"):
        live.change({"kvConfigPath": "/x"})
    assert live.apache_values()["orderMessageEnable"] == "true"
    assert "brokerPermission" not in live.apache_values()
