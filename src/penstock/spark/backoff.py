"""Trying again for as long as it is worth it."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from penstock.clock import Clock, pause
from penstock.errors import (
    AllFailed,
    NoPermission,
    PeerUntrusted,
    PenstockError,
    SendFailed,
    SystemBusy,
    TlsError,
)
from penstock.wire.codes import ResponseCode

log = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN_MS: Final = 100
AGAIN_MS_MAX: Final = 2_000
"""Pauses before a broker is asked again."""
DENIED_MS: Final = 5_000
"""How long it is tried to send what brokers say is not allowed."""
PASSING: Final = frozenset(
    (
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLOW_CONTROL,
    )
)
"""Refusals of reads that may be over in a moment."""


def passing(error: PenstockError) -> PenstockError:
    """The error; one that is worth another try where a refusal may be over in a moment."""
    return SystemBusy(error.message) if error.answer_code in PASSING else error


def hopeless(error: PenstockError) -> PenstockError | None:
    """What to raise at once, since waiting does not mend it: that a server is not trusted; None
    where it may help."""
    if isinstance(error, PeerUntrusted):
        return TlsError(error.message, hint=error.hint)
    if isinstance(error, AllFailed):
        causes = [hopeless(cause) for cause in error.attempts]
        return causes[-1] if causes and all(causes) else None
    return None


def denied(error: PenstockError) -> PenstockError | None:
    """What to raise where brokers take nothing of this user, or nothing for this topic, and that
    has lasted DENIED_MS: who drains a broker lets it refuse until clients know another."""
    causes = error.attempts if isinstance(error, SendFailed) else ()
    if causes and all(isinstance(cause, NoPermission) for cause in causes):
        return causes[-1]
    return None


async def insist(
    clock: Clock,
    patience_ms: int,
    attempt: Callable[[], Awaitable[T]],
    refresh: Callable[[], Awaitable[object]] | None = None,
) -> T:
    """What `attempt` comes to, tried again while its error says so and there is time left."""
    began_ms = clock.monotonic_ms()
    wait_ms = AGAIN_MS
    while True:
        try:
            return await attempt()
        except PenstockError as error:
            if (cause := hopeless(error)) is not None:
                raise cause from error.__cause__
            waited_ms = clock.monotonic_ms() + wait_ms - began_ms
            if (refused := denied(error)) is not None and waited_ms >= DENIED_MS:
                raise refused from error
            if not error.retry or waited_ms >= patience_ms:
                raise
            log.info("tried again in %d ms: %s", wait_ms, error)
        await pause(clock, wait_ms)
        wait_ms = min(2 * wait_ms, AGAIN_MS_MAX)
        if refresh is not None:
            try:
                await refresh()
            except PenstockError as error:
                log.info("no fresh route: %s", error)
