"""A controller: the handlers of its requests.

Controllers have no leader among them: each answers all requests, and names itself where a broker
asks for the leader. The states of the broker sets are elsewhere (`BrokerSetStates`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from penstock.config import LiveSettings
from penstock.controller import decisions
from penstock.controller.broker_set import (
    HEARTBEAT_MS,
    BrokerSet,
    Heartbeat,
    LiveReplica,
    Living,
)
from penstock.controller.decisions import ControllerDecision
from penstock.errors import HeaderError, InvalidParameter
from penstock.rpc.answers import Answer, ClientId, EffectQueue, Reply, ServerWork, WhenDone
from penstock.rpc.command import Command
from penstock.rpc.router import Router, Row
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import BrokerMemberGroup
from penstock.wire.bodies.cluster_bodies import (
    BrokerReplicasInfoWithHistory,
    ElectionInfo,
    ElectMasterResponseBody,
    ReplicaIdentity,
    ReplicasInfoWithHistory,
    SyncStateSet,
)
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_numbers import parse_long
from penstock.wire.java_properties import format_properties, parse_properties

GROUP: Final = "penstock"
NOBODY: Final = -1
"""A broker id that means none."""
HEARTBEAT_MS_RANGE: Final = (1_000, 600_000)
NAMES_MAX: Final = 10_000
"""Broker names in one request."""
NAME_CHARACTERS_MAX: Final = 255
"""Of the names of brokers and clusters, and of addresses."""
CHECK_CODE_CHARACTERS_MAX: Final = 1024


class BrokerSetStates(Protocol):
    """The states of all broker sets, and which replicas are alive."""

    def decide(
        self, name: str, decide: Callable[[BrokerSet | None, Living], ControllerDecision]
    ) -> ServerWork:
        """Decide about a broker set until the decision has taken effect; the result is the
        decision. `decide` may be called several times."""

    def read(self, names: Iterable[str]) -> ServerWork:
        """The states of broker sets, each with the living replicas: a dict by name."""

    def heartbeat(self, heartbeat: Heartbeat) -> str:
        """A replica is alive. Returns why this controller can't confirm a master, or nothing."""

    def disconnected(self, client: ClientId) -> None:
        """The connection of a replica is closed."""


