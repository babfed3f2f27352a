"""JSON of `penstock scheduled` and `penstock transaction`."""

from typing import Annotated

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class WaitingMessage(JsonValue):
    """A message that waits for its delivery."""

    topic: str
    broker: str
    queue: int | None
    message_id: str
    keys: list[str]
    tags: str | None
    deliver_ms: int
    store_ms: int
    level: Annotated[int | None, doc("delay level; null: it has a delivery time of its own")]
    recall_handle: Annotated[
        str | None, doc("for `penstock scheduled recall`; null if it can't be recalled")
    ]


class WaitingMessages(JsonValue):
    """The messages that wait, by delivery time, and how many there are."""

    messages: list[WaitingMessage]
    by_level: Annotated[dict[str, int], doc("number of waiting messages by delay level")]
    by_topic: Annotated[dict[str, int], doc("number of waiting timer messages by topic")]
    partial: Annotated[list[str], doc("why messages are missing; empty if the list is complete")]
    unreachable: Annotated[list[str], doc("brokers that could not be asked")]


class RecalledMessage(JsonValue):
    """A message that was recalled."""

    message_id: str


class HalfMessageRow(JsonValue):
    """An open half message."""

    topic: str
    group: Annotated[str, doc("producer group that is asked for the outcome")]
    broker: str
    message_id: str
    keys: list[str]
    tags: str | None
    born_ms: int
    store_ms: Annotated[int, doc("when its newest record was stored")]
    checks: Annotated[int, doc("checks that were counted")]
    queue_offset: Annotated[int, doc("offset of its newest record in the half topic")]


class HalfMessageList(JsonValue):
    """The open half messages, oldest first."""

    messages: list[HalfMessageRow]
    partial: Annotated[list[str], doc("why messages are missing; empty if the list is complete")]
    unreachable: Annotated[list[str], doc("brokers that could not be asked")]


OUTPUTS = {
    "scheduled list": JsonOutput(WaitingMessages),
    "scheduled recall": JsonOutput(list[RecalledMessage]),
    "transaction list": JsonOutput(HalfMessageList),
}
