"""What is waited for, and what is not."""

import pytest

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
from penstock.spark.patience import hopeless

AWAY, STRANGER = PeerUnreachable("away", address="a:1"), PeerUntrusted("bad", address="b:1")
DENIED = NoPermission("not you")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AWAY, None),
        (NoRoute("none"), None),
        (STRANGER, TlsError),
        (DENIED, NoPermission),
        (NoNameServer("the list is empty"), None),
        (NoNameServer("one", attempts=(STRANGER, AWAY)), None),
        (NoNameServer("both", attempts=(STRANGER, STRANGER)), TlsError),
        (SendFailed("once", attempts=(AWAY, DENIED)), None),
        (SendFailed("all", attempts=(DENIED, DENIED)), NoPermission),
        (SendFailed("no", attempts=(NoNameServer("", attempts=(STRANGER,)),)), TlsError),
    ],
)
def test_what_waiting_does_not_mend(error: PenstockError, kind: type[PenstockError] | None) -> None:
    cause = hopeless(error)
    assert type(cause) is (kind or type(None))
    assert cause is None or not cause.retry
