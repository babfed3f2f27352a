"""What commands share that speak to running servers: which ones, signed by whom, over TLS or not.

They speak the protocol only, so they serve Apache's servers as well.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.errors import BadSetting, PenstockError

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin
    from penstock.client.client_options import ClientKeywords

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DEFAULT_BROKER = "127.0.0.1:10911"
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@dataclass(frozen=True, slots=True)
class Access:
    """How servers are spoken to."""

    access_key: str
    secret_key: str
    tls: bool
    tls_ca: str
    timeout_ms: int

    def keywords(self) -> "ClientKeywords":
        """What a client is told."""
        from penstock.config import TlsConfig
        from penstock.transport.tls import outgoing_context

        if bool(self.access_key) != bool(self.secret_key):
            raise click.UsageError("--access-key and --secret-key belong together")
        context = outgoing_context(TlsConfig(outgoing=self.tls, outgoing_ca=self.tls_ca))
        return {
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "ssl": context or False,
            "timeout_ms": self.timeout_ms,
        }


@dataclass(frozen=True, slots=True)
class Cluster(Access):
    """The servers that some NameServers know."""

    nameserver: str | None
    namespace: str

    def keywords(self) -> "ClientKeywords":
        return {**Access.keywords(self), "namespace": self.namespace}

    def admin(self) -> "AsyncAdmin":
        """The tools for these servers."""
        from penstock.client.admin.async_admin import AsyncAdmin

        return AsyncAdmin(self.nameserver, **self.keywords())


@dataclass(frozen=True, slots=True)
class Brokers(Access):
    """Brokers by their addresses, or all that a NameServer knows."""

    addresses: Sequence[str]
    nameserver: str | None
    cluster: str | None

    def ask_each(
        self, code: int, ext: Mapping[str, str], body: bytes = b""
    ) -> list[tuple[str, bytes]]:
        """Address and body of the answer of each broker; an error tells where it was done."""
        return run(self._ask(code, ext, body, only_first=False))

    def ask_first(self, code: int, ext: Mapping[str, str]) -> bytes:
        """The body of one broker's answer: users and rules are the same on all."""
        return run(self._ask(code, ext, b"", only_first=True))[0][1]

    async def _ask(
        self, code: int, ext: Mapping[str, str], body: bytes, *, only_first: bool
    ) -> list[tuple[str, bytes]]:
        from penstock.client.admin.async_admin import AsyncAdmin

        async with AsyncAdmin(self.nameserver, **self.keywords()) as admin:
            addresses = self.addresses or [DEFAULT_BROKER]
            if self.nameserver is not None:
                addresses = await self._find(admin)
            found: list[tuple[str, bytes]] = []
            for address in addresses[: 1 if only_first else None]:
                try:
                    found.append((address, (await admin.ask(address, code, ext, body)).body))
                except PenstockError as error:
                    if not found:
                        raise
                    done = ", ".join(address for address, _ in found)
                    raise type(error)(f"{error.message}; done on {done}", hint=error.hint) from None
            return found

    async def _find(self, admin: "AsyncAdmin") -> list[str]:
        """The addresses of one cluster."""
        brokers = await admin.brokers(self.cluster)
        clusters = sorted({broker.cluster for broker in brokers})
        if len(clusters) != 1:
            known = ", ".join(clusters) or "none"
            raise BadSetting(
                f"{self.nameserver} knows these clusters: {known}", hint="choose one by --cluster"
            )
        return [broker.address for broker in brokers]


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to; SIGTERM ends it as Ctrl-C does, with its connections closed.

    What a client warns of, such as a broker that is left out, goes to stderr.
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
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        log.removeHandler(warnings)


_ACCESS = (
    click.option(
        "--access-key",
        default="",
        envvar="PENSTOCK_CLIENT_ACCESS_KEY",
        help="User to sign as.  [env: PENSTOCK_CLIENT_ACCESS_KEY]",
    ),
    click.option(
        "--secret-key",
        default="",
        envvar="PENSTOCK_CLIENT_SECRET_KEY",
        help="Its password.  [env: PENSTOCK_CLIENT_SECRET_KEY]",
    ),
    click.option("--tls", is_flag=True, help="Connect by TLS."),
    click.option(
        "--tls-ca",
        default="",
        metavar="FILE",
        help="PEM file of authorities that servers are checked against.",
    ),
    click.option(
        "--timeout-ms",
        type=click.IntRange(1),
        default=5_000,
        show_default=True,
        help="How long to wait for an answer.",
    ),
)
_BROKERS = (
    click.option(
        "-b",
        "--broker",
        "addresses",
        multiple=True,
        metavar="HOST:PORT",
        help=f"A broker; may be given several times.  [default: {DEFAULT_BROKER}]",
    ),
    click.option(
        "-n",
        "--nameserver",
        metavar="HOST:PORT",
        help="Instead: all brokers that this NameServer knows...",
    ),
    click.option("-c", "--cluster", help="... in this cluster, if there are several."),
)
_CLUSTER = (
    click.option(
        "-n",
        "--nameserver",
        metavar="HOST:PORT[;...]",
        envvar="NAMESRV_ADDR",
        help="The NameServers.  [env: NAMESRV_ADDR; default: 127.0.0.1:9876]",
    ),
    click.option("--namespace", default="", help="Put in front of all names of topics and groups."),
)


def on_brokers(command: F) -> F:
    """The options that choose brokers; the command gets them as its first argument."""

    def check(brokers: Brokers) -> None:
        if brokers.addresses and brokers.nameserver:
            raise click.UsageError("--broker and --nameserver exclude each other")

    return _with_options(command, Brokers, (*_BROKERS, *_ACCESS), check)


def on_cluster(command: F) -> F:
    """The options that choose the NameServers; the command gets them as its first argument."""
    return _with_options(command, Cluster, (*_CLUSTER, *_ACCESS), lambda cluster: None)


def _with_options(
    command: F, kind: type[T], options: Sequence[Callable[[Any], Any]], check: Callable[[T], None]
) -> F:
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    @wraps(command)
    def call(**arguments: Any) -> Any:
        chosen = kind(**{name: arguments.pop(name) for name in names})
        check(chosen)
        return command(chosen, **arguments)

    result: Any = call
    for option in reversed(options):
        result = option(result)
    return result  # type: ignore[no-any-return]


def print_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people."""
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    for line in (heads, *rows):
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )
