"""A load: its connections, its figures and its end."""

import asyncio
import ssl as tls
import time
from collections.abc import Callable

from penstock.cli.bench.measurement import Measurement
from penstock.cli.bench.pipelined.load_connection import LoadConnection
from penstock.cli.bench.pipelined.load_recorder import LoadRecorder, is_stored
from penstock.cli.bench.pipelined.request_window import RequestWindow
from penstock.cli.bench.schedule import Window
from penstock.cli.remote import ClusterOptions
from penstock.client.messages import SendStatus
from penstock.errors import RecordError, refusal

POLL_S = 0.01
"""How often the end of a run is looked for."""


class PipelinedLoad:
    """The connections of a run, and what it has measured."""

    def __init__(self, cluster: ClusterOptions) -> None:
        self.recorder = LoadRecorder()
        self.measured = Measurement(Window(0, 0))
        self._connections: list[LoadConnection] = []
        self._timeout_s = cluster.timeout_ms / 1000
        ssl = cluster.keywords()["ssl"]
        self._ssl = ssl if isinstance(ssl, tls.SSLContext) else None

    async def connect(self, address: str, window: RequestWindow) -> None:
        """Open one more connection."""
        self._connections.append(
            await LoadConnection.open(address, window, ssl=self._ssl, timeout_s=self._timeout_s)
        )

    def set_window(self, window: Window) -> None:
        """Measure this time."""
        self.recorder.set_window(window.begin_ns, window.end_ns)
        self.measured = Measurement(window)
        self.measured.latency, self.measured.behind = self.recorder.latency, self.recorder.behind

    def in_flight(self) -> int:
        return sum(connection.window.in_flight for connection in self._connections)

    def push(self) -> None:
        """Send what may be sent now."""
        now_ns = time.monotonic_ns()
        for connection in self._connections:
            connection.push(now_ns)

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait; raises the error of a connection that has failed or does not answer."""
        while not done():
            now_ns = time.monotonic_ns()
            for connection in self._connections:
                connection.check(now_ns, self._timeout_s)
            self._copy_figures()
            await asyncio.sleep(POLL_S)
        self._copy_figures()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _copy_figures(self) -> None:
        """Bring `measured` up to date."""
        recorder, measured = self.recorder, self.measured
        measured.messages, measured.byte_count = recorder.messages, recorder.byte_count
        measured.last_ns = recorder.last_ns
        for code, count in recorder.codes.items():
            if is_stored(code):
                measured.statuses[SendStatus(code).name] = count
            else:
                measured.errors[type(refusal(code, None)).__name__] = count
        if recorder.corrupt:
            measured.errors[RecordError.__name__] = recorder.corrupt
