"""The JSON messages of etcd's gateway (v3), as far as controllers use them.

Keys and values are bytes, in base64; int64 arrive as strings, so messages are decoded with
`strict=False`. Fields that are not named here are ignored.
"""

from __future__ import annotations

import base64
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

Message = dict[str, Any]
"""A request, as it is encoded."""


class Header(msgspec.Struct, frozen=True):
    """What every answer has."""

    revision: int = 0
    """Of the whole store, when the request was executed."""
    member_id: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """A key. The fields that count something are 0 in a deletion."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class RangeAnswer(msgspec.Struct, frozen=True):
    """Keys."""

    header: Header = Header()
    kvs: list[KeyValue] = []
    more: bool = False


class TxnPart(msgspec.Struct, frozen=True):
    """The answer to one part of a transaction."""

    response_range: RangeAnswer | None = None


class TxnAnswer(msgspec.Struct, frozen=True):
    """The answer to a transaction."""

    header: Header = Header()
    succeeded: bool = False
    responses: list[TxnPart] = []

    def ranges(self) -> list[RangeAnswer]:
        """The answers to its reads."""
        found = (part.response_range for part in self.responses)
        return [answer for answer in found if answer is not None]


class PutAnswer(msgspec.Struct, frozen=True):
    """A key was written."""

    header: Header = Header()


class LeaseAnswer(msgspec.Struct, frozen=True):
    """A lease."""

    id: int = msgspec.field(default=0, name="ID")
    ttl_s: int = msgspec.field(default=0, name="TTL")
    """0: there is no such lease."""


class KeepAliveLine(msgspec.Struct, frozen=True):
    """A line of the answer to renewals."""

    result: LeaseAnswer | None = None


class Token(msgspec.Struct, frozen=True):
    """The answer to user and password."""

    token: str = ""


class Status(msgspec.Struct, frozen=True):
    """The state of a member."""

    header: Header = Header()
    leader: int = 0


class Event(msgspec.Struct, frozen=True):
    """A change of a key."""

    type: str = "PUT"
    kv: KeyValue = KeyValue()


class WatchAnswer(msgspec.Struct, frozen=True):
    """Changes of watched keys."""

    header: Header = Header()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    events: list[Event] = []


class WatchLine(msgspec.Struct, frozen=True):
    """A line of a watch."""

    result: WatchAnswer | None = None


class Refusal(msgspec.Struct, frozen=True):
    """An error of etcd; the codes are gRPC's."""

    code: int = 0
    message: str = ""


def decode(data: bytes, kind: type[T]) -> T:
    """A message of etcd. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=kind, strict=False)


def encode_text(data: bytes) -> str:
    """Bytes, as a message has them."""
    return base64.b64encode(data).decode()


def mod_revision_is(key: bytes, revision: int) -> Message:
    """The condition that a key was changed last at this revision; 0: it does not exist."""
    return {
        "key": encode_text(key),
        "target": "MOD",
        "result": "EQUAL",
        "mod_revision": str(revision),
    }


def no_change_since(prefix: bytes, revision: int) -> Message:
    """The condition that no key with a prefix was written after this revision."""
    return {
        **prefix_request(prefix),
        "target": "MOD",
        "result": "LESS",
        "mod_revision": str(revision + 1),
    }


def put(key: bytes, value: bytes, lease: int = 0) -> Message:
    """Write a key, as a part of a transaction."""
    return {"request_put": put_request(key, value, lease)}


def put_request(key: bytes, value: bytes, lease: int = 0) -> Message:
    return {"key": encode_text(key), "value": encode_text(value), "lease": str(lease)}


def get(key: bytes) -> Message:
    """Read a key, as a part of a transaction."""
    return {"request_range": {"key": encode_text(key)}}


def get_prefix(prefix: bytes) -> Message:
    """Read all keys with a prefix, as a part of a transaction."""
    return {"request_range": prefix_request(prefix)}


def prefix_request(prefix: bytes) -> Message:
    return {"key": encode_text(prefix), "range_end": encode_text(after_prefix(prefix))}


def delete(key: bytes) -> Message:
    """Delete a key, as a part of a transaction."""
    return {"request_delete_range": {"key": encode_text(key)}}


def delete_prefix(prefix: bytes) -> Message:
    """Delete all keys with a prefix, as a part of a transaction."""
    return {"request_delete_range": prefix_request(prefix)}


def after_prefix(prefix: bytes) -> bytes:
    """The first key after all that have this prefix. Prefixes here end with a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