class Controller:
    """One controller."""

    def __init__(self, settings: LiveSettings, states: BrokerSetStates, address: str) -> None:
        """`address` is announced to brokers."""
        self.effects = EffectQueue()
        self._settings = settings
        self._states = states
        self._address = address
        self.router = Router([self._rows()])

    def _rows(self) -> list[Row]:
        code = RequestCode
        return [
            Row(code.CONTROLLER_GET_METADATA_INFO, self._metadata),
            Row(code.CONTROLLER_GET_NEXT_BROKER_ID, self._next_id),
            Row(code.CONTROLLER_APPLY_BROKER_ID, self._apply_id),
            Row(code.CONTROLLER_REGISTER_BROKER, self._register),
            Row(code.CONTROLLER_GET_REPLICA_INFO, self._replica_info),
            Row(code.CONTROLLER_ELECT_MASTER, self._elect),
            Row(code.CONTROLLER_ALTER_SYNC_STATE_SET, self._alter_in_sync),
            Row(code.CONTROLLER_GET_SYNC_STATE_DATA, self._in_sync_sets),
            Row(code.CLEAN_BROKER_DATA, self._clean),
            Row(code.BROKER_HEARTBEAT, self._heartbeat),
            Row(code.GET_CONTROLLER_CONFIG, self._config),
            Row(code.UPDATE_CONTROLLER_CONFIG, self._update_config),
        ]

    # --- what the server calls

    def handle(self, command: Command) -> Answer:
        return self.router.handle(command)

    def connected(self, client: ClientId, peer: str, now_ms: int) -> None:
        """Nothing to do: a broker says who it is in its heartbeats."""

    def disconnected(self, client: ClientId, now_ms: int) -> None:
        self._states.disconnected(client)

    def due(self) -> int:
        """Never: the states have their own timer."""
        return 2**62

    def tick(self, now_ms: int) -> None:
        """Nothing to do."""

    def clock_stepped(self, step_ms: int) -> None:
        """Nothing to do: what is alive is measured by a clock that is never set."""

    # --- requests of brokers

    def _metadata(self, command: Command) -> Answer:
        return Reply(
            ext={
                "group": GROUP,
                "controllerLeaderId": self._address,
                "controllerLeaderAddress": self._address,
                "isLeader": "true",
                "peers": f"{self._address};",
            }
        )

    def _heartbeat(self, command: Command) -> Answer:
        low, high = HEARTBEAT_MS_RANGE
        timeout_ms = command.i64_or("heartbeatTimeoutMills", HEARTBEAT_MS)
        live = LiveReplica(
            epoch=command.i32_or("epoch", 0),
            max_offset=command.i64_or("maxOffset", 0),
            confirm_offset=command.i64_or("confirmOffset", 0),
            priority=command.i32_or("electionPriority", LiveReplica().priority),
            complete=not command.truth("penstockLogIncomplete"),
            takes_over=command.truth("penstockTakesOver"),
        )
        isolated = self._states.heartbeat(
            Heartbeat(
                _text(command, "brokerName"),
                command.i64("brokerId"),
                command.text_or("brokerAddr")[:NAME_CHARACTERS_MAX],
                live,
                min(max(timeout_ms, low), high),
                command.client,
            )
        )
        if isolated:  # a success would renew the lease of a master that may have been replaced
            return Reply(ResponseCode.SYSTEM_BUSY, remark=isolated)
        return Reply()

    def _next_id(self, command: Command) -> Answer:
        cluster, name = _text(command, "clusterName"), _text(command, "brokerName")

        def reply(found: Mapping[str, tuple[BrokerSet, Living]]) -> Reply:
            state = found[name][0] if name in found else None
            number = str(decisions.next_id(state))
            return Reply(ext={**_names(cluster, name), "nextBrokerId": number})

        return WhenDone(self._states.read([name]), reply)

    def _apply_id(self, command: Command) -> Answer:
        cluster, name = _text(command, "clusterName"), _text(command, "brokerName")
        applied = command.i64("appliedBrokerId")
        code = _text(command, "registerCheckCode", CHECK_CODE_CHARACTERS_MAX)
        return self._decide(
            name,
            lambda state, living: decisions.apply_id(state, cluster, name, applied, code),
            lambda decision: _reply(decision, _names(cluster, name)),
        )

    def _register(self, command: Command) -> Answer:
        cluster, name = _text(command, "clusterName"), _text(command, "brokerName")
        replica_id, address = command.i64("brokerId"), _text(command, "brokerAddress")
        alive: list[bool] = []

        def decide(state: BrokerSet | None, living: Living) -> ControllerDecision:
            alive[:] = [state is not None and state.master_id in living]
            return decisions.register(state, name, living, replica_id, address)

        def reply(decision: ControllerDecision) -> Reply:
            state, fields = decision.state, _names(cluster, name)
            if state is not None and alive[0]:
                fields |= _master_fields(state)
            return _reply(decision, fields, _in_sync_body(state))

        return self._decide(name, decide, reply)

    def _replica_info(self, command: Command) -> Answer:
        name = _text(command, "brokerName")

        def reply(found: Mapping[str, tuple[BrokerSet, Living]]) -> Reply:
            if name not in found:
                return Reply(
                    ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST,
                    remark=f"the broker set {name} is not known",
                )
            state = found[name][0]
            return Reply(ext=_master_fields(state), body=_in_sync_body(state))

        return WhenDone(self._states.read([name]), reply)

    def _elect(self, command: Command) -> Answer:
        name = _text(command, "brokerName")
        asking = command.i64_or("brokerId", NOBODY)
        designated = command.truth("designateElect")
        if asking == NOBODY:
            raise HeaderError("the header field brokerId is missing")
        unclean = self._settings.current.controller.unclean_elections

        def reply(decision: ControllerDecision) -> Reply:
            state = decision.state
            fields = {} if state is None else _master_fields(state)
            body = b"" if state is None else fastjson.encode_strict(_election_body(state))
            return _reply(decision, fields, body)

        return self._decide(
            name,
            lambda state, living: decisions.elect(
                state,
                name,
                living,
                now_ms=command.now_ms,
                asking=asking,
                designated=designated,
                unclean=unclean,
            ),
            reply,
        )

    def _alter_in_sync(self, command: Command) -> Answer:
        name, body = _text(command, "brokerName"), command.body_as(SyncStateSet)
        master_id, epoch = command.i64("masterBrokerId"), command.i32("masterEpoch")

        def reply(decision: ControllerDecision) -> Reply:
            state = decision.state
            number = 0 if state is None else state.in_sync_epoch
            return _reply(decision, {"newSyncStateSetEpoch": str(number)}, _in_sync_body(state))

        return self._decide(
            name,
            lambda state, living: decisions.alter_in_sync(
                state,
                name,
                living,
                master_id=master_id,
                master_epoch=epoch,
                members=body.sync_state_set,
                in_sync_epoch=body.sync_state_set_epoch,
            ),
            reply,
        )

    # --- requests of operators

    def _in_sync_sets(self, command: Command) -> Answer:
        names = command.body_as(list[str])
        if len(names) > NAMES_MAX:
            raise InvalidParameter.over("names", figure=len(names), limit=NAMES_MAX, unit="names")

        def reply(found: Mapping[str, tuple[BrokerSet, Living]]) -> Reply:
            table = {name: _replicas_info(*both) for name, both in found.items()}
            body = BrokerReplicasInfoWithHistory(replicas_info_table=table)
            return Reply(body=fastjson.encode(body))

        return WhenDone(self._states.read(names), reply)

    def _clean(self, command: Command) -> Answer:
        name, listed = _text(command, "brokerName"), command.text_or("brokerControllerIdsToClean")
        # Java's `isCleanLivingBroker` is a field of this name.
        also_living = command.truth("isCleanLivingBroker")
        ids = None if not listed.strip() else [_id(text) for text in listed.split(";") if text]
        return self._decide(
            name,
            lambda state, living: decisions.clean(
                state, name, living, ids=ids, also_living=also_living
            ),
            lambda decision: _reply(decision, {}),
        )

    def _config(self, command: Command) -> Answer:
        return Reply(body=format_properties(self._settings.apache_values()))

    def _update_config(self, command: Command) -> Answer:
        self._settings.change(parse_properties(command.body))
        return Reply()

    def _decide(
        self,
        name: str,
        decide: Callable[[BrokerSet | None, Living], ControllerDecision],
        reply: Callable[[ControllerDecision], Reply],
    ) -> Answer:
        return WhenDone(self._states.decide(name, decide), reply)


