"""The loop of `penstock top`: read, draw, wait for a key or the next refresh."""

import asyncio
import contextlib
import logging
import signal

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from penstock.cli.remote import ClusterOptions
from penstock.cli.top.collector import Collector
from penstock.cli.top.screen import ScreenState, screen
from penstock.cli.top.screen_snapshot import ScreenSnapshot
from penstock.cli.top.terminal_keys import KeyReader
from penstock.errors import PenstockError


class LiveScreen:
    """Draws the last snapshot whenever it or the user's choice changes."""

    def __init__(self, collector: Collector, seconds: float, console: Console) -> None:
        self._collector = collector
        self._seconds = seconds
        self._console = console
        self._state = ScreenState()
        self._snapshot: ScreenSnapshot | None = None
        self._problem = ""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Show the screen until the user quits."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._press, "q")
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        reading = asyncio.ensure_future(self._read_often())
        with (
            KeyReader() as keys,
            Live(console=self._console, screen=True, auto_refresh=False) as live,
        ):
            loop.add_reader(keys.file, lambda: self._press(*keys.read()))
            try:
                while not self._state.quit:
                    self._changed.clear()
                    live.update(self._content(), refresh=True)
                    await self._changed.wait()
            finally:
                loop.remove_reader(keys.file)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _content(self) -> RenderableType:
        if self._snapshot is None:
            return Text(self._problem or "connecting …")
        return screen(self._snapshot, self._state, self._console.size.height)

    def _press(self, *keys: str) -> None:
        for key in keys:
            self._state.press(key)
        self._changed.set()

    async def _read_often(self) -> None:
        while True:
            if not self._state.paused:
                try:
                    self._snapshot = await self._collector.read()
                except PenstockError as error:  # it may be back at the next refresh
                    self._problem, self._snapshot = str(error), None
                self._changed.set()
            await asyncio.sleep(self._seconds)


async def show(
    cluster: ClusterOptions, in_cluster: str | None, seconds: float, *, system: bool
) -> None:
    """Show the live screen; warnings of the client, which are on the screen anyway, are not
    printed over it."""
    log = logging.getLogger("penstock")
    with contextlib.ExitStack() as stack:
        for handler in log.handlers:
            stack.callback(handler.setLevel, handler.level)
            handler.setLevel(logging.CRITICAL)
        async with cluster.admin() as admin:
            collector = Collector(admin, in_cluster, system=system)
            await LiveScreen(collector, seconds, Console()).run()
