"""The slaves of a master whose in-sync set is kept by controllers.

The controllers elect the next master among the members of the set. So each member must have every
message that is acknowledged or visible to readers, at any time:

* A send is acknowledged, and readers see a message, when all members have it.
* The master asks for another set; it changes when the controllers have agreed. Until then a slave
  that leaves is still waited for, and one that joins already is: the controllers may have agreed
  although the answer was lost.
* Each set has a number, and a request for a change names the number of the present one. So no
  request takes effect after a greater number was seen, however late it arrives. Before that, all
  requests whose outcome is not known may still take effect: all slaves that they name are waited
  for. If that lasts for `UNKNOWN_MS`, the master asks for the same set with another number, and for
  itself alone if that is refused (RocketMQ's controllers do that).
* A slave may be asked to join when it has all that was acknowledged or visible. As long as one
  follows closely, sends and readers wait for it as for a member: while messages arrive all the
  time, it could not join otherwise.

A slave is asked to leave when it has not caught up for `lag_ms_max`, or has no connection for
`ABSENT_MS`, or comes back with less than it had acknowledged.
"""

from collections.abc import Iterable

from penstock.replication.replicas import NO_LIMIT, Replica, ReplicaRules, Replicas
from penstock.wire.codes import ResponseCode

ABSENT_MS = 1_000
"""How long a member may be without a connection. Sends wait for it during that time."""
UNKNOWN_MS = 5_000
"""How long the outcome of a request may be unknown."""
REFUSALS = frozenset(
    [
        ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH,
        ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH,
        ResponseCode.CONTROLLER_INVALID_MASTER,
        ResponseCode.CONTROLLER_INVALID_REPLICAS,
        ResponseCode.CONTROLLER_BROKER_NOT_ALIVE,
        ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST,
        ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED,
    ]
)
"""Codes of controllers that mean that a request for another set had and will have no effect. Others
tell nothing: a controller that gets no answer of its store does not know itself."""


