"""The signature of a request: Apache's, or a strict one of Penstock's clients."""

from penstock.rpc.command import Command
from penstock.wire.signing import STRICT_SIGNATURE, is_signed, is_strictly_signed


def is_request_signed(command: Command, secret: bytes, *, strict: bool) -> bool:
    """Whether the request is signed with `secret`; with `strict` Apache's signatures do not count.

    A strict signature counts alone, so that nobody can replace it by Apache's.
    """
    if STRICT_SIGNATURE in command.ext:
        return is_strictly_signed(
            command.code, command.ext, command.body, secret, now_ms=command.now_ms
        )
    return not strict and is_signed(command.ext, command.body, secret, version=command.version)
