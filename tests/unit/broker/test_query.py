"""Messages by key, unique id, tag and place, and entries of a queue."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.query import QueryHandlers
from penstock.rpc.answers import Reply
from penstock.wire.bodies.admin_bodies import QueryConsumeQueueResponseBody
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import decode_messages
from penstock.wire.record import java_hash
from tests.unit.broker.admin.admin_kit import NOW_MS, AdminFixture, admin_fixture, decoded, reply

HOUR_MS = 3_600_000


@pytest.fixture
def made(tmp_path: Path) -> Iterator[AdminFixture]:
    with admin_fixture(tmp_path) as made:
        yield made


def by_key(made: AdminFixture, key: str, **ext: object) -> Reply:
    fields = {"topic": "orders", "key": key, "maxNum": 32, "beginTimestamp": 0}
    return reply(
        QueryHandlers(made.context), RequestCode.QUERY_MESSAGE,
        **{**fields, "endTimestamp": NOW_MS + HOUR_MS, **ext},
    )  # fmt: skip


def bodies(answer: Reply) -> list[bytes]:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [message.body for message in decode_messages(answer.body)]


def test_key_finds_its_messages_oldest_first(made: AdminFixture) -> None:
    for body in (b"1", b"2"):
        made.put("orders", keys=("k", f"own{body!r}"), body=body)
    made.put("orders", keys=("other",), body=b"3")
    last = made.put("sms", keys=("k",), body=b"4")
    answer = by_key(made, "k")
    assert bodies(answer) == [b"1", b"2"]
    assert answer.ext == {
        "indexLastUpdateTimestamp": str(NOW_MS),
        "indexLastUpdatePhyoffset": str(last),
    }


def test_only_the_newest_come_where_too_many_match(made: AdminFixture) -> None:
    for body in (b"1", b"2", b"3"):
        made.put("orders", keys=("k",), body=body)
    assert bodies(by_key(made, "k", maxNum=2)) == [b"2", b"3"]
    assert by_key(made, "k", maxNum=-1).code == ResponseCode.QUERY_NOT_FOUND


def test_unique_id_is_found_whatever_number_is_asked_for(made: AdminFixture) -> None:
    made.put("orders", unique="ID1", body=b"1")
    assert bodies(by_key(made, "ID1", maxNum=0, _UNIQUE_KEY_QUERY="true")) == [b"1"]


def test_tag_is_found_by_its_own_kind_of_index(made: AdminFixture) -> None:
    made.put("orders", tags="vip", body=b"1")
    made.put("orders", keys=("vip",), body=b"2")
    assert bodies(by_key(made, "vip", indexType="T")) == [b"1"]
    assert bodies(by_key(made, "vip", indexType="K")) == [b"2"]
    assert bodies(by_key(made, "vip", indexType="U", lastKey="")) == [b"2"]


def test_time_range_counts(made: AdminFixture) -> None:
    made.put("orders", keys=("k",), body=b"1", ms=NOW_MS)
    made.put("orders", keys=("k",), body=b"2", ms=NOW_MS + HOUR_MS)
    assert bodies(by_key(made, "k", endTimestamp=NOW_MS + 1_000)) == [b"1"]
    assert bodies(by_key(made, "k", beginTimestamp=NOW_MS + 10_000)) == [b"2"]
    answer = by_key(made, "k", beginTimestamp=NOW_MS - HOUR_MS, endTimestamp=NOW_MS - 10_000)
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    assert answer.ext == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}


def test_query_without_a_time_is_refused(made: AdminFixture) -> None:
    assert by_key(made, "k", endTimestamp="").code == ResponseCode.INVALID_PARAMETER


def test_message_at_a_place_of_the_log(made: AdminFixture) -> None:
    made.put("orders", body=b"1")
    offset = made.put("orders", body=b"2")
    family = QueryHandlers(made.context)
    assert bodies(reply(family, RequestCode.VIEW_MESSAGE_BY_ID, offset=offset)) == [b"2"]
    for nowhere in (offset + 1, offset + 10_000, -1):
        answer = reply(family, RequestCode.VIEW_MESSAGE_BY_ID, offset=nowhere)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert str(nowhere) in (answer.remark or "")


def entries(made: AdminFixture, **ext: object) -> QueryConsumeQueueResponseBody:
    fields = {"topic": "orders", "queueId": 0, "index": 0, "count": 10}
    return decoded(
        QueryHandlers(made.context), QueryConsumeQueueResponseBody, RequestCode.QUERY_CONSUME_QUEUE,
        **{**fields, **ext},
    )  # fmt: skip


def test_entries_of_a_queue(made: AdminFixture) -> None:
    offsets = [made.put("orders", tags=tags) for tags in ("a", "b", "c")]
    body = entries(made, index=1, count=2)
    assert (body.min_queue_index, body.max_queue_index) == (0, 3)
    assert body.filter_data is None
    assert [(e.physic_offset, e.tags_code) for e in body.queue_data or []] == [
        (offsets[1], java_hash("b")),
        (offsets[2], java_hash("c")),
    ]
    assert len(entries(made, count=99).queue_data or []) == 3
    assert entries(made, count=-1).queue_data == []


def test_entries_tell_what_a_group_subscribes_to(made: AdminFixture) -> None:
    made.put("orders")
    assert entries(made, consumerGroup="coupons").filter_data == "coupons@orders is not online!"
    made.consumer("coupons", "orders")
    subscription = entries(made, consumerGroup="coupons").subscription_data
    assert subscription is not None
    assert subscription.topic == "orders"


@pytest.mark.parametrize("ext", [{"queueId": 7}, {"topic": "none"}, {"index": 1}, {"index": -1}])
def test_entries_that_do_not_exist_are_refused(made: AdminFixture, ext: dict[str, object]) -> None:
    made.put("orders")
    fields = {"topic": "orders", "queueId": 0, "index": 0, "count": 10, **ext}
    answer = reply(QueryHandlers(made.context), RequestCode.QUERY_CONSUME_QUEUE, **fields)
    assert answer.code == ResponseCode.SYSTEM_ERROR
