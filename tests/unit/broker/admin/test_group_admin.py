"""Administration of subscription groups, and the tables that slaves copy."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.consumers import groups as groups_module
from penstock.errors import BodyError
from penstock.rpc.answers import PersistSoon, Reply
from penstock.store.tables.config_tables import SubscriptionGroupTable
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import GroupForbidden, SubscriptionGroupList
from penstock.wire.bodies.client_bodies import (
    CustomizedRetryPolicy,
    GroupRetryPolicy,
    SimpleSubscriptionData,
    SubscriptionGroupConfig,
)
from penstock.wire.bodies.table_bodies import (
    ConsumerOffsetSerializeWrapper,
    DelayOffsetSerializeWrapper,
    SubscriptionGroupWrapper,
)
from penstock.wire.codes import RequestCode, ResponseCode
from tests.unit.broker.topic_kit import TopicKit, topic_kit
from tests.unit.store.conftest import NOW_MS

CREATE, CREATE_LIST, DELETE, GET, FORBID, GET_ALL = 200, 225, 207, 352, 353, 201
OFFSETS, DELAYS = 43, 45
INVALID = ResponseCode.INVALID_PARAMETER


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[TopicKit]:
    with topic_kit(tmp_path / "store") as made:
        yield made


def saved(kit: TopicKit) -> SubscriptionGroupTable:
    """The groups that a restarted broker loads."""
    table = SubscriptionGroupTable()
    assert table.load(kit.persistence.file(table.FILE))
    return table


def create(kit: TopicKit, group: str = "coupons", **changes: Any) -> Reply:
    body = fastjson.encode(SubscriptionGroupConfig(group_name=group, **changes))
    return kit.ask(CREATE, body=body)


def table_of(reply: Reply) -> SubscriptionGroupWrapper:
    assert reply.code == 0
    return fastjson.decode(reply.body, SubscriptionGroupWrapper)


def test_a_created_group_is_saved_before_the_response(kit: TopicKit) -> None:
    assert create(kit, retry_max_times=3, consume_broadcast_enable=False) == Reply()
    config = SubscriptionGroupConfig(
        group_name="coupons", retry_max_times=3, consume_broadcast_enable=False
    )
    assert kit.groups.get("coupons") == config
    assert saved(kit).get("coupons") == config
    assert kit.effects.take() == [PersistSoon(kit.groups.table)]
    assert create(kit, retry_max_times=3, consume_broadcast_enable=False) == Reply()
    assert kit.effects.take() == []


def test_attributes_of_groups_are_checked(kit: TopicKit) -> None:
    assert create(kit, attributes={"+priority.factor": "30"}) == Reply()
    assert saved(kit).groups["coupons"].attributes == {"priority.factor": "30"}
    assert create(kit, attributes={"+priority.factor": "0"}) == Reply()
    for attributes in (
        {"+priority.factor": "101"},
        {"+priority.factor": "many"},
        {"+priority.factor": "9" * 5000},
        {"priority.factor": "1"},
        {"+colour": "red"},
        {"": ""},
    ):
        assert create(kit, attributes=attributes).code == INVALID
    assert create(kit, attributes={"-priority.factor": ""}) == Reply()
    assert saved(kit).groups["coupons"].attributes == {}
    assert create(kit, attributes={"-priority.factor": ""}).code == INVALID


def test_an_invalid_group_is_refused(kit: TopicKit) -> None:
    reply = create(kit, "a b")
    assert reply.code == INVALID
    assert "contains ' '" in (reply.remark or "")
    assert kit.ask(CREATE, body=b"{").code == BodyError.code


def test_tools_do_not_create_more_groups_than_the_limit(kit: TopicKit) -> None:
    kit.set(groups_max=len(kit.groups.table.groups) + 1)
    two = [SubscriptionGroupConfig(group_name=name) for name in ("a", "b")]
    body = fastjson.encode(SubscriptionGroupList(group_config_list=two))
    refused = kit.ask(CREATE_LIST, body=body)
    assert refused.code == INVALID
    assert "(groups_max)" in (refused.remark or "")
    assert kit.groups.get("a") is None, "all of a list or nothing"
    body = fastjson.encode(SubscriptionGroupList(group_config_list=two[:1]))
    assert kit.ask(CREATE_LIST, body=body) == Reply()


def test_a_list_is_created_completely_or_not_at_all(kit: TopicKit) -> None:
    good, bad = (SubscriptionGroupConfig(group_name=name) for name in ("a", "b d"))
    body = fastjson.encode(SubscriptionGroupList(group_config_list=[good, bad]))
    assert kit.ask(CREATE_LIST, body=body).code == INVALID
    assert kit.groups.get("a") is None
    body = fastjson.encode(SubscriptionGroupList(group_config_list=[good]))
    assert kit.ask(CREATE_LIST, body=body) == Reply()
    assert saved(kit).get("a") == good


def test_deleting_a_group_deletes_its_counters(kit: TopicKit) -> None:
    create(kit)
    kit.stats.got("coupons", "t", 1, 100, 0)
    kit.stats.got("mail", "t", 1, 100, 0)
    kit.ask(DELETE, {"groupName": "coupons"})
    assert list(kit.stats.groups) == [("t", "mail")]


@pytest.mark.parametrize("clean", [True, False])
def test_deleting_a_group_deletes_its_offsets_on_request(kit: TopicKit, clean: bool) -> None:
    create(kit)
    kit.offsets.commit("coupons", "t", 0, 7, NOW_MS)
    kit.persistence.save(kit.offsets.table)()
    ext = {"groupName": "coupons", "cleanOffset": str(clean).lower()}
    assert kit.ask(DELETE, ext) == Reply()
    assert kit.groups.get("coupons") is None
    assert saved(kit).get("coupons") is None
    progress = ConsumerOffsetTable()
    progress.load(kit.persistence.file(progress.FILE))
    assert progress.get("t", "coupons", 0) == (None if clean else 7)


def test_a_query_creates_the_group_if_allowed(kit: TopicKit) -> None:
    reply = kit.ask(GET, {"group": "coupons"})
    expected = SubscriptionGroupConfig(group_name="coupons")
    assert fastjson.decode(reply.body, SubscriptionGroupConfig) == expected
    kit.set(auto_create_groups=False)
    reply = kit.ask(GET, {"group": "others"})
    assert reply.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"group_retry_policy": GroupRetryPolicy(
                customized_retry_policy=CustomizedRetryPolicy(next=(1,) * 101))},
            "too many retry delays: 101 delays, the limit is 100",
        ),
        (
            {"subscription_data_set": [SimpleSubscriptionData(topic="t")] * 1_001},
            "too many subscriptions: 1001 subscriptions, the limit is 1000",
        ),
        (
            {"subscription_data_set": [SimpleSubscriptionData(topic="t", expression="x" * 65_536)]},
            "too many characters in its subscriptions",
        ),
        (
            {"group_retry_policy": GroupRetryPolicy(type="x" * 65_537)},
            "too many characters in its subscriptions",
        ),
    ],
)  # fmt: skip
def test_a_group_that_is_too_large_is_refused(
    kit: TopicKit, changes: dict[str, Any], part: str
) -> None:
    refused = create(kit, **changes)
    assert refused.code == INVALID
    assert part in (refused.remark or "")
    assert kit.groups.get("coupons") is None


def test_reading_is_forbidden_and_allowed_again(kit: TopicKit) -> None:
    create(kit)
    kit.topics.ensure("t", 1, 6, NOW_MS)
    kit.effects.take()
    ext = {"group": "coupons", "topic": "t"}

    def readable(**change: str) -> bool | None:
        return fastjson.decode(kit.ask(FORBID, {**ext, **change}).body, GroupForbidden).readable

    assert readable() is True
    assert readable(readable="false") is False
    assert kit.effects.take() == [PersistSoon(kit.groups.table)]
    assert readable() is False
    assert table_of(kit.ask(GET_ALL)).forbidden_table == {"coupons": {"t": 4}}
    assert readable(readable="true") is True
    assert table_of(kit.ask(GET_ALL)).forbidden_table == {}


@pytest.mark.parametrize(
    ("group", "topic", "code"),
    [
        ("coupons", "unknown", ResponseCode.TOPIC_NOT_EXIST),
        ("unknown", "t", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ("coupons", "t" * 900_000, ResponseCode.TOPIC_NOT_EXIST),
        ("g" * 900_000, "t", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
    ],
)
def test_reading_is_forbidden_only_to_groups_and_topics_that_exist(
    kit: TopicKit, group: str, topic: str, code: int
) -> None:
    create(kit)
    kit.topics.ensure("t", 1, 6, NOW_MS)
    ext = {"group": group, "topic": topic, "readable": "false"}
    assert kit.ask(FORBID, ext).code == code
    assert kit.ask(FORBID, {**ext, "readable": "true"}).code == 0
    assert table_of(kit.ask(GET_ALL)).forbidden_table == {}


def test_the_number_of_forbidden_topics_is_limited(
    kit: TopicKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "FORBIDDEN_MAX", 2)
    create(kit)
    for topic in ("t1", "t2", "t3"):
        kit.topics.ensure(topic, 1, 6, NOW_MS)
    replies = [
        kit.ask(FORBID, {"group": "coupons", "topic": topic, "readable": readable})
        for topic, readable in (("t1", "false"), ("t2", "false"), ("t3", "false"), ("t1", "true"))
    ]
    assert [reply.code for reply in replies] == [0, 0, INVALID, 0]
    assert replies[2].remark == (
        "too many topics are forbidden to groups: 3 pairs of group and topic, the limit is 2; "
        "allow some of them again, or use access lists"
    )
    assert kit.ask(FORBID, {"group": "coupons", "topic": "t3", "readable": "false"}).code == 0


def test_groups_are_returned_completely_or_in_pages(kit: TopicKit) -> None:
    create(kit, "A-first")
    create(kit, "z-last")
    for group in ("A-first", "z-last"):
        kit.groups.allow_reading(group, "t", allowed=False, now_ms=NOW_MS)
    names = sorted(kit.groups.table.groups)
    reply = kit.ask(GET_ALL)
    assert sorted(table_of(reply).subscription_group_table) == names
    assert sorted(table_of(reply).forbidden_table) == ["A-first", "z-last"]
    assert reply.ext == {"totalGroupNum": str(len(names))}
    version = fastjson.encode(kit.groups.table.version).decode()
    ext = {"groupSeq": len(names) - 2, "maxGroupNum": 9, "dataVersion": version}
    page = table_of(kit.ask(GET_ALL, ext))
    assert sorted(page.subscription_group_table) == names[-2:]
    assert sorted(page.forbidden_table) == ["z-last"]
    page = table_of(kit.ask(GET_ALL, {**ext, "maxGroupNum": 5, "dataVersion": ""}))
    assert sorted(page.subscription_group_table) == names[:5]


def test_a_page_does_not_leave_a_single_group_behind(kit: TopicKit) -> None:
    """RocketMQ's clients stop reading when one group is missing."""
    names = sorted(kit.groups.table.groups)
    page = table_of(kit.ask(GET_ALL, {"groupSeq": 0, "maxGroupNum": len(names) - 1}))
    assert sorted(page.subscription_group_table) == names


