"""Transactions: half messages, commit and rollback, answers to check-backs."""

import asyncio
import base64
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from penstock.client.client_session import Session
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.received_message import ReceivedMessage
from penstock.client.topic_routes import Route
from penstock.client.transaction.async_transaction_producer import (
    AsyncTransactionProducer,
    Decision,
    TransactionHandle,
)
from penstock.client.transaction.transaction_checks import CHECKS_MAX, Check, TransactionChecks
from penstock.errors import (
    BadSetting,
    InvalidParameter,
    MessageIllegal,
    PeerTimeout,
    PeerUnreachable,
    PenstockError,
    Refused,
    SendFailed,
    TransactionOpen,
    refusal,
)
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import PeerRequest, Response
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import encode_properties
from penstock.wire.record import Record

HANDLE = TransactionHandle(
    "ns%T", "ns%g", "broker-a", "10.0.0.9:10911", 7, 1234, "7F0000010539", "7F0000010539"
)
OFFSET_ID = "0A00000900002A9F00000000000004D2"  # 10.0.0.9:10911, 1234


class FakeTransactionSession:
    """As much of a session and a sender as transactions need."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.options = AsyncTransactionProducer(group="g", namespace="ns")._session.options
        self.sent: list[Message] = []
        self.status = SendStatus.SEND_OK
        self.calls: list[tuple[str, dict[str, str]]] = []
        self.oneways: list[tuple[str, dict[str, str]]] = []
        self.outcomes: list[PenstockError] = []
        self.addresses = {"broker-a": "10.0.0.9:10911"}
        self.known = True
        self.routes_asked = 0
        self.spawned: list[asyncio.Future[object]] = []
        self.group = "ns%g"
        self.tracer = None

    # a sender

    async def send(self, message: Message, **how: Any) -> SendReceipt:
        assert how.pop("internal") is True
        self.sent.append(message)
        queue = MessageQueue("T", "broker-a", 2)
        return SendReceipt(self.status, "7F0000010539", OFFSET_ID, queue, 7, "7F0000010539")

    # a session

    def with_namespace(self, name: str) -> str:
        return f"ns%{name}"

    def without_namespace(self, name: str) -> str:
        return name.removeprefix("ns%")

    def check_alive(self) -> None:
        pass

    def spawn(self, work: Awaitable[object]) -> None:
        self.spawned.append(asyncio.ensure_future(work))

    def is_registered_at(self, broker_name: str) -> bool:
        return self.known

    async def send_heartbeats(self) -> None:
        self.known = True

    def master_address(self, broker_name: str) -> str | None:
        return self.addresses.get(broker_name)

    async def find_route(self, topic: str) -> Route | None:
        assert topic == "ns%T"
        self.routes_asked += 1
        return None

    def peer(self, address: str) -> "_Peer":
        return _Peer(address, self)

    async def call(
        self, peer: "_Peer", code: int, ext: Mapping[str, str], *, timeout_ms: int | None = None
    ) -> Response:
        assert code == RequestCode.END_TRANSACTION
        self.calls.append((peer.address, dict(ext)))
        if self.outcomes:
            raise self.outcomes.pop(0)
        return Response(ResponseCode.SUCCESS)


class _Peer:
    def __init__(self, address: str, session: FakeTransactionSession) -> None:
        self.address = address
        self._home = session

    async def oneway(self, code: int, ext: Mapping[str, str], *, timeout_ms: int) -> None:
        assert code == RequestCode.END_TRANSACTION
        self._home.oneways.append((self.address, dict(ext)))


def _made(
    check: Check | None = None,
) -> tuple[AsyncTransactionProducer, FakeTransactionSession, VirtualClock]:
    clock = VirtualClock()
    producer = AsyncTransactionProducer(group="g", namespace="ns", clock=clock)
    session = FakeTransactionSession(clock)
    producer._session = cast(Session, session)
    producer._sender = cast(Any, session)
    producer._checks = TransactionChecks(cast(Session, session), check, producer._trace_check)
    return producer, session, clock


def _ask(
    body: bytes = b"half", message_id: str = "7F0000010539", group: str = "ns%g"
) -> PeerRequest:
    record = Record()
    properties = {"UNIQ_KEY": message_id, "PGROUP": group, "TRAN_MSG": "true"}
    record.fill(b"ns%T", body, encode_properties(properties))
    record.prepare()
    data = bytearray(record.size)
    record.put(memoryview(data), 0, 7, 1234, 0)
    ext = {
        "topic": "RMQ_SYS_TRANS_HALF_TOPIC", "tranStateTableOffset": "7",
        "commitLogOffset": "1234", "msgId": message_id, "transactionId": message_id,
        "bname": "broker-a",
    }  # fmt: skip
    code = RequestCode.CHECK_TRANSACTION_STATE
    return PeerRequest(code, ext, bytes(data), None, True, 1, 0, 0, 0, cast(Any, None))


async def _answer(producer: AsyncTransactionProducer, ask: PeerRequest) -> None:
    work = producer.handle_request(ask, "10.0.0.9:10911")
    assert isinstance(work, Awaitable)
    assert await work is None


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


# --- handles


def test_handle_round_trips_as_text() -> None:
    assert TransactionHandle.parse(str(HANDLE)) == HANDLE
    assert pickle.loads(pickle.dumps(HANDLE)) == HANDLE
    assert str(HANDLE).isascii()


@pytest.mark.parametrize(
    "text",
    ["", "tx1-", "tx1-!", "tx1-e30", "tx1-WzFd", str(HANDLE)[:-4], str(HANDLE) + "A", "x" * 9000,
     "tx1-WyJhIiwiYiIsImMiLCJkIiwtMSwxLCJlIiwiZiJd", "tx1-" + "W1tb" * 1_000,
     "tx1-" + base64.urlsafe_b64encode(rb'["\ud800","g","b","",1,1,"m","t"]').decode().rstrip("=")],
)  # fmt: skip
def test_text_that_is_not_a_handle_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="not a transaction handle"):
        TransactionHandle.parse(text)


def test_handle_with_a_bad_address_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="not a transaction handle"):
        TransactionHandle.parse(str(replace(HANDLE, address="nowhere")))
    nowhere = replace(HANDLE, address="")
    assert TransactionHandle.parse(str(nowhere)) == nowhere


# --- half messages, commit and rollback


def test_prepare_sends_a_half_message_and_returns_its_handle() -> None:
    async def run() -> None:
        producer, session, _ = _made()
        session.known = False
        message = Message("T", b"x", properties={"own": "1"})
        handle = await producer.prepare(message)
        assert handle == HANDLE
        [half] = session.sent
        assert half.properties == {"own": "1", "TRAN_MSG": "true", "PGROUP": "ns%g"}
        assert message.properties == {"own": "1"}
        await asyncio.gather(*session.spawned)
        assert session.known  # otherwise the broker could not send checks

    _run(run())


@pytest.mark.parametrize(("how", "number"), [("commit", "8"), ("rollback", "12")])
def test_commit_and_rollback_are_sent_to_the_broker(how: str, number: str) -> None:
    async def run() -> None:
        producer, session, _ = _made()
        await getattr(producer, how)(HANDLE)
        assert session.calls == [
            ("10.0.0.9:10911", {
                "topic": "ns%T", "producerGroup": "ns%g", "tranStateTableOffset": "7",
                "commitLogOffset": "1234", "commitOrRollback": number,
                "fromTransactionCheck": "false", "msgId": "7F0000010539",
                "transactionId": "7F0000010539", "bname": "broker-a",
            })
        ]  # fmt: skip

    _run(run())


def test_block_commits_or_rolls_back() -> None:
    async def run() -> None:
        producer, session, _ = _made()
        async with producer.transaction(Message("T", b"x")) as transaction:
            assert transaction.handle == HANDLE
            assert session.calls == []
        with pytest.raises(KeyError):
            async with producer.transaction(Message("T", b"x")):
                raise KeyError("no")
        async with producer.transaction(Message("T", b"x")) as transaction:
            transaction.decision = Decision.ROLLBACK
        async with producer.transaction(Message("T", b"x")) as transaction:
            transaction.decision = Decision.UNKNOWN
        assert [ext["commitOrRollback"] for _, ext in session.calls] == ["8", "12", "12"]
        with pytest.raises(RuntimeError):
            _ = producer.transaction(Message("T", b"x")).handle

    _run(run())


def test_error_of_the_block_is_raised_even_if_the_rollback_fails() -> None:
    async def run() -> None:
        producer, session, _ = _made()
        session.outcomes = [Refused("no half begins there")]
        with pytest.raises(KeyError):
            async with producer.transaction(Message("T", b"x")):
                raise KeyError("the work beside it")

    _run(run())


def test_commit_is_retried_at_the_address_of_a_fresh_route() -> None:
    async def run() -> None:
        producer, session, clock = _made()
        session.outcomes = [
            PeerUnreachable("refused"), refusal(ResponseCode.SLAVE_NOT_AVAILABLE, "a replica")
        ]  # fmt: skip
        ending = asyncio.ensure_future(producer.commit(HANDLE))
        await clock.elapse(50)
        session.addresses["broker-a"] = "10.0.0.10:10911"
        await clock.elapse(1_000)
        await ending
        assert [address for address, _ in session.calls] == ["10.0.0.9:10911"] + [
            "10.0.0.10:10911"
        ] * 2
        assert session.routes_asked == 2

    _run(run())


def test_commit_that_fails_raises_transaction_open_with_the_handle() -> None:
    async def run() -> None:
        producer, session, clock = _made()
        session.addresses.clear()
        session.outcomes = [PeerTimeout("no answer") for _ in range(3)]
        ending = asyncio.ensure_future(producer.commit(HANDLE))
        await clock.elapse(1_000)
        with pytest.raises(TransactionOpen, match="cannot commit message") as caught:
            await ending
        assert TransactionHandle.parse(caught.value.handle) == HANDLE
        assert {address for address, _ in session.calls} == {HANDLE.address}
        assert len(session.calls) == 3

    _run(run())


def test_commit_fails_if_the_address_of_the_broker_is_unknown() -> None:
    async def run() -> None:
        producer, session, clock = _made()
        session.addresses.clear()
        ending = asyncio.ensure_future(producer.commit(replace(HANDLE, address="")))
        await clock.elapse(1_000)
        with pytest.raises(TransactionOpen, match="is not known"):
            await ending
        assert session.calls == []

    _run(run())


def test_refusal_is_not_retried() -> None:
    async def run() -> None:
        producer, session, _ = _made()
        session.outcomes = [Refused("no half begins there")]
        with pytest.raises(Refused):
            await producer.commit(HANDLE)
        assert len(session.calls) == 1

    _run(run())


def test_half_message_with_another_status_than_send_ok_is_rolled_back() -> None:
    async def run() -> None:
        producer, session, _ = _made()
        session.status = SendStatus.FLUSH_DISK_TIMEOUT
        with pytest.raises(SendFailed, match="FLUSH_DISK_TIMEOUT"):
            await producer.prepare(Message("T", b"x"))
        assert [ext["commitOrRollback"] for _, ext in session.calls] == ["12"]

    _run(run())


def test_bad_arguments_are_refused_at_once() -> None:
    async def run() -> None:
        producer, _, _ = _made()
        with pytest.raises(MessageIllegal, match="delay"):
            await producer.prepare(Message("T", b"x", delay_level=2))
        with pytest.raises(BadSetting, match="group"):
            AsyncTransactionProducer(group="")

    _run(run())


# --- checks


async def _coroutine_check(message: ReceivedMessage) -> bool:
    return message.body == b"half"


def _returns_awaitable(message: ReceivedMessage) -> Awaitable[bool]:
    return _coroutine_check(message)


@pytest.mark.parametrize(
    "check", [lambda message: True, lambda message: Decision.COMMIT, _coroutine_check,
              _returns_awaitable],
)  # fmt: skip
def test_decision_of_the_check_is_sent_and_acknowledged(check: Check) -> None:
    async def run() -> None:
        producer, session, _ = _made(check)
        await _answer(producer, _ask())
        [(address, ext)] = session.calls
        assert address == "10.0.0.9:10911"
        assert ext == {
            "topic": "ns%T", "producerGroup": "ns%g", "tranStateTableOffset": "7",
            "commitLogOffset": "1234", "commitOrRollback": "8", "fromTransactionCheck": "true",
            "msgId": "7F0000010539", "transactionId": "7F0000010539", "bname": "broker-a",
        }  # fmt: skip

    _run(run())


def _raises(message: ReceivedMessage) -> bool:
    raise ValueError("no idea")


@pytest.mark.parametrize(
    "check",
    [lambda message: None, lambda message: Decision.UNKNOWN, _raises,
     cast(Check, lambda message: "yes")],
)  # fmt: skip
def test_unknown_is_sent_oneway(check: Check) -> None:
    async def run() -> None:
        producer, session, _ = _made(check)
        await _answer(producer, _ask())
        assert session.calls == []
        [(_, ext)] = session.oneways
        assert (ext["commitOrRollback"], ext["fromTransactionCheck"]) == ("0", "true")

    _run(run())


def test_check_back_is_not_answered_without_a_check(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        producer, session, _ = _made()
        await _answer(producer, _ask())
        assert session.calls == session.oneways == []
        assert "no check" in caplog.text

    _run(run())


def test_failed_answer_to_a_check_back_is_not_retried() -> None:
    async def run() -> None:
        producer, session, _ = _made(lambda message: True)
        session.outcomes = [PeerTimeout("no answer")]
        await _answer(producer, _ask())
        assert len(session.calls) == 1

    _run(run())


def test_check_backs_of_other_groups_and_malformed_ones_are_ignored() -> None:
    producer, _, _ = _made(lambda message: True)
    assert producer.handle_request(_ask(group="ns%other"), "x") is False
    good = _ask()
    bad_offset = {**good.ext, "commitLogOffset": "x"}
    for ext, body in ((bad_offset, good.body), (good.ext, b"junk")):
        ask = PeerRequest(good.code, ext, body, None, True, 1, 0, 0, 0, cast(Any, None))
        assert producer.handle_request(ask, "x") is None


def _blocked_check() -> tuple[asyncio.Event, Callable[[ReceivedMessage], Awaitable[bool]]]:
    release = asyncio.Event()

    async def check(message: ReceivedMessage) -> bool:
        await release.wait()
        return True

    return release, check


def test_repeated_check_backs_are_answered_once_and_their_number_is_limited() -> None:
    async def run() -> None:
        release, check = _blocked_check()
        producer, session, _ = _made(check)
        tasks = []
        for number in range(CHECKS_MAX):
            work = producer.handle_request(_ask(message_id=f"ID{number}"), "x")
            assert isinstance(work, Awaitable)
            tasks.append(asyncio.ensure_future(work))
        assert producer.handle_request(_ask(message_id="ID0"), "x") is None
        assert producer.handle_request(_ask(message_id="more"), "x") is None
        release.set()
        await asyncio.gather(*tasks)
        assert len(session.calls) == CHECKS_MAX
        await _answer(producer, _ask(message_id="more"))

    _run(run())


def test_close_waits_for_running_checks() -> None:
    async def run() -> None:
        release, check = _blocked_check()
        producer, session, clock = _made(check)
        work = producer.handle_request(_ask(), "x")
        assert isinstance(work, Awaitable)
        task = asyncio.ensure_future(work)
        finishing = asyncio.ensure_future(producer._checks.finish(3_000))
        await clock.elapse(2_999)
        assert not finishing.done()
        await clock.elapse(1)
        assert finishing.done()
        release.set()
        await task
        await producer._checks.finish(3_000)
        assert len(session.calls) == 1

    _run(run())


def test_check_back_of_an_open_block_is_answered_with_unknown() -> None:
    async def run() -> None:
        checked: list[str] = []

        def check(message: ReceivedMessage) -> bool:
            checked.append(message.message_id)
            return False

        producer, session, _ = _made(check)
        async with producer.transaction(Message("T", b"x")) as transaction:
            await _answer(producer, _ask())
            assert not checked, "the work beside it is under way: what could a check say"
            [(_, header)] = session.oneways
            assert (header["commitOrRollback"], header["fromTransactionCheck"]) == ("0", "true")
            transaction.decision = Decision.UNKNOWN
        await _answer(producer, _ask())
        assert checked == [HANDLE.message_id]
        session.outcomes = [Refused("no")]
        with pytest.raises(Refused):
            async with producer.transaction(Message("T", b"x")):
                pass
        await _answer(producer, _ask())
        assert len(checked) == 2

    _run(run())


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
def test_block_that_is_cancelled_or_interrupted_never_commits(error: type[BaseException]) -> None:
    async def run() -> None:
        producer, session, _ = _made()
        with pytest.raises(error):
            async with producer.transaction(Message("T", b"x")):
                raise error
        assert [ext["commitOrRollback"] for _, ext in session.calls] == ["12"]

    _run(run())
