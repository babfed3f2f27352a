"""Fixtures of the tests of POP consumers."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.pop.pop_consumer_kit import PopFixture, pop_fixture


@pytest.fixture
def run_test(tmp_path: Path) -> Callable[..., None]:
    def run(body: Callable[[PopFixture], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def main() -> None:
            async with pop_fixture(tmp_path / "store", **options) as made:
                await body(made)

        asyncio.run(main())

    return run
