"""TLS contexts for a server and for its outgoing connections.

Changed certificate files are read again (`refresh`, called by the listener every few seconds). New
connections use the new certificate; open ones are not affected. If the files can't be used, for
example because they are being written, the old certificate stays in use and they are read again
later.
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
    """The TLS context of a server."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises TlsError if the files can't be used."""
        self.config = config
        self.plain_allowed = config.mode != "enforcing"
        self.loads = 0
        self._stats = self._stat_files()
        self._error = ""
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        if self._needs_files():
            self._context = server_context(config)

    def _needs_files(self) -> bool:
        """Whether the settings rule out a self-signed certificate."""
        config = self.config
        wanted = config.certificate or config.key or config.client_auth != "none"
        return bool(wanted) or config.mode == "enforcing"

    @classmethod
    def of(cls, config: TlsConfig) -> Self | None:
        """TLS by these settings; None if it is off."""
        return None if config.mode == "off" else cls(config)

    @property
    def context(self) -> ssl.SSLContext | None:
        """The context for new connections; None: call `make_context` first, in a thread."""
        return self._context

    def make_context(self) -> ssl.SSLContext:
        """A context with a self-signed certificate, for a server without certificate files.

        It serves clients that use TLS and do not check the certificate, as RocketMQ does by
        default. Raises TlsError.
        """
        with self._lock:
            if self._context is None:
                self._context = self_signed_context()
                log.warning(
                    "a client uses TLS, and the server uses a self-signed certificate: set "
                    "tls.certificate and tls.key to a certificate that clients can check"
                )
            return self._context

    def refresh(self) -> bool:
        """Read the files again if they have changed; whether there is a new certificate."""
        if not self.config.certificate:
            return False
        stats = self._stat_files()
        if stats == self._stats and not self._error:
            return False
        try:
            self._context = server_context(self.config)
        except TlsError as error:
            if str(error) != self._error:
                log.error("the old certificate stays in use: %s", error)
            self._error = str(error)
            return False
        self._stats = stats
        self._error = ""
        self.loads += 1
        log.info("loaded the changed certificate %s", self.config.certificate)
        return True

    def _stat_files(self) -> list[tuple[int, int, int]]:
        """Inode, time and size of each file, to detect changes; of a link's target."""
        stats = []
        for path in (self.config.certificate, self.config.key, self.config.client_ca):
            try:
                found = os.stat(path)
                stats.append((found.st_ino, found.st_mtime_ns, found.st_size))
            except OSError:
                stats.append((0, 0, 0))
        return stats


def server_context(config: TlsConfig) -> ssl.SSLContext:
    """A server's context: TLS 1.2 or later, its certificate, and the clients that it trusts."""
    if not config.certificate:
        raise TlsError(
            f"tls.mode is {config.mode}, but tls.certificate is empty",
            hint="set it to a PEM file with the certificate chain, and tls.key to its key",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, config)
    if config.client_auth != "none":
        if not config.client_ca:
            raise TlsError(
                f"tls.client_auth is {config.client_auth}, but tls.client_ca is empty",
                hint="set it to a PEM file with the authorities that sign client certificates",
            )
        _load_authorities(context, "tls.client_ca", config.client_ca)
        context.verify_mode = _CLIENT_AUTH[config.client_auth]
    return context


def self_signed_context() -> ssl.SSLContext:
    """A context with a new self-signed certificate; runs `openssl`."""
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
                f"a client uses TLS, but there is no certificate and none can be made: {error}",
                hint="set tls.certificate and tls.key",
            ) from None
    return context


def outgoing_context(config: TlsConfig) -> ssl.SSLContext | None:
    """The context for connections to NameServers and brokers; None if they do not use TLS.

    Without `outgoing_ca` certificates are not checked, as in RocketMQ's clients: the traffic is
    encrypted, but the server may be an impostor. Host names are never checked, because servers are
    known by their addresses. The own certificate is sent if a server asks for one.
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
    key = config.key or config.certificate  # one file may contain both
    for setting, path in (("tls.certificate", config.certificate), ("tls.key", key)):
        _check_readable(setting, path)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.certificate, key, lambda: config.key_password)
    except OSError as error:  # TLS errors are OSErrors too
        raise TlsError(
            f"can't use tls.certificate {config.certificate} and tls.key {key}: {_reason(error)}",
            hint="both are PEM files; the key belongs to the first certificate of the chain; set "
            "tls.key_password if the key is encrypted",
        ) from None


def _load_authorities(context: ssl.SSLContext, setting: str, path: str) -> None:
    _check_readable(setting, path)
    try:
        context.load_verify_locations(path)
    except OSError as error:  # TLS errors are OSErrors too
        raise TlsError(f"{setting} {path} can't be used: {_reason(error)}") from None


def _check_readable(setting: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise TlsError(f"{setting} {path} can't be read: {error.strerror}") from None


def _reason(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    reason = (error.reason or "").replace("_", " ").lower()
    return reason or "there is no readable certificate or key, or the password is wrong"
