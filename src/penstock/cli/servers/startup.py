"""Shared by the commands that start a server: options, settings, process limits."""

import ctypes
import errno
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import click

from penstock.cli.servers.logs import log_to_stderr
from penstock.config.doc import PORT_MAX
from penstock.config.settings import Role
from penstock.config.sources import (
    Layer,
    LoadedSettings,
    from_environment,
    from_flags,
    from_namesrv_addr,
    from_properties,
    from_toml,
    merge_layers,
)
from penstock.errors import BadSetting, PenstockError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOSPC)
"""Errors of a directory that can't be created or written."""

_OTHER_FORMATS = (".yaml", ".yml", ".json", ".xml")
"""Most of their lines would pass as properties with unknown names."""

PORT = click.IntRange(1, PORT_MAX)
config_option = click.option(
    "-c",
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Settings file: penstock.toml, or RocketMQ's broker.conf or namesrv.conf.",
)
log_option = click.option(
    "--log",
    "log_form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the log lines on stderr.",
)


def load_settings(
    config_file: Path | None, role: Role, flags: Mapping[str, tuple[str, object]]
) -> LoadedSettings:
    """Load the settings: defaults, NAMESRV_ADDR, the file, PENSTOCK_… variables, options.

    Each source overrides those before it.
    """
    layers = [from_namesrv_addr(os.environ)]
    if config_file is not None:
        layers.append(_read_file(config_file, role))
    layers += [from_environment(os.environ), from_flags(flags)]
    return merge_layers(layers)


def _read_file(path: Path, role: Role) -> Layer:
    if path.suffix.lower() in _OTHER_FORMATS:
        raise BadSetting(
            f"{path}: settings are not read from {path.suffix} files",
            hint="give a penstock.toml, or RocketMQ's broker.conf or namesrv.conf",
        )
    data = path.read_bytes()
    if path.suffix == ".toml":
        return from_toml(data, str(path))
    from penstock.wire.java_properties import parse_properties

    try:
        values = parse_properties(data)
    except PenstockError as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from None
    return from_properties(values, str(path), role)


def set_up_logging(log_form: str, who: str) -> None:
    """Log to stderr; with `--debug` more."""
    context = click.get_current_context(silent=True)
    debug = context is not None and bool(context.find_root().params.get("debug"))
    log_to_stderr(log_form, who, debug=debug)


def prepare(loaded: LoadedSettings, log_form: str, who: str, *, warn: bool = True) -> None:
    """Set up logging, log warnings about the settings, and raise the limit of open files."""
    set_up_logging(log_form, who)
    for warning in loaded.warnings if warn else ():
        log.warning("%s", warning)
    raise_open_files()


def raise_open_files() -> None:
    """Raise the limit of open files to the maximum: connections and mapped files need many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("can't raise the limit of open files from %d to %d: %s", soft, hard, error)


def end_with(parent: int) -> None:
    """Receive SIGTERM when the parent process ends, even if it is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")
    if os.getppid() != parent:  # it has ended already
        sys.exit(1)


def serve(server: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a server until it stops; explain common errors such as a port in use."""
    from penstock.server.services.service import run

    try:
        run(server())
    except OSError as error:
        raise explained(error) from error


def explained(error: OSError) -> OSError:
    """Add the next step to the message of a common error."""
    if error.errno == errno.EADDRINUSE:
        text = f"{error.strerror}; stop the other server, or choose another port"
    elif error.errno == errno.EADDRNOTAVAIL:
        text = f"{error.strerror}; set --host to an address of this machine"
    elif error.errno == errno.EFBIG and error.filename:
        text = (
            f"{error.filename} would be too large for its file system or for the limit of this "
            "process; raise the limit (ulimit -f), or lower store.segment_bytes"
        )
    elif error.errno in _UNUSABLE and error.filename:
        text = f"can't use {error.filename}: {error.strerror}; set --data to another directory"
    else:
        return error
    return OSError(error.errno, text)


def say(line: str) -> None:
    """Print a line on stdout and flush it: other processes wait for it."""
    print(line, flush=True)
