"""Requests that a slave sends on to its master."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.broker.replicas.replica_role import (
    FORWARD_REMARK,
    MasterRequests,
    ReplicaRole,
    slave_rows,
)
from penstock.clock import LoopClock
from penstock.errors import NotMaster, PeerLost, PeerTimeout, PeerUnreachable
from penstock.rpc.answers import CloseConnection, EffectQueue, Reply, WhenDone
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.server.replication import forwarding as forwarding_module
from penstock.server.replication.forwarding import Forwarding
from penstock.transport.peer import Response
from penstock.wire.codes import RequestCode, ResponseCode

MASTER = "10.0.0.2:10911"
SEND = Command(RequestCode.SEND_MESSAGE, {"topic": "T", "Signature": "s"}, b"body", client=7)

Outcome = Exception | Response


class FakePeer:
    """A master that does what the test says, one outcome for each request."""

    outcomes: Iterator[Outcome] = iter(())
    requests: list[tuple[str, int, Any, bytes, str | None]] = []

    def __init__(self, address: str, **_: Any) -> None:
        self.address = address

    async def call(
        self, code: int, ext: Any, body: bytes, *, timeout_ms: int, remark: str | None
    ) -> Response:
        self.requests.append((self.address, code, ext, body, remark))
        outcome = next(self.outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        pass


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(forwarding_module, "Peer", FakePeer)
    monkeypatch.setattr(forwarding_module, "RETRY_MS", 1)
    monkeypatch.setattr(FakePeer, "requests", [])

    def prepare(*several: Outcome) -> None:
        monkeypatch.setattr(FakePeer, "outcomes", iter(several))

    return prepare


def forward(role: ReplicaRole, command: Command = SEND) -> Reply | None:
    async def body() -> Reply | None:
        forwarding = Forwarding(role, LoopClock(), None)
        try:
            return await forwarding.forward(command)
        finally:
            await forwarding.close()

    return asyncio.run(body())


def test_the_request_is_sent_as_it_is_until_the_master_accepts_it(
    outcomes: Callable[..., None],
) -> None:
    starting = PeerUnreachable("connection refused")
    busy = Response(ResponseCode.SYSTEM_BUSY)
    outcomes(starting, busy, Response(0, {"queueOffset": "3"}, b"", "remark"))
    reply = forward(ReplicaRole(slave=True, master_address=MASTER))
    assert reply == Reply(0, {"queueOffset": "3"}, b"", "remark")
    expected = (MASTER, SEND.code, SEND.ext, SEND.body, FORWARD_REMARK)
    assert FakePeer.requests == [expected] * 3


@pytest.mark.parametrize("lost", [PeerLost("reset"), PeerTimeout("late")])
def test_a_request_whose_response_is_lost_is_not_repeated(
    outcomes: Callable[..., None], lost: Exception
) -> None:
    outcomes(lost)
    assert forward(ReplicaRole(slave=True, master_address=MASTER)) is None
    assert len(FakePeer.requests) == 1


def test_a_request_waits_for_a_master_for_a_while(
    outcomes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes()
    monkeypatch.setattr(forwarding_module, "FORWARD_MS", 20)
    with pytest.raises(NotMaster, match="no master was elected within 20 ms"):
        forward(ReplicaRole(slave=True))


def test_a_master_that_stays_busy_says_so(
    outcomes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(*[Response(ResponseCode.SYSTEM_BUSY, remark="busy")] * 100)
    monkeypatch.setattr(forwarding_module, "FORWARD_MS", 20)
    reply = forward(ReplicaRole(slave=True, master_address=MASTER))
    assert reply == Reply(ResponseCode.SYSTEM_BUSY, {}, b"", "busy")


def test_waiting_requests_have_a_limited_size(
    outcomes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes()
    monkeypatch.setattr(forwarding_module, "BYTES_MAX", len(SEND.body) - 1)
    with pytest.raises(NotMaster, match="too many requests wait"):
        forward(ReplicaRole(slave=True, master_address=MASTER))


def test_requests_of_one_loop_iteration_share_the_limit(
    outcomes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(Response(0), Response(0))
    monkeypatch.setattr(forwarding_module, "BYTES_MAX", len(SEND.body))

    async def body() -> None:
        forwarding = Forwarding(ReplicaRole(slave=True, master_address=MASTER), LoopClock(), None)
        first = forwarding.forward(SEND)
        with pytest.raises(NotMaster, match="too many requests wait"):
            forwarding.forward(SEND)
        await first
        await forwarding.forward(SEND)
        await forwarding.close()

    asyncio.run(body())


# --- what a slave forwards


def answer_of(role: ReplicaRole, command: Command) -> Any:
    effects = EffectQueue()
    (row,) = (one for one in MasterRequests(role, effects).rows() if one.code == command.code)
    return row.handler(command), effects


def done(reply: Reply | None) -> Any:
    class Work:
        def add_done_callback(self, callback: Any, /) -> None:
            callback(self)

        def result(self) -> Reply | None:
            return reply

    return Work()


def test_only_requests_of_clients_are_forwarded_and_only_once() -> None:
    role = ReplicaRole(slave=True, master_address=MASTER)
    with pytest.raises(NotMaster):
        answer_of(role, SEND)  # controllers do not elect the master
    role.forward = lambda command: done(Reply())
    answer, _ = answer_of(role, SEND)
    assert isinstance(answer, WhenDone)
    for refused in (
        Command(RequestCode.UPDATE_AND_CREATE_TOPIC),
        Command(RequestCode.SEND_MESSAGE, remark=FORWARD_REMARK),
    ):
        with pytest.raises(NotMaster, match=MASTER):
            answer_of(role, refused)


def test_queue_locks_are_forwarded_where_that_is_possible() -> None:
    role = ReplicaRole(slave=True, master_address=MASTER)
    own = Reply(remark="of this slave")
    requests = MasterRequests(role, EffectQueue())
    unused: Any = None
    rows = [Row(RequestCode.LOCK_BATCH_MQ, lambda command: own)]
    (row,) = slave_rows(role, unused, unused, requests, rows)
    assert isinstance(row, Row)
    lock = Command(RequestCode.LOCK_BATCH_MQ)
    assert row.handler(lock) is own
    role.forward = lambda command: done(Reply())
    assert isinstance(row.handler(lock), WhenDone)


def test_a_lost_response_ends_the_connection_of_the_client() -> None:
    role = ReplicaRole(slave=True, master_address=MASTER)
    role.forward = lambda command: done(None)
    answer, effects = answer_of(role, SEND)
    assert answer.then(answer.work.result()) is None
    (effect,) = effects.take()
    assert isinstance(effect, CloseConnection)
    assert effect.client == 7
