"""Fixtures and markers of the unit tests."""

import pytest
from _pytest.unittest import TestCaseFunction


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark Hypothesis state machines as slow: they are the only unittest-style tests here."""
    for item in items:
        if isinstance(item, TestCaseFunction):
            item.add_marker(pytest.mark.slow)
