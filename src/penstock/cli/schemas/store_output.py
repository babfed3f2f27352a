"""JSON of `penstock store`."""

from typing import Annotated

from msgspec import UNSET, UnsetType

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc
from penstock.store.tools.problem import Problem
from penstock.store.tools.survey import StoreStatistics
from penstock.store.tools.verify_log import Totals


class StoreCheck(JsonValue):
    """The result of a check."""

    good: Annotated[bool, doc("whether there is no damage")]
    totals: Totals
    problems: list[Problem]
    unprinted: Annotated[int, doc("problems beyond `--limit`")]


class DumpedMessage(JsonValue):
    """A message of the log."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    flag: int
    sys_flag: int
    born_ms: int
    born_host: str
    store_ms: int
    store_host: str
    reconsume_times: int
    prepared_offset: int
    properties: dict[str, str]
    body_crc: int
    size: int
    tags: str | None
    keys: list[str]
    message_id: str
    offset_id: str
    body_bytes: Annotated[int, doc("size of the stored body")]
    body: Annotated[str | UnsetType, doc("the body, if it is text and was asked for")] = UNSET
    body_hex: Annotated[str | UnsetType, doc("the body, if it is not text")] = UNSET
    body_problem: Annotated[str | UnsetType, doc("why the body can't be decompressed")] = UNSET


OUTPUTS = {
    "store stat": JsonOutput(StoreStatistics, lines=True),
    "store verify": JsonOutput(StoreCheck, lines=True),
    "store scrub": JsonOutput(StoreCheck, lines=True),
    "store dump": JsonOutput(DumpedMessage, lines=True),
}
