"""The JSON API of the console, one module per noun."""

import importlib

from penstock.console.endpoints import ENDPOINTS, Endpoint

MODULES = (
    "session",
    "overview",
    "topics",
    "groups",
    "resets",
    "messages",
    "tail",
    "dead_letters",
    "scheduled",
    "transactions",
    "cluster",
    "access",
    "pipelines",
    "saved_searches",
)


def load_endpoints() -> list[Endpoint]:
    """All endpoints, in the order of the documentation."""
    for name in MODULES:
        importlib.import_module(f"penstock.console.api.{name}")
    return list(ENDPOINTS)
