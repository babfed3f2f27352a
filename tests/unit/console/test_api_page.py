"""The page of the JSON API, and the OpenAPI document."""

from penstock.console.api import load_endpoints
from penstock.console.openapi import openapi
from tests.console_api_page import PAGE, render


def test_the_page_is_generated_from_the_endpoints() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.console_api_page"


def test_every_endpoint_is_described() -> None:
    for one in load_endpoints():
        assert one.summary.endswith("."), one.path


def test_the_openapi_document_has_every_endpoint() -> None:
    paths = openapi(load_endpoints())["paths"]
    for one in load_endpoints():
        assert one.method.lower() in paths[f"/api{one.path}"]
    create = paths["/api/topics"]["post"]
    assert create["x-role"] == "operate"
    assert "queues" in create["requestBody"]["content"]["application/json"]["schema"]["properties"]
    describe = paths["/api/topics/{name}"]["get"]
    assert describe["parameters"][0] == {
        "name": "name", "in": "path", "required": True, "schema": {"type": "string"},
    }  # fmt: skip
