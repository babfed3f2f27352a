"""Options: one frozen dataclass per client, shared by its asyncio and its synchronous class.

`ClientOptions` has the options of all clients; those of a producer or consumer are a subclass. The
fields of the dataclass are the keyword arguments of the constructors, with their defaults:
`takes_options` gives a constructor the signature of its options, `same_arguments_as` gives a
synchronous client the signature of its asyncio counterpart. Editors and mypy see these signatures.
"""

import inspect
import os
import ssl as tls
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from functools import cached_property, wraps
from importlib.util import find_spec
from typing import Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar

from penstock.clock import Clock
from penstock.errors import BadSetting
from penstock.extras import how_to_install
from penstock.transport.peer import split_address
from penstock.wire.codes import group_fault

NAMESERVER_DEFAULT = "127.0.0.1:9876"
NAMESERVER_VARIABLE = "NAMESRV_ADDR"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"

P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
ClientT = TypeVar("ClientT")


class TracerProvider(Protocol):
    """OpenTelemetry's class of this name, which need not be installed."""

    def get_tracer(self, name: str, version: str | None = None, /) -> Any:
        """A tracer for a library."""


@dataclass(frozen=True)
class ClientOptions:
    """Options of all clients.

    `nameservers` is a list of addresses, or a string with `;` or `,` as separator, or one URL from
    which a list of addresses is read periodically; None: the environment variable NAMESRV_ADDR.
    `ssl=True` encrypts without checking certificates, as RocketMQ's clients do by default. `trace`
    may be the name of the topic for traces. `telemetry=True` creates OpenTelemetry spans and passes
    their context on in messages; it may also be a TracerProvider instead of the global one. With
    `check_crc` consumers skip received messages whose body does not match its CRC, and log an
    error.
    """

    nameservers: str | Sequence[str] | None = None
    _: KW_ONLY
    namespace: str = ""
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    security_token: str | None = field(default=None, repr=False)
    strict_signing: bool = False
    ssl: tls.SSLContext | bool = False
    instance_name: str = ""
    timeout_ms: int = 3_000
    route_refresh_ms: int = 30_000
    heartbeat_ms: int = 30_000
    trace: bool | str = False
    telemetry: TracerProvider | bool = False
    check_crc: bool = True
    clock: Clock | None = None

    def __post_init__(self) -> None:
        self.addresses  # noqa: B018 - raises BadSetting
        for name in ("timeout_ms", "route_refresh_ms", "heartbeat_ms"):
            check_at_least(self, name, 1)
        if bool(self.access_key) != bool(self.secret_key):
            raise BadSetting(
                "access_key and secret_key belong together", hint="give both or neither"
            )
        if self.telemetry and find_spec("opentelemetry") is None:
            raise BadSetting("telemetry needs OpenTelemetry", hint=how_to_install("otel"))

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the NameServers, or one URL."""
        return _addresses(self.nameservers)

    @cached_property
    def ssl_context(self) -> tls.SSLContext | None:
        """The TLS context of all connections; None: without TLS."""
        return _unverified_context() if self.ssl is True else self.ssl or None

    @property
    def trace_topic(self) -> str | None:
        """The topic for traces; None: no traces."""
        return TRACE_TOPIC if self.trace is True else self.trace or None


class ClientKeywords(TypedDict, total=False):
    """The keyword arguments of `ClientOptions`, for callers that collect them in a dict."""

    namespace: str
    access_key: str
    secret_key: str
    security_token: str | None
    strict_signing: bool
    ssl: tls.SSLContext | bool
    instance_name: str
    timeout_ms: int
    route_refresh_ms: int
    heartbeat_ms: int
    trace: bool | str
    telemetry: TracerProvider | bool
    check_crc: bool
    clock: Clock | None


def takes_options(
    options: Callable[P, OptionsT],
) -> Callable[[Callable[[ClientT, OptionsT], None]], Callable[Concatenate[ClientT, P], None]]:
    """Decorate an `__init__(self, options)`: it takes the arguments of the options class."""

    signature = inspect.signature(options)

    def decorate(
        init: Callable[[ClientT, OptionsT], None],
    ) -> Callable[Concatenate[ClientT, P], None]:
        @wraps(init)
        def init_with_keywords(self: ClientT, /, *args: P.args, **kwargs: P.kwargs) -> None:
            unknown = kwargs.keys() - signature.parameters.keys()
            if unknown:
                raise _unknown_keyword(type(self), min(unknown), signature)
            init(self, options(*args, **kwargs))

        _set_signature(init_with_keywords, signature)
        return init_with_keywords

    return decorate


def same_arguments_as(
    client: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorate an `__init__(self, *args, **kwargs)` that passes its arguments on to a client."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        _set_signature(init, inspect.signature(client))
        return init

    return decorate


def check_at_least(options: object, name: str, least: int) -> None:
    """Raise BadSetting if an option is below its minimum."""
    value: int = getattr(options, name)
    if value < least:
        raise BadSetting(f"{name} is {value}", hint=f"give {least} or more")


def check_group(group: str) -> None:
    """Raise BadSetting if this is not a valid group name."""
    fault = group_fault(group)
    if fault is not None:
        raise BadSetting(f"bad group name {group[:80]!r}: {fault}", hint="use another name")


def _unknown_keyword(client: type, name: str, signature: inspect.Signature) -> TypeError:
    similar = get_close_matches(name, signature.parameters, 1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    return TypeError(f"{client.__name__}() got an unexpected keyword argument {name!r}{hint}")


def _set_signature(init: Callable[..., None], signature: inspect.Signature) -> None:
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [me, *signature.parameters.values()]
    init.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def _addresses(given: str | Sequence[str] | None) -> tuple[str, ...]:
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


def _unverified_context() -> tls.SSLContext:
    context = tls.SSLContext(tls.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = tls.CERT_NONE
    return context
