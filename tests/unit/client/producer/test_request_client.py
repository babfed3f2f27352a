"""Request and reply: requester and replier."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from penstock.client.client_options import ClientOptions
from penstock.client.client_session import Session
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.request_client import (
    RequestClient,
    is_reply,
    reply_message,
    send_reply,
)
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.client.topic_routes import Route
from penstock.clock import Alarm
from penstock.errors import (
    ClientClosed,
    MessageIllegal,
    NoReply,
    NoRoute,
    PeerTimeout,
    Refused,
)
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import PeerRequest
from penstock.wire.bodies.client_bodies import BrokerData, QueueData, TopicRouteData
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import decode_properties, encode_properties
from penstock.wire.record import Record
from tests.unit.client.consumer.group_kit import FakeNameServers


class FakeRequestSession:
    """As much of a session as requests need: two brokers, of which one has the topic."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.options = ClientOptions()
        self.client_id = "10.0.0.1@7"
        self.nameservers = FakeNameServers()
        self.known: set[str] = set()
        self.heartbeats = 0
        self.routes = {
            "T": _route("T", "a"),
            "TBW102": _route("TBW102", "a", "b"),
            "C_REPLY_TOPIC": _route("C_REPLY_TOPIC", "a", "b"),
        }

    def with_namespace(self, name: str) -> str:
        return name

    def cached_route(self, topic: str) -> Route | None:
        return None

    async def find_route(self, topic: str) -> Route | None:
        return self.routes.get(topic)

    async def route(self, topic: str) -> Route:
        return self.routes[topic]

    def is_registered_at(self, broker_name: str) -> bool:
        return broker_name in self.known

    async def send_heartbeats(self) -> None:
        self.heartbeats += 1


def _route(topic: str, *brokers: str) -> Route:
    data = TopicRouteData(
        broker_datas=[BrokerData(broker_name=b, broker_addrs={0: f"{b}:1"}, cluster="C")
                      for b in brokers],
        queue_datas=[QueueData(broker_name=b, read_queue_nums=2, write_queue_nums=2, perm=6)
                     for b in brokers],
    )  # fmt: skip
    return Route.of(topic, data)


