"""The keys of controllers in etcd, under one prefix.

| key | value | lease |
|---|---|---|
| `sets/<broker name>` | the state of a broker set, JSON | none |
| `live/<broker name>/<id>/<controller>` | a replica, by a controller that gets its heartbeats | the controller's |
| `controllers/<controller>` | the address of a controller | the controller's |

Broker names are quoted as in URLs. A controller is a random number.
"""  # noqa: E501

from typing import NamedTuple
from urllib.parse import quote, unquote

from penstock.server.controller.living_replicas import ReplicaKey

_DIGITS_MAX = 19


class ReportKey(NamedTuple):
    """What the name of a report says."""

    replica: ReplicaKey
    controller: int


class Keys:
    """Names of keys."""

    def __init__(self, prefix: str) -> None:
        self.all = prefix.encode()
        self.sets = self.all + b"sets/"
        """The prefix of all states."""
        self._live = self.all + b"live/"
        self._controllers = self.all + b"controllers/"

    def broker_set(self, name: str) -> bytes:
        return self.sets + _quoted(name)

    def living(self, name: str) -> bytes:
        """The prefix of all reports about a broker set."""
        return self._live + _quoted(name) + b"/"

    def replica(self, replica: ReplicaKey) -> bytes:
        """The prefix of all reports about a replica."""
        return self.living(replica.name) + b"%d/" % replica.replica_id

    def report(self, replica: ReplicaKey, controller: int) -> bytes:
        return self.replica(replica) + b"%d" % controller

    def controller(self, number: int) -> bytes:
        return self._controllers + b"%d" % number

    def set_of(self, key: bytes) -> str | None:
        """The broker set whose state has this key; None if it is another key."""
        if not key.startswith(self.sets):
            return None
        return unquote(key[len(self.sets) :].decode("ascii", "replace"))

    def report_of(self, key: bytes) -> ReportKey | None:
        """The replica and the controller of a report; None if it is another key."""
        if not key.startswith(self._live):
            return None
        parts = key[len(self._live) :].decode("ascii", "replace").split("/")
        if len(parts) != 3 or not all(map(_is_number, parts[1:])):
            return None
        return ReportKey(ReplicaKey(unquote(parts[0]), int(parts[1])), int(parts[2]))


def _quoted(name: str) -> bytes:
    return quote(name, safe="").encode()


def _is_number(text: str) -> bool:
    return len(text) <= _DIGITS_MAX and text.isascii() and text.isdigit()
