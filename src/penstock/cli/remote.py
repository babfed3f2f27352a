"""Options and output of the commands that talk to running servers.

The commands use only the protocol, so they also work with Apache RocketMQ.
"""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from penstock.cli.contexts.context_file import chosen_context
from penstock.errors import BadSetting, PenstockError

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin
    from penstock.client.client_options import ClientKeywords

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

CONTEXT_OPTION = "penstock.context"
"""The key of the value of --context in click's meta."""
DEFAULT_BROKER = "127.0.0.1:10911"
_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
"""Control characters that JSON allows in strings, and their escapes."""
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """How to connect to servers."""

    access_key: str
    secret_key: str
    strict_signing: bool
    tls: bool
    tls_ca: str
    timeout_ms: int

    def keywords(self) -> "ClientKeywords":
        """The same options as keyword arguments of a client."""
        from penstock.config import TlsConfig
        from penstock.transport.tls import outgoing_context

        if bool(self.access_key) != bool(self.secret_key):
            raise click.UsageError("--access-key and --secret-key must be given together")
        context = outgoing_context(TlsConfig(outgoing=self.tls, outgoing_ca=self.tls_ca))
        return {
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "strict_signing": self.strict_signing,
            "ssl": context or False,
            "timeout_ms": self.timeout_ms,
        }


@dataclass(frozen=True, slots=True)
class ClusterOptions(ServerAccess):
    """The cluster, by its NameServers."""

    nameserver: str | None
    namespace: str

    def keywords(self) -> "ClientKeywords":
        return {**ServerAccess.keywords(self), "namespace": self.namespace}

    def admin(self) -> "AsyncAdmin":
        """A client for administration."""
        from penstock.client.admin.async_admin import AsyncAdmin

        return AsyncAdmin(self.nameserver, **self.keywords())


@dataclass(frozen=True, slots=True)
class BrokerOptions(ServerAccess):
    """Brokers, by their addresses or by a NameServer and a cluster."""

    addresses: Sequence[str]
    nameserver: str | None
    cluster: str | None

    def ask_each(
        self, code: int, ext: Mapping[str, str], body: bytes = b""
    ) -> list[tuple[str, bytes]]:
        """Ask every broker; returns (address, response body) of each.

        If one fails, the error names the brokers that have executed the request.
        """
        return run(self._ask(code, ext, body, only_first=False))

    def ask_first(self, code: int, ext: Mapping[str, str]) -> bytes:
        """The response body of the first broker: users and rules are the same on all."""
        return run(self._ask(code, ext, b"", only_first=True))[0][1]

    async def _ask(
        self, code: int, ext: Mapping[str, str], body: bytes, *, only_first: bool
    ) -> list[tuple[str, bytes]]:
        from penstock.client.admin.async_admin import AsyncAdmin

        nameserver = self.nameserver
        if nameserver is None and not self.addresses:
            nameserver = os.environ.get("NAMESRV_ADDR") or None
        async with AsyncAdmin(nameserver, **self.keywords()) as admin:
            addresses = self.addresses or [DEFAULT_BROKER]
            if nameserver is not None:
                addresses = await self._find(admin)
            found: list[tuple[str, bytes]] = []
            for address in addresses[: 1 if only_first else None]:
                try:
                    found.append((address, (await admin.ask(address, code, ext, body)).body))
                except PenstockError as error:
                    if not found:
                        raise
                    done = ", ".join(address for address, _ in found)
                    raise type(error)(
                        f"{error.message} (succeeded on {done})", hint=error.hint
                    ) from None
            return found

    async def _find(self, admin: "AsyncAdmin") -> list[str]:
        """The addresses of the brokers of one cluster."""
        brokers = await admin.brokers(self.cluster)
        clusters = sorted({broker.cluster for broker in brokers})
        if len(clusters) != 1:
            if not clusters:
                raise BadSetting(
                    f"NameServer {self.nameserver} knows no broker"
                    + (f" of cluster {self.cluster}" if self.cluster else ""),
                    hint="check the name with mqadmin clusterList, and that the brokers are up",
                )
            raise BadSetting(
                f"NameServer {self.nameserver} has several clusters: {', '.join(clusters)}",
                hint="choose one with --cluster",
            )
        return [broker.address for broker in brokers]


