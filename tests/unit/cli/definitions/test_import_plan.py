"""What an import changes."""

import json
from typing import Any

import msgspec
import pytest

from penstock.cli.definitions.import_plan import Item, Present, plan_import, read_definitions
from penstock.cli.schemas.definitions_output import (
    DefinedGroup,
    DefinedRule,
    DefinedTopic,
    DefinedUser,
    Definitions,
)
from penstock.cli.schemas.group_output import GroupOnBroker
from penstock.cli.schemas.topic_output import TopicOnBroker
from penstock.errors import BadSetting
from penstock.wire.bodies.cluster_bodies import UserInfo

TOPIC = TopicOnBroker(
    read_queues=8, write_queues=8, perm="rw", order=False, type="UNSPECIFIED", attributes={}
)
GROUP = GroupOnBroker(
    consume_enabled=True, broadcast_enabled=True, orderly=False, from_min_enabled=True,
    retries_max=16, retry_queues=1, consume_timeout_minutes=15, notify_enabled=True, broker_id=0,
    broker_id_when_slow=1, attributes={},
)  # fmt: skip


def definitions(**more: Any) -> Definitions:
    empty: dict[str, Any] = {
        "format": "penstock-definitions", "version": 1, "exported_ms": 1, "nameservers": ["n:1"],
        "brokers": ["a", "b"], "topics": [], "groups": [], "users": [], "rules": [], "kv": {},
        "offsets": [], "notes": [],
    }  # fmt: skip
    return Definitions(**{**empty, **more})


def present(*brokers: str, **more: Any) -> Present:
    return Present(**{"brokers": brokers or ("a", "b"), "topics": {}, "groups": {}, **more})


def shown(items: list[Item]) -> list[tuple[str, str, str]]:
    return [(item.name, item.where, item.change) for item in items]


# --- brokers


def test_known_brokers_get_what_the_file_says_and_others_the_first_settings() -> None:
    small = msgspec.structs.replace(TOPIC, read_queues=1, write_queues=1)
    wanted = definitions(topics=[DefinedTopic(topic="t", brokers={"a": small})])
    assert shown(plan_import(wanted, present("a", "b"))) == [("t", "a", "create")]
    items = plan_import(wanted, present("x", "y"))
    assert shown(items) == [("t", "x", "create"), ("t", "y", "create")]
    assert items[0].value == small
    (skipped,) = plan_import(wanted, present("b"))
    assert (skipped.change, skipped.where) == ("skip", "-")


def test_only_differences_are_changes() -> None:
    other = msgspec.structs.replace(
        TOPIC, perm="r", attributes={"message.type": "FIFO", "x": "y"}, type="FIFO"
    )
    wanted = definitions(topics=[DefinedTopic(topic="t", brokers={"a": TOPIC, "b": TOPIC})])
    changed, same = plan_import(wanted, present(topics={"t": {"a": other, "b": TOPIC}}))
    assert changed.change == "change"
    assert changed.details == "perm r → rw, attributes message.type=FIFO x=y → none"
    assert set(changed.removed) == {"message.type", "x"}
    assert same.change == "unchanged"


def test_groups() -> None:
    orderly = msgspec.structs.replace(GROUP, orderly=True, retries_max=3)
    wanted = definitions(groups=[DefinedGroup(group="g", brokers={"a": orderly})])
    (new,) = plan_import(wanted, present("a"))
    assert new.change == "create"
    assert "retries_max 3" in new.details
    (changed,) = plan_import(wanted, present("a", groups={"g": {"a": GROUP}}))
    assert changed.details == "orderly no → yes, retries_max 16 → 3"
    attributed = msgspec.structs.replace(orderly, attributes={"k": "v"})
    (same,) = plan_import(wanted, present("a", groups={"g": {"a": attributed}}))
    assert same.change == "unchanged"


# --- users and rules


def user(name: str, password: str | None = None, status: str = "enable") -> DefinedUser:
    return DefinedUser(user=name, type="Normal", status=status, password=password)


def rule(name: str, *actions: str, resource: str = "Topic:t") -> DefinedRule:
    return DefinedRule(
        user=name, policy="Custom", resource=resource, actions=list(actions), sources=[],
        decision="Allow",
    )  # fmt: skip


def test_users_without_a_password_are_skipped_with_their_rules() -> None:
    wanted = definitions(
        users=[user("new", "pw"), user("secret")], rules=[rule("new", "Pub"), rule("secret", "Sub")]
    )
    now = present(users={"h:1": {}}, rules={"h:1": []})
    assert shown(plan_import(wanted, now)) == [
        ("new", "h:1", "create"), ("secret", "h:1", "skip"),
        ("new Topic:t", "h:1", "create"), ("secret Topic:t", "h:1", "skip"),
    ]  # fmt: skip


def test_a_new_password_is_the_same_on_all_brokers() -> None:
    wanted = definitions(users=[user("one"), user("two")])
    items = plan_import(wanted, present(users={"h:1": {}, "h:2": {}}), new_passwords=True)
    passwords = {(item.name, item.value.password) for item in items}  # type: ignore[attr-defined]
    assert len(items) == 4
    assert len(passwords) == 2
    assert all(len(password) >= 24 for _, password in passwords)


def test_existing_users_and_rules_change_only_where_they_differ() -> None:
    now = present(
        users={
            "h:1": {
                "same": UserInfo(username="same", user_type="Normal", user_status="enable"),
                "off": UserInfo(username="off", user_type="Normal", user_status="disable"),
            }
        },
        rules={"h:1": [rule("same", "SUB", "pub"), rule("off", "Sub")]},
    )
    wanted = definitions(
        users=[user("same", "ignored"), user("off")],
        rules=[rule("same", "Pub", "Sub"), rule("off", "All")],
    )
    items = plan_import(wanted, now)
    assert [item.change for item in items] == ["unchanged", "change", "unchanged", "change"]
    assert items[1].details == "Normal, disable → Normal, enable"
    assert items[1].value.password is None, "passwords of existing users stay"  # type: ignore[attr-defined]


def test_without_access_control_users_are_left_out() -> None:
    assert (
        plan_import(definitions(users=[user("u", "p")], rules=[rule("u", "Pub")]), present()) == []
    )


# --- KV configuration and the file


def test_kv_without_the_order_of_topics() -> None:
    wanted = definitions(kv={"mine": {"a": "1", "b": "2"}, "ORDER_TOPIC_CONFIG": {"t": "a:8"}})
    items = plan_import(wanted, present(kv={"mine": {"a": "1", "b": "0"}}))
    assert shown(items) == [
        ("mine/a", "nameservers", "unchanged"), ("mine/b", "nameservers", "change")
    ]  # fmt: skip


def test_a_file_survives_writing_and_reading() -> None:
    wanted = definitions(topics=[DefinedTopic(topic="t", brokers={"a": TOPIC})], users=[user("u")])
    assert read_definitions(msgspec.json.encode(wanted), "f") == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a file of definitions"),
        ('{"format": "other"}', "is not a file of definitions"),
        ('{"format": "penstock-definitions", "version": 2}', "version 2 of the format"),
        ('{"format": "penstock-definitions", "version": 1}', "missing required field"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        read_definitions(text.encode(), "f")


def test_unknown_fields_of_a_later_release_are_accepted() -> None:
    data = json.loads(msgspec.json.encode(definitions()))
    assert read_definitions(json.dumps({**data, "new": 1}).encode(), "f") == definitions()
