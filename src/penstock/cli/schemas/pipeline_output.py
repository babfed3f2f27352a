"""JSON of `penstock pipeline`."""

from typing import Annotated

from penstock.cli.schemas.json_values import JsonOutput, JsonValue, doc


class PipelineOption(JsonValue):
    """An option of a pipeline."""

    name: str
    flag: str
    kind: str
    default: str | int | float | bool | None
    needed: bool
    help: str


class PipelineWrites(JsonValue):
    """What a pipeline writes."""

    where: str
    what: str


class PipelineDetails(JsonValue):
    """A pipeline."""

    name: str
    summary: str
    trigger: str
    options: list[PipelineOption]
    writes: list[PipelineWrites]


OUTPUTS = {
    "pipeline list": JsonOutput(Annotated[dict[str, str], doc("summaries by name")]),
    "pipeline describe": JsonOutput(PipelineDetails),
}
