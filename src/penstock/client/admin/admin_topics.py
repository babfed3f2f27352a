"""Topics: list, create, change, describe, delete."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from penstock.client.admin.admin_core import AdminCore
from penstock.client.admin.admin_kv import KeyValueAdmin
from penstock.client.admin.admin_values import (
    BrokerAddress,
    QueueState,
    TopicDescription,
    TopicInfo,
    TopicKind,
    TopicSettings,
)
from penstock.client.topic_routes import Route
from penstock.clock import pause
from penstock.errors import InvalidParameter, SystemBusy
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import GroupList, TopicConfigAndQueueMapping, TopicStatsTable
from penstock.wire.bodies.client_bodies import Body, DataVersion, TopicConfig, TopicList
from penstock.wire.bodies.table_bodies import TopicConfigSerializeWrapper
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    PERM_READ,
    PERM_READ_WRITE,
    PERM_WRITE,
    REPLY_TOPIC_SUFFIX,
    RETRY_TOPIC_PREFIX,
    TOPIC_AUTO_CREATE,
    RequestCode,
    ResponseCode,
    is_system_topic,
    topic_fault,
)

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"
"""The KV namespace with the queues of ordered topics."""
PAGE_TOPICS = 2_000
PAGES_MAX = 1_000
ROUTE_POLL_MS = 50
QUEUES_DEFAULT = 8

_FOUND = (ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST)
_PERMS = {"rw": PERM_READ_WRITE, "wr": PERM_READ_WRITE, "r": PERM_READ, "w": PERM_WRITE, "-": 0}

B = TypeVar("B", bound=Body)
T = TypeVar("T")


class TopicAdmin(KeyValueAdmin):
    """The part of `AsyncAdmin` about topics."""

    async def topic_names(self) -> list[str]:
        """The names of all registered topics, of the client's namespace if it has one."""
        answer = await self.ask_nameserver(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        names = fastjson.decode(answer.body, TopicList).topic_list
        return sorted(self.session.without_namespace(name) for name in names if self.is_ours(name))

    async def topics(
        self, *, kind: TopicKind | None = None, cluster: str | None = None
    ) -> list[TopicInfo]:
        """All topics with their settings on each broker that can be reached, sorted by name."""
        masters = await self.masters(cluster)
        own = _own_names(masters)
        tables = await self.from_each(masters, self._topic_table)
        found: dict[str, dict[str, TopicSettings]] = {}
        for broker, table in tables.items:
            for name, config in table.items():
                found.setdefault(name, {})[broker.name] = _settings(config)
        infos = [
            TopicInfo(self.session.without_namespace(name), kind_of(name, own), brokers)
            for name, brokers in sorted(found.items())
            if self.is_ours(name)
        ]
        return [info for info in infos if kind in (None, info.kind)]

    async def route(self, topic: str) -> Route:
        """The current route of a topic; raises NoRoute."""
        name = self.session.with_namespace(topic)
        route = await self.session.find_route(name)
        if route is None:
            raise await self.session.nameservers.no_route(name)
        return route

    async def create_topic(
        self,
        topic: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: str | int | None = None,
        order: bool | None = None,
        attributes: Mapping[str, str | None] | None = None,
        cluster: str | None = None,
        brokers: Iterable[str] = (),
    ) -> TopicInfo:
        """Create a topic on all masters, those of a cluster, or these brokers; or change it there.

        A setting that is not given gets RocketMQ's default (8 queues, `rw`) for a new topic, and is
        kept otherwise. `queues` sets read and write queues. `attributes` are RocketMQ's
        (`message.type`: NORMAL, FIFO, DELAY, TRANSACTION, PRIORITY, MIXED); None removes one.
        Returns when the topic is registered at the NameServers.
        """
        name = self.session.with_namespace(topic)
        fault = topic_fault(name)
        if fault is not None:
            raise InvalidParameter(f"{topic[:80]!r} is not a valid topic name: {fault}")
        masters = await self.masters(cluster, brokers)
        known = await self._settings_at(masters, name)
        settings = {}
        requests = []
        for master in masters:
            old = known.get(master.name)
            shape = old or TopicConfig(
                read_queue_nums=QUEUES_DEFAULT, write_queue_nums=QUEUES_DEFAULT
            )
            settings[master.name] = wanted = TopicSettings(
                read_queues=_first(read_queues, queues, shape.read_queue_nums),
                write_queues=_first(write_queues, queues, shape.write_queue_nums),
                perm=shape.perm if perm is None else _perm(perm),
                order=shape.order if order is None else order,
                attributes=shape.attributes,
            )
            fields = _create_fields(name, wanted, shape, attributes or {})
            requests.append((master, RequestCode.UPDATE_AND_CREATE_TOPIC, fields, b""))
        limited = bool(brokers or cluster)
        if order is False:  # first: a broker keeps the order while its queues are registered there
            await self._order_queues(name, dict.fromkeys(settings, 0), keep_others=limited)
        await self.change_each(requests)
        if order:
            counts = {broker: topic.write_queues for broker, topic in settings.items()}
            await self._order_queues(name, counts, keep_others=limited)
        await self._await_route(name, masters)
        return self._info(name, masters, await self._settings_at(masters, name))

    async def update_topic(
        self,
        topic: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: str | int | None = None,
        order: bool | None = None,
        attributes: Mapping[str, str | None] | None = None,
    ) -> TopicInfo:
        """Change the given settings on all brokers that have the topic; raises NoRoute."""
        name = self.session.with_namespace(topic)
        masters = await self.masters()
        known = await self._settings_at(masters, name)
        if not known:
            raise await self.session.nameservers.no_route(name)
        return await self.create_topic(
            topic,
            queues=queues,
            read_queues=read_queues,
            write_queues=write_queues,
            perm=perm,
            order=order,
            attributes=attributes,
            brokers=known,
        )

    async def topic_settings(
        self, topic: str, *, cluster: str | None = None, brokers: Iterable[str] = ()
    ) -> dict[str, TopicSettings]:
        """The settings by broker, of those that have the topic; all of them must respond."""
        name = self.session.with_namespace(topic)
        known = await self._settings_at(await self.masters(cluster, brokers), name)
        return {broker: _settings(config) for broker, config in known.items()}

    async def describe_topic(self, topic: str) -> TopicDescription:
        """A topic's settings, queues, routes and groups; raises NoRoute."""
        name = self.session.with_namespace(topic)
        masters = await self.masters()
        settings = await self.from_each(masters, lambda broker: self._settings_of(broker, name))
        known = {broker.name: found for broker, found in settings.items if found is not None}
        if not known:
            raise await self.session.nameservers.no_route(name)
        having = [broker for broker, found in settings.items if found is not None]
        stats = await self.ask_each(having, RequestCode.GET_TOPIC_STATS_INFO, {"topic": name})
        tables = [fastjson.decode(answer.body, TopicStatsTable) for _, answer in stats.items]
        queues = [
            QueueState(
                self.bare_queue(queue),
                ends.min_offset,
                ends.max_offset,
                ends.last_update_timestamp if ends.last_update_timestamp > 0 else None,
            )
            for table in tables
            for queue, ends in table.offset_table.items()
        ]
        route = await self.session.find_route(name)
        unreachable = {
            *settings.unreachable,
            *stats.unreachable,
            *await self.brokers_without_master(),
        }
        return TopicDescription(
            topic=self._info(name, masters, known),
            addresses=route.addresses if route is not None else {},
            queues=tuple(sorted(queues, key=lambda state: state.queue)),
            groups=tuple(await self.groups_of_topic(topic)),
            put_tps=None if unreachable else sum(table.topic_put_tps for table in tables),
            unreachable=tuple(sorted(unreachable)),
        )

    async def groups_of_topic(self, topic: str) -> list[str]:
        """The groups that subscribe to a topic or have offsets in it."""
        name = self.session.with_namespace(topic)
        found = await self.ask_each(
            await self.masters(), RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": name}
        )
        groups = {
            self.session.without_namespace(group)
            for _, answer in found.items
            for group in fastjson.decode(answer.body, GroupList).group_list
            if self.is_ours(group)
        }
        return sorted(groups)

    async def delete_topic(self, topic: str, *, cluster: str | None = None) -> list[str]:
        """Delete a topic with its messages from brokers and NameServers; the names of its brokers.

        Raises NoRoute if it does not exist. A broker that is down keeps it and registers it again.
        """
        name = self.session.with_namespace(topic)
        masters = await self.masters(cluster)
        known = await self._settings_at(masters, name)
        having = [broker for broker in masters if broker.name in known]
        if not having and await self.session.find_route(name) is None:
            raise await self.session.nameservers.no_route(name)
        await self.tell_each(having, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name})
        fields = {"topic": name, **({"clusterName": cluster} if cluster else {})}
        await self.session.nameservers.call_all(RequestCode.DELETE_TOPIC_IN_NAMESRV, fields)
        await self._order_queues(
            name, {broker.name: 0 for broker in masters}, keep_others=cluster is not None
        )
        return [broker.name for broker in having]

    # --- private

    async def _settings_of(self, broker: BrokerAddress, name: str) -> TopicConfig | None:
        answer = await self.ask(
            broker.address, RequestCode.GET_TOPIC_CONFIG, {"topic": name}, good=_FOUND
        )
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        return fastjson.decode(answer.body, TopicConfigAndQueueMapping)

    async def _settings_at(
        self, brokers: Sequence[BrokerAddress], name: str
    ) -> dict[str, TopicConfig]:
        """The topic on each of these brokers that has it; all of them must respond."""
        found = await self.for_each(brokers, lambda broker: self._settings_of(broker, name))
        return {
            broker.name: config
            for broker, config in zip(brokers, found, strict=True)
            if config is not None
        }

    async def _topic_table(self, broker: BrokerAddress) -> Mapping[str, TopicConfig]:
        return await read_pages(
            self,
            broker,
            RequestCode.GET_ALL_TOPIC_CONFIG,
            TopicConfigSerializeWrapper,
            "Topic",
            lambda page: (page.topic_config_table, page.data_version),
        )

    def _info(
        self, name: str, masters: Iterable[BrokerAddress], known: Mapping[str, TopicConfig]
    ) -> TopicInfo:
        brokers = {broker: _settings(config) for broker, config in known.items()}
        kind = kind_of(name, _own_names(masters))
        return TopicInfo(self.session.without_namespace(name), kind, brokers)

    async def _order_queues(
        self, name: str, counts: Mapping[str, int], *, keep_others: bool
    ) -> None:
        """Register the queues of an ordered topic, which do not depend on the brokers that are up.

        A broker with a count of 0 is removed; so are brokers without a count unless `keep_others`.
        """
        old = await self.kv(ORDER_NAMESPACE, name)
        registered: dict[str, str] = {}
        for piece in (old or "").split(";") if keep_others else ():
            broker, colon, count = piece.partition(":")
            if colon:
                registered[broker] = count
        registered |= {broker: str(count) for broker, count in counts.items()}
        text = ";".join(f"{broker}:{count}" for broker, count in registered.items() if count != "0")
        if text:
            await self.put_kv(ORDER_NAMESPACE, name, text)
        elif old is not None:
            await self.delete_kv(ORDER_NAMESPACE, name)

    async def _await_route(self, name: str, masters: Iterable[BrokerAddress]) -> None:
        """Wait until the topic is registered at the NameServers, which the brokers do."""
        wanted = {broker.name for broker in masters}
        clock = self.session.clock
        deadline_ms = clock.now_ms() + self.session.options.timeout_ms
        while clock.now_ms() < deadline_ms:
            route = await self.session.find_route(name)
            if route is not None and wanted <= set(route.brokers):
                return
            await pause(clock, ROUTE_POLL_MS)


