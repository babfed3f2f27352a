"""Changes of topics and groups: only what is given, with a preview of what is removed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.client.admin.async_admin import (
    GroupInfo,
    QueueState,
    TopicDescription,
    TopicInfo,
    TopicKind,
    TopicSettings,
)
from penstock.wire.bodies.client_bodies import MessageQueue
from tests.unit.console.console_kit import GROUP_SETTINGS, TestedConsole

WIDE = TopicSettings(8, 4, 6, order=False, attributes={"message.type": "NORMAL"})
NARROW = TopicSettings(4, 4, 4, order=False, attributes={"message.type": "NORMAL"})


@pytest.fixture
def console(tmp_path: Path) -> Iterator[TestedConsole]:
    with TestedConsole(tmp_path) as found:
        yield found


def describe(console: TestedConsole, **brokers: TopicSettings) -> None:
    """The topic orders on these brokers, with 10 messages in each queue to read."""
    queues = [
        QueueState(MessageQueue("orders", broker, number), 5, 15, None)
        for broker, settings in brokers.items()
        for number in range(max(settings.read_queues, settings.write_queues))
    ]
    info = TopicInfo("orders", TopicKind.NORMAL, brokers)
    console.admin.answers["describe_topic"] = TopicDescription(info, {}, tuple(queues), (), 0.0, ())


def preview(console: TestedConsole, path: str, **wanted: object) -> dict[str, Any]:
    answer = console.send("POST", f"{path}/preview", wanted)
    assert answer.status_code == 200, answer.text
    assert [name for name, _, _ in console.admin.calls if name.startswith("update")] == []
    return {one["broker"]: one for one in answer.json()["brokers"]} | {"": answer.json()["removes"]}


def test_only_what_is_given_changes(console: TestedConsole) -> None:
    describe(console, **{"broker-a": WIDE})
    found = preview(console, "/topics/orders", message_type="FIFO")
    assert found["broker-a"]["changes"] == [
        {"setting": "message_type", "before": "NORMAL", "after": "FIFO"}
    ]
    assert found[""] is False
    assert console.send("PUT", "/topics/orders", {"message_type": "FIFO"}).status_code == 200
    assert console.admin.calls[-1] == (
        "update_topic", ("orders",), {"attributes": {"message.type": "FIFO"}},
    )  # fmt: skip
    assert console.send("PUT", "/topics/orders", {}).status_code == 400


def test_a_preview_says_what_can_not_be_read_at_each_broker(console: TestedConsole) -> None:
    describe(console, **{"broker-a": WIDE, "broker-b": NARROW})
    found = preview(console, "/topics/orders", read_queues=4)
    assert found["broker-a"]["unreadable"] == [
        {"queue": number, "messages": 10} for number in range(4, 8)
    ]
    assert found["broker-a"]["losses"] == [
        "40 messages on broker-a can't be read afterwards",
        "4 read queues are removed from broker-a",
    ]
    assert found["broker-b"]["changes"] == found["broker-b"]["losses"] == []
    assert found[""] is True


@pytest.mark.parametrize(
    ("wanted", "losses"),
    [
        ({"perm": "r"}, ["producers can't send to broker-a"]),
        (
            {"perm": "w"},
            [
                "80 messages on broker-a can't be read afterwards",
                "consumers receive nothing from broker-a",
            ],
        ),
        ({"write_queues": 10}, ["what producers send to queues 8 to 9 of broker-a can't be read"]),
        ({"write_queues": 2, "read_queues": 9}, []),
        ({"queues": 8}, []),
        ({"order": True}, []),
    ],
)
def test_what_a_change_of_a_topic_removes(
    console: TestedConsole, wanted: dict[str, object], losses: list[str]
) -> None:
    describe(console, **{"broker-a": WIDE})
    found = preview(console, "/topics/orders", **wanted)
    assert found["broker-a"]["losses"] == losses
    assert console.send("PUT", "/topics/orders", wanted).status_code == (409 if losses else 200)
    assert console.send("PUT", "/topics/orders", {**wanted, "confirm": True}).status_code == 200


def test_a_permission_that_does_not_exist_is_refused(console: TestedConsole) -> None:
    describe(console, **{"broker-a": WIDE})
    assert console.send("POST", "/topics/orders/preview", {"perm": "x"}).status_code == 400


def test_a_group_that_is_disabled_needs_a_confirmation(console: TestedConsole) -> None:
    brokers = {
        "broker-a": GROUP_SETTINGS, "broker-b": replace(GROUP_SETTINGS, consume_enabled=False)
    }  # fmt: skip
    console.admin.answers["groups"] = [GroupInfo("billing", False, brokers)]
    found = preview(console, "/groups/billing", consume_enabled=False)
    assert found["broker-a"]["changes"] == [
        {"setting": "consume_enabled", "before": True, "after": False}
    ]
    assert found["broker-a"]["losses"] == ["members receive nothing from broker-a"]
    assert found["broker-b"]["changes"] == []
    refused = console.send("PUT", "/groups/billing", {"consume_enabled": False})
    assert refused.status_code == 409
    assert "members receive nothing from broker-a" in refused.json()["error"]["message"]
    given = {"consume_enabled": False, "confirm": True}
    assert console.send("PUT", "/groups/billing", given).status_code == 200
    assert console.admin.calls[-1] == ("update_group", ("billing",), {"consume_enabled": False})
    assert console.send("PUT", "/groups/billing", {"retries_max": 3}).status_code == 200


def test_a_group_that_does_not_exist_is_named_with_similar_ones(console: TestedConsole) -> None:
    console.admin.answers["groups"] = [GroupInfo("billing", False, {})]
    answer = console.send("PUT", "/groups/biling", {"retries_max": 3})
    assert answer.status_code == 404
    assert "similar groups: billing" in answer.json()["error"]["message"]
