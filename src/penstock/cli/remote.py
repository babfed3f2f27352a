"""What commands share that speak to running brokers: which ones, signed by whom, over TLS or not.

They speak the protocol only, so they serve Apache's brokers as well.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.errors import BadSetting, Refused

if TYPE_CHECKING:
    from penstock.net.peer import Peer, Response

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DEFAULT_BROKER = "127.0.0.1:10911"


@dataclass(frozen=True, slots=True)
class Brokers:
    """The brokers that are asked, and how."""

    addresses: Sequence[str]
    nameserver: str | None
    cluster: str | None
    access_key: str
    secret_key: str
    tls: bool
    tls_ca: str
    timeout_ms: int

    def ask_each(
        self, code: int, ext: Mapping[str, str], body: bytes = b""
    ) -> list[tuple[str, bytes]]:
        """Address and body of the answer of each broker; the first refusal ends it."""
        return asyncio.run(self._ask(code, ext, body, only_first=False))

    def ask_first(self, code: int, ext: Mapping[str, str]) -> bytes:
        """The body of one broker's answer: users and rules are the same on all."""
        return asyncio.run(self._ask(code, ext, b"", only_first=True))[0][1]

    async def _ask(
        self, code: int, ext: Mapping[str, str], body: bytes, *, only_first: bool
    ) -> list[tuple[str, bytes]]:
        answers = []
        for address in (await self._find())[: 1 if only_first else None]:
            answer = await self._call(address, lambda peer: self._send(peer, code, ext, body))
            answers.append((address, answer))
        return answers

    async def _find(self) -> Sequence[str]:
        """The addresses that were given, else those a NameServer knows."""
        if self.nameserver is None:
            return self.addresses or [DEFAULT_BROKER]
        from penstock.wire import fastjson
        from penstock.wire.bodies import ClusterInfo
        from penstock.wire.codes import RequestCode

        code = RequestCode.GET_BROKER_CLUSTER_INFO
        body = await self._call(self.nameserver, lambda peer: self._send(peer, code, {}, b""))
        info = fastjson.decode(body, ClusterInfo)
        clusters = info.cluster_addr_table
        cluster = self.cluster or (next(iter(clusters)) if len(clusters) == 1 else "")
        if cluster not in clusters:
            known = ", ".join(sorted(clusters)) or "none"
            raise BadSetting(
                f"{self.nameserver} knows these clusters: {known}", hint="choose one by --cluster"
            )
        found = []
        for name in sorted(clusters[cluster]):
            addresses = info.broker_addr_table[name].broker_addrs
            found += [addresses[id] for id in sorted(addresses)]
        return found

    async def _call(
        self, address: str, send: Callable[["Peer"], Coroutine[Any, Any, "Response"]]
    ) -> bytes:
        from penstock.config import TlsConfig
        from penstock.net.peer import Peer
        from penstock.net.tls import outgoing_context
        from penstock.wire.codes import response_name
        from penstock.wire.signature import signer

        context = outgoing_context(TlsConfig(outgoing=self.tls, outgoing_ca=self.tls_ca))
        sign = signer(self.access_key, self.secret_key) if self.access_key else None
        try:
            peer = Peer(address, ssl=context, sign=sign)
        except ValueError as error:
            raise BadSetting(str(error), hint="give it as host:port") from None
        try:
            answer = await send(peer)
        finally:
            await peer.close()
        if answer.code != 0:
            remark = answer.remark or "without a reason"
            raise Refused(f"{address} answers {response_name(answer.code)}: {remark}")
        return answer.body

    async def _send(
        self, peer: "Peer", code: int, ext: Mapping[str, str], body: bytes
    ) -> "Response":
        return await peer.call(code, ext, body, timeout_ms=self.timeout_ms)


def on_brokers(command: F) -> F:
    """The options that choose the brokers; the command gets them as its first argument."""
    options = (
        click.option(
            "-b", "--broker", "addresses", multiple=True, metavar="HOST:PORT",
            help=f"A broker; may be given several times.  [default: {DEFAULT_BROKER}]",
        ),
        click.option("-n", "--nameserver", metavar="HOST:PORT",
                     help="Instead: all brokers that this NameServer knows..."),
        click.option("-c", "--cluster", help="... in this cluster, if there are several."),
        click.option("--access-key", default="", envvar="PENSTOCK_CLIENT_ACCESS_KEY",
                     help="User to sign as.  [env: PENSTOCK_CLIENT_ACCESS_KEY]"),
        click.option("--secret-key", default="", envvar="PENSTOCK_CLIENT_SECRET_KEY",
                     help="Its password.  [env: PENSTOCK_CLIENT_SECRET_KEY]"),
        click.option("--tls", is_flag=True, help="Connect by TLS."),
        click.option("--tls-ca", default="", metavar="FILE",
                     help="PEM file of authorities that servers are checked against."),
        click.option("--timeout-ms", type=click.IntRange(1), default=5_000, show_default=True,
                     help="How long to wait for an answer."),
    )  # fmt: skip
    names = list(Brokers.__slots__)

    @wraps(command)
    def run(**arguments: Any) -> Any:
        brokers = Brokers(**{name: arguments.pop(name) for name in names})
        if bool(brokers.access_key) != bool(brokers.secret_key):
            raise click.UsageError("--access-key and --secret-key belong together")
        if brokers.addresses and brokers.nameserver:
            raise click.UsageError("--broker and --nameserver exclude each other")
        return command(brokers, **arguments)

    result: Any = run
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
