"""Subscription groups: their configs, made on first sight where that is allowed."""

import logging

from penstock.config import Live
from penstock.errors import GroupNotExist
from penstock.rpc.answers import EffectQueue, PersistSoon
from penstock.store.tables import FORBID_READ, SubscriptionGroupTable
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from penstock.wire.codes import BUILT_IN_GROUPS, SYSTEM_GROUP_PREFIX, group_fault

log = logging.getLogger(__name__)


class Groups:
    """The table of subscription groups and its rules."""

    def __init__(self, table: SubscriptionGroupTable, settings: Live, effects: EffectQueue) -> None:
        self.table = table
        self._settings = settings
        self._effects = effects

    def seed(self) -> None:
        """Make the groups every broker has."""
        for group in BUILT_IN_GROUPS:
            self.table.seed(SubscriptionGroupConfig(group_name=group))
        if self.table.dirty:
            self._effects.put(PersistSoon(self.table))

    def find(self, group: str, now_ms: int) -> SubscriptionGroupConfig:
        """The group, created if it is new and that is allowed; raises GroupNotExist."""
        config = self.table.get(group)
        if config is not None:
            return config
        fault = group_fault(group)
        if fault is not None:
            raise GroupNotExist(fault, hint="give the group another name")
        wanted = group.startswith(SYSTEM_GROUP_PREFIX)
        if not wanted and not self._settings.current.broker.auto_create_groups:
            raise GroupNotExist(f"the subscription group {group} does not exist here")
        config = SubscriptionGroupConfig(group_name=group)
        self.put(config, now_ms)
        return config

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """The group, if it is known."""
        return self.table.get(group)

    def may_read(self, group: str, topic: str) -> bool:
        """Whether the group is not forbidden to read the topic."""
        return not self.table.forbidden(group, topic) & FORBID_READ

    def allow_reading(self, group: str, topic: str, *, allowed: bool, now_ms: int) -> None:
        """Forbid a group to read a topic, or allow it again: persisted soon."""
        if allowed == self.may_read(group, topic):
            return
        bits = self.table.forbidden(group, topic)
        bits = bits & ~FORBID_READ if allowed else bits | FORBID_READ
        self.table.forbid(group, topic, bits, now_ms)
        self._effects.put(PersistSoon(self.table))

    def put(self, config: SubscriptionGroupConfig, now_ms: int) -> None:
        """Create or change a group: persisted soon."""
        before = self.table.get(config.group_name)
        self.table.put(config, now_ms)
        if before is None:
            log.info("group %s is created: %s", config.group_name, config)
        else:
            log.info("group %s is changed: %s, before: %s", config.group_name, config, before)
        self._effects.put(PersistSoon(self.table))

    def delete(self, group: str, now_ms: int) -> None:
        """Forget a group."""
        if self.table.remove(group, now_ms) is not None:
            log.info("group %s is deleted", group)
        if self.table.dirty:
            self._effects.put(PersistSoon(self.table))
