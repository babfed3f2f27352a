"""The contact with controllers: what their answers mean for the master."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import Clock, LoopClock
from penstock.config import LiveSettings, Settings
from penstock.errors import ControllerUnreachable
from penstock.replication.controlled_role import UNSURE_MS, ControlledRole, Follow, Lead, SetState
from penstock.server.replication.controlled_broker import (
    INCOMPLETE,
    ControlledBroker,
    LogFigures,
)
from penstock.server.replication.controllers import ControllerInfo
from penstock.store.disk import Disk
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import Response
from penstock.wire import fastjson
from penstock.wire.bodies.cluster_bodies import SyncStateSet
from penstock.wire.codes import RequestCode, ResponseCode
from tests.store_kit import CrashError, CrashingDisk

OWN_ADDRESS = "127.0.0.1:10911"
MASTER = SetState(1, OWN_ADDRESS, 1, frozenset({1, 2}), 7)


class FakeControllers:
    """One controller that gives prepared answers."""

    penstock = True
    addresses = ("c",)

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.asked_sets: list[Any] = []
        self.elected: list[str] = []
        self.heartbeats: list[Any] = []
        self.alter_code: int | None = ResponseCode.SUCCESS  # None: no answer
        self.faults = 0

    async def call(self, code: int, fields: Any, body: bytes = b"", **_: Any) -> Response:
        self.codes.append(code)
        if code == RequestCode.BROKER_HEARTBEAT:
            self.heartbeats.append(fields)
        if code == RequestCode.CONTROLLER_ELECT_MASTER:
            self.elected.append(fields["brokerId"])
        if code == RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET:
            asked = fastjson.decode(body, SyncStateSet)
            self.asked_sets.append((fields["masterEpoch"], asked.sync_state_set))
            if self.alter_code is None:
                raise ControllerUnreachable("no answer")
            return Response(self.alter_code, remark="not now")
        return Response(ResponseCode.SUCCESS)

    async def describe(self, address: str) -> ControllerInfo:
        if self.faults:
            self.faults -= 1
            raise ZeroDivisionError("a fault in Penstock")
        return ControllerInfo(address, penstock=True)

    def peer(self, address: str) -> Any:
        outer = self

        class Peer:
            async def call(self, code: int, fields: Any, **_: Any) -> Response:
                return await outer.call(code, fields)

        return Peer()

    async def close(self) -> None:
        pass


class FakeService:
    def __init__(self) -> None:
        self.answered: list[tuple[int, bool]] = []
        self.reasons: list[str] = []
        self.caught_up = True
        self.running = True
        self.resigned = False

    def figures(self) -> LogFigures | None:
        return LogFigures(1, 10, 10, caught_up=self.caught_up) if self.running else None

    def lead(self, lead: Lead, replica_id: int) -> None:
        pass

    def follow(self, follow: Follow, replica_id: int) -> None:
        pass

    async def prepare(self) -> None:
        pass

    def failed(self) -> bool:
        return False

    async def drop_unflushed(self) -> None:
        pass

    def reopen(self) -> None:
        pass

    def resign(self, replica_id: int) -> None:
        self.resigned = True

    def set_answered(self, number: int, *, refused: bool) -> None:
        self.answered.append((number, refused))

    def confirmed(self, reason: str) -> None:
        self.reasons.append(reason)


def _contact(
    controllers: FakeControllers, service: FakeService, root: Path, clock: Clock | None = None
) -> ControlledBroker:
    fake: Any = controllers
    contact = ControlledBroker(
        LiveSettings(Settings()), fake, service, Disk(), root, OWN_ADDRESS, clock or LoopClock()
    )
    contact._membership.replica_id = 1
    return contact


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        (ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH, True),
        (ResponseCode.CONTROLLER_BROKER_NOT_ALIVE, True),
        (ResponseCode.SYSTEM_ERROR, False),  # etcd may have taken it
        (ResponseCode.CONTROLLER_JRAFT_INTERNAL_ERROR, False),  # and so may the log of JRaft
        (None, False),
    ],
)
def test_only_a_decision_of_the_controllers_is_a_refusal(
    tmp_path: Path, code: int | None, refused: bool
) -> None:
    async def body() -> None:
        controllers, service = FakeControllers(), FakeService()
        controllers.alter_code = code
        contact = _contact(controllers, service, tmp_path)
        await contact.start(log_epoch=0)
        contact.learn(MASTER)
        contact.ask_for_set(1, ["1"], 7)
        while not service.answered:
            await asyncio.sleep(0)
        assert service.answered == [(7, refused)]
        await contact.close()

    asyncio.run(body())


def test_heartbeats_go_on_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.server.replication.controlled_broker.POLL_MS", 1)

    async def body() -> None:
        controllers = FakeControllers()
        controllers.faults = 2
        contact = _contact(controllers, FakeService(), tmp_path)
        await contact.start(log_epoch=0)
        while RequestCode.BROKER_HEARTBEAT not in controllers.codes:
            await asyncio.sleep(0.001)
        await contact.close()

    asyncio.run(body())
    assert caplog.text.count("failed and starts again") == 2


def test_a_broker_whose_id_another_one_has_taken_gives_way(tmp_path: Path) -> None:
    """Two processes with copies of one data directory must not both lead under its id."""

    async def body() -> None:
        clock, controllers, service = VirtualClock(), FakeControllers(), FakeService()
        contact = _contact(controllers, service, tmp_path, clock)
        await contact.start(log_epoch=0)
        contact.learn(MASTER)
        assert contact.role is not None
        await clock.elapse(1_000)
        assert controllers.heartbeats
        contact.learn(MASTER._replace(master_address="other:10911", master_epoch=2))
        assert contact.role.epoch == 1
        assert service.reasons == [
            "the broker at other:10911 has registered with the id 1 of this one"
        ]
        controllers.heartbeats.clear()
        await clock.elapse(60_000)
        assert not controllers.heartbeats
        assert len(service.reasons) == 1
        await contact.close()

    asyncio.run(body())


def test_a_new_master_that_no_controller_has_confirmed_for_long_acknowledges_nothing(
    tmp_path: Path,
) -> None:
    """Not even until its lease is looked at for the first time, or after a late answer."""

    async def body() -> None:
        clock, service = VirtualClock(), FakeService()
        contact = _contact(FakeControllers(), service, tmp_path, clock)
        contact.role = ControlledRole(1, log_epoch=0, log_complete=True, now_ms=0)
        started_ms = clock.monotonic_ms()
        await clock.elapse(3_001)
        contact.learn(MASTER)
        assert contact.role.leads
        assert service.reasons == ["no controller has confirmed a heartbeat for 3001 ms"]
        contact._confirmed(started_ms)  # an answer that has come very late
        assert service.reasons[1:] == []
        contact._confirmed(started_ms + 1)
        assert service.reasons[1:] == [""]

    asyncio.run(body())


def test_penstocks_controllers_hear_that_a_log_is_incomplete_for_as_long_as_it_is(
    tmp_path: Path,
) -> None:
    """They wait for the replica with the longest log, however long there is no master."""

    async def body() -> None:
        clock, controllers, service = VirtualClock(), FakeControllers(), FakeService()
        service.caught_up = False
        (tmp_path / INCOMPLETE).touch()
        contact = _contact(controllers, service, tmp_path, clock)
        contact._incomplete = contact._note_power_failure()
        await contact.start(log_epoch=1)
        contact.learn(MASTER._replace(master_id=None, master_address=""))
        await clock.elapse(UNSURE_MS * 3)
        assert {one["penstockLogIncomplete"] for one in controllers.heartbeats} == {"true"}
        await contact.close()

    asyncio.run(body())


@pytest.mark.parametrize("before_epoch", [2, 1])
def test_a_master_without_a_store_names_a_member_of_the_set_before_its_own_epoch(
    tmp_path: Path, before_epoch: int
) -> None:
    """The set before an older epoch may lack what was acknowledged since."""

    async def body() -> None:
        controllers, service = FakeControllers(), FakeService()
        contact = _contact(controllers, service, tmp_path)
        contact.role = role = ControlledRole(1, log_epoch=0, log_complete=True, now_ms=0)
        contact._before = before_epoch, frozenset({1, 2})
        role.learn(SetState(1, OWN_ADDRESS, 2, frozenset({1}), 7), 0)
        assert role.leads
        await contact.cannot_serve()
        assert not role.complete
        assert role.leads is not service.resigned
        assert service.resigned is (before_epoch == 2)
        assert controllers.asked_sets == ([("2", [1, 2])] if before_epoch == 2 else [])
        assert controllers.elected == (["2"] if before_epoch == 2 else [])

    asyncio.run(body())


def test_a_set_that_is_not_given_elects_nobody(tmp_path: Path) -> None:
    async def body() -> None:
        controllers, service = FakeControllers(), FakeService()
        controllers.alter_code = ResponseCode.CONTROLLER_BROKER_NOT_ALIVE
        contact = _contact(controllers, service, tmp_path)
        contact.role = role = ControlledRole(1, log_epoch=0, log_complete=True, now_ms=0)
        contact._before = 2, frozenset({1, 2, 3})
        role.learn(SetState(1, OWN_ADDRESS, 2, frozenset({1}), 7), 0)
        await contact.cannot_serve()
        assert [members for _, members in controllers.asked_sets] == [[1, 2], [1, 3]]
        assert controllers.elected == []

    asyncio.run(body())


def test_without_services_heartbeats_say_where_the_log_ended(tmp_path: Path) -> None:
    """Not where it was at the last heartbeat: the replica may have acknowledged more."""

    async def body() -> None:
        clock, controllers, service = VirtualClock(), FakeControllers(), FakeService()
        contact = _contact(controllers, service, tmp_path, clock)
        await contact.start(log_epoch=1)
        await clock.elapse(1_000)
        assert controllers.heartbeats[-1]["maxOffset"] == "10"
        service.running = False
        contact.stopped(LogFigures(2, 25, 20, caught_up=False))
        await clock.elapse(1_000)
        told = controllers.heartbeats[-1]
        assert (told["epoch"], told["maxOffset"], told["confirmOffset"]) == ("2", "25", "20")
        await contact.close()

    asyncio.run(body())


def test_a_kill_while_the_doubt_is_stored_again_does_not_end_it(tmp_path: Path) -> None:
    contact = _contact(FakeControllers(), FakeService(), tmp_path)
    contact._store_incomplete()
    contact._disk = CrashingDisk(0)
    with pytest.raises(CrashError):
        contact._store_incomplete()
    assert contact._note_power_failure()
