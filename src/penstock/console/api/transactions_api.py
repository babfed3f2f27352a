"""Transactions: half messages that are neither committed nor rolled back."""

from penstock.console.endpoints import ApiCall, endpoint

SHOWN_MAX = 500
SCAN_MAX = 1_000


@endpoint("GET", "/transactions")
async def transactions(call: ApiCall) -> object:
    """Open half messages, the oldest first, and the checks so far; `partial` says what is missing.

    `producers` has the number of connected producers of each group; they are asked for the outcome.
    """
    found = await call.admin.open_transactions(count_max=SHOWN_MAX, scan_max=SCAN_MAX)
    groups = sorted({one.group for one in found.messages})
    connected = await call.admin.for_each(groups, call.admin.producers)
    return {
        "rows": [
            {
                "topic": one.topic,
                "group": one.group,
                "id": one.message_id,
                "keys": list(one.keys),
                "tags": one.tags,
                "born_ms": one.born_ms,
                "store_ms": one.store_ms,
                "checks": one.checks,
                "broker": one.broker_name,
            }
            for one in found.messages
        ],
        "producers": {name: len(members) for name, members in zip(groups, connected, strict=True)},
        "partial": list(found.partial),
        "unreachable": list(found.unreachable),
    }
