"""New messages of a topic as server-sent events."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import StreamingResponse

from penstock.client.received_message import ReceivedMessage
from penstock.console.endpoints import ApiCall, endpoint
from penstock.console.messages.message_json import message_row
from penstock.console.messages.search_text import SearchText, parse_search
from penstock.errors import InvalidParameter, PenstockError

EVERY_S = 0.1
"""Messages are sent in batches at this interval."""
BATCH_MAX = 50
"""Messages of one batch; more are counted and left out."""
ALIVE_S = 10.0


@endpoint(
    "GET",
    "/tail",
    parameters={"topic": "the topic", "q": "filters of the search box: tag, sql, body, key"},
)
async def tail(call: ApiCall) -> object:
    """New messages as they arrive (text/event-stream).

    An event `messages` has `rows` and `left_out`, the number of messages that were too many to
    show. An event `problem` ends the stream. It also ends with the session.
    """
    wanted = parse_search(call.text("q"), call.console.now_ms())
    topic = wanted.topic or call.text("topic")
    if not topic:
        raise InvalidParameter("choose a topic")
    await call.admin.route(topic)  # an unknown topic is an error, not an empty stream
    return StreamingResponse(
        _events(call, topic, wanted),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(call: ApiCall, topic: str, wanted: SearchText) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[ReceivedMessage | PenstockError] = asyncio.Queue()
    reader = asyncio.create_task(_read(call, topic, wanted, waiting))
    yield _event("ready", {"topic": topic})
    said = loop.time()
    try:
        while call.is_allowed():
            rows: list[dict[str, object]] = []
            left_out = 0
            problem: PenstockError | None = None
            with contextlib.suppress(TimeoutError):
                item = await asyncio.wait_for(waiting.get(), EVERY_S * 5)
                items = [item]
                await asyncio.sleep(EVERY_S)
                while not waiting.empty():
                    items.append(waiting.get_nowait())
                for one in items:
                    if isinstance(one, PenstockError):
                        problem = one
                    elif len(rows) < BATCH_MAX:
                        rows.append(message_row(one))
                    else:
                        left_out += 1
            if rows:
                yield _event("messages", {"rows": rows, "left_out": left_out})
                said = loop.time()
            if problem is not None:
                yield _event("problem", {"message": problem.message, "hint": problem.hint})
                return
            if loop.time() - said > ALIVE_S:
                yield b": alive\n\n"
                said = loop.time()
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _read(
    call: ApiCall,
    topic: str,
    wanted: SearchText,
    waiting: "asyncio.Queue[ReceivedMessage | PenstockError]",
) -> None:
    try:
        async with contextlib.aclosing(
            call.admin.follow(topic, tags=" || ".join(wanted.tags) or "*", sql=wanted.sql or None)
        ) as messages:
            async for message in messages:
                if _matches(message, wanted):
                    waiting.put_nowait(message)
    except PenstockError as error:
        waiting.put_nowait(error)


def _matches(message: ReceivedMessage, wanted: SearchText) -> bool:
    if wanted.key and wanted.key not in message.keys:
        return False
    return not wanted.body or wanted.body.encode() in message.body


def _event(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
