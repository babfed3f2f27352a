"""Resets, clones and corrections of offsets by tools."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.admin import large_requests
from penstock.broker.admin.offset_resets import NO_CORRECTION, ResetHandlers
from penstock.broker.long_polling import SuspendedRequest
from penstock.rpc.answers import NotifyClient, Suspend
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    QueryCorrectionOffsetBody,
    ResetOffsetBody,
    ResetOffsetBodyForC,
)
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import LanguageCode, RequestCode, ResponseCode
from tests.unit.broker.admin.admin_kit import (
    BROKER,
    NOW_MS,
    AdminFixture,
    admin_fixture,
    decoded,
    reply,
)

RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AdminFixture]:
    """A group at the end of a topic of two queues, with five messages in the first."""
    with admin_fixture(tmp_path) as env:
        env.topic("orders", 2)
        env.group("coupons")
        for ms in range(5):
            env.put("orders", 0, ms=NOW_MS + ms)
        for queue_id, offset in ((0, 5), (1, 0)):
            env.offsets.commit("coupons", "orders", queue_id, offset, NOW_MS)
        yield env


def fields(**ext: object) -> dict[str, object]:
    plain = {"topic": "orders", "group": "coupons", "timestamp": -1, "isForce": "true"}
    return {**plain, **ext}


def reset(env: AdminFixture, **ext: object) -> dict[int, int]:
    body = decoded(ResetHandlers(env.context), ResetOffsetBody, RESET, **fields(**ext))
    assert {(q.topic, q.broker_name) for q in body.offset_table} == {("orders", BROKER)}
    return {queue.queue_id: offset for queue, offset in body.offset_table.items()}


def test_reset_to_a_time(env: AdminFixture) -> None:
    assert reset(env, timestamp=NOW_MS + 2) == {0: 2, 1: 0}
    assert env.offsets.get("coupons", "orders", 0) == 2
    assert env.offsets.take_reset("coupons", "orders", 0) == 2


@pytest.mark.parametrize("timestamp", [-1, -2])
def test_a_negative_time_resets_to_the_end(env: AdminFixture, timestamp: int) -> None:
    env.offsets.commit("coupons", "orders", 0, 1, NOW_MS)
    assert reset(env, timestamp=timestamp) == {0: 5, 1: 0}


def test_reset_of_one_queue(env: AdminFixture) -> None:
    assert reset(env, queueId=0, offset=3) == {0: 3}
    assert reset(env, queueId=0, timestamp=NOW_MS + 4) == {0: 4}
    assert env.offsets.take_reset("coupons", "orders", 1) is None


@pytest.mark.parametrize("offset", [6, -2])
def test_an_offset_outside_of_the_queue_is_refused(env: AdminFixture, offset: int) -> None:
    answer = reply(ResetHandlers(env.context), RESET, **fields(queueId=0, offset=offset))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "0 to 5" in (answer.remark or "")
    assert env.offsets.get("coupons", "orders", 0) == 5


def test_reset_needs_topic_and_group(env: AdminFixture) -> None:
    family = ResetHandlers(env.context)
    assert reply(family, RESET, **fields(topic="none")).code == ResponseCode.TOPIC_NOT_EXIST
    answer = reply(family, RESET, **fields(group="none"))
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_a_reset_wakes_suspended_pulls(env: AdminFixture) -> None:
    woken: list[SuspendedRequest] = []
    env.context.long_polling.on_wake(lambda suspended, last: woken.append(suspended))
    queue = env.store.queue("orders", 0)
    assert queue is not None
    env.context.long_polling.add(1, None, Suspend(queue, NOW_MS + 99, lambda last: None))
    reset(env, timestamp=0)
    assert [suspended.suspend.queue for suspended in woken] == [queue]


def test_a_client_side_reset_notifies_every_consumer(env: AdminFixture) -> None:
    env.change(server_side_reset=False)
    env.consumer("coupons", "orders", client=1)
    env.consumer("coupons", "orders", client=2, language=LanguageCode.CPP)
    assert reset(env, timestamp=NOW_MS + 3) == {0: 3, 1: 0}
    java, cpp = env.effects.take()
    assert isinstance(java, NotifyClient)
    assert isinstance(cpp, NotifyClient)
    assert (java.client, java.code) == (1, RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
    assert java.ext == {
        "topic": "orders",
        "group": "coupons",
        "timestamp": str(NOW_MS + 3),
        "isForce": "true",
    }
    expected = {MessageQueue("orders", BROKER, 0): 3, MessageQueue("orders", BROKER, 1): 0}
    assert fastjson.decode(java.body, ResetOffsetBody).offset_table == expected
    rows = fastjson.decode(cpp.body, ResetOffsetBodyForC).offset_table
    assert [(row.queue_id, row.offset) for row in rows] == [(0, 3), (1, 0)]
    assert env.offsets.get("coupons", "orders", 0) == 5  # until they commit


def test_a_client_side_reset_moves_forward_only_by_force(env: AdminFixture) -> None:
    env.change(server_side_reset=False)
    env.consumer("coupons", "orders")
    env.offsets.commit("coupons", "orders", 0, 2, NOW_MS)
    assert reset(env, isForce="false")[0] == 2
    assert reset(env, isForce="true")[0] == 5


def test_a_client_side_reset_needs_consumers_and_offsets(env: AdminFixture) -> None:
    env.change(server_side_reset=False)
    family = ResetHandlers(env.context)
    assert reply(family, RESET, **fields()).code == ResponseCode.CONSUMER_NOT_ONLINE
    assert reply(family, RESET, **fields(group="new")).code == ResponseCode.SYSTEM_ERROR
    env.consumer("coupons", "orders", version=28)
    assert "too old" in (reply(family, RESET, **fields()).remark or "")


def clone(env: AdminFixture, **ext: object) -> None:
    plain = {"srcGroup": "coupons", "destGroup": "mail", "offline": "false"}
    answer = reply(ResetHandlers(env.context), RequestCode.CLONE_GROUP_OFFSET, **{**plain, **ext})
    assert answer.code == 0


def test_clone_copies_offsets(env: AdminFixture) -> None:
    env.topic("sms")
    env.offsets.commit("coupons", "sms", 0, 7, NOW_MS)
    env.offsets.commit("coupons", "gone", 0, 7, NOW_MS)
    clone(env, topic="orders")
    assert dict(env.offsets.queues("mail", "orders")) == {0: 5, 1: 0}
    assert env.offsets.get("mail", "sms", 0) is None
    clone(env)
    assert env.offsets.get("mail", "sms", 0) == 7
    assert env.offsets.get("mail", "gone", 0) is None


def test_clone_skips_topics_that_a_connected_group_left(env: AdminFixture) -> None:
    env.consumer("coupons", "sms")
    clone(env)
    assert env.offsets.get("mail", "orders", 0) is None
    clone(env, offline="true")
    assert env.offsets.get("mail", "orders", 0) == 5


@pytest.mark.parametrize("group", ["coupons", "other"])
def test_a_correction_of_too_many_queues_is_refused(
    env: AdminFixture, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.setattr(large_requests, "QUEUES_MAX", 2)
    for queue_id in range(3):
        env.offsets.commit(group, "orders", queue_id, 0, NOW_MS)
    fields = {"topic": "orders", "compareGroup": "coupons"}
    refused = reply(ResetHandlers(env.context), RequestCode.QUERY_CORRECTION_OFFSET, **fields)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "3 queues, the limit is 2" in (refused.remark or "")


def test_correction_is_the_lowest_offset_of_all_groups(env: AdminFixture) -> None:
    env.offsets.commit("mail", "orders", 0, 3, NOW_MS)
    env.offsets.commit("late", "orders", 0, 1, NOW_MS)

    def corrections(**ext: object) -> dict[int, int]:
        code = RequestCode.QUERY_CORRECTION_OFFSET
        plain = {"topic": "orders", "compareGroup": "coupons"}
        family = ResetHandlers(env.context)
        return decoded(
            family, QueryCorrectionOffsetBody, code, **{**plain, **ext}
        ).correction_offsets

    assert corrections() == {0: 1, 1: 0}
    assert corrections(filterGroups="late,other") == {0: 3, 1: 0}
    assert corrections(filterGroups="late", compareGroup="late") == {0: NO_CORRECTION, 1: 0}
    assert env.offsets.get("late", "orders", 0) == 1
