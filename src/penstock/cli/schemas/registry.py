"""The JSON Schema of each command with `--json`.

A module of this package defines the Structs of one noun and its `OUTPUTS`, by command. A command
builds these Structs and prints them with `print_json`. The tests of a command check what it prints
with `tests/json_kit.py`.
"""

from typing import Any

import msgspec

from penstock.cli.schemas import (
    access_output,
    bench_output,
    cluster_output,
    context_output,
    definitions_output,
    group_output,
    health_output,
    message_output,
    pipeline_output,
    store_output,
    top_output,
    topic_output,
)
from penstock.cli.schemas.json_values import JsonOutput

OUTPUTS: dict[str, JsonOutput] = {
    **access_output.OUTPUTS,
    **bench_output.OUTPUTS,
    **cluster_output.OUTPUTS,
    **context_output.OUTPUTS,
    **definitions_output.OUTPUTS,
    **group_output.OUTPUTS,
    **health_output.OUTPUTS,
    **message_output.OUTPUTS,
    **pipeline_output.OUTPUTS,
    **store_output.OUTPUTS,
    **top_output.OUTPUTS,
    **topic_output.OUTPUTS,
}
"""By command, without the word `penstock`."""


def schema_of(command: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of the value, or of each line, that a command prints."""
    output = OUTPUTS[command]
    if output.dry_run is None:
        schema = msgspec.json.schema(output.value)
    else:
        either, objects = msgspec.json.schema_components((output.value, output.dry_run))
        schema = {"anyOf": list(either), "$defs": objects}
    return {key: _published(part) for key, part in schema.items()}


def _published(part: Any) -> Any:
    """A part of a schema with the names of Structs as they are published: without `Output`."""
    if isinstance(part, dict):
        return {key.removesuffix("Output"): _published(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_published(one) for one in part]
    return part.removesuffix("Output") if isinstance(part, str) else part
