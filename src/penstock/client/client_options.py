"""Options that all clients share: NameServers, client id, credentials, TLS, timeouts.

Every client class accepts them as keyword arguments (`Unpack[ClientKeywords]`) besides its own, so
editors and mypy know all of them. `ClientOptions.of` validates them.
"""

import os
import ssl as tls
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from penstock.clock import Clock
from penstock.errors import BadSetting
from penstock.transport.peer import split_address

NAMESERVER_DEFAULT = "127.0.0.1:9876"
NAMESERVER_VARIABLE = "NAMESRV_ADDR"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"


class ClientKeywords(TypedDict, total=False):
    """Keyword arguments that all clients share."""

    namespace: str
    access_key: str
    secret_key: str
    security_token: str
    ssl: tls.SSLContext | bool
    instance_name: str
    timeout_ms: int
    route_refresh_ms: int
    heartbeat_ms: int
    trace: bool | str
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The validated options of one client.

    `nameservers` holds addresses, or one URL from which a list of addresses is read periodically.
    `ssl=True` encrypts without checking certificates, as RocketMQ's clients do by default.
    `trace_topic` is None if tracing is off.
    """

    nameservers: tuple[str, ...] = (NAMESERVER_DEFAULT,)
    namespace: str = ""
    access_key: str = ""
    secret_key: str = ""
    security_token: str | None = None
    ssl: tls.SSLContext | None = None
    instance_name: str = ""
    timeout_ms: int = 3_000
    route_refresh_ms: int = 30_000
    heartbeat_ms: int = 30_000
    trace_topic: str | None = None
    clock: Clock | None = None

    @classmethod
    def of(
        cls, nameservers: str | Sequence[str] | None, keywords: ClientKeywords
    ) -> "ClientOptions":
        """Validate keyword arguments; raises BadSetting, TypeError."""
        given = dict(keywords)
        unknown = sorted(given.keys() - ClientKeywords.__annotations__.keys())
        if unknown:
            known = ", ".join(sorted(ClientKeywords.__annotations__))
            raise TypeError(f"unknown option {unknown[0]!r}; options of all clients are {known}")
        context = keywords.get("ssl")
        trace = keywords.get("trace", False)
        options = cls(
            nameservers=_addresses(nameservers),
            namespace=keywords.get("namespace", ""),
            access_key=keywords.get("access_key", ""),
            secret_key=keywords.get("secret_key", ""),
            security_token=keywords.get("security_token"),
            ssl=_unverified_context() if context is True else context or None,
            instance_name=keywords.get("instance_name", ""),
            timeout_ms=_positive("timeout_ms", keywords.get("timeout_ms", 3_000)),
            route_refresh_ms=_positive(
                "route_refresh_ms", keywords.get("route_refresh_ms", 30_000)
            ),
            heartbeat_ms=_positive("heartbeat_ms", keywords.get("heartbeat_ms", 30_000)),
            trace_topic=TRACE_TOPIC if trace is True else trace or None,
            clock=keywords.get("clock"),
        )
        if bool(options.access_key) != bool(options.secret_key):
            raise BadSetting(
                "access_key and secret_key belong together", hint="give both or neither"
            )
        return options


def _addresses(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Addresses from a list, from a string separated by `;` or `,`, or from the environment."""
    if given is None:
        given = os.environ.get(NAMESERVER_VARIABLE) or NAMESERVER_DEFAULT
    if isinstance(given, str):
        if given.startswith(("http://", "https://")):
            return (given,)
        given = given.replace(",", ";").split(";")
    addresses = tuple(text.strip() for text in given if text.strip())
    if not addresses:
        raise BadSetting("no NameServer is given", hint='give one as "host:port"')
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise BadSetting(
                f"bad NameServer address: {error}", hint='for example "localhost:9876"'
            ) from None
    return addresses


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise BadSetting(
            f"{name} is {value}; it must be greater than 0", hint="the unit is milliseconds"
        )
    return value


def _unverified_context() -> tls.SSLContext:
    context = tls.SSLContext(tls.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = tls.CERT_NONE
    return context
