"""Key-value and own configuration of a NameServer."""

from pathlib import Path

import pytest

from penstock.errors import StoreDamaged
from penstock.rpc.answers import Reply
from penstock.wire.codes import RequestCode
from penstock.wire.java_properties import parse_properties
from tests.unit.nameserver.nameserver_kit import Office

ORDER = "ORDER_TOPIC_CONFIG"


def put(office: Office, key: str = "orders", value: str = "broker-a:4") -> None:
    office.get(RequestCode.PUT_KV_CONFIG, namespace=ORDER, key=key, value=value)


def test_a_value_is_put_got_and_deleted() -> None:
    office = Office()
    put(office)
    got = office.get(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert got.ext == {"value": "broker-a:4"}
    office.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key="orders")
    missing = office.ask(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert missing.code == 22
    assert missing.remark == f"No config item, Namespace: {ORDER} Key: orders"


def test_an_empty_value_is_a_value_and_a_missing_one_is_none() -> None:
    office = Office()
    put(office, value="")
    got = office.get(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert got.ext == {"value": ""}
    assert office.ask(RequestCode.PUT_KV_CONFIG, namespace=ORDER, key="orders").code == 29


def test_a_namespace_is_listed_and_stays_when_it_is_empty() -> None:
    office = Office()
    missing = office.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace=ORDER)
    assert (missing.code, missing.remark) == (22, f"No config item, Namespace: {ORDER}")
    put(office)
    ask = RequestCode.GET_KVLIST_BY_NAMESPACE
    assert office.get(ask, namespace=ORDER).body == b'{"table":{"orders":"broker-a:4"}}'
    put(office, "pay", "broker-a:1")
    assert b'"pay":"broker-a:1"' in office.get(ask, namespace=ORDER).body
    for key in ("orders", "pay"):
        office.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key=key)
    assert office.get(ask, namespace=ORDER).body == b'{"table":{}}'


def test_a_registration_is_answered_with_the_order_config() -> None:
    office = Office()
    assert office.register().body == b""
    put(office)
    assert office.register().body == b'{"table":{"orders":"broker-a:4"}}'


def test_a_change_is_on_the_disk_before_it_is_answered(tmp_path: Path) -> None:
    office = Office(tmp_path)
    put(office, value="经纪人:4")
    again = Office(tmp_path)
    got = again.get(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert got.ext == {"value": "经纪人:4"}
    again.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key="orders")
    third = Office(tmp_path)
    assert third.ask(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders").code == 22
    assert office.names.effects.take() == again.names.effects.take() == []


def test_a_deletion_that_changes_nothing_is_not_persisted(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key="nothing")
    assert not (tmp_path / "kvConfig.json").exists()


def test_without_a_directory_changes_are_answered_at_once() -> None:
    office = Office()
    put(office)
    answer = office.handle(RequestCode.UPDATE_NAMESRV_CONFIG, b"supportActingMaster=true")
    assert isinstance(answer, Reply)


def test_the_file_of_apache_is_read(tmp_path: Path) -> None:
    (tmp_path / "kvConfig.json").write_text('{"configTable":{"n":{"k":"v"}}}')
    office = Office(tmp_path)
    assert office.get(RequestCode.GET_KV_CONFIG, namespace="n", key="k").ext == {"value": "v"}


def test_a_damaged_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "kvConfig.json").write_text('{"configTable":[')
    with pytest.raises(StoreDamaged, match=r"kvConfig\.json"):
        Office(tmp_path)


def test_the_settings_are_told_by_the_names_of_apache() -> None:
    office = Office(data="kv", port=19876)
    values = parse_properties(office.get(RequestCode.GET_NAMESRV_CONFIG).body)
    assert values["listenPort"] == "19876"
    assert values["kvConfigPath"] == str(Path("kv", "kvConfig.json"))
    assert values["orderMessageEnable"] == "false"
    assert values["scanNotActiveBrokerInterval"] == "5000"
    assert values["returnOrderTopicConfigToBroker"] == "true"
    assert values["supportActingMaster"] == "false"


def test_a_live_setting_is_changed() -> None:
    office = Office()
    office.get(
        RequestCode.UPDATE_NAMESRV_CONFIG,
        b"scanNotActiveBrokerInterval=7000\nsupportActingMaster=true\nunknownToAll=1\n",
    )
    config = office.live.current.nameserver
    assert (config.scan_ms, config.acting_master) == (7_000, True)
    values = parse_properties(office.get(RequestCode.GET_NAMESRV_CONFIG).body)
    assert values["scanNotActiveBrokerInterval"] == "7000"


def test_a_changed_setting_survives_a_restart(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.get(RequestCode.UPDATE_NAMESRV_CONFIG, b"scanNotActiveBrokerInterval=7000")
    office.get(RequestCode.UPDATE_NAMESRV_CONFIG, b"orderMessageEnable=true")
    again = Office(tmp_path)
    config = again.live.current.nameserver
    assert (config.scan_ms, config.order_messages) == (7_000, True)


def test_settings_that_stay_as_they_are_are_not_written(tmp_path: Path) -> None:
    office = Office(tmp_path)
    answer = office.handle(RequestCode.UPDATE_NAMESRV_CONFIG, b"supportActingMaster=false")
    assert isinstance(answer, Reply)
    assert list((tmp_path / "config").iterdir()) == []


@pytest.mark.parametrize(
    "key", ["configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome", "nameserver.data"]
)
def test_no_path_is_changed_over_the_wire(key: str) -> None:
    office = Office()
    answer = office.ask(
        RequestCode.UPDATE_NAMESRV_CONFIG, f"orderMessageEnable=true\n{key}=elsewhere".encode()
    )
    assert answer.code == 16
    assert key in str(answer.remark)
    assert not office.live.current.nameserver.order_messages, "nothing of it was done"


def test_a_value_that_can_not_be_is_refused() -> None:
    office = Office()
    answer = office.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"scanNotActiveBrokerInterval=soon")
    assert answer.code == 29
    assert "scanNotActiveBrokerInterval" in str(answer.remark)
