"""From request bytes to response bytes: sends with both header versions and both encodings."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.send_stubs import EmptyService, NoRedirects, WritableTopics

from penstock.broker.send import (
    SEND_BATCH_MESSAGE,
    SEND_MESSAGE,
    SEND_MESSAGE_V2,
    SendHandler,
)
from penstock.errors import DiskFull, WireError
from penstock.rpc.answers import Answer, EncodedReply
from penstock.rpc.router import Router
from penstock.server.request_loop import RequestLoop
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.store import MessageStore
from penstock.wire.frame import BINARY, JSON, Request
from penstock.wire.message import encode_batch
from penstock.wire.message_ids import UniqueIds
from penstock.wire.output import encode
from tests.unit.store.conftest import NOW_MS, StoreFixture, body_of, properties, record, split

HOST = bytes([127, 0, 0, 1]) + (10911).to_bytes(4, "big")
BORN = bytes([10, 1, 2, 3]) + (54321).to_bytes(4, "big")
INVALID_PARAMETER = 29
LETTERS = {
    "producerGroup": "a", "topic": "b", "defaultTopic": "c", "defaultTopicQueueNums": "d",
    "queueId": "e", "sysFlag": "f", "bornTimestamp": "g", "flag": "h", "properties": "i",
    "reconsumeTimes": "j",
}  # fmt: skip

both = pytest.mark.parametrize("encoding", [JSON, BINARY], ids=["json", "binary"])
header_versions = pytest.mark.parametrize("code", [SEND_MESSAGE, SEND_MESSAGE_V2], ids=["v1", "v2"])


def send(
    code: int, encoding: int, body: bytes = b"hello", *, opaque: int = 7, flag: int = 0,
    **fields: str | None,
) -> bytes:  # fmt: skip
    """The frame of a send request; a field `ext_x` of None is left out."""
    named = {
        "producerGroup": "g", "topic": "t", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
        "queueId": "1", "sysFlag": "0", "bornTimestamp": "1600000000000", "flag": "5",
        "properties": properties(tags="vip", keys="k", unique="id-1").decode(),
        "reconsumeTimes": "2",
    } | {name.removeprefix("ext_"): value for name, value in fields.items()}  # fmt: skip
    letters = LETTERS if code == SEND_MESSAGE_V2 else {}
    ext = {letters.get(name, name): value for name, value in named.items() if value is not None}
    return encode(code, ext, body, opaque=opaque, flag=flag, encoding=encoding)


class Peer:
    """One connection: bytes in, answers out."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store
        self.send = SendHandler(store.writer, WritableTopics(store), NoRedirects(), HOST)
        self.request_loop = RequestLoop(
            EmptyService(), Router([self.send.rows()]).in_place, time_ns=lambda: 0
        )

    def give(self, data: bytes) -> int:
        self.request_loop.bind(memoryview(bytearray(data or b"\0")), BORN)
        return self.request_loop.serve(0, len(data), NOW_MS)

    def answers(self) -> list[Request]:
        data = self.request_loop.output.take()
        found = []
        while data:
            answer = Request()
            answer.bind(memoryview(bytearray(data)))
            data = data[answer.read(0, len(data)) :]
            found.append(answer)
        return found

    def ask(self, data: bytes) -> Request:
        assert self.give(data) == len(data)
        (answer,) = self.answers()
        return answer

    def stored(self, queue_id: int = 1) -> list[bytes]:
        self.store.publish()
        return split(self.store.get("t", queue_id, 0).data)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    stores = StoreFixture(tmp_path / "store")
    store = stores.open()
    for queue_id in range(3):
        store.make_queue(b"t", queue_id)
    yield Peer(store)
    stores.end()


@both
@header_versions
def test_a_send_is_stored_and_answered(peer: Peer, code: int, encoding: int) -> None:
    peer.give(send(code, encoding, b"first"))
    peer.answers()
    answer = peer.ask(send(code, encoding, b"second", opaque=-9))
    assert (answer.code, answer.opaque, answer.flag) == (0, -9, 1)
    assert answer.encoding == encoding
    offset = peer.store.writer.offset
    assert answer.ext() == {
        "msgId": f"7F00000100002A9F{offset:016X}",
        "queueId": "1",
        "queueOffset": "1",
        "transactionId": "id-1",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }
    assert [body_of(r) for r in peer.stored()] == [b"first", b"second"]


