"""The description of a setting: its meaning, its limits and its name in RocketMQ's files."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec

PORT_MAX = 65_535
I32_MAX = (1 << 31) - 1


class Doc(msgspec.Struct, frozen=True):
    """The documentation and limits of a setting, and its name in RocketMQ's broker.conf, if any."""

    text: str
    apache: str | None = None
    live: bool = False
    """The setting may change while the server runs."""
    least: int = 0
    most: int | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    """The value is never shown, neither in logs nor in responses."""
    path: bool = False
    """The value is a file or directory, and can't be changed over the network."""
    form: str = ""
    """The format in broker.conf if it differs, for the reference page."""
    check: Callable[[str], object] | None = None
    """Raises ValueError ("must …") for an invalid text."""


class Setting(msgspec.Struct, frozen=True):
    """One setting: a field of one of the structs."""

    name: str
    kind: type
    default: object
    doc: Doc


@cache
def settings_of(config: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """The settings of a struct, in the order of its fields."""
    hints = get_type_hints(config, include_extras=True)
    found = []
    for field in msgspec.structs.fields(config):
        hint = hints[field.name]
        assert get_origin(hint) is Annotated, f"{config.__name__}.{field.name} has no Doc"
        kind, doc = get_args(hint)
        found.append(Setting(field.name, kind, field.default, doc))
    return tuple(found)


class Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct of settings that checks its values when it is created."""

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            value = getattr(self, setting.name)
            violation = violated_rule(setting, value)
            if violation:
                raise ValueError(f"{setting.name} {violation}, not {value!r}")


def violated_rule(setting: Setting, value: object) -> str:
    """The rule that a value violates, such as "must be at least 1"; empty if the value is valid."""
    doc = setting.doc
    if type(value) is not setting.kind:
        return f"must be {_expected(setting)}"
    if setting.kind is int and isinstance(value, int):
        if value < doc.least:
            return f"must be at least {doc.least}"
        if doc.most is not None and value > doc.most:
            return f"must be at most {doc.most}"
    if isinstance(value, str):
        if doc.choices and value not in doc.choices:
            return f"must be {_expected(setting)}"
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
    return "a whole number" if setting.kind is int else "a string"
