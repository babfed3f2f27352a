"""Exports: all messages of a search as lines of JSON, streamed page by page.

Nothing is collected, so an export may be as long as the topic. If a server fails in the middle, or
the session ends, the connection is closed without the end of the response: the browser then reports
a failed download instead of keeping a file that looks complete.
"""

import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime, timedelta

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Send

from penstock.client.admin.admin_values import MessagePage
from penstock.client.received_message import ReceivedMessage
from penstock.console.endpoints import ApiCall, ApiError
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

PAGE_SIZE = 500
MARGIN = timedelta(minutes=1)

ToRow = Callable[[ReceivedMessage], dict[str, object]]


class ExportResponse(StreamingResponse):
    """A response that has no end if its lines could not be read to the end."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except (ApiError, PenstockError) as error:
            log.warning("an export broke off: %s", error.message)


def export_response(name: str, lines: AsyncIterator[bytes]) -> ExportResponse:
    """Lines of JSON as a file that the browser saves."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "messages"
    return ExportResponse(
        lines,
        media_type="application/x-ndjson",
        headers={
            "Cache-Control": "no-store",
            "Content-Disposition": f'attachment; filename="{plain}.jsonl"',
        },
    )


async def export_pages(
    call: ApiCall, pages: AsyncIterator[MessagePage], to_row: ToRow
) -> AsyncIterator[bytes]:
    """The lines of all pages; the first page is read before the response begins."""
    first = await anext(pages, None)

    async def lines() -> AsyncIterator[bytes]:
        if first is not None:
            yield export_lines(first.messages, to_row)
        async for page in pages:
            if not call.is_allowed():
                raise ApiError(401, "the session has ended")
            yield export_lines(page.messages, to_row)

    return lines()


def export_lines(messages: Iterable[ReceivedMessage], to_row: ToRow) -> bytes:
    """One line of JSON for each message."""
    return b"".join(msgspec.json.encode(to_row(message)) + b"\n" for message in messages)


def header_text(text: str) -> str:
    """A text as the value of a header."""
    return text.encode("ascii", "replace").decode().replace("\n", " ")[:1000]


def end_of_export(call: ApiCall, until: datetime | None) -> datetime:
    """The end of the time range of an export with the oldest first, which must not follow new
    messages forever. The margin is for brokers whose clocks are ahead."""
    return until or datetime.fromtimestamp(call.console.now_ms() / 1000, UTC) + MARGIN