@both
@header_versions
def test_every_field_reaches_the_record(peer: Peer, code: int, encoding: int) -> None:
    peer.ask(send(code, encoding, flag=0))
    (data,) = peer.stored()
    _, _, _, queue_id, flag, queue_offset, offset, sys_flag, born_ms = struct.unpack_from(
        ">iiiiiqqiq", data
    )
    assert (queue_id, flag, queue_offset, offset, sys_flag) == (1, 5, 0, 0, 0)
    assert born_ms == 1_600_000_000_000
    assert data[48:56] == BORN
    assert struct.unpack_from(">q", data, 56) == (NOW_MS,)
    assert data[64:72] == HOST
    assert struct.unpack_from(">i", data, 72) == (2,)
    assert data.endswith(properties(tags="vip", keys="k", unique="id-1"))


@both
def test_both_header_versions_store_the_same_record(peer: Peer, encoding: int) -> None:
    peer.give(send(SEND_MESSAGE, encoding) + send(SEND_MESSAGE_V2, encoding))
    first, second = peer.stored()
    assert first[:20] == second[:20]
    assert first[36:] == second[36:]


@both
def test_the_response_has_the_encoding_of_the_request(peer: Peer, encoding: int) -> None:
    peer.give(send(SEND_MESSAGE_V2, encoding))
    data = peer.request_loop.output.take()
    length, mark = struct.unpack_from(">ii", data)
    assert length == len(data) - 4
    assert mark >> 24 == encoding
    if encoding == JSON:
        header = json.loads(data[8:])
        assert header["extFields"]["queueOffset"] == "0"
        assert header["code"] == 0


@both
@header_versions
def test_a_one_way_send_is_stored_and_not_answered(peer: Peer, code: int, encoding: int) -> None:
    data = send(code, encoding, flag=2)
    assert peer.give(data) == len(data)
    assert peer.answers() == []
    assert len(peer.stored()) == 1
    peer.give(send(code, encoding, flag=2, topic="unknown"))
    assert peer.answers() == []
    peer.store.writer.refusal = DiskFull("full")
    peer.give(send(code, encoding, flag=2))
    assert peer.answers() == []
    assert (peer.request_loop.send.sent, peer.request_loop.send.refused) == (1, 1)


@both
def test_all_requests_of_a_read_are_answered_in_order(peer: Peer, encoding: int) -> None:
    frames = [send(SEND_MESSAGE_V2, encoding, bytes([n]), opaque=n) for n in range(20)]
    peer.give(b"".join(frames))
    assert [a.opaque for a in peer.answers()] == list(range(20))
    assert [body_of(r) for r in peer.stored()] == [bytes([n]) for n in range(8)]


@both
@pytest.mark.parametrize("part", [0, 1, 4, 7, 8, 30, -1])
def test_a_partial_frame_waits_for_the_rest(peer: Peer, encoding: int, part: int) -> None:
    whole, half = send(SEND_MESSAGE, encoding), send(SEND_MESSAGE, encoding)[:part]
    assert peer.give(whole + half) == len(whole)
    assert len(peer.answers()) == 1
    assert peer.give(half) == 0
    assert peer.answers() == []


@both
@header_versions
@pytest.mark.parametrize(
    ("fields", "code_back", "words"),
    [
        ({"topic": "unknown"}, 17, "no such queue"),
        ({"queueId": "9"}, 17, "no such queue"),
        ({"queueId": "-1"}, 17, "no such queue"),
        ({"topic": None}, 17, "no such queue"),
        ({"topic": "x" * 256}, 17, "no such queue"),
        ({"properties": "p" * 32768}, 13, "properties are too long"),
    ],
)
def test_a_refusal_has_a_reason(
    peer: Peer, code: int, encoding: int, fields: dict[str, str | None], code_back: int, words: str
) -> None:
    answer = peer.ask(send(code, encoding, **fields))  # type: ignore[arg-type]
    assert answer.code == code_back
    assert words in (answer.remark() or "")
    assert answer.encoding == encoding
    assert peer.store.log.end == 0
    assert peer.ask(send(code, encoding)).code == 0


@both
def test_a_body_beyond_the_limit_is_refused(peer: Peer, encoding: int) -> None:
    peer.request_loop.send.record.body_bytes_max = 10
    assert peer.ask(send(SEND_MESSAGE, encoding, b"0123456789")).code == 0
    answer = peer.ask(send(SEND_MESSAGE, encoding, b"0123456789a"))
    assert answer.code == 13
    assert "body_bytes_max" in (answer.remark() or "")


@both
def test_a_refusing_store_is_answered_with_service_not_available(peer: Peer, encoding: int) -> None:
    peer.store.writer.refusal = DiskFull("no space for 7 bytes of x")
    answer = peer.ask(send(SEND_MESSAGE, encoding))
    assert answer.code == 14
    assert "no space for 7 bytes of x" in (answer.remark() or "")


