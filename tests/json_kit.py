"""Checks what commands print with `--json` against their JSON Schema.

    decoded = json_kit.check("topic list", output)

A field that the schema does not have is an error here, though readers must accept it: the schema in
the documentation would be incomplete.
"""

import json
from typing import Any

import jsonschema

from penstock.cli.schemas.registry import OUTPUTS, schema_of


def check(command: str, output: str) -> Any:
    """The decoded output of a command, a list of values for a command that prints lines."""
    closed = _closed(schema_of(command))
    jsonschema.Draft202012Validator.check_schema(closed)
    validator = jsonschema.Draft202012Validator(closed)
    if not OUTPUTS[command].lines:
        value = json.loads(output)
        validator.validate(value)
        return value
    values = [json.loads(line) for line in output.splitlines()]
    for value in values:
        validator.validate(value)
    return values


def _closed(schema: Any) -> Any:
    """The schema without further properties in its objects."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
