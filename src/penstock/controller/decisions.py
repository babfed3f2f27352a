"""The decisions of a controller: `(broker set, request, living replicas) → ControllerDecision`.

A decision names the new state. It takes effect if the state has not changed meanwhile
(compare-and-swap); otherwise the controller decides again.

An election chooses among the living members of the in-sync set, because each of them has every
acknowledged message. The in-sync set is then the new master alone: the others join again when they
have its log. If no member is alive, there is no master, and the set stays as it is. Only if an
operator says so (`unclean`), another replica becomes the master, and messages may be lost.

A member that says that the end of its log may be missing, after a power failure, is elected only if
all members are alive and say the same. Then the one with the longest log is the best.

A master that is only presumed to be alive prevents the election of another one, and is not elected
itself: what its log lacks after a power failure, its first heartbeat says.

A replica that is elected may be dead: that is noticed later. So the members of the set before stay
electable until the new master has taken over, by its first request for an in-sync set. Brokers of
RocketMQ do not ask before they acknowledge messages; there the new master is the only one at once.

A master that asks for an election has been started again. It does not continue its epoch: requests
of its last process may still be on the way, and other replicas may have more of the log. It gets a
new epoch.

The time is a parameter, for the history of elections; no decision depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from penstock.controller.broker_set import (
    FIRST_ID,
    HISTORY_MAX,
    REPLICAS_MAX,
    BrokerSet,
    ElectionRecord,
    LiveReplica,
    Living,
    ReplicaRecord,
)
from penstock.wire.codes import ResponseCode


class ControllerDecision(NamedTuple):
    """The answer to a request, and what changes."""

    state: BrokerSet | None = None
    """The state, as it is afterwards."""
    code: int = ResponseCode.SUCCESS
    remark: str = ""
    changed: bool = False
    elected: bool = False
    """There is a new master: its replicas have to be told."""


def _refused(state: BrokerSet | None, code: int, remark: str) -> ControllerDecision:
    return ControllerDecision(state, code, remark)


def next_id(state: BrokerSet | None) -> int:
    """The id that a new replica can apply for."""
    return FIRST_ID if state is None else state.next_id


def apply_id(
    state: BrokerSet | None, cluster: str, name: str, replica_id: int, check_code: str
) -> ControllerDecision:
    """Give an id to a new replica. It may ask again with the same `check_code`, which begins with
    its address."""
    address = check_code.partition(";")[0]
    replica = ReplicaRecord(address, check_code)
    if state is None:
        if replica_id != FIRST_ID:
            return _refused(
                None,
                ResponseCode.CONTROLLER_BROKER_ID_INVALID,
                f"the broker set {name} is not known: its first id is {FIRST_ID}, not {replica_id}",
            )
        created = BrokerSet(cluster, name, {replica_id: replica}, replica_id + 1)
        return ControllerDecision(created, changed=True)
    known = state.replicas.get(replica_id)
    if known is not None:
        if known.check_code == check_code:
            return ControllerDecision(state)
        return _refused(
            state,
            ResponseCode.CONTROLLER_BROKER_ID_INVALID,
            f"the id {replica_id} of {name} belongs to {known.address}",
        )
    if len(state.replicas) >= REPLICAS_MAX:
        return _refused(
            state,
            ResponseCode.CONTROLLER_BROKER_ID_INVALID,
            f"{name} has {len(state.replicas)} replicas, the limit is {REPLICAS_MAX}; remove those "
            "that do not exist any more (cleanBrokerMetadata)",
        )
    if replica_id != state.next_id:
        return _refused(
            state,
            ResponseCode.CONTROLLER_BROKER_ID_INVALID,
            f"the next id of {name} is {state.next_id}, not {replica_id}",
        )
    return ControllerDecision(
        msgspec.structs.replace(
            state,
            replicas={**state.replicas, replica_id: replica},
            next_id=state.next_id + 1,
        ),
        changed=True,
    )


def register(
    state: BrokerSet | None, name: str, living: Living, replica_id: int, address: str
) -> ControllerDecision:
    """A replica has started, perhaps at another address. While it is alive at the old one, this is
    another broker with a copy of its data directory."""
    if state is None or replica_id not in state.replicas:
        return _refused(
            state,
            ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED,
            f"the id {replica_id} of the broker set {name} is not known",
        )
    replica = state.replicas[replica_id]
    if replica.address == address:
        return ControllerDecision(state)
    if replica_id in living and not living[replica_id].presumed:
        return _refused(
            state,
            ResponseCode.CONTROLLER_BROKER_ID_INVALID,
            f"replica {replica_id} of {name} is alive at {replica.address}, so {address} can't be "
            "the same replica",
        )
    moved = msgspec.structs.replace(replica, address=address)
    replicas = {**state.replicas, replica_id: moved}
    return ControllerDecision(msgspec.structs.replace(state, replicas=replicas), changed=True)


def elect(
    state: BrokerSet | None,
    name: str,
    living: Living,
    *,
    now_ms: int,
    asking: int | None = None,
    designated: bool = False,
    unclean: bool = False,
    why_dead: str = "",
) -> ControllerDecision:
    """Elect a master if there is none that is alive, or the master itself asks.

    `asking` is the replica that asks; None if the controller has found that the master is dead, for
    the reason `why_dead`. `designated`: this one is to be the master, also if another one is alive.
    """
    unknown = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
    if state is None:
        return _refused(None, unknown, f"the broker set {name} is not known")
    if state.never_elected and asking is not None:
        if asking not in state.replicas:
            return _refused(
                state, unknown, f"the id {asking} of the broker set {name} is not known"
            )
        return _with_master(state, asking, living, now_ms, "first master")
    master = living.get(state.master_id) if state.master_id is not None else None
    if asking is None and master is not None and not master.presumed:
        return _still_alive(state, name)  # another controller gets its heartbeats
    wanted = asking if designated else None
    restarted = asking is not None and asking == state.master_id and not designated
    chosen = _choose(state, _electable(state, living), living, wanted)
    if chosen is None and unclean:
        chosen = _choose(state, state.replicas, living, wanted)
    if chosen is not None and chosen == state.master_id and not restarted:
        return _still_alive(state, name)
    if chosen is not None and living[chosen].presumed:
        return _refused(
            state,
            ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
            f"nothing is known of the log of replica {chosen} of {name} before its first heartbeat",
        )
    if chosen is not None:
        cause = "asked for by an operator" if designated else _loss(state, why_dead)
        if restarted:
            cause = f"replica {asking} was restarted"
        return _with_master(state, chosen, living, now_ms, _reason(state, chosen, cause))
    if asking is not None:
        return _refused(
            state,
            ResponseCode.CONTROLLER_ELECT_MASTER_FAILED,
            f"no member of the in-sync set {list(state.in_sync)} of {name} "
            f"{'is designated and ' if designated else ''}alive",
        )
    return _without_master(state, name, now_ms, why_dead)


def _still_alive(state: BrokerSet, name: str) -> ControllerDecision:
    code = ResponseCode.CONTROLLER_MASTER_STILL_EXIST
    return ControllerDecision(state, code, f"the master {state.master_id} of {name} is alive")


def _loss(state: BrokerSet, why_dead: str) -> str:
    """Why there has to be an election."""
    if state.master_id is None:
        return "there was no master"
    dead = f"replica {state.master_id} is dead"
    return f"{dead}: {why_dead}" if why_dead else dead


def _reason(state: BrokerSet, chosen: int, cause: str) -> str:
    """Why a replica became the master, for the history of elections."""
    if chosen in (state.before or state.in_sync):
        return cause
    return f"{cause}; unclean: replica {chosen} was not in the in-sync set"


def _without_master(state: BrokerSet, name: str, now_ms: int, why_dead: str) -> ControllerDecision:
    """The master is dead, and nobody can replace it."""
    remark = f"the master of {name} is down, and no other member of its in-sync set is alive"
    code = ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE
    if state.master_id is None:
        return ControllerDecision(state, code, remark)
    reason = f"{_loss(state, why_dead)}; no other member of the in-sync set is alive"
    return ControllerDecision(
        msgspec.structs.replace(
            state,
            master_id=None,
            history=_with_election(state, ElectionRecord(state.master_epoch, None, now_ms, reason)),
        ),
        code,
        remark,
        changed=True,
    )


def _electable(state: BrokerSet, living: Living) -> Iterable[int]:
    """The members of the in-sync set that have every acknowledged message, as far as that can be
    known."""
    members = state.before or state.in_sync
    complete = [one for one in members if one in living and living[one].complete]
    known = all(one in living and not living[one].changing for one in members)
    if complete or not members or not known:
        return complete
    longest = max(living[one][:2] for one in members)  # epoch and offset
    return [one for one in members if living[one][:2] == longest]


def _choose(
    state: BrokerSet, among: Iterable[int], living: Living, wanted: int | None
) -> int | None:
    candidates = [one for one in among if one in living and one in state.replicas]
    if wanted is not None:
        return wanted if wanted in candidates else None
    if state.master_id in candidates and living[state.master_id].complete:
        return state.master_id
    return min(candidates, key=lambda one: _rank(one, living[one]), default=None)


def _rank(replica_id: int, live: LiveReplica) -> tuple[int, int, int, int]:
    return -live.epoch, -live.max_offset, live.priority, replica_id


def _with_master(
    state: BrokerSet, replica_id: int, living: Living, now_ms: int, reason: str
) -> ControllerDecision:
    epoch = state.master_epoch + 1
    live, before = living.get(replica_id, LiveReplica()), state.before or state.in_sync
    if not live.takes_over or replica_id not in before or len(before) == 1:
        before = ()
    return ControllerDecision(
        msgspec.structs.replace(
            state,
            master_id=replica_id,
            master_epoch=epoch,
            in_sync=(replica_id,),
            in_sync_epoch=state.in_sync_epoch + 1,
            history=_with_election(state, ElectionRecord(epoch, replica_id, now_ms, reason)),
            master_incomplete=not live.complete,
            before=before,
        ),
        changed=True,
        elected=True,
    )


def _with_election(state: BrokerSet, election: ElectionRecord) -> tuple[ElectionRecord, ...]:
    return (*state.history, election)[-HISTORY_MAX:]


def alter_in_sync(
    state: BrokerSet | None,
    name: str,
    living: Living,
    *,
    master_id: int,
    master_epoch: int,
    members: Iterable[int],
    in_sync_epoch: int,
) -> ControllerDecision:
    """The master asks for another in-sync set, or for another number of the same one. Both epochs
    must be the present ones: after a change no earlier request takes effect."""
    wanted = tuple(sorted(set(members)))
    if state is None:
        return _refused(
            None,
            ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED,
            f"the broker set {name} is not known",
        )
    refusal = _why_not(state, living, master_id, master_epoch, wanted, in_sync_epoch)
    if refusal is not None:
        return _refused(state, *refusal)
    altered = msgspec.structs.replace(
        state, in_sync=wanted, in_sync_epoch=state.in_sync_epoch + 1, before=()
    )
    return ControllerDecision(altered, changed=True)


def _why_not(
    state: BrokerSet,
    living: Living,
    master_id: int,
    master_epoch: int,
    wanted: tuple[int, ...],
    in_sync_epoch: int,
) -> tuple[int, str] | None:
    """The code and the reason of a refusal, in the order in which RocketMQ checks. RocketMQ also
    refuses the set that there is already."""
    if state.master_id != master_id:
        return (
            ResponseCode.CONTROLLER_INVALID_MASTER,
            f"the master is {state.master_id}, not {master_id}",
        )
    if state.master_epoch != master_epoch:
        return (
            ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH,
            f"the epoch of the master is {state.master_epoch}, not {master_epoch}",
        )
    if state.in_sync_epoch != in_sync_epoch:
        return (
            ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH,
            f"the epoch of the in-sync set is {state.in_sync_epoch}, not {in_sync_epoch}",
        )
    for one in wanted:
        if one not in state.replicas:
            return ResponseCode.CONTROLLER_INVALID_REPLICAS, f"there is no replica {one}"
        if one not in living and one != master_id:  # which asks
            return ResponseCode.CONTROLLER_BROKER_NOT_ALIVE, f"the replica {one} is not alive"
    if master_id not in wanted:
        code = ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
        return code, f"the master {master_id} must be in the in-sync set"
    return None


def clean(
    state: BrokerSet | None,
    name: str,
    living: Living,
    *,
    ids: Iterable[int] | None = None,
    also_living: bool = False,
) -> ControllerDecision:
    """Forget replicas, or the whole set if `ids` is None. The state is None then."""
    code = ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    if state is None:
        return _refused(None, code, f"the broker set {name} is not known")
    removed = set(state.replicas if ids is None else ids)
    if not also_living:
        alive = sorted(removed & set(living))
        if ids is None and state.master_id is not None:
            alive = alive or [state.master_id]
        if alive:
            return _refused(state, code, f"the replicas {alive} of {name} are alive")
    kept = {one: replica for one, replica in state.replicas.items() if one not in removed}
    if not kept:
        return ControllerDecision(None, changed=True)
    return ControllerDecision(
        msgspec.structs.replace(
            state,
            replicas=kept,
            master_id=None if state.master_id in removed else state.master_id,
            in_sync=tuple(one for one in state.in_sync if one in kept),
            before=tuple(one for one in state.before if one in kept),
            in_sync_epoch=state.in_sync_epoch + 1,
        ),
        changed=True,
    )