@both
def test_an_unknown_code_is_answered(peer: Peer, encoding: int) -> None:
    answer = peer.ask(encode(9999, opaque=3, encoding=encoding))
    assert (answer.code, answer.opaque) == (3, 3)
    assert "9999 not supported" in (answer.remark() or "")
    for flag in (1, 2, 3):  # a response, one-way, both
        peer.give(encode(9999, flag=flag, encoding=encoding))
        assert peer.answers() == []


@both
@pytest.mark.parametrize(
    "broken",
    [b"\xff\xff\xff\xff" + bytes(8), b"\0\0\0\x08\x05\0\0\0" + bytes(8), b"\0\0\0\x05\0\0\0\x09x"],
)
def test_a_broken_frame_raises_after_the_good_ones_are_answered(
    peer: Peer, encoding: int, broken: bytes
) -> None:
    with pytest.raises(WireError):
        peer.give(send(SEND_MESSAGE, encoding, opaque=1) + broken)
    assert [a.opaque for a in peer.answers()] == [1]
    assert len(peer.stored()) == 1


@both
@header_versions
@pytest.mark.parametrize("field", ["queueId", "sysFlag", "bornTimestamp", "flag"])
def test_a_missing_or_invalid_number_is_answered(
    peer: Peer, code: int, encoding: int, field: str
) -> None:
    for value in (None, "x1", "", str(2**63)):
        answer = peer.ask(send(code, encoding, **{"ext_" + field: value}))  # type: ignore[arg-type]
        assert answer.code == INVALID_PARAMETER
        assert answer.remark()
    assert peer.store.log.end == 0
    assert peer.ask(send(code, encoding)).code == 0


def test_responses_before_a_broken_frame_are_kept(tmp_path: Path) -> None:
    stores = StoreFixture(tmp_path / "store")
    store = stores.open(append_by="pwrite")
    store.make_queue(b"t", 1)
    peer = Peer(store)
    with pytest.raises(WireError):
        peer.give(send(SEND_MESSAGE, JSON) + b"\xff\xff\xff\xff" + bytes(8))
    (answer,) = peer.answers()
    try:
        assert answer.code == 0
        assert store.log.written == store.confirm_offset == store.log.end > 0
    finally:
        stores.end()


def test_a_response_is_not_taken_for_a_send(peer: Peer) -> None:
    peer.give(send(SEND_MESSAGE, JSON, flag=1))
    assert peer.store.log.end == 0


def test_a_number_out_of_the_int_range_is_refused(peer: Peer) -> None:
    assert peer.ask(send(SEND_MESSAGE, JSON, queueId=str(2**32 + 1))).code == INVALID_PARAMETER
    assert peer.ask(send(SEND_MESSAGE_V2, JSON, queueId=str(2**32 + 1))).code != 0


def test_properties_of_the_broker_are_added(tmp_path: Path) -> None:
    stores = StoreFixture(tmp_path / "store")
    store = stores.open()
    store.make_queue(b"t", 1)
    peer = Peer(store)
    peer.send.configure(b"CLUSTER\x01c\x02", 1 << 20, trace_on=True)
    peer.ask(send(SEND_MESSAGE_V2, BINARY, properties="a\x01b"))
    (data,) = peer.stored()
    assert data.endswith(b"a\x01b\x02CLUSTER\x01c\x02")
    assert record().prepare() == 0
    stores.end()


def test_the_write_permission_of_a_queue_is_checked_once(peer: Peer) -> None:
    asked: list[int] = []
    topics = WritableTopics(peer.store)

    class Counting:
        creations = 0

        def writable_queue(self, topic: str, queue_id: int, **rest: object) -> ConsumeQueue:
            asked.append(queue_id)
            return topics.writable_queue(
                topic, queue_id, template="", template_queues=0, client=0, now_ms=0
            )

    peer.send.topics = Counting()
    for _ in range(3):
        assert peer.ask(send(SEND_MESSAGE_V2, JSON)).code == 0
    queue = peer.store.queue("t", 1)
    assert queue is not None
    queue.writable = False
    assert peer.ask(send(SEND_MESSAGE_V2, JSON)).code == 0
    assert asked == [1, 1]
    assert (queue.puts, queue.put_bytes) == (4, peer.store.log.end)


