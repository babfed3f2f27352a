"""Lets only signed requests change a NameServer (setting `nameserver.signed_changes`).

Reads need no signature, because clients that do not sign must find their brokers. Everything else
does, also what keeps a broker registered.
"""

from typing import Final

from penstock.config import AccessConfig
from penstock.rpc import signed_changes
from penstock.wire.codes import RequestCode

READS: Final = frozenset(
    {
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        RequestCode.GET_KV_CONFIG,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.GET_NAMESRV_CONFIG,
    }
)
"""Requests that change nothing."""


class SignedNameServerChanges(signed_changes.SignedChanges):
    """Checks the requests to a NameServer."""

    def __init__(self, access: AccessConfig) -> None:
        """The known users are those of `access`; raises BadSetting if there is none."""
        super().__init__(access, READS, setting="nameserver.signed_changes", server="NameServer")
