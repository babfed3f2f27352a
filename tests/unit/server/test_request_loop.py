"""From bytes to responses: requests that the router handles, refusals, and limits of one read.

Sends, which are handled in place, are in tests/unit/broker/test_send_path.py.
"""

import logging

import pytest

from penstock.errors import NoPermission, SystemBusy, WireError
from penstock.rpc.answers import Answer, Reply, Suspend
from penstock.rpc.command import Command
from penstock.server.request_loop import SLICE_NS, RequestLoop
from penstock.wire.frame import FRAME_BYTES_MAX, Request
from penstock.wire.output import encode

NOW_MS = 1_700_000_000_000
SUSPENDED = Suspend.__new__(Suspend)
ONE_WAY = 2
RESPONSE = 1


class EchoService:
    """Request code 1 returns its body, 2 is suspended, 3 is refused, 4 has a bug."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def handle(self, command: Command) -> Answer:
        self.commands.append(command)
        if command.code == 2:
            return SUSPENDED
        if command.code == 3:
            raise SystemBusy("later")
        if command.code == 4:
            raise ZeroDivisionError("bug")
        return Reply(0, {"echo": "yes"}, command.body)

    def connected(self, client: int, peer: str, now_ms: int) -> None: ...

    def disconnected(self, client: int, now_ms: int) -> None: ...

    def due(self) -> int:
        return 0

    def tick(self, now_ms: int) -> None: ...

    def clock_stepped(self, step_ms: int) -> None: ...


class NoAccess:
    def check(self, command: Command) -> Reply | None:
        return Reply(NoPermission.code, remark="no") if "AccessKey" not in command.ext else None


def stopped_clock() -> int:
    return 0


def serve(loop: RequestLoop, data: bytes) -> int:
    loop.bind(memoryview(bytearray(data)), bytes(8))
    loop.set_client(9, "10.0.0.1:5", bytes(8))
    return loop.serve(0, len(data), NOW_MS)


def responses(loop: RequestLoop) -> list[Request]:
    data, found = loop.output.take(), []
    while data:
        answer = Request()
        answer.bind(memoryview(bytearray(data)))
        data = data[answer.read(0, len(data)) :]
        found.append(answer)
    return found


def test_all_requests_of_a_read_are_answered_in_order() -> None:
    loop = RequestLoop(EchoService(), time_ns=stopped_clock)
    data = b"".join(encode(1, {}, b"%d" % n, opaque=n) for n in range(5))
    assert serve(loop, data) == len(data)
    assert [(a.opaque, a.body(), a.code) for a in responses(loop)] == [
        (n, b"%d" % n, 0) for n in range(5)
    ]
    assert loop.requests == 5


def test_a_command_carries_the_request_and_its_connection() -> None:
    service = EchoService()
    serve(RequestLoop(service, time_ns=stopped_clock), encode(1, {"a": "b"}, b"x", opaque=3))
    (command,) = service.commands
    assert (command.client, command.peer, command.now_ms) == (9, "10.0.0.1:5", NOW_MS)
    assert (command.ext, command.body, command.opaque) == ({"a": "b"}, b"x", 3)


def test_an_incomplete_request_stays_unserved() -> None:
    loop = RequestLoop(EchoService(), time_ns=stopped_clock)
    whole, rest = encode(1, {}, b"a", opaque=1), encode(1, {}, b"b", opaque=2)
    assert serve(loop, whole + rest[:-1]) == len(whole)
    assert [answer.opaque for answer in responses(loop)] == [1]


def test_suspended_requests_are_deferred() -> None:
    loop = RequestLoop(EchoService(), time_ns=stopped_clock)
    serve(loop, encode(2, {}, opaque=8))
    assert responses(loop) == []
    assert loop.deferred == [(8, 0, False, SUSPENDED, 2)]


def test_a_refusal_is_answered_and_counted() -> None:
    loop = RequestLoop(EchoService(), time_ns=stopped_clock)
    serve(loop, encode(3, {}, opaque=1) + encode(1, {}, opaque=2))
    refused, served = responses(loop)
    assert (refused.code, served.code) == (SystemBusy.code, 0)
    assert "later" in refused.remark()
    assert loop.refusals == {"SystemBusy": 1}


def test_a_bug_in_a_handler_affects_one_request(caplog: pytest.LogCaptureFixture) -> None:
    loop = RequestLoop(EchoService(), time_ns=stopped_clock)
    with caplog.at_level(logging.ERROR):
        serve(loop, encode(4, {}, opaque=1) + encode(1, {}, opaque=2))
    failed, served = responses(loop)
    assert (failed.code, served.code) == (1, 0)
    assert "ZeroDivisionError" in failed.remark()
    assert "request 4 from 10.0.0.1:5 failed" in caplog.text


@pytest.mark.parametrize("code", [1, 3, 4])
def test_a_one_way_request_gets_no_response(code: int) -> None:
    loop = RequestLoop(EchoService(), time_ns=stopped_clock)
    serve(loop, encode(code, {}, opaque=1, flag=ONE_WAY))
    assert responses(loop) == []


def test_responses_of_the_client_are_kept_for_the_server() -> None:
    loop = RequestLoop(EchoService(), time_ns=stopped_clock)
    serve(loop, encode(0, {"k": "v"}, b"result", opaque=77, flag=RESPONSE))
    ((opaque, reply),) = loop.responses
    assert (opaque, reply.code, reply.ext, reply.body) == (77, 0, {"k": "v"}, b"result")


def test_access_control_comes_before_the_handler() -> None:
    service = EchoService()
    loop = RequestLoop(service, access=NoAccess(), time_ns=stopped_clock)
    serve(loop, encode(1, {}, opaque=1) + encode(1, {"AccessKey": "a"}, opaque=2))
    assert [answer.code for answer in responses(loop)] == [NoPermission.code, 0]
    assert [command.opaque for command in service.commands] == [2]


def test_short_memory_refuses_every_request() -> None:
    service = EchoService()
    loop = RequestLoop(service, time_ns=stopped_clock)
    loop.overloaded = True
    serve(loop, encode(1, {}, opaque=1))
    (answer,) = responses(loop)
    assert (answer.code, service.commands) == (SystemBusy.code, [])


def test_a_read_ends_early_when_its_output_is_long() -> None:
    loop = RequestLoop(EchoService(), output_bytes_max=500, time_ns=stopped_clock)
    one = encode(1, {}, bytes(300), opaque=1)
    assert serve(loop, one * 5) == 2 * len(one)
    assert loop.stopped_early
    assert len(responses(loop)) == 2


def test_a_read_ends_early_when_its_requests_take_long() -> None:
    ticks = iter(range(0, 1 << 62, SLICE_NS // 3))
    loop = RequestLoop(EchoService(), time_ns=lambda: next(ticks))
    one = encode(1, {}, opaque=1)
    assert serve(loop, one * 10) == 4 * len(one)
    assert loop.stopped_early
    assert len(responses(loop)) == 4


def test_the_last_request_of_a_read_does_not_end_it_early() -> None:
    ticks = iter(range(0, 1 << 62, 2 * SLICE_NS))
    loop = RequestLoop(EchoService(), time_ns=lambda: next(ticks))
    one = encode(1, {}, opaque=1)
    assert serve(loop, one) == len(one)
    assert not loop.stopped_early


def test_a_frame_that_violates_the_protocol_raises_after_the_requests_before_it() -> None:
    loop = RequestLoop(EchoService(), time_ns=stopped_clock)
    bad = (FRAME_BYTES_MAX + 1).to_bytes(4, "big") + bytes(8)
    with pytest.raises(WireError):
        serve(loop, encode(1, {}, opaque=1) + bad)
    assert [answer.opaque for answer in responses(loop)] == [1]
