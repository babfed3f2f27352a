"""All settings of a process, and how one is found and its text read."""

from functools import cache
from typing import Any, Literal

import msgspec

from penstock.config.broker import BrokerConfig
from penstock.config.doc import Setting, objection, settings_of
from penstock.config.server import AccessConfig, NameServerConfig, ServerConfig, TlsConfig
from penstock.config.store import StoreConfig

Role = Literal["broker", "nameserver"]

_BOOLS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False, "no": False, "off": False, "0": False
}  # fmt: skip


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a process; in TOML each is a table of its own."""

    broker: BrokerConfig = BrokerConfig()
    store: StoreConfig = StoreConfig()
    server: ServerConfig = ServerConfig()
    tls: TlsConfig = TlsConfig()
    access: AccessConfig = AccessConfig()
    nameserver: NameServerConfig = NameServerConfig()


TABLES: dict[str, type[msgspec.Struct]] = {
    field.name: type(field.default) for field in msgspec.structs.fields(Settings)
}
ROLE_TABLES: dict[Role, tuple[str, ...]] = {
    "broker": ("broker", "store", "server", "tls", "access"),
    "nameserver": ("nameserver", "server", "tls", "access"),
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
    """The settings with some replaced, by their full names; values have been checked before."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        table, _, field = name.partition(".")
        tables.setdefault(table, {})[field] = value
    changed = {
        table: msgspec.structs.replace(getattr(settings, table), **fields)
        for table, fields in tables.items()
    }
    return msgspec.structs.replace(settings, **changed)


def read_value(setting: Setting, given: object) -> Any:
    """A value from a file, the environment or the wire; ValueError says what was expected."""
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
    reason = objection(setting, value)
    if reason:
        shown = "what was given" if setting.doc.secret else repr(given)
        raise ValueError(f"can't be {shown}: {reason}")
    return value


def write_value(value: object) -> str:
    """The text of a value, as `read_value` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.replace("_", "").isdigit()
