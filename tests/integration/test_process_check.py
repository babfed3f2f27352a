"""Dialing the addresses of brokers."""

import asyncio
import socket

from penstock.clock import LoopClock
from penstock.server.controller.process_check import ProcessCheck


def test_an_address_accepts_or_refuses() -> None:
    async def main() -> None:
        check = ProcessCheck(LoopClock())
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            listening.listen()
            assert await check.dial(address) is True
            asked = 0

            def is_open() -> bool:
                nonlocal asked
                asked += 1
                if asked == 2:
                    listening.close()
                return True

            assert await check.has_ended(address, is_open)
        assert await check.dial(address) is False
        assert not await check.has_ended(address, lambda: False)

    asyncio.run(main())


def test_what_is_no_address_says_nothing() -> None:
    async def main() -> None:
        check = ProcessCheck(LoopClock())
        for address in ("", "no port", "host:99999", "no-such-host.invalid:1"):
            assert await check.dial(address) is None

    asyncio.run(main())
