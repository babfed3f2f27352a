"""The traces of a message: who sent it, who received it, and with which result.

Clients write traces themselves, if they are told to, so a message without traces means nothing.
"""

from dataclasses import dataclass, replace

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.diagnosis.search import query_topics
from penstock.client.trace.trace_records import TraceRecord, decode_traces
from penstock.wire.codes import TOPIC_TRACE

TRACES_MAX = 256
"""Trace messages of one message that are read from each broker."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a message to a consumer, by its traces."""

    group: str
    time_ms: int | None
    """When the handler was called."""
    client_host: str
    attempt: int
    """The number of the redelivery; 0: the first delivery."""
    success: bool | None
    """None: there is no trace of the end."""
    cost_ms: int | None = None
    result: str | None = None
    """success, timeout, exception, nothing or failed, if the client says so."""


@dataclass(frozen=True, slots=True)
class MessageTrace:
    """All traces of a message, by time."""

    records: tuple[TraceRecord, ...]
    deliveries: tuple[Delivery, ...]
    partial: tuple[str, ...] = ()


async def trace_message(
    admin: AsyncAdmin, message_id: str, *, trace_topic: str = TOPIC_TRACE
) -> MessageTrace:
    """The traces of a message by its unique id; empty if its clients wrote none."""
    found, partial = await query_topics(
        admin, [trace_topic], message_id, count_max=TRACES_MAX, unique=False
    )
    records = []
    for message in found:
        host = message.born_host.rpartition(":")[0]
        for record in decode_traces(message.body):
            if record.message_id == message_id:
                bare = admin.session.without_namespace
                named = replace(
                    record,
                    group=None if record.group is None else bare(record.group),
                    client_host=record.client_host or host,
                )
                records.append(named)
    records.sort(key=lambda record: record.time_ms or 0)
    return MessageTrace(tuple(records), _deliveries(records), partial)


def _deliveries(records: list[TraceRecord]) -> tuple[Delivery, ...]:
    """Pairs of records before and after a handler's call, by their request id."""
    after = {record.request_id: record for record in records if record.type == "SubAfter"}
    found = []
    for before in records:
        if before.type != "SubBefore":
            continue
        end = after.get(before.request_id)
        found.append(
            Delivery(
                group=before.group or "",
                time_ms=before.time_ms,
                client_host=before.client_host or "",
                attempt=before.retry_times or 0,
                success=None if end is None else end.success,
                cost_ms=None if end is None else end.cost_ms,
                result=None if end is None or end.code is None else end.code.name.lower(),
            )
        )
    return tuple(found)
