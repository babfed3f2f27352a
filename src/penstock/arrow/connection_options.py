"""Options as Spark passes them: strings, with names whose case does not matter.

`OptionReader` parses them by type and refuses unknown names: a misspelt option that is ignored is
noticed much later. `ConnectionOptions` is what reads and writes share: servers and credentials.
"""

import re
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from typing import Final

from penstock.client.client_options import ClientKeywords, ClientOptions
from penstock.errors import BadSetting, TlsError

CONNECTION_OPTIONS: Final = (
    "nameserver",
    "namespace",
    "accessKey",
    "secretKey",
    "securityToken",
    "strictSigning",
    "tls",
    "tlsCa",
    "tlsCert",
    "tlsKey",
    "requestTimeout",
)

REQUEST_MS: Final = 5_000
READ_MS: Final = 120_000
"""The default of readTimeout: how long a broker may be unavailable."""
_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_DURATION: Final = re.compile(r"(\d{1,15})\s*([a-z]*)")
_BOOLEANS: Final = {"true": True, "false": False}


class OptionReader:
    """Parses the options of one source or sink."""

    def __init__(self, options: Mapping[str, str], known: Collection[str], *, what: str) -> None:
        self._values = {name.lower(): value.strip() for name, value in options.items()}
        for name in options:
            _check_known(name, known, what)

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def named(self, names: Collection[str]) -> list[str]:
        """Those of these options that are set."""
        return [name for name in names if name in self]

    def text(self, name: str) -> str | None:
        """The value; None if the option is not set. Raises BadSetting if it is empty."""
        value = self._values.get(name.lower())
        if value == "":
            raise BadSetting(f"the option {name} is empty", hint="set a value or leave it out")
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        """`true` or `false`."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in _BOOLEANS:
            raise BadSetting(f"the option {name} is {value!r}", hint="set true or false")
        return _BOOLEANS[value.lower()]

    def choice(self, name: str, choices: Collection[str], *, default: str) -> str:
        """One of several words."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in choices:
            raise BadSetting(f"the option {name} is {value!r}", hint="set " + " or ".join(choices))
        return value.lower()

    def count(self, name: str) -> int | None:
        """An integer of at least 1."""
        value = self.text(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value) > 0):
            raise BadSetting(f"the option {name} is {value!r}", hint="set an integer of at least 1")
        return int(value)

    def duration_ms(self, name: str, *, default: int) -> int:
        """A duration: `15m`, `30s`, `500ms`, `2h`, or milliseconds."""
        value = self.text(name)
        if value is None:
            return default
        found = _DURATION.fullmatch(value.lower())
        unit = None if found is None else _UNITS_MS.get(found[2] or "ms")
        if found is None or unit is None or int(found[1]) == 0:
            raise BadSetting(
                f"the option {name} is {value!r}", hint="set a duration such as 15m, 30s or 500ms"
            )
        return int(found[1]) * unit

    def timestamp_ms(self, name: str) -> int | None:
        """A timestamp: milliseconds since 1970, or ISO 8601; local time if it has no zone."""
        value = self.text(name)
        if value is None:
            return None
        if value.isascii() and value.isdigit() and len(value) < 16:
            return int(value)
        try:
            return round(datetime.fromisoformat(value).timestamp() * 1000)
        except (ValueError, OverflowError, OSError):
            raise BadSetting(
                f"the option {name} is {value!r}",
                hint="set milliseconds since 1970, or a time such as 2025-11-16T08:00:00+00:00",
            ) from None

    def one_of(self, names: Collection[str]) -> str | None:
        """Which of these options is set; raises BadSetting if several are."""
        found = self.named(names)
        if len(found) > 1:
            raise BadSetting(
                f"the options {' and '.join(found)} contradict each other", hint="set one of them"
            )
        return found[0] if found else None

    def refuse(self, names: Collection[str], why: str) -> None:
        """Raise BadSetting if one of these is set."""
        found = self.named(names)
        if found:
            raise BadSetting(f"the option {found[0]} {why}", hint="leave it out")


def _check_known(name: str, known: Collection[str], what: str) -> None:
    names = {option.lower(): option for option in known}
    if name.lower() in names:
        return
    near = get_close_matches(name.lower(), names, 1)
    suggestion = f"; did you mean {names[near[0]]}?" if near else ""
    raise BadSetting(
        f"the {what} has no option {name!r}{suggestion}",
        hint=f"its options are {', '.join(sorted(known))}",
    )


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Servers and credentials; pickled for tasks on other machines.

    If no NameServer is set, the driver's environment decides, not that of each machine.
    """

    nameservers: tuple[str, ...]
    namespace: str = ""
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    security_token: str | None = field(default=None, repr=False)
    strict_signing: bool = False
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    timeout_ms: int = REQUEST_MS

    @classmethod
    def of(cls, given: OptionReader) -> "ConnectionOptions":
        """From the options; raises BadSetting."""
        tls_files = given.named(("tlsCa", "tlsCert", "tlsKey"))
        if tls_files and not given.boolean("tls", default=False):
            raise BadSetting(f"the option {tls_files[0]} needs tls", hint="set tls to true as well")
        if "tlsKey" in given and "tlsCert" not in given:
            raise BadSetting("the option tlsKey needs tlsCert", hint="set both or neither")
        connection = cls(
            nameservers=ClientOptions(given.text("nameserver")).addresses,
            namespace=given.text("namespace") or "",
            access_key=given.text("accessKey") or "",
            secret_key=given.text("secretKey") or "",
            security_token=given.text("securityToken"),
            strict_signing=given.boolean("strictSigning", default=False),
            tls=given.boolean("tls", default=False),
            tls_ca=given.text("tlsCa"),
            tls_cert=given.text("tlsCert"),
            tls_key=given.text("tlsKey"),
            timeout_ms=given.duration_ms("requestTimeout", default=REQUEST_MS),
        )
        if bool(connection.access_key) != bool(connection.secret_key):
            raise BadSetting(
                "the options accessKey and secretKey belong together",
                hint="set both or neither",
            )
        return connection

    def client_keywords(self) -> ClientKeywords:
        """The keyword arguments of every client except `nameservers`; reads certificate files."""
        keywords: ClientKeywords = {
            "namespace": self.namespace,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "strict_signing": self.strict_signing,
            "timeout_ms": self.timeout_ms,
        }
        if self.security_token is not None:
            keywords["security_token"] = self.security_token
        if self.tls:
            keywords["ssl"] = self._context()
        return keywords

    def client_options(self) -> ClientOptions:
        """The options of a client `Session`."""
        return ClientOptions(self.nameservers, **self.client_keywords())

    def _context(self) -> ssl.SSLContext:
        """Host names are not checked: servers are known by their addresses."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        try:
            if self.tls_ca is None:
                context.verify_mode = ssl.CERT_NONE
            else:
                context.load_verify_locations(self.tls_ca)
            if self.tls_cert is not None:
                # Without a password callback OpenSSL would prompt on the terminal.
                context.load_cert_chain(self.tls_cert, self.tls_key, lambda: "")
        except OSError as error:  # TLS errors are OSErrors too
            files = ", ".join(filter(None, (self.tls_ca, self.tls_cert, self.tls_key)))
            raise TlsError(
                f"the options tlsCa, tlsCert, tlsKey ({files}): {error}",
                hint="set PEM files; with Spark, every machine must be able to read them",
            ) from None
        return context
