"""Handles by which producers recall timer messages: base64url("v1 topic broker time key").

The time is a millisecond of the message's slot.
"""

import base64
import binascii
from typing import Final, NamedTuple

from penstock.wire.codes import PROPERTY_TIMER_OUT_MS, PROPERTY_UNIQ_KEY
from penstock.wire.java_numbers import parse_long

_VERSION: Final = "v1"
_HANDLE_MAX: Final = 4_096


class RecallHandle(NamedTuple):
    """The fields of a handle."""

    topic: str
    broker: str
    time_ms: int
    key: str


def make_recall_handle(topic: str, broker: str, properties: dict[str, str]) -> bytes:
    """The handle of a timer message."""
    # The first millisecond of a slot belongs to the slot before.
    time_ms = int(properties[PROPERTY_TIMER_OUT_MS]) + 1
    key = properties.get(PROPERTY_UNIQ_KEY, "")
    text = " ".join((_VERSION, topic, broker, str(time_ms), key))
    return base64.urlsafe_b64encode(text.encode())


def read_recall_handle(text: str) -> RecallHandle | None:
    """The fields of a handle; None if it is not valid."""
    if len(text) > _HANDLE_MAX:
        return None
    try:
        data = text.encode("ascii")
        plain = base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True)
        version, topic, broker, time, key, *_ = plain.decode().split(" ")
    except (ValueError, binascii.Error):
        return None
    number = parse_long(time)
    if version != _VERSION or not key:  # a recall without a key would be an ordinary message
        return None
    return RecallHandle(topic, broker, -1 if number is None else number, key)
