"""Fixtures of the compatibility tests."""

from __future__ import annotations

import os

import pytest

from . import maven


@pytest.fixture(scope="session")
def java() -> None:
    """Skip the test where Java or Maven is missing; on CI that is a failure, never a skip."""
    missing = maven.missing_tools()
    if not missing:
        return
    message = f"needs {' and '.join(missing)} on the PATH"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
