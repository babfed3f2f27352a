"""Messages: search, browse, one message with its trace and its verdict for each group, resend."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from penstock.client.admin.admin_index import FOUND_MAX
from penstock.client.admin.admin_values import MessagePage
from penstock.client.diagnosis.explain import explain_message
from penstock.client.diagnosis.exported_message import exported_message
from penstock.client.diagnosis.resending import plan_resend
from penstock.client.diagnosis.search import SearchResult, find_messages
from penstock.client.diagnosis.values import Explanation, MessagePlace
from penstock.client.received_message import ReceivedMessage
from penstock.console.endpoints import ApiCall, ApiError, endpoint
from penstock.console.messages.facts import facts_json
from penstock.console.messages.message_export import (
    PAGE_SIZE,
    end_of_export,
    export_lines,
    export_pages,
    export_response,
    header_text,
)
from penstock.console.messages.message_json import (
    contains,
    message_detail,
    message_row,
)
from penstock.console.messages.resends import plan_json, start_resend
from penstock.console.messages.resume_token import decode_resume, encode_resume
from penstock.console.messages.search_text import SearchText, parse_search
from penstock.console.messages.trace_json import read_trace
from penstock.console.security.accounts import Role
from penstock.errors import InvalidParameter
from penstock.wire.bodies.client_bodies import MessageQueue

SIZE = 50
SIZE_MAX = 200
SCAN_MESSAGES_MAX = 5_000
"""Messages that one request reads when it looks for a text in the bodies."""
SCAN_S = 3.0
GROUPS_MAX = 32
"""Groups whose verdict one request tells."""


@endpoint(
    "GET",
    "/messages",
    parameters={
        "topic": "the topic; not needed for an id or a key",
        "q": "the search box, as in `tag:paid since:-1h body:refused`",
        "order": "newest (default) or oldest",
        "size": "messages, up to 200",
        "resume": "the `resume` of the page before",
    },
)
async def search(call: ApiCall) -> object:
    """Messages by id, key, place, time, tag, SQL92 filter or text in the body.

    `scanned` is the number of messages that were read for a text in the body. `complete` is false
    if there is more to read; pass `resume` to continue. `notes` say what could not be searched.
    """
    wanted = parse_search(call.text("q"), call.console.now_ms())
    topic = wanted.topic or call.text("topic")
    size = call.number("size", SIZE, least=1, most=SIZE_MAX)
    if wanted.reference or wanted.key:
        return await _find(call, wanted, topic, size)
    if not topic:
        raise InvalidParameter(
            "choose a topic, or search for an id or a key", hint="an id or a key needs no topic"
        )
    resume = decode_resume(call.text("resume"))
    if wanted.body:
        return await _scan(call, wanted, topic, size, resume)
    page = await _browse(call, wanted, topic, size, resume)
    return {
        "rows": [message_row(message) for message in page.messages],
        "resume": encode_resume(dict(page.resume) if page.resume else None),
        "complete": page.resume is None,
        "scanned": len(page.messages),
        "notes": [],
    }


@endpoint(
    "GET",
    "/messages/export",
    parameters={
        "topic": "the topic; not needed for an id or a key",
        "q": "the search box, as in `tag:paid since:-1h body:refused`",
        "order": "newest (default) or oldest",
    },
)
async def export(call: ApiCall) -> object:
    """All messages of a search, as lines of JSON with the fields of `penstock tail --json`.

    The response is streamed, without a limit (application/x-ndjson). If a server fails on the way,
    it breaks off. A search for a key finds the newest 64 messages of each broker; the header
    `X-Penstock-Partial` says what is missing. A message that arrives meanwhile may be included.
    """
    wanted = parse_search(call.text("q"), call.console.now_ms())
    topic = wanted.topic or call.text("topic")
    name = topic or wanted.key or wanted.reference
    if wanted.reference or wanted.key:
        found = await _found(call, wanted, topic, FOUND_MAX)
        rows = export_lines(found.messages, exported_message)
        response = export_response(name, _once(rows))
        if found.partial:
            response.headers["X-Penstock-Partial"] = header_text("; ".join(found.partial))
        return response
    if not topic:
        raise InvalidParameter(
            "choose a topic, or search for an id or a key", hint="an id or a key needs no topic"
        )
    if call.text("order", "newest") != "newest" or wanted.offset is not None:
        wanted = replace(wanted, until=end_of_export(call, wanted.until))
    return export_response(
        name, await export_pages(call, _pages(call, wanted, topic), exported_message)
    )


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _pages(call: ApiCall, wanted: SearchText, topic: str) -> AsyncIterator[MessagePage]:
    """All pages of a search, without the messages whose body does not contain the text."""
    needle = wanted.body.encode()
    resume: Mapping[MessageQueue, int] | None = None
    while True:
        page = await _browse(call, wanted, topic, PAGE_SIZE, resume)
        found = [message for message in page.messages if not needle or contains(message, needle)]
        yield MessagePage(tuple(found), page.resume)
        resume = page.resume
        if resume is None:
            return


async def _browse(
    call: ApiCall,
    wanted: SearchText,
    topic: str,
    size: int,
    resume: Mapping[MessageQueue, int] | None,
) -> MessagePage:
    queue = None
    if wanted.queue is not None:
        queue = MessageQueue(topic, await _broker_of(call, wanted, topic), wanted.queue)
    newest_first = call.text("order", "newest") == "newest"
    if wanted.offset is not None and resume is None:
        if queue is None:
            raise InvalidParameter(
                "an offset needs a queue", hint="as in queue:broker-a/3 offset:120"
            )
        resume, newest_first = {queue: wanted.offset}, False
    elif wanted.offset is not None:
        newest_first = False
    return await call.admin.browse(
        topic,
        since=wanted.since,
        until=wanted.until,
        tags=" || ".join(wanted.tags) or "*",
        sql=wanted.sql or None,
        queue=queue,
        newest_first=newest_first,
        count_max=size,
        resume=resume,
    )


async def _broker_of(call: ApiCall, wanted: SearchText, topic: str) -> str:
    if wanted.broker:
        return wanted.broker
    brokers = (await call.admin.route(topic)).brokers
    if len(brokers) != 1:
        raise InvalidParameter(
            f"{topic} is on several brokers: {', '.join(brokers)}",
            hint=f"name one, as in queue:{brokers[0]}/{wanted.queue}",
        )
    return brokers[0]


async def _scan(
    call: ApiCall,
    wanted: SearchText,
    topic: str,
    size: int,
    resume: Mapping[MessageQueue, int] | None,
) -> object:
    """Messages whose body contains a text: reads the topic within a budget."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SCAN_S
    needle = wanted.body.encode()
    found: list[ReceivedMessage] = []
    scanned = 0
    first = True
    while first or (
        resume and len(found) < size and scanned < SCAN_MESSAGES_MAX and loop.time() < deadline
    ):
        page = await _browse(call, wanted, topic, SIZE_MAX, resume)
        first = False
        scanned += len(page.messages)
        found += [message for message in page.messages if contains(message, needle)]
        resume = dict(page.resume) if page.resume else None
    return {
        "rows": [message_row(message) for message in found],
        "resume": encode_resume(dict(resume) if resume else None),
        "complete": resume is None,
        "scanned": scanned,
        "notes": [],
    }


