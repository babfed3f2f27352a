"""What stands beside a setting: its meaning, its limits, its name in RocketMQ's files."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec

PORT_MAX = 65_535
I32_MAX = (1 << 31) - 1


class Doc(msgspec.Struct, frozen=True):
    """One setting: documentation, limits, and its name in RocketMQ's broker.conf if it has one."""

    text: str
    apache: str | None = None
    live: bool = False
    """May be changed while the server runs."""
    least: int = 0
    most: int | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    """Is never shown, neither in logs nor to those who ask for the settings."""
    path: bool = False
    """Names a file or directory: is never changed over the wire."""
    form: str = ""
    """How broker.conf writes it where that differs, for the reference page."""
    check: Callable[[str], object] | None = None
    """Raises ValueError for a text that can't be."""


class Setting(msgspec.Struct, frozen=True):
    """A field of one of the structs."""

    name: str
    kind: type
    default: object
    doc: Doc


@cache
def settings_of(config: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """The settings of a struct, in its order."""
    hints = get_type_hints(config, include_extras=True)
    found = []
    for field in msgspec.structs.fields(config):
        hint = hints[field.name]
        assert get_origin(hint) is Annotated, f"{config.__name__}.{field.name} has no Doc"
        kind, doc = get_args(hint)
        found.append(Setting(field.name, kind, field.default, doc))
    return tuple(found)


def describe(config: type[msgspec.Struct]) -> list[tuple[str, object, Doc]]:
    """(name, default, doc) of each setting, for reference pages."""
    return [(setting.name, setting.default, setting.doc) for setting in settings_of(config)]


class Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct of settings that can't exist with a value beyond its limits."""

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            value = getattr(self, setting.name)
            reason = objection(setting, value)
            if reason:
                raise ValueError(f"{setting.name} can't be {value!r}: {reason}")


def objection(setting: Setting, value: object) -> str:
    """Why a setting can't have this value; empty: it can."""
    doc = setting.doc
    if type(value) is not setting.kind:
        return f"it is {_expected(setting)}"
    if setting.kind is int and isinstance(value, int):
        if value < doc.least:
            return f"it is at least {doc.least}"
        if doc.most is not None and value > doc.most:
            return f"it is at most {doc.most}"
    if isinstance(value, str):
        if doc.choices and value not in doc.choices:
            return f"it is {_expected(setting)}"
        if doc.check is not None:
            try:
                doc.check(value)
            except ValueError as error:
                return str(error)
    return ""


def _expected(setting: Setting) -> str:
    if setting.doc.choices:
        *first, last = setting.doc.choices
        return f"{', '.join(first)} or {last}"
    if setting.kind is bool:
        return "true or false"
    return "a whole number" if setting.kind is int else "a text"
