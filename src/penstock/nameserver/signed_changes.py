"""Lets only signed requests of known users change anything (setting `nameserver.signed_changes`).

Reads need no signature, because clients that do not sign must find their brokers. Everything else
does, also what keeps a broker registered, and every code that is not known here. A refusal is
NO_PERMISSION and one line of the logger `penstock.audit`, as at a broker.
"""

import logging
from typing import Final

from penstock.config import AccessConfig
from penstock.errors import BadSetting, NoPermission
from penstock.rpc.answers import Reply
from penstock.rpc.command import Command
from penstock.rpc.signatures import is_request_signed
from penstock.wire.codes import RequestCode, request_name
from penstock.wire.signing import ACCESS_KEY, text_bytes

audit = logging.getLogger("penstock.audit")

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
_PRINTED_CHARACTERS_MAX: Final = 128


class SignedChanges:
    """Checks the requests to a NameServer."""

    def __init__(self, access: AccessConfig) -> None:
        """The known users are those of `access`; raises BadSetting if there is none."""
        pairs = [text.split(":", 1) for text in (access.initial_user, access.internal_user) if text]
        if not pairs:
            raise BadSetting(
                "nameserver.signed_changes needs a user who may sign",
                hint="set access.internal_user for brokers and access.initial_user for tools",
            )
        self._strict = access.strict_signing
        self._secrets = {name: text_bytes(password) for name, password in pairs}

    def check(self, command: Command) -> Reply | None:
        """None if the request is allowed, else the refusal (NO_PERMISSION), which is logged."""
        if command.code in READS:
            return None
        name = command.ext.get(ACCESS_KEY, "")
        secret = self._secrets.get(name)
        signed = is_request_signed(command, secret or b"", strict=self._strict)
        if secret is not None and signed:
            command.user = name
            return None
        why = "unknown user or wrong signature" if name else "the request is not signed"
        shown = ascii(name[:_PRINTED_CHARACTERS_MAX])[1:-1] if name else "an anonymous user"
        source = command.peer.rpartition(":")[0] or "an unknown address"
        request = request_name(command.code)
        audit.warning("refused subject=%s source=%s request=%s why=%s", shown, source, request, why)
        error = NoPermission(
            f"{shown} may not change this NameServer from {source} ({request}): {why}",
            hint="sign with the user of access.internal_user (brokers) or access.initial_user",
        )
        return Reply(error.code, remark=error.remark())
