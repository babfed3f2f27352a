"""Runs a console until SIGTERM or SIGINT."""

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.console.app import create_app
from penstock.console.console_context import create_console
from penstock.console.console_settings import ConsoleSettings, Logins
from penstock.console.security.accounts import FIRST_ACCOUNT
from penstock.console.security.broker_logins import ClientFor
from penstock.errors import BadSetting

log = logging.getLogger(__name__)

BACKLOG = 128
CLOSE_S = 1
"""How long open requests, such as live tails, may take when the console stops."""


async def serve(
    settings: ConsoleSettings,
    client: Callable[[], AsyncAdmin],
    client_for: ClientFor,
    say: Callable[[str], None],
) -> None:
    """Listen, print the address and, once, the first password, and answer requests."""
    _check_certificate(settings)
    listener = _listen(settings)
    port = listener.getsockname()[1]
    console = create_console(settings, client, client_for)
    config = uvicorn.Config(
        create_app(console),
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the application does it
        timeout_graceful_shutdown=CLOSE_S,
        ssl_certfile=str(settings.tls_certificate) if settings.tls_certificate else None,
        ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    if settings.logins is Logins.CONSOLE:
        password = await console.accounts.create_first(console.now_ms())
        if password is not None:
            say(
                f"penstock console: the first account is {FIRST_ACCOUNT} with the password "
                f"{password} (it is not shown again)"
            )
    if settings.sends_passwords_in_plain_text:
        log.warning(
            "the console on %s has no TLS: passwords and cookies are sent in plain text, and the "
            "cookies are not Secure; use --tls-cert and --tls-key, or a proxy with TLS",
            settings.host,
        )
    say(f"penstock console is up: {settings.url(port)}")
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Stops in order; uvicorn itself would end the process by the signal that it received."""

    def stop(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _check_certificate(settings: ConsoleSettings) -> None:
    if settings.tls_certificate is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password callback OpenSSL would prompt on the terminal.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, lambda: "")
    except OSError as error:  # TLS errors are OSErrors too
        raise BadSetting(
            f"can't use --tls-cert {settings.tls_certificate} and --tls-key {settings.tls_key}: "
            f"{error.strerror or error}",
            hint="both are PEM files; the key belongs to the first certificate and is not "
            "encrypted",
        ) from None


def _listen(settings: ConsoleSettings) -> socket.socket:
    """A listening socket; connections wait until the server accepts them."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
