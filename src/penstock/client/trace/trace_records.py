"""Records of traces as text, as RocketMQ's clients write them and its tools read them.

    Pub             ts region group topic id tags keys store-host bytes cost kind offset-id success
    SubBefore       ts region group request id times keys
    SubAfter        request id cost success keys code ts group
    EndTransaction  ts region group topic id tags keys store-host kind transaction state from-check
    Recall          ts region group topic id success

Fields are separated by 0x01, records end with 0x02; a missing value is `null`. Older clients omit
the last fields of some records, newer ones may add more. Malformed records are skipped: any client
may write to the topic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

FIELD: Final = "\x01"
RECORD: Final = "\x02"
_NULL: Final = "null"
_REPLACED: Final = str.maketrans({FIELD: " ", RECORD: " "})


class MessageKind(IntEnum):
    """The type of a message, by RocketMQ's numbers."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeCode(IntEnum):
    """The result of a handler, by RocketMQ's numbers (ConsumeReturnType)."""

    SUCCESS = 0
    TIMEOUT = 1
    EXCEPTION = 2
    NOTHING = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """One trace record. Its attributes depend on its `type`."""

    type: str
    message_id: str
    time_ms: int | None = None
    region: str | None = None
    group: str | None = None
    topic: str | None = None
    tags: str | None = None
    keys: str | None = None
    store_host: str | None = None
    client_host: str | None = None
    body_bytes: int | None = None
    cost_ms: int | None = None
    kind: MessageKind | None = None
    offset_id: str | None = None
    success: bool | None = None
    request_id: str | None = None
    retry_times: int | None = None
    code: ConsumeCode | None = None
    transaction_id: str | None = None
    state: str | None = None
    from_check: bool | None = None


def encode_record(*fields: object) -> str:
    """A record from its type and its fields in their order."""
    return FIELD.join(map(_text, fields)) + RECORD


def decode_traces(body: bytes) -> list[TraceRecord]:
    """The records in the body of a message of the trace topic."""
    records = []
    for line in body.decode("utf-8", "replace").split(RECORD):
        name, *words = line.split(FIELD)
        read = _READERS.get(name)
        if read is None:
            continue
        try:
            records.append(read(words))
        except (ValueError, IndexError):
            continue
    return records


def _text(field: object) -> str:
    if field is None:
        return _NULL
    if isinstance(field, bool):
        return "true" if field else "false"
    if isinstance(field, IntEnum):
        return str(int(field))
    return str(field).translate(_REPLACED)


def _pub(words: list[str]) -> TraceRecord:
    with_offset = len(words) > 12  # older clients have no offset id
    return TraceRecord(
        type="Pub",
        time_ms=int(words[0]),
        region=_or_none(words[1]),
        group=_or_none(words[2]),
        topic=_or_none(words[3]),
        message_id=words[4],
        tags=_or_none(words[5]),
        keys=_or_none(words[6]),
        store_host=_or_none(words[7]),
        body_bytes=int(words[8]),
        cost_ms=int(words[9]),
        kind=MessageKind(int(words[10])),
        offset_id=_or_none(words[11]) if with_offset else None,
        success=words[12 if with_offset else 11] == "true",
        client_host=_or_none(words[13]) if len(words) > 13 else None,
    )


def _sub_before(words: list[str]) -> TraceRecord:
    return TraceRecord(
        type="SubBefore",
        time_ms=int(words[0]),
        region=_or_none(words[1]),
        group=_or_none(words[2]),
        request_id=words[3],
        message_id=words[4],
        retry_times=int(words[5]),
        keys=_or_none(words[6]),
    )


def _sub_after(words: list[str]) -> TraceRecord:
    timed = len(words) > 7
    return TraceRecord(
        type="SubAfter",
        request_id=words[0],
        message_id=words[1],
        cost_ms=int(words[2]),
        success=words[3] == "true",
        keys=_or_none(words[4]),
        code=ConsumeCode(int(words[5])) if len(words) > 5 and words[5] else None,
        time_ms=int(words[6]) if timed else None,
        group=_or_none(words[7]) if timed else None,
    )


def _end_transaction(words: list[str]) -> TraceRecord:
    return TraceRecord(
        type="EndTransaction",
        time_ms=int(words[0]),
        region=_or_none(words[1]),
        group=_or_none(words[2]),
        topic=_or_none(words[3]),
        message_id=words[4],
        tags=_or_none(words[5]),
        keys=_or_none(words[6]),
        store_host=_or_none(words[7]),
        kind=MessageKind(int(words[8])),
        transaction_id=_or_none(words[9]),
        state=words[10],
        from_check=words[11] == "true",
    )


def _recall(words: list[str]) -> TraceRecord:
    return TraceRecord(
        type="Recall",
        time_ms=int(words[0]),
        region=_or_none(words[1]),
        group=_or_none(words[2]),
        topic=_or_none(words[3]),
        message_id=words[4],
        success=words[5] == "true",
    )


def _or_none(word: str) -> str | None:
    return None if word in ("", _NULL) else word


_READERS: Final[dict[str, Callable[[list[str]], TraceRecord]]] = {
    "Pub": _pub,
    "SubBefore": _sub_before,
    "SubAfter": _sub_after,
    "EndTransaction": _end_transaction,
    "Recall": _recall,
}
