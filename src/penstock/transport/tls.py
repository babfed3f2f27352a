"""TLS: the contexts that a server and its outgoing calls use, built from files and kept fresh.

Files that change are read again (`refresh`, by the listener every few seconds): new
connections get the new certificate, open ones stay as they are. Files that can't be used, half
written ones say, leave the old certificate in place and are tried again.
"""

import logging
import os
import ssl
import subprocess
import tempfile
import threading
from typing import Self

from penstock.config import TlsConfig
from penstock.errors import TlsError

log = logging.getLogger(__name__)

_CLIENT_AUTH = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "require": ssl.CERT_REQUIRED,
}


class Tls:
    """TLS of a server."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises TlsError if the files can't be used."""
        self.config = config
        self.plain_allowed = config.mode != "enforcing"
        self.loads = 0
        self._seen = self._look()
        self._complaint = ""
        self._making = threading.Lock()
        self._context: ssl.SSLContext | None = None
        if self._must_be_whole():
            self._context = server_context(config)

    def _must_be_whole(self) -> bool:
        """Whether something is set that a certificate made for the moment would not honour."""
        config = self.config
        wanted = config.certificate or config.key or config.client_auth != "none"
        return bool(wanted) or config.mode == "enforcing"

    @classmethod
    def of(cls, config: TlsConfig) -> Self | None:
        """TLS by these settings; None where it is off."""
        return None if config.mode == "off" else cls(config)

    @property
    def context(self) -> ssl.SSLContext | None:
        """For the next connection; None: `make_context` first, in a thread."""
        return self._context

    def make_context(self) -> ssl.SSLContext:
        """A context with a certificate that vouches for nobody, where no other was given.

        So a client that insists on TLS is served by a server nobody prepared for it, as RocketMQ
        does by default; it must not check the certificate. Raises TlsError.
        """
        with self._making:
            if self._context is None:
                self._context = self_signed_context()
                log.warning(
                    "a client speaks TLS: it is served with a certificate made for the moment; set "
                    "tls.certificate and tls.key to one that clients can check"
                )
            return self._context

    def refresh(self) -> bool:
        """Read the files again if they changed; whether there is a new certificate. Reads files."""
        if not self.config.certificate:
            return False
        seen = self._look()
        if seen == self._seen and not self._complaint:
            return False
        try:
            self._context = server_context(self.config)
        except TlsError as error:
            if str(error) != self._complaint:
                log.error("the certificate stays the old one: %s", error)
            self._complaint = str(error)
            return False
        self._seen = seen
        self._complaint = ""
        self.loads += 1
        log.info("the certificate %s was read again", self.config.certificate)
        return True

    def _look(self) -> list[tuple[int, int, int]]:
        """What tells whether a file is another one now; a link's target counts."""
        seen = []
        for path in (self.config.certificate, self.config.key, self.config.client_ca):
            try:
                found = os.stat(path)
                seen.append((found.st_ino, found.st_mtime_ns, found.st_size))
            except OSError:
                seen.append((0, 0, 0))
        return seen


def server_context(config: TlsConfig) -> ssl.SSLContext:
    """What a server needs: TLS 1.2 and up, its certificate, and which clients it trusts."""
    if not config.certificate:
        raise TlsError(
            f"tls.mode is {config.mode}, but tls.certificate is empty",
            hint="name a PEM file with the certificate chain, and its key in tls.key",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, config)
    if config.client_auth != "none":
        if not config.client_ca:
            raise TlsError(
                f"tls.client_auth is {config.client_auth}, but tls.client_ca is empty",
                hint="name a PEM file with the authorities that sign your clients' certificates",
            )
        _load_authorities(context, "tls.client_ca", config.client_ca)
        context.verify_mode = _CLIENT_AUTH[config.client_auth]
    return context


def self_signed_context() -> ssl.SSLContext:
    """A context with a new certificate of our own making; runs `openssl`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with tempfile.TemporaryDirectory(prefix="penstock-tls-") as folder:
        certificate, key = os.path.join(folder, "certificate.pem"), os.path.join(folder, "key.pem")
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "3650",
            "-subj",
            "/CN=penstock",
            "-keyout",
            key,
            "-out",
            certificate,
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=30)
            context.load_cert_chain(certificate, key)
        except (OSError, subprocess.SubprocessError) as error:
            raise TlsError(
                f"there is no certificate for a client that speaks TLS, and none can be made: "
                f"{error}",
                hint="set tls.certificate and tls.key",
            ) from None
    return context


def outgoing_context(config: TlsConfig) -> ssl.SSLContext | None:
    """What calls to NameServers and brokers use; None: they are plain.

    Without `outgoing_ca` nobody's certificate is checked, as in RocketMQ's clients: the traffic is
    hidden from listeners, not from an impostor. Names are never checked, because servers are known
    by their addresses. Our own certificate is shown where a server asks for one.
    """
    if not config.outgoing:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    if config.outgoing_ca:
        _load_authorities(context, "tls.outgoing_ca", config.outgoing_ca)
    else:
        context.verify_mode = ssl.CERT_NONE
    if config.certificate:
        _load_certificate(context, config)
    return context


def _load_certificate(context: ssl.SSLContext, config: TlsConfig) -> None:
    key = config.key or config.certificate  # one file may hold both
    for setting, path in (("tls.certificate", config.certificate), ("tls.key", key)):
        _check_readable(setting, path)
    try:
        # Without a password of ours OpenSSL would ask the terminal for one.
        context.load_cert_chain(config.certificate, key, lambda: config.key_password)
    except OSError as error:  # TLS errors are OSErrors too
        raise TlsError(
            f"tls.certificate {config.certificate} and tls.key {key} can't be used: {_say(error)}",
            hint="both are PEM files; the key belongs to the first certificate of the chain, and "
            "tls.key_password opens it if it is encrypted",
        ) from None


def _load_authorities(context: ssl.SSLContext, setting: str, path: str) -> None:
    _check_readable(setting, path)
    try:
        context.load_verify_locations(path)
    except OSError as error:  # TLS errors are OSErrors too
        raise TlsError(f"{setting} {path} can't be used: {_say(error)}") from None


def _check_readable(setting: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise TlsError(f"{setting} {path} can't be read: {error.strerror}") from None


def _say(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    reason = (error.reason or "").replace("_", " ").lower()
    return reason or "no certificate or key in it that can be read, or the password is wrong"
