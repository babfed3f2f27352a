"""Shared by all tests: the core runs in the requested mode, Hypothesis by depth."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

import penstock
from tests.depth import rounds

settings.register_profile(
    "penstock",
    max_examples=rounds(ci=60, proof=1000),
    deadline=None,
    derandomize=os.environ.get("PENSTOCK_DEPTH") != "proof",
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")


@pytest.fixture(autouse=True, scope="session")
def core_mode() -> None:
    expected = os.environ.get("PENSTOCK_EXPECT")
    actual = "compiled" if penstock.compiled() else "pure"
    assert expected in (None, actual), f"the core is {actual}, this run expects {expected}"


def pytest_collection_finish() -> None:
    """Collected tests stay until the end: without this each garbage collection visits them."""
    gc.collect()
    gc.freeze()
