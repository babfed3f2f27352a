"""Consumer groups: list, create, change, delete, and their progress."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, Unpack

import msgspec

from penstock.client.admin.admin_members import MemberAdmin
from penstock.client.admin.admin_topics import TopicAdmin, read_pages
from penstock.client.admin.admin_values import (
    BrokerAddress,
    GroupInfo,
    GroupProgress,
    GroupSettings,
    QueueProgress,
)
from penstock.client.consumer.offset_store import offset_of_response
from penstock.errors import GroupNotExist, InvalidParameter, PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    ConsumeStats,
    OffsetWrapper,
    QueryConsumeTimeSpanBody,
)
from penstock.wire.bodies.client_bodies import MessageQueue, SubscriptionGroupConfig, TopicList
from penstock.wire.bodies.table_bodies import SubscriptionGroupWrapper
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
    RequestCode,
    ResponseCode,
    group_fault,
    is_system_group,
)

log = logging.getLogger(__name__)

_NO_AGE_MS = 20 * 365 * 86_400_000
"""No message is older: a broker that does not know the time reports the time since 1970."""


class GroupChanges(TypedDict, total=False):
    """The settings of a group that can be changed, by the names of `GroupSettings`."""

    consume_enabled: bool
    broadcast_enabled: bool
    orderly: bool
    from_min_enabled: bool
    retries_max: int
    retry_queues: int
    consume_timeout_minutes: int
    notify_enabled: bool
    broker_id: int
    broker_id_when_slow: int


_NAMES = {
    "consume_enabled": "consume_enable",
    "broadcast_enabled": "consume_broadcast_enable",
    "orderly": "consume_message_orderly",
    "from_min_enabled": "consume_from_min_enable",
    "retries_max": "retry_max_times",
    "retry_queues": "retry_queue_nums",
    "consume_timeout_minutes": "consume_timeout_minute",
    "notify_enabled": "notify_consumer_ids_changed_enable",
    "broker_id": "broker_id",
    "broker_id_when_slow": "which_broker_when_consume_slowly",
}
"""Our name → the attribute of SubscriptionGroupConfig."""


class GroupAdmin(TopicAdmin, MemberAdmin):
    """The part of `AsyncAdmin` about consumer groups."""

    async def groups(self, *, system: bool = False, cluster: str | None = None) -> list[GroupInfo]:
        """All groups, sorted by name; RocketMQ's own only with `system`."""
        tables = await self.from_each(await self.masters(cluster), self._group_table)
        found: dict[str, dict[str, GroupSettings]] = {}
        for broker, table in tables.items:
            for name, config in table.items():
                found.setdefault(name, {})[broker.name] = _settings(config)
        return [
            GroupInfo(self.session.without_namespace(name), is_system_group(name), brokers)
            for name, brokers in sorted(found.items())
            if self.is_ours(name) and (system or not is_system_group(name))
        ]

    async def create_group(
        self,
        group: str,
        *,
        cluster: str | None = None,
        brokers: Iterable[str] = (),
        **changes: Unpack[GroupChanges],
    ) -> GroupInfo:
        """Create a group on all masters, those of a cluster, or these brokers; or change it there.

        A setting that is not given gets RocketMQ's default for a new group, and is kept otherwise.
        """
        name = self.session.with_namespace(group)
        fault = group_fault(name)
        if fault is not None:
            raise InvalidParameter(f"{group[:80]!r} is not a valid group name: {fault}")
        masters = await self.masters(cluster, brokers)
        known = await self._group_at(masters, name)
        settings = {}
        requests: list[tuple[BrokerAddress, int, Mapping[str, str], bytes]] = []
        for master in masters:
            shape = known.get(master.name) or SubscriptionGroupConfig(group_name=name)
            renamed = {_NAMES[key]: value for key, value in changes.items()}
            config = msgspec.structs.replace(shape, **renamed)
            settings[master.name] = _settings(config)
            code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
            requests.append((master, code, {}, fastjson.encode(config)))
        await self.change_each(requests)
        return GroupInfo(group, is_system_group(name), settings)

    async def update_group(self, group: str, **changes: Unpack[GroupChanges]) -> GroupInfo:
        """Change the given settings on all brokers that have the group; raises GroupNotExist."""
        masters = await self.masters()
        known = await self._group_at(masters, self.session.with_namespace(group))
        if not known:
            raise self._no_group(group, masters)
        return await self.create_group(group, brokers=known, **changes)

    async def delete_group(
        self, group: str, *, keep_offsets: bool = False, cluster: str | None = None
    ) -> list[str]:
        """Delete a group with its offsets, its retry and its dead letter topic; its brokers."""
        name = self.session.with_namespace(group)
        masters = await self.masters(cluster)
        known = await self._group_at(masters, name)
        if not known:
            raise self._no_group(group, masters)
        having = [broker for broker in masters if broker.name in known]
        fields = {"groupName": name, "cleanOffset": "false" if keep_offsets else "true"}
        await self.tell_each(having, RequestCode.DELETE_SUBSCRIPTIONGROUP, fields)
        for prefix in (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX):
            topic = prefix + name
            if await self.session.find_route(topic) is not None:
                await self.delete_topic(topic, cluster=cluster)
        return [broker.name for broker in having]

    async def topics_of_group(self, group: str) -> list[str]:
        """The topics in which a group has offsets."""
        found = await self.ask_each(
            await self.masters(),
            RequestCode.QUERY_TOPICS_BY_CONSUMER,
            {"group": self.session.with_namespace(group)},
        )
        topics = {
            self.session.without_namespace(topic)
            for _, answer in found.items
            for topic in fastjson.decode(answer.body, TopicList).topic_list
            if self.is_ours(topic)
        }
        return sorted(topics)

    # --- progress

    async def progress(
        self, group: str, topic: str | None = None, *, owners: bool = False
    ) -> GroupProgress:
        """The progress of a group in each queue of a topic, or of all of its topics.

        `owners` also queries each connected consumer for its queues.
        """
        name = self.session.with_namespace(group)
        fields = {"consumerGroup": name}
        if topic is not None:
            fields |= {
                "topic": self.session.with_namespace(topic),
                "topicList": self.session.with_namespace(topic),
            }
        found = await self.ask_each(await self.masters(), RequestCode.GET_CONSUME_STATS, fields)
        owned = await self._owners(group) if owners else {}
        queues: list[QueueProgress] = []
        tps = 0.0
        for broker, answer in found.items:
            stats = fastjson.decode(answer.body, ConsumeStats)
            tps += stats.consume_tps
            queues += await self._progress_at(broker, name, stats.offset_table, owned)
        unreachable = {*found.unreachable, *await self.brokers_without_master()}
        ordered = sorted(queues, key=lambda at: at.queue)
        return GroupProgress(group, tuple(ordered), tps, tuple(sorted(unreachable)))

    async def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """The committed offset of a group in a queue; None if it never committed one."""
        broker = await self.broker(queue.broker_name)
        name = group if is_system_group(group) else self.session.with_namespace(group)
        return await self._committed(broker, name, self.full_queue(queue))

    # --- private

    async def _committed(
        self, broker: BrokerAddress, group: str, queue: MessageQueue
    ) -> int | None:
        """The committed offset of a group (its name with namespace); None if there is none."""
        fields = {
            "consumerGroup": group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "setZeroIfNotFound": "false",
        }
        answer = await self.ask(
            broker.address,
            RequestCode.QUERY_CONSUMER_OFFSET,
            fields,
            good=(ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND),
        )
        return offset_of_response(answer.ext) if answer.code == ResponseCode.SUCCESS else None

    async def _progress_at(
        self,
        broker: BrokerAddress,
        group: str,
        table: Mapping[MessageQueue, OffsetWrapper],
        owned: Mapping[MessageQueue, str],
    ) -> list[QueueProgress]:
        ages: dict[MessageQueue, int] = {}
        for topic in sorted({queue.topic for queue in table}):
            ages |= await self._ages(broker, group, topic)
        # A broker reports 0 for a group without an offset: only these are queried again.
        unclear = [queue for queue, at in table.items() if at.consumer_offset == 0]
        queried = await self.for_each(unclear, lambda queue: self._committed(broker, group, queue))
        committed: dict[MessageQueue, int | None] = {
            queue: at.consumer_offset for queue, at in table.items()
        }
        committed |= dict(zip(unclear, queried, strict=True))
        return [
            QueueProgress(
                queue=self.bare_queue(queue),
                max_offset=at.broker_offset,
                committed=committed[queue],
                pulled=None if committed[queue] is None else at.pull_offset,
                lag_ms=_lag_ms(committed[queue], at.broker_offset, ages.get(queue)),
                consumed_ms=at.last_timestamp if at.last_timestamp > 0 else None,
                client_id=owned.get(queue),
            )
            for queue, at in table.items()
        ]

    async def _ages(self, broker: BrokerAddress, group: str, topic: str) -> dict[MessageQueue, int]:
        """The age of the next message to be consumed, by queue."""
        answer = await self.ask(
            broker.address, RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": topic, "group": group}
        )
        spans = fastjson.decode(answer.body, QueryConsumeTimeSpanBody).consume_time_span_set
        return {
            span.message_queue: span.delay_time
            for span in spans
            if span.message_queue is not None and 0 < span.delay_time < _NO_AGE_MS
        }

    async def _owners(self, group: str) -> dict[MessageQueue, str]:
        """Queue (with namespace) → client id, without the queues of clients that do not respond."""
        owned = {}
        for member in (await self.members(group)).members:
            try:
                info = await self.running_info(group, member.client_id)
            except PenstockError as error:
                log.warning("cannot get the queues of client %s: %s", member.client_id, error)
                continue
            for queue in (*info.mq_table, *info.mq_pop_table):
                owned[queue] = member.client_id
        return owned

    async def _group_table(self, broker: BrokerAddress) -> Mapping[str, SubscriptionGroupConfig]:
        return await read_pages(
            self,
            broker,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            SubscriptionGroupWrapper,
            "Group",
            lambda page: (page.subscription_group_table, page.data_version),
        )

    async def _group_at(
        self, brokers: Sequence[BrokerAddress], name: str
    ) -> dict[str, SubscriptionGroupConfig]:
        """The group on each of these brokers that has it; all of them must respond.

        It reads the whole table, because Apache's broker creates a group that is queried alone.
        """

        async def find(broker: BrokerAddress) -> SubscriptionGroupConfig | None:
            table = await self._group_table(broker)
            return table.get(name)

        found = await self.for_each(brokers, find)
        return {b.name: c for b, c in zip(brokers, found, strict=True) if c is not None}

    def _no_group(self, group: str, brokers: Iterable[BrokerAddress]) -> GroupNotExist:
        asked = ", ".join(f"{broker.name} ({broker.address})" for broker in brokers)
        return GroupNotExist(
            f"none of the brokers {asked} has the group {group!r}",
            hint="check its name and namespace; groups() lists them",
        )


def _settings(config: SubscriptionGroupConfig) -> GroupSettings:
    values = {ours: getattr(config, theirs) for ours, theirs in _NAMES.items()}
    return GroupSettings(**values, attributes=dict(config.attributes))


def _lag_ms(committed: int | None, max_offset: int, age_ms: int | None) -> int | None:
    if committed is None:
        return None
    return 0 if committed >= max_offset else age_ms
