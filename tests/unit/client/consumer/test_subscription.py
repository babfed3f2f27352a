"""Subscriptions in the format of brokers."""

import pytest

from penstock.client.consumer.subscription import Subscription, split_tags
from penstock.errors import BadFilter


@pytest.mark.parametrize("text", ["*", "", "  ", " * ", "||", "a || *", None])
def test_subscription_to_all_tags(text: str | None) -> None:
    assert split_tags(text) is None
    data = Subscription.of("T", text, version=7).data()
    assert (data.sub_string, data.tags_set, data.code_set) == ("*", frozenset(), frozenset())
    assert (data.topic, data.sub_version, data.expression_type) == ("T", 7, "TAG")


def test_subscription_data_has_tags_and_hashes() -> None:
    data = Subscription.of("T", " TagB||TagA || order-created", version=7).data()
    assert data.sub_string == "TagA || TagB || order-created"
    assert data.tags_set == {"TagA", "TagB", "order-created"}
    assert data.code_set == {2598919, 2598920, -392709271}


def test_sql_subscription() -> None:
    subscription = Subscription.of("T", "*", "a > 5", version=7)
    data = subscription.data()
    assert (data.sub_string, data.expression_type, data.tags_set) == ("a > 5", "SQL92", set())
    assert subscription.tag_bytes is None
    for tags, sql in (("x", "a > 5"), ("*", "  ")):
        with pytest.raises(BadFilter):
            Subscription.of("T", tags, sql, version=7)


def test_subscriptions_of_two_handlers_are_merged() -> None:
    a, b = Subscription.of("T", "a", version=1), Subscription.of("T", "b || c", version=2)
    assert a.merged(b).tags == {"a", "b", "c"}
    assert a.merged(b).version == 2
    assert a.merged(b).tag_bytes == {b"a", b"b", b"c"}
    assert a.merged(Subscription.of("T", "*", version=3)).tags is None
    sql = Subscription.of("T", sql="x = 1", version=1)
    assert sql.merged(Subscription.of("T", sql="x = 1", version=2)) == sql
    for other in (a, Subscription.of("T", sql="x = 2", version=1)):
        with pytest.raises(BadFilter):
            sql.merged(other)
