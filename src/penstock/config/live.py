"""The settings of a running server, and their change over the wire."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from penstock.config import apache
from penstock.config.settings import (
    ROLE_TABLES,
    Role,
    Settings,
    all_settings,
    read_value,
    value_of,
    with_values,
    write_value,
)
from penstock.errors import InvalidParameter, NoPermission

log = logging.getLogger(__name__)

_RESTART = "change it where the server is started, then restart it"


class Live:
    """The settings of a running server: replaced whole when a live one changes."""

    def __init__(self, settings: Settings, role: Role = "broker") -> None:
        self.current = settings
        self.role: Role = role
        self.listeners: list[Callable[[Settings], None]] = []
        """Called after each change, with the new settings."""
        self.changed: dict[str, str] = {}
        """What was changed since the start, by full name, as text: `change` takes it again."""
        self.changes = 0

    def apache_values(self) -> dict[str, str]:
        """All settings under RocketMQ's names, ours where it has none; secrets are left out."""
        return apache.apache_values(self.current, self.role)

    def change(self, values: Mapping[str, str]) -> list[str]:
        """Change live settings, by RocketMQ's names or ours: all of them or, if refused, none.

        Names that have no effect here are passed over, as RocketMQ does. Returns the full names of
        the settings that have another value now.
        """
        wanted: dict[str, Any] = {}
        for key, text in values.items():
            if key in apache.PROTECTED:
                raise NoPermission(
                    f"{key} can't be changed over the wire: it names a path or code",
                    hint=_RESTART,
                )
            found = apache.find(key, self.role)
            if found is None or found[0].partition(".")[0] not in ROLE_TABLES[self.role]:
                log.warning("a change of %s is ignored: it has no effect here", key)
                continue
            name, form = found
            doc = all_settings()[name].doc
            if doc.path or doc.secret:  # nor may anybody find out by asking whether they are right
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
        before, self.current = self.current, with_values(self.current, wanted)
        self.changes += 1
        for name, value in wanted.items():
            self.changed[name] = write_value(value)
            log.info("%s is %s now, it was %s", name, value, value_of(before, name))
        for listener in self.listeners:
            listener(self.current)


def _fixed(key: str, name: str) -> NoPermission:
    return NoPermission(f"{key} ({name}) is fixed when the server starts", hint=_RESTART)


def _read(key: str, name: str, form: apache.Form, text: str) -> Any:
    try:
        ours = form.read(text.strip())
    except ValueError as error:
        raise InvalidParameter(f"{key} can't be {text.strip()!r}: {error}") from None
    try:
        return read_value(all_settings()[name], ours)
    except ValueError as error:
        raise InvalidParameter(f"{key} {error}") from None
