"""Which messages of a retry topic belong to a group.

The names of retry topics are ambiguous: `%RETRY%a_b_c` is POP's retry topic for the group `a_b` and
the topic `c`, and for `a` and `b_c`, and it is the retry topic of the group `a_b_c`. Each group has
its own offsets there and skips the messages of the others. Revived messages name their group in
ORIGIN_GROUP, as with Apache 5.4. The group determines the topic.

Messages that the broker revived before it wrote this property have no group. They are delivered to
every group and topic whose retry topic has this name.
"""

from typing import Final

from penstock.broker.filter.filtered_read import RecordFilter
from penstock.broker.filter.filters import fetch_property, record_properties
from penstock.wire.codes import (
    POP_RETRY_SEPARATOR_V1,
    POP_RETRY_SEPARATOR_V2,
    PROPERTY_FIRST_POP_TIME,
    PROPERTY_ORIGIN_GROUP,
    PROPERTY_RETRY_TOPIC,
    RETRY_TOPIC_PREFIX,
)


def _key(name: str) -> bytes:
    return b"\x02" + name.encode() + b"\x01"


_ORIGIN_GROUP: Final = _key(PROPERTY_ORIGIN_GROUP)
_FIRST_POP_TIME: Final = _key(PROPERTY_FIRST_POP_TIME)
_RETRY_TOPIC: Final = _key(PROPERTY_RETRY_TOPIC)


class RetryFilter:
    """Matches the messages of a group in a retry topic, if they match another filter too."""

    def __init__(self, name: str, group: str, inner: RecordFilter | None) -> None:
        self._name = name  # of the retry topic, without its prefix
        self._group = group
        self._inner = inner
        self.cost = 2 + (inner.cost if inner is not None else 0)

    def matches_record(self, data: bytes, at: int) -> bool:
        """Whether the message whose record starts at `at` matches."""
        framed = b"\x02" + record_properties(data, at) + b"\x02"
        if not self._belongs(framed):
            return False
        return self._inner is None or self._inner.matches_record(data, at)

    def _belongs(self, framed: bytes) -> bool:
        origin = fetch_property(framed, _ORIGIN_GROUP)
        if origin is not None and _has_retries_in(self._name, origin):
            return origin == self._group
        if self._name == self._group:
            return True
        # A message that a consumer of the group `name` sent back has no time of a pop.
        return _RETRY_TOPIC not in framed or _FIRST_POP_TIME in framed


def with_owner(inner: RecordFilter | None, topic: str, group: str) -> RecordFilter | None:
    """The filter for a group that reads this topic: skips what belongs to others in a retry topic
    that may be shared."""
    if not topic.startswith(RETRY_TOPIC_PREFIX) or POP_RETRY_SEPARATOR_V2 in topic:
        return inner
    name = topic[len(RETRY_TOPIC_PREFIX) :]
    if POP_RETRY_SEPARATOR_V1 not in name or not _has_retries_in(name, group):
        return inner  # not shared, or read by another group, such as that of a tool
    return RetryFilter(name, group, inner)


def _has_retries_in(name: str, group: str) -> bool:
    prefix = group + POP_RETRY_SEPARATOR_V1
    return name == group or (name.startswith(prefix) and len(name) > len(prefix))
