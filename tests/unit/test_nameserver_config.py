"""Key-value and own configuration of a NameServer."""

from pathlib import Path

import pytest

from penstock.broker.answers import Persist
from penstock.errors import StoreDamaged
from penstock.store.disk import Disk
from penstock.store.tables import ConfigFile
from penstock.wire.codes import RequestCode
from penstock.wire.properties import parse_properties
from tests.unit.nameserver_kit import Office

ORDER = "ORDER_TOPIC_CONFIG"


def put(office: Office, key: str = "orders", value: str = "broker-a:4") -> None:
    office.get(RequestCode.PUT_KV_CONFIG, namespace=ORDER, key=key, value=value)


def kv_file(path: Path) -> ConfigFile:
    return ConfigFile(Disk(), path / "kvConfig.json")


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


def test_changes_are_persisted_and_loaded_at_the_next_start(tmp_path: Path) -> None:
    office = Office(kv_file(tmp_path))
    put(office, value="经纪人:4")
    (effect,) = office.names.outbox.take()
    assert isinstance(effect, Persist)
    assert effect.table.FILE == "kvConfig.json"
    kv_file(tmp_path).persist(effect.table.snapshot())
    again = Office(kv_file(tmp_path))
    got = again.get(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert got.ext == {"value": "经纪人:4"}


def test_a_deletion_that_changes_nothing_is_not_persisted(tmp_path: Path) -> None:
    office = Office(kv_file(tmp_path))
    office.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key="nothing")
    assert office.names.outbox.take() == []


def test_without_a_file_nothing_is_persisted() -> None:
    office = Office()
    put(office)
    assert office.names.outbox.take() == []


def test_the_file_of_apache_is_read(tmp_path: Path) -> None:
    (tmp_path / "kvConfig.json").write_text('{"configTable":{"n":{"k":"v"}}}')
    office = Office(kv_file(tmp_path))
    assert office.get(RequestCode.GET_KV_CONFIG, namespace="n", key="k").ext == {"value": "v"}


def test_a_damaged_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "kvConfig.json").write_text('{"configTable":[')
    with pytest.raises(StoreDamaged, match=r"kvConfig\.json"):
        Office(kv_file(tmp_path))


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
