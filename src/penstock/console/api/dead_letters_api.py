"""Dead letters: groups that have some, their messages, resending them; jobs and their reports."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from penstock.client.admin.admin_resend import origin_topic
from penstock.client.admin.admin_values import MessagePage, TopicKind
from penstock.client.diagnosis.exported_message import exported_with_topics
from penstock.client.diagnosis.resending import plan_resend
from penstock.client.received_message import ReceivedMessage
from penstock.console.api.overview_api import first_snapshot
from penstock.console.endpoints import ApiCall, ApiError, endpoint
from penstock.console.messages.message_export import (
    PAGE_SIZE,
    end_of_export,
    export_pages,
    export_response,
)
from penstock.console.messages.message_json import message_row
from penstock.console.messages.resends import plan_json, start_resend
from penstock.console.messages.resume_token import decode_resume, encode_resume
from penstock.console.security.accounts import Role
from penstock.errors import InvalidParameter
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
)

SELECTED_MAX = 10_000
RATE_DEFAULT = 50.0
RATE_MAX = 1_000.0


@endpoint("GET", "/dead-letters")
async def groups(call: ApiCall) -> object:
    """The groups that have a dead letter topic, with the number of messages in it."""
    await first_snapshot(call)
    at = call.console.watch.snapshot
    rows: list[dict[str, Any]] = []
    for name, info in at.topics.items():
        if info.kind is not TopicKind.DLQ:
            continue
        figures = at.topic_figures.get(name)
        rows.append(
            {
                "group": name.removeprefix(DLQ_TOPIC_PREFIX),
                "topic": name,
                "messages": figures.messages if figures else None,
                "last_ms": figures.last_ms if figures else None,
                "rate_in": figures.rate_in if figures else None,
            }
        )
    rows.sort(key=lambda row: (-(row["messages"] or 0), row["group"]))
    return {"rows": rows, "ready": call.console.watch.updated.is_set(), "at_ms": at.at_ms or None}


@endpoint(
    "GET",
    "/dead-letters/{group}",
    parameters={
        "since": "stored since this time",
        "until": "stored until this time",
        "size": "messages, up to 200",
        "resume": "the `resume` of the page before",
    },
)
async def messages(call: ApiCall) -> object:
    """The dead letters of a group, the newest first."""
    page = await call.admin.dead_letters(
        call.path("group"),
        since=call.time("since"),
        until=call.time("until"),
        newest_first=True,
        count_max=call.number("size", 50, least=1, most=200),
        resume=decode_resume(call.text("resume")),
    )
    return {
        "rows": [_row(message) for message in page.messages],
        "resume": encode_resume(dict(page.resume) if page.resume else None),
        "complete": page.resume is None,
    }


@endpoint(
    "GET",
    "/dead-letters/{group}/export",
    parameters={"since": "stored since this time", "until": "stored until this time"},
)
async def export(call: ApiCall) -> object:
    """All dead letters of a group, the oldest first, with the fields of `penstock dlq export`.

    The response is streamed, without a limit (application/x-ndjson). If a server fails on the way,
    the response breaks off.
    """
    lines = await export_pages(call, _pages(call, call.path("group")), exported_with_topics)
    return export_response(f"dead-letters-{call.path('group')}", lines)


async def _pages(call: ApiCall, group: str) -> AsyncIterator[MessagePage]:
    since, until = call.time("since"), end_of_export(call, call.time("until"))
    resume: Mapping[MessageQueue, int] | None = None
    while True:
        page = await call.admin.dead_letters(
            group, since=since, until=until, count_max=PAGE_SIZE, resume=resume
        )
        yield page
        resume = page.resume
        if resume is None:
            return


@endpoint(
    "POST",
    "/dead-letters/{group}/resend",
    Role.OPERATE,
    body={
        "messages": "list of {broker, queue, offset}, or `all`",
        "to": "group (its members only) or topic (all groups of the topic)",
        "rate": "messages per second, up to 1000; 50 by default",
        "dry_run": "true: only report what would be sent",
    },
)
async def resend(call: ApiCall) -> object:
    """Send dead letters again, as a job with a report. The dead letters stay in their topic."""
    group, to = call.path("group"), _to(call)
    rate: Any = call.body.get("rate", RATE_DEFAULT)
    if not isinstance(rate, int | float) or not 0 < rate <= RATE_MAX:
        raise InvalidParameter(f"rate must be above 0 and at most {RATE_MAX:.0f}")
    plan = await plan_resend(
        call.admin, await _chosen(call, group), group=group if to == "group" else None
    )
    if call.given("dry_run", bool, False):
        return {**plan_json(plan), "seconds": len(plan.items) / rate}
    return start_resend(call, plan, f"dead letters of {group}", rate).json()


@endpoint("GET", "/jobs/{id}")
async def job(call: ApiCall) -> object:
    """The progress and the report of a job."""
    found = call.console.jobs.find(call.path("id"))
    if found is None:
        raise ApiError(404, "this job is unknown", "the console may have been restarted")
    return found.json()


@endpoint("DELETE", "/jobs/{id}", Role.OPERATE)
async def cancel(call: ApiCall) -> object:
    """Stop a job after the current message."""
    found = call.console.jobs.find(call.path("id"))
    if found is None:
        raise ApiError(404, "this job is unknown", "the console may have been restarted")
    call.console.jobs.cancel(found)
    return found.json()


def _to(call: ApiCall) -> Literal["group", "topic"]:
    to = call.given("to", str, "group")
    if to not in ("group", "topic"):
        raise InvalidParameter(f"to: {to[:40]!r} is not possible", hint="use group or topic")
    return "group" if to == "group" else "topic"


async def _chosen(call: ApiCall, group: str) -> list[ReceivedMessage]:
    wanted = call.body.get("messages")
    if wanted == "all":
        found: list[ReceivedMessage] = []
        resume = None
        while len(found) < SELECTED_MAX:
            page = await call.admin.dead_letters(group, count_max=500, resume=resume)
            found += page.messages
            resume = page.resume
            if resume is None:
                return found
        raise InvalidParameter(
            f"there are more than {SELECTED_MAX:,} dead letters", hint="select some of them"
        )
    if not isinstance(wanted, list) or not wanted or len(wanted) > SELECTED_MAX:
        raise InvalidParameter(
            "messages must be a list of {broker, queue, offset}, or all",
            hint=f"select 1 to {SELECTED_MAX:,} messages",
        )
    topic = DLQ_TOPIC_PREFIX + group
    chosen = []
    for row in wanted:
        if not isinstance(row, dict) or not {"broker", "queue", "offset"} <= set(row):
            raise InvalidParameter("messages must be a list of {broker, queue, offset}")
        queue = MessageQueue(topic, str(row["broker"]), int(row["queue"]))
        message = await call.admin.message_at(queue, int(row["offset"]))
        if message is None:
            raise InvalidParameter(
                f"there is no dead letter at offset {row['offset']} of queue {row['queue']}",
                hint="load the list again",
            )
        chosen.append(message)
    return chosen


def _row(message: ReceivedMessage) -> dict[str, object]:
    return {
        **message_row(message),
        "origin_topic": origin_topic(message),
        "origin_id": message.properties.get(PROPERTY_DLQ_ORIGIN_MESSAGE_ID),
    }
