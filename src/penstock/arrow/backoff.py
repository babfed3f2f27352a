"""Retries with exponential back-off, and which errors are worth one."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from penstock.clock import Clock, pause
from penstock.errors import (
    AllFailed,
    NoPermission,
    NotNameServer,
    PeerUntrusted,
    PenstockError,
    SendFailed,
    SystemBusy,
    TlsError,
)
from penstock.wire.codes import ResponseCode

log = logging.getLogger(__name__)

T = TypeVar("T")

BACKOFF_MS: Final = 100
BACKOFF_MS_MAX: Final = 2_000
"""First and longest pause between two attempts."""
PERMISSION_RETRY_MS: Final = 5_000
"""How long a send is retried that brokers refuse for lack of permission."""
TEMPORARY_CODES: Final = frozenset(
    (
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLOW_CONTROL,
    )
)
"""Refusals of reads that may be temporary."""


def as_temporary(error: PenstockError) -> PenstockError:
    """The error, replaced by one with `retry` if its response code may be temporary."""
    return SystemBusy(error.message) if error.answer_code in TEMPORARY_CODES else error


def permanent_cause(error: PenstockError) -> PenstockError | None:
    """The error to raise without a retry: the server is not trusted, or is not a NameServer.
    None for other errors."""
    if isinstance(error, PeerUntrusted):
        return TlsError(error.message, hint=error.hint)
    if isinstance(error, NotNameServer):
        return error
    if isinstance(error, AllFailed):
        causes = [permanent_cause(cause) for cause in error.attempts]
        return causes[-1] if causes and all(causes) else None
    return None


def permission_error(error: PenstockError) -> PenstockError | None:
    """The refusal if all attempts of a send were refused for lack of permission.

    It is raised only after PERMISSION_RETRY_MS: a broker that is drained refuses writes until
    clients have a route to another one.
    """
    causes = error.attempts if isinstance(error, SendFailed) else ()
    if causes and all(isinstance(cause, NoPermission) for cause in causes):
        return causes[-1]
    return None


async def retry(
    clock: Clock,
    timeout_ms: int,
    attempt: Callable[[], Awaitable[T]],
    refresh: Callable[[], Awaitable[object]] | None = None,
) -> T:
    """The result of `attempt`, which is repeated while its error has `retry` and time is left."""
    began_ms = clock.monotonic_ms()
    wait_ms = BACKOFF_MS
    while True:
        try:
            return await attempt()
        except PenstockError as error:
            if (cause := permanent_cause(error)) is not None:
                raise cause from error.__cause__
            waited_ms = clock.monotonic_ms() + wait_ms - began_ms
            if (refused := permission_error(error)) is not None and (
                waited_ms >= PERMISSION_RETRY_MS
            ):
                raise refused from error
            if not error.retry or waited_ms >= timeout_ms:
                raise
            log.info("retrying in %d ms: %s", wait_ms, error)
        await pause(clock, wait_ms)
        wait_ms = min(2 * wait_ms, BACKOFF_MS_MAX)
        if refresh is not None:
            try:
                await refresh()
            except PenstockError as error:
                log.info("could not refresh the route: %s", error)
