"""JSON of `penstock send`, `tail`, `message`, `dlq`, `explain`, `scheduled` and `transaction`."""

from typing import Annotated, Any

from msgspec import UNSET, UnsetType

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class ReceiptOutput(JsonValue):
    """A message that was sent."""

    status: Annotated[str, doc("`SEND_OK`, or another status of RocketMQ's")]
    message_id: str
    offset_id: str
    topic: str
    broker: str
    queue: int
    offset: int
    recall_handle: Annotated[str | None, doc("timer messages: recalls the message")]


class ReadMessage(JsonValue):
    """A message that was read."""

    topic: str
    message_id: str
    offset_id: str
    broker: str
    queue: int
    offset: int
    born_ms: int
    born_host: str
    store_ms: int
    reconsume_times: int
    tags: str | None
    keys: list[str]
    properties: dict[str, str]
    body: Annotated[str | UnsetType, doc("the body, if it is text")] = UNSET
    body_base64: Annotated[str | UnsetType, doc("the body, if it is not text")] = UNSET


class StoredMessageOutput(ReadMessage, kw_only=True):
    """A message with the topic that it was sent to and the one that it is stored in."""

    topic: Annotated[  # type: ignore[assignment]  # a copy does not always name it
        str | None, doc("the topic that it was sent to; null if the stored copy does not name it")
    ]
    stored_topic: Annotated[str, doc("for example the retry topic or the dead letter topic")]


class FoundMessages(JsonValue):
    """The messages that were found, oldest first unless `--newest` is given."""

    how: Annotated[str, doc("what was searched")]
    partial: Annotated[
        list[str], doc("what could not be searched; empty if the search is complete")
    ]
    messages: list[StoredMessageOutput]


# --- sending again


class Place(JsonValue):
    """Where a copy of a message is stored."""

    topic: Annotated[str, doc("the topic that it is stored in")]
    broker: str
    queue: int
    offset: int
    store_ms: int
    message_id: str
    offset_id: str


class PlannedCopy(Place):
    """A message that is sent again."""

    target: Annotated[str, doc("the topic that the copy goes to")]


class SkippedMessageOutput(Place):
    """A message that is not sent again."""

    reason: str


class FailedCopy(Place):
    """A message whose copy could not be sent. The copy may be stored nevertheless."""

    error: str


class SentCopy(JsonValue):
    """The copy of a message that was sent again."""

    message_id: str
    offset_id: str
    topic: str
    broker: str
    queue: int
    offset: int


class ResendReportOutput(JsonValue):
    """The messages that were sent again."""

    sent: list[SentCopy]
    failed: list[FailedCopy]
    skipped: list[SkippedMessageOutput]
    spent_ms: int


class ResendPlanOutput(JsonValue):
    """The messages that would be sent again."""

    group: Annotated[str | None, doc("the only group that receives them; null: all groups")]
    targets: Annotated[dict[str, int], doc("number of messages by target topic")]
    messages: list[PlannedCopy]
    skipped: list[SkippedMessageOutput]
    warnings: list[str]
    partial: Annotated[list[str], doc("what could not be searched or was not found")]


# --- explain


class ExplainedFact(JsonValue):
    """A fact and the values that it is derived from."""

    kind: Annotated[str, doc("see [Evidence in JSON](messages.md#evidence-in-json)")]
    status: Annotated[str, doc("`ok`, `problem` or `unknown`")]
    text: str
    evidence: Annotated[dict[str, Any], doc("values by name, depending on the kind")]


class GroupAnswer(JsonValue):
    """The state of a group."""

    group: str
    verdict: Annotated[str, doc("see the [list of verdicts](messages.md#is-a-group-healthy)")]
    text: Annotated[str, doc("the verdict as a sentence")]
    command: Annotated[str | None, doc("the next command to run")]
    facts: list[ExplainedFact]
    partial: Annotated[list[str], doc("what could not be queried; empty if nothing is missing")]


class MessageAnswer(JsonValue):
    """Why a group has consumed a message, or has not."""

    wanted: Annotated[str, doc("the id or place that was given")]
    message: Annotated[Place | None, doc("null if the message is not in its topic")]
    group: str
    verdict: Annotated[str, doc("see the [list of verdicts](messages.md#why-was-it-not-consumed)")]
    text: Annotated[str, doc("the verdict as a sentence")]
    command: Annotated[str | None, doc("the next command to run")]
    facts: list[ExplainedFact]
    partial: Annotated[list[str], doc("what could not be searched; empty if nothing is missing")]


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
    level: Annotated[int | None, doc("delay level; null: it has its own delivery time")]
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
    "send": JsonOutput(ReceiptOutput, lines=True),
    "tail": JsonOutput(ReadMessage, lines=True),
    "message find": JsonOutput(FoundMessages),
    "message show": JsonOutput(StoredMessageOutput),
    "message resend": JsonOutput(ResendReportOutput, dry_run=ResendPlanOutput),
    "dlq list": JsonOutput(list[StoredMessageOutput]),
    "dlq show": JsonOutput(StoredMessageOutput),
    "dlq export": JsonOutput(StoredMessageOutput, lines=True),
    "dlq resend": JsonOutput(ResendReportOutput, dry_run=ResendPlanOutput),
    "explain message": JsonOutput(MessageAnswer),
    "explain group": JsonOutput(GroupAnswer),
    "scheduled list": JsonOutput(WaitingMessages),
    "scheduled recall": JsonOutput(list[RecalledMessage]),
    "transaction list": JsonOutput(HalfMessageList),
}
