"""From files, environment and flags to Settings.

Each source becomes a `Layer`; `settle` puts the layers over each other, the later ones on top. A
value that can't be raises BadSetting with the place it stands in; a name nobody knows is a warning.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from penstock.config import apache
from penstock.config.apache_names import WITHOUT_EFFECT
from penstock.config.settings import (
    ROLE_TABLES,
    TABLES,
    Role,
    Settings,
    all_settings,
    read_value,
    with_values,
)
from penstock.errors import BadSetting

ENVIRONMENT_PREFIX = "PENSTOCK_"
_ENVIRONMENT_OTHERS = {"PENSTOCK_PURE", "PENSTOCK_DEBUG", "PENSTOCK_REQUIRE_COMPILED"}
_ALIKE = 0.75
"""How much of a name must agree for it to be taken for a slip of the pen."""


@dataclass(slots=True)
class Layer:
    """What one source says: full name → (value, where it stands)."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def put(self, name: str, given: object, where: str) -> None:
        """Check a value and take it."""
        try:
            self.values[name] = (read_value(all_settings()[name], given), where)
        except ValueError as error:
            raise BadSetting(f"{where} {error}") from None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The settings that count, the full names that some source gave, and what to warn of."""

    settings: Settings
    given: frozenset[str]
    warnings: tuple[str, ...]


def settle(layers: Iterable[Layer]) -> Chosen:
    """Defaults under the layers, later layers over earlier ones."""
    values: dict[str, tuple[Any, str]] = {}
    warnings: list[str] = []
    for layer in layers:
        values |= layer.values
        warnings += layer.warnings
    settings = with_values(Settings(), {name: value for name, (value, _) in values.items()})
    if settings.access.authorization and not settings.access.authentication:
        where = values["access.authorization"][1]
        raise BadSetting(f"{where} can't be on while authentication is off: nobody would be known")
    return Chosen(settings, frozenset(values), tuple(warnings))


def from_toml(data: bytes, source: str) -> Layer:
    """penstock.toml: a table for each struct, a key for each field."""
    try:
        tables = tomllib.loads(data.decode())
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are
        raise BadSetting(f"{source} is no TOML: {error}") from None
    layer = Layer()
    for table, fields in tables.items():
        if table not in TABLES or not isinstance(fields, dict):
            layer.warnings.append(f"{source}: {_unknown(f'[{table}]', [f'[{t}]' for t in TABLES])}")
            continue
        for key, value in fields.items():
            name = f"{table}.{key}"
            if name in all_settings():
                layer.put(name, value, f"{source}: {name}")
            else:
                layer.warnings.append(f"{source}: {_unknown(name, all_settings())}")
    return layer


def from_properties(values: Mapping[str, str], source: str, role: Role) -> Layer:
    """RocketMQ's broker.conf or namesrv.conf, with its names, forms and defaults."""
    layer = Layer()
    for name, value in apache.assumed(role).items():
        layer.put(name, value, f"{source}: RocketMQ's default of {name}")
    idle = []
    for key, value in values.items():
        found = apache.find(key, role)
        if found is None:
            reason = apache.refusal(key, value.strip(), values)
            if reason:
                raise BadSetting(f"{source}: {key} can't be {value.strip()!r}: {reason}")
            if key in WITHOUT_EFFECT:
                idle.append(key)
            else:
                layer.warnings.append(f"{source}: {_unknown(key, known_keys(role))}")
            continue
        name, form = found
        where = f"{source}: {key}"
        layer.put(name, _in_our_form(form, name, value.strip(), where), where)
    if layer.values.get("broker.id", (0, ""))[0] != 0:  # brokerRole=SLAVE has been refused above
        number, where = layer.values.pop("broker.id")
        layer.warnings.append(
            f"{where}={number} without brokerRole=SLAVE is taken as 0, as by RocketMQ: this broker "
            "is a master"
        )
    if idle:
        layer.warnings.append(
            f"{source}: known to RocketMQ, without effect here: {', '.join(sorted(idle))}"
        )
    return layer


def from_environment(environ: Mapping[str, str]) -> Layer:
    """PENSTOCK_<TABLE>_<FIELD>; what resembles one without being one is a warning."""
    layer = Layer()
    by_variable = {_variable(name): name for name in all_settings()}
    for variable, value in sorted(environ.items()):
        if variable in by_variable:
            layer.put(by_variable[variable], value, f"environment: {variable}")
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable not in _ENVIRONMENT_OTHERS:
            of_a_table = variable.split("_")[1].lower() in TABLES
            if of_a_table or get_close_matches(variable, by_variable, 1, _ALIKE):
                layer.warnings.append(f"environment: {_unknown(variable, by_variable)}")
    return layer


def from_namesrv_addr(environ: Mapping[str, str]) -> Layer:
    """RocketMQ's own variable; there as here it counts only where no file says otherwise."""
    layer = Layer()
    if address := environ.get("NAMESRV_ADDR", "").strip():
        layer.put("broker.nameservers", address, "environment: NAMESRV_ADDR")
    return layer


def from_flags(flags: Mapping[str, tuple[str, object]]) -> Layer:
    """full name → (flag, value); None means that the flag was not given."""
    layer = Layer()
    for name, (flag, value) in flags.items():
        if value is not None:
            layer.put(name, value, flag)
    return layer


def known_keys(role: Role) -> list[str]:
    """Every key a file of properties may use to some effect."""
    own = (name for name in all_settings() if name.partition(".")[0] in ROLE_TABLES[role])
    return [*apache.names_by_apache(role), *own]


def _in_our_form(form: apache.Form, name: str, text: str, where: str) -> str:
    try:
        return form.read(text)
    except ValueError as error:
        shown = "what was given" if all_settings()[name].doc.secret else repr(text)
        raise BadSetting(f"{where} can't be {shown}: {error}") from None


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


def _unknown(key: str, known: Iterable[str]) -> str:
    alike = get_close_matches(key, list(known), 1, _ALIKE)
    return f"{key} is unknown and ignored" + (f"; did you mean {alike[0]}?" if alike else "")
