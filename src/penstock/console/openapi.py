"""The OpenAPI document of the API, from the table of endpoints."""

import re
from collections.abc import Iterable
from typing import Any

from penstock.console.endpoints import Endpoint
from penstock.version import VERSION


def openapi(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The document for these endpoints."""
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", f"/api{one.path}")
        paths.setdefault(path, {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock console", "version": VERSION},
        "paths": paths,
    }


def _operation(one: Endpoint) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)(?::path)?\}", one.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ] + [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in one.parameters.items()
    ]
    operation: dict[str, Any] = {
        "summary": one.summary,
        "parameters": parameters,
        "x-role": "none" if one.open else one.role.text,
        "responses": {"200": {"description": "success"}, "default": {"description": "an error"}},
    }
    if one.body:
        properties = {name: {"description": text} for name, text in one.body.items()}
        schema = {"type": "object", "properties": properties}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation
