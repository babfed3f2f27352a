"""Load settings from files, environment variables and command-line flags.

Each source becomes a `Layer`. `merge_layers` merges them; later layers override earlier ones. An
invalid value raises BadSetting with its source, and so does an unknown name in penstock.toml. In
RocketMQ's files and in the environment, which others fill too, an unknown name is a warning, unless
it resembles a setting that changes what the broker promises.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from penstock.config import apache
from penstock.config.apache_names import IGNORED
from penstock.config.settings import (
    ROLE_TABLES,
    TABLES,
    Role,
    Settings,
    all_settings,
    contradiction,
    not_given,
    read_value,
    with_values,
)
from penstock.errors import BadSetting

ENVIRONMENT_PREFIX = "PENSTOCK_"
_ENVIRONMENT_OTHERS = {
    "PENSTOCK_CONFIG_DIR",
    "PENSTOCK_CONTEXT",
    "PENSTOCK_DEBUG",
    "PENSTOCK_PURE",
    "PENSTOCK_REQUIRE_COMPILED",
}
_SIMILARITY = 0.75
"""How similar a known name must be to be suggested for an unknown one (difflib's ratio)."""


@dataclass(slots=True)
class Layer:
    """The settings of one source: full name → (value, source of the value)."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def put(self, name: str, given: object, source: str) -> None:
        """Check a value and add it."""
        try:
            self.values[name] = (read_value(all_settings()[name], given), source)
        except ValueError as error:
            raise BadSetting(f"{source} {error}") from None


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The merged settings, and where they came from."""

    settings: Settings
    given: frozenset[str]
    """The full names that some source sets."""
    warnings: tuple[str, ...]


def merge_layers(layers: Iterable[Layer]) -> LoadedSettings:
    """Merge the layers over the defaults; later layers override earlier ones."""
    values: dict[str, tuple[Any, str]] = {}
    warnings: list[str] = []
    for layer in layers:
        values |= layer.values
        warnings += layer.warnings
    settings = with_values(Settings(), {name: value for name, (value, _) in values.items()})
    if settings.access.authorization and not settings.access.authentication:
        source = values["access.authorization"][1]
        raise BadSetting(f"{source} requires access.authentication, which is off")
    found = contradiction(settings)
    if found is not None:
        name, reason = found
        source = values[name][1] if name in values else name
        raise BadSetting(f"{source} {reason}")
    return LoadedSettings(settings, frozenset(values), tuple(warnings))


def from_toml(data: bytes, source: str) -> Layer:
    """penstock.toml: one table per struct, one key per field."""
    try:
        tables = tomllib.loads(data.decode())
    except ValueError as error:  # the base class of TOMLDecodeError and UnicodeDecodeError
        raise BadSetting(f"{source} is not valid TOML: {error}") from None
    layer = Layer()
    unknown = []
    for table, fields in tables.items():
        if table not in TABLES or not isinstance(fields, dict):
            unknown.append(_unknown(f"[{table}]", [f"[{t}]" for t in TABLES]))
            continue
        for key, value in fields.items():
            name = f"{table}.{key}"
            if name in all_settings():
                layer.put(name, value, f"{source}: {name}")
            else:
                unknown.append(_unknown(name, all_settings()))
    if not layer.values and not any("did you mean" in text for text in unknown):
        raise _no_setting(source, unknown)
    if unknown:
        raise BadSetting(f"{source}: {', '.join(unknown)}")
    return layer


def from_properties(values: Mapping[str, str], source: str, role: Role) -> Layer:
    """RocketMQ's broker.conf or namesrv.conf, with its names, formats and defaults."""
    layer = Layer()
    for name, value in apache.defaults(role).items():
        layer.put(name, value, f"{source}: RocketMQ's default of {name}")
    values = apache.join_controllers(apache.join_rate_limit(values))
    ignored: list[str] = []
    given = 0
    for key, value in values.items():
        found = apache.find_setting(key, role)
        if found is None:
            reason = apache.unsupported_reason(key, value.strip(), values)
            if reason:
                raise BadSetting(f"{source}: {key}={value.strip()} is not supported: {reason}")
            if key in IGNORED:
                ignored.append(key)
                continue
            unknown = _unknown(key, known_keys(role))
            if apache.resembles_promise(key):
                raise BadSetting(f"{source}: {unknown}")
            layer.warnings.append(f"{source}: ignored {unknown}")
            continue
        given += 1
        name, form = found
        key_source = f"{source}: {key}"
        layer.put(name, _in_our_form(form, name, value.strip(), key_source), key_source)
    if given == 0 and not ignored:
        raise _no_setting(source, layer.warnings)
    is_slave = layer.values.get("replication.role", ("", ""))[0] == "slave"
    if layer.values.get("broker.id", (0, ""))[0] != 0 and not is_slave:
        number, id_source = layer.values.pop("broker.id")
        layer.warnings.append(
            f"{id_source}={number} is ignored without brokerRole=SLAVE, as by RocketMQ: "
            "this broker is a master"
        )
    if ignored:
        layer.warnings.append(
            f"{source}: ignored settings of RocketMQ, which have no effect in Penstock: "
            + ", ".join(sorted(ignored))
        )
    return layer


def from_environment(environ: Mapping[str, str]) -> Layer:
    """PENSTOCK_<TABLE>_<FIELD>; an unknown variable with a similar name is a warning."""
    layer = Layer()
    by_variable = {_variable(name): name for name in all_settings()}
    for variable, value in sorted(environ.items()):
        if variable in by_variable:
            layer.put(by_variable[variable], value, f"environment: {variable}")
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable not in _ENVIRONMENT_OTHERS:
            names_table = variable.split("_")[1].lower() in TABLES
            if names_table or get_close_matches(variable, by_variable, 1, _SIMILARITY):
                layer.warnings.append(f"environment: ignored {_unknown(variable, by_variable)}")
    return layer


def from_namesrv_addr(environ: Mapping[str, str]) -> Layer:
    """RocketMQ's variable. As in RocketMQ, a file overrides it."""
    layer = Layer()
    if address := environ.get("NAMESRV_ADDR", "").strip():
        layer.put("broker.nameservers", address, "environment: NAMESRV_ADDR")
    return layer


def from_flags(flags: Mapping[str, tuple[str, object]]) -> Layer:
    """Command-line flags: full name → (flag, value); the value None means that it is not set."""
    layer = Layer()
    for name, (flag, value) in flags.items():
        if value is not None:
            layer.put(name, value, flag)
    return layer


def known_keys(role: Role) -> list[str]:
    """All keys of a properties file that have an effect."""
    own = (name for name in all_settings() if name.partition(".")[0] in ROLE_TABLES[role])
    return [*apache.names_by_apache(role), *own]


def _in_our_form(form: apache.Form, name: str, text: str, source: str) -> str:
    try:
        return form.read(text)
    except ValueError as error:
        raise BadSetting(f"{source} {error}{not_given(all_settings()[name], text)}") from None


def _no_setting(source: str, warnings: list[str]) -> BadSetting:
    """The error for a file that is probably not a settings file at all."""
    first = f" ({warnings[0].removeprefix(f'{source}: ')})" if warnings else ""
    return BadSetting(
        f"{source} has no setting of Penstock or RocketMQ{first}",
        hint="give a penstock.toml, or RocketMQ's broker.conf or namesrv.conf",
    )


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


def _unknown(key: str, known: Iterable[str]) -> str:
    similar = get_close_matches(key, list(known), 1, _SIMILARITY)
    suggestion = f"; did you mean {similar[0]}?" if similar else ""
    return f"unknown setting {key}{suggestion}"
