"""What a master knows of its slaves: acknowledged offsets, the in-sync set, the confirm offset.

The in-sync set are the master and the slaves that have caught up with it within `lag_ms_max`. Here
the master alone decides who belongs to it.

* A slave joins when it has acknowledged everything that readers may see, and everything that was in
  the log when this broker became master: readers of the former master may have seen that. As long
  as a slave follows closely, readers wait for it as for a member: while messages arrive all the
  time, it could not join otherwise.
* It leaves when it has not caught up for `lag_ms_max`, also if it is disconnected. A lost
  connection alone changes nothing: otherwise a send that waits for all members would be
  acknowledged because a member has gone (RocketMQ 5.4 and 5.5 do that).
* It leaves at once when it comes back with less than it had acknowledged: it has lost its log.

A send is acknowledged when `copies` members of the set have the message, the master included, and
never with fewer than `in_sync_least`; with `all_in_sync` each member must have it. Readers of a
sync_master see what each member has; with fewer members than `in_sync_least` they see nothing new.

What this promises, with sync, two or more copies and sync flush on all replicas: an acknowledged
message survives the failure of any one machine, also if its disk is lost, and a power failure of
all.

* The slave to promote is that with the highest (last epoch that its log has reached, end of the
  log). All members of the set and all slaves that were connected must have been asked: a master
  that is cut off takes acknowledgements that were on the way, and members join and leave. With
  `all_in_sync` any member would do if each change of the set needed the consent of whoever
  promotes; here the master decides alone. The promoted slave flushes its log before it serves.
* A promotion counts as the loss of the old master's disk: what is not on the new master is
  truncated. The next disk may be lost, or the next slave promoted, when a slave that has lost its
  disk is back or has left the set, and each acknowledged message has `copies` copies in the set.
* The old master must have stopped, or be cut off from all slaves: it goes on acknowledging with
  those that it reaches and that have not heard of the new epoch.
* What readers saw is kept only if `in_sync_least` is 2 or more. A master that is alone shows
  messages otherwise that no other replica has.
* In one epoch one master writes one log. A master that may have lost the end of its log in a power
  failure must begin a new epoch when it starts again, unless slaves get only what it has flushed.
  The number of that epoch must be below that of any promotion that it may not have heard of. No
  number is used twice.
* The static protocol has no epochs: the role can't move, and slaves may get only what the master
  has flushed. Otherwise logs can differ unnoticed.

Times are of a clock that is never set.
"""

from typing import Final, NamedTuple

from penstock.errors import ReplicationError
from penstock.replication.frame_limits import I64_MAX

NO_LIMIT: Final = I64_MAX


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
        self, name: str, now_ms: int, *, learner: bool, acknowledges_flushed: bool, order: int
    ) -> None:
        self.name = name
        self.order = order
        """Later connections have a greater one."""
        self.learner = learner
        self.acknowledges_flushed = acknowledges_flushed
        """Whether it acknowledges what is on its disk, not only what has arrived."""
        self.connected = True
        self.in_sync = False
        self.follows = False
        """Whether it is as far as the master was some time before, and may join soon."""
        self.acknowledged = 0
        """The slave has the log up to here."""
        self.acknowledged_before = 0
        """What it had acknowledged when its last connection was lost."""
        self.caught_up_ms = now_ms
        """When it last had all that the master had."""
        self._mark_ms = now_ms
        self._mark_end = NO_LIMIT  # the end of the master's log at `_mark_ms`

    def replace(self, before: "Replica") -> None:
        """Take the place of an earlier connection."""
        before.connected = False
        self.in_sync = before.in_sync and not self.learner
        self.caught_up_ms = before.caught_up_ms
        self.acknowledged_before = max(before.acknowledged, before.acknowledged_before)

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
        elif offset >= self._mark_end:
            self.caught_up_ms = max(self.caught_up_ms, self._mark_ms)
        elif self._mark_end < NO_LIMIT:
            return  # many acknowledgements may be on the way: the mark stays until it is reached
        self.follows = offset >= min(log_end, self._mark_end)
        self._mark_ms, self._mark_end = now_ms, log_end


