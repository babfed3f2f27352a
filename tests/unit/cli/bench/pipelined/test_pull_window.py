"""Pulls of the compiled generator: what they ask for, and what they count in place."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.bench.pipelined.frame_templates import pull_templates
from penstock.cli.bench.pipelined.load_recorder import LoadRecorder
from penstock.cli.bench.pipelined.pull_window import PullWindow
from penstock.errors import WireError
from penstock.wire.codes import PULL_SUBSCRIPTION, RequestCode
from penstock.wire.frame import BINARY, JSON
from penstock.wire.layout import BODY_CRC_AT, MAGIC_AT, SIZE_AT
from tests.unit.cli.bench.pipelined.window_kit import (
    FOREVER_NS,
    QUEUES,
    opaques,
    recorder,
    requests,
    response,
    take,
)
from tests.unit.wire.records import PLAIN, encoded, messages

ENCODINGS = pytest.mark.parametrize("encoding", [BINARY, JSON])
RECORD = encoded(PLAIN)


def window(
    *spans: tuple[int, int],
    size: int = 4,
    encoding: int = BINARY,
    measured: LoadRecorder | None = None,
    verify: bool = False,
) -> PullWindow:
    templates = pull_templates(
        "Group", "Topic", QUEUES[: len(spans)], count_max=1_024, tags=None, encoding=encoding
    )
    made = PullWindow(templates, size, measured or recorder(), spans, verify=verify)
    made.stop_ns = FOREVER_NS
    return made


def fill(pulls: PullWindow) -> bytes:
    pulls.fill(0, 0)
    return pulls.output.take()


def found(opaque: int, following: int, body: bytes, **more: Any) -> bytes:
    return response(opaque, 0, {"nextBeginOffset": str(following)}, body, **more)


@ENCODINGS
def test_a_broker_can_read_the_pulls(encoding: int) -> None:
    pulls = window((0, 10), (123_456_789_012, 1 << 40), (5, 5), encoding=encoding)
    assert pulls.open == 2  # the third is empty
    sent = requests(fill(pulls))
    assert [(code, ext["queueId"], int(ext["queueOffset"])) for code, _, ext, _ in sent] == [
        (RequestCode.PULL_MESSAGE, "0", 0), (RequestCode.PULL_MESSAGE, "11", 123_456_789_012)
    ]  # fmt: skip
    ext = sent[0][2]
    assert (ext["consumerGroup"], ext["topic"], ext["subscription"]) == ("Group", "Topic", "*")
    assert (ext["maxMsgNums"], ext["sysFlag"]) == ("1024", str(PULL_SUBSCRIPTION))


@ENCODINGS
def test_a_queue_is_read_to_its_end(encoding: int) -> None:
    measured = recorder()
    pulls = window((3, 7), encoding=encoding, measured=measured)
    (opaque,) = opaques(fill(pulls))
    assert fill(pulls) == b""  # one pull from a queue at a time
    take(pulls, found(opaque, 5, RECORD * 2, encoding=encoding), 10)
    ((_, opaque, ext, _),) = requests(fill(pulls))
    assert int(ext["queueOffset"]) == 5
    take(pulls, found(opaque, 7, RECORD * 2, encoding=encoding), 20)
    assert (pulls.open, pulls.in_flight, fill(pulls)) == (0, 0, b"")
    size = len(PLAIN["body"])
    assert (measured.received, measured.messages, measured.byte_count) == (4, 4, 4 * size)
    assert measured.last_ns == 20


def test_the_window_limits_the_pulls_in_flight() -> None:
    pulls = window((0, 9), (0, 9), (0, 9), size=2)
    first, second = requests(fill(pulls))
    assert (first[2]["queueId"], second[2]["queueId"]) == ("0", "11")
    take(pulls, found(first[1], 4, RECORD), 1)
    ((_, _, ext, _),) = requests(fill(pulls))
    assert ext["queueId"] == "2"  # queues take turns


def test_results_without_messages() -> None:
    pulls = window((0, 9), (0, 9), (0, 9))
    sent = opaques(fill(pulls))
    answers = [
        response(sent[0], 21, {"nextBeginOffset": "4"}),  # retention: the queue begins there
        response(sent[1], 19, {"nextBeginOffset": "0"}),  # there is nothing
        response(sent[2], 20, {"nextBeginOffset": "9"}),
    ]
    take(pulls, b"".join(answers), 1)
    assert pulls.open == 1
    ((_, _, ext, _),) = requests(fill(pulls))
    assert int(ext["queueOffset"]) == 4


def test_a_refused_pull_is_repeated_later() -> None:
    measured = recorder()
    pulls = window((0, 9), size=1, measured=measured)
    (opaque,) = opaques(fill(pulls))
    take(pulls, response(opaque, 2), 1)
    assert fill(pulls) == b""
    pulls.release_withheld()
    assert len(opaques(fill(pulls))) == 1
    assert measured.codes == {2: 1}


def test_checksums() -> None:
    damaged = bytearray(RECORD)
    damaged[BODY_CRC_AT + 3] ^= 1
    for verify, corrupt in ((False, 0), (True, 1)):
        measured = recorder()
        pulls = window((0, 9), measured=measured, verify=verify)
        (opaque,) = opaques(fill(pulls))
        take(pulls, found(opaque, 2, RECORD + bytes(damaged)), 1)
        assert (measured.received, measured.corrupt) == (2, corrupt)


def changed(at: int, value: int) -> bytes:
    data = bytearray(RECORD)
    data[at : at + 4] = value.to_bytes(4, "big", signed=True)
    return bytes(data)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (RECORD + RECORD[:50], "ends with 50 bytes of a record"),
        (RECORD[:-1], "has a record of"),
        (changed(SIZE_AT, 0), "has a record of 0 bytes"),
        (changed(SIZE_AT, -1), "has a record of -1 bytes"),
        (changed(MAGIC_AT, 0x1234), "of the kind 0x1234"),
        (changed(84, -1), "has a body of -1 bytes"),
        (changed(84, 1 << 30), "has a body of"),
    ],
)
def test_malformed_records_are_refused(body: bytes, text: str) -> None:
    pulls = window((0, 9))
    (opaque,) = opaques(fill(pulls))
    with pytest.raises(WireError, match=text):
        take(pulls, found(opaque, 2, body), 1)


def test_a_response_without_progress_is_refused() -> None:
    pulls = window((3, 9))
    (opaque,) = opaques(fill(pulls))
    with pytest.raises(WireError, match="its next offset is 3"):
        take(pulls, found(opaque, 3, RECORD), 1)
    with pytest.raises(WireError, match="nextBeginOffset is missing"):
        take(window_with(opaque), response(opaque), 1)


def window_with(opaque: int) -> PullWindow:
    pulls = window((3, 9))
    assert opaques(fill(pulls)) == [opaque]
    return pulls


@given(st.lists(messages, min_size=1, max_size=5), st.data())
def test_any_records_are_counted_and_any_damage_is_survived(
    some: list[dict[str, Any]], data: st.DataObject
) -> None:
    body = b"".join(map(encoded, some))
    measured = recorder()
    pulls = window((0, 9), measured=measured, verify=True)
    (opaque,) = opaques(fill(pulls))
    take(pulls, found(opaque, 9, body), 1)
    assert (measured.received, measured.corrupt) == (len(some), 0)
    assert measured.byte_count == sum(len(message["body"]) for message in some)

    damaged = bytearray(body)
    damaged[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    pulls = window((0, 9))
    (opaque,) = opaques(fill(pulls))
    try:
        take(pulls, found(opaque, 9, bytes(damaged)), 1)
    except WireError:
        return
    assert pulls.open == 0
