"""A minimal HTTP server for monitoring: /metrics, /healthz, /readyz.

| path | response |
|---|---|
| `/metrics` | metrics in Prometheus' text format |
| `/healthz` | 200 while the process and its event loop run |
| `/readyz` | 200, or 503 with the reason why the server is not ready |

One request per connection, GET or HEAD; bodies are not read. Metrics are written in slices, so
that many topics do not delay messages.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from penstock.clock import Clock, LoopClock, finish_within
from penstock.metrics import CONTENT_TYPE, Registry

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8 * 1024
REQUEST_MS = 5_000
RESPONSE_MS = 15_000
CONNECTIONS_MAX = 32
LINES_PER_SLICE = 250
"""Lines of metrics per loop iteration: a few milliseconds at most."""

_JSON = "application/json"


class Page(NamedTuple):
    """A response."""

    status: HTTPStatus
    body: bytes
    content_type: str = _JSON


async def serve_probe(
    host: str,
    port: int,
    registry: Registry,
    not_ready: Callable[[], str | None],
    *,
    clock: Clock | None = None,
) -> "Probe":
    """Serve this port until closed; `not_ready` returns the reason, or None."""
    probe = Probe(registry, not_ready, clock or LoopClock())
    try:
        await probe.listen(host, port)
    except OSError as error:
        text = f"can't serve /metrics on {host or '*'}:{port} (probe_port): {error.strerror}"
        raise OSError(error.errno, text) from None
    return probe


class Probe:
    """The HTTP server; made by `serve_probe`."""

    port: int

    def __init__(
        self, registry: Registry, not_ready: Callable[[], str | None], clock: Clock
    ) -> None:
        self._registry = registry
        self._not_ready = not_ready
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_metrics: set[str] = set()

    async def listen(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(
            self._connected, host or None, port, limit=REQUEST_BYTES_MAX, backlog=64
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and close the connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- connections

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
            writer.close()
            await finish_within(self._clock, RESPONSE_MS, writer.wait_closed())
        except (OSError, TimeoutError):
            log.debug("a probe's client disconnected or did not read its response")
        except Exception:
            log.exception("a probe failed")
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = True
        try:
            request = await finish_within(self._clock, REQUEST_MS, reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return
            page = _refusal(HTTPStatus.BAD_REQUEST, "the request is incomplete")
        except asyncio.LimitOverrunError:
            reason = f"the request is longer than {REQUEST_BYTES_MAX} bytes"
            page = _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason)
        except TimeoutError:
            reason = f"no request within {REQUEST_MS} ms"
            page = _refusal(HTTPStatus.REQUEST_TIMEOUT, reason)
        else:
            method, page = await self._page(request)
            head = method != "HEAD"
        writer.write(_head(page))
        if head:
            writer.write(page.body)
        await finish_within(self._clock, RESPONSE_MS, writer.drain())

    # --- pages

    async def _page(self, request: bytes) -> tuple[str, Page]:
        line = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/1."):
            return "", _refusal(HTTPStatus.BAD_REQUEST, "not an HTTP/1 request")
        method, target, _ = line
        path = target.partition("?")[0]
        if path not in ("/metrics", "/healthz", "/readyz"):
            reason = "the paths are /metrics, /healthz and /readyz"
            return method, _refusal(HTTPStatus.NOT_FOUND, reason)
        if method not in ("GET", "HEAD"):
            return method, _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD")
        if path == "/metrics":
            return method, Page(HTTPStatus.OK, await self._metrics(), CONTENT_TYPE)
        if path == "/healthz":
            return method, _json(HTTPStatus.OK, {"status": "ok"})
        cause = self._not_ready()
        if cause is not None:
            unready = {"ready": False, "reason": cause}
            return method, _json(HTTPStatus.SERVICE_UNAVAILABLE, unready)
        return method, _json(HTTPStatus.OK, {"ready": True})

    async def _metrics(self) -> bytes:
        written: list[str] = []
        lines_written = 0
        for family in self._registry.families:
            start = len(written)
            try:
                for line in family.lines(self._registry.common):
                    written.append(line)
                    lines_written += 1
                    if lines_written % LINES_PER_SLICE == 0:
                        await asyncio.sleep(0)
            except Exception:  # one failing metric must not hide the others
                del written[start:]
                if family.name not in self._failed_metrics:
                    self._failed_metrics.add(family.name)
                    log.exception("can't read the metric %s", family.name)
        return "".join(written).encode("utf-8", "replace")


def _json(status: HTTPStatus, value: object) -> Page:
    return Page(status, msgspec.json.encode(value) + b"\n")


def _refusal(status: HTTPStatus, reason: str) -> Page:
    return _json(status, {"error": reason})


def _head(page: Page) -> bytes:
    lines = [
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