class Replicas:
    """The slaves of one master, by name."""

    def __init__(self, rules: ReplicaRules, *, log_end: int = 0, confirmed: int = 0) -> None:
        """`log_end` is the end of the log when the broker became master or started as one, and
        `confirmed` what readers could see then, as far as that is known."""
        self.rules = rules
        self.slaves: dict[str, Replica] = {}
        self._log_end_before = log_end
        self._confirmed = confirmed
        self._left: list[Replica] = []
        self._connections = 0

    def next_order(self) -> int:
        """The order of a new connection."""
        self._connections += 1
        return self._connections

    def connect(
        self,
        name: str,
        now_ms: int,
        *,
        learner: bool = False,
        acknowledges_flushed: bool = False,
        order: int | None = None,
    ) -> Replica:
        """A slave has said who it is; it takes the place of an earlier connection of this name.

        Raises ReplicationError if there is a later connection: this one was delayed, and says what
        the slave had before.
        """
        replica = Replica(
            name,
            now_ms,
            learner=learner,
            acknowledges_flushed=acknowledges_flushed,
            order=self.next_order() if order is None else order,
        )
        before = self.slaves.get(name)
        if before is not None:
            if before.order > replica.order:
                raise ReplicationError(f"slave {name} has connected again since")
            replica.replace(before)
        self.slaves[name] = replica
        return replica

    def disconnect(self, replica: Replica) -> None:
        """The connection of a slave is lost."""
        replica.connected = False
        if not replica.in_sync and self.slaves.get(replica.name) is replica:
            del self.slaves[replica.name]

    def acknowledge(self, replica: Replica, offset: int, log_end: int, now_ms: int) -> bool:
        """Take an acknowledgement; returns whether the slave has joined the in-sync set."""
        confirmed = self.confirm_offset(log_end)  # before the slave counts
        replica.note(offset, log_end, now_ms)
        if self.slaves.get(replica.name) is not replica or replica.learner:
            return False
        if replica.in_sync:
            if offset < replica.acknowledged_before:
                self._leave(replica)
            replica.acknowledged_before = 0
            return False
        needed = max(confirmed, self._log_end_before) if self.rules.sync else self._log_end_before
        replica.follows &= (
            log_end - offset <= self.rules.lag_bytes_max
            and now_ms - replica.caught_up_ms <= self.rules.lag_ms_max
        )
        replica.in_sync = replica.follows and offset >= needed
        return replica.in_sync

    def _leave(self, replica: Replica) -> None:
        replica.in_sync = replica.follows = False
        self._left.append(replica)

    def tick(self, log_end: int, now_ms: int) -> list[Replica]:
        """Remove slaves that have not caught up for too long.

        Returns those that have left the in-sync set since the last call.
        """
        for replica in list(self.slaves.values()):
            if replica.connected and replica.acknowledged >= log_end:
                replica.caught_up_ms = now_ms
            elif now_ms - replica.caught_up_ms > self.rules.lag_ms_max:
                replica.follows = False
                if replica.in_sync:
                    self._leave(replica)
                    if not replica.connected:
                        del self.slaves[replica.name]
        left, self._left = self._left, []
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
        needed = max(self.rules.copies, self.rules.in_sync_least) - 1
        if needed > 0:
            copies = sorted((replica.acknowledged for replica in self.in_sync), reverse=True)
            offset = copies[needed - 1] if len(copies) >= needed else 0
        if self.rules.all_in_sync:
            offset = min([offset, *(replica.acknowledged for replica in self.in_sync)])
        return offset

    def confirm_limit(self) -> int:
        """Readers may not see more of the log than this; NO_LIMIT if they may see all of it.

        It may be below what they have seen already.
        """
        if not self.rules.sync:
            return NO_LIMIT
        if not self.enough():
            return self._confirmed
        slaves = self.slaves.values()
        waits_for = [s.acknowledged for s in slaves if s.in_sync or (s.follows and not s.learner)]
        return min(waits_for, default=NO_LIMIT)

    def confirm_offset(self, log_end: int) -> int:
        """Readers may see the log up to here; never goes back."""
        self._confirmed = max(self._confirmed, min(log_end, self.confirm_limit()))
        return self._confirmed
