"""The requests of a controller, as brokers and mqadmin send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.controller.broker_set import LiveReplica
from penstock.controller.controller import (
    CHECK_CODE_CHARACTERS_MAX,
    HEARTBEAT_MS_RANGE,
    NAME_CHARACTERS_MAX,
    NAMES_MAX,
)
from penstock.controller.signed_controller_changes import READS
from penstock.wire.codes import RequestCode, ResponseCode

from .controller_kit import ADDRESS, NOW_MS, ControllerFixture

NAME = "b"
NAMES = {"clusterName": "c", "brokerName": NAME}


def with_replicas(count: int = 2, **config: Any) -> ControllerFixture:
    """A controller with a broker set whose replicas live; the first one is the master."""
    fixture = ControllerFixture(**config)
    for number in range(1, count + 1):
        applied = fixture.ask(
            RequestCode.CONTROLLER_APPLY_BROKER_ID,
            **NAMES,
            appliedBrokerId=str(number),
            registerCheckCode=f"host-{number}:1;7",
        )
        assert applied.code == 0
        assert heartbeat(fixture, number) == 0
    elected = fixture.ask(RequestCode.CONTROLLER_ELECT_MASTER, **NAMES, brokerId="1")
    assert elected.code == 0
    return fixture


def heartbeat(fixture: ControllerFixture, number: int, **fields: str) -> int:
    ext = {"brokerName": NAME, "brokerId": str(number), "brokerAddr": f"host-{number}:1", **fields}
    return fixture.ask(RequestCode.BROKER_HEARTBEAT, **ext).code


def described(fixture: ControllerFixture, *names: str) -> dict[str, Any]:
    body = json.dumps(names or [NAME]).encode()
    answer = fixture.ask(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body)
    table: dict[str, Any] = json.loads(answer.body)["replicasInfoTable"]
    return table


def test_every_controller_names_itself_as_the_leader() -> None:
    ext = ControllerFixture().ask(RequestCode.CONTROLLER_GET_METADATA_INFO).ext or {}
    assert (ext["controllerLeaderAddress"], ext["isLeader"]) == (ADDRESS, "true")


def test_a_controller_that_may_have_missed_decisions_confirms_no_master() -> None:
    fixture = with_replicas(1)
    fixture.states.isolated = "etcd has not answered for 4000 ms"
    assert heartbeat(fixture, 1) == ResponseCode.SYSTEM_BUSY
    assert len(fixture.states.heartbeats) == 2  # it is alive all the same
    fixture.states.isolated = ""
    assert heartbeat(fixture, 1) == ResponseCode.SUCCESS


def test_a_replica_gets_an_id_and_learns_who_is_the_master() -> None:
    fixture = with_replicas(1)
    ext = fixture.ask(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, **NAMES).ext or {}
    assert ext["nextBrokerId"] == "2"
    registered = fixture.ask(
        RequestCode.CONTROLLER_REGISTER_BROKER, **NAMES, brokerId="1", brokerAddress="host-1:1"
    )
    fields = {"masterBrokerId": "1", "masterAddress": "host-1:1", "masterEpoch": "1"}
    assert (registered.ext or {}).items() >= fields.items()
    info = fixture.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, brokerName=NAME)
    assert (info.ext or {}).items() >= fields.items()
    assert json.loads(info.body) == {"syncStateSet": [1], "syncStateSetEpoch": 1}


def test_a_replica_that_registers_learns_the_epoch_of_a_master_that_is_dead() -> None:
    fixture = with_replicas(1)
    fixture.states.living.clear()
    registered = fixture.ask(
        RequestCode.CONTROLLER_REGISTER_BROKER, **NAMES, brokerId="1", brokerAddress="host-1:1"
    )
    assert (registered.ext or {})["masterEpoch"] == "1"
    assert "masterBrokerId" not in (registered.ext or {})


def test_an_unknown_broker_set() -> None:
    fixture = ControllerFixture()
    code = fixture.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, brokerName=NAME).code
    assert code == ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST
    assert described(fixture) == {}


def test_a_heartbeat_says_how_long_it_is_valid() -> None:
    fixture = ControllerFixture()
    for asked, used in ((None, 10_000), ("3000", 3_000), ("1", 1_000), ("999999999", 600_000)):
        fields = {} if asked is None else {"heartbeatTimeoutMills": asked}
        heartbeat(fixture, 1, **fields)
        assert fixture.states.heartbeats[-1].timeout_ms == used
        assert HEARTBEAT_MS_RANGE[0] <= used <= HEARTBEAT_MS_RANGE[1]
    heartbeat(fixture, 1, epoch="3", maxOffset="7", confirmOffset="6", electionPriority="2")
    last = fixture.states.heartbeats[-1]
    assert (last.address, last.client, last.live) == ("host-1:1", 1, LiveReplica(3, 7, 6, 2))


def test_the_history_of_elections_is_reported() -> None:
    fixture = with_replicas()
    body = json.dumps({"syncStateSet": [1, 2], "syncStateSetEpoch": 1}).encode()
    ext = {"brokerName": NAME, "masterBrokerId": "1", "masterEpoch": "1"}
    altered = fixture.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, body, **ext)
    assert (altered.ext or {})["newSyncStateSetEpoch"] == "2"
    chosen = fixture.ask(
        RequestCode.CONTROLLER_ELECT_MASTER, **NAMES, brokerId="2", designateElect="true"
    )
    assert chosen.code == 0
    assert described(fixture, NAME, "other")[NAME]["electionHistory"] == [
        {"epoch": 1, "masterBrokerId": 1, "reason": "first master", "timeMs": NOW_MS},
        {"epoch": 2, "masterBrokerId": 2, "reason": "asked for by an operator", "timeMs": NOW_MS},
    ]
    assert [state.master_epoch for state in fixture.states.elected] == [1, 2]


def test_replicas_are_removed() -> None:
    fixture = with_replicas()
    code = RequestCode.CLEAN_BROKER_DATA
    refused = fixture.ask(code, brokerName=NAME, brokerControllerIdsToClean="2")
    assert refused.code == ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    gone = {"brokerControllerIdsToClean": "2", "isCleanLivingBroker": "true"}
    assert fixture.ask(code, brokerName=NAME, **gone).code == 0
    assert list(fixture.states.table[NAME].replicas) == [1]
    wrong = fixture.ask(code, brokerName=NAME, brokerControllerIdsToClean="x")
    assert wrong.code == ResponseCode.INVALID_PARAMETER


def test_live_settings_can_be_changed() -> None:
    fixture = ControllerFixture(etcd="e:2379", etcd_password="secret")
    change = b"enableElectUncleanMaster=true\n"
    assert fixture.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, change).code == 0
    shown = fixture.ask(RequestCode.GET_CONTROLLER_CONFIG).body
    assert b"enableElectUncleanMaster=true" in shown
    assert b"secret" not in shown
    for fixed in (b"controller.etcd=other:1\n", b"controller.etcd_password=x\n"):
        refused = fixture.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, fixed)
        assert refused.code == ResponseCode.NO_PERMISSION


# --- limits


@pytest.mark.parametrize("name", ["", "x" * (NAME_CHARACTERS_MAX + 1), "a\nb", "\ud800"])
def test_names_are_checked(name: str) -> None:
    fixture = ControllerFixture()
    for code in (
        RequestCode.BROKER_HEARTBEAT,
        RequestCode.CONTROLLER_GET_REPLICA_INFO,
        RequestCode.CONTROLLER_ELECT_MASTER,
        RequestCode.CLEAN_BROKER_DATA,
    ):
        answer = fixture.ask(code, brokerName=name, brokerId="1")
        assert answer.code == ResponseCode.INVALID_PARAMETER


def test_long_texts_and_lists_are_refused() -> None:
    fixture = ControllerFixture()
    answer = fixture.ask(
        RequestCode.CONTROLLER_APPLY_BROKER_ID,
        **NAMES,
        appliedBrokerId="1",
        registerCheckCode="x" * (CHECK_CODE_CHARACTERS_MAX + 1),
    )
    assert answer.code == ResponseCode.INVALID_PARAMETER
    body = json.dumps(["b"] * (NAMES_MAX + 1)).encode()
    answer = fixture.ask(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body)
    assert answer.code == ResponseCode.INVALID_PARAMETER


def test_all_requests_are_known_to_the_check_of_signatures() -> None:
    changes = {
        RequestCode.CONTROLLER_APPLY_BROKER_ID,
        RequestCode.CONTROLLER_REGISTER_BROKER,
        RequestCode.CONTROLLER_ELECT_MASTER,
        RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET,
        RequestCode.CLEAN_BROKER_DATA,
        RequestCode.BROKER_HEARTBEAT,
        RequestCode.UPDATE_CONTROLLER_CONFIG,
    }
    assert set(ControllerFixture().controller.router.rows) == changes | READS
