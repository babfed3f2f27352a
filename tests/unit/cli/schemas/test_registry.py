"""The JSON Schema of commands."""

import json
from dataclasses import fields
from typing import Any

import jsonschema
import pytest

from penstock.cli.schemas import cluster_output, top_output
from penstock.cli.schemas.__main__ import main
from penstock.cli.schemas.json_values import JsonValue
from penstock.cli.schemas.registry import OUTPUTS, schema_of
from penstock.cli.top.screen_snapshot import BrokerRow, GroupRow, TopicRow
from penstock.client.admin.replication.admin_replication import Election
from tests import json_kit


@pytest.mark.parametrize("command", sorted(OUTPUTS))
def test_every_schema_is_valid_and_described(command: str) -> None:
    schema = schema_of(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    for name, definition in schema.get("$defs", {}).items():
        assert definition.get("description"), f"{name} has no docstring"


def test_the_names_of_objects_are_unique() -> None:
    kinds: dict[str, object] = {}
    for command in OUTPUTS:
        for name, definition in schema_of(command).get("$defs", {}).items():
            assert kinds.setdefault(name, definition) == definition, name


def test_names_are_published_without_the_suffix_of_their_structs() -> None:
    assert "StoredMessage" in schema_of("message show")["$defs"]
    assert "ResendPlan" in schema_of("dlq resend")["$defs"]
    assert 'Output"' not in json.dumps([schema_of(command) for command in OUTPUTS])


def test_a_field_that_is_missing_or_unknown_is_noticed() -> None:
    row = {"user": "u", "type": "Normal", "status": "enable", "password": "x"}
    assert json_kit.check("user list", json.dumps([row])) == [row]
    for wrong in ({**row, "more": 1}, {"user": "u"}, {**row, "type": None}):
        with pytest.raises(jsonschema.ValidationError):
            json_kit.check("user list", json.dumps([wrong]))


@pytest.mark.parametrize(
    ("printed", "described"),
    [
        (Election, cluster_output.ElectionOutput),
        (BrokerRow, top_output.TopBroker),
        (TopicRow, top_output.TopTopic),
        (GroupRow, top_output.TopGroup),
    ],
)
def test_objects_that_are_printed_as_they_are_have_all_fields(
    printed: Any, described: type[JsonValue]
) -> None:
    assert described.__struct_fields__ == tuple(f.name for f in fields(printed))


def test_a_plan_has_another_schema_than_a_result() -> None:
    plan = {"group": None, "targets": {}, "messages": [], "skipped": [], "warnings": []}
    result = {"sent": [], "failed": [], "skipped": [], "spent_ms": 0}
    for value in ({**plan, "partial": []}, result):
        assert json_kit.check("dlq resend", json.dumps(value)) == value
    for wrong in (plan, {**result, "partial": []}):
        with pytest.raises(jsonschema.ValidationError):
            json_kit.check("dlq resend", json.dumps(wrong))


def test_schemas_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topic", "list"]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of("topic list")
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == sorted(OUTPUTS)
    assert main(["no", "such"]) == 2
