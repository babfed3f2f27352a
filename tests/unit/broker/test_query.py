"""Messages by key, unique id, tag and log offset, and entries of a queue."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker import query
from penstock.broker.query import QueryHandlers
from penstock.rpc.answers import Reply
from penstock.wire.bodies.admin_bodies import QueryConsumeQueueResponseBody
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import decode_messages
from penstock.wire.record import java_hash
from tests.unit.broker.admin.admin_kit import NOW_MS, AdminFixture, admin_fixture, decoded, reply

HOUR_MS = 3_600_000


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AdminFixture]:
    with admin_fixture(tmp_path) as env:
        yield env


def by_key(env: AdminFixture, key: str, **ext: object) -> Reply:
    fields = {"topic": "orders", "key": key, "maxNum": 32, "beginTimestamp": 0}
    return reply(
        QueryHandlers(env.context), RequestCode.QUERY_MESSAGE,
        **{**fields, "endTimestamp": NOW_MS + HOUR_MS, **ext},
    )  # fmt: skip


def bodies(answer: Reply) -> list[bytes]:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [message.body for message in decode_messages(answer.body)]


def test_query_by_key_returns_messages_oldest_first(env: AdminFixture) -> None:
    for body in (b"1", b"2"):
        env.put("orders", keys=("k", f"own{body!r}"), body=body)
    env.put("orders", keys=("other",), body=b"3")
    last = env.put("sms", keys=("k",), body=b"4")
    answer = by_key(env, "k")
    assert bodies(answer) == [b"1", b"2"]
    assert answer.ext == {
        "indexLastUpdateTimestamp": str(NOW_MS),
        "indexLastUpdatePhyoffset": str(last),
    }


def test_only_the_newest_messages_are_returned_when_too_many_match(env: AdminFixture) -> None:
    for body in (b"1", b"2", b"3"):
        env.put("orders", keys=("k",), body=body)
    assert bodies(by_key(env, "k", maxNum=2)) == [b"2", b"3"]
    assert by_key(env, "k", maxNum=-1).code == ResponseCode.QUERY_NOT_FOUND


def test_query_by_unique_id_ignores_the_requested_number(env: AdminFixture) -> None:
    env.put("orders", unique="ID1", body=b"1")
    assert bodies(by_key(env, "ID1", maxNum=0, _UNIQUE_KEY_QUERY="true")) == [b"1"]


def test_query_by_tag_uses_the_tag_index(env: AdminFixture) -> None:
    env.put("orders", tags="vip", body=b"1")
    env.put("orders", keys=("vip",), body=b"2")
    assert bodies(by_key(env, "vip", indexType="T")) == [b"1"]
    assert bodies(by_key(env, "vip", indexType="K")) == [b"2"]
    assert bodies(by_key(env, "vip", indexType="U", lastKey="")) == [b"2"]


def test_query_respects_the_time_range(env: AdminFixture) -> None:
    env.put("orders", keys=("k",), body=b"1", ms=NOW_MS)
    env.put("orders", keys=("k",), body=b"2", ms=NOW_MS + HOUR_MS)
    assert bodies(by_key(env, "k", endTimestamp=NOW_MS + 1_000)) == [b"1"]
    assert bodies(by_key(env, "k", beginTimestamp=NOW_MS + 10_000)) == [b"2"]
    answer = by_key(env, "k", beginTimestamp=NOW_MS - HOUR_MS, endTimestamp=NOW_MS - 10_000)
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    assert answer.ext == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}


def test_query_without_a_time_is_refused(env: AdminFixture) -> None:
    assert by_key(env, "k", endTimestamp="").code == ResponseCode.INVALID_PARAMETER


def test_message_by_log_offset(env: AdminFixture) -> None:
    env.put("orders", body=b"1")
    offset = env.put("orders", body=b"2")
    family = QueryHandlers(env.context)
    assert bodies(reply(family, RequestCode.VIEW_MESSAGE_BY_ID, offset=offset)) == [b"2"]
    for nowhere in (offset + 1, offset + 10_000, -1):
        answer = reply(family, RequestCode.VIEW_MESSAGE_BY_ID, offset=nowhere)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert str(nowhere) in (answer.remark or "")


def entries(env: AdminFixture, **ext: object) -> QueryConsumeQueueResponseBody:
    fields = {"topic": "orders", "queueId": 0, "index": 0, "count": 10}
    return decoded(
        QueryHandlers(env.context), QueryConsumeQueueResponseBody, RequestCode.QUERY_CONSUME_QUEUE,
        **{**fields, **ext},
    )  # fmt: skip


def test_entries_of_a_queue(env: AdminFixture) -> None:
    offsets = [env.put("orders", tags=tags) for tags in ("a", "b", "c")]
    body = entries(env, index=1, count=2)
    assert (body.min_queue_index, body.max_queue_index) == (0, 3)
    assert body.filter_data is None
    assert [(e.physic_offset, e.tags_code) for e in body.queue_data or []] == [
        (offsets[1], java_hash("b")),
        (offsets[2], java_hash("c")),
    ]
    assert len(entries(env, count=99).queue_data or []) == 3
    assert entries(env, count=-1).queue_data == []


def test_the_number_of_entries_is_limited(
    env: AdminFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "ENTRIES_MAX", 2)
    for _ in range(3):
        env.put("orders")
    assert len(entries(env, count=10_000).queue_data or []) == 2
    assert len(entries(env, index=2, count=10_000).queue_data or []) == 1


def test_entries_include_the_subscription_of_a_group(env: AdminFixture) -> None:
    env.put("orders")
    assert entries(env, consumerGroup="coupons").filter_data == "coupons@orders is not online!"
    env.consumer("coupons", "orders")
    subscription = entries(env, consumerGroup="coupons").subscription_data
    assert subscription is not None
    assert subscription.topic == "orders"


@pytest.mark.parametrize("ext", [{"queueId": 7}, {"topic": "none"}, {"index": 1}, {"index": -1}])
def test_entries_that_do_not_exist_are_refused(env: AdminFixture, ext: dict[str, object]) -> None:
    env.put("orders")
    fields = {"topic": "orders", "queueId": 0, "index": 0, "count": 10, **ext}
    answer = reply(QueryHandlers(env.context), RequestCode.QUERY_CONSUME_QUEUE, **fields)
    assert answer.code == ResponseCode.SYSTEM_ERROR
