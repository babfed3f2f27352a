"""Running a server."""

import asyncio
import sys
from collections.abc import Iterator

import pytest

from penstock.server.services import service


@pytest.fixture
def _interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_interval")
def test_computing_threads_give_way_to_the_event_loop_of_a_server() -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        assert sys.getswitchinterval() == pytest.approx(service.SWITCH_SECONDS)

    service.run(main())
