"""Attributes of topics and groups.

`+name=value` sets an attribute and `-name` removes it; several are separated by commas. In JSON
bodies the sign is part of the key. For a new topic or group attributes can only be set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.errors import InvalidParameter
from penstock.wire.java_numbers import LONG_MAX, parse_long


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute: whether it may change, and a function that returns why a value is invalid."""

    changeable: bool
    fault: Callable[[str], str | None]


def _one_of(*values: str, unserved: str = "") -> Callable[[str], str | None]:
    def fault(value: str) -> str | None:
        if value not in values:
            return f"it must be one of {', '.join(values)}"
        return "this broker does not support it" if value == unserved else None

    return fault


def _between(least: int, most: int) -> Callable[[str], str | None]:
    def fault(value: str) -> str | None:
        number = parse_long(value)
        if number is not None and least <= number <= most:
            return None
        return f"it must be a number from {least} to {most}"

    return fault


TOPIC_ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    "queue.type": Attribute(False, _one_of("SimpleCQ", "BatchCQ", unserved="BatchCQ")),
    "cleanup.policy": Attribute(False, _one_of("DELETE", "COMPACTION", unserved="COMPACTION")),
    "message.type": Attribute(
        True,
        _one_of(
            "UNSPECIFIED",
            "NORMAL",
            "FIFO",
            "DELAY",
            "TRANSACTION",
            "PRIORITY",
            "MIXED",
            unserved="MIXED",
        ),
    ),
    "reserve.time": Attribute(True, _between(-1, LONG_MAX)),
}
GROUP_ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    "priority.factor": Attribute(True, _between(0, 100)),
}


def parse_changes(text: str) -> dict[str, str]:
    """`+a=1,-b` as {"+a": "1", "-b": ""}."""
    changes: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, sets, value = part.partition("=")
        if not key.startswith("+" if sets else "-") or (sets and not value):
            raise InvalidParameter(
                f"{part!r} is not a valid change of an attribute",
                hint="use +name=value to set and -name to remove an attribute, separated by commas",
            )
        if key in changes:
            raise InvalidParameter(f"the attribute {key[1:]} is given twice")
        changes[key] = value
    return changes


def alter(
    known: Mapping[str, Attribute], current: Mapping[str, str] | None, changes: Mapping[str, str]
) -> dict[str, str]:
    """The attributes after `changes`; `current` is None for a new topic or group."""
    result = dict(current or {})
    seen = set()
    for key, value in changes.items():
        sign, name = key[:1], key[1:]
        attribute = known.get(name)
        if name in seen:
            raise InvalidParameter(f"the attribute {name} is given twice")
        seen.add(name)
        if sign not in ("+", "-"):
            raise InvalidParameter(f"the attribute {key!r} must start with + (set) or - (remove)")
        if attribute is None:
            names = ", ".join(sorted(known))
            raise InvalidParameter(f"unknown attribute {name!r}", hint=f"known ones: {names}")
        if sign == "-" and name not in result:
            raise InvalidParameter(f"the attribute {name} can't be removed: it is not set")
        if current is not None and not attribute.changeable:
            raise InvalidParameter(
                f"the attribute {name} can't be changed",
                hint="it is fixed when the topic is created; delete the topic and create it again",
            )
        if sign == "-":
            del result[name]
            continue
        fault = attribute.fault(value)
        if fault is not None:
            raise InvalidParameter(f"{value!r} is not valid for the attribute {name}: {fault}")
        result[name] = value
    return result