def test_pages_follow_changes_of_the_table(kit: TopicKit) -> None:
    ext = {"groupSeq": 0, "maxGroupNum": 2}
    create(kit, "A2")
    assert sorted(table_of(kit.ask(GET_ALL, ext)).subscription_group_table)[0] == "A2"
    create(kit, "A1")
    assert sorted(table_of(kit.ask(GET_ALL, ext)).subscription_group_table) == ["A1", "A2"]
    kit.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "A1"})
    assert sorted(table_of(kit.ask(GET_ALL, ext)).subscription_group_table)[0] == "A2"


def test_slaves_get_offsets_and_delay_offsets(kit: TopicKit) -> None:
    kit.offsets.commit("coupons", "t", 3, 7, NOW_MS)
    decoded = fastjson.decode(kit.ask(OFFSETS).body, ConsumerOffsetSerializeWrapper)
    assert decoded.offset_table == {"t@coupons": {3: 7}}
    told_delays = fastjson.decode(kit.ask(DELAYS).body, DelayOffsetSerializeWrapper)
    assert told_delays.offset_table == {}
    kit.delay.table.commit(4, 12, NOW_MS)
    told_delays = fastjson.decode(kit.ask(DELAYS).body, DelayOffsetSerializeWrapper)
    assert told_delays.offset_table == {4: 12}


def test_tables_for_slaves_have_no_bare_numbers_as_keys(kit: TopicKit) -> None:
    """Slaves of RocketMQ 5.5.0 refuse them (apache/rocketmq#10284)."""
    kit.offsets.commit("coupons", "t", 3, 7, NOW_MS)
    kit.delay.table.commit(4, 12, NOW_MS)
    assert json.loads(kit.ask(OFFSETS).body)["offsetTable"] == {"t@coupons": {"3": 7}}
    assert json.loads(kit.ask(DELAYS).body)["offsetTable"] == {"4": 12}
