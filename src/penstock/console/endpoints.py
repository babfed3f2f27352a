"""Endpoints of the JSON API: a declared table, from which the documentation is generated.

A handler receives an `ApiCall` and returns a value that is encoded as JSON, or a Response. An error
is an object `{"error": {"message": …, "hint": …}}` with a status that fits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.console.security.accounts import Login, Role
from penstock.errors import (
    BadFilter,
    BadSetting,
    GroupNotExist,
    HeaderError,
    InvalidParameter,
    NoPermission,
    NoRoute,
    PeerError,
    PenstockError,
    QueryNotFound,
    Refused,
    TopicNotExist,
)

if TYPE_CHECKING:
    from penstock.console.console_context import Console

T = TypeVar("T")
Handler = Callable[["ApiCall"], Awaitable[Any]]

COOKIE = "penstock_console"
BODY_BYTES_MAX = 8 << 20
_STATUS: Final = (
    (NoPermission, 403),
    ((NoRoute, TopicNotExist, GroupNotExist, QueryNotFound), 404),
    ((InvalidParameter, BadFilter, BadSetting, HeaderError), 400),
    (PeerError, 502),
    (Refused, 409),
)


class ApiError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request to the API."""

    console: Console
    request: Request
    login: Login
    body: Mapping[str, Any]

    @property
    def admin(self) -> AsyncAdmin:
        """The client for requests of this user."""
        return self.login.admin or self.console.admin

    @property
    def address(self) -> str:
        """The address of the client; that of a trusted proxy's client, if one is configured."""
        return self.request.client.host[:64] if self.request.client else ""

    def is_allowed(self) -> bool:
        """Whether the user is still logged in, for answers that take long."""
        console = self.console
        token = self.request.cookies.get(COOKIE)
        return not console.needs_login or console.sessions.has(token, console.now_ms())

    def path(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])

    def text(self, name: str, default: str = "") -> str:
        """A parameter of the query."""
        return self.request.query_params.get(name, default).strip()

    def number(self, name: str, default: int, *, least: int = 0, most: int = 10_000) -> int:
        """A whole number of the query, within limits."""
        text = self.text(name)
        if not text:
            return default
        if not text.lstrip("-").isdecimal():
            raise InvalidParameter(f"{name}: {text[:40]!r} is not a whole number")
        return min(max(int(text), least), most)

    def flag(self, name: str) -> bool:
        """A truth value of the query."""
        return self.text(name).lower() in ("1", "true", "yes")

    def time(self, name: str) -> datetime | None:
        """A time of the query: milliseconds since 1970, ISO 8601, or `-15m`."""
        return parse_time(name, self.text(name), self.console.now_ms())

    def given(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A value of the body; it must have this type."""
        value = self.body.get(name, default)
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
        raise InvalidParameter(
            f"{name} must be given as {kind.__name__}", hint="see docs/console-api.md"
        )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and a path of the API."""

    method: str
    path: str
    role: Role
    handler: Handler
    summary: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the query, with their descriptions."""
    body: Mapping[str, str] = field(default_factory=dict)
    """Members of the JSON body, with their descriptions."""
    open: bool = False
    """Whether it needs no login."""


ENDPOINTS: list[Endpoint] = []


def endpoint(
    method: str,
    path: str,
    role: Role = Role.VIEW,
    *,
    parameters: Mapping[str, str] | None = None,
    body: Mapping[str, str] | None = None,
    open: bool = False,
) -> Callable[[Handler], Handler]:
    """Register a handler. Its docstring is the description of the endpoint."""

    def decorate(handler: Handler) -> Handler:
        summary = " ".join((handler.__doc__ or "").split())
        ENDPOINTS.append(
            Endpoint(method, path, role, handler, summary, parameters or {}, body or {}, open)
        )
        return handler

    return decorate


def json_response(value: object, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(
        msgspec.json.encode(value),
        status,
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def error_response(error: ApiError | PenstockError) -> Response:
    """An error as JSON, with the next step."""
    if isinstance(error, ApiError):
        status, message, hint = error.status, error.message, error.hint
    else:
        status = next((code for kinds, code in _STATUS if isinstance(error, kinds)), 500)
        message, hint = error.message or type(error).__name__, error.hint
        if hint:  # servers send their hint in the message
            message = message.removesuffix(hint).rstrip("; ")
    return json_response({"error": {"message": message, "hint": hint}}, status)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_time(name: str, text: str, now_ms: int) -> datetime | None:
    """A time: milliseconds since 1970, ISO 8601, or `-15m` before now; None if it is empty."""
    if not text:
        return None
    now = datetime.fromtimestamp(now_ms / 1000).astimezone()
    try:
        if text[0] == "-" and text[-1] in _UNITS:
            return now - timedelta(seconds=float(text[1:-1]) * _UNITS[text[-1]])
        if text.isdecimal():
            return datetime.fromtimestamp(int(text) / 1000).astimezone()
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise InvalidParameter(
            f"{name}: {text[:40]!r} is not a time",
            hint="use 2026-08-01T12:00, milliseconds since 1970, or -15m, -2h, -1d",
        ) from None