async def _found(call: ApiCall, wanted: SearchText, topic: str, count_max: int) -> SearchResult:
    """Messages by id, key or place."""
    return await find_messages(
        call.admin,
        wanted.reference or None,
        topic=topic or None,
        key=wanted.key or None,
        since=wanted.since,
        until=wanted.until,
        count_max=count_max,
    )


async def _find(call: ApiCall, wanted: SearchText, topic: str, size: int) -> object:
    found = await _found(call, wanted, topic, size)
    return {
        "rows": [message_row(message) for message in reversed(found.messages)],
        "resume": None,
        "complete": not found.is_partial,
        "scanned": None,
        "how": found.how,
        "notes": list(found.partial),
    }


@endpoint("GET", "/message/{topic}/{broker}/{queue}/{offset}")
async def message(call: ApiCall) -> object:
    """One message: body in all suitable decoders, properties, position in its queue."""
    return message_detail(await message_at(call))


@endpoint("GET", "/message/{topic}/{broker}/{queue}/{offset}/export")
async def export_one(call: ApiCall) -> object:
    """One message with its whole body, with the fields of `penstock tail --json`."""
    found = await message_at(call)
    return export_response(found.message_id, _once(export_lines([found], exported_message)))


async def message_at(call: ApiCall) -> ReceivedMessage:
    """The message that the path names; raises ApiError."""
    queue, offset = call.path("queue"), call.path("offset")
    if not queue.isdecimal() or not offset.isdecimal():
        raise InvalidParameter("queue and offset must be whole numbers")
    place = MessageQueue(call.path("topic"), call.path("broker"), int(queue))
    found = await call.admin.message_at(place, int(offset))
    if found is None:
        raise ApiError(
            404,
            f"there is no message at offset {offset} of queue {queue} of {place.topic} "
            f"at {place.broker_name}",
            "it may have been deleted because of its age",
        )
    return found


