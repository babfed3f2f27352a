"""Key-value and own configuration of a NameServer."""

from pathlib import Path

import pytest

from penstock.errors import StoreDamaged
from penstock.nameserver import kv_config
from penstock.rpc.answers import Reply
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_properties import parse_properties
from tests.unit.nameserver.nameserver_kit import NameServerFixture

INVALID = ResponseCode.INVALID_PARAMETER
ORDER = "ORDER_TOPIC_CONFIG"


def put(env: NameServerFixture, key: str = "orders", value: str = "broker-a:4") -> None:
    env.get(RequestCode.PUT_KV_CONFIG, namespace=ORDER, key=key, value=value)


def test_a_value_is_put_got_and_deleted() -> None:
    env = NameServerFixture()
    put(env)
    got = env.get(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert got.ext == {"value": "broker-a:4"}
    env.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key="orders")
    missing = env.ask(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert missing.code == 22
    assert missing.remark == f"No config item, Namespace: {ORDER} Key: orders"


def test_an_empty_value_is_a_value_and_a_missing_one_is_none() -> None:
    env = NameServerFixture()
    put(env, value="")
    got = env.get(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert got.ext == {"value": ""}
    assert env.ask(RequestCode.PUT_KV_CONFIG, namespace=ORDER, key="orders").code == 29


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        (
            {"namespace": "n" * 1025},
            "namespace is too long: 1025 characters, the limit is 1024",
        ),
        ({"key": "k" * 1025}, "key is too long: 1025 characters, the limit is 1024"),
        ({"value": "v" * 65537}, "value is too long: 65537 characters, the limit is 65536"),
    ],
)
def test_names_and_values_that_are_too_long_are_refused(
    changed: dict[str, str], limit: str
) -> None:
    env = NameServerFixture()
    fields = {"namespace": ORDER, "key": "orders", "value": "broker-a:4"}
    refused = env.ask(RequestCode.PUT_KV_CONFIG, **fields | changed)
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert limit in (refused.remark or "")
    assert env.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace=ORDER).code == 22


def test_the_size_of_all_values_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_config, "TOTAL_CHARS_MAX", 1_000)
    env = NameServerFixture(tmp_path)

    def code(key: str, size: int) -> int:
        fields = {"namespace": "n", "key": key, "value": "v" * size}
        return env.ask(RequestCode.PUT_KV_CONFIG, **fields).code

    assert [code("a", 400), code("b", 300), code("c", 200)] == [0, 0, INVALID]
    assert [code("a", 100), code("c", 200)] == [0, 0]
    env.get(RequestCode.DELETE_KV_CONFIG, namespace="n", key="b")
    env = NameServerFixture(tmp_path)
    assert [code("d", 600), code("d", 400)] == [INVALID, 0]


def test_a_table_that_is_too_large_already_can_be_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_config, "TOTAL_CHARS_MAX", 100)
    value = "v" * 500
    (tmp_path / "kvConfig.json").write_text(f'{{"configTable":{{"n":{{"k":"{value}"}}}}}}')
    env = NameServerFixture(tmp_path)
    assert env.ask(RequestCode.PUT_KV_CONFIG, namespace="n", key="k", value="v" * 400).code == 0
    assert env.ask(RequestCode.PUT_KV_CONFIG, namespace="n", key="k2", value="").code == INVALID


def test_a_namespace_is_listed_and_stays_when_it_is_empty() -> None:
    env = NameServerFixture()
    missing = env.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace=ORDER)
    assert (missing.code, missing.remark) == (22, f"No config item, Namespace: {ORDER}")
    put(env)
    ask = RequestCode.GET_KVLIST_BY_NAMESPACE
    assert env.get(ask, namespace=ORDER).body == b'{"table":{"orders":"broker-a:4"}}'
    put(env, "pay", "broker-a:1")
    assert b'"pay":"broker-a:1"' in env.get(ask, namespace=ORDER).body
    for key in ("orders", "pay"):
        env.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key=key)
    assert env.get(ask, namespace=ORDER).body == b'{"table":{}}'


def test_the_response_to_a_registration_has_the_order_config() -> None:
    env = NameServerFixture()
    assert env.register().body == b""
    put(env)
    assert env.register().body == b'{"table":{"orders":"broker-a:4"}}'


