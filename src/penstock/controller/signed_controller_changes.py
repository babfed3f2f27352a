"""Lets only signed requests change a controller (setting `controller.signed_changes`).

Heartbeats change something: a replica that is not alive is replaced, or does not become the master.
"""

from typing import Final

from penstock.config import AccessConfig
from penstock.rpc import signed_changes
from penstock.wire.codes import RequestCode

READS: Final = frozenset(
    {
        RequestCode.CONTROLLER_GET_METADATA_INFO,
        RequestCode.CONTROLLER_GET_NEXT_BROKER_ID,
        RequestCode.CONTROLLER_GET_REPLICA_INFO,
        RequestCode.CONTROLLER_GET_SYNC_STATE_DATA,
        RequestCode.GET_CONTROLLER_CONFIG,
    }
)
"""Requests that change nothing."""


class SignedControllerChanges(signed_changes.SignedChanges):
    """Checks the requests to a controller."""

    def __init__(self, access: AccessConfig) -> None:
        """The known users are those of `access`; raises BadSetting if there is none."""
        super().__init__(access, READS, setting="controller.signed_changes", server="controller")
