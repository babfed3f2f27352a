"""The settings of a running server, which clients may change over the network."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from penstock.config import apache
from penstock.config.settings import (
    ROLE_TABLES,
    Role,
    Settings,
    all_settings,
    contradiction,
    read_value,
    value_of,
    with_values,
    write_value,
)
from penstock.errors import InvalidParameter, NoPermission

log = logging.getLogger(__name__)

_RESTART = "change it in the server's configuration, then restart the server"


class LiveSettings:
    """The settings of a running server. A change replaces the whole `Settings` object."""

    def __init__(self, settings: Settings, role: Role = "broker") -> None:
        self.current = settings
        self.role: Role = role
        self.listeners: list[Callable[[Settings], None]] = []
        """Called with the new settings after each change."""
        self.changed: dict[str, str] = {}
        """Settings changed since the start: full name → value as text, as `change` accepts it."""
        self.changes = 0

    def apache_values(self) -> dict[str, str]:
        """All settings except secrets, under RocketMQ's names or, where it has none, ours."""
        return apache.apache_values(self.current, self.role)

    def change(self, values: Mapping[str, str]) -> list[str]:
        """Change live settings, by RocketMQ's names or ours: either all of them or none.

        Unknown names are ignored, as by RocketMQ, unless that would break a guarantee. Returns the
        full names of the settings whose value changed.
        """
        wanted: dict[str, Any] = {}
        values = apache.join_rate_limit(values, self.current.replication.rate_bytes_max)
        for key, text in values.items():
            if key in apache.PROTECTED:
                raise NoPermission(
                    f"{key} is a path or a class and can't be changed over the network",
                    hint=_RESTART,
                )
            found = apache.find_setting(key, self.role)
            reason = "" if found else apache.unsupported_reason(key, text.strip(), values)
            if reason:
                raise InvalidParameter(f"{key}={text.strip()} is not supported: {reason}")
            if found is None or found[0].partition(".")[0] not in ROLE_TABLES[self.role]:
                log.warning("ignored a change of %s: it is not a setting of this server", key)
                continue
            name, form = found
            doc = all_settings()[name].doc
            if doc.path or doc.secret:  # even if equal: the response must not confirm a guess
                raise _fixed(key, name)
            value = _read(key, name, form, text)
            if value != value_of(self.current, name):
                if not doc.live:
                    raise _fixed(key, name)
                wanted[name] = value
        if wanted:
            self._replace(wanted)
        return list(wanted)

    def _replace(self, wanted: dict[str, Any]) -> None:
        changed = with_values(self.current, wanted)
        found = contradiction(changed)
        if found is not None:
            raise InvalidParameter(" ".join(found))
        before, self.current = self.current, changed
        self.changes += 1
        for name, value in wanted.items():
            self.changed[name] = write_value(value)
            old = write_value(value_of(before, name))
            log.info("changed %s from %s to %s", name, old, self.changed[name])
        for listener in self.listeners:
            listener(self.current)


def _fixed(key: str, name: str) -> NoPermission:
    return NoPermission(f"{key} ({name}) can't change while the server runs", hint=_RESTART)


def _read(key: str, name: str, form: apache.Form, text: str) -> Any:
    try:
        ours = form.read(text.strip())
    except ValueError as error:
        raise InvalidParameter(f"{key} {error}, not {text.strip()!r}") from None
    try:
        return read_value(all_settings()[name], ours)
    except ValueError as error:
        raise InvalidParameter(f"{key} {error}") from None
