"""The role of a broker whose master is elected by controllers. Without I/O.

The controllers give each master an epoch, which is greater than all before. A broker acts only on
what it learns of a greater epoch than the last; older news has no effect.

A broker that has just started may still be the master in the state of the controllers, or may be a
member of the in-sync set. Both assume that it has every acknowledged message. That is true unless
the machine lost power and the end of the log was not flushed. Then the broker is not elected and
does not go on as the master before another one has given it its log: it sends no heartbeats, so for
the controllers it is not alive. Only if there is no master for `UNSURE_MS` is it to be elected all
the same: then all replicas may be in that state, and the one with the longest log is the best.
"""

from typing import NamedTuple

UNSURE_MS = 10_000


class SetState(NamedTuple):
    """What controllers say of a broker set."""

    master_id: int | None
    master_address: str
    master_epoch: int
    in_sync: frozenset[int] = frozenset()
    in_sync_epoch: int = 0


class Lead(NamedTuple):
    """Become the master, or go on as the master."""

    epoch: int
    in_sync: frozenset[int]
    in_sync_epoch: int


class Follow(NamedTuple):
    """Follow a master."""

    address: str
    epoch: int


class ControlledRole:
    """What one replica has learned of its broker set since its start."""

    def __init__(self, own_id: int, *, log_epoch: int, log_complete: bool, now_ms: int) -> None:
        """`log_epoch` is the last epoch of the log. `log_complete`: nothing that this replica has
        acknowledged can be missing."""
        self.own_id = own_id
        self._log_epoch = log_epoch
        self._sure = log_complete
        self._waits_since_ms = now_ms
        self.epoch = 0
        """The epoch of the last master that was led or followed."""
        self.leads = False
        self._followed = 0, ""
        self.state: SetState | None = None
        """The last news of the present epoch."""

    def learn(self, state: SetState, now_ms: int) -> Lead | Follow | None:
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
        if state.master_id == self.own_id and not self._may_lead(state.master_epoch):
            return None
        self.epoch = state.master_epoch
        self.leads = state.master_id == self.own_id
        return self._lead(state) if self.leads else self._follow(state)

    def _may_lead(self, epoch: int) -> bool:
        """Whether an election counts for this replica: an earlier one may have assumed that the log
        is complete, and an epoch that the log has left behind is over."""
        return self._sure and epoch >= self._log_epoch

    def _lead(self, state: SetState) -> Lead:
        return Lead(state.master_epoch, state.in_sync, state.in_sync_epoch)

    def _follow(self, state: SetState) -> Follow | None:
        if (state.master_epoch, state.master_address) == self._followed:
            return None
        self._followed = state.master_epoch, state.master_address
        return Follow(state.master_address, state.master_epoch)

    def caught_up(self) -> None:
        """This replica has the whole log of its master."""
        self._sure = True

    def alive(self, now_ms: int) -> bool:
        """Whether heartbeats may be sent, so that this replica can be elected."""
        if not self._sure and now_ms - self._waits_since_ms > UNSURE_MS:
            self._sure = self.state is not None and self.state.master_id is None
        return self._sure

    @property
    def needs_election(self) -> bool:
        """Whether there is no master."""
        return self.state is not None and self.state.master_id is None
