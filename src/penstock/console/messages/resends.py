"""Resends as jobs: what would be sent, and the report of what was sent."""

from penstock.client.diagnosis.resending import ResendItem, ResendPlan
from penstock.client.diagnosis.values import MessagePlace
from penstock.console.endpoints import ApiCall
from penstock.console.jobs import Job

PLAN_ROWS_MAX = 200


def plan_json(plan: ResendPlan) -> dict[str, object]:
    """The plan, with its first messages."""
    return {
        "count": len(plan.items),
        "bytes": plan.bytes,
        "targets": dict(plan.targets),
        "warnings": list(plan.warnings),
        "rows": [_row(item.place, item.target) for item in plan.items[:PLAN_ROWS_MAX]],
        "skipped": [
            {**_row(one.place, None), "reason": one.reason} for one in plan.skipped[:PLAN_ROWS_MAX]
        ],
    }


def start_resend(call: ApiCall, plan: ResendPlan, what: str, rate: float) -> Job:
    """Send the messages of a plan in the background."""

    async def send(item: ResendItem) -> dict[str, object]:
        receipt = await call.admin.resend_message(item.message, group=plan.group)
        return {
            "id": item.message.message_id,
            "topic": receipt.queue.topic,
            "broker": receipt.queue.broker_name,
            "queue": receipt.queue.queue_id,
            "offset": receipt.queue_offset,
        }

    return call.console.jobs.start(f"{len(plan.items)} {what}", plan.items, send, rate=rate)


def _row(place: MessagePlace, target: str | None) -> dict[str, object]:
    return {
        "id": place.message_id,
        "keys": list(place.keys),
        "from": place.text,
        "target": target,
    }
