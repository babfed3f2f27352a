"""JSON of `penstock topic`."""

from typing import Annotated

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class TopicOnBroker(JsonValue):
    """The settings of a topic on one broker."""

    read_queues: int
    write_queues: int
    perm: Annotated[str, doc("`rw`, `r`, `w` or `-`")]
    order: bool
    type: Annotated[str, doc("message type; `UNSPECIFIED` if it is not set")]
    attributes: dict[str, str]


class Topic(JsonValue):
    """A topic and the brokers that have it."""

    topic: str
    kind: Annotated[str, doc("`normal`, `retry`, `dlq` or `system`")]
    brokers: Annotated[dict[str, TopicOnBroker], doc("settings by broker name")]


class QueueEnds(JsonValue):
    """The offsets of a queue."""

    broker: str
    queue: int
    min_offset: int
    max_offset: Annotated[int, doc("offset of the next message")]
    updated_ms: Annotated[int | None, doc("store time of the last message")]


class TopicDetails(Topic):
    """A topic with its queues and groups."""

    addresses: Annotated[dict[str, dict[int, str]], doc("broker name → broker id → address")]
    queues: list[QueueEnds]
    groups: Annotated[list[str], doc("groups that subscribe to it or have offsets in it")]
    put_tps: Annotated[float | None, doc("messages stored per second")]
    unreachable: Annotated[list[str], doc("brokers whose queues are missing")]


class DeletedTopic(JsonValue):
    """A topic that was deleted."""

    topic: str
    brokers: Annotated[list[str], doc("brokers that had it; empty: only the NameServers had it")]


OUTPUTS = {
    "topic list": JsonOutput(list[Topic]),
    "topic create": JsonOutput(Topic),
    "topic delete": JsonOutput(DeletedTopic),
    "topic describe": JsonOutput(TopicDetails),
}
