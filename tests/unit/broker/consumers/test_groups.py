"""Subscription groups: built-in groups, automatic creation, forbidden topics."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import GroupNotExist, InvalidParameter
from penstock.rpc.answers import PersistSoon
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from tests.unit.broker.topic_kit import TopicKit, topic_kit
from tests.unit.store.conftest import NOW_MS


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[TopicKit]:
    with topic_kit(tmp_path / "store") as made:
        yield made


def test_built_in_groups_are_those_of_apache(kit: TopicKit) -> None:
    assert sorted(kit.groups.table.groups) == [
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_PULL",
        "CID_RMQ_SYS_TRANS",
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "TOOLS_CONSUMER",
    ]


def test_the_number_of_groups_is_limited(kit: TopicKit) -> None:
    kit.set(groups_max=len(kit.groups.table.groups) + 1)
    kit.groups.find("coupons", NOW_MS)
    with pytest.raises(InvalidParameter, match=r"too many groups: .*\(groups_max\)"):
        kit.groups.find("others", NOW_MS)
    assert kit.groups.get("others") is None
    kit.groups.put(SubscriptionGroupConfig(group_name="coupons", retry_max_times=3), NOW_MS)


def test_a_group_is_created_on_first_use(kit: TopicKit) -> None:
    assert kit.groups.get("coupons") is None
    made = kit.groups.find("coupons", NOW_MS)
    assert made == SubscriptionGroupConfig(group_name="coupons")
    assert kit.groups.get("coupons") is made
    assert kit.effects.take() == [PersistSoon(kit.groups.table)]
    assert kit.groups.find("coupons", NOW_MS) is made
    assert kit.effects.take() == []


def test_without_auto_creation_only_system_groups_are_created(kit: TopicKit) -> None:
    kit.set(auto_create_groups=False)
    with pytest.raises(GroupNotExist, match="coupons") as raised:
        kit.groups.find("coupons", NOW_MS)
    assert "auto_create_groups" in raised.value.remark()
    assert kit.groups.find("CID_RMQ_SYS_X", NOW_MS).group_name == "CID_RMQ_SYS_X"


@pytest.mark.parametrize("group", ["", "a b", "g" * 121, "CID_RMQ_SYS_/"])
def test_an_invalid_name_creates_no_group(kit: TopicKit, group: str) -> None:
    with pytest.raises(GroupNotExist):
        kit.groups.find(group, NOW_MS)
    assert kit.effects.take() == []


def test_reading_a_topic_can_be_forbidden_to_a_group(kit: TopicKit) -> None:
    assert kit.groups.may_read("g", "t")
    kit.groups.allow_reading("g", "t", allowed=False, now_ms=NOW_MS)
    kit.groups.allow_reading("g", "u", allowed=False, now_ms=NOW_MS)
    assert not kit.groups.may_read("g", "t")
    assert kit.groups.may_read("other", "t")
    kit.groups.allow_reading("g", "t", allowed=True, now_ms=NOW_MS)
    assert kit.groups.may_read("g", "t")
    assert not kit.groups.may_read("g", "u")


def test_deleting_a_group_removes_its_restrictions(kit: TopicKit) -> None:
    kit.groups.find("g", NOW_MS)
    kit.groups.allow_reading("g", "t", allowed=False, now_ms=NOW_MS)
    kit.effects.take()
    kit.groups.delete("g", NOW_MS)
    assert kit.effects.take() == [PersistSoon(kit.groups.table)]
    assert kit.groups.get("g") is None
    assert kit.groups.may_read("g", "t")
