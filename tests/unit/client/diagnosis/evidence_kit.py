"""Evidence for the decision tests: a message that a healthy group has consumed, and changes."""

from dataclasses import replace
from typing import Any

from penstock.client.admin.async_admin import GroupMembers, GroupSettings, Member
from penstock.client.consumer.subscription import Subscription
from penstock.client.diagnosis.message_evidence import (
    MemberState,
    MessageEvidence,
    QueueStateOfMember,
    RouteEvidence,
)
from penstock.client.diagnosis.values import MessagePlace
from penstock.wire.bodies.admin_bodies import ProcessQueueInfo
from penstock.wire.bodies.client_bodies import MessageQueue

NOW = 1_800_000_000_000
QUEUE = MessageQueue("orders", "broker-a", 2)
SETTINGS = GroupSettings(
    consume_enabled=True,
    broadcast_enabled=True,
    orderly=False,
    from_min_enabled=True,
    retries_max=16,
    retry_queues=1,
    consume_timeout_minutes=15,
    notify_enabled=True,
    broker_id=0,
    broker_id_when_slow=1,
    attributes={},
)


def place(topic: str = "orders", offset: int = 10, **changes: Any) -> MessagePlace:
    values: dict[str, Any] = {
        "topic": topic,
        "broker": "broker-a",
        "queue_id": 2,
        "offset": offset,
        "store_ms": NOW - 60_000,
        "born_ms": NOW - 60_001,
        "message_id": "ID1",
        "offset_id": "OFF1",
        "unique_id": "ID1",
        "tags": "new",
    }
    return MessagePlace(**{**values, **changes})


def members(*ids: str, expression: str = "*", kind: str = "TAG", **changes: Any) -> GroupMembers:
    found = GroupMembers(
        group="billing",
        members=tuple(Member(i, "1.2.3.4:5", "PYTHON", 493, "5.4.0", ("broker-a",)) for i in ids),
        subscriptions=(Subscription("orders", expression, kind),) if ids else (),
        model="CLUSTERING" if ids else None,
        consume_type="CONSUME_PASSIVELY" if ids else None,
        start_at=None,
    )
    return replace(found, **changes)


def cached(low: int, high: int, count: int | None = None, **more: Any) -> ProcessQueueInfo:
    return ProcessQueueInfo(
        cached_msg_min_offset=low,
        cached_msg_max_offset=high,
        cached_msg_count=high - low + 1 if count is None else count,
        **more,
    )


def state(
    client_id: str = "m1",
    info: ProcessQueueInfo | None = None,
    *,
    expression: str | None = "*",
    owns: bool = True,
    **more: Any,
) -> MemberState:
    reported = {k: more.pop(k) for k in ("in_work_since_ms", "paused", "failure") if k in more}
    queue = QueueStateOfMember(info if info is not None else ProcessQueueInfo(), **reported)
    return MemberState(
        client_id,
        subscriptions=() if expression is None else (Subscription("orders", expression),),
        queues={QUEUE: queue} if owns else {},
        started_ms=NOW - 3_600_000,
        **more,
    )


def evidence(**changes: Any) -> MessageEvidence:
    """A consumed message; `changes` replace what was gathered."""
    values: dict[str, Any] = {
        "wanted": "ID1",
        "group": "billing",
        "topic": "orders",
        "now_ms": NOW,
        "how": "searched the index of orders",
        "copies": 1,
        "message": place(),
        "route": RouteEvidence(("broker-a",), readable=True, read_queues=4, master=True),
        "settings": {"broker-a": SETTINGS},
        "members": members("m1"),
        "states": (state(),),
        "committed": 11,
        "max_offset": 20,
    }
    return MessageEvidence(**{**values, **changes})
