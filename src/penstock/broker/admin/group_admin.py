"""Administration of subscription groups, and the tables that slaves copy."""

from collections.abc import Iterator
from itertools import chain
from typing import Final

import msgspec

from penstock.broker.admin.large_requests import Pages
from penstock.broker.attributes import GROUP_ATTRIBUTES, alter
from penstock.broker.context import BrokerContext
from penstock.errors import GroupNotExist, InvalidParameter
from penstock.rpc.answers import Answer, InThread, PersistentTable, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_with
from penstock.rpc.router import Row
from penstock.rpc.steps import in_steps, run_in_steps
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import GroupForbidden, SubscriptionGroupList
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from penstock.wire.bodies.table_bodies import SubscriptionGroupWrapper
from penstock.wire.codes import RequestCode, group_fault

RETRY_DELAYS_MAX: Final = 100
"""Most retry delays of a group."""
SUBSCRIPTIONS_MAX: Final = 1_000
"""Most subscriptions that are stored with a group."""
TEXT_CHARS_MAX: Final = 64 * 1024
"""Most characters of the subscriptions that are stored with a group."""


class GroupHandlers:
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, DELETE_SUBSCRIPTIONGROUP and related requests."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._pages = Pages(first="groupSeq", count="maxGroupNum")

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, self.create),
            Row(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, self.create_several),
            Row(RequestCode.DELETE_SUBSCRIPTIONGROUP, self.delete),
            Row(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, self.get),
            Row(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, self.get_all),
            Row(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, self.forbid),
            Row(RequestCode.GET_ALL_CONSUMER_OFFSET, self.get_offsets),
            Row(RequestCode.GET_ALL_DELAY_OFFSET, self.get_delay_offsets),
        ]

    def create(self, command: Command) -> Answer:
        """Create or change a group; the response is sent when the table is saved."""
        return self._put([command.body_as(SubscriptionGroupConfig)], command.now_ms)

    def create_several(self, command: Command) -> Answer:
        """Like `create` for a list: all groups or, if one of them is not valid, none."""
        return self._put(command.body_as(SubscriptionGroupList).group_config_list, command.now_ms)

    def delete(self, command: Command) -> Answer:
        """Delete a group and, if requested, its offsets."""
        context, group = self._context, command.text("groupName")
        context.groups.delete(group, command.now_ms)
        saved: list[PersistentTable] = [context.groups.table]
        work: Iterator[None] = context.stats.forget_group(group)
        if command.truth("cleanOffset"):
            work = chain(work, context.offsets.remove_group(group, command.now_ms))
            saved.append(context.offsets.table)

        def save() -> Answer:
            saves = [context.persistence.save(table) for table in saved]
            return InThread(lambda: [save() for save in saves], lambda _: Reply())

        return run_in_steps(work, save)

    def get(self, command: Command) -> Answer:
        """One group; created if it is new and that is allowed, as for a consumer."""
        group = command.text("group")
        return reply_with(self._context.groups.find(group, command.now_ms, command.client))

    def get_all(self, command: Command) -> Answer:
        """The whole table, or a page of it."""
        whole = self._context.groups.table.wrapper()
        groups, forbidden = whole.subscription_group_table, whole.forbidden_table
        names = self._pages.names(command, groups, whole.data_version)
        shown = groups if names is None else {name: groups[name] for name in names}
        body = SubscriptionGroupWrapper(
            subscription_group_table=dict(shown),
            forbidden_table={
                group: dict(topics)
                for group, topics in forbidden.items()
                if names is None or group in shown
            },
            data_version=whole.data_version,
        )
        ext = {"totalGroupNum": str(len(groups))}
        return InThread(lambda: fastjson.encode(body), lambda data: Reply(ext=ext, body=data))

    def forbid(self, command: Command) -> Answer:
        """Whether a group may read a topic; changes it first if `readable` is given."""
        groups, group, topic = self._context.groups, command.text("group"), command.text("topic")
        if command.ext.get("readable"):
            allowed = command.truth("readable")
            if not allowed:
                self._context.topics.need(topic)
                if groups.get(group) is None:
                    raise GroupNotExist(f"the subscription group {group} does not exist here")
            groups.allow_reading(group, topic, allowed=allowed, now_ms=command.now_ms)
        return reply_with(
            GroupForbidden(topic=topic, group=group, readable=groups.may_read(group, topic))
        )

    # --- tables for slaves

    def get_offsets(self, command: Command) -> Answer:
        """All consumer offsets."""
        work = self._context.offsets.table.begin_body()
        return InThread(work, lambda body: Reply(body=body))

    def get_delay_offsets(self, command: Command) -> Answer:
        """The offset of each delay level, in the form of its file."""
        return Reply(body=self._context.delay.table.body())

    def _put(self, wanted: list[SubscriptionGroupConfig], now_ms: int) -> Answer:
        configs: list[SubscriptionGroupConfig] = []
        return in_steps(
            wanted,
            lambda config: configs.append(self._checked(config)),
            lambda: self._put_checked(configs, now_ms),
        )

    def _put_checked(self, configs: list[SubscriptionGroupConfig], now_ms: int) -> Answer:
        groups = self._context.groups
        changed = [config for config in configs if config != groups.get(config.group_name)]
        if not changed:
            return Reply()
        created = sum(groups.get(config.group_name) is None for config in changed)
        if created:
            groups.check_count(created)
        return in_steps(
            changed,
            lambda config: groups.put(config, now_ms),
            lambda: InThread(self._context.persistence.save(groups.table), lambda _: Reply()),
        )

    def _checked(self, wanted: SubscriptionGroupConfig) -> SubscriptionGroupConfig:
        """The group with its changed attributes; raises InvalidParameter."""
        fault = group_fault(wanted.group_name)
        if fault is not None:
            raise InvalidParameter(fault)
        _refuse_too_large(wanted)
        existing = self._context.groups.get(wanted.group_name)
        current = existing.attributes if existing is not None else None
        attributes = alter(GROUP_ATTRIBUTES, current, wanted.attributes)
        return msgspec.structs.replace(wanted, attributes=attributes)


def _refuse_too_large(config: SubscriptionGroupConfig) -> None:
    """Refuse a group that takes too much memory, and time at each change of any group."""
    policy = config.group_retry_policy
    delays = policy.customized_retry_policy
    subscriptions = config.subscription_data_set or []
    counts = [
        ("retry delays", "delays", len(delays.next) if delays is not None else 0, RETRY_DELAYS_MAX),
        ("subscriptions", "subscriptions", len(subscriptions), SUBSCRIPTIONS_MAX),
    ]
    if len(subscriptions) <= SUBSCRIPTIONS_MAX:
        texts = [policy.type]
        for one in subscriptions:
            texts += [one.topic, one.expression_type or "", one.expression or ""]
        chars = sum(map(len, texts))
        counts.append(("characters in its subscriptions", "characters", chars, TEXT_CHARS_MAX))
    for what, unit, count, limit in counts:
        if count > limit:
            raise InvalidParameter.over(
                f"the group {config.group_name} has too many {what}",
                figure=count,
                limit=limit,
                unit=unit,
            )
