"""JSON of `penstock group`."""

from typing import Annotated

from msgspec import UNSET, UnsetType

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class GroupOnBroker(JsonValue):
    """The settings of a group on one broker."""

    consume_enabled: bool
    broadcast_enabled: bool
    orderly: bool
    from_min_enabled: bool
    retries_max: int
    retry_queues: int
    consume_timeout_minutes: int
    notify_enabled: Annotated[bool, doc("whether members are notified when others join or leave")]
    broker_id: Annotated[int, doc("broker that consumers read from")]
    broker_id_when_slow: Annotated[
        int, doc("broker that consumers read from when they are far behind")
    ]
    attributes: dict[str, str]


class Group(JsonValue):
    """A group and the brokers that have it."""

    group: str
    is_system: bool
    brokers: Annotated[dict[str, GroupOnBroker], doc("settings by broker name")]


class GroupRowOutput(Group):
    """A group in a list. The last three fields are there with `--lag`; null is unknown."""

    members: Annotated[int | UnsetType | None, doc("connected clients")] = UNSET
    lag: Annotated[int | UnsetType | None, doc("messages that are not consumed yet")] = UNSET
    lag_ms: Annotated[int | UnsetType | None, doc("age of the oldest of them")] = UNSET


class GroupMemberOutput(JsonValue):
    """A connected client of a group."""

    client_id: str
    address: str
    language: str
    version: str
    brokers: list[str]


class GroupSubscription(JsonValue):
    """A topic that the members of a group subscribe to."""

    topic: str
    expression: str
    kind: Annotated[str, doc("`TAG` or `SQL92`")]


class GroupMemberList(JsonValue):
    """The connected clients of a group. Without any, the texts are null."""

    group: str
    model: Annotated[str | None, doc("`CLUSTERING` or `BROADCASTING`")]
    consume_type: str | None
    start_at: str | None
    members: list[GroupMemberOutput]
    subscriptions: list[GroupSubscription]
    unreachable: Annotated[list[str], doc("brokers that could not be asked")]


class QueueLag(JsonValue):
    """The progress of a group in a queue."""

    topic: str
    broker: str
    queue: int
    committed: Annotated[int | None, doc("null if the group never committed an offset")]
    max_offset: Annotated[int, doc("offset of the next message")]
    lag: Annotated[int | None, doc("messages that are not consumed yet")]
    lag_ms: Annotated[int | None, doc("age of the oldest of them")]
    consumed_ms: Annotated[int | None, doc("store time of the last consumed message")]
    client_id: Annotated[str | None, doc("the client that reads the queue")]


class GroupDetails(Group):
    """A group with its members and its progress."""

    members: GroupMemberList
    queues: list[QueueLag]
    lag: Annotated[int | None, doc("null if that of a queue is unknown")]
    lag_ms: int | None
    consume_tps: float
    unreachable: Annotated[list[str], doc("brokers whose queues are missing")]


class OffsetMove(JsonValue):
    """The offset of a group in a queue before and after a change."""

    broker: str
    queue: int
    before: Annotated[int | None, doc("null if the group had no offset")]
    after: int
    skipped: Annotated[int | None, doc("messages that are skipped; negative: consumed again")]


class OffsetFailure(JsonValue):
    """A queue whose offset could not be changed."""

    broker: str
    queue: int
    error: str


class OffsetChange(JsonValue):
    """A change of the offsets of a group: the plan, and the result if it was applied."""

    group: str
    topic: str
    applied: bool
    moves: list[OffsetMove]
    skipped: Annotated[int, doc("messages that are not consumed")]
    repeated: Annotated[int, doc("messages that are consumed again")]
    unknown_queues: Annotated[
        int, doc("queues without an offset before: `skipped` and `repeated` do not include them")
    ]
    live: Annotated[list[str], doc("brokers whose connected consumers move with their next pull")]
    failed: list[OffsetFailure]
    undo: Annotated[str | None, doc("name of the plan for `penstock group undo`")]


class UndoRow(JsonValue):
    """A stored plan that restores offsets."""

    name: str
    saved_ms: int
    group: str
    topic: str
    nameservers: list[str]
    namespace: str
    queues: int


class DeletedGroup(JsonValue):
    """A group that was deleted."""

    group: str
    brokers: Annotated[list[str], doc("brokers that had it")]
    offsets_kept: bool


OUTPUTS = {
    "group list": JsonOutput(list[GroupRowOutput]),
    "group create": JsonOutput(Group),
    "group delete": JsonOutput(DeletedGroup),
    "group describe": JsonOutput(GroupDetails),
    "group members": JsonOutput(GroupMemberList),
    "group reset": JsonOutput(OffsetChange),
    "group clone": JsonOutput(OffsetChange),
    "group undo": JsonOutput(OffsetChange | list[UndoRow]),
}
