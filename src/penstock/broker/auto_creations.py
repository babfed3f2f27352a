"""Limits how many topics and groups clients at one address create by using them.

One client could fill the tables of the broker up to `topics_max` and `groups_max`, and nobody else
could create anything. What tools create, and what the broker itself needs, is not counted.
"""

import logging
from dataclasses import dataclass
from typing import Final

from penstock.config import LiveSettings
from penstock.errors import InvalidParameter
from penstock.rpc.answers import ClientId

log = logging.getLogger(__name__)

HOUR_MS: Final = 3_600_000
HOSTS_MAX: Final = 100_000
"""Addresses with a count; the oldest are forgotten."""
BROKER: Final[ClientId] = 0
"""The client of what the broker itself creates."""


@dataclass(slots=True)
class _Hour:
    """What clients at one address have created since a time, for an hour."""

    since_ms: int
    count: int = 0
    refused: bool = False


class AutoCreations:
    """Topics and groups that were created automatically, by client address."""

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._hosts: dict[ClientId, str] = {}
        self._hours: dict[str, _Hour] = {}

    def connected(self, client: ClientId, peer: str) -> None:
        """Note the address of a client, host:port."""
        self._hosts[client] = peer.rpartition(":")[0]

    def disconnected(self, client: ClientId) -> None:
        self._hosts.pop(client, None)

    def count(self, client: ClientId, name: str, now_ms: int) -> None:
        """Count a topic or group that this client creates; refuses it beyond the limit."""
        if client == BROKER:
            return
        host = self._hosts.get(client, "an unknown address")
        hour = self._hours.get(host)
        if hour is None or not 0 <= now_ms - hour.since_ms < HOUR_MS:
            self._hours.pop(host, None)
            hour = self._hours[host] = _Hour(now_ms)
            if len(self._hours) > HOSTS_MAX:
                del self._hours[next(iter(self._hours))]
        limit = self._settings.current.broker.auto_creations_max
        if hour.count < limit:
            hour.count += 1
            return
        error = InvalidParameter.over(
            f"{name} is not created: too many topics and groups were created automatically in an "
            f"hour for clients at {host}",
            figure=hour.count + 1,
            limit=limit,
            unit="of them",
            setting="auto_creations_max",
            hint="create topics and groups with a tool, or raise the setting",
        )
        if not hour.refused:
            hour.refused = True
            log.warning("%s", error.message)
        raise error
