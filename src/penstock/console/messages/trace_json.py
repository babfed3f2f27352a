"""The trace of one message: what its producer and its consumers recorded."""

from collections.abc import Iterable

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.client_options import TRACE_TOPIC
from penstock.client.received_message import ReceivedMessage
from penstock.client.trace.trace_records import ConsumeCode, TraceRecord, decode_traces
from penstock.errors import NoRoute, PenstockError

EVENTS_MAX = 200


async def read_trace(admin: AsyncAdmin, message: ReceivedMessage) -> dict[str, object]:
    """The events of a message by time. Brokers index traces by the id of the message."""
    try:
        found = await admin.messages_by_key(TRACE_TOPIC, message.message_id, count_max=64)
    except NoRoute:
        return {"available": False, "events": [], "problem": None}
    except PenstockError as error:
        return {"available": None, "events": [], "problem": error.remark()}
    records = [
        record
        for stored in found
        for record in decode_traces(stored.body)
        if record.message_id == message.message_id
    ]
    events = sorted(_events(records), key=lambda event: event["time_ms"] or 0)  # type: ignore[arg-type,return-value]
    return {"available": True, "events": events[:EVENTS_MAX], "problem": None}


def _events(records: Iterable[TraceRecord]) -> Iterable[dict[str, object]]:
    for record in records:
        yield {
            "type": record.type,
            "time_ms": record.time_ms,
            "group": record.group,
            "client": record.client_host,
            "cost_ms": record.cost_ms,
            "success": record.success,
            "result": _result(record),
        }


def _result(record: TraceRecord) -> str | None:
    code = record.code
    if code is None:
        return None
    try:
        return ConsumeCode(code).name.lower()
    except ValueError:
        return str(code)
