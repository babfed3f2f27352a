"""Key-value configuration of the NameServer: namespace → key → value, in one file.

The namespace ORDER_TOPIC_CONFIG holds `topic → broker:queues;broker:queues` of ordered topics.
"""

from typing import ClassVar, Final

from penstock.store.tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.bodies.table_bodies import KVConfigSerializeWrapper

ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"


class KVConfig:
    """The table. A namespace stays when its last key is deleted."""

    FILE: ClassVar[str] = "kvConfig.json"

    def __init__(self) -> None:
        self.dirty = False
        self._namespaces: dict[str, dict[str, str]] = {}
        self._bodies: dict[str, bytes] = {}

    def load(self, file: ConfigFile) -> None:
        """Load the file, if there is one."""
        wrapper = file.load(lambda data: fastjson.decode(data, KVConfigSerializeWrapper))
        if wrapper is not None:
            self._namespaces = wrapper.config_table
            self._bodies.clear()
            self.dirty = False

    def snapshot(self) -> bytes:
        """The content of the file; the table is clean afterwards."""
        self.dirty = False
        return fastjson.encode_pretty(KVConfigSerializeWrapper(config_table=self._namespaces))

    def get(self, namespace: str, key: str) -> str | None:
        """One value."""
        return self._namespaces.get(namespace, {}).get(key)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set one value."""
        self._namespaces.setdefault(namespace, {})[key] = value
        self._changed(namespace)

    def remove(self, namespace: str, key: str) -> None:
        """Delete one value, if it exists."""
        if self._namespaces.get(namespace, {}).pop(key, None) is not None:
            self._changed(namespace)

    def body(self, namespace: str) -> bytes | None:
        """A namespace as a response body; None if it was never used."""
        values = self._namespaces.get(namespace)
        if values is None:
            return None
        body = self._bodies.get(namespace)
        if body is None:
            body = self._bodies[namespace] = fastjson.encode(KVTable(table=values))
        return body

    def _changed(self, namespace: str) -> None:
        self.dirty = True
        self._bodies.pop(namespace, None)
