"""A sample of every protocol body that Penstock knows, with all its fields set."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from penstock.wire.bodies import (
    admin_bodies,
    client_bodies,
    cluster_bodies,
    pop_bodies,
    registration_bodies,
    table_bodies,
)
from penstock.wire.bodies.client_bodies import Body

MODULES = (
    admin_bodies,
    client_bodies,
    cluster_bodies,
    pop_bodies,
    registration_bodies,
    table_bodies,
)
ENUMERATIONS = {
    "language": "JAVA",
    "consumeType": "CONSUME_PASSIVELY",
    "messageModel": "CLUSTERING",
    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
    "consumeResult": "CR_SUCCESS",
    "topicFilterType": "SINGLE_TAG",
    "mode": "POP",
    "type": "CUSTOMIZED",
}
"""Java reads these texts as constants, and others as null."""


def body_classes() -> dict[str, type[msgspec.Struct]]:
    """All bodies by the name that Java's class has."""
    return {
        name: kind
        for module in MODULES
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Body) and kind is not Body
    }


def sample(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A body with every field set: numbers are 7, texts "text", collections have one member."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return kind(
        **{
            field.name: ENUMERATIONS.get(field.encode_name) or _value(field.type)
            for field in info.fields
        }
    )


def _value(kind: inspect.Type) -> Any:
    match kind:
        case inspect.UnionType():
            return _value(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case inspect.StrType() | inspect.AnyType():
            return "text"
        case inspect.BytesType():
            return b"bytes"
        case inspect.ListType() | inspect.VarTupleType() | inspect.FrozenSetType():
            return [_value(kind.item_type)]
        case inspect.DictType():
            return {_value(kind.key_type): _value(kind.value_type)}
        case inspect.StructType():
            return sample(kind.cls)
    raise TypeError(kind)


def as_java_tells(value: Any) -> Any:
    """A sample in the form of `golden.verify`: maps keyed by objects are lists of pairs."""
    if isinstance(value, msgspec.Struct):
        info = inspect.type_info(type(value))
        assert isinstance(info, inspect.StructType)
        return {f.encode_name: as_java_tells(getattr(value, f.name)) for f in info.fields}
    if isinstance(value, dict):
        pairs = [(as_java_tells(key), as_java_tells(item)) for key, item in value.items()]
        if any(isinstance(key, dict) for key, _ in pairs):
            return [list(pair) for pair in pairs]
        return {str(key): item for key, item in pairs}
    if isinstance(value, list):
        return [as_java_tells(item) for item in value]
    return value


def differences(ours: Any, java: Any, path: str = "") -> list[str]:
    """Where Java saw another value than we wrote; "-field" is one that its class lacks."""
    if isinstance(ours, dict) and isinstance(java, dict):
        missing = [f"-{name}" for name in ours if name not in java]
        found = [
            differences(ours[name], java[name], f"{path}.{name}") for name in ours & java.keys()
        ]
        return missing + [text for texts in found for text in texts]
    if isinstance(ours, list) and isinstance(java, list) and len(ours) == len(java):
        found = [differences(mine, its, f"{path}[]") for mine, its in zip(ours, java, strict=True)]
        return [text for texts in found for text in texts]
    return [] if ours == java else [f"{path}: {ours!r} became {java!r}"]
