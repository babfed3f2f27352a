"""Settings, their limits and their sources."""

import msgspec
import pytest

from penstock.config import BrokerConfig, ReplicationConfig, ServerConfig, Settings, StoreConfig
from penstock.config.settings import all_settings, ha_port, read_value, with_values, write_value
from penstock.config.sources import (
    from_environment,
    from_flags,
    from_namesrv_addr,
    from_toml,
    merge_layers,
)
from penstock.errors import BadSetting
from penstock.wire.frame import FRAME_BYTES_MAX, HEADER_BYTES_MAX


def test_every_setting_has_a_type_a_description_and_a_valid_default() -> None:
    for name, setting in all_settings().items():
        assert setting.kind in (int, bool, str), name
        assert len(setting.doc.text) > 10, name
        assert read_value(setting, write_value(setting.default)) == setting.default, name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StoreConfig(segment_bytes=10), "segment_bytes must be at least 1024, not 10"),
        (lambda: StoreConfig(append_by="magic"), "auto, mapping or pwrite"),
        (lambda: StoreConfig(delay_levels="1s 5x"), "must be delays .* not '1s 5x'"),
        (lambda: StoreConfig(delete_hours="25"), "must be hours of the day"),
        (lambda: BrokerConfig(port=70_000), "port must be at most 65535, not 70000"),
        (lambda: BrokerConfig(name="two words"), "must not contain white space"),
        (lambda: BrokerConfig(region='a"b'), "must not be empty or contain control characters"),
        (lambda: BrokerConfig(nameservers="a:1;b"), "must be a list of host:port"),
        (lambda: ServerConfig(connections_max=0), "at least 1"),
        (lambda: msgspec.structs.replace(BrokerConfig(), permission=9), "at most 7"),
    ],
)
def test_a_struct_refuses_invalid_values(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_later_sources_override_earlier_ones() -> None:
    toml = from_toml(b'[broker]\nname = "x"\nport = 1\n[store]\nsync_flush = true\n', "p.toml")
    environ = from_environment({"PENSTOCK_BROKER_PORT": "2", "PENSTOCK_SERVER_IDLE_MS": "5_000"})
    flags = from_flags({"broker.port": ("--port", 3), "broker.host": ("--host", None)})
    loaded = merge_layers([toml, environ, flags])
    settings = loaded.settings
    assert settings.broker == BrokerConfig(name="x", port=3)
    assert settings.store.sync_flush
    assert settings.server.idle_ms == 5000
    assert loaded.given == {
        "broker.name", "broker.port", "store.sync_flush", "server.idle_ms"
    }  # fmt: skip
    assert loaded.warnings == ()
    assert merge_layers([toml, environ]).settings.broker.port == 2


def test_without_sources_the_defaults_apply() -> None:
    assert merge_layers([]).settings == Settings()


def test_nameservers_may_be_a_list() -> None:
    layer = from_toml(b'[broker]\nnameservers = ["a:9876", "b:9876"]\n', "p.toml")
    assert merge_layers([layer]).settings.broker.nameservers == "a:9876;b:9876"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[broker]\nport = "x"', "p.toml: broker.port must be a whole number, not 'x'"),
        ("[broker]\nport = 1.5", "broker.port must be a whole number, not 1.5"),
        ("[broker]\nport = true", "broker.port must be a whole number, not true"),
        ("[broker]\nname = 7", "broker.name must be a string, not 7"),
        ("[store]\nsync_flush = 2", "store.sync_flush must be true or false, not 2"),
        ("[tls]\nmode = 'on'", "tls.mode must be off, permissive or enforcing, not 'on'"),
        ("[access]\ninitial_user = 'secret'", "(?m)initial_user must be username:password$"),
        ("[access]\nauthorization = true", "authorization requires access.authentication"),
        ("[broker\n", "p.toml is not valid TOML: .*line 1"),
        ("[broker]\nname = '\xff'", "p.toml is not valid TOML"),
    ],
)
def test_an_error_names_file_key_value_and_expectation(text: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message) as caught:
        merge_layers([from_toml(text.encode("latin-1"), "p.toml")])
    assert "secret" not in str(caught.value)


def test_unknown_names_in_our_file_are_refused_with_similar_ones() -> None:
    text = b"loose = 1\n[brokre]\na = 1\n[broker]\nprot = 1\nwhatever = 2\nport = 3\n"
    with pytest.raises(BadSetting) as caught:
        from_toml(text, "p.toml")
    assert str(caught.value) == (
        "p.toml: unknown setting [loose], unknown setting [brokre]; did you mean [broker]?, "
        "unknown setting broker.prot; did you mean broker.port?, unknown setting broker.whatever"
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (b"[store]\nsync_flsh = true\n", "store.sync_flush"),
        (b"[stroe]\nsync_flush = true\n", "[store]"),
        (b"[store]\nretain_hours = 5\nsync_flsh = true\n", "store.sync_flush"),
    ],
)
def test_a_broker_that_should_flush_does_not_start_with_a_misspelt_setting(
    text: bytes, meant: str
) -> None:
    with pytest.raises(BadSetting) as caught:
        from_toml(text, "p.toml")
    assert str(caught.value).endswith(f"did you mean {meant}?")


