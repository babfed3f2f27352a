"""Which errors are retried, and for how long."""

import asyncio

import pytest

from penstock.arrow.backoff import PERMISSION_RETRY_MS, permanent_cause, permission_error, retry
from penstock.errors import (
    NoNameServer,
    NoPermission,
    NoRoute,
    PeerUnreachable,
    PeerUntrusted,
    PenstockError,
    SendFailed,
    TlsError,
)
from penstock.testing.virtual_clock import VirtualClock

AWAY, STRANGER = PeerUnreachable("away", address="a:1"), PeerUntrusted("bad", address="b:1")
DENIED = NoPermission("not you")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AWAY, None),
        (NoRoute("none"), None),
        (STRANGER, TlsError),
        (DENIED, None),
        (NoNameServer("the list is empty"), None),
        (NoNameServer("one", attempts=(STRANGER, AWAY)), None),
        (NoNameServer("both", attempts=(STRANGER, STRANGER)), TlsError),
        (SendFailed("all", attempts=(DENIED, DENIED)), None),
        (SendFailed("no", attempts=(NoNameServer("", attempts=(STRANGER,)),)), TlsError),
    ],
)
def test_permanent_errors_are_distinguished_from_temporary_ones(
    error: PenstockError, kind: type[PenstockError] | None
) -> None:
    cause = permanent_cause(error)
    assert type(cause) is (kind or type(None))
    assert cause is None or not cause.retry


def test_a_permission_error_is_permanent_only_if_all_attempts_agree() -> None:
    assert permission_error(SendFailed("all", attempts=(DENIED, DENIED))) is DENIED
    for error in (AWAY, SendFailed("none"), SendFailed("once", attempts=(AWAY, DENIED))):
        assert permission_error(error) is None


@pytest.mark.parametrize(
    ("error", "lasts_ms", "kind"),
    [
        (SendFailed("all", attempts=(DENIED,)), PERMISSION_RETRY_MS, NoPermission),
        (SendFailed("all", attempts=(AWAY,)), 60_000, SendFailed),
        (STRANGER, 0, TlsError),
        (DENIED, 0, NoPermission),
    ],
)
def test_errors_are_retried_for_their_time(
    error: PenstockError, lasts_ms: int, kind: type[PenstockError]
) -> None:
    clock = VirtualClock()

    async def fail() -> None:
        raise error

    async def body() -> None:
        began_ms = clock.monotonic_ms()
        trying = asyncio.ensure_future(retry(clock, 60_000, fail))
        while not trying.done():
            await clock.elapse(100)
        assert type(trying.exception()) is kind
        waited_ms = clock.monotonic_ms() - began_ms
        assert lasts_ms / 2 <= waited_ms <= lasts_ms + 100

    asyncio.run(body())
