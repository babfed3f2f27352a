"""JSON of `penstock export` and `penstock import`."""

from typing import Annotated, Literal

from penstock.cli.schemas.group_output import GroupOnBroker
from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc
from penstock.cli.schemas.topic_output import TopicOnBroker

FORMAT = "penstock-definitions"
VERSION = 1


class DefinedTopic(JsonValue):
    """A topic, with its settings by broker name."""

    topic: str
    brokers: dict[str, TopicOnBroker]


class DefinedGroup(JsonValue):
    """A consumer group, with its settings by broker name."""

    group: str
    brokers: dict[str, GroupOnBroker]


class DefinedUser(JsonValue):
    """A user. Without `--secrets`, or if the broker does not send it, the password is null."""

    user: str
    type: str
    status: str
    password: str | None


class DefinedRule(JsonValue):
    """An access rule."""

    user: str
    policy: Annotated[str, doc("`Custom` or `Default`")]
    resource: str
    actions: list[str]
    sources: Annotated[list[str], doc("addresses; none means anywhere")]
    decision: Annotated[str, doc("`Allow` or `Deny`")]


class DefinedOffset(JsonValue):
    """A committed offset of a group."""

    group: str
    topic: str
    broker: str
    queue: int
    offset: int


class Definitions(JsonValue):
    """The definitions of a cluster."""

    format: Annotated[Literal["penstock-definitions"], doc("what this file is")]
    version: Annotated[int, doc("version of the format: 1")]
    exported_ms: int
    nameservers: list[str]
    brokers: Annotated[list[str], doc("names of the masters")]
    topics: list[DefinedTopic]
    groups: list[DefinedGroup]
    users: list[DefinedUser]
    rules: list[DefinedRule]
    kv: Annotated[dict[str, dict[str, str]], doc("KV configuration: namespace → key → value")]
    offsets: list[DefinedOffset]
    notes: Annotated[list[str], doc("what could not be exported, with the reason")]


class ImportItem(JsonValue):
    """One definition, and what the import does with it."""

    kind: Literal["topic", "group", "user", "rule", "kv", "offset"]
    name: str
    where: Annotated[str, doc("broker name, or `nameservers`")]
    change: Literal["create", "change", "unchanged", "skip"]
    details: Annotated[str, doc("the new settings, or why it is skipped")]
    error: Annotated[str | None, doc("why it failed; null if it did not, or was not tried")]
    password: Annotated[str | None, doc("with `--new-passwords`: the password of a new user")]


class ImportReport(JsonValue):
    """The plan of an import, and the result if it was applied."""

    applied: bool
    items: list[ImportItem]


OUTPUTS = {
    "export": JsonOutput(Definitions),
    "import": JsonOutput(ImportReport),
}
