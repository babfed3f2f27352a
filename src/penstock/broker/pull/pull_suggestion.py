"""Which member of the broker set a consumer pulls from next: `suggestWhichBrokerId` of a response.

With `read_from_slaves`, a consumer that is far behind is sent to the slave that its group names
(`whichBrokerWhenConsumeSlowly`, 1 by default), so that old messages do not displace new ones in
the master's page cache. Others are sent to the group's `brokerId`, 0 by default. As in RocketMQ, a
consumer is far behind if the log after its message is larger than `memory_percent` of the machine's
memory. Without `read_from_slaves` the suggestion is always the master.

A slave sends consumers that are not far behind back to its master. While the master can't be
reached, it suggests itself: a consumer that is sent to a master that has gone waits for a timeout
of its connection before it comes back. (RocketMQ's slaves suggest the group's `brokerId` then.)

The log offset of the message is that in the first record of the response. Only if no record was
found, and the log is large enough, is a queue entry read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.store.consumequeue.consumequeue import FILLER_SIZE, ConsumeQueue, unpack_entry
from penstock.wire import layout, octets
from penstock.wire.codes import MASTER_ID
from penstock.wire.octets import Bytes

if TYPE_CHECKING:
    from penstock.broker.context import BrokerContext

_PERCENT = 100
_SLOW_ID = 1
"""`whichBrokerWhenConsumeSlowly` of a group that is not known."""


class PullSuggestion:
    """Suggests a broker id to consumers."""

    def __init__(self, context: BrokerContext, memory_bytes: int | None = None) -> None:
        """`memory_bytes` is the machine's memory unless it is given."""
        self._groups = context.groups
        self._log = context.store.log
        self._memory_bytes = _machine_memory() if memory_bytes is None else memory_bytes
        self._settings = context.settings
        self._role = context.role

    @property
    def enabled(self) -> bool:
        """Otherwise every suggestion is the master, and the methods need not be called."""
        return self._settings.current.replication.read_from_slaves

    def usual(self, group: str) -> int:
        """The suggestion for a consumer that is not far behind."""
        if self._role.slave:
            return MASTER_ID if self._role.master_online else self._settings.current.broker.id
        config = self._groups.get(group)
        return MASTER_ID if config is None else config.broker_id

    def for_record(self, group: str, data: Bytes, at: int) -> int:
        """The suggestion for a consumer that gets the record in `data` at `at`."""
        log_offset = octets.get_i64(data, at + layout.PHYSICAL_OFFSET_AT)
        return self._slow(group) if self._far_behind(log_offset) else self.usual(group)

    def for_entry(self, group: str, queue: ConsumeQueue, offset: int) -> int:
        """The suggestion for a consumer that gets no message up to this queue offset.

        Does not wait for the disk.
        """
        if self._far_behind(self._log.begin()):  # otherwise no message is
            entry = unpack_entry(queue.read(offset, 1, wait=False) or b"")
            if entry is not None and entry[1] != FILLER_SIZE and self._far_behind(entry[0]):
                return self._slow(group)
        return self.usual(group)

    def _far_behind(self, log_offset: int) -> bool:
        percent = self._settings.current.replication.memory_percent
        return (self._log.end - log_offset) * _PERCENT > self._memory_bytes * percent

    def _slow(self, group: str) -> int:
        if self._role.slave and not self._role.master_online:
            return self._settings.current.broker.id
        config = self._groups.get(group)
        return _SLOW_ID if config is None else config.which_broker_when_consume_slowly


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