def role_change_fields(state: BrokerSet) -> dict[str, str]:
    """The fields of NOTIFY_BROKER_ROLE_CHANGED."""
    return _master_fields(state)


def role_change_body(state: BrokerSet) -> bytes:
    """The body of NOTIFY_BROKER_ROLE_CHANGED."""
    return _in_sync_body(state)


def _reply(decision: ControllerDecision, fields: dict[str, str], body: bytes = b"") -> Reply:
    return Reply(decision.code, ext=fields, body=body, remark=decision.remark or None)


def _names(cluster: str, name: str) -> dict[str, str]:
    return {"clusterName": cluster, "brokerName": name}


def _master_fields(state: BrokerSet) -> dict[str, str]:
    fields = {
        "masterEpoch": str(state.master_epoch),
        "syncStateSetEpoch": str(state.in_sync_epoch),
    }
    if state.master_id is not None and state.master_address is not None:
        fields |= {"masterBrokerId": str(state.master_id), "masterAddress": state.master_address}
    if state.master_incomplete:
        fields["penstockMasterIncomplete"] = "true"
    if state.before:  # the master has to take over
        fields["penstockTakesOver"] = "true"
        fields["penstockBefore"] = ",".join(map(str, state.before))
    return fields


def _in_sync_body(state: BrokerSet | None) -> bytes:
    if state is None:
        return b""
    return fastjson.encode(
        SyncStateSet(sync_state_set=list(state.in_sync), sync_state_set_epoch=state.in_sync_epoch)
    )


def _election_body(state: BrokerSet) -> ElectMasterResponseBody:
    return ElectMasterResponseBody(
        broker_member_group=BrokerMemberGroup(
            cluster=state.cluster,
            broker_name=state.name,
            broker_addrs={one: replica.address for one, replica in state.replicas.items()},
        ),
        sync_state_set=list(state.in_sync),
    )


def _replicas_info(state: BrokerSet, living: Living) -> ReplicasInfoWithHistory:
    replicas = {
        one: ReplicaIdentity(
            broker_name=state.name,
            broker_id=one,
            broker_address=replica.address,
            alive=one in living,
        )
        for one, replica in sorted(state.replicas.items())
    }
    return ReplicasInfoWithHistory(
        master_broker_id=state.master_id if state.master_id is not None else NOBODY,
        master_address=state.master_address or "",
        master_epoch=state.master_epoch,
        sync_state_set_epoch=state.in_sync_epoch,
        in_sync_replicas=[one for key, one in replicas.items() if key in state.in_sync],
        not_in_sync_replicas=[one for key, one in replicas.items() if key not in state.in_sync],
        election_history=[
            ElectionInfo(
                epoch=one.epoch,
                master_broker_id=one.master_id if one.master_id is not None else NOBODY,
                time_ms=one.time_ms,
                reason=one.reason,
            )
            for one in state.history
        ],
    )


def _id(text: str) -> int:
    number = parse_long(text.strip())
    if number is None:
        raise InvalidParameter(f"brokerControllerIdsToClean: {text[:32]!r} is not an id")
    return number


def _text(command: Command, field: str, characters_max: int = NAME_CHARACTERS_MAX) -> str:
    """A name or address in a request: it becomes a part of file names and keys."""
    text = command.text(field)
    if len(text) > characters_max:
        raise InvalidParameter.over(
            field, figure=len(text), limit=characters_max, unit="characters"
        )
    if not text or not text.isprintable():
        raise InvalidParameter(f"{field} must not be empty or contain control characters")
    return text
