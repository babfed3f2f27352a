"""What was promised to clients, and the checks of it, in the simulation of failover.

* A message that was **acknowledged** or **seen** stays where it is in the log. Both are prefixes of
  one log: a master that acknowledges or shows other bytes breaks the promise.
* Each member of the in-sync set that can be elected has all of both, at any time. So has the
  master of the last epoch.
* One replica writes in an epoch, and one record at an offset.
* A master accepts messages only as long as a controller confirms it that is confirmed by etcd.

Under async flush a power cut may lose what a replica had acknowledged. Then the others of the
in-sync set still have it, and that one must not be elected. Only if all members have lost it, the
promise ends (the table in the design: "unless all lose power within the flush interval").
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.controller.broker_set import BrokerSet
from tests.sim.failover_world import World
from tests.sim.replication_nodes import HEAD, InvariantError, ModelLog

LEASE_MS = 3_000
"""Of masters, and of controllers."""
LEASE_CHECK_MS = 200


class Member(Protocol):
    """A replica as the checks see it."""

    name: str
    replica_id: int | None
    log: ModelLog
    damaged: bool
    """A power cut has taken what it may have acknowledged."""

    met_ms: int
    """When its process asked controllers for the first time."""

    @property
    def electable(self) -> bool:
        """Whether controllers may hear of it."""

    @property
    def leads_epoch(self) -> int | None:
        """The epoch in which it serves as the master."""


class Ledger:
    """The promises of one broker set."""

    def __init__(self, world: World, members: Iterable[Member]) -> None:
        self._world = world
        self.state: BrokerSet | None = None
        """As it is stored."""
        self.etcd_confirmed_ms: Callable[[], int] | None = None
        """When etcd has confirmed a controller last; None if there is no etcd."""
        self._members = members
        self.acknowledged = b""
        """The log up to the last acknowledged record."""
        self.seen = b""
        """The log up to the last byte that a reader saw."""
        self._writers: dict[int, str] = {}
        self._written: dict[tuple[int, int], int] = {}
        self._lost: list[tuple[int, bytes]] = []
        """Offsets and heads of the first records that were lost when a promise ended."""
        self._damaged = False
        """All replicas that can be elected have lost messages."""
        self._epoch = 0
        self._taking_over = False
        self.clean = True
        """False: an operator has asked for an unclean election."""

    # --- what happens

    def begins(self, epoch: int, member: Member) -> None:
        """A replica serves as the master of an epoch."""
        writer = self._writers.setdefault(epoch, member.name)
        if writer != member.name:
            raise InvariantError(f"{writer} and {member.name} are masters of epoch {epoch}")
        self.check()

    def accepts(self, member: Member) -> None:
        """A master accepts a message."""
        if self.etcd_confirmed_ms is None:
            return
        confirmed_ms = self.etcd_confirmed_ms() + LEASE_MS  # by etcd; of controllers
        age_ms = self._world.now_ms - max(confirmed_ms, member.met_ms)
        if age_ms > LEASE_MS + LEASE_CHECK_MS:
            raise InvariantError(f"{member.name} accepts messages, and may be replaced long ago")

    def writes(self, epoch: int, offset: int, serial: int) -> None:
        """A master appends a record."""
        if self._written.setdefault((epoch, offset), serial) != serial:
            raise InvariantError(f"two records at offset {offset} of epoch {epoch}")

    def acknowledges(self, member: Member, end: int) -> None:
        """A master acknowledges a send."""
        self._world.events["acknowledged"] += 1
        self.acknowledged = self._longer(self.acknowledged, member, end, "acknowledged")
        self.check()

    def shows(self, member: Member, end: int) -> None:
        """A reader reads all that a replica shows."""
        self.seen = self._longer(self.seen, member, end, "seen")
        self.check()

    def _longer(self, known: bytes, member: Member, end: int, what: str) -> bytes:
        data = bytes(member.log.data[:end])
        for offset, head in self._lost:
            if data[offset : offset + HEAD.size] == head:
                data = data[:offset]  # another replica still has it, but can't be elected
        if self.clean and not (data.startswith(known) or known.startswith(data)):
            raise InvariantError(f"{member.name}: other messages were {what} before")
        return max(data, known, key=len)

    # --- what must be true then

    def changed(self, state: BrokerSet | None) -> None:
        """The controllers have stored another state."""
        before, self.state = self.state, state
        if state is not None:
            if state.master_id is not None and state.master_epoch != _epoch(before):
                self._world.events["election"] += 1
            self._world.note(
                f"stored: master {state.master_id}, epoch {state.master_epoch}, in sync "
                f"{list(state.in_sync)}, number {state.in_sync_epoch}, before {list(state.before)}"
            )
        self.check(changed=True)

    def check(self, *, changed: bool = False) -> None:
        """Each replica that can be elected has what was promised, and so has the master."""
        state = self.state
        if state is None or not self.clean:
            return
        electable = state.before or state.in_sync
        present = [one for one in self._members if one.replica_id in electable]
        damaged = bool(present) and all(one.damaged and self._lacks(one) for one in present)
        elected = self._taking_over or state.master_epoch > self._epoch
        if changed and elected and damaged and not self._damaged:
            raise InvariantError("an election leaves only replicas that have lost messages")
        self._damaged, self._epoch = damaged, state.master_epoch
        self._taking_over = bool(state.before)
        if damaged:
            self._end_promise(present)
        for one in present:
            if one.damaged and not one.electable:
                continue
            lacks = self._lacks(one)
            if lacks:
                raise InvariantError(f"{one.name} can be elected and lacks {lacks} messages")
            one.damaged = one.damaged and not one.electable
        for one in self._members:
            if one.leads_epoch == state.master_epoch and one.replica_id == state.master_id:
                lacks = self._lacks(one)
                if lacks:
                    raise InvariantError(f"the master {one.name} lacks {lacks} messages")

    def _lacks(self, member: Member) -> str:
        if not member.log.data.startswith(self.acknowledged):
            return "acknowledged"
        return "" if member.log.data.startswith(self.seen) else "seen"

    def _end_promise(self, present: list[Member]) -> None:
        """All members of the in-sync set have lost power: the longest log is left."""
        promised = max(self.acknowledged, self.seen, key=len)
        end = max(_common(one.log.data, promised) for one in present)
        if end == len(promised):
            return
        self._lost.append((end, promised[end : end + HEAD.size]))
        self.acknowledged, self.seen = self.acknowledged[:end], self.seen[:end]
        self._world.events["all members lost power"] += 1
        self._world.note(f"promised is only {end} of {len(promised)} bytes")


def _epoch(state: BrokerSet | None) -> int:
    return 0 if state is None else state.master_epoch


def _common(log: bytearray, promised: bytes) -> int:
    """Up to where a log has what is promised, in whole records."""
    at = 0
    while at < len(promised):
        end = at + HEAD.unpack_from(promised, at)[0]
        if log[at:end] != promised[at:end]:
            break
        at = end
    return at