def kind_of(name: str, own_names: Iterable[str] = ()) -> TopicKind:
    """The kind of a topic; `own_names` are the names of clusters and brokers."""
    if name.startswith(RETRY_TOPIC_PREFIX):
        return TopicKind.RETRY
    if name.startswith(DLQ_TOPIC_PREFIX):
        return TopicKind.DLQ
    if is_system_topic(name) or name.removesuffix(REPLY_TOPIC_SUFFIX) in own_names:
        return TopicKind.SYSTEM
    return TopicKind.NORMAL


async def read_pages(
    admin: AdminCore,
    broker: BrokerAddress,
    code: int,
    kind: type[B],
    noun: str,
    entries_of: Callable[[B], tuple[Mapping[str, T], DataVersion]],
) -> dict[str, T]:
    """A table of a broker, read page by page; starts again if it changes."""
    found: dict[str, T] = {}
    version: DataVersion | None = None
    for _ in range(PAGES_MAX):
        fields = {
            f"{noun.lower()}Seq": str(len(found)),
            f"max{noun}Num": str(PAGE_TOPICS),
            "dataVersion": fastjson.encode(version).decode() if version is not None else "",
        }
        answer = await admin.ask(broker.address, code, fields)
        entries, new_version = entries_of(fastjson.decode(answer.body, kind))
        if version is not None and new_version != version:
            found = {}
        version = new_version
        found.update(entries)
        total = answer.ext.get(f"total{noun}Num", "")
        if not total.isdecimal() or len(found) >= int(total) or not entries:
            return found
    raise SystemBusy(
        f"the table of the broker {broker.name} is not complete after {PAGES_MAX} pages",
        hint="it changes all the time, or it is too large: ask for single topics and groups",
    )


