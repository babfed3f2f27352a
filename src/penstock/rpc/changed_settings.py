"""Settings that were changed over the wire, in a file, so that they survive a restart.

They override the settings that the server is started with. RocketMQ has the same effect, because
it rewrites its configuration file.
"""

import logging
from collections.abc import Mapping
from typing import ClassVar

from penstock.config import LiveSettings
from penstock.errors import PenstockError
from penstock.store.tables.config_tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, DataVersion

log = logging.getLogger(__name__)


class ChangedSettingsFile(Body):
    """The content of the file."""

    data_version: DataVersion = DataVersion()
    changed: dict[str, str] = {}


class ChangedSettings:
    """The changed settings: values as text, by full name."""

    FILE: ClassVar[str] = "config/penstock-settings.json"

    def __init__(self) -> None:
        self.dirty = False
        self.version = DataVersion()
        self._changed: dict[str, str] = {}

    def load(self, file: ConfigFile) -> None:
        """Load the file, if there is one."""
        found = file.load(lambda data: fastjson.decode(data, ChangedSettingsFile))
        if found is not None:
            self.version, self._changed = found.data_version, found.changed

    def apply(self, settings: LiveSettings) -> None:
        """Apply the changes; log those that are no longer valid."""
        try:
            settings.change(self._changed)  # one alone may contradict the present value of another
            return
        except PenstockError:
            pass
        for name, text in self._changed.items():
            try:
                settings.change({name: text})
            except PenstockError as error:
                log.warning("ignored the changed setting %s: %s", name, error)

    def set(self, changed: Mapping[str, str], now_ms: int) -> None:
        """Replace all changes."""
        self._changed = dict(changed)
        self.version = self.version.next(now_ms)
        self.dirty = True

    def snapshot(self) -> bytes:
        self.dirty = False
        return fastjson.encode_pretty(
            ChangedSettingsFile(data_version=self.version, changed=self._changed)
        )
