"""The JSON API of the console, one module per noun."""

import importlib

from penstock.console.endpoints import ENDPOINTS, Endpoint

MODULES = (
    "session_api",
    "overview_api",
    "topics_api",
    "groups_api",
    "resets_api",
    "messages_api",
    "tail_api",
    "dead_letters_api",
    "scheduled_api",
    "transactions_api",
    "cluster_api",
    "access_api",
    "pipelines_api",
    "saved_searches_api",
)


def load_endpoints() -> list[Endpoint]:
    """All endpoints, in the order of the documentation."""
    for name in MODULES:
        importlib.import_module(f"penstock.console.api.{name}")
    return list(ENDPOINTS)
