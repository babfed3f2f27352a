"""Settings that were changed over the wire: kept, so that a restart does not forget them.

They count more than what the server was started with, as in RocketMQ, which rewrites its file.
"""

import logging
from collections.abc import Mapping
from typing import ClassVar

from penstock.config import Live
from penstock.errors import PenstockError
from penstock.store.tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, DataVersion

log = logging.getLogger(__name__)


class ChangesFile(Body):
    """The content of the file."""

    data_version: DataVersion = DataVersion()
    changed: dict[str, str] = {}


class ChangedSettings:
    """The table of changes, by full name, as text."""

    FILE: ClassVar[str] = "config/penstock-settings.json"

    def __init__(self) -> None:
        self.dirty = False
        self.version = DataVersion()
        self._changed: dict[str, str] = {}

    def load(self, file: ConfigFile) -> None:
        """Take over what the file holds."""
        found = file.load(lambda data: fastjson.decode(data, ChangesFile))
        if found is not None:
            self.version, self._changed = found.data_version, found.changed

    def apply(self, settings: Live) -> None:
        """Change the settings again; what is not allowed any more is left out, and said."""
        for name, text in self._changed.items():
            try:
                settings.change({name: text})
            except PenstockError as error:
                log.warning("a change of %s is not made again: %s", name, error)

    def note(self, changed: Mapping[str, str], now_ms: int) -> None:
        """These are the changes now."""
        self._changed = dict(changed)
        self.version = self.version.next(now_ms)
        self.dirty = True

    def snapshot(self) -> bytes:
        self.dirty = False
        return fastjson.encode_pretty(ChangesFile(data_version=self.version, changed=self._changed))
