"""What a master knows of its slaves: acknowledged offsets, the in-sync set, the confirm offset.

The in-sync set are the master and the slaves that have caught up with it within `lag_ms_max`. Here
the master alone decides who belongs to it.

* A slave joins when it has acknowledged everything that readers may see.
* It leaves when it has not caught up for `lag_ms_max`, also if it is disconnected. A lost
  connection alone changes nothing: otherwise a send that waits for all members would be
  acknowledged because a member has gone (RocketMQ 5.4 and 5.5 do that).

A send is acknowledged when `copies` replicas have the message, the master included, and with
`all_in_sync` also each member of the set. Readers of a sync_master see what each member has.

Times are of a clock that is never set.
"""

from typing import NamedTuple

from penstock.errors import ReplicationError


class ReplicaRules(NamedTuple):
    """What a master promises."""

    sync: bool
    """Whether sends wait for slaves."""
    copies: int
    in_sync_least: int
    all_in_sync: bool
    lag_bytes_max: int
    lag_ms_max: int


class Replica:
    """One slave. It stays known for `lag_ms_max` after its connection is lost."""

    def __init__(
        self, name: str, now_ms: int, *, learner: bool, acknowledges_flushed: bool
    ) -> None:
        self.name = name
        self.learner = learner
        self.acknowledges_flushed = acknowledges_flushed
        """Whether it acknowledges what is on its disk, not only what has arrived."""
        self.connected = True
        self.in_sync = False
        self.acknowledged = 0
        """The slave has the log up to here."""
        self.caught_up_ms = now_ms
        """When it last had all that the master had."""
        self._asked_ms = now_ms
        self._asked_end = 0  # the master's log end at the last acknowledgement

    def note(self, offset: int, log_end: int, now_ms: int) -> None:
        """The slave has acknowledged the log up to an offset."""
        if not self.acknowledged <= offset <= log_end:
            raise ReplicationError(
                f"slave {self.name} acknowledges log offset {offset} after {self.acknowledged}; "
                f"the master's log ends at {log_end}"
            )
        self.acknowledged = offset
        if offset >= log_end:
            self.caught_up_ms = now_ms
        elif offset >= self._asked_end:
            self.caught_up_ms = max(self.caught_up_ms, self._asked_ms)
        self._asked_ms, self._asked_end = now_ms, log_end


class Replicas:
    """The slaves of one master, by name."""

    def __init__(self, rules: ReplicaRules) -> None:
        self.rules = rules
        self.slaves: dict[str, Replica] = {}
        self._confirmed = 0

    def connect(
        self, name: str, now_ms: int, *, learner: bool = False, acknowledges_flushed: bool = False
    ) -> Replica:
        """A slave has connected; it takes the place of an earlier connection of this name."""
        replica = Replica(name, now_ms, learner=learner, acknowledges_flushed=acknowledges_flushed)
        before = self.slaves.get(name)
        if before is not None:
            replica.in_sync = before.in_sync
            replica.caught_up_ms = before.caught_up_ms
            before.connected = False
        self.slaves[name] = replica
        return replica

    def disconnect(self, replica: Replica) -> None:
        """The connection of a slave is lost."""
        replica.connected = False
        if not replica.in_sync and self.slaves.get(replica.name) is replica:
            del self.slaves[replica.name]

    def acknowledge(self, replica: Replica, offset: int, log_end: int, now_ms: int) -> bool:
        """Take an acknowledgement; returns whether the slave has joined the in-sync set."""
        replica.note(offset, log_end, now_ms)
        joins = (
            not replica.in_sync
            and not replica.learner
            and self.slaves.get(replica.name) is replica
            and offset >= self.confirm_offset(log_end)
            and log_end - offset <= self.rules.lag_bytes_max
        )
        if joins:
            replica.in_sync = True
        return joins

    def tick(self, log_end: int, now_ms: int) -> list[Replica]:
        """Remove slaves that have not caught up for too long; returns those that have left."""
        left = []
        for replica in list(self.slaves.values()):
            if replica.connected and replica.acknowledged >= log_end:
                replica.caught_up_ms = now_ms
            elif replica.in_sync and now_ms - replica.caught_up_ms > self.rules.lag_ms_max:
                replica.in_sync = False
                left.append(replica)
                if not replica.connected:
                    del self.slaves[replica.name]
        return left

    @property
    def in_sync(self) -> list[Replica]:
        """The slaves of the in-sync set."""
        return [replica for replica in self.slaves.values() if replica.in_sync]

    def enough(self) -> bool:
        """Whether the in-sync set has as many members as writing needs."""
        return 1 + len(self.in_sync) >= self.rules.in_sync_least

    def acknowledged(self, log_end: int) -> int:
        """Sends of messages that end at or before this log offset may be acknowledged."""
        if not self.rules.sync:
            return log_end
        offset = log_end
        needed = self.rules.copies - 1
        if needed > 0:
            slaves = self.slaves.values()
            copies = sorted((s.acknowledged for s in slaves if not s.learner), reverse=True)
            offset = copies[needed - 1] if len(copies) >= needed else 0
        if self.rules.all_in_sync:
            offset = min([offset, *(replica.acknowledged for replica in self.in_sync)])
        return offset

    def confirm_offset(self, log_end: int) -> int:
        """Readers may see the log up to here; never goes back."""
        offset = log_end
        if self.rules.sync:
            offset = min([log_end, *(replica.acknowledged for replica in self.in_sync)])
        self._confirmed = max(self._confirmed, offset)
        return self._confirmed
