"""What was resolved for the pulls and commits of a group at a queue, found by the request's bytes.

A target holds what its requests need: the queue, the names as text, the configs that allow them.
It also holds what it was resolved from, and its owner compares that with the tables on every use.
So a target is never used after a change, and nothing has to be told about changes.

A target is not changed; after a change a new one takes its place. The table has a limit: targets
displace each other beyond it, and their requests are resolved again.
"""

from typing import Any

from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire import octets
from penstock.wire.fields import Fields

TARGETS_MAX = 1 << 15
"""The maximum number of targets of a table. Most take about 0.5 KB, at most 3 KB."""
EXPRESSION_BYTES_MAX = 256
"""Requests with a longer expression have no target: a client may send as many as it likes."""
NO_EXPRESSION = -1
ALL_QUEUES = -1
"""In place of a queue id, in requests that are for all queues of a topic."""
_EXPRESSION_BYTES_MAX = EXPRESSION_BYTES_MAX
_NO_EXPRESSION = NO_EXPRESSION
_ALL_QUEUES = ALL_QUEUES
_SLOTS_MIN = 64
_PROBES = 8  # slots in which a target may be


class TargetKey:
    """The bytes of a request by which its target is found; valid until the next `read`."""

    def __init__(self) -> None:
        # The header of the request, and where the names are in its buffer.
        self.fields: Fields = Fields()
        self.group_at: int = 0
        self.group_length: int = 0
        self.topic_at: int = 0
        self.topic_length: int = 0
        # The expression of a request that has its own subscription; else the length NO_EXPRESSION.
        self.expression_at: int = 0
        self.expression_length: int = NO_EXPRESSION
        self.queue_id: int = 0
        self.hash: int = 0

    def read(self, fields: Fields, expression_name: bytes | None, all_queues: bool = False) -> bool:
        """Read the key of a request; False if a field is missing or too long, or out of range.

        The name is that of the field with the expression, None for requests without one. With
        `all_queues` the queue id may be ALL_QUEUES. Raises a HeaderError if it is not a number.
        """
        group = fields.find(b"consumerGroup")
        topic = fields.find(b"topic")
        queue = fields.find(b"queueId")
        if group < 0 or topic < 0 or queue < 0:
            return False
        queue_id = fields.number(queue)
        lowest = _ALL_QUEUES if all_queues else 0
        if queue_id < lowest or queue_id > 0x7FFFFFFF:
            return False
        self.fields = fields
        self.group_at = fields.value_at(group)
        self.group_length = fields.value_length(group)
        self.topic_at = fields.value_at(topic)
        self.topic_length = fields.value_length(topic)
        self.queue_id = queue_id
        self.hash = octets.mix_hash(fields.buffer, self.group_at, self.group_length, queue_id)
        self.hash = octets.mix_hash(fields.buffer, self.topic_at, self.topic_length, self.hash)
        self.expression_at = 0
        self.expression_length = _NO_EXPRESSION
        if expression_name is not None:
            expression = fields.find(expression_name)
            self.expression_length = 0
            if expression >= 0:
                self.expression_at = fields.value_at(expression)
                self.expression_length = fields.value_length(expression)
                if self.expression_length > _EXPRESSION_BYTES_MAX:
                    return False
                self.hash = octets.mix_hash(
                    fields.buffer, self.expression_at, self.expression_length, self.hash
                )
        return True

    def group(self) -> bytes:
        """The group's name, copied out."""
        return bytes(self.fields.buffer[self.group_at : self.group_at + self.group_length])

    def topic(self) -> bytes:
        """The topic's name, copied out."""
        return bytes(self.fields.buffer[self.topic_at : self.topic_at + self.topic_length])

    def expression(self) -> bytes | None:
        """The expression, copied out; None if the request has no subscription of its own."""
        if self.expression_length < 0:
            return None
        end = self.expression_at + self.expression_length
        return bytes(self.fields.buffer[self.expression_at : end])


class ConsumerTarget:
    """What a group's requests for one queue have in common."""

    def __init__(self, key: TargetKey, queue: ConsumeQueue) -> None:
        # The key: names as in the request; the expression is empty without one.
        self.hash: int = key.hash
        self.group_name: bytes = key.group()
        self.topic_name: bytes = key.topic()
        self.expression: bytes = key.expression() or b""
        self.with_expression: bool = key.expression_length >= 0
        self.queue_id: int = key.queue_id
        # The names as text, as the tables have them.
        self.group: str = self.group_name.decode("utf-8", "replace")
        self.topic: str = self.topic_name.decode("utf-8", "replace")
        # The queue, or one of them; it stays the same until its topic is deleted.
        self.queue: ConsumeQueue = queue

    def has_key(self, key: TargetKey) -> bool:
        """Whether this is the target of a request."""
        buffer = key.fields.buffer
        return (
            self.hash == key.hash
            and self.queue_id == key.queue_id
            and len(self.group_name) == key.group_length
            and len(self.topic_name) == key.topic_length
            and self.with_expression == (key.expression_length >= 0)
            and len(self.expression) == max(key.expression_length, 0)
            and octets.matches(buffer, key.group_at, self.group_name)
            and octets.matches(buffer, key.topic_at, self.topic_name)
            and octets.matches(buffer, key.expression_at, self.expression)
        )


class TargetTable:
    """Targets by key: a hash table in which a target is in one of the slots after its first."""

    def __init__(self, targets_max: int = TARGETS_MAX) -> None:
        """The limit is a power of two."""
        self._slots_max: int = targets_max
        # The targets, None for a free slot; the number of slots is _mask + 1, a power of two.
        self._slots: list[ConsumerTarget | None] = [None] * min(_SLOTS_MIN, targets_max)
        self._mask: int = len(self._slots) - 1
        # How many slots are used.
        self.used: int = 0

    def find(self, key: TargetKey) -> Any:
        """The target of a request, of the class of those that were put, or None."""
        probe = 0
        while probe < _PROBES:
            target = self._slots[(key.hash + probe) & self._mask]
            if target is None:
                break
            if target.has_key(key):
                return target
            probe += 1
        return None

    def put(self, key: TargetKey, target: ConsumerTarget) -> None:
        """Add the target of a request, or replace the one that it had."""
        if 2 * self.used > self._mask and self._mask + 1 < self._slots_max:
            self._grow()
        self._insert(key, target)

    def _insert(self, key: TargetKey | None, target: ConsumerTarget) -> None:
        for probe in range(_PROBES):
            place = (target.hash + probe) & self._mask
            known = self._slots[place]
            if known is None or (key is not None and known.has_key(key)):
                self.used += known is None
                self._slots[place] = target
                return
        self._slots[target.hash & self._mask] = target

    def _grow(self) -> None:
        """Double the slots; the targets of deleted queues are left out."""
        kept = [target for target in self._slots if target is not None and not target.queue.deleted]
        self._slots = [None] * (2 * (self._mask + 1))
        self._mask = len(self._slots) - 1
        self.used = 0
        for target in kept:
            self._insert(None, target)
