"""Sends of the compiled generator: a broker can read them, and responses find their requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.bench.pipelined.frame_templates import OPAQUE_FIRST, send_templates
from penstock.cli.bench.pipelined.load_recorder import LoadRecorder
from penstock.cli.bench.pipelined.send_window import NEVER_NS, SendWindow
from penstock.errors import WireError
from penstock.wire.codes import RequestCode
from penstock.wire.frame import BINARY, JSON
from penstock.wire.message import decode_properties
from penstock.wire.output import encode
from penstock.wire.record import BatchWalk, Record
from tests.unit.cli.bench.pipelined.window_kit import (
    FOREVER_NS,
    QUEUES,
    opaques,
    recorder,
    requests,
    response,
    take,
)

BODY = bytes(range(100))
BORN_MS = 1_763_600_000_123
ENCODINGS = pytest.mark.parametrize("encoding", [BINARY, JSON])


def window(
    size: int, *, encoding: int = BINARY, batch: int = 1, measured: LoadRecorder | None = None
) -> SendWindow:
    templates = send_templates(
        "Topic", QUEUES, body=BODY, batch=batch, tags="TagA", encoding=encoding
    )
    made = SendWindow(templates, size, measured or recorder(), len(BODY))
    made.stop_ns = FOREVER_NS
    return made


def fill(sends: SendWindow, now_ns: int = 0) -> bytes:
    sends.fill(now_ns, BORN_MS)
    return sends.output.take()


@ENCODINGS
def test_a_broker_can_read_the_requests(encoding: int) -> None:
    found = requests(fill(window(7, encoding=encoding)))
    assert [ext["e"] for _, _, ext, _ in found] == ["0", "11", "2", "0", "11", "2", "0"]
    assert len({opaque for _, opaque, _, _ in found}) == 7
    ids = set()
    for code, _, ext, body in found:
        assert (code, body, ext["b"], ext["n"]) == (
            RequestCode.SEND_MESSAGE_V2, BODY, "Topic", "broker-a"
        )  # fmt: skip
        assert (int(ext["g"]), ext["m"]) == (BORN_MS, "false")
        properties = decode_properties(ext["i"].encode())
        assert (properties["TAGS"], properties["WAIT"]) == ("TagA", "true")
        ids.add(properties["UNIQ_KEY"])
    assert len(ids) == 7
    assert {len(unique) for unique in ids} == {32}


@ENCODINGS
def test_a_batch_has_an_id_for_each_message(encoding: int) -> None:
    (code, _, ext, body), second = requests(fill(window(2, encoding=encoding, batch=3)))
    assert (code, ext["m"]) == (RequestCode.SEND_BATCH_MESSAGE, "true")
    ids = [*unique_ids(body), *unique_ids(second[3])]
    assert len(set(ids)) == 6


def unique_ids(batch: bytes) -> list[str]:
    record, walk = Record(1 << 20), BatchWalk()
    record.bind(memoryview(bytearray(batch)))
    walk.start(0, len(batch))
    found = []
    while walk.next(record) > 0:
        at = record.properties_at
        properties = decode_properties(batch[at : at + record.properties_length])
        found.append(properties["UNIQ_KEY"])
        assert batch[record.body_at : record.body_at + record.body_length] == BODY
    return found


@ENCODINGS
def test_a_response_makes_space_for_the_next_request(encoding: int) -> None:
    measured = recorder()
    sends = window(2, encoding=encoding, measured=measured)
    first, second = opaques(fill(sends, 1_000))
    assert fill(sends) == b""
    assert sends.in_flight == 2
    data = response(second, encoding=encoding, ext={"queueOffset": "5"})
    assert take(sends, data + data[:10], 4_000) == len(data)
    assert sends.missing() > 0
    assert opaques(fill(sends, 5_000)) == [second]
    assert (measured.messages, measured.byte_count) == (1, len(BODY))
    assert (measured.latency.min, measured.latency.max) == (3_000, 3_000)
    assert first != second


def test_results_are_counted_by_code() -> None:
    measured = recorder()
    sends = window(4, measured=measured)
    found = opaques(fill(sends))
    codes = (0, 10, 2, 14)
    take(sends, b"".join(map(response, found, codes)), 10)
    assert measured.codes == {10: 1, 2: 1, 14: 1}
    assert (measured.messages, measured.acknowledged) == (2, 2)  # a flush timeout is stored too
    assert (sends.in_flight, sends.withheld) == (0, 2)


def test_refused_requests_are_not_repeated_at_once() -> None:
    sends = window(3)
    found = opaques(fill(sends))
    take(sends, response(found[0], 2) + response(found[1]) + response(found[2], 2), 10)
    assert opaques(fill(sends)) == [found[1]]
    sends.release_withheld()
    assert sorted(opaques(fill(sends))) == sorted([found[0], found[2]])
    take(sends, b"".join(map(response, found)), 20)
    assert (sends.in_flight, sends.withheld) == (0, 0)


def test_only_messages_of_the_window_count() -> None:
    measured = LoadRecorder()
    measured.set_window(100, 200)
    sends = window(3, measured=measured)
    sends.schedule(90, 60)  # at 90, 150, 210
    found = opaques(fill(sends, 210))
    take(sends, b"".join(map(response, found)), 220)
    assert (measured.messages, measured.acknowledged) == (1, 3)
    assert measured.latency.max == 70  # from the intended time
    assert measured.behind.max == 60


def test_an_open_loop_sends_when_requests_are_due() -> None:
    sends = window(2)
    sends.schedule(1_000, 100)
    assert sends.due_ns() == 1_000
    assert fill(sends, 999) == b""
    (first,) = opaques(fill(sends, 1_099))
    assert sends.due_ns() == 1_100
    assert len(opaques(fill(sends, 9_999))) == 1  # the window is full
    assert sends.due_ns() == NEVER_NS
    take(sends, response(first), 10_000)
    assert sends.due_ns() == 1_200
    sends.stop_ns = 1_200
    assert sends.due_ns() == NEVER_NS
    assert fill(sends, 20_000) == b""


def test_a_number_of_requests() -> None:
    sends = window(2)
    sends.left = 3
    found = opaques(fill(sends))
    take(sends, b"".join(map(response, found)), 10)
    assert len(opaques(fill(sends))) == 1
    assert sends.left == 0


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "frame too long"),
        (bytes(8), "invalid frame length 0"),
        ((100).to_bytes(4, "big") + (9 << 24).to_bytes(4, "big"), "unknown header encoding 9"),
        (response(OPAQUE_FIRST + 1), "which no request in flight has"),
        (response(OPAQUE_FIRST - 1), "which no request in flight has"),
        (response(7), "which no request in flight has"),
        (response(-1), "which no request in flight has"),
    ],
)
def test_invalid_responses_are_refused(data: bytes, text: str) -> None:
    sends = window(4)
    found = opaques(fill(sends))
    take(sends, response(OPAQUE_FIRST + 1), 1)
    assert OPAQUE_FIRST + 1 in found
    with pytest.raises(WireError, match=text):
        take(sends, data, 10)


def test_requests_of_the_server_are_ignored() -> None:
    sends = window(1)
    (opaque,) = opaques(fill(sends))
    data = encode(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {}, opaque=opaque)
    assert take(sends, data, 1) == len(data)
    assert sends.in_flight == 1


@given(st.data())
def test_responses_in_any_order_and_in_any_pieces(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 20))
    measured = recorder()
    sends = window(size, measured=measured)
    waiting = list(opaques(fill(sends)))
    answered = 0
    for _ in range(data.draw(st.integers(1, 5))):
        order = data.draw(st.permutations(waiting))
        some = order[: data.draw(st.integers(0, len(order)))]
        stream = b"".join(map(response, some))
        cut = data.draw(st.integers(0, len(stream)))
        taken = take(sends, stream[:cut], 1)
        take(sends, stream[taken:], 2)
        answered += len(some)
        assert (sends.in_flight, measured.acknowledged) == (size - len(some), answered)
        waiting = [*order[len(some) :], *opaques(fill(sends))]
        assert len(set(waiting)) == size