@both
@pytest.mark.parametrize("code", [SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE])
def test_a_batch_is_stored_message_by_message(peer: Peer, code: int, encoding: int) -> None:
    body = encode_batch([(b"one", 1, {"TAGS": "a"}), (b"two", 2, {"UNIQ_KEY": "u"})])
    letters = {"batch": "batch" if code == SEND_MESSAGE else "m"}
    frame = batch_frame(code, encoding, body, letters["batch"])
    answer = peer.ask(frame)
    assert answer.code == 0
    ids = (answer.text(b"msgId") or "").split(",")
    stored = peer.stored()
    assert [body_of(data) for data in stored] == [b"one", b"two"]
    offsets = [struct.unpack_from(">q", data, 28)[0] for data in stored]
    assert ids == [f"7F00000100002A9F{offset:016X}" for offset in offsets]
    assert answer.text(b"queueOffset") == "0"
    assert stored[0].endswith(b"TAGS\x01a\x02")


def batch_frame(
    code: int, encoding: int, body: bytes, flag_name: str, sys_flag: str = "0"
) -> bytes:
    named = {
        "producerGroup": "g", "topic": "t", "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
        "queueId": "1", "sysFlag": sys_flag, "bornTimestamp": "1", "flag": "0",
        "properties": "WAIT\x01true",
    }  # fmt: skip
    letters = {} if code == SEND_MESSAGE else LETTERS
    ext = {letters.get(name, name): value for name, value in named.items()} | {flag_name: "true"}
    return encode(code, ext, body, encoding=encoding)


def test_a_batch_with_a_delayed_message_is_refused(peer: Peer) -> None:
    body = encode_batch([(b"one", 1, {}), (b"two", 2, {"DELAY": "3"})])
    answer = peer.ask(batch_frame(SEND_BATCH_MESSAGE, JSON, body, "m"))
    assert answer.code == 13
    assert peer.store.log.end == 0


@pytest.mark.parametrize("flag", ["4", "8", "12"])
def test_a_transactional_batch_is_refused(peer: Peer, flag: str) -> None:
    body = encode_batch([(b"one", 1, {})])
    frame = batch_frame(SEND_BATCH_MESSAGE, JSON, body, "m", sys_flag=flag)
    assert peer.ask(frame).code == 13
    assert peer.store.log.end == 0


def test_an_unexpected_error_fails_only_its_request(peer: Peer) -> None:
    class Broken:
        creations = 0

        def writable_queue(self, topic: str, queue_id: int, **rest: object) -> ConsumeQueue:
            raise ValueError("oops")

    topics = peer.send.topics
    peer.send.topics = Broken()
    frames = [send(SEND_MESSAGE_V2, JSON, opaque=n) for n in (1, 2)]
    assert peer.give(b"".join(frames)) == len(b"".join(frames))
    assert [(a.opaque, a.code) for a in peer.answers()] == [(1, 1), (2, 1)]
    peer.send.topics = topics
    assert peer.ask(send(SEND_MESSAGE_V2, JSON)).code == 0


def test_a_message_without_unique_id_gets_one(peer: Peer) -> None:
    peer.send.unique_ids = UniqueIds(bytes([127, 0, 0, 1]), pid=7, loader=9)
    answer = peer.ask(send(SEND_MESSAGE_V2, JSON, b"plain", properties="a\x01b"))
    (data,) = peer.stored()
    unique = answer.text(b"transactionId")
    assert unique is not None
    assert f"UNIQ_KEY\x01{unique}\x02".encode() in data
    assert len(peer.store.lookup.by_key("t", unique, begin_ms=0, end_ms=NOW_MS * 2, most=1,
                                        confirm_offset=peer.store.confirm_offset)) == 1  # fmt: skip
    peer.ask(send(SEND_MESSAGE_V2, JSON, b"next"))
    assert body_of(peer.stored()[1]) == b"next"


def test_transient_properties_are_not_stored(peer: Peer) -> None:
    text = "UNIQ_KEY\x01u\x02POP_CK\x01p\x02__RMQ.TRANSIENT.X\x01y\x02DELAY\x010\x02k\x01v\x02"
    assert peer.ask(send(SEND_MESSAGE_V2, JSON, properties=text)).code == 0
    (data,) = peer.stored()
    assert data.endswith(b"UNIQ_KEY\x01u\x02DELAY\x010\x02k\x01v\x02")