class Sends:
    """Records sends; `outcomes` are their results in order."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.sent: list[tuple[Message, MessageQueue | None, int]] = []
        self.outcomes = list(outcomes)

    async def __call__(
        self, message: Message, queue: MessageQueue | None, timeout_ms: int
    ) -> SendReceipt:
        self.sent.append((message, queue, timeout_ms))
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        return SendReceipt(SendStatus.SEND_OK, "ID", "", queue or MessageQueue("T", "a", 0), 0)


def _push(properties: dict[str, str], **ext: str) -> PeerRequest:
    fields = {
        "producerGroup": "g", "topic": "C_REPLY_TOPIC", "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4", "queueId": "3", "sysFlag": "0", "bornTimestamp": "11",
        "flag": "5", "properties": encode_properties(properties).decode(),
        "bornHost": "/10.0.0.2:5000", "storeHost": "broker/10.0.0.3:10911",
        "storeTimestamp": "12", **ext,
    }  # fmt: skip
    code = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
    return PeerRequest(code, fields, b"reply", None, False, 1, 0, 0, 0, cast(Any, None))


def _made() -> tuple[RequestClient, FakeRequestSession]:
    session = FakeRequestSession()
    return RequestClient(cast(Session, session)), session


def _received(**properties: str) -> ReceivedMessage:
    record = Record()
    record.fill(b"T", b"question", encode_properties(properties))
    record.prepare()
    target = bytearray(record.size)
    record.put(memoryview(target), 0, 0, 0, 0)
    [message] = decode_records(bytes(target), "a")
    return message


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_request_carries_its_properties_and_gets_its_reply() -> None:
    async def run() -> None:
        requests, session = _made()
        sends = Sends()
        asking = asyncio.ensure_future(
            requests.request(
                Message("T", b"question", properties={"own": "1"}), sends, timeout_ms=3_000
            )
        )
        await session.clock.elapse(10)
        [(sent, queue, timeout_ms)] = sends.sent
        assert (queue, timeout_ms) == (None, 3_000)
        correlation_id = sent.properties["CORRELATION_ID"]
        assert sent.properties == {
            "own": "1", "CORRELATION_ID": correlation_id, "REPLY_TO_CLIENT": "10.0.0.1@7",
            "TTL": "3000",
        }  # fmt: skip
        answer = requests.handle_request(_push({"CORRELATION_ID": correlation_id, "TAGS": "t"}))
        assert answer is not None
        assert answer.code == ResponseCode.SUCCESS
        reply = await asking
        assert (reply.body, reply.topic, reply.tags) == (b"reply", "C_REPLY_TOPIC", "t")
        assert (reply.queue_id, reply.flag, reply.born_ms, reply.store_ms) == (3, 5, 11, 12)
        assert (reply.born_host, reply.store_host) == ("10.0.0.2:5000", "10.0.0.3:10911")
        assert reply.properties["ARRIVE_TIME"] == str(session.clock.now_ms())

    _run(run())


def test_request_first_sends_heartbeats_to_the_brokers_of_the_cluster() -> None:
    async def run() -> None:
        requests, session = _made()

        async def ask(topic: str = "T") -> None:
            asking = asyncio.ensure_future(
                requests.request(Message(topic, b"q"), Sends(), timeout_ms=100)
            )
            await session.clock.elapse(100)
            with pytest.raises(NoReply):
                await asking

        session.known = {"a"}  # the reply may arrive through the other one
        await ask()
        assert session.heartbeats == 1
        await ask()
        assert session.heartbeats == 1  # not with every request
        await session.clock.elapse(1_000)
        await ask("New")
        assert session.heartbeats == 2
        session.known = {"a", "b"}
        await session.clock.elapse(1_000)
        await ask()
        assert session.heartbeats == 2

    _run(run())


def test_request_without_reply_times_out() -> None:
    async def run() -> None:
        requests, session = _made()
        asking = asyncio.ensure_future(
            requests.request(Message("T", b"q"), Sends(), timeout_ms=3_000)
        )
        await session.clock.elapse(2_999)
        assert not asking.done()
        await session.clock.elapse(1)
        with pytest.raises(NoReply, match="within 3000 ms"):
            await asking
        answer = requests.handle_request(_push({"CORRELATION_ID": "too late"}))
        assert answer is not None
        assert answer.code == ResponseCode.SUCCESS

    _run(run())


def test_request_that_cannot_be_sent_fails_as_a_send() -> None:
    async def run() -> None:
        requests, _ = _made()
        with pytest.raises(PeerTimeout):
            await requests.request(Message("T", b"q"), Sends(PeerTimeout("no")), timeout_ms=3_000)

    _run(run())


def test_close_fails_pending_requests() -> None:
    async def run() -> None:
        requests, session = _made()
        asking = asyncio.ensure_future(
            requests.request(Message("T", b"q"), Sends(), timeout_ms=3_000)
        )
        await session.clock.elapse(1)
        requests.close()
        with pytest.raises(ClientClosed):
            await asking

    _run(run())


@pytest.mark.parametrize(
    "ext",
    [{"queueId": "x"}, {"sysFlag": "99999999999"}, {"topic": ""}, {"bornTimestamp": "9" * 30}],
)
def test_reply_that_cannot_be_decoded_is_refused(ext: dict[str, str]) -> None:
    requests, _ = _made()
    answer = requests.handle_request(_push({}, **ext))
    assert answer is not None
    assert answer.code == ResponseCode.SYSTEM_ERROR


def test_reply_with_bad_hosts_is_accepted() -> None:
    requests, _ = _made()
    answer = requests.handle_request(_push({}, bornHost="somewhere", storeHost=""))
    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS


def test_other_requests_are_not_handled() -> None:
    requests, _ = _made()
    ask = PeerRequest(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {}, b"", None, True, 1, 0, 0, 0,
              cast(Any, None))  # fmt: skip
    assert requests.handle_request(ask) is None


def test_reply_goes_to_the_reply_topic_with_the_properties_of_the_request() -> None:
    request = _received(
        CLUSTER="C", CORRELATION_ID="1-2", REPLY_TO_CLIENT="10.0.0.1@7", TTL="3000", UNIQ_KEY="ID"
    )
    message = reply_message(request, "yes", tags="t", properties={"own": "1"})
    assert (message.topic, message.body, message.tags) == ("C_REPLY_TOPIC", b"yes", "t")
    assert message.properties == {
        "own": "1", "MSG_TYPE": "reply", "CORRELATION_ID": "1-2", "REPLY_TO_CLIENT": "10.0.0.1@7",
        "TTL": "3000",
    }  # fmt: skip
    assert is_reply(message)
    assert not is_reply(Message("T", properties={"own": "1"}))
    assert decode_properties(encode_properties(message.properties)) == message.properties


@pytest.mark.parametrize("missing", ["CLUSTER", "CORRELATION_ID", "REPLY_TO_CLIENT"])
def test_plain_message_cannot_be_replied_to(missing: str) -> None:
    properties = {"CLUSTER": "C", "CORRELATION_ID": "1", "REPLY_TO_CLIENT": "x"}
    del properties[missing]
    with pytest.raises(MessageIllegal, match="is not a request"):
        reply_message(_received(**properties), b"yes")


def test_reply_goes_first_to_the_broker_of_the_request() -> None:
    async def run() -> None:
        session = FakeRequestSession()
        request = _received(CLUSTER="C", CORRELATION_ID="1", REPLY_TO_CLIENT="x")
        message = reply_message(request, b"yes")
        sends = Sends()
        await send_reply(cast(Session, session), request, message, sends, timeout_ms=3_000)
        assert [queue for _, queue, _ in sends.sent] == [MessageQueue("C_REPLY_TOPIC", "a", 0)]
        sends = Sends(Refused("the asking client is not here"))
        await send_reply(cast(Session, session), request, message, sends, timeout_ms=3_000)
        assert [queue and queue.broker_name for _, queue, _ in sends.sent] == ["a", None]
        session.routes["C_REPLY_TOPIC"] = _route("C_REPLY_TOPIC", "a")
        sends = Sends(Refused("the asking client is not here"))
        with pytest.raises(Refused):
            await send_reply(cast(Session, session), request, message, sends, timeout_ms=3_000)
        session.routes["C_REPLY_TOPIC"] = _route("C_REPLY_TOPIC", "b")
        sends = Sends()
        await send_reply(cast(Session, session), request, message, sends, timeout_ms=3_000)
        assert sends.sent[0][1] is None

    _run(run())


def test_reply_counts_even_if_the_response_to_the_send_was_lost() -> None:
    async def run() -> None:
        requests, _ = _made()

        async def send(message: Message, queue: object, timeout_ms: int) -> SendReceipt:
            properties = {"CORRELATION_ID": message.properties["CORRELATION_ID"]}
            requests.handle_request(_push(properties))
            raise PeerTimeout("no answer")

        reply = await requests.request(Message("T", b"q"), send, timeout_ms=3_000)
        assert reply.body == b"reply"

    _run(run())


def test_request_to_a_topic_without_route_fails() -> None:
    async def run() -> None:
        requests, session = _made()
        session.routes.clear()
        with pytest.raises(NoRoute, match="'T'"):
            await requests.request(Message("T", b"q"), Sends(), timeout_ms=3_000)

    _run(run())


class SetClock(VirtualClock):
    """A clock whose time of day is changed by `step_ms`."""

    step_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.step_ms

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        return super().wake_at(ms - self.step_ms, callback)


def test_request_survives_a_change_of_the_time_of_day() -> None:
    async def run() -> None:
        requests, session = _made()
        session.clock = clock = SetClock()

        async def send(message: Message, queue: object, timeout_ms: int) -> SendReceipt:
            clock.step_ms = 3_600_000
            return await sends(message, None, timeout_ms)

        sends = Sends()
        asking = asyncio.ensure_future(requests.request(Message("T", b"q"), send, timeout_ms=3_000))
        await clock.elapse(2_999)
        assert not asking.done()
        [(message, _, _)] = sends.sent
        requests.handle_request(_push({"CORRELATION_ID": message.properties["CORRELATION_ID"]}))
        assert (await asking).body == b"reply"

    _run(run())
