"""Pulls that are woken in one loop iteration: one write per connection, whatever fails."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.broker.pull.pull_handler import UNUSUAL, WAITS, WRITTEN, SuspendedPull
from penstock.errors import ReadFailed
from penstock.rpc.answers import Suspend
from penstock.server.answer_executor import AnswerExecutor
from penstock.server.pending_response import PendingResponse, ResponseConnection
from penstock.server.wake_pace import GATHER_FROM, PERIOD_MS
from penstock.server.woken_responses import WRITE_BYTES, WokenResponses
from penstock.store.get import Reader
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode
from penstock.wire.frame import JSON, Request
from penstock.wire.output import Output, encode
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, broker_fixture


class Connection:
    def __init__(self, client: int) -> None:
        self.client = client
        self.written: list[bytes] = []
        self.full = False
        self.postponed: list[Any] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self, why: str) -> None: ...

    def adjust_in_flight(self, change: int) -> None: ...

    def postpone(self, suspended: Any, last: bool) -> bool:
        if self.full:
            self.postponed.append(suspended)
        return self.full


class Writing:
    """A pull whose response has this length."""

    def __init__(self, length: int, outcome: int = WRITTEN, error: Exception | None = None) -> None:
        self._length, self._outcome, self._error = length, outcome, error

    def write(self, output: Output, encoding: int, opaque: int) -> int:
        output.append(bytes([opaque]) * self._length)
        if self._error is not None:
            raise self._error
        return self._outcome


def write(responses: WokenResponses, connection: Connection, opaque: int, pull: Writing) -> int:
    return responses.write(PendingResponse(connection, opaque, JSON, False), cast(Any, pull))


def test_the_responses_to_a_connection_are_one_write() -> None:
    responses, one, two = WokenResponses(), Connection(1), Connection(2)
    for opaque in (1, 2):
        assert write(responses, one, opaque, Writing(2)) == WRITTEN
        assert write(responses, two, opaque, Writing(1)) == WRITTEN
    assert one.written == two.written == []
    responses.flush()
    assert (one.written, two.written) == ([b"\1\1\2\2"], [b"\1\2"])
    responses.flush()
    write(responses, two, 3, Writing(1))
    responses.flush()
    assert (one.written, two.written) == ([b"\1\1\2\2"], [b"\1\2", b"\3"])


def test_long_responses_are_sent_at_once() -> None:
    responses, one = WokenResponses(), Connection(1)
    write(responses, one, 1, Writing(WRITE_BYTES - 1))
    assert one.written == []
    write(responses, one, 2, Writing(1))
    assert [len(data) for data in one.written] == [WRITE_BYTES]
    write(responses, one, 3, Writing(1))
    responses.flush()
    assert one.written[1:] == [b"\3"]


def test_a_failed_response_is_removed() -> None:
    responses, one = WokenResponses(), Connection(1)
    write(responses, one, 1, Writing(3))
    assert write(responses, one, 2, Writing(3, error=ReadFailed("no"))) == UNUSUAL
    assert write(responses, one, 3, Writing(0, WAITS)) == WAITS
    responses.flush()
    assert one.written == [b"\1\1\1"]


# --- with the answer executor


class Server:
    """What the answer executor needs, without an event loop."""

    def __init__(self) -> None:
        self.connections: Mapping[int, ResponseConnection] = {}
        self.soon_calls: list[Callable[[], None]] = []
        self.later_calls: list[Callable[[], None]] = []
        self.now_ms = 0
        self.codes: list[int] = []
        self.ticks: list[int] = []

    def send_flushed(self, *_: Any) -> None: ...

    def responded(self, pending: PendingResponse, response_code: int) -> None:
        assert pending.suspended
        self.codes.append(response_code)

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self.soon_calls.append(partial(call, *arguments))

    def soon_from_thread(self, *_: Any) -> None: ...

    def later(self, ms: int, call: Callable[..., None], *arguments: Any) -> None:
        assert ms > 0
        self.later_calls.append(partial(call, *arguments))

    def monotonic_ms(self) -> int:
        return self.now_ms

    def after_work(self) -> None: ...

    def tick_at(self, ms: int) -> None:
        self.ticks.append(ms)


class Fixture:
    """A broker, its answer executor and one connection."""

    def __init__(self, broker: BrokerFixture) -> None:
        self.broker = broker
        self.server = Server()
        self.executor = AnswerExecutor(
            self.server, self.submit, long_polling=broker.context.long_polling
        )
        self.connection = Connection(1)

    @staticmethod
    def submit(work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def pull(self, offset: int, queue_id: int = 0, **changed: str) -> Any:
        """Pull; the answer, if it is one that the executor got."""
        ext = {
            "consumerGroup": "G", "topic": "T", "queueId": str(queue_id), "sysFlag": "6",
            "queueOffset": str(offset), "maxMsgNums": "32", "suspendTimeoutMillis": "15000",
            "subscription": "*",
        } | changed  # fmt: skip
        data = encode(RequestCode.PULL_MESSAGE, ext, opaque=queue_id)
        loop = self.broker.request_loop
        loop.bind(memoryview(bytearray(data)), bytes(8))
        loop.serve(0, len(data), NOW_MS)
        loop.output.take()
        if not loop.deferred:
            return None
        opaque, encoding, oneway, answer, code = loop.deferred.pop()
        pending = PendingResponse(self.connection, opaque, encoding, oneway, code)
        self.executor.execute(pending, answer)
        return answer

    def run_soon(self) -> None:
        calls, self.server.soon_calls = self.server.soon_calls, []
        for call in calls:
            call()

    def codes(self) -> list[tuple[int, int]]:
        """(opaque, code) of what was written."""
        found, data = [], b"".join(self.connection.written)
        while data:
            answer = Request()
            answer.bind(memoryview(bytearray(data)))
            data = data[answer.read(0, len(data)) :]
            found.append((answer.opaque, answer.code))
        return found


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Fixture]:
    with broker_fixture(tmp_path / "store") as broker:
        config = TopicConfig(topic_name="T", read_queue_nums=3, write_queue_nums=3)
        broker.context.topics.put(config, NOW_MS)
        made = Fixture(broker)
        for queue_id in range(3):
            broker.send(queue_id=queue_id)
            made.pull(0, queue_id)
        yield made


def test_what_arrives_in_one_iteration_is_written_at_once(env: Fixture) -> None:
    for queue_id in range(3):
        answer = env.pull(1, queue_id)
        assert isinstance(answer, Suspend)
        assert isinstance(answer.retry, SuspendedPull)
    for queue_id in (0, 1, 2, 0):
        env.broker.send(queue_id=queue_id)
    assert env.connection.written == []
    env.run_soon()
    assert len(env.connection.written) == 1
    assert env.codes() == [(0, 0), (1, 0), (2, 0)]
    assert env.server.codes == [0, 0, 0]
    assert len(env.broker.context.long_polling) == 0


def test_a_pull_that_nothing_has_arrived_for_waits_on(env: Fixture) -> None:
    env.pull(0, subscription="mine")
    env.pull(1, subscription="mine")
    env.server.ticks.clear()
    env.broker.send(tag="other")
    env.run_soon()
    assert (env.codes(), len(env.broker.context.long_polling)) == ([], 1)
    assert env.server.ticks == [NOW_MS + 15_000]
    env.broker.send(tag="mine")
    env.run_soon()
    assert env.codes() == [(0, 0)]


class Failing(Reader):
    def copy_to(self, output: Output, wait: bool = False) -> bool:
        output.append(b"half of the messages")
        raise ReadFailed("the disk says no")


def test_a_failed_read_is_answered(env: Fixture) -> None:
    env.pull(1)
    env.broker.store.reader = Failing(env.broker.store.log, 1 << 20)
    env.broker.send()
    env.run_soon()
    assert env.codes() == [(0, 1)]


def test_a_changed_topic_is_refused_and_others_are_answered(env: Fixture) -> None:
    env.pull(1)
    env.pull(1, 1)
    config = TopicConfig(topic_name="T", read_queue_nums=1, write_queue_nums=3)
    env.broker.context.topics.put(config, NOW_MS)
    env.broker.send()
    env.broker.send(queue_id=1)
    env.run_soon()
    assert sorted(env.codes()) == [(0, 0), (1, 29)]


def test_a_client_that_does_not_read_is_answered_later(env: Fixture) -> None:
    env.pull(1)
    env.connection.full = True
    env.broker.send()
    env.run_soon()
    assert env.codes() == []
    env.connection.full = False
    (suspended,) = env.connection.postponed
    env.executor.wake(suspended, False)
    assert env.codes() == [(0, 0)], "at once, outside of a loop iteration's work"


def test_under_load_arrivals_are_gathered_for_a_moment(env: Fixture) -> None:
    server, offset = env.server, 1

    def wake_with(messages: int) -> None:
        """Let a suspended pull get this many messages."""
        nonlocal offset
        env.pull(offset)
        for _ in range(messages):
            env.broker.send()
        offset += messages
        calls, server.later_calls = server.later_calls, []
        for call in calls:
            call()
        env.run_soon()

    for _ in range(PERIOD_MS):
        server.now_ms += 1
        wake_with(2 * GATHER_FROM)
    assert env.codes() == [(0, 0)] * PERIOD_MS
    server.now_ms += 1
    env.pull(offset)
    env.broker.send()
    assert server.soon_calls == []
    (wake,) = server.later_calls
    env.pull(1, queue_id=1)
    env.broker.send(queue_id=1)
    assert len(server.later_calls) == 1
    wake()
    assert env.codes()[PERIOD_MS:] == [(0, 0), (1, 0)]
    assert len(env.connection.written) == PERIOD_MS + 1
