"""Shared by all tests: the core runs in the requested mode, Hypothesis by depth."""

import gc
import itertools
import os
import re
from pathlib import Path

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


_numbers = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A new directory. pytest's own fixture lists all directories of earlier tests each time."""
    name = re.sub(r"\W", "_", request.node.name)[:40]
    path = tmp_path_factory.getbasetemp() / f"{next(_numbers)}-{name}"
    path.mkdir(mode=0o700)
    return path


def pytest_collection_finish() -> None:
    """Collected tests stay until the end: without this each garbage collection visits them."""
    gc.collect()
    gc.freeze()
