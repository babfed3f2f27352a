"""JSON of `penstock cluster`."""

from typing import Annotated

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class ElectionOutput(JsonValue):
    """An election of a master by controllers."""

    broker: str
    epoch: int
    master_id: Annotated[int, doc("id that the controllers have given to the master")]
    time_ms: int
    reason: str


class ReplicaOutput(JsonValue):
    """A master or a slave."""

    cluster: str
    broker: str
    id: int
    address: str
    role: Annotated[
        str | None, doc("`async_master`, `sync_master` or `slave`; of Apache `master` or `slave`")
    ]
    epoch: Annotated[int | None, doc("last epoch in its log; null also without epochs")]
    log_end: int | None
    behind: Annotated[int | None, doc("bytes of the master's log that a slave lacks")]
    in_sync: Annotated[bool | None, doc("slave: whether the master counts it as in sync")]
    error: Annotated[str | None, doc("why values are unknown, or the slave can't follow")]
    elections: Annotated[
        list[ElectionOutput] | None,
        doc("last elections of its broker, the newest last; null if no controller tells of them"),
    ]


class PromotionOutput(JsonValue):
    """A slave that became the master of its broker."""

    broker: str
    id: Annotated[int, doc("its id before the promotion")]
    address: str
    role: Annotated[str, doc("`sync_master` or `async_master`")]
    epoch: Annotated[int | None, doc("epoch that it began; null without epochs")]
    stepped_down: Annotated[str | None, doc("address of the former master; null if none answered")]
    problems: Annotated[list[str], doc("what did not work; each a sentence")]


OUTPUTS = {
    "cluster status": JsonOutput(list[ReplicaOutput]),
    "cluster elections": JsonOutput(list[ElectionOutput]),
    "cluster promote": JsonOutput(PromotionOutput),
}
