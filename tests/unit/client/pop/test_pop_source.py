"""Responses to pops: receipt handles, and malformed responses."""

import pytest

from penstock.client.pop.popped_messages import PopTarget, read_popped, receipt_of
from penstock.client.received_message import ReceivedMessage
from penstock.errors import HeaderError
from penstock.transport.peer import Response
from tests.unit.client.client_kit import BROKER
from tests.unit.client.consumer.consumer_kit import record


def answer(**ext: str) -> Response:
    fields = {
        "popTime": "1000", "invisibleTime": "500", "reviveQid": "3",
        "startOffsetInfo": "0 3 7", "msgOffsetInfo": "0 3 7,9",
    } | ext  # fmt: skip
    body = record(7, topic="T") + record(9, topic="T")
    return Response(ext={name: value for name, value in fields.items() if value}, body=body)


def read(answer: Response) -> list[ReceivedMessage]:
    return read_popped(answer, PopTarget("T", BROKER), shown_topic="T", now_ms=5, popped_ms=50)


def test_receipt_handles_are_made_from_the_response_header() -> None:
    seven, nine = read(answer(orderCountInfo="0 qo3%9 4;0 3 2"))
    assert receipt_of(seven).handle.format() == f"7 1000 500 3 0 {BROKER} 3 7"
    assert receipt_of(nine).handle.format() == f"7 1000 500 3 0 {BROKER} 3 9"
    assert (receipt_of(nine).visible_ms, nine.received_ms) == (550, 5)
    assert (seven.reconsume_times, nine.reconsume_times) == (2, 4)


def test_old_pop_responses_without_offsets_are_decoded() -> None:
    seven, nine = read(answer(startOffsetInfo="", msgOffsetInfo=""))
    assert [receipt_of(m).handle.start_offset for m in (seven, nine)] == [7, 9]


def test_receipt_handle_in_a_property_is_used() -> None:
    text = {"POP_CK": "3 900 400 2 2 broker-b 1"}
    (message,) = read(Response(ext=answer().ext, body=record(8, topic="T", properties=text)))
    assert receipt_of(message).handle.format() == "3 900 400 2 2 broker-b 1 8"


@pytest.mark.parametrize(
    "wrong",
    [
        {"popTime": "x"}, {"invisibleTime": "-1"}, {"reviveQid": ""},
        {"msgOffsetInfo": "0 3 7"}, {"msgOffsetInfo": "0 2 7,9"}, {"startOffsetInfo": "0 3"},
    ],
)  # fmt: skip
def test_malformed_pop_responses_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(HeaderError):
        read(answer(**wrong))


def test_bad_records_of_a_pop_are_skipped() -> None:
    whole = answer()
    (seven,) = read(Response(ext=whole.ext, body=whole.body[:-1]))
    assert seven.queue_offset == 7
