"""The address of a broker that clients get."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import BadSetting, PenstockError
from penstock.transport.peer import Peer, Sign
from penstock.transport.tls import outgoing_context
from penstock.wire.codes import RequestCode

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.config import Settings, TlsConfig

log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::", "")
SELF_CHECK_MS = 3_000


def resolve(address: str) -> str:
    """The announced address with a numeric host, as stored in messages."""
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    try:
        found = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise BadSetting(
            f"broker.announce {host} can't be resolved: {error.strerror or error}",
            hint="set it to an address or a name of this machine that clients can reach",
        ) from None
    number = str(found[0])
    return f"[{number}]:{port}" if ":" in number else f"{number}:{port}"


def announced_host(settings: Settings) -> str:
    """The host in the address that clients get."""
    config = settings.broker
    if config.announce:
        return config.announce
    if config.host not in WILDCARDS:
        return config.host
    # The address that this machine uses towards others; nothing is sent.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


async def check_address(address: str, tls: TlsConfig, sign: Sign | None, clock: Clock) -> None:
    """Warn if the announced address does not lead to this broker."""
    context = None
    if tls.mode == "enforcing":  # any certificate will do: it is our own
        context = outgoing_context(msgspec.structs.replace(tls, outgoing=True, outgoing_ca=""))
    peer = Peer(address, ssl=context, sign=sign, clock=clock)
    try:
        await peer.call(RequestCode.GET_MAX_OFFSET, {}, timeout_ms=SELF_CHECK_MS)
    except PenstockError as error:
        log.warning(
            "the announced address %s does not reach this broker (%s): set announce "
            "(--announce) to an address that does",
            address,
            error,
        )
    finally:
        await peer.close()