def test_contradictory_disk_limits_are_refused() -> None:
    def load(text: bytes) -> StoreConfig:
        return merge_layers([from_toml(b"[store]\n" + text, "p.toml")]).settings.store

    for text in (b"disk_refuse_percent = 20", b"disk_force_percent = 95"):
        with pytest.raises(BadSetting, match=r"disk_refuse_percent must be at least disk_force_pe"):
            load(text)
    assert load(b"disk_force_percent = 100").disk_refuse_percent == 90, "no forced deletion"
    assert load(b"disk_force_percent = 20\ndisk_refuse_percent = 20").disk_force_percent == 20


@pytest.mark.parametrize("text", [b"", b"[broker]\n", b"[tool.ruff]\nline-length = 100\n"])
def test_a_toml_file_without_a_setting_is_refused(text: bytes) -> None:
    with pytest.raises(BadSetting, match=r"p\.toml has no setting of Penstock or RocketMQ"):
        from_toml(text, "p.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[broker]\nid = 1", "p.toml: broker.id must be 0 for a master, not 1; set replication.ro"),
        ("[replication]\nrole = 'slave'", "broker.id must be greater than 0 for a slave"),
        ("[replication]\nrole = 'sync_master'\nmin_in_sync_replicas = 3",
         "p.toml: replication.min_in_sync_replicas must be at most in_sync_replicas .2., not 3"),
        ("[replication]\nin_sync_replicas = 2", "in_sync_replicas must be at most 1, not 2"),
        ("[replication]\nidle_ms = 5000", "must be greater than report_ms .5000., not 5000"),
        ("[replication]\nreport_ms = 6000", "report_ms must be at most 5000, not 6000"),
        ("[replication]\nrole = 'SLAVE'", "must be async_master, sync_master or slave"),
        ("[replication]\nmaster = 'a:1;b:2'", "replication.master must be host:port"),
    ],
)  # fmt: skip
def test_contradictory_settings_of_replication_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        merge_layers([from_toml(text.encode(), "p.toml")])


@pytest.mark.parametrize(
    "text",
    [
        "[broker]\nid = 1\n[replication]\nrole = 'slave'\nmin_in_sync_replicas = 2",
        "[replication]\nrole = 'sync_master'\nmin_in_sync_replicas = 2",
        "[replication]\nall_in_sync_acknowledge = true\nmin_in_sync_replicas = 3",
        "[replication]\nmaster = '[::1]:10912'",
    ],
)
def test_settings_of_replication_that_fit_are_accepted(text: str) -> None:
    merge_layers([from_toml(text.encode(), "p.toml")])


def test_a_sync_master_requires_two_copies_unless_a_number_is_given() -> None:
    assert ReplicationConfig().copies_required() == 1
    assert ReplicationConfig(role="sync_master").copies_required() == 2
    assert ReplicationConfig(role="sync_master", in_sync_replicas=1).copies_required() == 1
    assert ReplicationConfig(role="sync_master", in_sync_replicas=3).copies_required() == 3
    assert ReplicationConfig(role="slave").copies_required() == 1


def test_the_ha_port_follows_the_port_of_the_broker() -> None:
    broker = BrokerConfig(port=30911)
    assert ha_port(Settings(broker=broker)) == 30912
    assert ha_port(Settings(broker=broker, replication=ReplicationConfig(port=0))) == 0
    assert ha_port(Settings(broker=broker, replication=ReplicationConfig(port=7))) == 7


def test_the_environment_is_checked_like_a_file() -> None:
    with pytest.raises(BadSetting, match="environment: PENSTOCK_BROKER_PORT must be a whole"):
        from_environment({"PENSTOCK_BROKER_PORT": "x"})
    layer = from_environment(
        {"PENSTOCK_BROKER_PROT": "1", "PENSTOCK_BROKR_PORT": "1", "PENSTOCK_PURE": "1",
         "PENSTOCK_HOME": "/x", "PATH": "/bin"}
    )  # fmt: skip
    assert layer.warnings == [
        "environment: ignored unknown setting PENSTOCK_BROKER_PROT; did you mean "
        "PENSTOCK_BROKER_PORT?",
        "environment: ignored unknown setting PENSTOCK_BROKR_PORT; did you mean "
        "PENSTOCK_BROKER_PORT?",
    ]


def test_every_other_source_overrides_namesrv_addr() -> None:
    lowest = from_namesrv_addr({"NAMESRV_ADDR": "n:9876"})
    assert merge_layers([lowest]).settings.broker.nameservers == "n:9876"
    toml = from_toml(b'[broker]\nnameservers = "m:9876"\n', "p.toml")
    assert merge_layers([lowest, toml]).settings.broker.nameservers == "m:9876"
    assert from_namesrv_addr({}).values == {}


def test_replacing_values_keeps_the_others() -> None:
    settings = with_values(Settings(), {"broker.port": 5, "store.retain_hours": 1})
    assert settings.broker == BrokerConfig(port=5)
    assert settings.store == StoreConfig(retain_hours=1)
    assert settings.server == Settings().server


def test_a_header_with_refused_properties_can_still_be_read() -> None:
    # Properties of 32 Ki Chinese characters exceed the limit. The server can only answer with a
    # refusal if it has read the header.
    assert ServerConfig().header_bytes_max > 3 * 32 * 1024 + 1024


def test_servers_and_clients_have_the_same_frame_limits() -> None:
    limits = (ServerConfig().frame_bytes_max, ServerConfig().header_bytes_max)
    assert limits == (FRAME_BYTES_MAX, HEADER_BYTES_MAX)