def test_a_change_is_persisted_before_the_response(tmp_path: Path) -> None:
    env = NameServerFixture(tmp_path)
    put(env, value="经纪人:4")
    again = NameServerFixture(tmp_path)
    got = again.get(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders")
    assert got.ext == {"value": "经纪人:4"}
    again.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key="orders")
    third = NameServerFixture(tmp_path)
    assert third.ask(RequestCode.GET_KV_CONFIG, namespace=ORDER, key="orders").code == 22
    assert env.names.effects.take() == again.names.effects.take() == []


def test_a_deletion_that_changes_nothing_is_not_persisted(tmp_path: Path) -> None:
    env = NameServerFixture(tmp_path)
    env.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key="nothing")
    assert not (tmp_path / "kvConfig.json").exists()


def test_without_a_directory_changes_are_answered_at_once() -> None:
    env = NameServerFixture()
    put(env)
    answer = env.handle(RequestCode.UPDATE_NAMESRV_CONFIG, b"supportActingMaster=true")
    assert isinstance(answer, Reply)


def test_the_file_of_apache_is_read(tmp_path: Path) -> None:
    (tmp_path / "kvConfig.json").write_text('{"configTable":{"n":{"k":"v"}}}')
    env = NameServerFixture(tmp_path)
    assert env.get(RequestCode.GET_KV_CONFIG, namespace="n", key="k").ext == {"value": "v"}


def test_a_damaged_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "kvConfig.json").write_text('{"configTable":[')
    with pytest.raises(StoreDamaged, match=r"kvConfig\.json"):
        NameServerFixture(tmp_path)


def test_settings_are_returned_under_apache_names() -> None:
    env = NameServerFixture(data="kv", port=19876)
    values = parse_properties(env.get(RequestCode.GET_NAMESRV_CONFIG).body)
    assert values["listenPort"] == "19876"
    assert values["kvConfigPath"] == str(Path("kv", "kvConfig.json"))
    assert values["orderMessageEnable"] == "false"
    assert values["scanNotActiveBrokerInterval"] == "5000"
    assert values["returnOrderTopicConfigToBroker"] == "true"
    assert values["supportActingMaster"] == "false"


def test_a_live_setting_is_changed() -> None:
    env = NameServerFixture()
    env.get(
        RequestCode.UPDATE_NAMESRV_CONFIG,
        b"scanNotActiveBrokerInterval=7000\nsupportActingMaster=true\nunknownToAll=1\n",
    )
    config = env.live.current.nameserver
    assert (config.scan_ms, config.acting_master) == (7_000, True)
    values = parse_properties(env.get(RequestCode.GET_NAMESRV_CONFIG).body)
    assert values["scanNotActiveBrokerInterval"] == "7000"


def test_a_changed_setting_survives_a_restart(tmp_path: Path) -> None:
    env = NameServerFixture(tmp_path)
    env.get(RequestCode.UPDATE_NAMESRV_CONFIG, b"scanNotActiveBrokerInterval=7000")
    env.get(RequestCode.UPDATE_NAMESRV_CONFIG, b"orderMessageEnable=true")
    again = NameServerFixture(tmp_path)
    config = again.live.current.nameserver
    assert (config.scan_ms, config.order_messages) == (7_000, True)


def test_unchanged_settings_are_not_written(tmp_path: Path) -> None:
    env = NameServerFixture(tmp_path)
    answer = env.handle(RequestCode.UPDATE_NAMESRV_CONFIG, b"supportActingMaster=false")
    assert isinstance(answer, Reply)
    assert list((tmp_path / "config").iterdir()) == []


@pytest.mark.parametrize(
    "key", ["configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome", "nameserver.data"]
)
def test_paths_can_not_be_changed_by_requests(key: str) -> None:
    env = NameServerFixture()
    answer = env.ask(
        RequestCode.UPDATE_NAMESRV_CONFIG, f"orderMessageEnable=true\n{key}=elsewhere".encode()
    )
    assert answer.code == 16
    assert key in str(answer.remark)
    assert not env.live.current.nameserver.order_messages, "nothing of it was done"


def test_an_invalid_value_is_refused() -> None:
    env = NameServerFixture()
    answer = env.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"scanNotActiveBrokerInterval=soon")
    assert answer.code == 29
    assert "scanNotActiveBrokerInterval" in str(answer.remark)
