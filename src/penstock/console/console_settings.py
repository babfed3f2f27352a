"""The settings of a console."""

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from penstock.errors import BadSetting

INTERVAL_S = 5.0
_LOCAL_NAMES = ("localhost",)


class Logins(StrEnum):
    """Where the users of the console come from."""

    NONE = "none"
    """Nobody logs in. Allowed on a loopback address only."""
    CONSOLE = "console"
    """The console's own accounts."""
    BROKERS = "brokers"
    """The users and access lists of the brokers."""


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """How a console listens, and who may use it."""

    host: str = "127.0.0.1"
    port: int = 8080
    data: Path = Path("penstock-console")
    logins: Logins = Logins.NONE
    interval_s: float = INTERVAL_S
    """The time between two snapshots of the cluster."""
    pipelines: Path | None = None
    """The directory with the records of pipeline runs."""
    live_settings: frozenset[str] = frozenset()
    """RocketMQ's names of the settings that a Penstock broker of this release changes at once."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies, which tell the client's address and scheme."""

    def __post_init__(self) -> None:
        if self.logins is Logins.NONE and not is_loopback(self.host):
            raise BadSetting(
                f"a console on {self.host} needs logins",
                hint="use --logins console or --logins brokers, or --host 127.0.0.1",
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise BadSetting(
                "--tls-cert and --tls-key must be given together", hint="give both or neither"
            )
        for proxy in self.trusted_proxies:
            _check_network(proxy)
        if self.trusted_proxies and self.logins is Logins.NONE:
            raise BadSetting(
                "a console behind a proxy needs logins",
                hint="use --logins console or --logins brokers, or omit --trusted-proxy",
            )

    @property
    def uses_tls(self) -> bool:
        return self.tls_certificate is not None

    @property
    def sends_passwords_in_plain_text(self) -> bool:
        """Whether passwords and cookies cross a network in plain text."""
        return not (self.uses_tls or is_loopback(self.host) or self.trusted_proxies)

    def url(self, port: int) -> str:
        """The address of the console in a browser on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.uses_tls else 'http'}://{shown}:{port}/"


def _check_network(text: str) -> None:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise BadSetting(
            f"--trusted-proxy: {error}", hint="give an address or a network, such as 10.0.0.0/8"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    if host in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