def _own_names(brokers: Iterable[BrokerAddress]) -> set[str]:
    return {name for broker in brokers for name in (broker.cluster, broker.name)}


def _settings(config: TopicConfig) -> TopicSettings:
    return TopicSettings(
        read_queues=config.read_queue_nums,
        write_queues=config.write_queue_nums,
        perm=config.perm,
        order=config.order,
        attributes=dict(config.attributes),
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _perm(perm: str | int) -> int:
    if isinstance(perm, int):
        return perm
    if perm not in _PERMS:
        raise InvalidParameter(f"{perm!r} is not a permission", hint="use rw, r, w or -")
    return _PERMS[perm]


def _create_fields(
    name: str, wanted: TopicSettings, shape: TopicConfig, attributes: Mapping[str, str | None]
) -> dict[str, str]:
    changes = [
        f"-{key}" if value is None else f"+{key}={value}" for key, value in attributes.items()
    ]
    return {
        "topic": name,
        "defaultTopic": TOPIC_AUTO_CREATE,
        "readQueueNums": str(wanted.read_queues),
        "writeQueueNums": str(wanted.write_queues),
        "perm": str(wanted.perm),
        "topicFilterType": shape.topic_filter_type,
        "topicSysFlag": str(shape.topic_sys_flag),
        "order": "true" if wanted.order else "false",
        "attributes": ",".join(changes),
    }
