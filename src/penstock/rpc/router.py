"""One row per request code: who handles it, what right it takes.

A family of handlers is an object with `rows()`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import PenstockError
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.wire.codes import ResponseCode

Handler: TypeAlias = Callable[[Command], Answer]


@dataclass(frozen=True, slots=True)
class Row:
    """A request code and its handler."""

    code: int
    handler: Handler


class Router:
    """Finds the handler of a command and turns its errors into responses."""

    def __init__(self, families: Iterable[Iterable[Row]]) -> None:
        self.rows: dict[int, Handler] = {}
        self.refusals: dict[str, int] = {}  # by the error's name
        for rows in families:
            for row in rows:
                assert row.code not in self.rows, f"two handlers for {row.code}"
                self.rows[row.code] = row.handler

    def handle(self, command: Command) -> Answer:
        """The answer to a command; never raises a PenstockError."""
        handler = self.rows.get(command.code)
        if handler is None:
            return unsupported(command.code)
        try:
            return handler(command)
        except PenstockError as error:
            name = type(error).__name__
            self.refusals[name] = self.refusals.get(name, 0) + 1
            return refusal(error)


def unsupported(code: int) -> Reply:
    """What any server says to a code it does not know; the text is the one that tools expect."""
    remark = f" request type {code} not supported"
    return Reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)


def refusal(error: PenstockError) -> Reply:
    """An error as a response."""
    return Reply(error.code, remark=error.remark())
