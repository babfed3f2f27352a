"""JSON of `penstock send` and `penstock tail`."""

from typing import Annotated

from msgspec import UNSET, UnsetType

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class Receipt(JsonValue):
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


OUTPUTS = {
    "send": JsonOutput(Receipt, lines=True),
    "tail": JsonOutput(ReadMessage, lines=True),
}
