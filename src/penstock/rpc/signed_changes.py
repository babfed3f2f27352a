"""Lets only signed requests of known users change anything.

Requests that only read need no signature. Everything else does, and every code that is not known. A
refusal is NO_PERMISSION and one line of the logger `penstock.audit`, as at a broker.
"""

import logging
from collections.abc import Set
from typing import Final

from penstock.config import AccessConfig
from penstock.errors import BadSetting, NoPermission
from penstock.rpc.answers import Reply
from penstock.rpc.command import Command
from penstock.rpc.signatures import is_request_signed
from penstock.wire.codes import request_name
from penstock.wire.signing import ACCESS_KEY, text_bytes

audit = logging.getLogger("penstock.audit")

_PRINTED_CHARACTERS_MAX: Final = 128


class SignedChanges:
    """Checks the requests to a server."""

    def __init__(self, access: AccessConfig, reads: Set[int], *, setting: str, server: str) -> None:
        """The known users are those of `access`; raises BadSetting if there is none."""
        pairs = [text.split(":", 1) for text in (access.initial_user, access.internal_user) if text]
        if not pairs:
            raise BadSetting(
                f"{setting} needs a user who may sign",
                hint="set access.internal_user for brokers and access.initial_user for tools",
            )
        self._reads = reads
        self._server = server
        self._strict = access.strict_signing
        self._secrets = {name: text_bytes(password) for name, password in pairs}

    def check(self, command: Command) -> Reply | None:
        """None if the request is allowed, else the refusal (NO_PERMISSION), which is logged."""
        if command.code in self._reads:
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
            f"{shown} may not change this {self._server} from {source} ({request}): {why}",
            hint="sign with the user of access.internal_user (brokers) or access.initial_user",
        )
        return Reply(error.code, remark=error.remark())
