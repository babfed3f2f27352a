"""Key-value configuration of the NameServer: namespace → key → value, in one file.

The namespace ORDER_TOPIC_CONFIG holds `topic → broker:queues;broker:queues` of ordered topics.
"""

from collections.abc import Callable
from typing import ClassVar, Final

from penstock.errors import InvalidParameter
from penstock.store.tables.config_tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.bodies.table_bodies import KVConfigSerializeWrapper

ORDER_TOPIC_CONFIG: Final = "ORDER_TOPIC_CONFIG"
KEY_CHARS_MAX: Final = 1024
"""Most characters of a namespace or key; RocketMQ's keys are names of topics."""
VALUE_CHARS_MAX: Final = 64 * 1024
"""Most characters of a value: the queues of an ordered topic on 3,000 brokers."""
TOTAL_CHARS_MAX: Final = 8 * 1024 * 1024
"""Most characters of all entries, because each change writes all of them."""
_ENTRY_CHARS: Final = 64  # what an entry takes besides its key and value, about


class KVConfig:
    """The table. A namespace stays when its last key is deleted."""

    FILE: ClassVar[str] = "kvConfig.json"

    def __init__(self) -> None:
        self.dirty = False
        self._namespaces: dict[str, dict[str, str]] = {}
        self._bodies: dict[str, bytes] = {}
        self._total_chars = 0

    def load(self, file: ConfigFile) -> None:
        """Load the file, if there is one."""
        wrapper = file.load(lambda data: fastjson.decode(data, KVConfigSerializeWrapper))
        if wrapper is not None:
            self._namespaces = wrapper.config_table
            self._bodies.clear()
            self._total_chars = sum(
                _size(namespace, key, value)
                for namespace, values in self._namespaces.items()
                for key, value in values.items()
            )
            self.dirty = False

    def snapshot(self) -> bytes:
        """The content of the file; the table is clean afterwards."""
        return self.begin_snapshot()()

    def begin_snapshot(self) -> Callable[[], bytes]:
        """The work that makes the snapshot, for the thread pool; the table is clean from now on."""
        copy = {namespace: dict(values) for namespace, values in self._namespaces.items()}
        self.dirty = False
        return lambda: fastjson.encode_pretty(KVConfigSerializeWrapper(config_table=copy))

    def get(self, namespace: str, key: str) -> str | None:
        """One value."""
        return self._namespaces.get(namespace, {}).get(key)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set one value. Raises InvalidParameter if it is too large, or the table would be."""
        for what, text, limit in (
            ("namespace", namespace, KEY_CHARS_MAX),
            ("key", key, KEY_CHARS_MAX),
            ("value", value, VALUE_CHARS_MAX),
        ):
            if len(text) > limit:
                raise InvalidParameter.over(
                    f"the {what} is too long", figure=len(text), limit=limit, unit="characters"
                )
        old = self.get(namespace, key)
        total = self._total_chars + _size(namespace, key, value)
        if old is not None:
            total -= _size(namespace, key, old)
        if total > TOTAL_CHARS_MAX and total > self._total_chars:
            raise InvalidParameter.over(
                "the key-value configuration is too large",
                figure=total,
                limit=TOTAL_CHARS_MAX,
                unit="characters",
                hint="delete keys that are not used",
            )
        self._total_chars = total
        self._namespaces.setdefault(namespace, {})[key] = value
        self._changed(namespace)

    def remove(self, namespace: str, key: str) -> None:
        """Delete one value, if it exists."""
        old = self._namespaces.get(namespace, {}).pop(key, None)
        if old is not None:
            self._total_chars -= _size(namespace, key, old)
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


def _size(namespace: str, key: str, value: str) -> int:
    """About the characters of an entry in the file."""
    return len(namespace) + len(key) + len(value) + _ENTRY_CHARS