class AgreedReplicas(Replicas):
    """The slaves of one master; names are the ids that the controllers have given."""

    def __init__(
        self,
        rules: ReplicaRules,
        own_name: str,
        members: Iterable[str],
        number: int,
        now_ms: int,
        *,
        log_end: int = 0,
        confirmed: int = 0,
    ) -> None:
        """`members` is the set that the controllers had when they elected this master, and
        `number` the number of the set."""
        super().__init__(rules, log_end=log_end, confirmed=confirmed)
        self._own_name = own_name
        self.agreed = frozenset(members) - {own_name}
        """The slaves in the set."""
        self.number = number
        self._asked: frozenset[str] = frozenset()
        """Slaves in sets that were asked for with the present number."""
        self._unanswered = 0
        """Requests with the present number whose outcome is not known."""
        self._in_flight = False
        self._same_refused = False
        """The controllers do not give the same set another number."""
        self._asks_same = False
        self._acknowledged = 0
        """The most that sends were acknowledged up to."""
        self._unknown_ms = now_ms
        self._lost_ms = dict.fromkeys(self.agreed, now_ms)
        """Since when members have no connection."""

    # --- connections and acknowledgements

    def connect(
        self,
        name: str,
        now_ms: int,
        *,
        learner: bool = False,
        acknowledges_flushed: bool = False,
        order: int | None = None,
    ) -> Replica:
        replica = super().connect(
            name,
            now_ms,
            learner=learner,
            acknowledges_flushed=acknowledges_flushed,
            order=order,
        )
        replica.in_sync = name in self.agreed
        self._lost_ms.pop(name, None)
        return replica

    def disconnect(self, replica: Replica) -> None:
        super().disconnect(replica)
        if self.slaves.get(replica.name, replica) is replica:
            # `tick` notes the time: this method has none.
            self._lost_ms.setdefault(replica.name, -1)

    def acknowledge(self, replica: Replica, offset: int, log_end: int, now_ms: int) -> bool:
        """Take an acknowledgement. The slave joins when the controllers have agreed."""
        replica.note(offset, log_end, now_ms)
        if self.slaves.get(replica.name) is not replica or replica.learner:
            return False
        if offset < replica.acknowledged_before:  # it has lost its log
            self._lost_ms[replica.name] = now_ms - ABSENT_MS
        replica.acknowledged_before = 0
        replica.follows &= (
            log_end - offset <= self.rules.lag_bytes_max
            and now_ms - replica.caught_up_ms <= self.rules.lag_ms_max
        )
        return False

    def tick(self, log_end: int, now_ms: int) -> list[Replica]:
        """Note who has caught up. Nobody leaves here: see `ask`."""
        for replica in self.slaves.values():
            if replica.connected and replica.acknowledged >= log_end:
                replica.caught_up_ms = now_ms
                self._lost_ms.pop(replica.name, None)
            elif now_ms - replica.caught_up_ms > self.rules.lag_ms_max:
                replica.follows = False
        for name, lost_ms in self._lost_ms.items():
            if lost_ms < 0:
                self._lost_ms[name] = now_ms
        return []

    # --- the set

    def ask(self, log_end: int, now_ms: int) -> frozenset[str] | None:
        """The members, this master included, of a set that the controllers should agree to.

        None if the present one is right, or if a request is in flight.
        """
        if self._in_flight:
            return None
        wanted = frozenset(self._wanted(log_end, now_ms))
        if wanted == self.agreed:
            if self._unanswered == 0 or now_ms - self._unknown_ms <= UNKNOWN_MS:
                return None
            if self._same_refused:
                wanted = frozenset()
        if not self._unanswered:
            self._unknown_ms = now_ms
        self._in_flight = True
        self._asks_same = wanted == self.agreed
        self._unanswered += 1
        self._asked |= wanted
        return wanted | {self._own_name}

    def _wanted(self, log_end: int, now_ms: int) -> Iterable[str]:
        for name in self.agreed:
            replica = self.slaves.get(name)
            lost_ms = self._lost_ms.get(name)
            absent = lost_ms is not None and 0 <= lost_ms <= now_ms - ABSENT_MS
            if absent or (replica is not None and self._lags(replica, now_ms)):
                continue
            yield name
        needed = max(self.confirm_offset(log_end), self._acknowledged, self._log_end_before)
        for name, replica in self.slaves.items():
            joins = replica.connected and replica.follows and not replica.learner
            if name not in self.agreed and joins and replica.acknowledged >= needed:
                yield name

    def _lags(self, replica: Replica, now_ms: int) -> bool:
        return now_ms - replica.caught_up_ms > self.rules.lag_ms_max

    def answered(self, number: int, *, refused: bool) -> None:
        """The request with this number was answered, or its answer is lost. `refused`: it had and
        will have no effect."""
        self._in_flight = False
        if refused and number == self.number:
            self._same_refused |= self._asks_same
            self._unanswered -= 1
            if not self._unanswered:
                self._asked = frozenset()

    def agree(self, members: Iterable[str], number: int, now_ms: int) -> bool:
        """The controllers say what the set is; returns whether it has changed."""
        if number <= self.number:
            return False
        self.number = number
        self.agreed = frozenset(members) - {self._own_name}
        self._asked = frozenset()
        self._unanswered = 0
        self._same_refused = False
        self._unknown_ms = now_ms
        for name, replica in list(self.slaves.items()):
            replica.in_sync = name in self.agreed
            if not replica.in_sync and not replica.connected:
                del self.slaves[name]
        self._lost_ms = {name: ms for name, ms in self._lost_ms.items() if name in self.agreed}
        for name in self.agreed - self.slaves.keys():
            self._lost_ms.setdefault(name, now_ms)
        return True

    def enough(self) -> bool:
        return 1 + len(self.agreed) >= self.rules.in_sync_least

    # --- what is acknowledged

    def _counted(self) -> int:
        """What all slaves have that are, or may be, in the set, or may join soon; NO_LIMIT if there
        is none."""
        offset = NO_LIMIT
        for name in self.agreed | self._asked:
            replica = self.slaves.get(name)
            offset = min(offset, 0 if replica is None else replica.acknowledged)
        for replica in self.slaves.values():
            if replica.follows and not replica.learner:
                offset = min(offset, replica.acknowledged)
        return offset

    def acknowledged(self, log_end: int) -> int:
        if not self.enough():
            return 0
        offset = min(log_end, self._counted())
        self._acknowledged = max(self._acknowledged, offset)
        return offset

    def confirm_limit(self) -> int:
        return self._counted() if self.enough() else self._confirmed
