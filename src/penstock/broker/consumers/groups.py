"""Subscription groups: their configs, created on first use if that is allowed."""

import logging
from typing import Final

from penstock.broker.auto_creations import BROKER, AutoCreations
from penstock.config import LiveSettings
from penstock.errors import GroupNotExist, InvalidParameter
from penstock.rpc.answers import ClientId, EffectQueue, PersistSoon
from penstock.store.tables.config_tables import FORBID_READ, SubscriptionGroupTable
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from penstock.wire.codes import BUILT_IN_GROUPS, SYSTEM_GROUP_PREFIX, group_fault

log = logging.getLogger(__name__)

FORBIDDEN_MAX: Final = 10_000
"""Most pairs of a group and a topic that it may not read: each change encodes all of them."""


class Groups:
    """The table of subscription groups."""

    def __init__(
        self,
        table: SubscriptionGroupTable,
        settings: LiveSettings,
        effects: EffectQueue,
        auto_creations: AutoCreations,
        *,
        copied: bool = False,
    ) -> None:
        """With `copied` the table is that of the master: nothing else changes it."""
        self.table = table
        self._copied = copied
        self._auto_creations = auto_creations
        self._settings = settings
        self._effects = effects

    def seed(self) -> None:
        """Create the built-in groups."""
        for group in BUILT_IN_GROUPS:
            self.table.seed(SubscriptionGroupConfig(group_name=group))
        if self.table.dirty:
            self._effects.put(PersistSoon(self.table))

    def find(self, group: str, now_ms: int, client: ClientId = BROKER) -> SubscriptionGroupConfig:
        """The group, created if it is new and that is allowed to this client.

        Raises GroupNotExist or InvalidParameter.
        """
        config = self.table.get(group)
        if config is not None:
            return config
        fault = group_fault(group)
        if fault is not None:
            raise GroupNotExist(fault, hint="choose another name for the group")
        wanted = group.startswith(SYSTEM_GROUP_PREFIX)
        if not wanted and not self._settings.current.broker.auto_create_groups:
            raise GroupNotExist(f"the subscription group {group} does not exist on this broker")
        if not wanted and not self._copied:  # a slave creates nothing
            self.check_count()
            self._auto_creations.count(client, f"the group {group}", now_ms)
        config = SubscriptionGroupConfig(group_name=group)
        self.put(config, now_ms)
        return config

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """The group, if it exists."""
        return self.table.get(group)

    def may_read(self, group: str, topic: str) -> bool:
        """Whether the group may read the topic."""
        return not self.table.forbidden(group, topic) & FORBID_READ

    def allow_reading(self, group: str, topic: str, *, allowed: bool, now_ms: int) -> None:
        """Allow or forbid a group to read a topic; saved soon.

        Raises InvalidParameter if too many topics are forbidden to groups already.
        """
        if allowed == self.may_read(group, topic):
            return
        if not allowed and self.table.forbidden_count() >= FORBIDDEN_MAX:
            raise InvalidParameter.over(
                "too many topics are forbidden to groups",
                figure=FORBIDDEN_MAX + 1,
                limit=FORBIDDEN_MAX,
                unit="pairs of group and topic",
                hint="allow some of them again, or use access lists",
            )
        bits = self.table.forbidden(group, topic)
        bits = bits & ~FORBID_READ if allowed else bits | FORBID_READ
        self.table.forbid(group, topic, bits, now_ms)
        log.info("group %s may %s topic %s", group, "read" if allowed else "not read", topic)
        self._effects.put(PersistSoon(self.table))

    def put(self, config: SubscriptionGroupConfig, now_ms: int) -> None:
        """Create or change a group; saved soon. A slave gets it from its master instead."""
        if self._copied:
            return
        before = self.table.get(config.group_name)
        self.table.put(config, now_ms)
        log.info(
            "%s group %s (consume %s, broadcast %s, retries %d, retry queues %d)",
            "created" if before is None else "changed",
            config.group_name,
            "on" if config.consume_enable else "off",
            "on" if config.consume_broadcast_enable else "off",
            config.retry_max_times,
            config.retry_queue_nums,
        )
        self._effects.put(PersistSoon(self.table))

    def check_count(self, created: int = 1) -> None:
        """Refuse to create groups beyond `groups_max`."""
        limit = self._settings.current.broker.groups_max
        count = len(self.table.groups) + created
        if count > limit:
            raise InvalidParameter.over(
                "too many groups",
                figure=count,
                limit=limit,
                unit="groups",
                setting="groups_max",
                hint="delete groups that are not used, or raise the setting",
            )

    def delete(self, group: str, now_ms: int) -> None:
        """Delete a group; saved soon."""
        if self.table.remove(group, now_ms) is not None:
            log.info("deleted group %s", group)
        if self.table.dirty:
            self._effects.put(PersistSoon(self.table))
