"""JSON of `penstock top`."""

from typing import Annotated

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class TopBroker(JsonValue):
    """A master or a slave. What a broker does not report is null."""

    cluster: str
    name: str
    id: Annotated[int, doc("0: master")]
    address: str
    version: str | None
    role: str | None
    in_per_second: Annotated[float | None, doc("stored messages, average over 10 s")]
    out_per_second: Annotated[float | None, doc("delivered messages, average over 10 s")]
    in_today: int | None
    out_today: int | None
    disk_used: Annotated[float | None, doc("used share of the log's disk, 0 to 1")]
    log_bytes: int | None
    memory_bytes: int | None
    started_ms: int | None
    behind_bytes: Annotated[int | None, doc("slave: bytes of the master's log that it lacks")]
    in_sync: bool | None
    problem: Annotated[str | None, doc("why values are missing")]


class TopTopic(JsonValue):
    """A topic, summed over all brokers that answered."""

    name: str
    in_per_second: float | None
    out_per_second: Annotated[float | None, doc("to all groups, average over 1 min")]
    next_offsets: Annotated[int | None, doc("all messages that were ever stored")]
    groups: int | None


class TopGroup(JsonValue):
    """A consumer group, summed over its topics."""

    name: str
    lag: Annotated[int | None, doc("messages that are not consumed yet")]
    lag_seconds: Annotated[
        float | None, doc("age of the oldest of them; only known for the largest lags")
    ]
    out_per_second: float | None
    topics: int


class TopScreen(JsonValue):
    """The state of a cluster at one time."""

    time_ms: int
    nameservers: list[str]
    brokers: list[TopBroker]
    topics: Annotated[list[TopTopic], doc("the topics that were queried")]
    groups: list[TopGroup]
    topic_count: Annotated[int | None, doc("all topics, also those that were not queried")]
    groups_age_seconds: Annotated[float | None, doc("how old the figures of groups are")]
    notes: Annotated[list[str], doc("what is missing, and why")]


OUTPUTS = {"top": JsonOutput(TopScreen)}
