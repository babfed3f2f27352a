"""Where the response to a request goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from penstock.rpc.answers import Answer

if TYPE_CHECKING:
    from penstock.broker.long_polling import SuspendedRequest


class ResponseConnection(Protocol):
    """What the execution of answers needs of a client's connection."""

    client: int

    def write(self, data: bytes) -> None: ...

    def close(self, why: str) -> None: ...

    def adjust_in_flight(self, change: int) -> None:
        """Count requests whose response waits for something else than the connection."""

    def postpone(self, suspended: SuspendedRequest, last: bool) -> bool:
        """Whether a woken request has to wait until the client reads its responses."""


@dataclass(slots=True, eq=False)
class PendingResponse:
    """A request that has no response yet."""

    connection: ResponseConnection
    opaque: int
    encoding: int
    oneway: bool
    code: int = 0
    """The code of the request."""
    began_ns: int = 0
    """When it was read, by `perf_counter_ns`."""
    suspended: bool = False
    """Whether it was suspended until messages arrived; never unset."""


Execute: TypeAlias = Callable[[PendingResponse, Callable[[], Answer]], None]
"""Executes the answer that a piece of a handler returns, or answers with the error it raises."""