def run(
    work: Coroutine[Any, Any, T],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run `work` and return its result. SIGTERM interrupts it as Ctrl-C does.

    Warnings of the client, such as an unreachable broker, go to stderr.
    """
    warnings = logging.StreamHandler()
    warnings.setFormatter(logging.Formatter("penstock: %(message)s"))
    log = logging.getLogger("penstock")
    log.addHandler(warnings)

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        log.removeHandler(warnings)


def _apply_context(context: click.Context, option: click.Parameter, name: str | None) -> None:
    """Make the values of the chosen context the defaults of the other options."""
    context.meta[CONTEXT_OPTION] = name
    try:
        chosen = chosen_context(name)
    except PenstockError:
        if not context.resilient_parsing:  # in shell completion
            raise
        return
    if chosen is not None:
        # click's order: the option, its environment variable, this map, the default.
        context.default_map = {**(context.default_map or {}), **chosen[1]}


_CONNECTION_FLAGS = (
    click.option(
        "--context",
        metavar="NAME",
        is_eager=True,
        expose_value=False,
        callback=_apply_context,
        help="Named context with the servers and credentials (penstock context).  "
        "[env: PENSTOCK_CONTEXT; default: the current context]",
    ),
    click.option(
        "--access-key",
        default="",
        envvar="PENSTOCK_CLIENT_ACCESS_KEY",
        help="User name.  [env: PENSTOCK_CLIENT_ACCESS_KEY]",
    ),
    click.option(
        "--secret-key",
        default="",
        envvar="PENSTOCK_CLIENT_SECRET_KEY",
        help="Password.  [env: PENSTOCK_CLIENT_SECRET_KEY]",
    ),
    click.option(
        "--strict-signing",
        is_flag=True,
        envvar="PENSTOCK_CLIENT_STRICT_SIGNING",
        help="Sign the request code and the time too. Penstock's servers only.  "
        "[env: PENSTOCK_CLIENT_STRICT_SIGNING]",
    ),
    click.option("--tls", is_flag=True, help="Connect with TLS."),
    click.option(
        "--tls-ca",
        default="",
        metavar="FILE",
        help="PEM file of trusted CAs.  [default: certificates are not verified]",
    ),
    click.option(
        "--timeout-ms",
        type=click.IntRange(1),
        default=5_000,
        show_default=True,
        help="Timeout of one request.",
    ),
)
_BROKER_OPTIONS = (
    click.option(
        "-b",
        "--broker",
        "addresses",
        multiple=True,
        metavar="HOST:PORT",
        help="Broker address. Can be repeated.  "
        f"[default: {DEFAULT_BROKER}, or the cluster of NAMESRV_ADDR]",
    ),
    click.option(
        "-n",
        "--nameserver",
        metavar="HOST:PORT",
        help="Use all brokers of a cluster of this NameServer, instead of --broker.  "
        "[env: NAMESRV_ADDR]",
    ),
    click.option("-c", "--cluster", help="The cluster, if the NameServer has several."),
)
_CLUSTER_OPTIONS = (
    click.option(
        "-n",
        "--nameserver",
        metavar="HOST:PORT[;...]",
        envvar="NAMESRV_ADDR",
        help="NameServer addresses.  [env: NAMESRV_ADDR; default: 127.0.0.1:9876]",
    ),
    click.option("--namespace", default="", help="Namespace of topics and groups."),
)


def broker_options(command: F) -> F:
    """Add the options that choose brokers; the command receives them as its first argument."""

    def check(brokers: BrokerOptions) -> BrokerOptions:
        source = click.get_current_context().get_parameter_source("nameserver")
        if source is ParameterSource.DEFAULT_MAP:  # of a context: all others come first
            replaced = brokers.addresses or os.environ.get("NAMESRV_ADDR")
            return replace(brokers, nameserver=None) if replaced else brokers
        if brokers.addresses and brokers.nameserver:
            raise click.UsageError("--broker and --nameserver can't be used together")
        return brokers

    return _with_options(command, BrokerOptions, (*_BROKER_OPTIONS, *_CONNECTION_FLAGS), check)


def cluster_options(command: F) -> F:
    """Add the options that choose NameServers; the command receives them as its first argument."""
    return _with_options(
        command, ClusterOptions, (*_CLUSTER_OPTIONS, *_CONNECTION_FLAGS), lambda cluster: cluster
    )


def _with_options(
    command: F, kind: type[T], options: Sequence[Callable[[Any], Any]], check: Callable[[T], T]
) -> F:
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    @wraps(command)
    def call(**arguments: Any) -> Any:
        group = kind(**{name: arguments.pop(name) for name in names})
        return command(check(group), **arguments)

    result: Any = call
    for option in reversed(options):
        result = option(result)
    return result  # type: ignore[no-any-return]


def json_text(value: object, *, indent: int | None = None) -> str:
    """A value as JSON in which no character can control the terminal."""
    return json.dumps(value, indent=indent, ensure_ascii=False).translate(_JSON_CONTROLS)


def print_json(value: object) -> None:
    """Print a value, such as a Struct of `penstock.cli.schemas`, as indented JSON."""
    import msgspec

    print(json_text(msgspec.to_builtins(value, str_keys=True), indent=2))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print a table with aligned columns, on stdout or on stderr."""
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    for line in (heads, *rows):
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip(), err=err)
