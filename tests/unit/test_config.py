"""Settings and where they come from."""

import msgspec
import pytest

from penstock.config import BrokerConfig, ServerConfig, Settings, StoreConfig, describe
from penstock.config.settings import TABLES, all_settings, read_value, with_values, write_value
from penstock.config.sources import (
    from_environment,
    from_flags,
    from_namesrv_addr,
    from_toml,
    settle,
)
from penstock.errors import BadSetting


def test_every_setting_says_what_it_is_and_what_it_may_be() -> None:
    for name, setting in all_settings().items():
        assert setting.kind in (int, bool, str), name
        assert len(setting.doc.text) > 10, name
        assert read_value(setting, write_value(setting.default)) == setting.default, name


def test_described_are_all_fields() -> None:
    for config in TABLES.values():
        assert [row[0] for row in describe(config)] == list(config.__struct_fields__)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StoreConfig(segment_bytes=10), "segment_bytes can't be 10: it is at least 1024"),
        (lambda: StoreConfig(append_by="magic"), "auto, mapping or pwrite"),
        (lambda: StoreConfig(delay_levels="1s 5x"), "'5x' is no delay"),
        (lambda: StoreConfig(delete_hours="25"), "no hour of the day"),
        (lambda: BrokerConfig(port=70_000), "port can't be 70000: it is at most 65535"),
        (lambda: BrokerConfig(name="two words"), "no blanks"),
        (lambda: BrokerConfig(nameservers="a:1;b"), "'b' is no address"),
        (lambda: ServerConfig(connections_max=0), "at least 1"),
        (lambda: msgspec.structs.replace(BrokerConfig(), permission=9), "at most 7"),
    ],
)
def test_a_struct_refuses_what_can_not_be(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_later_sources_win() -> None:
    toml = from_toml(b'[broker]\nname = "x"\nport = 1\n[store]\nsync_flush = true\n', "p.toml")
    environ = from_environment({"PENSTOCK_BROKER_PORT": "2", "PENSTOCK_SERVER_IDLE_MS": "5_000"})
    flags = from_flags({"broker.port": ("--port", 3), "broker.host": ("--host", None)})
    chosen = settle([toml, environ, flags])
    settings = chosen.settings
    assert settings.broker == BrokerConfig(name="x", port=3)
    assert settings.store.sync_flush
    assert settings.server.idle_ms == 5000
    assert chosen.given == {
        "broker.name", "broker.port", "store.sync_flush", "server.idle_ms"
    }  # fmt: skip
    assert chosen.warnings == ()
    assert settle([toml, environ]).settings.broker.port == 2


def test_without_sources_there_are_the_defaults() -> None:
    assert settle([]).settings == Settings()


def test_nameservers_may_be_a_list() -> None:
    layer = from_toml(b'[broker]\nnameservers = ["a:9876", "b:9876"]\n', "p.toml")
    assert settle([layer]).settings.broker.nameservers == "a:9876;b:9876"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[broker]\nport = "x"', "p.toml: broker.port can't be 'x': it is a whole number"),
        ("[broker]\nport = 1.5", "broker.port can't be 1.5: it is a whole number"),
        ("[broker]\nport = true", "broker.port can't be True: it is a whole number"),
        ("[broker]\nname = 7", "broker.name can't be 7: it is a text"),
        ("[store]\nsync_flush = 2", "store.sync_flush can't be 2: it is true or false"),
        ("[tls]\nmode = 'on'", "tls.mode can't be 'on': it is off, permissive or enforcing"),
        ("[access]\ninitial_user = 'secret'", "can't be what was given: write username:password"),
        ("[access]\nauthorization = true", "authorization can't be on while authentication is off"),
        ("[broker\n", "p.toml is no TOML: .*line 1"),
        ("[broker]\nname = '\xff'", "p.toml is no TOML"),
    ],
)
def test_an_error_names_file_key_value_and_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message) as caught:
        settle([from_toml(text.encode("latin-1"), "p.toml")])
    assert "secret" not in str(caught.value)


def test_unknown_names_are_warned_about_with_the_nearest_known_one() -> None:
    layer = from_toml(b"loose = 1\n[brokre]\na = 1\n[broker]\nprot = 1\nwhatever = 2\n", "p.toml")
    assert layer.values == {}
    assert layer.warnings == [
        "p.toml: [loose] is unknown and ignored",
        "p.toml: [brokre] is unknown and ignored; did you mean [broker]?",
        "p.toml: broker.prot is unknown and ignored; did you mean broker.port?",
        "p.toml: broker.whatever is unknown and ignored",
    ]


def test_the_environment_is_checked_like_a_file() -> None:
    with pytest.raises(BadSetting, match="environment: PENSTOCK_BROKER_PORT can't be 'x'"):
        from_environment({"PENSTOCK_BROKER_PORT": "x"})
    layer = from_environment(
        {"PENSTOCK_BROKER_PROT": "1", "PENSTOCK_BROKR_PORT": "1", "PENSTOCK_PURE": "1",
         "PENSTOCK_HOME": "/x", "PATH": "/bin"}
    )  # fmt: skip
    assert layer.warnings == [
        "environment: PENSTOCK_BROKER_PROT is unknown and ignored; did you mean "
        "PENSTOCK_BROKER_PORT?",
        "environment: PENSTOCK_BROKR_PORT is unknown and ignored; did you mean "
        "PENSTOCK_BROKER_PORT?",
    ]


def test_namesrv_addr_counts_only_where_nothing_else_does() -> None:
    lowest = from_namesrv_addr({"NAMESRV_ADDR": "n:9876"})
    assert settle([lowest]).settings.broker.nameservers == "n:9876"
    toml = from_toml(b'[broker]\nnameservers = "m:9876"\n', "p.toml")
    assert settle([lowest, toml]).settings.broker.nameservers == "m:9876"
    assert from_namesrv_addr({}).values == {}


def test_replacing_values_leaves_the_rest() -> None:
    settings = with_values(Settings(), {"broker.port": 5, "store.retain_hours": 1})
    assert settings.broker == BrokerConfig(port=5)
    assert settings.store == StoreConfig(retain_hours=1)
    assert settings.server == Settings().server


def test_headers_have_room_for_properties_that_are_refused() -> None:
    # A property of 32 Ki characters of Chinese is over the limit of properties: its sender is to
    # read so in an answer, which needs its header to be read.
    assert ServerConfig().header_bytes_max > 3 * 32 * 1024 + 1024
