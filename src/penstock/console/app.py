"""The ASGI application: the page, its files, and the JSON API.

Each response has strict security headers: scripts and styles come from the console's own files
only, and no other site may embed it. A request for another host name than the console's is refused
on a loopback address, so that a web page can't reach it by DNS rebinding.
"""

import gzip
import hashlib
import html
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from penstock.console.api import load_endpoints
from penstock.console.api.session_api import session_json
from penstock.console.console_context import ANYBODY, Console
from penstock.console.console_settings import ConsoleSettings, is_loopback
from penstock.console.endpoints import (
    BODY_BYTES_MAX,
    COOKIE,
    ApiCall,
    ApiError,
    Endpoint,
    error_response,
    json_response,
)
from penstock.console.openapi import openapi
from penstock.console.security.accounts import Login
from penstock.console.security.audit import AuditEntry, detail_of
from penstock.console.security.sessions import same_token
from penstock.errors import PenstockError
from penstock.version import VERSION

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

CSRF_HEADER = "x-penstock-csrf"
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; font-src 'self'; manifest-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOREVER = "public, max-age=31536000, immutable"


def create_app(console: Console) -> Starlette:
    """The application of a console; it starts the console and closes it."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await console.start()
        try:
            yield
        finally:
            await console.close()

    files = StaticFiles(console)
    endpoints = load_endpoints()
    document = openapi(endpoints)

    async def describe(_: Request) -> Response:
        return json_response(document)

    routes = [
        Route("/api/openapi.json", describe),
        *(_route(console, one) for one in endpoints),
        Route("/api/{path:path}", _no_endpoint, methods=["GET", "POST", "PUT", "DELETE"]),
        Route("/static/{version}/{path:path}", files.file),
        Route("/favicon.ico", files.icon),
        Route("/{path:path}", files.page),
    ]
    return Starlette(routes=routes, lifespan=lifespan, middleware=_middleware(console.settings))


def _middleware(settings: ConsoleSettings) -> list[Middleware]:
    found = [Middleware(SecurityHeaders)]
    if settings.trusted_proxies:
        # It is starlette's kind of middleware; only the types of the two packages differ.
        proxies: Any = ProxyHeadersMiddleware
        return [*found, Middleware(proxies, trusted_hosts=list(settings.trusted_proxies))]
    if is_loopback(settings.host):
        found.append(Middleware(HostCheck))
    return found


async def _no_endpoint(request: Request) -> Response:
    return error_response(
        ApiError(404, f"there is no {request.method} {request.url.path}", "see docs/console-api.md")
    )


class StaticFiles:
    """The console's own files, in memory, also compressed. Their path has a hash of all of them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._files = {
            str(path.relative_to(STATIC)): path.read_bytes()
            for path in sorted(STATIC.rglob("*"))
            if path.suffix in _TYPES
        }
        digest = hashlib.sha256()
        for name, data in self._files.items():
            digest.update(name.encode() + data)
        self.version = digest.hexdigest()[:12]
        page = self._files.pop("index.html").decode()
        self._page = page.replace("{version}", self.version).replace("{release}", VERSION)
        self._compressed = {name: gzip.compress(data) for name, data in self._files.items()}
        self._shared = [
            name
            for name in self._files
            if name.startswith("js/") and not name.startswith("js/pages/")
        ]

    async def page(self, request: Request) -> Response:
        """The page, for all addresses of pages: the script shows what the address says.

        It contains the session and names the scripts, which saves the browser two round trips.
        """
        session = json.dumps(session_json(self._console, request))
        modules = "\n".join(
            f'<link rel="modulepreload" href="/static/{self.version}/{name}">'
            for name in (*self._shared, *self._script_of(request.url.path))
        )
        page = self._page.replace("<!-- modules -->", modules)
        page = page.replace("{session}", html.escape(session, quote=True))
        return Response(page, media_type="text/html", headers={"Cache-Control": "no-store"})

    def _script_of(self, path: str) -> list[str]:
        """The script of a page, as main.js finds it."""
        first, _, rest = path.strip("/").partition("/")
        name = first.replace("-", "_") or "home"
        if rest and name in ("topics", "groups"):
            name = name.removesuffix("s")
        script = f"js/pages/{name}.js"
        return [script] if script in self._files else []

    async def icon(self, request: Request) -> Response:
        return self._answer(request, "icon.svg")

    async def file(self, request: Request) -> Response:
        return self._answer(request, request.path_params["path"])

    def _answer(self, request: Request, name: str) -> Response:
        data = self._files.get(name)
        if data is None:
            return Response("not found", 404, media_type="text/plain")
        headers = {"Cache-Control": _FOREVER, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            data = self._compressed[name]
        return Response(data, media_type=_TYPES[Path(name).suffix], headers=headers)


def _route(console: Console, one: Endpoint) -> Route:
    async def answer(request: Request) -> Response:
        console.watch.use()
        try:
            login = _log_in(console, request, one)
            body = await _body(request) if one.method != "GET" else {}
        except ApiError as error:
            return error_response(error)
        call = ApiCall(console, request, login, body)
        response = await _answer(call, one)
        if one.method != "GET" and not one.open:
            await _audit(call, one, response.status_code)
        return response

    return Route(f"/api{one.path}", answer, methods=[one.method])


async def _answer(call: ApiCall, one: Endpoint) -> Response:
    try:
        value = await one.handler(call)
    except (ApiError, PenstockError) as error:
        return error_response(error)
    except Exception:
        log.exception("%s %s failed", one.method, one.path)
        return error_response(
            ApiError(500, "internal error, probably a bug in Penstock", "see the console's log")
        )
    return value if isinstance(value, Response) else json_response(value)


def _log_in(console: Console, request: Request, one: Endpoint) -> Login:
    """The user of a request; raises ApiError unless it may use the endpoint."""
    session = console.sessions.find(request.cookies.get(COOKIE), console.now_ms())
    if not console.needs_login:
        login, csrf = ANYBODY, console.csrf
    elif session is not None:
        login, csrf = session.login, session.csrf
    elif one.open:
        login, csrf = ANYBODY, None
    else:
        raise ApiError(401, "you are not logged in", "log in first")
    if one.method != "GET":
        _check_origin(request)
        if csrf is not None and not same_token(request.headers.get(CSRF_HEADER), csrf):
            raise ApiError(
                403,
                "the request has no valid CSRF token",
                f"send the csrf of GET /api/session as {CSRF_HEADER}",
            )
    if not one.open and login.role < one.role:
        raise ApiError(
            403,
            f"this needs the role {one.role.text}; you have the role {login.role.text}",
            "ask an administrator of the console",
        )
    return login


def _check_origin(request: Request) -> None:
    """Refuse changes that another site sends."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if site not in ("same-origin", "none") or (origin is not None and origin != own):
        raise ApiError(
            403,
            "the request comes from another site",
            "if a proxy serves the console, name it with --trusted-proxy and let it forward Host",
        )


async def _body(request: Request) -> dict[str, Any]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES_MAX:
            raise ApiError(413, f"the body is longer than {BODY_BYTES_MAX} bytes")
    if not data:
        return {}
    if kind != "application/json":
        raise ApiError(415, "the body must be application/json")
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


async def _audit(call: ApiCall, one: Endpoint, status: int) -> None:
    await call.console.audit.add(
        AuditEntry(
            at_ms=call.console.now_ms(),
            user=call.login.name,
            address=call.address,
            action=f"{one.method} {one.path}",
            target=json.dumps(call.request.path_params, ensure_ascii=False)
            if call.request.path_params
            else "",
            detail=detail_of(call.body),
            status=status,
        )
    )


class SecurityHeaders:
    """Adds the security headers to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [
            (name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class HostCheck:
    """Refuses requests for other host names while the console listens on a loopback address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            name = host.rpartition("]")[0].lstrip("[") if "]" in host else host.partition(":")[0]
            if not is_loopback(name):
                refusal = ApiError(
                    421,
                    f"this console does not serve the host {name[:80]}",
                    "use http://127.0.0.1 or http://localhost with its port",
                )
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)
