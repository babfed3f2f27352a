"""The role of a broker whose master is elected by controllers. Without I/O.

The controllers give each master an epoch, which is greater than all before. A broker acts only on
what it learns of a greater epoch than the last; older news has no effect.

A broker that has just started may still be the master in the state of the controllers. It does not
go on as the master, but asks for an election, which gives it a new epoch:

* Requests of its last process for another in-sync set may still take effect. This process does not
  know which slaves they name, so it could acknowledge messages without them. The new epoch refuses
  them.
* After a power failure its slaves may have more of the log than it has. In one epoch it would write
  other messages there, and the difference would not be noticed.
* A notification may be older than the process.

A broker that has just started may also be a member of the in-sync set. Then controllers assume that
it has every acknowledged message. That is true unless the machine lost power and the end of the log
was not flushed. Until a master has given such a broker its log, its heartbeats say that the log is
not complete, and it leads only if the controllers knew that when they elected it.

A replica that is elected takes over first: it asks for an in-sync set of its own. Until then each
member of the set before can be elected instead, in case this one is dead. So it must neither
acknowledge messages nor show its log to readers.

The log of a replica whose disk has failed is not complete either (`doubt_log`). If such a replica
is elected, it does not lead, and asks for another election. Neither does a replica lead while its
store can't be opened (`unable`).

RocketMQ's controllers do not know incomplete logs, and do not elect a master that is alive. They
get no heartbeats (`alive`) while the log is incomplete, or while they take this replica for the
master of an epoch that it can't continue. If there is no master for `UNSURE_MS`, a replica with an
incomplete log is to be elected all the same: then all replicas may be in that state.
"""

from typing import NamedTuple

from penstock.wire.java_numbers import parse_long

UNSURE_MS = 10_000


class SetState(NamedTuple):
    """What controllers say of a broker set."""

    master_id: int | None
    master_address: str
    master_epoch: int
    in_sync: frozenset[int] = frozenset()
    in_sync_epoch: int = 0
    master_incomplete: bool = False
    """The controllers knew that the log of the master may be incomplete."""
    taken_over: bool = True
    """The master has taken over."""
    before: frozenset[int] = frozenset()
    """The members before the election, each of which has every acknowledged message, until the
    master has taken over."""


def read_ids(text: str) -> frozenset[int]:
    """The numbers of replicas in a field of controllers, separated by commas."""
    numbers = (parse_long(part) for part in text.split(","))
    return frozenset(number for number in numbers if number is not None)


class Lead(NamedTuple):
    """Become the master, or go on as the master."""

    epoch: int
    in_sync: frozenset[int]
    in_sync_epoch: int


class TakeOver(NamedTuple):
    """Ask the controllers for an in-sync set of this replica alone, and learn what they answer."""

    epoch: int
    in_sync_epoch: int


class Follow(NamedTuple):
    """Follow a master."""

    address: str
    epoch: int


class ControlledRole:
    """What one replica has learned of its broker set since its start."""

    def __init__(self, own_id: int, *, log_epoch: int, log_complete: bool, now_ms: int) -> None:
        """`log_epoch` is the greatest epoch that was ever stored with the log. `log_complete`:
        nothing that this replica has acknowledged can be missing."""
        self.own_id = own_id
        self._log_epoch = log_epoch
        self._sure = log_complete
        self._waits_since_ms = now_ms
        self.epoch = 0
        """The epoch of the last master that was led or followed."""
        self.leads = False
        self._followed = 0, ""
        self.unable = False
        """The store can't be opened now: other replicas have to lead."""
        self.state: SetState | None = None
        """The last news of the present epoch."""

    def learn(self, state: SetState, now_ms: int) -> Lead | TakeOver | Follow | None:
        """Take news of the controllers; returns what is to be done."""
        if state.master_epoch < self.epoch:
            return None
        self.state = state
        if state.master_id is None or not state.master_address:
            return None
        if state.master_id != self.own_id:
            self._waits_since_ms = now_ms
        if state.master_epoch == self.epoch:
            return self._lead(state) if self.leads else self._follow(state)
        if state.master_id == self.own_id:
            if not self._may_lead(state):
                return None
            if not state.taken_over:
                return TakeOver(state.master_epoch, state.in_sync_epoch)
        self.epoch = state.master_epoch
        self.leads = state.master_id == self.own_id
        self._sure |= self.leads  # what it has is the log from now on
        return self._lead(state) if self.leads else self._follow(state)

    def _may_lead(self, state: SetState) -> bool:
        """Whether an election counts for this replica: it may have been the master of that epoch
        before it was started, and the controllers may have assumed that its log is complete."""
        sure = self._sure or state.master_incomplete
        return state.master_epoch > self._log_epoch and sure and not self.unable

    def _lead(self, state: SetState) -> Lead:
        return Lead(state.master_epoch, state.in_sync, state.in_sync_epoch)

    def _follow(self, state: SetState) -> Follow | None:
        resigned = state.master_id == self.own_id
        if resigned or (state.master_epoch, state.master_address) == self._followed:
            return None
        self._followed = state.master_epoch, state.master_address
        return Follow(state.master_address, state.master_epoch)

    def agreed(
        self, epoch: int, in_sync: frozenset[int], in_sync_epoch: int, now_ms: int
    ) -> Lead | TakeOver | Follow | None:
        """The controllers have agreed to a set that this replica asked for in an epoch."""
        state = self.state
        if state is None or (state.master_id, state.master_epoch) != (self.own_id, epoch):
            return None
        return self.learn(
            state._replace(in_sync=in_sync, in_sync_epoch=in_sync_epoch, taken_over=True), now_ms
        )

    def caught_up(self) -> None:
        """This replica has the whole log of its master."""
        self._sure = True

    def doubt_log(self) -> None:
        """The disk has failed: the log may lack what this replica has acknowledged."""
        self._sure = False

    def resign(self) -> None:
        """Lead no more in this epoch, in which nothing was acknowledged. To lead again, this
        replica needs another election, as after its start."""
        self._log_epoch = max(self._log_epoch, self.epoch)
        self.leads = False

    @property
    def complete(self) -> bool:
        """Whether the log has all that this replica has ever acknowledged, and can be read."""
        return self._sure and not self.unable

    def alive(self, now_ms: int) -> bool:
        """Whether heartbeats may be sent to controllers that do not know incomplete logs.

        Penstock's controllers know them, and wait for the replica with the longest log: this must
        not be asked because of them.
        """
        if not self._sure and now_ms - self._waits_since_ms > UNSURE_MS:
            self._sure = self.state is not None and self.state.master_id is None
        return self.complete and not self._taken_for_master

    @property
    def needs_election(self) -> bool:
        """Whether there is no master, or this replica is taken for one but can't lead."""
        return self._taken_for_master or (self.state is not None and self.state.master_id is None)

    @property
    def _taken_for_master(self) -> bool:
        state = self.state
        if state is None or state.master_id != self.own_id:
            return False
        leads = self.leads and self.epoch == state.master_epoch
        return not leads and not self._may_lead(state)
