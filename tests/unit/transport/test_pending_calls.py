"""Calls that wait for their responses, without a socket."""

import pytest

from penstock.errors import PeerError, PenstockError, WireError
from penstock.transport import pending_calls
from penstock.transport.pending_calls import BATCH_BYTES_MAX, Call, PendingCalls
from penstock.wire.frame import FRAME_BYTES_MAX, Request
from penstock.wire.output import encode, response


class RecordedCall(Call):
    def __init__(self, deadline_ms: int = 3000) -> None:
        super().__init__(code=10, timeout_ms=3000, deadline_ms=deadline_ms)
        self.bodies: list[bytes] = []

    def answered(self, request: Request) -> None:
        self.bodies.append(request.body())

    def failed(self, error: PenstockError) -> None:
        raise AssertionError(error)


class Connection:
    """Records what a connection is asked to do."""

    def __init__(self) -> None:
        self.alarms: list[int] = []
        self.scheduled = self.flushed = 0
        self.calls = PendingCalls(
            "127.0.0.1:1", FRAME_BYTES_MAX, self._set_alarm, self._schedule, self._flush
        )

    def receive(self, data: bytes, now_ms: int = 5) -> int:
        self.calls.request.bind(memoryview(bytearray(data)))
        return self.calls.take_responses(0, len(data), now_ms)

    def _set_alarm(self, deadline_ms: int) -> None:
        self.alarms.append(deadline_ms)
        self.calls.alarm_ms = deadline_ms

    def _schedule(self) -> None:
        self.scheduled += 1

    def _flush(self) -> None:
        self.flushed += 1


def answer(opaque: int, body: bytes = b"") -> bytes:
    return bytes(response(0, opaque, 0, body=body))


def test_responses_reach_their_calls_in_any_order() -> None:
    connection = Connection()
    first, second = RecordedCall(), RecordedCall()
    opaques = [connection.calls.expect(call) for call in (first, second)]
    data = answer(opaques[1], b"second") + answer(opaques[0], b"first")
    assert connection.receive(data, now_ms=7) == len(data)
    assert (first.bodies, second.bodies) == ([b"first"], [b"second"])
    assert first.answered_ms == second.answered_ms == 7
    assert connection.calls.pending == {}


def test_an_incomplete_response_waits_for_its_rest() -> None:
    connection = Connection()
    call = RecordedCall()
    data = answer(connection.calls.expect(call), b"body")
    for length in range(len(data)):
        assert connection.receive(data[:length] or b"\0\0") == 0
    assert connection.receive(data) == len(data)
    assert call.bodies == [b"body"]


def test_a_response_without_a_call_is_ignored() -> None:
    connection = Connection()
    call = RecordedCall()
    opaque = connection.calls.expect(call)
    data = answer(opaque + 1, b"late") + answer(opaque, b"wanted")
    assert connection.receive(data) == len(data)
    assert call.bodies == [b"wanted"]


def test_a_request_of_the_server_stops_the_reading() -> None:
    connection = Connection()
    call = RecordedCall()
    request = encode(40, {"consumerGroup": "G"}, opaque=1)
    data = request + answer(connection.calls.expect(call))
    assert connection.receive(data) == len(request)
    assert connection.calls.has_request
    assert connection.calls.request.code == 40
    assert connection.receive(data[len(request) :]) == len(data) - len(request)
    assert not connection.calls.has_request
    assert call.bodies == [b""]


def test_a_frame_that_violates_the_protocol_raises() -> None:
    with pytest.raises(WireError):
        Connection().receive((FRAME_BYTES_MAX + 1).to_bytes(4, "big") + bytes(8))


def test_the_alarm_is_the_earliest_deadline() -> None:
    connection = Connection()
    for deadline_ms in (500, 900, 300):
        connection.calls.expect(RecordedCall(deadline_ms))
    assert connection.alarms == [500, 300]


def test_one_flush_is_scheduled_per_loop_iteration() -> None:
    connection = Connection()
    for _ in range(3):
        connection.calls.output.append(b"frame")
        connection.calls.flush_soon()
    assert (connection.scheduled, connection.flushed) == (1, 0)


def test_a_long_output_is_sent_at_once() -> None:
    connection = Connection()
    connection.calls.output.append(bytes(BATCH_BYTES_MAX + 1))
    connection.calls.flush_soon()
    assert (connection.scheduled, connection.flushed) == (0, 1)


def test_the_number_of_waiting_calls_is_limited() -> None:
    connection = Connection()
    connection.calls.pending.update(dict.fromkeys(range(pending_calls.CALLS_MAX), RecordedCall()))
    with pytest.raises(PeerError, match="the limit is 65536"):
        connection.calls.expect(RecordedCall())


def test_opaques_are_positive_and_distinct() -> None:
    calls = Connection().calls
    assert len({calls.next_opaque() for _ in range(1000)}) == 1000
    assert calls.next_opaque() > 0
