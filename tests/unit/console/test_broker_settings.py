"""Changes of a broker's settings: what is refused, and why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client.admin.async_admin import ClusterState
from penstock.errors import InvalidParameter, NoPermission
from penstock.version import VERSION
from tests.unit.console.console_kit import TestedConsole, broker_state, snapshot

SETTINGS = "/cluster/brokers/broker-a/0/settings"


@pytest.fixture
def console(tmp_path: Path) -> Iterator[TestedConsole]:
    with TestedConsole(tmp_path, live_settings=frozenset({"fileReservedTime"})) as found:
        state = broker_state(penstock_version=VERSION)
        found.show(snapshot(cluster=ClusterState(("n:1",), (state,))))
        yield found


def test_an_unknown_setting_is_refused_with_similar_names(console: TestedConsole) -> None:
    console.admin.answers["broker_settings"] = {"fileReservedTime": "72"}
    answer = console.send("PUT", SETTINGS, {"name": "fileReservdTime", "value": "3"})
    assert answer.status_code == 400
    assert "similar settings: fileReservedTime" in answer.json()["error"]["message"]
    assert [name for name, _, _ in console.admin.calls] == ["broker_settings"]


@pytest.mark.parametrize("version", [VERSION, None])
def test_a_fixed_setting_is_a_conflict_with_the_brokers_reason(
    console: TestedConsole, version: str | None
) -> None:
    name = "listenPort"
    known = {name: "10911", "authorizationEnabled": "true" if version else "false"}
    console.admin.answers["broker_settings"] = known
    state = broker_state(penstock_version=version)
    console.show(snapshot(cluster=ClusterState(("n:1",), (state,))))
    reason = f"{name} can't change while the server runs; change the file and restart"
    console.admin.answers["update_broker_settings"] = NoPermission(reason)
    answer = console.send("PUT", SETTINGS, {"name": name, "value": "1"})
    assert (answer.status_code, answer.json()["error"]) == (409, {"message": reason, "hint": ""})


def test_a_user_without_the_permission_is_told_so(console: TestedConsole) -> None:
    console.admin.answers["broker_settings"] = {
        "fileReservedTime": "72", "authorizationEnabled": "true",
    }  # fmt: skip
    console.admin.answers["update_broker_settings"] = NoPermission("no Update on the cluster")
    answer = console.send("PUT", SETTINGS, {"name": "fileReservedTime", "value": "1"})
    assert answer.status_code == 403
    assert "permission" in answer.json()["error"]["hint"]


def test_a_hint_is_told_once(console: TestedConsole) -> None:
    console.admin.answers["broker_settings"] = {"fileReservedTime": "72"}
    hint = "check the value"
    console.admin.answers["update_broker_settings"] = InvalidParameter(
        f"fileReservedTime is not a number, not 'x'; {hint}", hint=hint
    )
    answer = console.send("PUT", SETTINGS, {"name": "fileReservedTime", "value": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "fileReservedTime is not a number, not 'x'", "hint": hint,
    }  # fmt: skip


def test_a_value_that_apaches_broker_ignores_is_said(console: TestedConsole) -> None:
    console.show(snapshot())
    console.admin.answers["broker_settings"] = {"fileReservedTime": "72"}
    answer = console.send("PUT", SETTINGS, {"name": "fileReservedTime", "value": "many"})
    assert answer.status_code == 409
    assert "fileReservedTime is still 72" in answer.json()["error"]["message"]
    same = console.send("PUT", SETTINGS, {"name": "fileReservedTime", "value": "72"})
    assert same.json() == {"name": "fileReservedTime", "value": "72"}
