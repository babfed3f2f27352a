"""Delivery times: the properties that request one, and the slot of the timer it belongs to.

Slot S of the timer holds the messages that are due within (S, S + precision]. A message that is due
exactly at the start of a slot belongs to the slot before, as in RocketMQ. The property TIMER_OUT_MS
of a message in the timer is its slot; its exact millisecond follows from the requested time.
"""

from typing import Final

from penstock.errors import MessageIllegal
from penstock.wire.codes import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    PROPERTY_UNIQ_KEY,
)
from penstock.wire.java_numbers import parse_long

SLOT_MS_MAX: Final = 1000

TimerKey = tuple[str, str, str]
"""Topic, unique id and slot (TIMER_OUT_MS) of a timer message."""

_DELIVERY_PROPERTIES: Final = (
    (PROPERTY_TIMER_DELAY_SEC, 1000, True),
    (PROPERTY_TIMER_DELAY_MS, 1, True),
    (PROPERTY_TIMER_DELIVER_MS, 1, False),
)
"""In order of precedence: property, unit in ms, whether it is relative to the send."""


def requested_ms(properties: dict[str, str], from_ms: int) -> int | None:
    """The delivery time of a message that is sent at `from_ms`; None if it has none.

    Raises MessageIllegal if it is not a number.
    """
    for name, unit_ms, relative in _DELIVERY_PROPERTIES:
        text = properties.get(name)
        if text is None:
            continue
        number = parse_long(text)
        if number is None:
            raise MessageIllegal(
                f"the delivery time ({name}) is not a number: {text[:32]!r}",
                hint="use a whole number, or remove the property",
            )
        return number * unit_ms + (from_ms if relative else 0)
    return None


def slot_of(due_ms: int, precision_ms: int) -> int:
    """The slot of a delivery time."""
    return due_ms - 1 - (due_ms - 1) % precision_ms


def due_of(properties: dict[str, str], stored_ms: int) -> int | None:
    """When a message in the timer is due; None if it is not a timer message.

    A rolled message has its delivery time in TIMER_DELIVER_MS. The slot limits a time that is
    computed from the store time, which may be later than the send.
    """
    slot_ms = parse_long(properties.get(PROPERTY_TIMER_OUT_MS, ""))
    if slot_ms is None:
        return None
    asked: int | None
    if PROPERTY_TIMER_ROLL_TIMES in properties:
        asked = parse_long(properties.get(PROPERTY_TIMER_DELIVER_MS, ""))
    else:
        try:
            asked = requested_ms(properties, stored_ms)
        except MessageIllegal:
            asked = None
    last_ms = slot_ms + SLOT_MS_MAX
    return last_ms if asked is None else min(max(asked, slot_ms + 1), last_ms)


def message_key(properties: dict[str, str]) -> tuple[str, str]:
    """Real topic and unique key of a message, by which it is recalled."""
    return properties.get(PROPERTY_REAL_TOPIC, ""), properties.get(PROPERTY_UNIQ_KEY, "")


def recalled_key(properties: dict[str, str]) -> tuple[str, str] | None:
    """Topic and unique key of the message that this one recalls; None if it is not a recall.

    RocketMQ writes the unique key alone, or `topic+key` (appendTopicForTimerDeleteKey).
    """
    key = properties.get(PROPERTY_TIMER_DEL_UNIQKEY)
    if key is None:
        return None
    topic = properties.get(PROPERTY_REAL_TOPIC, "")
    return topic, key.removeprefix(f"{topic}+")