def test_under_sync_flush_responses_wait_separately(tmp_path: Path) -> None:
    stores = StoreFixture(tmp_path / "store")
    store = stores.open(sync_flush=True)
    store.make_queue(b"t", 1)
    peer = Peer(store)
    wait_not = "UNIQ_KEY\x01u\x02WAIT\x01false\x02"
    peer.give(
        send(SEND_MESSAGE_V2, JSON, opaque=1)
        + send(SEND_MESSAGE_V2, JSON, opaque=2, properties=wait_not)
        + encode(9999, opaque=3)
    )
    assert [a.opaque for a in peer.answers()] == [2, 3]
    for output, code in ((peer.send.pending, 0), (peer.send.flush_timeout, 10)):
        answer = Request()
        data = output.take()
        answer.bind(memoryview(bytearray(data)))
        assert answer.read(0, len(data)) == len(data)
        assert (answer.opaque, answer.code) == (1, code)
        assert answer.text(b"queueOffset") == "0"
    stores.end()


def test_a_full_output_stops_the_request_loop_early(peer: Peer) -> None:
    peer.request_loop.output_bytes_max = 300
    frames = [send(SEND_MESSAGE_V2, JSON, opaque=n) for n in range(10)]
    data = b"".join(frames)
    served = peer.give(data)
    assert peer.request_loop.stopped_early
    assert 0 < served < len(data)
    answered = len(peer.answers())
    assert served == sum(len(frame) for frame in frames[:answered])


@pytest.mark.parametrize("sync", [False, True])
def test_a_send_that_creates_its_topic_has_a_deferred_response(tmp_path: Path, sync: bool) -> None:
    stores = StoreFixture(tmp_path / "store")
    store = stores.open(sync_flush=sync)
    peer = Peer(store)

    class Making(WritableTopics):
        def writable_queue(self, topic: str, queue_id: int, **rest: Any) -> ConsumeQueue:
            store.make_queue(topic.encode(), queue_id)
            self.creations += 1
            return super().writable_queue(topic, queue_id, **rest)

    peer.send.topics = Making(store)
    peer.give(send(SEND_MESSAGE_V2, JSON, opaque=1) + send(SEND_MESSAGE_V2, JSON, opaque=2))
    ((opaque, _, _, answer, _),) = peer.request_loop.deferred
    assert opaque == 1
    assert isinstance(answer, EncodedReply)
    assert (answer.offset > 0) == sync
    for data, code in ((answer.data, 0), (answer.late, 10)):
        request = Request()
        request.bind(memoryview(bytearray(data)))
        assert request.read(0, len(data)) == len(data)
        assert (request.opaque, request.code) == (1, code)
    assert len(peer.answers()) == (0 if sync else 1)
    assert (peer.send.pending.length > 0) == sync
    stores.end()


def test_the_number_of_topic_creations_per_iteration_is_limited(tmp_path: Path) -> None:
    stores = StoreFixture(tmp_path / "store")
    store = stores.open()
    peer = Peer(store)

    class Making(WritableTopics):
        def writable_queue(self, topic: str, queue_id: int, **rest: Any) -> ConsumeQueue:
            store.make_queue(topic.encode(), queue_id)
            self.creations += 1
            return super().writable_queue(topic, queue_id, **rest)

    peer.send.topics = Making(store)
    frames = [send(SEND_MESSAGE_V2, JSON, topic=f"t{n}", flag=2 * (n % 2)) for n in range(10)]
    served = peer.give(b"".join(frames))
    assert peer.request_loop.stopped_early
    assert served == len(b"".join(frames[:4]))
    stores.end()


def test_a_topic_created_by_a_message_without_id_is_registered_by_name(tmp_path: Path) -> None:
    stores = StoreFixture(tmp_path / "store")
    store = stores.open(sync_flush=True)
    peer = Peer(store)
    peer.send.unique_ids = UniqueIds(bytes([127, 0, 0, 1]), pid=7, loader=9)
    named: list[tuple[str, bool]] = []

    class Making(WritableTopics):
        def writable_queue(self, topic: str, queue_id: int, **rest: Any) -> ConsumeQueue:
            store.make_queue(topic.encode(), queue_id)
            self.creations += 1
            return super().writable_queue(topic, queue_id, **rest)

        def reply_when_registered(self, topic: str, reply: EncodedReply, now_ms: int) -> Answer:
            named.append((topic, reply.offset > 0))
            return reply

    peer.send.topics = Making(store)
    peer.give(send(SEND_MESSAGE_V2, JSON, topic="fresh", properties="a\x01b"))
    body = encode_batch([(b"one", 1, {}), (b"two", 2, {"WAIT": "false"})])
    peer.give(batch_frame(SEND_BATCH_MESSAGE, JSON, body, "m"))
    assert named == [("fresh", True), ("t", True)], "a batch waits for the disk as a whole"
    stores.end()
