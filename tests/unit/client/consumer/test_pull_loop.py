"""The pull loop of a queue: the effect of each response of a broker."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from penstock.client.client_session import Session
from penstock.client.consumer.process_queue import ProcessQueue
from penstock.client.consumer.pull_loop import (
    EMPTY_MS,
    FLOW_CONTROL_MS,
    RETRY_MS,
    RETRY_MS_MAX,
    PullAnswer,
    Puller,
    PullFailures,
    read_pull,
)
from penstock.client.consumer.subscription import Subscription
from penstock.client.messages import MessageQueue
from penstock.client.received_message import ReceivedMessage
from penstock.client.topic_routes import address_to_read
from penstock.errors import HeaderError, NoPermission, PeerLost, PeerUnreachable, WireError
from penstock.wire.codes import PULL_SUSPEND, ResponseCode
from penstock.wire.frame import BINARY, JSON, Request
from penstock.wire.output import response
from tests.unit.client.consumer.consumer_kit import (
    QUEUE,
    PlainSession,
    make_process_queue,
    record,
    until,
)

Step = tuple[int, Mapping[str, int], bytes] | BaseException


def in_place(data: bytes) -> Request:
    request = Request()
    request.bind(memoryview(bytearray(data)))
    assert request.read(0, len(data)) == len(data)
    return request


class Server(PlainSession):
    """A session whose one broker answers by a script, and then not at all."""

    def __init__(self, *script: Step) -> None:
        super().__init__()
        self.script = list(script)
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.beats = 0
        self.routes = 0
        self.registered_at: list[int] = []
        self.addresses = {0: "master:1", 1: "slave:1"}
        self.new_addresses: dict[int, str] | None = None
        """What a NameServer says when it is asked."""

    async def ensure_heartbeat(self, broker_name: str, broker_id: int = 0) -> None:
        self.registered_at.append(broker_id)

    async def send_heartbeats(self) -> None:
        self.beats += 1

    async def find_route(self, topic: str) -> None:
        self.routes += 1
        if self.new_addresses is not None:
            self.addresses = self.new_addresses

    def address_of(self, broker_name: str, broker_id: int = 0) -> str | None:
        return address_to_read(self.addresses, broker_id)

    def other_address(self, broker_name: str, address: str) -> str | None:
        return next((known for known in self.addresses.values() if known != address), None)

    def peer(self, address: str) -> "FakePeer":
        return FakePeer(self, address)


class FakePeer:
    def __init__(self, server: Server, address: str) -> None:
        self.server = server
        self.address = address

    async def read(
        self, code: int, ext: Mapping[str, str], *, reader: Callable[[Request], Any],
        timeout_ms: int, encoding: int,
    ) -> Any:  # fmt: skip
        self.server.requests.append((self.address, dict(ext)))
        if not self.server.script:
            await asyncio.Event().wait()
        step = self.server.script.pop(0)
        if isinstance(step, BaseException):
            raise step
        answer, numbers, body = step
        ext = {name: str(value) for name, value in numbers.items()}
        return reader(in_place(response(answer, 1, encoding, ext=ext, body=body, remark="why")))


def found(next_offset: int, *offsets: int, broker: int = 0, **fields: Any) -> Step:
    body = b"".join(record(offset, **fields) for offset in offsets)
    return 0, _numbers(next_offset, broker), body


def nothing(code: int, next_offset: int) -> Step:
    return code, _numbers(next_offset, 0), b""


def _numbers(next_offset: int, broker: int) -> dict[str, int]:
    return {
        "nextBeginOffset": next_offset, "minOffset": 0, "maxOffset": 100,
        "suggestWhichBrokerId": broker,
    }  # fmt: skip


class PullFixture:
    """A running pull loop with scripted responses."""

    def __init__(
        self, *script: Step, queue: ProcessQueue | None = None, tags: str = "*", **more: Any
    ) -> None:
        self.server = Server(*script)
        self.queue = queue or make_process_queue(5)
        self.got: list[ReceivedMessage] = []
        self.moved: list[int] = []
        subscription = Subscription.of(QUEUE.topic, tags, version=42)
        more.setdefault("on_messages", lambda _, messages: self.got.extend(messages))
        puller = Puller(
            cast(Session, self.server),
            "g",
            self.queue,
            subscription=lambda: subscription,
            on_offset_moved=lambda _, offset: self.moved.append(offset),
            failures=PullFailures(),
            **more,
        )
        self.task = asyncio.ensure_future(puller.run())

    async def idle(self) -> None:
        """Wait until the script is used up and the last pull is pending."""
        await until(lambda: not self.server.script)
        for _ in range(5):
            await asyncio.sleep(0)

    def offsets(self) -> list[str]:
        return [ext["queueOffset"] for _, ext in self.server.requests]

    async def end(self) -> None:
        self.queue.drop()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(main())


def test_messages_are_dispatched_and_the_next_pull_is_sent_at_once() -> None:
    async def test() -> None:
        pull = PullFixture(found(7, 5, 6), found(8, 7))
        await pull.idle()
        assert [message.queue_offset for message in pull.got] == [5, 6, 7]
        assert pull.got[0].topic == "Orders"
        assert pull.offsets() == ["5", "7", "8"]
        first = pull.server.requests[0][1]
        assert (first["subVersion"], first["expressionType"]) == ("42", "TAG")
        assert pull.queue.end_offset == 100
        pull.queue.finish(pull.got)
        assert pull.queue.progress == 8
        await pull.end()

    run(test)


def test_pulls_do_not_carry_offsets_to_commit() -> None:
    """Such a pull could be handled after the last commit of a consumer, and undo it."""

    async def test() -> None:
        pull = PullFixture(
            found(7, 5, 6),
            found(8, 7),
            on_messages=lambda queue, some: queue.finish(some),
        )
        await pull.idle()
        offset_fields = {(ext["sysFlag"], ext["commitOffset"]) for _, ext in pull.server.requests}
        assert offset_fields == {(str(PULL_SUSPEND), "0")}
        assert pull.queue.progress == 8
        await pull.end()

    run(test)


@pytest.mark.parametrize("code", [ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY])
def test_filtered_offsets_advance_and_never_go_back(code: int) -> None:
    async def test() -> None:
        pull = PullFixture(nothing(code, 9), nothing(code, 3))
        await pull.idle()
        await pull.server.clock.elapse(EMPTY_MS)
        assert pull.offsets() == ["5", "9", "9"]
        assert pull.queue.progress == 9
        await pull.end()

    run(test)


def test_offset_moved_back_ends_the_pull_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        pull = PullFixture(nothing(ResponseCode.PULL_OFFSET_MOVED, 3))
        await pull.task
        assert pull.moved == [3]
        assert pull.queue.dropped

    run(test)
    assert "does not have offset 5 (it has 0 to 100), continuing at 3" in caplog.text


def test_messages_deleted_at_the_broker_are_still_handled() -> None:
    async def test() -> None:
        pull = PullFixture(found(7, 5, 6), nothing(ResponseCode.PULL_OFFSET_MOVED, 50))
        await pull.idle()
        assert pull.moved == []
        assert (pull.queue.dropped, pull.queue.next_offset, pull.queue.progress) == (False, 50, 5)
        pull.queue.finish(pull.got)
        assert pull.queue.progress == 50
        await pull.end()

    run(test)


@pytest.mark.parametrize(
    "step", [nothing(ResponseCode.PULL_NOT_FOUND, 5), nothing(20, 5), found(5), found(4)]
)
def test_immediate_empty_responses_do_not_cause_a_busy_loop(step: Step) -> None:
    async def test() -> None:
        pull = PullFixture(step, step)
        clock = pull.server.clock
        await clock.elapse(0)
        assert len(pull.server.requests) == 1
        await clock.elapse(EMPTY_MS)
        assert len(pull.server.requests) == 2
        await clock.elapse(EMPTY_MS)
        assert len(pull.server.requests) == 3
        await pull.end()

    run(test)


def test_suggested_replica_is_pulled() -> None:
    async def test() -> None:
        pull = PullFixture(found(6, 5, broker=1), found(7, 6, broker=9), found(8, 7))
        await pull.idle()
        assert [address for address, _ in pull.server.requests] == [
            "master:1", "slave:1", "master:1", "master:1"
        ]  # fmt: skip
        assert pull.server.requests[1][1]["sysFlag"] == str(PULL_SUSPEND)
        assert pull.server.registered_at == [0, 1, 9, 0]
        await pull.end()

    run(test)


def unreachable(address: str) -> PeerUnreachable:
    return PeerUnreachable("connection refused", address=address)


def test_replica_is_pulled_while_the_master_is_down(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        pull = PullFixture(unreachable("master:1"), found(6, 5), found(7, 6))
        await pull.idle()
        assert [address for address, _ in pull.server.requests] == [
            "master:1", "slave:1", "master:1", "master:1"
        ]  # fmt: skip
        assert [message.queue_offset for message in pull.got] == [5, 6]
        assert pull.server.routes == 1, "the route was asked for again"
        await pull.end()

    run(test)
    assert "pull failed" not in caplog.text


def test_queue_of_a_removed_master_is_pulled_from_its_replica() -> None:
    async def test() -> None:
        pull = PullFixture(unreachable("master:1"), found(6, 5), found(7, 6))
        pull.server.new_addresses = {2: "slave:2"}
        await pull.idle()
        assert [address for address, _ in pull.server.requests] == [
            "master:1", "slave:2", "slave:2", "slave:2"
        ]  # fmt: skip
        await pull.end()

    run(test)


def test_replica_that_is_down_is_replaced_by_the_master() -> None:
    async def test() -> None:
        pull = PullFixture(found(6, 5, broker=1), unreachable("slave:1"), found(7, 6))
        await pull.idle()
        assert [address for address, _ in pull.server.requests] == [
            "master:1", "slave:1", "master:1", "master:1"
        ]  # fmt: skip
        await pull.end()

    run(test)


def test_replica_that_may_not_be_read_does_not_hide_why_the_master_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        busy: Step = (ResponseCode.SYSTEM_BUSY, {}, b"")
        pull = PullFixture(unreachable("master:1"), busy, found(6, 5))
        await until(lambda: len(pull.server.requests) == 2)
        await pull.server.clock.elapse(RETRY_MS)
        await pull.idle()
        assert len(pull.got) == 1
        await pull.end()

    run(test)
    assert "pull failed, retrying: master:1: connection refused" in caplog.text


def test_replica_that_does_not_know_us_gets_a_heartbeat() -> None:
    async def test() -> None:
        stranger: Step = (ResponseCode.SUBSCRIPTION_NOT_EXIST, {}, b"")
        pull = PullFixture(unreachable("master:1"), stranger, unreachable("master:1"), found(6, 5))
        await until(lambda: len(pull.server.requests) == 2)
        await pull.server.clock.elapse(RETRY_MS)
        await pull.idle()
        assert (pull.server.beats, len(pull.got)) == (1, 1)
        await pull.end()

    run(test)


def test_failures_are_logged_once_and_retried_with_back_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        failures: list[Step] = [PeerLost("gone", address="master:1") for _ in range(6)]
        pull = PullFixture(*failures, found(6, 5))
        wait_ms = RETRY_MS
        for tries in range(1, 7):
            await until(lambda tries=tries: len(pull.server.requests) == tries)  # type: ignore[misc]
            await pull.server.clock.elapse(wait_ms - 1)
            assert len(pull.server.requests) == tries
            await pull.server.clock.elapse(1)
            wait_ms = min(2 * wait_ms, RETRY_MS_MAX)
        await pull.idle()
        assert len(pull.got) == 1
        await pull.end()

    with caplog.at_level("INFO"):
        run(test)
    assert caplog.text.count("pull failed") == 1
    assert caplog.text.count("pulls succeed again") == 1


def test_pull_is_retried_soon_after_flow_control() -> None:
    async def test() -> None:
        pull = PullFixture((ResponseCode.FLOW_CONTROL, {}, b""), found(6, 5))
        await until(lambda: len(pull.server.requests) == 1)
        await pull.server.clock.elapse(FLOW_CONTROL_MS)
        await pull.idle()
        assert len(pull.got) == 1
        await pull.end()

    run(test)


def test_broker_that_does_not_know_us_gets_a_heartbeat() -> None:
    async def test() -> None:
        pull = PullFixture((ResponseCode.SUBSCRIPTION_NOT_EXIST, {}, b""), found(6, 5))
        await until(lambda: len(pull.server.requests) == 1)
        await pull.server.clock.elapse(RETRY_MS)
        await pull.idle()
        assert (pull.server.beats, len(pull.got)) == (1, 1)
        await pull.end()

    run(test)


def test_route_of_a_broker_without_address_is_queried() -> None:
    async def test() -> None:
        pull = PullFixture(found(6, 5))
        pull.server.addresses = {}
        await pull.server.clock.elapse(RETRY_MS)
        assert pull.server.routes >= 1
        pull.server.addresses = {0: "master:2"}
        await pull.server.clock.elapse(RETRY_MS_MAX)
        await pull.idle()
        assert len(pull.got) == 1
        await pull.end()

    run(test)


def test_flow_control_pauses_pulling_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        queue = make_process_queue(0, messages_max=2)
        pull = PullFixture(found(2, 0, 1), found(4, 2, 3), found(6, 4, 5), queue=queue)
        for done in (2, 4, 6):
            await until(lambda done=done: len(pull.got) == done)  # type: ignore[misc]
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(pull.server.requests) == done // 2
            queue.finish(pull.got)
        assert queue.throttled == 3
        await pull.idle()
        await pull.end()

    run(test)
    assert caplog.text.count("pulling pauses until handlers catch up: 2 messages") == 1


def test_paused_queue_is_not_pulled() -> None:
    async def test() -> None:
        queue = make_process_queue(0)
        queue.pause()
        pull = PullFixture(found(1, 0), queue=queue)
        for _ in range(5):
            await asyncio.sleep(0)
        assert pull.server.requests == []
        assert queue.throttled == 0
        queue.resume()
        await pull.idle()
        assert len(pull.got) == 1
        await pull.end()

    run(test)


def test_queue_without_lock_is_not_pulled() -> None:
    async def test() -> None:
        locked = False
        pull = PullFixture(found(6, 5), may_pull=lambda _: locked)
        await pull.server.clock.elapse(2_000)
        assert pull.server.requests == []
        locked = True
        await pull.server.clock.elapse(1_000)
        await pull.idle()
        assert len(pull.got) == 1
        await pull.end()

    run(test)


def test_tags_are_compared_as_text() -> None:
    async def test() -> None:
        # "Aa" and "BB" have the same hash, so the broker sends both.
        body = b"".join(
            record(offset, properties={"TAGS": tag})
            for offset, tag in [(5, "Aa"), (6, "BB"), (7, "Aa")]
        )
        pull = PullFixture((0, _numbers(8, 0), body), tags="Aa")
        await pull.idle()
        assert [message.queue_offset for message in pull.got] == [5, 7]
        assert pull.queue.finish(pull.got) == 8
        await pull.end()

    run(test)


def test_bad_records_are_logged_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        broken = bytearray(record(6))
        broken[4:8] = b"xxxx"
        pull = PullFixture((0, _numbers(8, 0), record(5) + bytes(broken) + record(7)))
        await pull.idle()
        assert [message.queue_offset for message in pull.got] == [5, 7]
        assert pull.offsets() == ["5", "8"]
        await pull.end()

    run(test)
    assert "skipping the record at offset 6" in caplog.text


def test_truncated_response_skips_one_offset() -> None:
    async def test() -> None:
        pull = PullFixture(
            (0, _numbers(9, 0), record(5) + b"\xff" * 50), (0, _numbers(9, 0), b"\xff" * 50),
            found(9, 7, 8),
        )  # fmt: skip
        await pull.idle()
        assert pull.offsets() == ["5", "6", "7", "9"]
        assert [message.queue_offset for message in pull.got] == [5, 7, 8]
        await pull.end()

    run(test)


@pytest.mark.parametrize("encoding", [JSON, BINARY])
def test_pull_responses_are_decoded_in_place(encoding: int) -> None:
    ext = {name: str(value) for name, value in _numbers(7, 1).items()}
    answer = read_pull(in_place(response(0, 1, encoding, ext=ext, body=b"abc")))
    assert answer == PullAnswer(0, 7, 0, 100, 1, b"abc", None)
    refused = read_pull(in_place(response(16, 1, encoding, remark="no permission")))
    assert (refused.code, refused.remark) == (16, "no permission")
    with pytest.raises(HeaderError):
        read_pull(in_place(response(0, 1, encoding, ext={"maxOffset": "5"})))
    with pytest.raises(WireError):
        read_pull(in_place(response(19, 1, encoding, ext={**ext, "nextBeginOffset": "-1"})))


def test_failure_of_a_broker_is_forgotten_when_none_of_its_queues_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = PullFailures()
    denied, allowed, other = (make_process_queue(5) for _ in range(3))
    allowed.queue = MessageQueue("Allowed", QUEUE.broker_name, 0)
    other.queue = MessageQueue("Other", QUEUE.broker_name, 0)
    for _ in range(3):
        failures.report(denied, NoPermission("denied"))
        failures.clear(allowed)  # it has not failed
    assert caplog.text.count("pull failed") == 1
    assert denied.pull_failure is not None
    assert "denied" in denied.pull_failure
    failures.report(other, NoPermission("denied"))
    failures.forget(denied)
    failures.clear(other)
    assert denied.pull_failure is other.pull_failure is None
    failures.report(denied, NoPermission("denied"))
    assert caplog.text.count("pull failed") == 2
