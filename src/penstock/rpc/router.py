"""One row per request code: the router is the list of the requests that a server serves.

A family of handlers is an object with `rows()`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from penstock.errors import PenstockError
from penstock.rpc.answers import Answer, ClientId, Reply
from penstock.rpc.command import Command
from penstock.wire.codes import ResponseCode
from penstock.wire.frame import Request
from penstock.wire.output import Output

Handler: TypeAlias = Callable[[Command], Answer]


class InPlaceHandler(Protocol):
    """Handles requests of the hot path without copying them."""

    def handle(self, request: Request, output: Output, client: ClientId, now_ms: int) -> Answer:
        """Read the request in the connection's buffer; write the response into the output, or
        return an answer. Raises a PenstockError if the request is refused."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request code and the handler of its Command."""

    code: int
    handler: Handler
    in_place: InPlaceHandler | None = None
    """Handles the same request in place, for the request loop."""


@dataclass(frozen=True, slots=True)
class InPlaceRow:
    """A request code that the request loop gives to its handler in place, as no Command."""

    code: int
    handler: InPlaceHandler


class Router:
    """Finds the handler of a command and turns its errors into responses."""

    def __init__(self, families: Iterable[Iterable[Row | InPlaceRow]]) -> None:
        self.rows: dict[int, Row | InPlaceRow] = {}
        self.in_place: dict[int, InPlaceHandler] = {}  # for the request loop
        self.refusals: dict[str, int] = {}  # by the error's name
        self._handlers: dict[int, Handler] = {}
        for rows in families:
            for row in rows:
                assert row.code not in self.rows, f"two handlers for {row.code}"
                self.rows[row.code] = row
                if isinstance(row, InPlaceRow):
                    self.in_place[row.code] = row.handler
                else:
                    self._handlers[row.code] = row.handler
                    if row.in_place is not None:
                        self.in_place[row.code] = row.in_place

    def handle(self, command: Command) -> Answer:
        """The answer to a command; never raises a PenstockError."""
        handler = self._handlers.get(command.code)
        if handler is None:
            return unsupported(command.code)
        try:
            return handler(command)
        except PenstockError as error:
            name = type(error).__name__
            self.refusals[name] = self.refusals.get(name, 0) + 1
            return refusal(error)


def unsupported(code: int) -> Reply:
    """The response to an unknown code, with the text that tools expect."""
    remark = f" request type {code} not supported"
    return Reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)


def bug_text(error: Exception) -> str:
    """The text for an error that no handler should raise."""
    return f"a bug in Penstock: {type(error).__name__}: {error}"


def refusal(error: PenstockError) -> Reply:
    """An error as a response."""
    return Reply(error.code, remark=error.remark())
