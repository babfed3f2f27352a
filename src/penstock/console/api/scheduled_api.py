"""Scheduled messages: delay levels and timers; recall."""

from penstock.console.endpoints import ApiCall, endpoint
from penstock.console.security.accounts import Role

SHOWN_MAX = 500
SCAN_MAX = 1_000
"""Records that one request reads at each broker."""


@endpoint("GET", "/scheduled", parameters={"topic": "only messages to this topic"})
async def scheduled(call: ApiCall) -> object:
    """Messages that wait for delivery, by delivery time; `partial` says what is missing."""
    found = await call.admin.scheduled(count_max=SHOWN_MAX, scan_max=SCAN_MAX)
    topic = call.text("topic")
    return {
        "rows": [
            {
                "topic": one.topic,
                "id": one.message_id,
                "keys": list(one.keys),
                "tags": one.tags,
                "deliver_ms": one.deliver_ms,
                "store_ms": one.store_ms,
                "broker": one.broker_name,
                "level": one.level,
                "recall_handle": one.recall_handle,
            }
            for one in found.messages
            if topic in ("", one.topic)
        ],
        "by_level": {str(level): count for level, count in sorted(found.by_level.items())},
        "by_topic": found.by_topic,
        "partial": list(found.partial),
        "unreachable": list(found.unreachable),
    }


@endpoint(
    "POST", "/scheduled/recall", Role.OPERATE, body={"handle": "the recall_handle of the message"}
)
async def recall(call: ApiCall) -> object:
    """Cancel a timer message. Messages of delay levels can't be recalled."""
    return {"id": await call.admin.recall(call.given("handle", str))}
