"""Times of delivery: what a message asks for, and which slot of the timer that is.

Slot S of the timer holds what is due within (S, S + precision]: a message that is due exactly at
the begin of a slot belongs to the one before, as in RocketMQ. The slot stands in the property
TIMER_OUT_MS of a parked message; its own millisecond follows from what was asked for.
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

SLOT_MS_MAX: Final = 1000
_I64: Final = 1 << 63

_ASKED: Final = (
    (PROPERTY_TIMER_DELAY_SEC, 1000, True),
    (PROPERTY_TIMER_DELAY_MS, 1, True),
    (PROPERTY_TIMER_DELIVER_MS, 1, False),
)
"""By priority: the property, its unit in ms, whether it counts from the send on."""


def number_of(text: str) -> int | None:
    """A number as Java reads a long."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
        return None
    number = int(text)
    return number if -_I64 <= number < _I64 else None


def asked_ms(properties: dict[str, str], from_ms: int) -> int | None:
    """When a message that is sent at `from_ms` is to be delivered; None if it does not say.

    Raises MessageIllegal if that is no number.
    """
    for name, unit_ms, relative in _ASKED:
        text = properties.get(name)
        if text is None:
            continue
        number = number_of(text)
        if number is None:
            raise MessageIllegal(
                f"the time of delivery ({name}) is no number: {text[:32]!r}",
                hint="set a whole number, or leave it away",
            )
        return number * unit_ms + (from_ms if relative else 0)
    return None


def slot_of(due_ms: int, precision_ms: int) -> int:
    """The slot of a time of delivery."""
    return due_ms - 1 - (due_ms - 1) % precision_ms


def due_of(properties: dict[str, str], stored_ms: int) -> int | None:
    """When a parked message is due; None if it is none.

    What was stored again while it waited has its time in TIMER_DELIVER_MS. The slot limits what is
    computed from the time of storing: that may be later than the time of the send.
    """
    slot_ms = number_of(properties.get(PROPERTY_TIMER_OUT_MS, ""))
    if slot_ms is None:
        return None
    asked: int | None
    if PROPERTY_TIMER_ROLL_TIMES in properties:
        asked = number_of(properties.get(PROPERTY_TIMER_DELIVER_MS, ""))
    else:
        try:
            asked = asked_ms(properties, stored_ms)
        except MessageIllegal:
            asked = None
    last_ms = slot_ms + SLOT_MS_MAX
    return last_ms if asked is None else min(max(asked, slot_ms + 1), last_ms)


def key_of(properties: dict[str, str]) -> tuple[str, str]:
    """What a message is recalled by: its topic and its unique key."""
    return properties.get(PROPERTY_REAL_TOPIC, ""), properties.get(PROPERTY_UNIQ_KEY, "")


def recalled_key(properties: dict[str, str]) -> tuple[str, str] | None:
    """Topic and unique key of the message that this one recalls; None if it is no recall.

    RocketMQ writes the unique key alone, or `topic+key` (appendTopicForTimerDeleteKey).
    """
    key = properties.get(PROPERTY_TIMER_DEL_UNIQKEY)
    if key is None:
        return None
    topic = properties.get(PROPERTY_REAL_TOPIC, "")
    return topic, key.removeprefix(f"{topic}+")