@endpoint("GET", "/message/{topic}/{broker}/{queue}/{offset}/trace")
async def trace(call: ApiCall) -> object:
    """The trace of a message as events by time; `available` is false without a trace topic."""
    return await read_trace(call.admin, await message_at(call))


@endpoint("GET", "/message/{topic}/{broker}/{queue}/{offset}/groups")
async def groups(call: ApiCall) -> object:
    """For each group of the topic, whether it has consumed the message, and why not."""
    found = await message_at(call)
    names = await call.admin.groups_of_topic(found.topic)
    place = MessagePlace.of(found).text
    explained = await call.admin.for_each(
        names[:GROUPS_MAX], lambda name: explain_message(call.admin, place, name)
    )
    return {
        "rows": [_verdict(one) for one in explained],
        "left_out": max(len(names) - GROUPS_MAX, 0),
    }


@endpoint("GET", "/message/{topic}/{broker}/{queue}/{offset}/groups/{group}")
async def explain(call: ApiCall) -> object:
    """Why a group has consumed a message, or has not: the facts, the verdict, the next command."""
    place = MessagePlace.of(await message_at(call)).text
    explained = await explain_message(call.admin, place, call.path("group"))
    return {**_verdict(explained), "facts": facts_json(explained.facts)}


def _verdict(one: Explanation) -> dict[str, object]:
    return {
        "group": one.group,
        "verdict": one.verdict.value,
        "text": one.text,
        "command": one.command,
        "partial": list(one.partial),
    }


@endpoint(
    "POST",
    "/message/{topic}/{broker}/{queue}/{offset}/consume",
    Role.OPERATE,
    body={"group": "the group", "client_id": "a member; any if it is missing"},
)
async def consume(call: ApiCall) -> object:
    """Let a connected consumer of a group handle the message now, and return the result."""
    found = await message_at(call)
    client_id: Any = call.body.get("client_id")
    result = await call.admin.consume_directly(
        call.given("group", str), found, client_id if client_id else None
    )
    return {
        "client_id": result.client_id,
        "result": result.result,
        "success": result.is_success,
        "remark": result.remark,
        "spent_ms": result.spent_ms,
    }


@endpoint(
    "POST",
    "/message/{topic}/{broker}/{queue}/{offset}/resend",
    Role.OPERATE,
    body={
        "group": "the only group that receives the copy; all groups of the topic if it is missing",
        "dry_run": "true: only report what would be sent",
    },
)
async def resend(call: ApiCall) -> object:
    """Send a copy of the message again, as a job with a report."""
    group: Any = call.body.get("group") or None
    plan = await plan_resend(call.admin, [await message_at(call)], group=group)
    if call.given("dry_run", bool, False):
        return plan_json(plan)
    if plan.skipped:
        raise ApiError(409, f"the message is not sent again: {plan.skipped[0].reason}")
    return start_resend(call, plan, "message", 1.0).json()
