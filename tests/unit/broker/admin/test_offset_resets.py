"""Resets, clones and corrections of offsets by tools."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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
def made(tmp_path: Path) -> Iterator[AdminFixture]:
    """A group at the end of a topic of two queues, with five messages in the first."""
    with admin_fixture(tmp_path) as made:
        made.topic("orders", 2)
        made.group("coupons")
        for ms in range(5):
            made.put("orders", 0, ms=NOW_MS + ms)
        for queue_id, offset in ((0, 5), (1, 0)):
            made.offsets.commit("coupons", "orders", queue_id, offset, NOW_MS)
        yield made


def fields(**ext: object) -> dict[str, object]:
    plain = {"topic": "orders", "group": "coupons", "timestamp": -1, "isForce": "true"}
    return {**plain, **ext}


def reset(made: AdminFixture, **ext: object) -> dict[int, int]:
    body = decoded(ResetHandlers(made.context), ResetOffsetBody, RESET, **fields(**ext))
    assert {(q.topic, q.broker_name) for q in body.offset_table} == {("orders", BROKER)}
    return {queue.queue_id: offset for queue, offset in body.offset_table.items()}


def test_reset_to_a_time(made: AdminFixture) -> None:
    assert reset(made, timestamp=NOW_MS + 2) == {0: 2, 1: 0}
    assert made.offsets.get("coupons", "orders", 0) == 2
    assert made.offsets.take_reset("coupons", "orders", 0) == 2


@pytest.mark.parametrize("timestamp", [-1, -2])
def test_a_negative_time_resets_to_the_end(made: AdminFixture, timestamp: int) -> None:
    made.offsets.commit("coupons", "orders", 0, 1, NOW_MS)
    assert reset(made, timestamp=timestamp) == {0: 5, 1: 0}


def test_reset_of_one_queue(made: AdminFixture) -> None:
    assert reset(made, queueId=0, offset=3) == {0: 3}
    assert reset(made, queueId=0, timestamp=NOW_MS + 4) == {0: 4}
    assert made.offsets.take_reset("coupons", "orders", 1) is None


@pytest.mark.parametrize("offset", [6, -2])
def test_an_offset_outside_of_the_queue_is_refused(made: AdminFixture, offset: int) -> None:
    answer = reply(ResetHandlers(made.context), RESET, **fields(queueId=0, offset=offset))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "0 to 5" in (answer.remark or "")
    assert made.offsets.get("coupons", "orders", 0) == 5


def test_reset_needs_topic_and_group(made: AdminFixture) -> None:
    family = ResetHandlers(made.context)
    assert reply(family, RESET, **fields(topic="none")).code == ResponseCode.TOPIC_NOT_EXIST
    answer = reply(family, RESET, **fields(group="none"))
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_a_reset_wakes_suspended_pulls(made: AdminFixture) -> None:
    woken: list[SuspendedRequest] = []
    made.context.long_polling.on_wake(lambda held, last: woken.append(held))
    queue = made.store.queue("orders", 0)
    assert queue is not None
    made.context.long_polling.add(1, None, Suspend(queue, NOW_MS + 99, lambda last: None))
    reset(made, timestamp=0)
    assert [held.suspend.queue for held in woken] == [queue]


def test_a_client_side_reset_notifies_every_consumer(made: AdminFixture) -> None:
    made.change(server_side_reset=False)
    made.consumer("coupons", "orders", client=1)
    made.consumer("coupons", "orders", client=2, language=LanguageCode.CPP)
    assert reset(made, timestamp=NOW_MS + 3) == {0: 3, 1: 0}
    java, cpp = made.effects.take()
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
    assert made.offsets.get("coupons", "orders", 0) == 5  # until they commit


def test_a_client_side_reset_moves_forward_only_by_force(made: AdminFixture) -> None:
    made.change(server_side_reset=False)
    made.consumer("coupons", "orders")
    made.offsets.commit("coupons", "orders", 0, 2, NOW_MS)
    assert reset(made, isForce="false")[0] == 2
    assert reset(made, isForce="true")[0] == 5


def test_a_client_side_reset_needs_consumers_and_offsets(made: AdminFixture) -> None:
    made.change(server_side_reset=False)
    family = ResetHandlers(made.context)
    assert reply(family, RESET, **fields()).code == ResponseCode.CONSUMER_NOT_ONLINE
    assert reply(family, RESET, **fields(group="new")).code == ResponseCode.SYSTEM_ERROR
    made.consumer("coupons", "orders", version=28)
    assert "too old" in (reply(family, RESET, **fields()).remark or "")


def clone(made: AdminFixture, **ext: object) -> None:
    plain = {"srcGroup": "coupons", "destGroup": "mail", "offline": "false"}
    answer = reply(ResetHandlers(made.context), RequestCode.CLONE_GROUP_OFFSET, **{**plain, **ext})
    assert answer.code == 0


def test_clone_copies_offsets(made: AdminFixture) -> None:
    made.topic("sms")
    made.offsets.commit("coupons", "sms", 0, 7, NOW_MS)
    made.offsets.commit("coupons", "gone", 0, 7, NOW_MS)
    clone(made, topic="orders")
    assert dict(made.offsets.queues("mail", "orders")) == {0: 5, 1: 0}
    assert made.offsets.get("mail", "sms", 0) is None
    clone(made)
    assert made.offsets.get("mail", "sms", 0) == 7
    assert made.offsets.get("mail", "gone", 0) is None


def test_clone_skips_topics_that_a_connected_group_left(made: AdminFixture) -> None:
    made.consumer("coupons", "sms")
    clone(made)
    assert made.offsets.get("mail", "orders", 0) is None
    clone(made, offline="true")
    assert made.offsets.get("mail", "orders", 0) == 5


def test_correction_is_the_lowest_offset_of_all_groups(made: AdminFixture) -> None:
    made.offsets.commit("mail", "orders", 0, 3, NOW_MS)
    made.offsets.commit("late", "orders", 0, 1, NOW_MS)

    def corrections(**ext: object) -> dict[int, int]:
        code = RequestCode.QUERY_CORRECTION_OFFSET
        plain = {"topic": "orders", "compareGroup": "coupons"}
        family = ResetHandlers(made.context)
        return decoded(
            family, QueryCorrectionOffsetBody, code, **{**plain, **ext}
        ).correction_offsets

    assert corrections() == {0: 1, 1: 0}
    assert corrections(filterGroups="late,other") == {0: 3, 1: 0}
    assert corrections(filterGroups="late", compareGroup="late") == {0: NO_CORRECTION, 1: 0}
    assert made.offsets.get("late", "orders", 0) == 1
