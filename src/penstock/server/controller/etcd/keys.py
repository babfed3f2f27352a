"""The keys of controllers in etcd, under one prefix.

| key | value | lease |
|---|---|---|
| `sets/<broker name>` | the state of a broker set, JSON | no |
| `live/<broker name>/<id>` | what a living replica said last, JSON | while heartbeats arrive |
| `controllers/<number>` | the address of a controller | while it runs |

Broker names are quoted as in URLs.
"""

from urllib.parse import quote, unquote

from penstock.server.controller.living_replicas import ReplicaKey


class Keys:
    """Names of keys."""

    def __init__(self, prefix: str) -> None:
        self.all = prefix.encode()
        self._sets = self.all + b"sets/"
        self._live = self.all + b"live/"
        self._controllers = self.all + b"controllers/"

    @property
    def sets(self) -> bytes:
        """The prefix of all states."""
        return self._sets

    def broker_set(self, name: str) -> bytes:
        return self._sets + _quoted(name)

    def living(self, name: str) -> bytes:
        """The prefix of the living replicas of a broker set."""
        return self._live + _quoted(name) + b"/"

    def replica(self, replica: ReplicaKey) -> bytes:
        return self.living(replica.name) + str(replica.replica_id).encode()

    def controller(self, number: int) -> bytes:
        return self._controllers + str(number).encode()

    def set_of(self, key: bytes) -> str | None:
        """The broker set whose state has this key; None if it is another key."""
        if not key.startswith(self._sets):
            return None
        return unquote(key[len(self._sets) :].decode("ascii", "replace"))

    def replica_of(self, key: bytes) -> ReplicaKey | None:
        """The living replica with this key; None if it is another key."""
        if not key.startswith(self._live):
            return None
        name, _, number = key[len(self._live) :].decode("ascii", "replace").partition("/")
        digits = len(number) < 20 and number.isascii() and number.isdigit()
        return ReplicaKey(unquote(name), int(number)) if digits else None


def _quoted(name: str) -> bytes:
    return quote(name, safe="").encode()
