"""All settings of a process, by table and name, and how values are read and written as text."""

from functools import cache
from typing import Any, Literal

import msgspec

from penstock.config.broker_settings import BrokerConfig
from penstock.config.controller_settings import ControllerConfig
from penstock.config.doc import Setting, settings_of, violated_rule
from penstock.config.replication_settings import ReplicationConfig, replication_contradiction
from penstock.config.server_settings import AccessConfig, NameServerConfig, ServerConfig, TlsConfig
from penstock.config.store_settings import StoreConfig

_PERCENT = 100

Role = Literal["broker", "nameserver", "controller"]

_BOOLS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a process. Each field is a table in penstock.toml."""

    broker: BrokerConfig = BrokerConfig()
    store: StoreConfig = StoreConfig()
    replication: ReplicationConfig = ReplicationConfig()
    server: ServerConfig = ServerConfig()
    tls: TlsConfig = TlsConfig()
    access: AccessConfig = AccessConfig()
    nameserver: NameServerConfig = NameServerConfig()
    controller: ControllerConfig = ControllerConfig()


TABLES: dict[str, type[msgspec.Struct]] = {
    field.name: type(field.default) for field in msgspec.structs.fields(Settings)
}
ROLE_TABLES: dict[Role, tuple[str, ...]] = {
    "broker": ("broker", "store", "replication", "server", "tls", "access"),
    "nameserver": ("nameserver", "server", "tls", "access"),
    "controller": ("controller", "server", "tls", "access"),
}


@cache
def all_settings() -> dict[str, Setting]:
    """Every setting by its full name, `table.field`."""
    return {
        f"{table}.{setting.name}": setting
        for table, config in TABLES.items()
        for setting in settings_of(config)
    }


def value_of(settings: Settings, name: str) -> Any:
    """The value of the setting `table.field`."""
    table, _, field = name.partition(".")
    return getattr(getattr(settings, table), field)


def with_values(settings: Settings, values: dict[str, Any]) -> Settings:
    """The settings with some values replaced, by full name. The values must be valid."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        table, _, field = name.partition(".")
        tables.setdefault(table, {})[field] = value
    changed = {
        table: msgspec.structs.replace(getattr(settings, table), **fields)
        for table, fields in tables.items()
    }
    return msgspec.structs.replace(settings, **changed)


def contradiction(settings: Settings) -> tuple[str, str] | None:
    """The full name of a setting that contradicts another one, and why; None if there is none."""
    store = settings.store
    if store.disk_refuse_percent < store.disk_force_percent < _PERCENT:
        return (
            "store.disk_refuse_percent",
            f"must be at least disk_force_percent ({store.disk_force_percent}), at which writes "
            f"resume, not {store.disk_refuse_percent}; change both, or set disk_force_percent to "
            f"{_PERCENT} so that only expired segments are deleted",
        )
    return replication_contradiction(settings.replication, settings.broker.id)


def ha_port(settings: Settings) -> int:
    """The HA port of the broker; 0 if it is off."""
    port = settings.replication.port
    return settings.broker.port + 1 if port < 0 else port


def read_value(setting: Setting, given: object) -> Any:
    """Read a value from a file, the environment or the network.

    Raises ValueError with the violated rule ("must be at least 1, not 0").
    """
    value = given
    if isinstance(given, str):
        text = given.strip()
        if setting.kind is bool:
            value = _BOOLS.get(text.lower(), given)
        elif setting.kind is int:
            value = int(text) if _is_number(text) else given
        else:
            value = text
    elif isinstance(given, list) and setting.kind is str:
        value = ";".join(map(str, given))  # nameservers = ["a:9876", "b:9876"]
    violation = violated_rule(setting, value)
    if violation:
        raise ValueError(violation + not_given(setting, given))
    return value


def not_given(setting: Setting, given: object) -> str:
    """The end of an error text that shows the given value, unless the value is secret."""
    if setting.doc.secret:
        return ""
    return f", not {given!r}" if isinstance(given, str) else f", not {write_value(given)}"


def write_value(value: object) -> str:
    """A value as text, in the format of `read_value`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.replace("_", "").isdigit()
