"""A whole broker without a socket: frames in, frames out, with a simulated time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.long_polling import SuspendedRequest
from penstock.broker.pop.in_place.pop_handler import SuspendedPop
from penstock.broker.pull.pull_handler import WAITS, WRITTEN, SuspendedPull
from penstock.broker.replicas.replica_role import ReplicaRole
from penstock.config import LiveSettings, Settings
from penstock.rpc.answers import (
    Answer,
    EncodedReply,
    InThread,
    NextIteration,
    QueryRoute,
    RegisterTopics,
    Reply,
    Suspend,
)
from penstock.rpc.command import Command
from penstock.server.request_loop import RequestLoop
from penstock.store.store import MessageStore
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import ConsumerData, HeartbeatData, SubscriptionData
from penstock.wire.codes import RequestCode
from penstock.wire.frame import JSON, Request
from penstock.wire.message import StoredMessage, decode_messages, encode_properties
from penstock.wire.output import Output, encode
from tests.store_kit import small_config
from tests.unit.broker.admin.admin_kit import PlainDisk

NOW_MS = 1_700_000_000_000
ADDRESS = "127.0.0.1:10911"
BORN = bytes([10, 1, 2, 3]) + (54321).to_bytes(4, "big")


class BrokerFixture:
    """A broker, and a client that talks to it."""

    def __init__(
        self,
        root: Path,
        settings: Settings | None = None,
        *,
        now_ms: int = NOW_MS,
        role: ReplicaRole | None = None,
    ) -> None:
        self.now_ms = now_ms
        self.live = LiveSettings(settings or Settings(store=small_config(sync_flush=False)))
        store_config = self.live.current.store
        self.store = MessageStore(root, store_config, disk=PlainDisk(), now_ms=now_ms)
        self.broker = Broker(self.live, self.store, ADDRESS, ADDRESS, now_ms, role=role)
        self.context = self.broker.context
        self.request_loop = RequestLoop(self.broker, self.broker.router.in_place, time_ns=lambda: 0)
        self.woken: list[Reply] = []
        self.context.long_polling.on_wake(self.wake)

    def close(self) -> None:
        self.broker.close()

    def frame(self, data: bytes) -> Answer:
        """The answer to a frame: a Reply, a Suspend, or None."""
        buffer = bytearray(data)
        self.request_loop.bind(memoryview(buffer), BORN)
        self.request_loop.set_client(1, "10.1.2.3:54321", BORN)
        self.request_loop.serve(0, len(data), self.now_ms)
        if self.request_loop.deferred:
            opaque, _, _, answer, _ = self.request_loop.deferred.pop()
            answer = self.finish(answer)
            if isinstance(answer, Suspend):
                self.context.long_polling.add(1, opaque, answer)
            return answer  # type: ignore[no-any-return]
        return self.read_output()

    def read_output(self) -> Reply | None:
        """The response in the output, if any; suspended requests are woken."""
        data = self.request_loop.output.take()
        if self.request_loop.arrivals:
            self.request_loop.arrivals = False
            self.store.notify()
        return read_reply(data) if data else None

    def finish(self, answer: Answer) -> Answer:
        """Run work for the thread pool in this thread."""
        while isinstance(answer, InThread | NextIteration | RegisterTopics | QueryRoute):
            if isinstance(answer, InThread):
                answer = answer.then(answer.work())
            else:
                answer = answer.then(None) if isinstance(answer, QueryRoute) else answer.then()
        return read_reply(answer.data) if isinstance(answer, EncodedReply) else answer

    def ask(self, code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> Reply:
        """The reply to a request."""
        answer = self.frame(encode(code, ext or {}, body, opaque=7, version=493))
        assert isinstance(answer, Reply), answer
        return answer

    def handle(self, code: int, **ext: str) -> Answer:
        return self.finish(self.broker.handle(Command(code, ext, now_ms=self.now_ms, client=1)))

    def many(self, data: bytes) -> None:
        """Serve several frames in one loop iteration; their answers are ignored."""
        self.request_loop.bind(memoryview(bytearray(data)), BORN)
        assert self.request_loop.serve(0, len(data), self.now_ms) == len(data)
        self.request_loop.output.take()
        self.request_loop.arrivals = False
        self.store.notify()

    def send(
        self, topic: str = "T", queue_id: int = 0, body: bytes = b"x", tag: str = "",
        properties: dict[str, str] | None = None,
    ) -> Reply:  # fmt: skip
        answer = self.frame(self.send_frame(topic, queue_id, body, tag, properties))
        assert isinstance(answer, Reply)
        return answer

    def send_frame(
        self, topic: str = "T", queue_id: int = 0, body: bytes = b"x", tag: str = "",
        properties: dict[str, str] | None = None,
    ) -> bytes:  # fmt: skip
        named = {"UNIQ_KEY": f"{self.store.log.end:032X}", "TAGS": tag, **(properties or {})}
        ext = {
            "a": "g", "b": topic, "c": "TBW102", "d": "4", "e": str(queue_id), "f": "0",
            "g": str(self.now_ms), "h": "0", "j": "0", "m": "false",
            "i": encode_properties({k: v for k, v in named.items() if v}).decode(),
        }  # fmt: skip
        return encode(RequestCode.SEND_MESSAGE_V2, ext, body, opaque=7)

    def pull(
        self, offset: int = 0, *, flags: int = 4, encoding: int = JSON, oneway: bool = False,
        **ext: Any,
    ) -> Answer:  # fmt: skip
        """Pull from queue 0 of T as group G; the expression comes with the request."""
        fields = {
            "consumerGroup": "G", "topic": "T", "queueId": 0, "queueOffset": offset,
            "maxMsgNums": 32, "sysFlag": flags, "commitOffset": 0, "suspendTimeoutMillis": 15000,
            "subscription": "*", "subVersion": 0,
        } | ext  # fmt: skip
        named = {name: str(value) for name, value in fields.items() if value is not None}
        code = RequestCode.PULL_MESSAGE
        return self.frame(encode(code, named, opaque=9, encoding=encoding, flag=2 * oneway))

    def heartbeat(self, *subscriptions: SubscriptionData, model: str = "CLUSTERING") -> None:
        data = HeartbeatData(
            client_id="c1",
            consumer_data_set=[
                ConsumerData(
                    group_name="G",
                    consume_type="CONSUME_PASSIVELY",
                    message_model=model,
                    consume_from_where="CONSUME_FROM_LAST_OFFSET",
                    subscription_data_set=list(subscriptions),
                )
            ],
        )
        assert self.ask(RequestCode.HEART_BEAT, {}, fastjson.encode(data)).code == 0

    def tick(self, ms: int) -> None:
        """Let time pass."""
        self.now_ms += ms
        self.broker.tick(self.now_ms)
        self.store.publish()
        self.context.long_polling.tick(self.now_ms)

    def wake(self, suspended: SuspendedRequest, last: bool) -> None:
        retry, opaque = suspended.suspend.retry, suspended.pending_response
        if not last and isinstance(
            retry, SuspendedPull | SuspendedPop
        ):  # as the answer executor does
            output = Output()
            outcome = retry.write(output, JSON, opaque)
            if outcome == WRITTEN:
                self.woken.append(read_reply(output.take()))
                return
            assert not output.length
            if outcome == WAITS:
                assert isinstance(retry, SuspendedPull)
                suspend = Suspend(retry.target.queue, retry.deadline_ms, retry)
                self.context.long_polling.add(1, opaque, suspend)
                return
        answer = self.finish(retry(last))
        if isinstance(answer, Suspend):
            self.context.long_polling.add(1, opaque, answer)
        else:
            assert isinstance(answer, Reply)
            self.woken.append(answer)


@contextmanager
def broker_fixture(
    root: Path, settings: Settings | None = None, *, role: ReplicaRole | None = None
) -> Iterator[BrokerFixture]:
    made = BrokerFixture(root, settings, role=role)
    try:
        yield made
    finally:
        made.close()


def read_reply(data: bytes) -> Reply:
    """The one response in `data`."""
    answer = Request()
    answer.bind(memoryview(bytearray(data)))
    assert answer.read(0, len(data)) == len(data), "one answer to one request"
    return Reply(answer.code, answer.ext(), answer.body(), answer.remark())


def bodies(answer: Answer) -> list[bytes]:
    """The bodies of the messages in a reply."""
    return [message.body for message in messages(answer)]


def messages(answer: Answer) -> list[StoredMessage]:
    assert isinstance(answer, Reply)
    assert answer.code == 0, answer
    return decode_messages(answer.body)
